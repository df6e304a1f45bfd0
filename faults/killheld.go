package faults

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"mailproof/fakes/script"
	"mailproof/fakes/smtp"
)

const (
	// holdWait bounds the wait until a session reaches the chosen stage.
	holdWait = 30 * time.Second
	// restartWait bounds a kill and the restart after it.
	restartWait = 30 * time.Second
)

// Strike is one planned kill: hold a session at Stage, then kill.
type Strike struct {
	Stage script.Stage
	// Discard loses a mail that was held before it was stored; otherwise the
	// server keeps it when it is released, as RFC 5321 4.2.5 asks of a server
	// that has read the final dot.
	Discard bool
}

func (s Strike) String() string {
	switch {
	case s.Stage == smtp.StageDot && s.Discard:
		return "dot, then discarded"
	case s.Stage == smtp.StageDot:
		return "dot, then stored"
	}
	return string(s.Stage)
}

// KillWhileHeld kills a process while the mail server holds one of its sessions
// at a chosen stage, so that the moment of death is certain and needs no timing;
// then it lets the session go and starts the process again.
type KillWhileHeld struct {
	server  MailServer
	victim  Process
	strikes []Strike
	gap     func() time.Duration
	one     *sync.Mutex

	campaign
	mu   sync.Mutex
	seen []heldKill
}

type heldKill struct {
	strike Strike
	hold   script.Hold
	pid    int
}

// NewKillWhileHeld prepares the strikes, in this order, with a pause of gap
// between a restart and the next hold. Faults that kill the same process share
// the lock one.
func NewKillWhileHeld(server MailServer, victim Process, strikes []Strike, gap func() time.Duration, one *sync.Mutex) *KillWhileHeld {
	return &KillWhileHeld{server: server, victim: victim, strikes: strikes, gap: gap, one: one, campaign: newCampaign(len(strikes))}
}

// Name of the fault.
func (*KillWhileHeld) Name() string { return "kill-while-held" }

// Target is the process.
func (k *KillWhileHeld) Target() string { return k.victim.Name() }

// Available everywhere.
func (*KillWhileHeld) Available() error { return nil }

// Inject starts the campaign.
func (k *KillWhileHeld) Inject(ctx context.Context) error {
	k.start(ctx, func(ctx context.Context) error {
		for _, s := range k.strikes {
			if err := k.strike(ctx, s); err != nil {
				return err
			}
			if !sleep(ctx, k.gap()) {
				return ctx.Err()
			}
		}
		return nil
	})
	return nil
}

func (k *KillWhileHeld) strike(ctx context.Context, s Strike) error {
	k.one.Lock()
	defer k.one.Unlock()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	hold, err := k.hold(ctx, s)
	if err != nil {
		return err
	}
	pid := k.victim.PID()
	if err := killAndRestart(ctx, k.victim, func() { k.server.Release(hold.ID) }); err != nil {
		return fmt.Errorf("held at %s: %w", s, err)
	}
	k.mu.Lock()
	k.seen = append(k.seen, heldKill{s, hold, pid})
	k.mu.Unlock()
	k.struckOnce()
	return nil
}

// hold makes the server hold the next session that reaches the stage, and
// returns once it does. The rule strikes once.
func (k *KillWhileHeld) hold(ctx context.Context, s Strike) (script.Hold, error) {
	action := script.Action{Kind: script.HoldUntilReleased, Stage: s.Stage, For: script.Duration(holdWait)}
	switch {
	case s.Stage == smtp.StageBody:
		action.Bytes = 64 // somewhere inside the headers
	case s.Stage == smtp.StageDot && s.Discard:
		action.OnRelease = script.DiscardOnRelease
	}
	rule, err := k.server.AddRule(script.Rule{Action: action, Count: 1})
	if err != nil {
		return script.Hold{}, fmt.Errorf("holding at %s: %w", s, err)
	}
	defer k.server.RemoveRule(rule)
	ctx, cancel := context.WithTimeout(ctx, holdWait)
	defer cancel()
	hold, err := k.server.AwaitHold(ctx, func(h script.Hold) bool { return h.Rule == rule })
	if err != nil {
		return script.Hold{}, fmt.Errorf("no session reached stage %s within %s: %w", s, holdWait, err)
	}
	return hold, nil
}

// Heal ends the campaign; the strike under way is completed, so that the process
// runs again.
func (k *KillWhileHeld) Heal(ctx context.Context) error { return k.finish(ctx) }

// Witness lists the stages at which sessions were held when the process died.
// The strikes that were planned and not made are an error: the run did not
// cover what it says.
func (k *KillWhileHeld) Witness(context.Context) (Witness, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	stages, pids, keys := map[string]int{}, map[int]bool{}, map[string]bool{}
	for _, s := range k.seen {
		stages[s.strike.String()]++
		pids[s.pid] = true
		if s.hold.Key != "" {
			keys[s.hold.Key] = true
		}
	}
	if len(k.seen) == 0 {
		return Witness{}, nil
	}
	if len(k.seen) < len(k.strikes) {
		return Witness{}, fmt.Errorf("%d of %d kills were made (%s)", len(k.seen), len(k.strikes), tally(stages))
	}
	return Witness{
		Text: fmt.Sprintf("%d times a session was held when %s got SIGKILL, %d process ids (held at: %s)",
			len(k.seen), k.victim.Name(), len(pids), tally(stages)),
		Count: len(k.seen), Keys: sortedKeys(keys),
	}, nil
}

// killAndRestart kills p, calls between once it is gone, and starts it again. A
// kill that was begun is completed even when ctx ends: a fault must not leave
// the process dead.
func killAndRestart(ctx context.Context, p Process, between func()) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), restartWait)
	defer cancel()
	err := p.Kill(ctx)
	between()
	if err != nil {
		return fmt.Errorf("killing %s: %w", p.Name(), err)
	}
	if err := p.Restart(ctx); err != nil {
		return fmt.Errorf("starting %s again: %w", p.Name(), err)
	}
	return nil
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
