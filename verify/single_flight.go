package verify

import (
	"strconv"
	"time"
)

// It is judged on claims and not on sessions: a stopped worker's session may
// well overlap that of the worker that took over.
var singleFlight = rule{
	name:      "single-flight",
	statement: "One worker at a time holds a mail: each claim raises its token by exactly one, is committed before the mail is sent, and none is made while the lease before it lives.",
	needs:     needsWAL,
	check: func(e *Evidence, r *report) {
		e.mails(func(m *Mail) {
			for i := range m.Moves {
				checkClaim(e, m, &m.Moves[i], r)
				checkOneTransaction(m, i, r)
			}
		})
	},
}

func checkClaim(e *Evidence, m *Mail, mv *Move, r *report) {
	c := e.Columns.Mails
	if mv.Before == nil || mv.New == nil {
		return
	}
	before, ok1 := number(mv.Before, c.Token)
	after, ok2 := number(mv.New, c.Token)
	if !ok1 || !ok2 {
		return
	}
	if !mv.claim {
		if before != after {
			r.breach(m.Key, "token went from %d to %d without a claim (%s → %s, commit %d)", before, after, mv.From, mv.To, mv.Order)
		}
		return
	}
	r.looked(1)
	if after != before+1 {
		r.breach(m.Key, "a claim took token %d after %d (commit %d)", after, before, mv.Order)
	}
	if mv.From != stSending {
		return
	}
	until, err := parsePGTime(mv.Before[c.LockedUntil])
	if err != nil {
		r.find(HarnessError, m.Key, "column %s of a row that is being sent: %v", c.LockedUntil, err)
		return
	}
	if mv.CommitAt.Before(until) {
		r.breach(m.Key, "claimed by another while the lease of token %d lived for another %s (commit %d)",
			before, until.Sub(mv.CommitAt).Round(time.Millisecond), mv.Order)
	}
}

// checkOneTransaction finds a claim that was settled in its own transaction: what
// was sent in between was sent under a claim that nobody else could see, with the
// row locked against a cancel (TRAP-1-4).
func checkOneTransaction(m *Mail, i int, r *report) {
	if i == 0 || m.Moves[i].From != stSending {
		return
	}
	claim, end := &m.Moves[i-1], &m.Moves[i]
	if claim.claim && claim.XID != 0 && claim.XID == end.XID && claim.Database == end.Database {
		r.breach(m.Key, "claimed and settled as %s in one transaction (%d): its claim was never to be seen", end.To, end.XID)
	}
}

func number(row map[string]string, column string) (int64, bool) {
	if column == "" {
		return 0, false
	}
	n, err := strconv.ParseInt(row[column], 10, 64)
	return n, err == nil
}
