package verify

import "time"

var expiryIsHonoured = rule{
	name:      "expiry-is-honoured",
	statement: "A mail whose time is over (expires_at) is claimed by nobody any more: what is stale is not sent (OB-11, CASE-2).",
	needs:     needsWAL,
	check: func(e *Evidence, r *report) {
		column := e.Columns.Mails.ExpiresAt
		if column == "" {
			r.skip("the system's rows say nothing of when a mail is not worth sending any more")
			return
		}
		e.mails(func(m *Mail) {
			for i := range m.Moves {
				checkWorthSending(m, &m.Moves[i], column, r)
			}
		})
	},
}

// checkWorthSending compares two times of the database's own clock.
func checkWorthSending(m *Mail, mv *Move, column string, r *report) {
	text := mv.New[column]
	if text == "" || (mv.From != "" && !mv.claim) {
		return // a row counts once, when it comes, and with each claim
	}
	r.looked(1)
	at, err := parsePGTime(text)
	if err != nil {
		r.find(HarnessError, m.Key, "column %s: %v", column, err)
		return
	}
	if late := mv.CommitAt.Sub(at); mv.claim && late > claimUnderWay {
		r.breach(m.Key, "claimed %s after its time was over (commit %d)", late.Round(time.Millisecond), mv.Order)
	}
}
