package faults

import (
	"context"
	"fmt"

	"github.com/twmb/franz-go/pkg/kgo"
)

// DuplicateRecords produces every record of a topic again, Copies times, byte
// for byte: what a relay that died between publish and mark does, or a producer
// without idempotence (A2-08, AC1).
type DuplicateRecords struct {
	Brokers []string
	Topic   string
	Copies  int // beyond the original

	tail *tail
}

// Name of the fault.
func (*DuplicateRecords) Name() string { return "duplicate-records" }

// Target is the topic.
func (d *DuplicateRecords) Target() string { return "topic " + d.Topic }

// Available everywhere.
func (*DuplicateRecords) Available() error { return nil }

// Inject starts to follow the topic from its end.
func (d *DuplicateRecords) Inject(ctx context.Context) error {
	var err error
	d.tail, err = startTail(ctx, d.Brokers, d.Topic, "duplicator", func(r *kgo.Record) ([]*kgo.Record, error) {
		if isForeign(r) {
			return nil, nil
		}
		copies := make([]*kgo.Record, d.Copies)
		for i := range copies {
			copies[i] = &kgo.Record{Topic: d.Topic, Key: r.Key, Value: r.Value, Headers: r.Headers}
		}
		return copies, nil
	})
	return err
}

// Heal follows the topic up to its present end and stops.
func (d *DuplicateRecords) Heal(ctx context.Context) error { return d.tail.finish(ctx) }

// Witness counts, in the whole topic read from offset 0, the records that are
// there at least 1 + Copies times, and checks that every consumer group has
// read to the end: a copy that nobody read proves nothing.
func (d *DuplicateRecords) Witness(ctx context.Context) (Witness, error) {
	records, err := readTopic(ctx, d.Brokers, d.Topic)
	if err != nil {
		return Witness{}, err
	}
	if err := allRead(ctx, d.Brokers, d.Topic); err != nil {
		return Witness{}, err
	}
	times := map[string]int{}
	for _, r := range records {
		if d.tail.after(r) && !isForeign(r) {
			times[identity(r)]++
		}
	}
	short := 0
	for _, n := range times {
		if n <= d.Copies {
			short++
		}
	}
	switch {
	case len(times) == 0:
		return Witness{}, nil
	case short > 0:
		return Witness{}, fmt.Errorf("%d of %d records stand in %s fewer than %d times", short, len(times), d.Topic, d.Copies+1)
	}
	return Witness{
		Text:  fmt.Sprintf("each of %d records stands in %s %d times, byte for byte, and every group has read them", len(times), d.Topic, d.Copies+1),
		Count: len(times),
	}, nil
}
