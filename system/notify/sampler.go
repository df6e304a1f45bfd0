package notify

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"mailproof/system/contract"
	"mailproof/system/delivery"
	"mailproof/system/notify/metrics"
	"mailproof/system/notify/patience"
	"mailproof/system/notify/sweeper"
	"mailproof/system/observe"
)

const (
	// sampleEvery is how old a sampled gauge is at most. Sampling goes on at its
	// own pace, so that the number of scrapers costs the database nothing.
	sampleEvery = 5 * time.Second
	sampleLimit = 5 * time.Second // of one source
)

// sampler shows what only the database and the brokers know. A source that does
// not answer takes its gauges away and does not hold up the others.
type sampler struct {
	metrics *metrics.Set
	store   *delivery.Store
	pool    *pgxpool.Pool
	depth   *sweeper.BrokerDepth // of its own: its questions wait for each other
	lag     observe.Lag
	types   []contract.MailType
}

func newSampler(s *service) *sampler {
	return &sampler{
		metrics: s.metrics, store: s.store, pool: s.pool, depth: &sweeper.BrokerDepth{URLs: s.cfg.AMQPURLs},
		lag: observe.Lag{
			Brokers: s.cfg.KafkaBrokers, Group: s.cfg.KafkaGroup, Topic: s.cfg.KafkaTopic,
			ClientID: "notifyd-" + s.cfg.Instance + "-lag",
		},
		types: []contract.MailType{contract.TicketConfirmation, contract.Marketing},
	}
}

func (s *sampler) close() {
	s.depth.Close()
	s.lag.Close()
}

// run samples until ctx ends.
func (s *sampler) run(ctx context.Context) {
	for {
		s.round(ctx)
		if patience.Sleep(ctx, sampleEvery) != nil {
			return
		}
	}
}

func (s *sampler) round(ctx context.Context) {
	s.sample(ctx, "database", s.rows, metrics.MailsWaiting, metrics.MailsDue, metrics.OldestDue, metrics.MailsSending, metrics.LeasesOver,
		metrics.MailsUnknown, metrics.OldestUnknown, metrics.MailsDead, metrics.DeadUnstamped, metrics.ParkedEvents)
	s.sample(ctx, "rabbitmq", s.queues, metrics.QueueMessages, metrics.QueueConsumers)
	s.sample(ctx, "kafka", s.events, metrics.KafkaLag)
}

func (s *sampler) sample(ctx context.Context, source string, take func(context.Context) error, gauges ...string) {
	limited, cancel := context.WithTimeout(ctx, sampleLimit)
	defer cancel()
	if err := take(limited); err != nil && ctx.Err() == nil {
		s.metrics.SampleFailed(source, gauges...)
	}
}

func (s *sampler) rows(ctx context.Context) error {
	for _, t := range s.types {
		c, err := s.store.Count(ctx, t)
		if err != nil {
			return err
		}
		for gauge, v := range map[string]float64{
			metrics.MailsWaiting: float64(c.Waiting), metrics.MailsDue: float64(c.Due), metrics.OldestDue: c.OldestDue.Seconds(),
			metrics.MailsSending: float64(c.Sending), metrics.LeasesOver: float64(c.LeasesOver),
			metrics.MailsUnknown: float64(c.Unknown), metrics.OldestUnknown: c.OldestUnknown.Seconds(),
			metrics.MailsDead: float64(c.Dead), metrics.DeadUnstamped: float64(c.Unstamped),
		} {
			s.metrics.Sample(gauge, v, t.Lane())
		}
	}
	var parked int64
	if err := s.pool.QueryRow(ctx, `SELECT count(*) FROM parked_events`).Scan(&parked); err != nil {
		return fmt.Errorf("count parked events: %w", err)
	}
	s.metrics.Sample(metrics.ParkedEvents, float64(parked))
	return nil
}

func (s *sampler) queues(ctx context.Context) error {
	names := []string{contract.QueueDLQ}
	for _, t := range s.types {
		names = append(names, t.Queue())
	}
	for _, q := range names {
		ready, consumers, err := s.depth.Depth(ctx, q)
		if err != nil {
			return err
		}
		s.metrics.Sample(metrics.QueueMessages, float64(ready), q)
		s.metrics.Sample(metrics.QueueConsumers, float64(consumers), q)
	}
	return nil
}

func (s *sampler) events(ctx context.Context) error {
	lag, err := s.lag.Ask(ctx)
	if err != nil {
		return err
	}
	for partition, n := range lag {
		s.metrics.Sample(metrics.KafkaLag, float64(n), strconv.Itoa(int(partition)))
	}
	return nil
}
