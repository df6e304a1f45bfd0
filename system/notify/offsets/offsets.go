// Package offsets shows where the bridge's consumer group stands in its topic,
// and moves it, for a person who repairs a wrong reset (CASE-3).
//
// It moves a group only while nobody is a member: a running bridge would commit
// over it. It must not decide where to: that is the runbook's.
package offsets

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Group of a topic.
type Group struct {
	Brokers []string
	Group   string
	Topic   string
}

// Place of the group in one partition.
type Place struct {
	Partition int32 `json:"partition"`
	Start     int64 `json:"start"`     // the oldest record that Kafka has
	Committed int64 `json:"committed"` // -1: never
	End       int64 `json:"end"`
	Lag       int64 `json:"lag"`
}

// Where to move a group.
type Where struct {
	Earliest bool
	Latest   bool
	// Since: to the first record that was written at this time or later.
	Since time.Time
}

// ErrMembers is returned while processes belong to the group. notifyd is a static
// member, so that a restart finds its place: it stays one for a session's time
// after its end.
var ErrMembers = errors.New("the group has members: stop every notifyd first; a static member counts until its session is over (NOTIFYD_KAFKA_SESSION_TIMEOUT)")

// Show lists the partitions in order, and the number of the group's members.
func (g Group) Show(ctx context.Context) (places []Place, members int, err error) {
	err = g.with(func(admin *kadm.Client) error {
		if places, err = g.places(ctx, admin); err != nil {
			return err
		}
		members, err = g.members(ctx, admin)
		return err
	})
	return places, members, err
}

// Move commits new places and returns them.
func (g Group) Move(ctx context.Context, to Where) (places []Place, err error) {
	err = g.with(func(admin *kadm.Client) error {
		members, err := g.members(ctx, admin)
		if err != nil {
			return err
		}
		if members > 0 {
			return fmt.Errorf("%w (%d)", ErrMembers, members)
		}
		offsets, err := g.target(ctx, admin, to)
		if err != nil {
			return err
		}
		done, err := admin.CommitOffsets(ctx, g.Group, offsets)
		if err == nil {
			err = done.Error()
		}
		if err != nil {
			return fmt.Errorf("commit: %w", err)
		}
		places, err = g.places(ctx, admin)
		return err
	})
	return places, err
}

func (g Group) with(do func(*kadm.Client) error) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(g.Brokers...), kgo.ClientID("notifyd-offsets"))
	if err != nil {
		return fmt.Errorf("offsets of %s: %w", g.Group, err)
	}
	defer client.Close()
	if err := do(kadm.NewClient(client)); err != nil {
		return fmt.Errorf("offsets of %s: %w", g.Group, err)
	}
	return nil
}

func (g Group) target(ctx context.Context, admin *kadm.Client, to Where) (kadm.Offsets, error) {
	var listed kadm.ListedOffsets
	var err error
	switch {
	case to.Earliest:
		listed, err = admin.ListStartOffsets(ctx, g.Topic)
	case to.Latest:
		listed, err = admin.ListEndOffsets(ctx, g.Topic)
	case !to.Since.IsZero():
		// Past the last record this is the end.
		listed, err = admin.ListOffsetsAfterMilli(ctx, to.Since.UnixMilli(), g.Topic)
	default:
		return nil, errors.New("say where to: earliest, latest, or a time")
	}
	if err == nil {
		err = listed.Error()
	}
	if err != nil {
		return nil, fmt.Errorf("places of %s: %w", g.Topic, err)
	}
	return listed.Offsets(), nil
}

func (g Group) members(ctx context.Context, admin *kadm.Client) (int, error) {
	groups, err := admin.DescribeGroups(ctx, g.Group)
	if err != nil {
		return 0, fmt.Errorf("describe: %w", err)
	}
	described := groups[g.Group]
	if described.Err != nil && !errors.Is(described.Err, kerr.GroupIDNotFound) {
		return 0, fmt.Errorf("describe: %w", described.Err)
	}
	return len(described.Members), nil
}

func (g Group) places(ctx context.Context, admin *kadm.Client) ([]Place, error) {
	commits, err := admin.FetchOffsetsForTopics(ctx, g.Group, g.Topic)
	if err != nil && !errors.Is(err, kerr.GroupIDNotFound) {
		return nil, fmt.Errorf("commits: %w", err)
	}
	starts, err := admin.ListStartOffsets(ctx, g.Topic)
	if err != nil {
		return nil, fmt.Errorf("starts: %w", err)
	}
	ends, err := admin.ListEndOffsets(ctx, g.Topic)
	if err == nil {
		err = ends.Error()
	}
	if err != nil {
		return nil, fmt.Errorf("ends: %w", err)
	}
	var out []Place
	ends.Each(func(end kadm.ListedOffset) {
		p := Place{Partition: end.Partition, Committed: -1, End: end.Offset}
		if start, ok := starts.Lookup(g.Topic, end.Partition); ok {
			p.Start = start.Offset
		}
		if c, ok := commits.Lookup(g.Topic, end.Partition); ok {
			p.Committed = c.At
		}
		p.Lag = p.End - max(p.Start, p.Committed)
		out = append(out, p)
	})
	slices.SortFunc(out, func(a, b Place) int { return int(a.Partition - b.Partition) })
	return out, nil
}
