package verify

import (
	"slices"
	"time"

	"mailproof/history"
)

var throttleIsHonoured = rule{
	name: "throttle-is-honoured",
	statement: "A receiver that asks to come again later (Retry-After) is heeded: its mail is not tried before that, nor put off for much longer. " +
		"One that takes no more for now (HTTP 429) is heeded by the whole client, which begins with no other mail either; and the try costs the mail none of its attempts (OB-10).",
	needs: needsWAL,
	check: func(e *Evidence, r *report) {
		tries := triesOfClients(e)
		e.mails(func(m *Mail) {
			for i, a := range m.Attempts {
				if !refused(a) || a.RetryAfter <= 0 {
					continue
				}
				r.looked(1)
				if i+1 < len(m.Attempts) {
					checkComesBack(e, m, a, m.Attempts[i+1], r)
				}
				if throttled(a) {
					checkClientWaits(e, m, a, tries[a.Client], r)
					checkCostsNothing(e, m, a, r)
				}
			}
		})
	},
}

// clientTry is one attempt among those of its client.
type clientTry struct {
	mail *Mail
	*history.Attempt
}

// triesOfClients are the attempts of each client in the order in which they
// began.
func triesOfClients(e *Evidence) map[string][]clientTry {
	tries := map[string][]clientTry{}
	e.mails(func(m *Mail) {
		for _, a := range m.Attempts {
			tries[a.Client] = append(tries[a.Client], clientTry{m, a})
		}
	})
	for _, of := range tries {
		slices.SortFunc(of, func(a, b clientTry) int { return int(min(1, max(-1, a.From-b.From))) })
	}
	return tries
}

// told is the earliest moment at which a refusal can have been read, and until is
// when its Retry-After is over, counted from there: the server decided once it had
// read the request, and stamps the end of the try some time after the reply.
func told(a *history.Attempt) (at, until int64) {
	at = max(a.From, a.DotAt)
	return at, at + a.RetryAfter.Nanoseconds()
}

func checkComesBack(e *Evidence, m *Mail, a, next *history.Attempt, r *report) {
	// A process that ended may have read the refusal and not written it down.
	if at, until := told(a); next.From < until && e.struckBeforeSettled(m, a, next.From) == "" {
		r.breach(m.Key, "attempt %d began %s after attempt %d, which was told %s and to wait for %s",
			next.ID, time.Duration(next.From-at).Round(time.Millisecond), a.ID, code(a), a.RetryAfter)
	}
}

// checkClientWaits finds the first mail that the client claimed after it had been
// told to wait, and began with before that was over. What was claimed by then goes
// on: a claim may wait for the database.
func checkClientWaits(e *Evidence, m *Mail, a *history.Attempt, of []clientTry, r *report) {
	at, until := told(a)
	from, _ := slices.BinarySearchFunc(of, at, func(t clientTry, at int64) int { return int(min(1, max(-1, t.From-at))) })
	for _, t := range of[from:] {
		if t.From >= until {
			return
		}
		if t.mail == m {
			continue // checkComesBack has it
		}
		if claimed := claimOf(t.mail, t.Attempt); claimed > at+claimUnderWay.Nanoseconds() && e.struckBeforeSettled(m, a, t.From) == "" {
			r.breach(m.Key, "%s was told by attempt %d to wait for %s, claimed %s after %s, and began attempt %d with it",
				a.Client, a.ID, a.RetryAfter, t.mail.Key, time.Duration(claimed-at).Round(time.Millisecond), t.ID)
			return
		}
	}
}

// claimOf is when the claim was committed under which an attempt was made, 0 where
// the log shows none.
func claimOf(m *Mail, a *history.Attempt) (at int64) {
	for i := range m.Moves {
		if mv := &m.Moves[i]; mv.claim && mv.At <= a.From+sameInstant {
			at = mv.At
		}
	}
	return at
}

// checkCostsNothing looks at the first change of the row after the claim: the try
// was given back, and the mail is put off for what was asked and not much more.
func checkCostsNothing(e *Evidence, m *Mail, a *history.Attempt, r *report) {
	c := e.Columns.Mails
	for i := range m.Moves {
		mv := &m.Moves[i]
		if mv.From != stSending || mv.To == stSending || mv.At <= a.From {
			continue
		}
		held, known := number(mv.Before, c.Attempts)
		left, both := number(mv.New, c.Attempts)
		if known && both && left >= held && e.struckBeforeSettled(m, a, mv.At) == "" {
			r.breach(m.Key, "attempt %d was answered %s and cost one of its attempts: %d before the claim, %d after it, %s (commit %d)",
				a.ID, code(a), held-1, left, mv.To, mv.Order)
		}
		due, err := parsePGTime(mv.New[c.NextAttemptAt])
		if err != nil || mv.To != stFailed {
			return // checkDueTimes of retry-discipline reads it again
		}
		if got := due.Sub(mv.CommitAt); got > a.RetryAfter+delaySlack {
			r.breach(m.Key, "attempt %d was asked to wait for %s, and the mail is put off for %s (commit %d)", a.ID, a.RetryAfter, got.Round(time.Millisecond), mv.Order)
		}
		return
	}
}

// code is a reply's number; what an API writes behind it is long.
func code(a *history.Attempt) string { return a.Reply[:min(3, len(a.Reply))] }
