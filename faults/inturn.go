package faults

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// Act is one blow to a part, from the moment that it is broken to the moment
// that it is whole again.
type Act struct {
	// Title and Part are the fault's name and target.
	Title, Part string
	// Possible is nil, or says why the act cannot be carried out here.
	Possible error
	// Ready finds out what Strike needs to know, before the part is broken. May be
	// nil.
	Ready func(ctx context.Context) error
	// Strike breaks the part, leaves it broken for as long as the act is to last,
	// mends it unless Restore does, and returns what the far side showed
	// meanwhile. The fault's record spans it.
	Strike func(ctx context.Context) (Witness, error)
	// Restore mends what Strike left broken; what it returns is added to the
	// witness. May be nil.
	Restore func(ctx context.Context) (string, error)
	// Mend is called when one of them has failed or was cut short; it must
	// tolerate a part that is whole. May be nil.
	Mend func(ctx context.Context) error
}

// InTurn makes one fault of each act. All are injected together; they strike one
// after the other, and between two of them settle returns when the next may
// come: so each heals, or does not, before another hides it. clock gives
// monotonic nanoseconds.
func InTurn(clock func() int64, settle func(ctx context.Context) error, acts ...Act) []Fault {
	var before <-chan struct{}
	all := make([]Fault, len(acts))
	for i, act := range acts {
		t := &turn{act: act, clock: clock, settle: settle, before: before, campaign: newCampaign(1)}
		before, all[i] = t.Done(), t
	}
	return all
}

// turn is one act as a campaign of one strike.
type turn struct {
	act    Act
	clock  func() int64
	settle func(ctx context.Context) error
	before <-chan struct{} // closed when the act before is over; nil for the first
	campaign

	mu       sync.Mutex
	from, to int64
	whole    bool // all went well
	seen     Witness
}

func (t *turn) Name() string                     { return t.act.Title }
func (t *turn) Target() string                   { return t.act.Part }
func (t *turn) Available() error                 { return t.act.Possible }
func (t *turn) Inject(ctx context.Context) error { t.start(ctx, t.run); return nil }

// Span is when it struck and when the part was whole again; zero before that.
func (t *turn) Span() (from, to int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.from, t.to
}

func (t *turn) run(ctx context.Context) error {
	if t.before != nil {
		select {
		case <-t.before:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if t.act.Ready != nil {
		if err := t.act.Ready(ctx); err != nil {
			return err
		}
	}
	t.mu.Lock()
	t.from = t.clock()
	t.mu.Unlock()
	seen, err := t.act.Strike(ctx)
	t.mu.Lock()
	t.to = t.clock()
	t.mu.Unlock()
	if err == nil && t.act.Restore != nil {
		var more string
		more, err = t.act.Restore(ctx)
		seen.Text += more
	}
	if err != nil {
		return err
	}
	t.mu.Lock()
	t.seen, t.whole = seen, true
	t.mu.Unlock()
	t.struckOnce()
	if t.settle == nil {
		return nil
	}
	return t.settle(ctx)
}

// Heal ends the act, and mends the part if the act has not.
func (t *turn) Heal(ctx context.Context) error {
	err := t.finish(ctx)
	t.mu.Lock()
	began, whole := t.from > 0, t.whole
	t.mu.Unlock()
	if !began || whole || t.act.Mend == nil {
		return err
	}
	if mend := t.act.Mend(ctx); mend != nil {
		err = errors.Join(err, fmt.Errorf("mend %s: %w", t.act.Part, mend))
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.to = max(t.to, t.clock())
	return err
}

// Witness is what Strike returned.
func (t *turn) Witness(context.Context) (Witness, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.seen, nil
}
