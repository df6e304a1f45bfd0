package faults

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"mailproof/fakes/script"
	"mailproof/fakes/smtp"
)

// Pausable is a process that can be stopped and continued.
type Pausable interface {
	Process
	Pause(ctx context.Context) error
	Resume(ctx context.Context) error
}

// PauseWhileHeld stops a process (SIGSTOP) while the mail server holds the
// answer to its DATA, for longer than its lease, and lets the answer through
// before the process is continued: it wakes with the mail's bytes to write, long
// after somebody else may have taken the mail over (a garbage collection, a
// frozen virtual machine, a laptop's lid).
type PauseWhileHeld struct {
	server MailServer
	victim Pausable
	times  int
	pause  time.Duration
	gap    func() time.Duration

	campaign
	mu   sync.Mutex
	seen []stopped
}

type stopped struct {
	hold script.Hold
	at   time.Duration // how long it stood still
}

// answerTime is what the answer needs from the server into the socket of the
// process that is stopped.
const answerTime = 100 * time.Millisecond

// NewPauseWhileHeld prepares the stops, each as long as pause, which must be
// longer than the victim's lease.
func NewPauseWhileHeld(server MailServer, victim Pausable, times int, pause time.Duration, gap func() time.Duration) *PauseWhileHeld {
	return &PauseWhileHeld{server: server, victim: victim, times: times, pause: pause, gap: gap, campaign: newCampaign(times)}
}

// Name of the fault.
func (*PauseWhileHeld) Name() string { return "pause-while-held" }

// Target is the process.
func (p *PauseWhileHeld) Target() string { return p.victim.Name() }

// Available everywhere.
func (*PauseWhileHeld) Available() error { return nil }

// Inject starts the campaign.
func (p *PauseWhileHeld) Inject(ctx context.Context) error {
	p.start(ctx, func(ctx context.Context) error {
		for range p.times {
			if err := p.strike(ctx); err != nil {
				return err
			}
			if !sleep(ctx, p.gap()) {
				return ctx.Err()
			}
		}
		return nil
	})
	return nil
}

func (p *PauseWhileHeld) strike(ctx context.Context) error {
	rule, err := p.server.AddRule(script.Rule{
		Match:  script.Match{Client: p.victim.Name() + "*"},
		Action: script.Action{Kind: script.HoldUntilReleased, Stage: smtp.StageData, For: script.Duration(holdBound)},
		Count:  1,
	})
	if err != nil {
		return fmt.Errorf("holding the answer to DATA: %w", err)
	}
	defer p.server.RemoveRule(rule)
	waiting, cancel := context.WithTimeout(ctx, holdWait)
	defer cancel()
	hold, err := p.server.AwaitHold(waiting, func(h script.Hold) bool { return h.Rule == rule })
	if err != nil {
		return fmt.Errorf("no session of %s reached DATA within %s: %w", p.victim.Name(), holdWait, err)
	}
	stood, err := p.stop(ctx, hold)
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.seen = append(p.seen, stopped{hold, stood})
	p.mu.Unlock()
	p.struckOnce()
	return nil
}

// stop keeps the process stopped for the pause and continues it whatever
// happens.
func (p *PauseWhileHeld) stop(ctx context.Context, hold script.Hold) (stood time.Duration, err error) {
	defer p.server.Release(hold.ID)
	if err := p.victim.Pause(ctx); err != nil {
		return 0, err
	}
	began := time.Now()
	defer func() {
		err = errors.Join(err, p.victim.Resume(context.WithoutCancel(ctx)))
		stood = time.Since(began)
	}()
	if !sleep(ctx, p.pause) {
		return 0, ctx.Err()
	}
	p.server.Release(hold.ID)
	if !sleep(ctx, answerTime) {
		return 0, ctx.Err()
	}
	return 0, nil
}

// Heal ends the campaign; the process runs again when it returns.
func (p *PauseWhileHeld) Heal(ctx context.Context) error { return p.finish(ctx) }

// Witness counts the stops. Planned ones that were not made are an error.
func (p *PauseWhileHeld) Witness(context.Context) (Witness, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case len(p.seen) == 0:
		return Witness{}, nil
	case len(p.seen) < p.times:
		return Witness{}, fmt.Errorf("%d of %d stops were made", len(p.seen), p.times)
	}
	shortest := p.seen[0].at
	for _, s := range p.seen {
		shortest = min(shortest, s.at)
	}
	return Witness{
		Text: fmt.Sprintf("%d times %s stood still for at least %s while the server held the answer to its DATA",
			len(p.seen), p.victim.Name(), shortest.Round(10*time.Millisecond)),
		Count: len(p.seen),
	}, nil
}
