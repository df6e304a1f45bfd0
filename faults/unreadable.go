package faults

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// UnreadableRecords produces, at a steady pace and to each partition in turn,
// records that no consumer can read: no JSON, JSON of another shape, an unknown
// version (TRAP-2-5, TRAP-2-6).
type UnreadableRecords struct {
	Brokers []string
	Topic   string
	// Bodies are produced in turn.
	Bodies [][]byte
	// Every is the pause between two, Count how many there are.
	Every time.Duration
	Count int

	done chan struct{}
	stop context.CancelFunc

	mu   sync.Mutex
	made int
	err  error
}

// unreadableHeader marks the records of [UnreadableRecords].
const unreadableHeader = "mailproof-unreadable"

// Name of the fault.
func (*UnreadableRecords) Name() string { return "unreadable-records" }

// Target is the topic.
func (u *UnreadableRecords) Target() string { return "topic " + u.Topic }

// Available everywhere.
func (*UnreadableRecords) Available() error { return nil }

// Done is closed after the last record.
func (u *UnreadableRecords) Done() <-chan struct{} { return u.done }

// Progress counts the records that the broker has acknowledged.
func (u *UnreadableRecords) Progress() (struck, of int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.made, u.Count
}

// Inject begins to produce.
func (u *UnreadableRecords) Inject(ctx context.Context) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(u.Brokers...), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		return fmt.Errorf("unreadable records: %w", err)
	}
	ends, err := kadm.NewClient(client).ListEndOffsets(ctx, u.Topic)
	if err == nil {
		err = ends.Error()
	}
	if err != nil {
		client.Close()
		return fmt.Errorf("unreadable records: %w", err)
	}
	u.done = make(chan struct{})
	ctx, u.stop = context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		defer close(u.done)
		defer client.Close()
		u.produce(ctx, client, len(ends[u.Topic]))
	}()
	return nil
}

func (u *UnreadableRecords) produce(ctx context.Context, client *kgo.Client, partitions int) {
	tick := time.NewTicker(u.Every)
	defer tick.Stop()
	for i := range u.Count {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		err := client.ProduceSync(ctx, &kgo.Record{
			Topic: u.Topic, Partition: int32(i % partitions), Value: u.Bodies[i%len(u.Bodies)],
			Headers: []kgo.RecordHeader{{Key: unreadableHeader, Value: []byte("1")}},
		}).FirstErr()
		u.mu.Lock()
		if err == nil {
			u.made++
		} else if u.err == nil {
			u.err = err
		}
		u.mu.Unlock()
	}
}

// Heal stops it.
func (u *UnreadableRecords) Heal(ctx context.Context) error {
	if u.stop == nil {
		return nil
	}
	u.stop()
	select {
	case <-u.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Witness counts the records in the topic read from offset 0. Whether they were
// read past is the judge's to say: a system that stops at the first is the finding.
func (u *UnreadableRecords) Witness(ctx context.Context) (Witness, error) {
	records, err := readTopic(ctx, u.Brokers, u.Topic)
	if err != nil {
		return Witness{}, err
	}
	found, partitions := 0, map[int32]bool{}
	for _, r := range records {
		for _, h := range r.Headers {
			if h.Key == unreadableHeader {
				found++
				partitions[r.Partition] = true
			}
		}
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if found == 0 || u.err != nil {
		return Witness{}, u.err
	}
	return Witness{Text: fmt.Sprintf("%d records that nobody can read stand in %d partitions of %s", found, len(partitions), u.Topic), Count: found}, nil
}
