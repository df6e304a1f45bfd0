// Package scenarios runs the whole system against faults and hands the evidence
// to the judge.
//
// A scenario is a literal value that reads like a table of contents; each has a
// file of its own (t61.go …) and one line in [All]. [Runner] takes each of its
// cells through the phases
//
//	start → baseline → faults → heal → quiesce → judge
//
// and guarantees: one seed rebuilds workload and faults; every fault is healed,
// also after a panic; evidence is on disk before it is judged; a run that did
// not test anything (no traffic, a fault without a witness) is never green.
//
// What it does not cover: the schedule of goroutines and processes is not
// replayed by the seed, only what the harness does and when.
//
// Package scenarios must not import system/: it knows the system under test
// only through package target.
package scenarios

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"mailproof/faults"
	"mailproof/history"
)

// Scenario is one way to break the system, under one or more policies.
type Scenario struct {
	Name  string // "t6.7", the id in the requirements
	Title string // one line for people
	// Proves names the requirements that a green run shows.
	Proves []string
	Cells  []Cell
	Floors history.Floors
	// Invariants are names of checkers of package verify.
	Invariants []string
	System     System
	Load       Load
	// Adjust changes the drawn workload before it starts, from the seed's stream
	// alone: other recipients, say. May be nil.
	Adjust func(p *Plan, r *rand.Rand)
	// FaultNames are the names of the faults that Faults draws: a run in which
	// one of them has no record is invalid.
	FaultNames []string
	// Faults draws the faults of one cell from the parts at hand. Everything
	// random comes from the bench's seed.
	Faults func(b *Bench) []faults.Fault
	// FaultsUntilSettled keeps the faults in place until no mail is pending,
	// for scenarios about a fault that never ends.
	FaultsUntilSettled bool
	// FaultsOf narrows FaultNames to those of one cell. May be nil.
	FaultsOf func(c Cell) []string
	// Campaign bounds the faults phase beyond its workload; 0 means 3 min.
	Campaign time.Duration
	// OnDemand leaves the scenario out of a run that names none.
	OnDemand bool
	// Quiesce bounds the wait for the system to come to rest; 0 means 60 s.
	Quiesce time.Duration
	// Expect is how long a cell takes on two cores, for the time left.
	Expect time.Duration
	// Judge judges and measures, from the evidence alone, what only this
	// scenario is about. May be nil.
	Judge func(h *history.History, own *ownFindings)
	// Exclusive cells act on parts that all cells of a stack share: no other cell
	// may run beside one, and after it the stack is made whole again.
	Exclusive bool
	// MeasureCPU samples the CPU time of the system's processes over an idle
	// stretch and over the faults phase.
	MeasureCPU bool
}

// Cell is one combination of policy and server.
type Cell struct {
	Policy string // same-key, resend, hold
	// Deduplicating says that the fake server keeps one copy per key.
	Deduplicating bool
	// HTTP says that mails go to an API over HTTP, not to an SMTP server.
	HTTP bool
}

// Name of the cell within its scenario.
func (c Cell) Name() string {
	if c.HTTP {
		return c.Policy + "-http"
	}
	return c.Policy
}

// Server is the word for the kind of server in evidence and reports.
func (c Cell) Server() string {
	if c.Deduplicating {
		return "deduplicating"
	}
	return "plain"
}

// System is how the system under test is configured.
type System struct {
	SendDeadline time.Duration
	Lease        time.Duration
	MaxAttempts  int
	RetryDelays  []time.Duration
	// LettersEvery is the period at which dead letters are compared with their
	// rows; 0 leaves the system's default.
	LettersEvery time.Duration
	// SweepEvery is the period of the sweeper; 0 leaves the system's default.
	SweepEvery time.Duration
	// SweepGrace is how long a row must have been due before its doorbell
	// counts as lost.
	SweepGrace time.Duration
	// ReconcileEvery is how often mails that are UNKNOWN are looked up in the mail
	// server's log; 0 gives the system no log.
	ReconcileEvery time.Duration
	// MailServices is the number of processes that send, BookingServices of
	// those that take bookings; 0 means one.
	MailServices, BookingServices int
	// CrashPoints asks for a build with crash points.
	CrashPoints bool
	// Env are variables of the system's processes.
	Env map[string]string
	// PostgresProxy puts a proxy between the system and its database.
	PostgresProxy bool
	// WatchReadiness makes every change of a process's readiness evidence.
	WatchReadiness bool
	// ServiceTime is how long the mail server works on each mail before it
	// answers, as a provider does; 0 answers at once. Connections is how many it
	// grants at a time; 0 leaves the server's default.
	ServiceTime time.Duration
	Connections int
}

// Load is the open-loop workload: arrivals keep their schedule whatever the
// system does.
type Load struct {
	// Baseline bookings are confirmed before the first fault.
	Baseline int
	// Bookings are confirmed while the faults are in place.
	Bookings int
	// PerSecond is the mean rate; gaps are exponential.
	PerSecond float64
	// Cancels is how many of the Bookings their customers cancel, up to two
	// seconds after they confirmed.
	Cancels int
	// UntilStruck ends the arrivals when every campaign has made its last strike
	// and the floor is reached: Bookings is then only their bound.
	UntilStruck bool
}

// Operations is how many the schedule holds.
func (l Load) Operations() int { return l.Baseline + l.Bookings + min(l.Cancels, l.Bookings) }

// The cells that scenarios choose from; each is a row of the guarantee's table
// (verify.Guarantee).
func cellSameKey() Cell { return Cell{Policy: "same-key", Deduplicating: true} }
func cellHold() Cell    { return Cell{Policy: "hold"} }
func cellSameKeyHTTP() Cell {
	return Cell{Policy: "same-key", Deduplicating: true, HTTP: true}
}
func cellHoldHTTP() Cell { return Cell{Policy: "hold", HTTP: true} }
func cellResend() Cell   { return Cell{Policy: "resend"} }

// fast is the configuration of every scenario that does not test a figure of
// the specification: deadline and lease as short as real sends allow.
func fast() System {
	return System{
		SendDeadline: 2 * time.Second,
		Lease:        4 * time.Second,
		MaxAttempts:  4,
		RetryDelays:  []time.Duration{time.Second, 2 * time.Second, 4 * time.Second},
		SweepEvery:   500 * time.Millisecond,
		// Longer than a backlog of any scenario takes to reach a worker: a
		// rescue without a broken part would be the sweeper doing the queue's
		// work, and is a finding.
		SweepGrace: 10 * time.Second,
	}
}

// everyMail names the checkers that judge every scenario. Naming one promises
// its evidence: a run that does not hold it is invalid.
func everyMail() []string {
	return []string{
		"nothing-lost", "at-most-one", "no-needless-send", "no-phantom",
		"sent-is-true", "unknown-justified", "dead-justified", "quiesced",
		"retry-discipline", "single-flight", "dot-within-lease", "terminal-is-final", "legal-transitions", "one-row-per-key",
		"key-discipline", "content-and-recipient",
		"outbox-atomicity", "relay-complete", "queue-conservation", "quorum-queues", "sweeper-explained",
	}
}

// Draw is how scenarios are drawn from command-line options.
type Draw struct {
	// RealDelays uses 10s, 1m, 5m where the specification names them.
	RealDelays bool
	// CrashCell chooses cells of the crash table; nil means all.
	CrashCell func(policy string, p CrashPoint, act string) bool
}

// All is every scenario, in the order in which they are run.
func All(d Draw) []Scenario {
	return append([]Scenario{
		lostReply(),
		reconciled(),
		webhooks(),
		killedWhileSending(),
		duplicateEvents(),
		smtpDown(d),
		wokenWorker(),
		cancels(),
		permanentErrors(),
		dlqReplay(),
		flood(),
		campaigns(),
		labs(),
		leaderLost(),
		rabbitMQ(),
		kafkaLost(),
		postgresLost(),
		commitLost(),
		shutdown(),
		lateParts(),
		crashShort(),
		unreadableEvents(),
		brokerOutage(),
		rewoundOffsets(),
	}, crashes(d)...)
}

// Select returns the scenarios, cells of them ("t6.2/hold"), or stories of
// scenario lab ("lab-four"), that names asks for, in the order of All; no names
// means all that are not on demand. The name
// of an acceptance criterion ("ac5") stands for the cells that decide it.
func Select(all []Scenario, names []string) ([]Scenario, error) {
	if len(names) == 0 {
		return slices.DeleteFunc(slices.Clone(all), func(s Scenario) bool { return s.OnDemand }), nil
	}
	names = withoutAliases(names)
	wanted := map[string][]string{} // scenario → policies, empty: every one
	var stories []string            // chosen of scenario lab
	for _, n := range names {
		if isStory(n) {
			stories = append(stories, n)
			if _, whole := wanted[labsName]; !whole {
				wanted[labsName] = nil
			}
			continue
		}
		if n == labsName {
			stories = storyNames()
		}
		name, policy, narrowed := strings.Cut(n, "/")
		i := slices.IndexFunc(all, func(s Scenario) bool { return s.Name == name })
		if i < 0 {
			return nil, fmt.Errorf("no scenario is called %q; there are %s, and ac1 to ac8 for the cells of a criterion", name, strings.Join(list(all), ", "))
		}
		if !narrowed {
			wanted[name] = nil
			continue
		}
		if !slices.ContainsFunc(all[i].Cells, func(c Cell) bool { return c.Name() == policy }) {
			return nil, fmt.Errorf("scenario %s has no cell %q; it has %s", name, policy, strings.Join(policies(all[i]), ", "))
		}
		if have, seen := wanted[name]; !seen || have != nil {
			wanted[name] = append(have, policy)
		}
	}
	var chosen []Scenario
	for _, s := range all {
		keep, ok := wanted[s.Name]
		if !ok {
			continue
		}
		if s.Name == labsName && len(stories) > 0 {
			s = labs(stories...)
		}
		if keep != nil {
			s.Cells = slices.DeleteFunc(slices.Clone(s.Cells), func(c Cell) bool { return !slices.Contains(keep, c.Name()) })
		}
		chosen = append(chosen, s)
	}
	return chosen, nil
}

func withoutAliases(names []string) []string {
	var plain []string
	for _, n := range names {
		if from, ok := Alias(n); ok {
			plain = append(plain, from...)
			continue
		}
		plain = append(plain, n)
	}
	return plain
}

func list(all []Scenario) []string {
	names := make([]string, len(all))
	for i, s := range all {
		names[i] = s.Name
	}
	return names
}

func policies(s Scenario) []string {
	names := make([]string, len(s.Cells))
	for i, c := range s.Cells {
		names[i] = c.Name()
	}
	return names
}

// cellID names a cell in folders, databases and --scenario. A scenario of one
// cell needs no policy in its folder.
func cellFolder(s Scenario, c Cell) string { return s.Name + "-" + c.Name() }

// rng is the stream of random numbers for one purpose: adding a purpose changes
// no other.
func rng(seed uint64, scenario, purpose string) *rand.Rand {
	return rand.New(rand.NewPCG(seed, fnv1a(scenario+"\x00"+purpose)))
}

// fnv1a is the 64-bit FNV-1a hash.
func fnv1a(s string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return h
}
