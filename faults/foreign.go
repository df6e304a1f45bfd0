package faults

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kgo"
)

// ForeignDuplicate produces every record of a topic once more from another
// producer, with the one JSON member that identifies the event replaced: the
// same intent, told by somebody else (LAB-E3).
type ForeignDuplicate struct {
	Brokers []string
	Topic   string
	Member  string // "event_id"

	tail *tail
	mine sync.Map // value of Member → true
}

// Name of the fault.
func (*ForeignDuplicate) Name() string { return "foreign-duplicate" }

// Target is the topic.
func (f *ForeignDuplicate) Target() string { return "topic " + f.Topic }

// Available everywhere.
func (*ForeignDuplicate) Available() error { return nil }

// Inject starts to follow the topic from its end.
func (f *ForeignDuplicate) Inject(ctx context.Context) error {
	seen := map[string]bool{}
	var err error
	f.tail, err = startTail(ctx, f.Brokers, f.Topic, "foreign-producer", func(r *kgo.Record) ([]*kgo.Record, error) {
		id, err := member(r.Value, f.Member)
		if err != nil {
			return nil, err
		}
		if _, own := f.mine.Load(id); own || seen[id] {
			return nil, nil
		}
		seen[id] = true
		fresh := uuid.NewString()
		value, err := withMember(r.Value, f.Member, fresh)
		if err != nil {
			return nil, err
		}
		f.mine.Store(fresh, true)
		return []*kgo.Record{{
			Topic: f.Topic, Key: r.Key, Value: value,
			Headers: []kgo.RecordHeader{{Key: foreignHeader, Value: []byte("foreign")}},
		}}, nil
	})
	return err
}

// Heal follows the topic up to its present end and stops.
func (f *ForeignDuplicate) Heal(ctx context.Context) error { return f.tail.finish(ctx) }

// Witness counts this producer's records in the topic read from offset 0.
func (f *ForeignDuplicate) Witness(ctx context.Context) (Witness, error) {
	records, err := readTopic(ctx, f.Brokers, f.Topic)
	if err != nil {
		return Witness{}, err
	}
	if err := allRead(ctx, f.Brokers, f.Topic); err != nil {
		return Witness{}, err
	}
	found := map[string]bool{}
	for _, r := range records {
		id, err := member(r.Value, f.Member)
		if err != nil {
			continue
		}
		if _, own := f.mine.Load(id); own {
			found[id] = true
		}
	}
	if len(found) == 0 {
		return Witness{}, nil
	}
	return Witness{
		Text:  fmt.Sprintf("%d records of another producer, each under another %s, stand in %s and every group has read them", len(found), f.Member, f.Topic),
		Count: len(found),
	}, nil
}

// foreignHeader marks the records of [ForeignDuplicate], which arrive once.
const foreignHeader = "mailproof-producer"

func isForeign(r *kgo.Record) bool {
	for _, h := range r.Headers {
		if h.Key == foreignHeader {
			return true
		}
	}
	return false
}

// member reads one string member of a JSON object.
func member(body []byte, name string) (string, error) {
	var object map[string]json.RawMessage
	if err := json.Unmarshal(body, &object); err != nil {
		return "", fmt.Errorf("value is no JSON object: %w", err)
	}
	var value string
	if err := json.Unmarshal(object[name], &value); err != nil {
		return "", fmt.Errorf("member %q: %w", name, err)
	}
	return value, nil
}

// withMember replaces one member of a JSON object by a string.
func withMember(body []byte, name, value string) ([]byte, error) {
	var object map[string]json.RawMessage
	if err := json.Unmarshal(body, &object); err != nil {
		return nil, fmt.Errorf("value is no JSON object: %w", err)
	}
	quoted, err := json.Marshal(value)
	if err != nil {
		return nil, fmt.Errorf("member %q: %w", name, err)
	}
	object[name] = quoted
	return json.Marshal(object)
}
