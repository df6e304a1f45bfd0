package verify

import (
	"slices"
	"strings"

	"mailproof/history"
)

// Without it a receiver that deduplicates would hide a system that sends every
// mail ten times.
var noNeedlessSend = rule{
	name:      "no-needless-send",
	statement: "A mail is handed over again only when the outcome of every earlier attempt was a refusal, or could not be known or written down; copies that the receiver dropped count too.",
	check: func(e *Evidence, r *report) {
		e.mails(func(m *Mail) {
			var dots []*history.Attempt
			for _, a := range m.Attempts {
				if a.DotAt > 0 {
					dots = append(dots, a)
				}
			}
			r.looked(len(dots))
			slices.SortStableFunc(dots, byDot)
			for i := 1; i < len(dots); i++ {
				if a := e.settledBefore(m, dots[:i], dots[i]); a != nil {
					r.breach(m.Key, "attempt %d was sent, although attempt %d had been answered %q and nothing kept the system from writing that down",
						dots[i].ID, a.ID, a.Reply)
				}
			}
		})
	},
}

// settledBefore returns an attempt that the system knew, or should have known,
// to be accepted when it sent the later one.
func (e *Evidence) settledBefore(m *Mail, earlier []*history.Attempt, later *history.Attempt) *history.Attempt {
	if e.dotWasOnItsWay(later) {
		return nil
	}
	for _, a := range earlier {
		if !accepted(a) || a.To > later.DotAt {
			continue
		}
		// An attempt that began before the other was over may have been claimed
		// in good faith; what it must not do is write the dot afterwards.
		until := max(later.From, a.To)
		if e.unsettled(m, a, until) == "" {
			return a
		}
	}
	return nil
}

// dotWasOnItsWay reports that the server may have read the dot long after it
// was written: the script did not read the body for a while, or the process
// that wrote it was dead by then. In all other cases the time of reading is,
// over loopback, the time of writing.
func (e *Evidence) dotWasOnItsWay(a *history.Attempt) bool {
	if strings.Contains(a.Fault, "body:") {
		return true
	}
	name, _ := e.death(a, a.From, a.DotAt)
	return name != ""
}
