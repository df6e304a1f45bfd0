package faults

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// tail follows a topic and answers each record that it sees for the first time
// with records of its own.
type tail struct {
	client *kgo.Client
	topic  string
	answer func(*kgo.Record) ([]*kgo.Record, error)
	known  map[string]bool
	from   map[int32]int64 // where it began, per partition
	next   map[int32]int64 // offset after the last record seen, per partition
	mu     sync.Mutex      // guards next
	failed atomic.Pointer[error]
	stop   context.CancelFunc
	done   chan struct{}
}

func startTail(ctx context.Context, brokers []string, topic, name string, answer func(*kgo.Record) ([]*kgo.Record, error)) (*tail, error) {
	ends, err := endOffsets(ctx, brokers, topic)
	if err != nil {
		return nil, err
	}
	from := map[int32]kgo.Offset{}
	next := map[int32]int64{}
	for p, o := range ends {
		from[p], next[p] = kgo.NewOffset().At(o), o
	}
	client, err := kgo.NewClient(
		kgo.SeedBrokers(brokers...), kgo.ClientID(name),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: from}),
		kgo.RequiredAcks(kgo.AllISRAcks()),
	)
	if err != nil {
		return nil, fmt.Errorf("following topic %s: %w", topic, err)
	}
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	t := &tail{client: client, topic: topic, answer: answer, known: map[string]bool{}, from: ends, next: next, stop: stop, done: make(chan struct{})}
	go t.run(run)
	return t, nil
}

func (t *tail) run(ctx context.Context) {
	defer close(t.done)
	for {
		fetches := t.client.PollFetches(ctx)
		if ctx.Err() != nil {
			return
		}
		var out []*kgo.Record
		fetches.EachRecord(func(r *kgo.Record) {
			if id := identity(r); !t.known[id] {
				t.known[id] = true
				answers, err := t.answer(r)
				if err != nil {
					err = fmt.Errorf("record %s/%d@%d: %w", r.Topic, r.Partition, r.Offset, err)
					t.failed.CompareAndSwap(nil, &err)
				}
				for _, a := range answers {
					t.known[identity(a)] = true
				}
				out = append(out, answers...)
			}
		})
		if err := t.client.ProduceSync(ctx, out...).FirstErr(); err != nil && ctx.Err() == nil {
			err = fmt.Errorf("producing into %s: %w", t.topic, err)
			t.failed.CompareAndSwap(nil, &err)
		}
		t.mu.Lock()
		fetches.EachRecord(func(r *kgo.Record) { t.next[r.Partition] = r.Offset + 1 })
		t.mu.Unlock()
	}
}

// finish waits until every record that stands in the topic now has been
// answered, then stops.
func (t *tail) finish(ctx context.Context) error {
	if t == nil {
		return nil
	}
	defer func() {
		t.stop()
		<-t.done
		t.client.Close()
	}()
	ends, err := kadm.NewClient(t.client).ListEndOffsets(ctx, t.topic)
	if err != nil {
		return fmt.Errorf("end of topic %s: %w", t.topic, err)
	}
	for !t.reached(ends) {
		if err := t.failed.Load(); err != nil {
			return *err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("following topic %s to its end: %w", t.topic, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
	if err := t.failed.Load(); err != nil {
		return *err
	}
	return nil
}

// after reports whether the record came after the tail had begun; a nil tail
// (a fault that was never injected) has seen nothing.
func (t *tail) after(r *kgo.Record) bool { return t != nil && r.Offset >= t.from[r.Partition] }

func (t *tail) reached(ends kadm.ListedOffsets) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for p, next := range t.next {
		if o, ok := ends.Lookup(t.topic, p); ok && next < o.Offset {
			return false
		}
	}
	return true
}

// identity of a record's bytes.
func identity(r *kgo.Record) string { return string(r.Key) + "\x00" + string(r.Value) }

func endOffsets(ctx context.Context, brokers []string, topic string) (map[int32]int64, error) {
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...))
	if err != nil {
		return nil, fmt.Errorf("topic %s: %w", topic, err)
	}
	defer client.Close()
	listed, err := kadm.NewClient(client).ListEndOffsets(ctx, topic)
	if err != nil {
		return nil, fmt.Errorf("end of topic %s: %w", topic, err)
	}
	ends := map[int32]int64{}
	var broken error
	listed.Each(func(o kadm.ListedOffset) {
		if o.Err != nil {
			broken = fmt.Errorf("end of topic %s, partition %d: %w", topic, o.Partition, o.Err)
		}
		ends[o.Partition] = o.Offset
	})
	return ends, broken
}

// readTopic reads every record that stands in the topic now.
func readTopic(ctx context.Context, brokers []string, topic string) ([]*kgo.Record, error) {
	ends, err := endOffsets(ctx, brokers, topic)
	if err != nil {
		return nil, err
	}
	from := map[int32]kgo.Offset{}
	left := map[int32]int64{}
	for p, end := range ends {
		if end > 0 {
			from[p], left[p] = kgo.NewOffset().At(0), end
		}
	}
	if len(left) == 0 {
		return nil, nil
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: from}))
	if err != nil {
		return nil, fmt.Errorf("reading topic %s: %w", topic, err)
	}
	defer client.Close()
	var records []*kgo.Record
	for len(left) > 0 {
		fetches := client.PollFetches(ctx)
		if err := errors.Join(ctx.Err(), fetches.Err()); err != nil {
			return nil, fmt.Errorf("reading topic %s: %w", topic, err)
		}
		fetches.EachRecord(func(r *kgo.Record) {
			if r.Offset < ends[r.Partition] {
				records = append(records, r)
			}
			if r.Offset+1 >= left[r.Partition] {
				delete(left, r.Partition)
			}
		})
	}
	return records, nil
}

// allRead returns an error unless at least one consumer group reads the topic
// and each has committed its end.
func allRead(ctx context.Context, brokers []string, topic string) error {
	lag, groups, err := GroupLag(ctx, brokers, topic)
	switch {
	case err != nil:
		return err
	case groups == 0:
		return fmt.Errorf("no consumer group has committed an offset of topic %s", topic)
	case lag > 0:
		return fmt.Errorf("%d records of topic %s have not been read by their consumer groups", lag, topic)
	}
	return nil
}

// GroupLag is the number of records of topic that consumer groups have not
// committed yet, and the number of groups that read it.
func GroupLag(ctx context.Context, brokers []string, topic string) (lag int64, groups int, err error) {
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...))
	if err != nil {
		return 0, 0, fmt.Errorf("lag of topic %s: %w", topic, err)
	}
	defer client.Close()
	admin := kadm.NewClient(client)
	ends, err := admin.ListEndOffsets(ctx, topic)
	if err != nil {
		return 0, 0, fmt.Errorf("end of topic %s: %w", topic, err)
	}
	listed, err := admin.ListGroups(ctx)
	if err != nil {
		return 0, 0, fmt.Errorf("consumer groups: %w", err)
	}
	for _, fetched := range admin.FetchManyOffsets(ctx, listed.Groups()...) {
		if fetched.Err != nil {
			return 0, 0, fmt.Errorf("offsets of group %s: %w", fetched.Group, fetched.Err)
		}
		committed, reads := fetched.Fetched[topic]
		if !reads {
			continue
		}
		groups++
		for p, end := range ends[topic] {
			at := int64(0)
			if c, ok := committed[p]; ok && c.At > 0 {
				at = c.At
			}
			lag += max(0, end.Offset-at)
		}
	}
	return lag, groups, nil
}
