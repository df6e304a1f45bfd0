package booking

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/twmb/franz-go/pkg/kgo"

	"mailproof/system/contract"
	"mailproof/system/failpoint"
	"mailproof/system/kafka"
	"mailproof/system/observe"
)

// Crash points between read, written and committed offsets.
const (
	fpHeard     = "mailevents.after-poll"
	fpNoted     = "mailevents.after-write"
	fpCommitted = "mailevents.after-commit"
)

// MailEventsConfig of a [MailEvents].
type MailEventsConfig struct {
	Brokers []string
	Topic   string
	Group   string
	// Instance names this process in Kafka's tools.
	Instance string
	Mails    Mails
	Log      *slog.Logger
	// Timeout of one write.
	Timeout time.Duration
	// SessionTimeout: a process that is silent for longer loses its partitions.
	// 0 means Kafka's own default of 45 s.
	SessionTimeout time.Duration
}

// MailEvents listens to the mail service. Offsets are committed after what they
// cover is in the table: a crash reads again, which changes nothing. An event
// that cannot be read is counted, logged and left behind: the mail it is about
// stays as it was last known, and the partition goes on (A2-12).
type MailEvents struct {
	cfg   MailEventsConfig
	heard *prometheus.CounterVec
	lag   *prometheus.GaugeVec
}

// NewMailEvents makes a listener and registers its metric.
func NewMailEvents(cfg MailEventsConfig, reg prometheus.Registerer) *MailEvents {
	m := &MailEvents{cfg: cfg, heard: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "booking_mail_events_total", Help: "Mail events by result: noted, undecodable.",
	}, []string{"result"})}
	m.lag = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "booking_mail_events_lag", Help: "Mail events that this group has not committed; absent while Kafka does not tell.",
	}, []string{"partition"})
	reg.MustRegister(m.heard, m.lag)
	return m
}

// WatchLag shows how far the group is behind, until ctx ends.
func (m *MailEvents) WatchLag(ctx context.Context) {
	lag := observe.Lag{
		Brokers: m.cfg.Brokers, Group: m.cfg.Group, Topic: m.cfg.Topic, ClientID: "bookingd-" + m.cfg.Instance + "-lag",
	}
	defer lag.Close()
	for {
		m.askLag(ctx, &lag)
		select {
		case <-ctx.Done():
			return
		case <-time.After(lagEvery):
		}
	}
}

func (m *MailEvents) askLag(ctx context.Context, lag *observe.Lag) {
	ctx, cancel := context.WithTimeout(ctx, lagEvery)
	defer cancel()
	behind, err := lag.Ask(ctx)
	if err != nil {
		m.lag.Reset()
		return
	}
	for partition, n := range behind {
		m.lag.WithLabelValues(strconv.Itoa(int(partition))).Set(float64(n))
	}
}

const (
	hearAgainFirst = 100 * time.Millisecond
	hearAgainMost  = 5 * time.Second
	// fetchLimit bounds one write.
	fetchLimit = 500
	// commitLimit bounds one commit; one that fails is made good by the next.
	commitLimit = 5 * time.Second
	// lagEvery is how often the lag is asked for.
	lagEvery = 5 * time.Second
)

// Run listens until ctx ends. A topic that does not exist yet is waited for.
func (m *MailEvents) Run(ctx context.Context) error {
	session := m.cfg.SessionTimeout
	if session == 0 {
		session = 45 * time.Second
	}
	client, err := kgo.NewClient(
		kgo.SeedBrokers(m.cfg.Brokers...), kgo.ClientID("bookingd-"+m.cfg.Instance),
		kgo.ConsumerGroup(m.cfg.Group), kgo.ConsumeTopics(m.cfg.Topic),
		// A static member: a process that was killed and comes back takes its
		// own place at once. As a new member it would wait in the join until its
		// dead self's session is over, and a stop would wait with it.
		kgo.InstanceID("bookingd-"+m.cfg.Instance),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.DisableAutoCommit(), kgo.BlockRebalanceOnPoll(),
		kgo.FetchMaxWait(time.Second),
		kgo.SessionTimeout(session), kgo.HeartbeatInterval(min(session/3, 3*time.Second)),
	)
	if err != nil {
		return fmt.Errorf("mail events: %w", err)
	}
	defer kafka.Leave(client, kafka.LeaveLimit)
	for ctx.Err() == nil {
		m.poll(ctx, client)
	}
	return nil
}

func (m *MailEvents) poll(ctx context.Context, client *kgo.Client) {
	defer client.AllowRebalance()
	fetches := client.PollRecords(ctx, fetchLimit)
	fetches.EachError(func(topic string, partition int32, err error) {
		if !errors.Is(err, context.Canceled) {
			m.cfg.Log.WarnContext(ctx, "mail events not read, the client goes on", "topic", topic, "partition", partition, "err", err)
		}
	})
	records := fetches.Records()
	if len(records) == 0 {
		return
	}
	failpoint.At(fpHeard)
	if err := m.hear(ctx, records); err != nil {
		return // ctx ended: nothing is committed
	}
	failpoint.At(fpNoted)
	commit, cancel := context.WithTimeout(context.WithoutCancel(ctx), commitLimit)
	defer cancel()
	if err := client.CommitRecords(commit, records...); err != nil {
		m.cfg.Log.WarnContext(ctx, "offsets of mail events not committed, they will be read again", "err", err)
		return
	}
	failpoint.At(fpCommitted)
}

// hear writes until the database takes it, or ctx ends.
func (m *MailEvents) hear(ctx context.Context, records []*kgo.Record) error {
	events := m.decode(ctx, records)
	if len(events) == 0 {
		return nil
	}
	for wait := hearAgainFirst; ; wait = min(2*wait, hearAgainMost) {
		err := m.write(ctx, events)
		if err == nil {
			m.heard.WithLabelValues("noted").Add(float64(len(events)))
			m.note(ctx, events)
			return nil
		}
		m.cfg.Log.WarnContext(ctx, "mail events wait for the database", "events", len(events), "err", err)
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		case <-t.C:
		}
	}
}

// note logs what was heard (OB-13).
func (m *MailEvents) note(ctx context.Context, events []contract.MailEvent) {
	for _, e := range events {
		m.cfg.Log.InfoContext(ctx, "mail event", "dedupe_key", e.DedupeKey, "event_id", e.EventID, "event_type", string(e.EventType),
			"attempts", e.Attempts, "provider_id", e.ProviderID)
	}
}

func (m *MailEvents) write(ctx context.Context, events []contract.MailEvent) error {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.Timeout)
	defer cancel()
	return m.cfg.Mails.Hear(ctx, events)
}

func (m *MailEvents) decode(ctx context.Context, records []*kgo.Record) []contract.MailEvent {
	events := make([]contract.MailEvent, 0, len(records))
	for _, r := range records {
		e, err := contract.DecodeMailEvent(r.Value)
		if err != nil {
			m.heard.WithLabelValues("undecodable").Inc()
			m.cfg.Log.ErrorContext(ctx, "mail event that nobody here can read, left behind", "alert", "undecodable_mail_event",
				"topic", r.Topic, "partition", r.Partition, "offset", r.Offset, "err", err)
			continue
		}
		events = append(events, e)
	}
	return events
}
