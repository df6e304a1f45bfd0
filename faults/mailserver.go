package faults

import (
	"context"

	"mailproof/fakes/ledger"
	"mailproof/fakes/script"
)

// MailServer is what faults need of a fake mail server; those of SMTP and of
// Resend's API have it.
type MailServer interface {
	AddRule(r script.Rule) (string, error)
	RemoveRule(id string) bool
	AwaitHold(ctx context.Context, filter func(script.Hold) bool) (script.Hold, error)
	Release(id int64) bool
	Ledger() []ledger.Attempt
}

// Process is what faults need of a process; target.Process and infra.Node have
// it.
type Process interface {
	Name() string
	PID() int
	Kill(ctx context.Context) error
	Restart(ctx context.Context) error
}
