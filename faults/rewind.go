package faults

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Rewind kills a consumer of a topic, moves every group that reads the topic
// back to its beginning once nobody is a member any more, and starts the
// consumer again: what a wrong reset of offsets does (CASE-3).
type Rewind struct {
	brokers []string
	topic   string
	victim  Process
	after   time.Duration

	campaign
	mu      sync.Mutex
	rewound int64 // records that came again
	groups  []string
}

// NewRewind prepares one rewinding, after a pause.
func NewRewind(brokers []string, topic string, victim Process, after time.Duration) *Rewind {
	return &Rewind{brokers: brokers, topic: topic, victim: victim, after: after, campaign: newCampaign(1)}
}

// Name of the fault.
func (*Rewind) Name() string { return "rewind" }

// Target is the topic.
func (r *Rewind) Target() string { return "topic " + r.topic }

// Available everywhere.
func (*Rewind) Available() error { return nil }

// Inject starts it.
func (r *Rewind) Inject(ctx context.Context) error {
	r.start(ctx, func(ctx context.Context) error {
		if !sleep(ctx, r.after) {
			return ctx.Err()
		}
		if err := killAndRestart(ctx, r.victim, func() error { return r.rewind(context.WithoutCancel(ctx)) }); err != nil {
			return err
		}
		r.struckOnce()
		return nil
	})
	return nil
}

// memberWait bounds the wait for the end of a dead member's session.
const memberWait = time.Minute

func (r *Rewind) rewind(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, memberWait)
	defer cancel()
	client, err := kgo.NewClient(kgo.SeedBrokers(r.brokers...))
	if err != nil {
		return fmt.Errorf("rewind: %w", err)
	}
	defer client.Close()
	admin := kadm.NewClient(client)
	listed, err := admin.ListGroups(ctx)
	if err != nil {
		return fmt.Errorf("rewind: consumer groups: %w", err)
	}
	for _, fetched := range admin.FetchManyOffsets(ctx, listed.Groups()...) {
		committed, reads := fetched.Fetched[r.topic]
		if fetched.Err != nil || !reads {
			continue
		}
		if err := r.rewindGroup(ctx, admin, fetched.Group, committed); err != nil {
			return err
		}
	}
	if len(r.groups) == 0 {
		return fmt.Errorf("rewind: nobody reads topic %s", r.topic)
	}
	return nil
}

func (r *Rewind) rewindGroup(ctx context.Context, admin *kadm.Client, group string, committed map[int32]kadm.OffsetResponse) error {
	if err := awaitEmpty(ctx, admin, group); err != nil {
		return err
	}
	back, again := kadm.Offsets{}, int64(0)
	for partition, at := range committed {
		back.AddOffset(r.topic, partition, 0, -1)
		again += max(at.At, 0)
	}
	done, err := admin.CommitOffsets(ctx, group, back)
	if err == nil {
		err = done.Error()
	}
	if err != nil {
		return fmt.Errorf("rewind: group %s: %w", group, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rewound += again
	r.groups = append(r.groups, group)
	return nil
}

func awaitEmpty(ctx context.Context, admin *kadm.Client, group string) error {
	for {
		groups, err := admin.DescribeGroups(ctx, group)
		if err != nil {
			return fmt.Errorf("rewind: group %s: %w", group, err)
		}
		if len(groups[group].Members) == 0 {
			return nil
		}
		if !sleep(ctx, 200*time.Millisecond) {
			return fmt.Errorf("rewind: group %s still has members: %w", group, ctx.Err())
		}
	}
}

// Heal ends it; a rewinding under way is completed.
func (r *Rewind) Heal(ctx context.Context) error { return r.finish(ctx) }

// Rewound is how many records came again.
func (r *Rewind) Rewound() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.rewound
}

// Witness wants every group to have read the topic to its end a second time.
func (r *Rewind) Witness(ctx context.Context) (Witness, error) {
	n := r.Rewound()
	if n == 0 {
		return Witness{}, errors.New("no record was to come again")
	}
	if err := allRead(ctx, r.brokers, r.topic); err != nil {
		return Witness{}, err
	}
	return Witness{
		Text:  fmt.Sprintf("the groups %v were moved back by %d records of %s, and have read to its end again", r.groups, n, r.topic),
		Count: int(n),
	}, nil
}
