// Package faults breaks parts on purpose. A fault is an exported value with
// five methods; a new one is one file, one line in the table below, and one
// line in the scenario that uses it.
//
//	lose-250             lose250.go    the server stores the mail, its 250 (an API's 200) is dropped, reset, never sent, or becomes a 502
//	kill-while-held      killheld.go   SIGKILL of a process while the server holds its session at a chosen stage
//	kill-at-random       killrandom.go SIGKILL of a process at seeded moments
//	duplicate-records    duplicate.go  each record of the topic arrives again, byte for byte
//	foreign-duplicate    foreign.go    each record arrives again from another producer, varied by the caller
//	pause-while-held     pauseheld.go  SIGSTOP of a process while its 354 is withheld, until another has delivered its mail
//	refuse-rcpt          refuse.go     every recipient is refused for now (451 at RCPT)
//	refusals             refusals.go   each kind of recipient is answered in its own way, for good (5yz) or for now (4yz)
//	provider-throttles   throttle.go   more than so many requests within a window are answered 429 with Retry-After
//	(named by its acts)  inturn.go     blows to parts, one after the other, each healed before the next
//
// A fault without a witness proves nothing: the run that relied on it is
// invalid, not green.
//
// Package faults knows the parts (infra), the processes of the target and the
// fakes' control, never the inside of the system under test. It must not import
// system/.
package faults

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"

	"mailproof/history"
)

// Fault is one way to break one part.
type Fault interface {
	// Name as printed: "kill-notifyd-while-held".
	Name() string
	// Available is nil when the fault can strike here, or says why not; the
	// fault is then recorded as skipped.
	Available() error
	// Inject installs it and returns when it has taken hold, or was tried.
	Inject(ctx context.Context) error
	// Heal undoes it. It is called exactly once after every Inject, also one
	// that failed, and must tolerate a fault that has ended by itself.
	Heal(ctx context.Context) error
	// Witness is called after the run has come to rest: the evidence, from the
	// far side, that the fault struck, and how often.
	Witness(ctx context.Context) (Witness, error)
}

// Campaign is a fault that strikes many times, by itself, after Inject: the
// faults phase lasts until each campaign is done.
type Campaign interface {
	Fault
	// Done is closed after the last strike.
	Done() <-chan struct{}
	// Progress says how many strikes of how many have been made.
	Progress() (struck, of int)
}

// Targeted is a fault that names what it strikes, for the report.
type Targeted interface{ Target() string }

// Spanned is a fault that knows better than its Inject and Heal when it struck
// and when that was over: monotonic nanoseconds, zero for what has not come.
type Spanned interface{ Span() (from, to int64) }

// Witness is evidence that a fault struck.
type Witness struct {
	Text  string // "24 sessions held at dot when notifyd got SIGKILL"; empty: none seen
	Count int
	Keys  []string // mails that it struck, when it strikes single mails
}

// ErrPanic marks a panic inside a fault: the harness is broken, not the system.
var ErrPanic = errors.New("panic in a fault")

// Run is one fault's life in a run, as it is recorded. It is used by one
// goroutine.
type Run struct {
	fault  Fault
	clock  func() int64
	record history.Fault
	begun  bool
	healed bool
}

// NewRun prepares a run of f; clock gives monotonic nanoseconds.
func NewRun(f Fault, clock func() int64) *Run {
	r := &Run{fault: f, clock: clock, record: history.Fault{Name: f.Name()}}
	if t, ok := f.(Targeted); ok {
		r.record.Target = t.Target()
	}
	return r
}

// Inject injects the fault unless it is not available here. An error of the
// fault is recorded as indeterminate (it may have taken hold in part) and is
// not returned; a panic is returned as [ErrPanic].
func (r *Run) Inject(ctx context.Context) error {
	r.record.Start = r.clock()
	if err := r.fault.Available(); err != nil {
		r.record.Outcome, r.record.Reason = history.Skipped, err.Error()
		r.record.End = r.record.Start
		return nil
	}
	r.begun = true
	err := guard(r.fault.Name()+": inject", func() error { return r.fault.Inject(ctx) })
	if err != nil {
		r.record.Outcome, r.record.Reason = history.Indeterminate, "inject: "+err.Error()
		return onlyPanic(err)
	}
	r.record.Outcome = history.Installed
	return nil
}

// Wait returns when a campaign has made its last strike; at once for a fault
// that is no campaign, or one that was skipped.
func (r *Run) Wait(ctx context.Context) error {
	c, ok := r.fault.(Campaign)
	if !ok || r.record.Outcome != history.Installed {
		return nil
	}
	select {
	case <-c.Done():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("fault %s: %w", r.fault.Name(), context.Cause(ctx))
	}
}

// Progress of a campaign; ok is false for any other fault.
func (r *Run) Progress() (name string, struck, of int, ok bool) {
	c, isCampaign := r.fault.(Campaign)
	if !isCampaign || r.record.Outcome != history.Installed {
		return "", 0, 0, false
	}
	struck, of = c.Progress()
	return r.fault.Name(), struck, of, true
}

// Heal undoes the fault, once, if it was injected.
func (r *Run) Heal(ctx context.Context) error {
	if !r.begun || r.healed {
		return nil
	}
	r.healed = true
	err := guard(r.fault.Name()+": heal", func() error { return r.fault.Heal(ctx) })
	r.record.End = r.clock()
	if err != nil {
		r.record.Outcome = history.Indeterminate
		r.record.Reason = join(r.record.Reason, "heal: "+err.Error())
	}
	return onlyPanic(err)
}

// Witness asks the fault for its evidence. None stays empty in the record, and
// the judge calls the run invalid.
func (r *Run) Witness(ctx context.Context) error {
	if !r.begun {
		return nil
	}
	var w Witness
	err := guard(r.fault.Name()+": witness", func() (err error) {
		w, err = r.fault.Witness(ctx)
		return err
	})
	if err != nil {
		r.record.Reason = join(r.record.Reason, "witness: "+err.Error())
		return onlyPanic(err)
	}
	r.record.Witness, r.record.Count, r.record.Keys = w.Text, w.Count, w.Keys
	return nil
}

// Record is the fault as it goes into the history.
func (r *Run) Record() history.Fault {
	record := r.record
	if s, ok := r.fault.(Spanned); ok && r.begun {
		if from, to := s.Span(); from > 0 {
			record.Start, record.End = from, max(from, to)
		}
	}
	return record
}

// Unplug returns f with an Inject and a Heal that do nothing. It is the
// harness's test of itself: a run that relies on f must become invalid.
func Unplug(f Fault) Fault { return unplugged{f} }

type unplugged struct{ Fault }

func (unplugged) Inject(context.Context) error { return nil }
func (unplugged) Heal(context.Context) error   { return nil }

func (u unplugged) Target() string {
	if t, ok := u.Fault.(Targeted); ok {
		return t.Target()
	}
	return ""
}

func guard(what string, f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%w: %s: %v\n%s", ErrPanic, what, p, debug.Stack())
		}
	}()
	return f()
}

func onlyPanic(err error) error {
	if errors.Is(err, ErrPanic) {
		return err
	}
	return nil
}

func join(a, b string) string {
	if a == "" {
		return b
	}
	return a + "; " + b
}
