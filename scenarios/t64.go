package scenarios

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"mailproof/fakes/script"
	"mailproof/fakes/smtp"
	"mailproof/faults"
	"mailproof/history"
	"mailproof/verify"
)

// permanentErrors is T6.4: addresses that are none, users and domains that do
// not exist, contents that are refused after the dot, and beside them mails that
// the server only takes later, or never. What no repetition can change is tried
// once and is DEAD at once, with its letter and alert (AC5); what is refused for
// now keeps its tries (AC4).
func permanentErrors() Scenario {
	return Scenario{
		Name:       "t6.4",
		Title:      "malformed addresses and refusals for good, beside others for now",
		Proves:     []string{"AC5", "M6-04", "M6-10", "TRAP-M6-8"},
		Cells:      []Cell{cellResend()},
		Floors:     history.Floors{Confirmed: 500, Faults: 1},
		Invariants: everyMail(),
		System:     fast(),
		Load:       Load{Baseline: 20, Bookings: 520, PerSecond: 40},
		Adjust:     addressByFate,
		// A mail that is refused for now must meet the same server again.
		FaultsUntilSettled: true,
		Expect:             35 * time.Second,
		Judge:              judgePermanentErrors,
		FaultNames:         []string{"refusals"},
		Faults: func(b *Bench) []faults.Fault {
			all := &faults.Refusals{Server: b.Parts.Mail}
			for _, f := range fates() {
				if f.code != 0 {
					all.All = append(all.All, faults.Refusal{Name: f.name, Rule: f.rule()})
				}
			}
			return []faults.Fault{all}
		},
	}
}

// fate is what a mail meets at the server. Its name begins the recipient's
// address, so that the judge knows it from the evidence.
type fate struct {
	name  string
	share int // of fateShares
	// The server's answer to it; no code: none.
	stage    script.Stage
	code     int
	enhanced string
	times    int // to its first tries only; 0: to all
	// forms are addresses that no server can be asked about, for fmt.Sprintf with
	// the local part.
	forms []string
}

const fateShares = 50

// fates of the mails of the faults phase. Reply codes: RFC 5321 section 4.2.2,
// enhanced ones RFC 3463 section 3.
func fates() []fate {
	return []fate{
		{name: "malformed", share: 7, forms: []string{
			"%s", "%s@", "@%s.customers.test", "%s@customers@@customers.test", "%s guest@customers.test",
			"%s@customers..test", "<%s@customers.test>", "%s,guest@customers.test",
		}},
		{name: "unknown-user", share: 6, stage: smtp.StageRcpt, code: 550, enhanced: "5.1.1"},
		{name: "bad-mailbox", share: 5, stage: smtp.StageRcpt, code: 550, enhanced: "5.1.3"},
		{name: "too-large", share: 5, stage: smtp.StageDot, code: 552, enhanced: "5.3.4"},
		{name: "rejected", share: 5, stage: smtp.StageDot, code: 554, enhanced: "5.7.1"},
		{name: "greylisted", share: 6, stage: smtp.StageRcpt, code: 451, enhanced: "4.7.1", times: 1},
		{name: "busy", share: 4, stage: smtp.StageDot, code: 452, enhanced: "4.3.1", times: 2},
		{name: "full", share: 2, stage: smtp.StageRcpt, code: 452, enhanced: "4.2.2"},
		{name: "welcome", share: 10},
	}
}

func (f fate) rule() script.Rule {
	r := script.Rule{
		Match:  script.Match{Recipient: f.name + "*"},
		Action: script.Action{Kind: script.Reply, Stage: f.stage, Code: f.code, Enhanced: f.enhanced, Text: f.name},
	}
	if f.times > 0 {
		r.Match.Nth = script.First(f.times)
	}
	return r
}

// forGood reports that no repetition can change the outcome.
func (f fate) forGood() bool { return f.forms != nil || f.code >= 500 }

// tries that the mail must get: at the server, and by claim.
func (f fate) tries(limit int) (seen, claims int) {
	switch {
	case f.forms != nil:
		return 0, 1 // no server can be asked
	case f.code == 0 || f.forGood():
		return 1, 1
	case f.times > 0:
		return f.times + 1, f.times + 1
	default:
		return limit, limit
	}
}

// end is the state in which it must come to rest.
func (f fate) end() string {
	if f.forGood() || f.code != 0 && f.times == 0 {
		return "dead"
	}
	return "sent"
}

// fateOf is the fate that an address was made for; ok is false for one of the
// baseline.
func fateOf(recipient string) (fate, bool) {
	for _, f := range fates() {
		if strings.Contains(recipient, f.name) {
			return f, true
		}
	}
	return fate{}, false
}

// addressByFate gives each booking of the faults phase a fate, each in its share
// and in an order of the seed's.
func addressByFate(p *Plan, r *rand.Rand) {
	var deal []fate
	for len(deal) < len(p.Faults) {
		for _, f := range fates() {
			deal = slices.Concat(deal, slices.Repeat([]fate{f}, f.share))
		}
	}
	deal = deal[:len(p.Faults)]
	r.Shuffle(len(deal), func(i, j int) { deal[i], deal[j] = deal[j], deal[i] })
	for i, f := range deal {
		local := fmt.Sprintf("%s%04d", f.name, i+1)
		form := "%s@customers.test"
		if f.forms != nil {
			form = f.forms[i%len(f.forms)]
		}
		p.Faults[i].Recipient = fmt.Sprintf(form, local)
	}
}

const (
	deadAtOnce  = "dead-at-once"
	stillTried  = "transient-beside"
	letterDelay = "from the only try to its dead letter, p95"

	triesForGood = "tries per mail refused for good"
	triesForNow  = "tries per mail refused for now"
)

// judgePermanentErrors judges AC5 on the evidence of each mail alone: tries in
// the ledger, claims and states in the log, letters and alerts at the end.
func judgePermanentErrors(h *history.History, own *ownFindings) {
	e := verify.NewEvidence(h, verify.DefaultColumns())
	count := map[string]int{}
	for _, key := range e.Keys {
		if f, ok := fateOf(recipientOf(e.Mails[key])); ok {
			count[f.name]++
		}
	}
	forGood, forNow := 0, 0
	for _, f := range fates() {
		switch {
		case f.forGood():
			forGood += count[f.name]
		case f.code != 0:
			forNow += count[f.name]
		}
	}
	own.check(deadAtOnce, "What no repetition can change is tried exactly once, then DEAD with its dead letter and an alert, and waits in no delay tier (AC5).", forGood)
	own.check(stillTried, "Beside it, what is refused for now is tried again after its delay: delivered when the server takes it, DEAD after exactly as many tries as configured when it never does (AC4).", forNow)
	for _, f := range fates() {
		if count[f.name] == 0 {
			own.find(verify.Invalid, deadAtOnce, "", fmt.Sprintf("no mail of kind %s was confirmed", f.name))
		}
	}
	var waits []float64
	tries := map[bool]int{} // for good or not → claims
	for _, key := range e.Keys {
		m := e.Mails[key]
		f, ok := fateOf(recipientOf(m))
		if !ok || !m.Confirmed() {
			continue
		}
		claimed := judgeFate(h, own, m, f)
		if f.code != 0 || f.forms != nil {
			tries[f.forGood()] += claimed
		}
		if w, ok := untilLetter(m); ok && f.forGood() {
			waits = append(waits, w)
		}
	}
	judgeTiers(h, own, e)
	own.measure("refused for good", float64(forGood), "mails", fmt.Sprintf("%d of them no address at all", count["malformed"]))
	own.measure("refused for now, beside them", float64(forNow), "mails", "")
	own.measure(triesForGood, float64(tries[true])/float64(max(forGood, 1)), "", "by the claims of their rows")
	own.measure(triesForNow, float64(tries[false])/float64(max(forNow, 1)), "", "by the claims of their rows")
	if len(waits) > 0 {
		slices.Sort(waits)
		own.measure(letterDelay, waits[(len(waits)*95+99)/100-1], "ms", fmt.Sprintf("the shortest delay tier is %s", slices.Min(h.Meta.RetryDelays)))
	}
}

func recipientOf(m *verify.Mail) string {
	for _, o := range m.Ops {
		if o.Recipient != "" {
			return o.Recipient
		}
	}
	return ""
}

// judgeFate compares one mail's life with what it must be, and returns how often
// it was claimed.
func judgeFate(h *history.History, own *ownFindings, m *verify.Mail, f fate) (claimed int) {
	name := stillTried
	if f.forGood() {
		name = deadAtOnce
	}
	breach := func(format string, args ...any) {
		own.find(verify.Fail, name, m.Key, f.name+": "+fmt.Sprintf(format, args...))
	}
	seen, claims := f.tries(h.Meta.MaxAttempts)
	if n := len(m.Attempts); n != seen {
		breach("the server saw %d tries, %d are right", n, seen)
	}
	waited := false
	for i := range m.Moves {
		mv := &m.Moves[i]
		claimed += btoi(mv.To == "SENDING" && mv.From != "SENDING")
		waited = waited || mv.To == "FAILED"
	}
	if claimed != claims {
		breach("claimed %d times, %d are right", claimed, claims)
	}
	if waited && claims == 1 {
		breach("it waited for another try, and none can end otherwise")
	}
	if m.State() != f.end() {
		breach("its state is %q, not %q", m.State(), f.end())
	}
	if f.end() == "dead" && (m.Letters != 1 || !m.Alerted("dead")) {
		breach("%d dead letters, alerted: %t", m.Letters, m.Alerted("dead"))
	}
	return claimed
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// untilLetter is the time from the end of a mail's only try (the claim, where no
// server could be asked) to its confirmed dead letter, in milliseconds.
func untilLetter(m *verify.Mail) (float64, bool) {
	var over, letter int64
	for i := range m.Moves {
		mv := &m.Moves[i]
		if over == 0 && mv.To == "SENDING" {
			over = mv.At
		}
		if letter == 0 && mv.To == "DEAD" && mv.New["dlq_published_at"] != "" {
			letter = mv.At
		}
	}
	for _, a := range m.Attempts {
		over = max(over, a.To)
	}
	return float64(letter-over) / 1e6, over > 0 && letter > 0
}

// judgeTiers compares what was published to delay tiers with the refusals that
// ask for one: a mail refused for good that went through a tier all the same
// would add to it.
func judgeTiers(h *history.History, own *ownFindings, e *verify.Evidence) {
	const slack = 1.1 // one that comes back before the row is due goes round again
	var published float64
	for name, n := range h.Final.Counters {
		if strings.Contains(name, "retry_publishes_total") {
			published += n
		}
	}
	due := 0
	for _, key := range e.Keys {
		m := e.Mails[key]
		for i := range m.Moves {
			due += btoi(m.Moves[i].To == "FAILED" && m.Moves[i].From == "SENDING")
		}
	}
	own.measure("messages through the delay tiers", published, "", fmt.Sprintf("for %d refusals that ask for one", due))
	switch {
	case published == 0 || due == 0:
		own.find(verify.Invalid, deadAtOnce, "", "the system counted no message through its delay tiers")
	case published > slack*float64(due):
		own.find(verify.Fail, deadAtOnce, "", fmt.Sprintf("%.0f messages went through the delay tiers for %d refusals that ask for one", published, due))
	}
}
