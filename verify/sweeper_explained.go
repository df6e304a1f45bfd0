package verify

import (
	"maps"
	"slices"
	"strings"

	"mailproof/history"
)

var sweeperExplained = rule{
	name:      "sweeper-explained",
	statement: "The sweeper is a net and no working part: each rescue is explained by a fault of a process, the database or a broker; without one there is none. A run in which a dependency failed the system though no fault struck it cannot tell.",
	check: func(e *Evidence, r *report) {
		if e.Final.Counters == nil {
			r.skip("no counters were recorded")
			return
		}
		cause := e.brokenPart()
		for _, name := range slices.Sorted(maps.Keys(e.Final.Counters)) {
			if !strings.Contains(name, "rescue") {
				continue
			}
			r.looked(1)
			n := e.Final.Counters[name]
			if n == 0 || cause != "" {
				continue
			}
			if trouble, waits := e.undeclaredTrouble(); trouble != "" {
				// Not the sweeper's fault, as far as anybody can tell, and not the
				// run that was planned either: neither pass nor fail.
				r.find(Invalid, "", "%s counts %.0f, no process, database or broker was struck, and yet the system waited for one: %s counts %.0f",
					name, n, trouble, waits)
				continue
			}
			r.breach("", "%s counts %.0f, and no process, database or broker was struck", name, n)
		}
	},
}

// undeclaredTrouble names a counter of failed calls to a dependency that are
// repeated; the harness's machine, not a fault, may be at work.
func (e *Evidence) undeclaredTrouble() (counter string, n float64) {
	for _, name := range slices.Sorted(maps.Keys(e.Final.Counters)) {
		if strings.Contains(name, "dependency_waits") && e.Final.Counters[name] > 0 {
			return name, e.Final.Counters[name]
		}
	}
	return "", 0
}

// brokenPart names one part that was struck and that could have taken a
// doorbell or a lease away.
func (e *Evidence) brokenPart() string {
	for name, l := range e.lives {
		if len(l.deaths)+len(l.pauses) > 0 {
			return name
		}
	}
	for i := range e.Faults {
		f := &e.Faults[i]
		if f.Outcome == history.Installed && !harmless(f) {
			return f.Target
		}
	}
	return ""
}

// harmless reports a fault that leaves the system's parts as they are: a mail
// server that misbehaves, a topic with more records than it should have, a
// campaign that floods it.
func harmless(f *history.Fault) bool {
	target := strings.ToLower(f.Target)
	for _, kind := range []string{"smtp", "resend", "mail server", "mail api", "topic ", "campaign"} {
		if strings.Contains(target, kind) {
			return true
		}
	}
	return false
}
