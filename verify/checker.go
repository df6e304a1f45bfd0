package verify

import (
	"fmt"
	"slices"
)

// Checker judges one invariant.
type Checker interface {
	// Name in kebab case: "nothing-lost".
	Name() string
	// Statement is the guarantee, as findings quote it.
	Statement() string
	// Check judges the evidence. It must not change it, and must take time
	// linear in its size.
	Check(e *Evidence) Outcome
}

// Outcome of one checker.
type Outcome struct {
	Looked   int // pieces of evidence that were judged
	Findings []Finding
	// Skipped says why the invariant could not be judged; it is then neither
	// kept nor broken.
	Skipped string
}

// Checkers are all invariants, in the order in which reports list them. The
// first two judge the run itself, and always take part, as does the last.
func Checkers() []Checker {
	return []Checker{
		wellFormedHistory, assurance,
		nothingLost, atMostOne, noNeedlessSend, noPhantom,
		sentIsTrue, unknownJustified, deadJustified, quiesced,
		retryDiscipline, throttleIsHonoured, singleFlight, dotWithinLease, terminalIsFinal, legalTransitions, cancelIsHonoured, stopIsHonoured, expiryIsHonoured, oneRowPerKey,
		keyDiscipline, contentAndRecipient,
		outboxAtomicity, relayComplete, queueConservation, quorumQueues, sweeperExplained,
		providerBreach,
	}
}

// Names of all checkers.
func Names() []string {
	var names []string
	for _, c := range Checkers() {
		names = append(names, c.Name())
	}
	return names
}

// evidenceKind is a kind of evidence beside client operations and the ledger,
// which are always there.
type evidenceKind string

const (
	needsNothing evidenceKind = ""
	needsWAL     evidenceKind = "wal"
	needsOutbox  evidenceKind = "outbox"
	needsTopic   evidenceKind = "topic"
	needsQueues  evidenceKind = "queues"
)

// missing says what is not there; "" when it is.
func (e *Evidence) missing(kind evidenceKind) string {
	switch kind {
	case needsWAL:
		if !e.hasWAL() {
			return "no changes of " + e.Columns.Mails.Table + " were recorded"
		}
	case needsOutbox:
		if e.Final == nil || e.Final.Outbox == nil {
			return "the outbox was not recorded"
		}
	case needsTopic:
		if e.Final == nil || e.Final.Topic == nil {
			return "the event topic was not recorded"
		}
	case needsQueues:
		if e.Final == nil || e.Final.Queues == nil {
			return "the broker's queues were not recorded"
		}
	}
	return ""
}

// rule is a checker made of a function.
type rule struct {
	name, statement string
	needs           evidenceKind
	check           func(e *Evidence, r *report)
}

func (r rule) Name() string      { return r.name }
func (r rule) Statement() string { return r.statement }

func (r rule) Check(e *Evidence) Outcome {
	if why := e.missing(r.needs); why != "" {
		return Outcome{Skipped: why}
	}
	rep := &report{rule: r}
	r.check(e, rep)
	return rep.out
}

// report collects what a rule sees.
type report struct {
	rule rule
	out  Outcome
}

func (r *report) looked(n int) { r.out.Looked += n }

// skip gives up judging.
func (r *report) skip(format string, args ...any) { r.out.Skipped = fmt.Sprintf(format, args...) }

// breach reports a finding that fails the system.
func (r *report) breach(key, format string, args ...any) { r.find(Fail, key, format, args...) }

func (r *report) find(v Verdict, key, format string, args ...any) {
	r.out.Findings = append(r.out.Findings, Finding{
		Invariant: r.rule.name, Verdict: v, Key: key, Text: fmt.Sprintf(format, args...),
	})
}

// mails calls f for each mail in the order of keys.
func (e *Evidence) mails(f func(m *Mail)) {
	for _, key := range e.Keys {
		f(e.Mails[key])
	}
}

// choose picks the checkers that a run names; all when it names none.
func choose(names []string) (chosen []Checker, unknownNames []string) {
	all := Checkers()
	if len(names) == 0 {
		return all, nil
	}
	for _, c := range all {
		if slices.Contains(names, c.Name()) || always(c.Name()) {
			chosen = append(chosen, c)
		}
	}
	for _, name := range names {
		if !slices.ContainsFunc(all, func(c Checker) bool { return c.Name() == name }) {
			unknownNames = append(unknownNames, name)
		}
	}
	return chosen, unknownNames
}

func always(name string) bool {
	return name == wellFormedHistory.name || name == assurance.name || name == providerBreach.name
}
