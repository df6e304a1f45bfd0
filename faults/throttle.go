package faults

import (
	"context"
	"fmt"
	"slices"
	"time"

	"mailproof/fakes/resendapi"
	"mailproof/fakes/script"
)

// ThrottleName is the name of fault [Throttle].
const ThrottleName = "provider-throttles"

// Throttle is a mail API that takes so many requests per window and answers the
// others 429 with a Retry-After of one window, as providers do with a backlog
// that comes all at once (OB-10).
type Throttle struct {
	Server MailServer
	// Limit of requests per Window, which slides: at least one, and above zero.
	Limit  int
	Window time.Duration

	rule string
}

// Name of the fault.
func (*Throttle) Name() string { return ThrottleName }

// Target is the mail server.
func (*Throttle) Target() string { return "mail API" }

// Available everywhere.
func (*Throttle) Available() error { return nil }

// Inject installs one rule for all requests.
func (t *Throttle) Inject(context.Context) error {
	var err error
	t.rule, err = t.Server.AddRule(script.Rule{
		ID:     ThrottleName,
		Action: script.Action{Kind: script.Rate, Stage: resendapi.StageRequest, Limit: t.Limit, For: script.Duration(t.Window)},
	})
	if err != nil {
		return fmt.Errorf("throttling the mail API: %w", err)
	}
	return nil
}

// Heal removes it.
func (t *Throttle) Heal(context.Context) error {
	if t.rule != "" {
		t.Server.RemoveRule(t.rule)
	}
	return nil
}

// Witness counts the 429 of the rule in the ledger.
func (t *Throttle) Witness(context.Context) (Witness, error) {
	keys := map[string]bool{}
	n := 0
	for _, a := range t.Server.Ledger() {
		if t.rule != "" && a.Code == 429 && slices.Contains(a.Rules, t.rule) {
			keys[a.Key] = true
			n++
		}
	}
	if n == 0 {
		return Witness{}, nil
	}
	return Witness{
		Text:  fmt.Sprintf("429 for %d tries of %d mails: more than %d within %s", n, len(keys), t.Limit, t.Window),
		Count: n,
	}, nil
}
