package verify

import (
	"fmt"
	"time"
)

var quiesced = rule{
	name:      "quiesced",
	statement: "After the last fault is healed every mail comes to rest within the bound.",
	check:     checkQuiesced,
}

func checkQuiesced(e *Evidence, r *report) {
	e.mails(func(m *Mail) {
		r.looked(1)
		if !e.waiting(m) {
			return
		}
		rest := e.unrest(m)
		if !rest.stalled {
			r.find(Unknown, m.Key, "%s", rest.why)
			return
		}
		if lost, _ := e.lost(m); lost {
			return // one breach, one finding: nothing-lost has it
		}
		r.breach(m.Key, "%s", rest.why)
	})
}

// unrest says what became of a mail that had not come to rest at the bound.
type unrest struct {
	stalled bool // nothing moves it any more
	why     string
}

// unrest judges a mail that is waiting at the bound.
func (e *Evidence) unrest(m *Mail) unrest {
	// The bound is where judging begins; reading what was left takes a while.
	bound, _, ok := e.Phase("judge")
	if !ok {
		bound = e.Final.At
	}
	why := e.Final.Pending[m.Key]
	if why == "" {
		why = "its row is " + m.State()
	}
	last := e.lastSign(m)
	switch quiet := bound - e.patience(); {
	case last >= quiet:
		return unrest{false, "still moving at the bound: " + why}
	case e.drainedSince(quiet):
		return unrest{false, "still waiting at the bound while others come to rest: " + why}
	default:
		return unrest{true, fmt.Sprintf("stalled for %d ms at the bound: %s", (bound-last)/1e6, why)}
	}
}

// patience is longer than anything for which a mail may rightly wait without a
// sign of life: a lease, or the longest delay between tries, and time to be
// noticed.
func (e *Evidence) patience() int64 {
	longest := e.Meta.Lease
	for _, d := range e.Meta.RetryDelays {
		longest = max(longest, d)
	}
	return int64(2*longest + 5*time.Second)
}

// lastSign is the time of the latest evidence about the mail.
func (e *Evidence) lastSign(m *Mail) int64 {
	var last int64
	for _, o := range m.Ops {
		last = max(last, o.Return)
	}
	for _, a := range m.Attempts {
		last = max(last, a.To)
	}
	for i := range m.Moves {
		last = max(last, m.Moves[i].At)
	}
	return last
}

// drainedSince reports that some mail came to rest after since: a backlog is
// being worked off.
func (e *Evidence) drainedSince(since int64) bool { return e.lastRest >= since }

// latestRest is when the last mail came to rest. A mail that loops for ever
// does not count.
func (e *Evidence) latestRest() int64 {
	var latest int64
	for _, key := range e.Keys {
		m := e.Mails[key]
		if e.waiting(m) {
			continue
		}
		if n := len(m.Moves); n > 0 && m.Moves[n-1].From != m.Moves[n-1].To {
			latest = max(latest, m.Moves[n-1].At)
		}
		for _, a := range m.Attempts {
			if a.Stored {
				latest = max(latest, a.To)
			}
		}
	}
	return latest
}
