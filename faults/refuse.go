package faults

import (
	"context"
	"fmt"
	"slices"

	"mailproof/fakes/script"
	"mailproof/fakes/smtp"
)

// RefuseRcpt answers every RCPT with 451: a server that is up and takes nothing
// (T6.3, AC4).
type RefuseRcpt struct {
	Server MailServer

	rule string
}

// Name of the fault.
func (*RefuseRcpt) Name() string { return "refuse-rcpt" }

// Target is the mail server.
func (*RefuseRcpt) Target() string { return "smtp server" }

// Available everywhere.
func (*RefuseRcpt) Available() error { return nil }

// Inject installs one rule for all recipients.
func (r *RefuseRcpt) Inject(context.Context) error {
	var err error
	r.rule, err = r.Server.AddRule(script.Rule{
		ID:     "refuse-rcpt",
		Action: script.Action{Kind: script.Reply, Stage: smtp.StageRcpt, Code: 451, Enhanced: "4.3.0", Text: "not now"},
	})
	if err != nil {
		return fmt.Errorf("refusing all recipients: %w", err)
	}
	return nil
}

// Heal removes it.
func (r *RefuseRcpt) Heal(context.Context) error {
	if r.rule != "" {
		r.Server.RemoveRule(r.rule)
	}
	return nil
}

// Witness counts the refusals in the ledger.
func (r *RefuseRcpt) Witness(context.Context) (Witness, error) {
	refused := map[string]int{}
	n := 0
	for _, a := range r.Server.Ledger() {
		if r.rule != "" && slices.Contains(a.Rules, r.rule) && a.Code == 451 {
			refused[a.Recipient]++
			n++
		}
	}
	if n == 0 {
		return Witness{}, nil
	}
	return Witness{
		Text:  fmt.Sprintf("451 at RCPT for %d tries of %d recipients", n, len(refused)),
		Count: n,
	}, nil
}
