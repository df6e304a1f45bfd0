package bridge

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"mailproof/system/failpoint"
	"mailproof/system/kafka"
	"mailproof/system/notify/patience"
)

// KafkaConfig of the consumer.
type KafkaConfig struct {
	Brokers []string
	Topic   string
	Group   string
	// Instance is the static member's name: a process that was killed and comes
	// back under it takes its partitions at once.
	Instance       string
	SessionTimeout time.Duration
	// Batch is the number of records of one poll at most, 0 means 500.
	Batch int
	// Retry waits for a Kafka that is away.
	Retry patience.Retrier
	Log   *slog.Logger
}

// Consumer polls the topic and hands batches to a bridge.
type Consumer struct {
	cfg    KafkaConfig
	bridge *Bridge
	joined atomic.Bool
	ready  chan struct{}
}

// NewConsumer makes a consumer; Run connects it.
func NewConsumer(cfg KafkaConfig, b *Bridge) *Consumer {
	if cfg.Batch <= 0 {
		cfg.Batch = 500
	}
	return &Consumer{cfg: cfg, bridge: b, ready: make(chan struct{})}
}

// Ready is closed when this member has joined its group for the first time.
func (c *Consumer) Ready() <-chan struct{} { return c.ready }

// Joined reports whether this member belongs to the group.
func (c *Consumer) Joined() bool { return c.joined.Load() }

// Run polls until ctx ends. Automatic commits are off: each batch is committed
// after it is processed, whole, and rebalances wait for that (a batch is never
// in two members' hands unless one of them was declared dead, and then its
// commit is refused).
func (c *Consumer) Run(ctx context.Context) error {
	client, err := kgo.NewClient(
		kgo.SeedBrokers(c.cfg.Brokers...),
		kgo.ConsumerGroup(c.cfg.Group),
		kgo.ConsumeTopics(c.cfg.Topic),
		kgo.InstanceID("notifyd-"+c.cfg.Instance),
		kgo.ClientID("notifyd-"+c.cfg.Instance),
		kgo.SessionTimeout(c.cfg.SessionTimeout),
		kgo.HeartbeatInterval(min(c.cfg.SessionTimeout/3, 3*time.Second)),
		kgo.DisableAutoCommit(),
		kgo.BlockRebalanceOnPoll(),
		// A topic that is made after the start must not stay unseen for the
		// default of five minutes.
		kgo.MetadataMaxAge(10*time.Second),
		// After a leader change the new one is looked for at this pace; the
		// default of 5 s would be the outage.
		kgo.MetadataMinAge(250*time.Millisecond),
		// One fetch at a time is asked of a broker. The first one after a restart
		// can go out before the offsets of all partitions are known, and while it
		// waits for data the others are not read: with the default of 5 s that
		// was seen between a restart and its first event.
		kgo.FetchMaxWait(500*time.Millisecond),
		// A group without a commit starts with the oldest event: a mail too
		// many is absorbed by the row, a mail too few by nothing.
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.OnPartitionsAssigned(func(_ context.Context, _ *kgo.Client, got map[string][]int32) { c.assigned(got) }),
		kgo.OnPartitionsLost(func(_ context.Context, _ *kgo.Client, _ map[string][]int32) { c.joined.Store(false) }),
	)
	if err != nil {
		return fmt.Errorf("kafka client: %w", err)
	}
	defer func() {
		if !kafka.Leave(client, kafka.LeaveLimit) {
			c.cfg.Log.Warn("the Kafka group was not left in time, the broker will notice by itself", "group", c.cfg.Group)
		}
	}()
	if err := c.cfg.Retry.Do(ctx, "connect to Kafka", nil, client.Ping); err != nil {
		return nil // ctx ended
	}
	for failures := 0; ctx.Err() == nil; {
		if c.poll(ctx, client) {
			failures = 0
			continue
		}
		// Polling returns errors at once: without a pause they would be a loop.
		failures++
		_ = patience.Sleep(ctx, c.cfg.Retry.Backoff.After(failures))
	}
	return nil
}

// assigned is called at the end of each rebalance, also with nothing for us: a
// member more than there are partitions stands by, and is ready.
func (c *Consumer) assigned(got map[string][]int32) {
	c.joined.Store(true)
	select {
	case <-c.ready:
	default:
		close(c.ready)
	}
	c.cfg.Log.Info("partitions assigned", "topic", c.cfg.Topic, "partitions", fmt.Sprint(got[c.cfg.Topic]))
}

// poll carries one batch. It returns false when Kafka gave errors and nothing
// else.
func (c *Consumer) poll(ctx context.Context, client *kgo.Client) bool {
	defer client.AllowRebalance()
	fetches := client.PollRecords(ctx, c.cfg.Batch)
	if ctx.Err() != nil {
		return true
	}
	failed := false
	fetches.EachError(func(topic string, partition int32, err error) {
		failed = true
		c.cfg.Log.Warn("waiting for Kafka", "topic", topic, "partition", partition, "error", err)
	})
	fetched := fetches.Records()
	if len(fetched) == 0 {
		return !failed
	}
	records := make([]Record, len(fetched))
	for i, r := range fetched {
		records[i] = Record{Topic: r.Topic, Partition: r.Partition, Offset: r.Offset, Key: r.Key, Value: r.Value}
	}
	if err := c.bridge.Process(ctx, records); err != nil {
		return true // ctx ended: not committed, read again
	}
	c.commit(ctx, client, fetched)
	return true
}

// commit is not repeated: the next batch's commit covers it, and until then a
// crash only means that stamped rows are looked at again.
func (c *Consumer) commit(ctx context.Context, client *kgo.Client, records []*kgo.Record) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := client.CommitRecords(ctx, records...); err != nil && ctx.Err() == nil {
		c.cfg.Log.Warn("offsets not committed, the events will be read again", "error", err)
		return
	}
	failpoint.At(fpAfterCommit)
}
