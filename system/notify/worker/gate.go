package worker

import (
	"cmp"
	"context"
	"strconv"
	"sync"
	"time"

	"mailproof/system/notify/patience"
)

// gate pauses a lane that the mail server refuses as a whole (wrong password,
// blocked address): 50,000 mails must not be tried one by one against a closed
// door, nor die of it.
//
// Open, everybody passes. After a refusal it closes for a growing pause; then
// one worker at a time passes as a probe, until a probe gets past the server's
// front door.
//
// A server that takes no more for now (429, RFC 6585 section 4) asks the whole
// client to wait, and not the one mail: for that time nobody passes (OB-10). Else
// each mail of a backlog would be tried once just to be told so.
type gate struct {
	pause  patience.Backoff
	now    func() time.Time
	onEdge func(paused bool)

	mu       sync.Mutex
	refusals int // in a row; 0 means open
	until    time.Time
	since    time.Time // first refusal of this episode
	probing  bool
	quiet    time.Time     // until then the server takes no more
	changed  chan struct{} // closed and renewed with each change
}

func newGate(pause patience.Backoff, now func() time.Time, onEdge func(bool)) *gate {
	return &gate{pause: pause, now: now, onEdge: onEdge, changed: make(chan struct{})}
}

// pass is one worker's way through the gate. It ends with report or, when the
// server was never asked, with leave; whatever comes after that does nothing.
type pass struct {
	g     *gate
	probe bool // the one that tries a closed lane
	ended bool
}

// enter waits until the lane may be tried.
func (g *gate) enter(ctx context.Context) (*pass, error) {
	for {
		g.mu.Lock()
		open, now, changed := g.refusals == 0, g.now(), g.changed
		wait := g.quiet.Sub(now)
		if !open {
			wait = max(wait, g.until.Sub(now))
		}
		switch {
		case wait <= 0 && open:
			g.mu.Unlock()
			return &pass{g: g}, ctx.Err()
		case wait <= 0 && !g.probing:
			g.probing = true
			g.mu.Unlock()
			return &pass{g: g, probe: true}, nil
		}
		g.mu.Unlock()
		if err := await(ctx, wait, changed); err != nil {
			return nil, err
		}
	}
}

// await returns after wait (when it is above zero), on a change, or when ctx
// ends.
func await(ctx context.Context, wait time.Duration, changed <-chan struct{}) error {
	var timer <-chan time.Time
	if wait > 0 {
		t := time.NewTimer(wait)
		defer t.Stop()
		timer = t.C
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-changed:
		return nil
	case <-timer:
		return nil
	}
}

// report tells what the server said to the lane. Only a probe, or a refusal,
// moves the gate: an answer to a try begun before the refusal says nothing new.
func (p *pass) report(refusedLane bool) {
	if p.ended {
		return
	}
	p.ended = true
	g := p.g
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case refusedLane:
		g.close(p.probe)
	case p.probe:
		g.refusals, g.probing = 0, false
		g.onEdge(false)
	default:
		return
	}
	g.broadcast()
}

func (g *gate) close(probe bool) {
	if g.refusals == 0 {
		g.since = g.now()
		g.onEdge(true)
	} else if !probe {
		return // one of the tries that were under way: the same refusal
	}
	g.refusals++
	g.until = g.now().Add(g.pause.After(g.refusals))
	if probe {
		g.probing = false
	}
}

// hold lets nobody pass for as long as the server asked for. One that names no
// time gets the first pause; one that names hours is asked again after the longest:
// each mail that it put off waits by its own row, and a lane that is silent for
// hours would be an outage of its own.
func (g *gate) hold(asked time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	until := g.now().Add(min(cmp.Or(asked, g.pause.First), g.pause.Max))
	if until.After(g.quiet) {
		g.quiet = until
	}
}

// leave gives a probe's turn to the next one when it never got to the server.
func (p *pass) leave() {
	if p.ended || !p.probe {
		return
	}
	p.ended = true
	p.g.mu.Lock()
	defer p.g.mu.Unlock()
	p.g.probing = false
	p.g.broadcast()
}

func (g *gate) broadcast() {
	close(g.changed)
	g.changed = make(chan struct{})
}

// left is the rest of the pause.
func (g *gate) left() time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	return max(g.until.Sub(g.now()), 0)
}

// episode names the refusal, from its first until the lane opens again.
func (g *gate) episode() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return strconv.FormatInt(g.since.UnixMilli(), 10)
}
