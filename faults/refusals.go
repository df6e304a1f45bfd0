package faults

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"mailproof/fakes/script"
)

// Refusal is one answer of the mail server to some of its mails.
type Refusal struct {
	// Name of the rule and of its mails, such as "unknown-user".
	Name string
	Rule script.Rule
}

// Refusals answers each kind of mail in its own way, for good or for now, side
// by side: one server as its customers meet it (T6.4, AC5).
type Refusals struct {
	Server MailServer
	All    []Refusal
}

// Name of the fault.
func (*Refusals) Name() string { return "refusals" }

// Target is the mail server.
func (*Refusals) Target() string { return "smtp server" }

// Available everywhere.
func (*Refusals) Available() error { return nil }

// Inject installs the rules.
func (r *Refusals) Inject(context.Context) error {
	for _, one := range r.All {
		one.Rule.ID = one.Name
		if _, err := r.Server.AddRule(one.Rule); err != nil {
			return fmt.Errorf("refusal %s: %w", one.Name, err)
		}
	}
	return nil
}

// Heal removes them.
func (r *Refusals) Heal(context.Context) error {
	for _, one := range r.All {
		r.Server.RemoveRule(one.Name)
	}
	return nil
}

// Witness counts in the ledger what each rule refused. One that refused nothing
// is an error: a part of the fault never struck.
func (r *Refusals) Witness(context.Context) (Witness, error) {
	tries := map[string]int{}
	for _, a := range r.Server.Ledger() {
		for _, rule := range a.Rules {
			if a.Code >= 400 && slices.ContainsFunc(r.All, func(one Refusal) bool { return one.Name == rule }) {
				tries[rule]++
			}
		}
	}
	var words, idle []string
	total := 0
	for _, one := range r.All {
		if tries[one.Name] == 0 {
			idle = append(idle, one.Name)
			continue
		}
		total += tries[one.Name]
		words = append(words, fmt.Sprintf("%s %d (%d at %s)", one.Name, tries[one.Name], one.Rule.Action.Code, one.Rule.Action.Stage))
	}
	switch {
	case total == 0:
		return Witness{}, nil
	case len(idle) > 0:
		return Witness{}, fmt.Errorf("no try was refused by %s", strings.Join(idle, ", "))
	}
	return Witness{Text: "tries refused: " + strings.Join(words, ", "), Count: total}, nil
}
