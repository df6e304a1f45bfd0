package verify

import "time"

var quiesced = rule{
	name:      "quiesced",
	statement: "After the last fault is healed every mail comes to rest within the bound.",
	check:     checkQuiesced,
}

func checkQuiesced(e *Evidence, r *report) {
	// The bound is where judging begins; reading what was left takes a while.
	bound, _, ok := e.Phase("judge")
	if !ok {
		bound = e.Final.At
	}
	patience := e.patience()
	draining := e.drainedSince(bound - patience)
	e.mails(func(m *Mail) {
		r.looked(1)
		if !e.waiting(m) {
			return
		}
		why := e.Final.Pending[m.Key]
		if why == "" {
			why = "its row is " + m.State()
		}
		last := e.lastSign(m)
		switch {
		case last >= bound-patience:
			r.find(Unknown, m.Key, "still moving at the bound: %s", why)
		case draining:
			r.find(Unknown, m.Key, "still waiting at the bound while others come to rest: %s", why)
		default:
			r.breach(m.Key, "stalled for %d ms at the bound: %s", (bound-last)/1e6, why)
		}
	})
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
// being worked off. A mail that loops for ever does not count.
func (e *Evidence) drainedSince(since int64) bool {
	for _, key := range e.Keys {
		m := e.Mails[key]
		if e.waiting(m) {
			continue
		}
		if n := len(m.Moves); n > 0 && m.Moves[n-1].At >= since && m.Moves[n-1].From != m.Moves[n-1].To {
			return true
		}
		for _, a := range m.Attempts {
			if a.Stored && a.To >= since {
				return true
			}
		}
	}
	return false
}
