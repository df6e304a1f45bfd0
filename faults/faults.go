// Package faults breaks parts on purpose. A fault is an exported value with
// five methods; a new one is one file and one line in the scenario that uses
// it.
//
// A fault without a witness proves nothing: the run that relied on it is
// invalid, not green.
//
// Package faults knows the parts (infra), the processes of the target and the
// fakes' control, never the inside of the system under test.
package faults

import (
	"context"

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

// Witness is evidence that a fault struck.
type Witness struct {
	Text  string // "24 sessions held at dot when notifyd got SIGKILL"; empty: none seen
	Count int
	Keys  []string // mails that it struck, when it strikes single mails
}

// Run is a fault's life in a run, as it is recorded.
type Run struct {
	Fault  Fault
	record history.Fault
}
