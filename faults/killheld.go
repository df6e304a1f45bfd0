package faults

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"mailproof/fakes/script"
	"mailproof/fakes/smtp"
)

const (
	// holdWait bounds the wait until a session reaches the chosen stage, and
	// holdBound the hold itself: longer than anything that the harness waits
	// for meanwhile.
	holdWait  = 30 * time.Second
	holdBound = 2 * time.Minute
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

// onConnect reports a stage that a connection passes once. A client that keeps
// its connections reaches it only after it was started anew.
func (s Strike) onConnect() bool { return s.Stage == smtp.StageConnect || s.Stage == smtp.StageEHLO }

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
// between a restart and the next strike. The first strike must not be one at
// connect or EHLO: those are armed before the restart of the strike before.
// Faults that kill the same process share the lock one.
func NewKillWhileHeld(server MailServer, victim Process, strikes []Strike, gap func() time.Duration, one *sync.Mutex) *KillWhileHeld {
	return &KillWhileHeld{server: server, victim: victim, strikes: strikes, gap: gap, one: one, campaign: newCampaign(len(strikes))}
}

// Name of the fault.
func (*KillWhileHeld) Name() string { return "kill-while-held" }

// Target is the process.
func (k *KillWhileHeld) Target() string { return k.victim.Name() }

// Available unless the order of the strikes cannot work.
func (k *KillWhileHeld) Available() error {
	if len(k.strikes) == 0 || k.strikes[0].onConnect() {
		return errors.New("the first strike must be at a stage that kept connections pass")
	}
	return nil
}

// Inject starts the campaign.
func (k *KillWhileHeld) Inject(ctx context.Context) error {
	k.start(ctx, k.run)
	return nil
}

func (k *KillWhileHeld) run(ctx context.Context) error {
	rule := ""
	defer func() { k.server.RemoveRule(rule) }()
	for i, s := range k.strikes {
		var err error
		if rule == "" {
			if rule, err = k.arm(s); err != nil {
				return err
			}
		}
		armNext := func() (string, error) { return "", nil }
		if i+1 < len(k.strikes) && k.strikes[i+1].onConnect() {
			armNext = func() (string, error) { return k.arm(k.strikes[i+1]) }
		}
		if rule, err = k.strike(ctx, s, rule, armNext); err != nil {
			return err
		}
		if !sleep(ctx, k.gap()) {
			return ctx.Err()
		}
	}
	return nil
}

// strike waits until the rule holds a session, kills the process, lets the
// session go, and starts the process again. It returns the rule of the next
// strike if that had to be armed before the restart.
func (k *KillWhileHeld) strike(ctx context.Context, s Strike, rule string, armNext func() (string, error)) (next string, err error) {
	hold, err := k.await(ctx, s, rule)
	if err != nil {
		return rule, err
	}
	k.one.Lock()
	defer k.one.Unlock()
	if ctx.Err() != nil {
		k.server.Release(hold.ID)
		return rule, ctx.Err()
	}
	k.server.RemoveRule(rule)
	pid := k.victim.PID()
	err = killAndRestart(ctx, k.victim, func() error {
		k.server.Release(hold.ID)
		var err error
		next, err = armNext()
		return err
	})
	if err != nil {
		return next, fmt.Errorf("held at %s: %w", s, err)
	}
	k.mu.Lock()
	k.seen = append(k.seen, heldKill{s, hold, pid})
	k.mu.Unlock()
	k.struckOnce()
	return next, nil
}

// arm makes the server hold the next session that reaches the stage, once.
func (k *KillWhileHeld) arm(s Strike) (rule string, err error) {
	action := script.Action{Kind: script.HoldUntilReleased, Stage: s.Stage, For: script.Duration(holdBound)}
	switch {
	case s.Stage == smtp.StageBody:
		action.Bytes = 64 // somewhere inside the headers
	case s.Stage == smtp.StageDot && s.Discard:
		action.OnRelease = script.DiscardOnRelease
	}
	rule, err = k.server.AddRule(script.Rule{Action: action, Count: 1})
	if err != nil {
		return "", fmt.Errorf("holding at %s: %w", s, err)
	}
	return rule, nil
}

// await returns the session that the rule holds.
func (k *KillWhileHeld) await(ctx context.Context, s Strike, rule string) (script.Hold, error) {
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
func killAndRestart(ctx context.Context, p Process, between func() error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), restartWait)
	defer cancel()
	if err := p.Kill(ctx); err != nil {
		return errors.Join(fmt.Errorf("killing %s: %w", p.Name(), err), between())
	}
	err := between()
	if restart := p.Restart(ctx); restart != nil {
		err = errors.Join(err, fmt.Errorf("starting %s again: %w", p.Name(), restart))
	}
	return err
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
