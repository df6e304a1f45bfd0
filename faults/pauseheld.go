package faults

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"mailproof/fakes/ledger"
	"mailproof/fakes/script"
	"mailproof/fakes/smtp"
)

const (
	// takenWait bounds the wait until another process has delivered the mail of
	// the one that is stopped: its lease, and some doorbells that the broker gave
	// to the stopped process.
	takenWait = time.Minute
	// endWait bounds the wait until a woken process has ended its session.
	endWait = 30 * time.Second
	// finWait is how long the end of a connection over loopback may take to be
	// seen.
	finWait = 100 * time.Millisecond
	// tooLate is how often a strike may come after the sender's own deadline and
	// be made again, per planned strike.
	tooLate = 3
)

// WatchedMailServer is a fake mail server whose ledger can be followed;
// both fakes are one.
type WatchedMailServer interface {
	MailServer
	// Subscribe sends each row as it finishes, from now on, until ctx ends.
	Subscribe(ctx context.Context) <-chan ledger.Attempt
}

// Pausable is a process that can be stopped and continued; target.Process is
// one.
type Pausable interface {
	Process
	Pause(ctx context.Context) error  // SIGSTOP; returns when no thread of it runs
	Resume(ctx context.Context) error // SIGCONT
}

// PauseWhileHeld stops a process with SIGSTOP while the mail server withholds
// from one of its sessions the 354 that lets it send the mail. The 354 is then
// let go into the socket of the stopped process, another process takes the mail
// over and delivers it, and the first is woken: with nothing between it and the
// final dot but its own look at the clock. No moment is left to chance.
//
// A client must say its process's name in EHLO, followed by a dot and the
// worker: "notifyd-1.ticket-3".
type PauseWhileHeld struct {
	server WatchedMailServer
	victim Pausable
	least  time.Duration
	gap    func() time.Duration

	campaign
	mu   sync.Mutex
	seen []wakening
}

// wakening is one worker that was woken after its mail had been delivered by
// another.
type wakening struct {
	pid    int
	key    string // of the mail, as the other's copy carries it
	asleep time.Duration
	dotted bool // it sent the mail all the same
}

// NewPauseWhileHeld prepares so many strikes, with a pause of gap after each. The
// process stands still for at least so long, which must be well beyond its
// lease, and until another has delivered the mail.
func NewPauseWhileHeld(server WatchedMailServer, victim Pausable, strikes int, least time.Duration, gap func() time.Duration) *PauseWhileHeld {
	return &PauseWhileHeld{server: server, victim: victim, least: least, gap: gap, campaign: newCampaign(strikes)}
}

// Name of the fault.
func (*PauseWhileHeld) Name() string { return "pause-while-held" }

// Target is the process.
func (p *PauseWhileHeld) Target() string { return p.victim.Name() }

// Available everywhere.
func (*PauseWhileHeld) Available() error { return nil }

// Inject starts the campaign.
func (p *PauseWhileHeld) Inject(ctx context.Context) error {
	p.start(ctx, p.run)
	return nil
}

func (p *PauseWhileHeld) run(ctx context.Context) error {
	late := 0
	for made := 0; made < p.of; {
		ok, err := p.strike(ctx)
		if err != nil {
			return err
		}
		if ok {
			made++
			p.struckOnce()
		} else if late++; late > tooLate*p.of {
			return fmt.Errorf("%d times a sender of %s had given up before the process was stopped", late, p.victim.Name())
		}
		if !sleep(ctx, p.gap()) {
			return ctx.Err()
		}
	}
	return nil
}

// strike makes one wakening. It returns false when the sender had given its
// session up before the process was stopped: then nothing was tested.
func (p *PauseWhileHeld) strike(ctx context.Context) (ok bool, err error) {
	hold, err := p.holdOne(ctx)
	if err != nil {
		return false, err
	}
	defer p.server.Release(hold.ID) // in case it is still held
	watch, stop := context.WithCancel(ctx)
	defer stop()
	finished := p.server.Subscribe(watch)
	w, ok, err := p.standStill(ctx, hold, finished)
	if err != nil || !ok {
		return false, err
	}
	end, err := awaitRow(ctx, finished, endWait, func(a ledger.Attempt) bool { return a.ID == hold.Attempt })
	if err != nil {
		return false, fmt.Errorf("the session in which %s was woken has not ended: %w", p.victim.Name(), err)
	}
	w.dotted = end.DotAt > 0
	p.mu.Lock()
	p.seen = append(p.seen, w)
	p.mu.Unlock()
	return true, nil
}

// standStill stops the process, lets the 354 into its socket, and continues it
// when another has delivered the mail, or whatever else ends the wait.
func (p *PauseWhileHeld) standStill(ctx context.Context, hold script.Hold, finished <-chan ledger.Attempt) (w wakening, ok bool, err error) {
	pid, began := p.victim.PID(), time.Now()
	defer func() {
		if wake := p.victim.Resume(context.WithoutCancel(ctx)); wake != nil {
			ok, err = false, errors.Join(err, fmt.Errorf("waking %s: %w", p.victim.Name(), wake))
		}
	}()
	if err := p.victim.Pause(ctx); err != nil {
		return w, false, fmt.Errorf("stopping %s: %w", p.victim.Name(), err)
	}
	if !p.stillHeld(ctx, hold) {
		return w, false, nil
	}
	p.server.Release(hold.ID)
	copied, err := awaitRow(ctx, finished, takenWait, func(a ledger.Attempt) bool {
		return a.Stored && a.Recipient == hold.Recipient && !p.ours(a.Client)
	})
	if err != nil {
		return w, false, fmt.Errorf("no other process delivered the mail for %s, which the stopped %s had claimed: %w", hold.Recipient, p.victim.Name(), err)
	}
	if !sleep(ctx, p.least-time.Since(began)) {
		return w, false, ctx.Err()
	}
	return wakening{pid: pid, key: copied.Key, asleep: time.Since(began)}, true, nil
}

// holdOne waits until the server withholds the 354 from a session of the
// victim, and of nobody else.
func (p *PauseWhileHeld) holdOne(ctx context.Context) (script.Hold, error) {
	rule, err := p.server.AddRule(script.Rule{
		Match:  script.Match{Client: p.victim.Name() + ".*"},
		Action: script.Action{Kind: script.HoldUntilReleased, Stage: smtp.StageData, For: script.Duration(holdBound)},
		Count:  1,
	})
	if err != nil {
		return script.Hold{}, fmt.Errorf("holding a session of %s: %w", p.victim.Name(), err)
	}
	defer p.server.RemoveRule(rule)
	bounded, cancel := context.WithTimeout(ctx, holdWait)
	defer cancel()
	hold, err := p.server.AwaitHold(bounded, func(h script.Hold) bool { return h.Rule == rule })
	if err != nil {
		return script.Hold{}, fmt.Errorf("no session of %s reached stage data within %s: %w", p.victim.Name(), holdWait, err)
	}
	if !p.ours(hold.Client) {
		p.server.Release(hold.ID)
		return script.Hold{}, fmt.Errorf("held a session of %q, not of %s", hold.Client, p.victim.Name())
	}
	return hold, nil
}

func (p *PauseWhileHeld) ours(client string) bool {
	return strings.HasPrefix(client, p.victim.Name()+".")
}

// stillHeld reports that the process has not given the held session up before
// it was stopped: a FIN or RST that left it is seen within the wait.
func (p *PauseWhileHeld) stillHeld(ctx context.Context, hold script.Hold) bool {
	ctx, cancel := context.WithTimeout(ctx, finWait)
	defer cancel()
	gone := false
	_, err := p.server.AwaitHold(ctx, func(h script.Hold) bool {
		gone = h.ID == hold.ID && h.PeerGone
		return gone
	})
	return err != nil && !gone
}

// awaitRow returns the next finished row that fits.
func awaitRow(ctx context.Context, finished <-chan ledger.Attempt, bound time.Duration, fits func(ledger.Attempt) bool) (ledger.Attempt, error) {
	timeout := time.NewTimer(bound)
	defer timeout.Stop()
	for {
		select {
		case a, open := <-finished:
			if !open {
				return ledger.Attempt{}, errors.Join(errors.New("the ledger ended"), ctx.Err())
			}
			if fits(a) {
				return a, nil
			}
		case <-timeout.C:
			return ledger.Attempt{}, fmt.Errorf("not within %s", bound)
		case <-ctx.Done():
			return ledger.Attempt{}, ctx.Err()
		}
	}
}

// Heal ends the campaign; a stopped process is woken.
func (p *PauseWhileHeld) Heal(ctx context.Context) error { return p.finish(ctx) }

// Witness counts the wakenings. Planned ones that were not made are an error:
// the run did not cover what it says.
func (p *PauseWhileHeld) Witness(context.Context) (Witness, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.seen) == 0 {
		return Witness{}, nil
	}
	pids, keys := map[int]bool{}, map[string]bool{}
	dotted, longest := 0, time.Duration(0)
	for _, w := range p.seen {
		pids[w.pid] = true
		keys[w.key] = true
		longest = max(longest, w.asleep)
		if w.dotted {
			dotted++
		}
	}
	if len(p.seen) < p.of {
		return Witness{}, fmt.Errorf("%d of %d wakenings were made", len(p.seen), p.of)
	}
	return Witness{
		Text: fmt.Sprintf("%d times a worker of %s (process ids %v) was woken with the 354 before it, after up to %.1f s, when another process had delivered its mail; %d of them sent it all the same",
			len(p.seen), p.victim.Name(), slices.Sorted(maps.Keys(pids)), longest.Seconds(), dotted),
		Count: len(p.seen), Keys: sortedKeys(keys),
	}, nil
}
