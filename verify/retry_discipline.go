package verify

import (
	"slices"
	"time"

	"mailproof/history"
)

// retrySlack absorbs that the server stamps the end of an attempt after it has
// written the reply: on a busy machine the client may act on the reply first.
const retrySlack = 50 * time.Millisecond

var retryDiscipline = rule{
	name:      "retry-discipline",
	statement: "A refused mail waits for its delay before the next try, is never tried after a permanent refusal, and is tried no more often than configured.",
	check: func(e *Evidence, r *report) {
		e.mails(func(m *Mail) {
			checkGaps(e, m, r)
			checkDueTimes(e, m, r)
			checkDelays(e, m, r)
			checkLimit(e, m, r)
		})
	},
}

// checkLimit counts claims where there is a log of them, else the attempts that
// got so far that a client must count them: one that ends before its mail was
// offered may be a dead kept connection, dialled again within the same try.
func checkLimit(e *Evidence, m *Mail, r *report) {
	limit := e.limit(m)
	if limit == 0 || m.wasReplayed() {
		return
	}
	if len(m.Moves) > 0 {
		for i := range m.Moves {
			mv := &m.Moves[i]
			if n, ok := number(mv.New, e.Columns.Mails.Attempts); ok && mv.claim && int(n) > limit {
				r.breach(m.Key, "claimed for attempt %d, %d are allowed (commit %d)", n, limit, mv.Order)
			}
		}
		return
	}
	made := 0
	for _, a := range m.Attempts {
		if counts(a) {
			made++
		}
	}
	if made > limit {
		r.breach(m.Key, "%d attempts were made, %d are allowed", made, limit)
	}
}

// counts reports an attempt that costs its sender one. A throttle (HTTP 429,
// SMTP 421) refuses the sender, not the mail.
func counts(a *history.Attempt) bool {
	return (a.DotAt > 0 || refused(a)) && !throttled(a)
}

func throttled(a *history.Attempt) bool {
	if a.Transport == "smtp" {
		return refused(a) && len(a.Reply) >= 3 && a.Reply[:3] == "421"
	}
	return refused(a) && len(a.Reply) >= 3 && a.Reply[:3] == "429"
}

// checkGaps judges on the far side's ledger.
func checkGaps(e *Evidence, m *Mail, r *report) {
	number := 0 // of the attempt, counted as the system counts it, or fewer
	for i, a := range m.Attempts {
		r.looked(1)
		if !counts(a) {
			continue
		}
		number++
		if i+1 == len(m.Attempts) {
			return
		}
		next := m.Attempts[i+1]
		if replayed(m, a.From, next.From) {
			continue
		}
		if refusedForGood(a) && !a.Breach {
			// The refusal may have been read by a process that could not write it
			// down.
			if e.struckBeforeSettled(m, a, next.From) != "" || m.byOlderHolder(a, next) {
				continue
			}
			r.breach(m.Key, "attempt %d was made after attempt %d had been refused for good: %s", next.ID, a.ID, a.Reply)
			continue
		}
		checkGap(e, m, a, next, number, r)
	}
}

// byOlderHolder reports that next was made under a claim older than that of a, and
// got no further than the envelope: a sender that stood still since before its
// lease was over goes on where it was, and stops before its dot, which
// dot-within-lease demands. The row had been claimed twice before a, by another
// client than next's at last, and was not claimed between the two.
func (m *Mail) byOlderHolder(a, next *history.Attempt) bool {
	if next.DotAt > 0 || next.Client == a.Client {
		return false
	}
	before := 0
	for i := range m.Moves {
		mv := &m.Moves[i]
		switch {
		case !mv.claim || mv.At >= next.From:
		case mv.At > a.From:
			return false
		default:
			before++
		}
	}
	return before >= 2
}

func checkGap(e *Evidence, m *Mail, a, next *history.Attempt, number int, r *report) {
	// An attempt that was cut short by a fault comes again when its lease is
	// over; single-flight judges that.
	if accepted(a) || e.struckBeforeSettled(m, a, next.From) != "" {
		return
	}
	// Without a whole reply the client may have given up any time after the
	// dot, or after the first byte.
	over := max(a.From, a.DotAt)
	if answered(a) {
		over = a.To
		// The server stamps the end after the reply has left: what the client did
		// with the reply by then is in the log, and it had read it before that.
		if at, ok := m.settledAt(a.From, next.From); ok {
			over = min(over, at)
		}
	}
	want := leastDelay(e.Meta.RetryDelays, number)
	if got := time.Duration(next.From - over); got < want-retrySlack {
		r.breach(m.Key, "attempt %d began %s after attempt %d was over, the delay is %s", next.ID, got.Round(time.Millisecond), a.ID, want)
	}
}

// settledAt is when the log shows that a try of this stretch was settled as
// failed, ok is false where it shows none.
func (m *Mail) settledAt(from, to int64) (at int64, ok bool) {
	for i := range m.Moves {
		mv := &m.Moves[i]
		if mv.From == stSending && mv.To == stFailed && mv.At > from && mv.At < to {
			return mv.At, true
		}
	}
	return 0, false
}

// leastDelay is the shortest delay that may follow the number-th attempt or a
// later one: an attempt that never reached the receiver is missing from the
// ledger, so the true number may be higher.
func leastDelay(delays []time.Duration, number int) time.Duration {
	if len(delays) == 0 {
		return 0
	}
	return slices.Min(delays[min(number, len(delays))-1:])
}

// delaySlack is what a delay may be longer than configured: from the statement's
// own clock to its commit is a moment, and the row's word is of the same clock.
const delaySlack = 2 * time.Second

// checkDelays judges on the log the delay that a refused mail was given: that of
// its try and not much more (no less: checkGap). A mail that is put off for an hour is not
// lost, and nobody would call it delivered either (AC4: 10s, 1m, 5m, in this
// order). Only a throttle's own word (Retry-After) may put it off for longer.
func checkDelays(e *Evidence, m *Mail, r *report) {
	delays, c := e.Meta.RetryDelays, e.Columns.Mails
	if len(delays) == 0 || c.NextAttemptAt == "" || slices.ContainsFunc(m.Attempts, throttled) {
		return
	}
	for i := range m.Moves {
		mv := &m.Moves[i]
		if mv.From != stSending || mv.To != stFailed {
			continue
		}
		n, ok := number(mv.New, c.Attempts)
		due, err := parsePGTime(mv.New[c.NextAttemptAt])
		if !ok || n < 1 || err != nil {
			continue // checkDueTimes reads it again
		}
		r.looked(1)
		want := delays[min(int(n), len(delays))-1]
		if got := due.Sub(mv.CommitAt); got > want+delaySlack {
			r.breach(m.Key, "after try %d it is put off for %s, the delay is %s (commit %d)", n, got.Round(time.Millisecond), want, mv.Order)
		}
	}
}

// checkDueTimes judges on the log: no claim commits before the row was due.
// Both times are the database's.
func checkDueTimes(e *Evidence, m *Mail, r *report) {
	c := e.Columns.Mails
	for i := range m.Moves {
		mv := &m.Moves[i]
		if !mv.claim || mv.From == stSending {
			continue
		}
		due, ok := mv.Before[c.NextAttemptAt]
		if !ok {
			continue
		}
		r.looked(1)
		at, err := parsePGTime(due)
		if err != nil {
			r.find(HarnessError, m.Key, "column %s: %v", c.NextAttemptAt, err)
			continue
		}
		if mv.CommitAt.Before(at) {
			r.breach(m.Key, "claimed %s before it was due (commit %d)", at.Sub(mv.CommitAt).Round(time.Millisecond), mv.Order)
		}
	}
}
