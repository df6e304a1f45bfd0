package faults

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"mailproof/fakes/ledger"
	"mailproof/fakes/script"
)

// Lose250 makes the server keep a mail and lose its answer (T6.7, RFC 1047):
// the client saw the final dot, or the whole request, leave and never learns
// what became of it. The server is an SMTP server or an HTTP API: both fakes
// keep a mail at the stage "stored".
type Lose250 struct {
	server MailServer
	target string
	losses []Loss
	rules  []string
	struck map[string]bool // rules that were installed
}

// Loss is one mail whose answers are lost.
type Loss struct {
	Recipient string
	// How the answers to the first, second … stored try are lost: drop, reset,
	// hang, or reply: a proxy's 502 in place of an API's 200.
	How []script.Kind
}

// OverSMTP and OverHTTP are the ways in which an answer is lost on its way.
func OverSMTP() []script.Kind { return []script.Kind{script.Drop, script.Reset, script.Hang} }

// OverHTTP is OverSMTP and the 502 of a proxy that lost the server behind it.
func OverHTTP() []script.Kind { return append(OverSMTP(), script.Reply) }

// storedStage is where both fakes have kept a mail and not answered yet.
const storedStage script.Stage = "stored"

// DrawLosses picks a share of the recipients, and for each in which of the ways
// its first answer is lost; every third of them loses the answer to its second
// try too, closed or reset.
func DrawLosses(r *rand.Rand, recipients []string, share float64, kinds []script.Kind) []Loss {
	picked := r.Perm(len(recipients))[:int(share*float64(len(recipients)))]
	slices.Sort(picked)
	losses := make([]Loss, len(picked))
	for i, p := range picked {
		// In turn, so that each kind strikes also a small workload.
		how := []script.Kind{kinds[i%len(kinds)]}
		if r.IntN(3) == 0 {
			how = append(how, kinds[r.IntN(2)]) // no second hang: it costs a deadline
		}
		losses[i] = Loss{Recipient: recipients[p], How: how}
	}
	return losses
}

// NewLose250 prepares the losses at a server; target names it in the report.
func NewLose250(server MailServer, target string, losses []Loss) *Lose250 {
	return &Lose250{server: server, target: target, losses: losses, struck: map[string]bool{}}
}

// Name of the fault.
func (*Lose250) Name() string { return "lose-250" }

// Target is the mail server.
func (l *Lose250) Target() string { return l.target }

// Available everywhere.
func (*Lose250) Available() error { return nil }

// Inject installs one rule per lost answer. A rule strikes once: a recipient's
// second loss waits for the second stored or recognised try.
func (l *Lose250) Inject(context.Context) error {
	for _, loss := range l.losses {
		for n, kind := range loss.How {
			id, err := l.server.AddRule(script.Rule{
				ID:     fmt.Sprintf("lose-250:%s:%d", loss.Recipient, n+1),
				Match:  script.Match{Recipient: loss.Recipient, Nth: script.Nth(n + 1)},
				Action: lossOf(kind),
				Count:  1,
			})
			if err != nil {
				return fmt.Errorf("losing the 250 of %s: %w", loss.Recipient, err)
			}
			l.rules = append(l.rules, id)
			l.struck[id] = true
		}
	}
	return nil
}

func lossOf(kind script.Kind) script.Action {
	a := script.Action{Kind: kind, Stage: storedStage}
	if kind == script.Reply {
		a.Code = badGateway
	}
	return a
}

// badGateway promises nothing about the request (RFC 9110 15.6.3).
const badGateway = 502

// Heal removes the rules that have not struck yet.
func (l *Lose250) Heal(context.Context) error {
	for _, id := range l.rules {
		l.server.RemoveRule(id)
	}
	return nil
}

// Witness counts the ledger's tries that a rule of this fault struck, that kept
// the mail (or recognised it), and whose answer was not written, or was a 502. A
// drawn mail that was not struck at all is an error: the run did not cover what it says.
func (l *Lose250) Witness(context.Context) (Witness, error) {
	by := map[string]int{}
	keys, struck := map[string]bool{}, map[string]bool{}
	n := 0
	for _, a := range l.server.Ledger() {
		if !l.lost(a) {
			continue
		}
		n++
		by[a.Fault]++
		keys[a.Key] = true
		struck[a.Recipient] = true
	}
	switch {
	case n == 0:
		return Witness{}, nil
	case len(struck) < len(l.losses):
		return Witness{}, fmt.Errorf("%d of %d mails lost an answer (%s)", len(struck), len(l.losses), tally(by))
	}
	return Witness{
		Text:  fmt.Sprintf("%d tries of %d mails were kept and got no reply (%s)", n, len(keys), tally(by)),
		Count: n, Keys: sortedKeys(keys),
	}, nil
}

func (l *Lose250) lost(a ledger.Attempt) bool {
	return (a.Stored || a.Deduplicated) && (!a.ReplyWritten || a.Code == badGateway) &&
		slices.ContainsFunc(a.Rules, func(id string) bool { return l.struck[id] })
}

// tally writes counts as "dot 3, mail 2".
func tally(by map[string]int) string {
	parts := make([]string, 0, len(by))
	for _, name := range sortedKeys(by) {
		parts = append(parts, fmt.Sprintf("%s %d", name, by[name]))
	}
	return strings.Join(parts, ", ")
}
