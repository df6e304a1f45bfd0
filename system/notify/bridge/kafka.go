package bridge

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"mailproof/system/failpoint"
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
		// A group without a commit starts with the oldest event: a mail too
		// many is absorbed by the row, a mail too few by nothing.
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.OnPartitionsAssigned(func(_ context.Context, _ *kgo.Client, got map[string][]int32) { c.assigned(got) }),
		kgo.OnPartitionsLost(func(_ context.Context, _ *kgo.Client, _ map[string][]int32) { c.joined.Store(false) }),
	)
	if err != nil {
		return fmt.Errorf("kafka client: %w", err)
	}
	defer client.CloseAllowingRebalance()
	for ctx.Err() == nil {
		c.poll(ctx, client)
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

func (c *Consumer) poll(ctx context.Context, client *kgo.Client) {
	defer client.AllowRebalance()
	fetches := client.PollRecords(ctx, c.cfg.Batch)
	if ctx.Err() != nil {
		return
	}
	fetches.EachError(func(topic string, partition int32, err error) {
		if !errors.Is(err, context.Canceled) {
			c.cfg.Log.Warn("waiting for Kafka", "topic", topic, "partition", partition, "error", err)
		}
	})
	kafka := fetches.Records()
	if len(kafka) == 0 {
		return
	}
	records := make([]Record, len(kafka))
	for i, r := range kafka {
		records[i] = Record{Topic: r.Topic, Partition: r.Partition, Offset: r.Offset, Key: r.Key, Value: r.Value}
	}
	if err := c.bridge.Process(ctx, records); err != nil {
		return // ctx ended: not committed, read again
	}
	c.commit(ctx, client, kafka)
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
