package faults

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// KillAtRandom kills a process at moments that the seed drew, whatever it is
// doing, and starts it again.
type KillAtRandom struct {
	victim Process
	gaps   []time.Duration
	one    *sync.Mutex

	campaign
	mu   sync.Mutex
	pids []int
}

// NewKillAtRandom prepares one kill after each gap. Faults that kill the same
// process share the lock one.
func NewKillAtRandom(victim Process, gaps []time.Duration, one *sync.Mutex) *KillAtRandom {
	return &KillAtRandom{victim: victim, gaps: gaps, one: one, campaign: newCampaign(len(gaps))}
}

// Name of the fault.
func (*KillAtRandom) Name() string { return "kill-at-random" }

// Target is the process.
func (k *KillAtRandom) Target() string { return k.victim.Name() }

// Available everywhere.
func (*KillAtRandom) Available() error { return nil }

// Inject starts the campaign.
func (k *KillAtRandom) Inject(ctx context.Context) error {
	k.start(ctx, func(ctx context.Context) error {
		for _, gap := range k.gaps {
			if !sleep(ctx, gap) {
				return ctx.Err()
			}
			if err := k.strike(ctx); err != nil {
				return err
			}
		}
		return nil
	})
	return nil
}

func (k *KillAtRandom) strike(ctx context.Context) error {
	k.one.Lock()
	defer k.one.Unlock()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	pid := k.victim.PID()
	if err := killAndRestart(ctx, k.victim, func() error { return nil }); err != nil {
		return err
	}
	k.mu.Lock()
	k.pids = append(k.pids, pid)
	k.mu.Unlock()
	k.struckOnce()
	return nil
}

// Heal ends the campaign; a kill under way is completed by its restart.
func (k *KillAtRandom) Heal(ctx context.Context) error { return k.finish(ctx) }

// Witness lists the processes that died. Planned kills that were not made are
// an error.
func (k *KillAtRandom) Witness(context.Context) (Witness, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case len(k.pids) == 0:
		return Witness{}, nil
	case len(k.pids) < len(k.gaps):
		return Witness{}, fmt.Errorf("%d of %d kills were made", len(k.pids), len(k.gaps))
	}
	return Witness{
		Text:  fmt.Sprintf("%s got SIGKILL %d times (process ids %v)", k.victim.Name(), len(k.pids), k.pids),
		Count: len(k.pids),
	}, nil
}
