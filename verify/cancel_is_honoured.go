package verify

import "mailproof/history"

var cancelIsHonoured = rule{
	name:      "cancel-is-honoured",
	statement: "Once a cancel is committed in the mail service, no further try begins; what an acknowledged cancel found unsent ends CANCELLED, or stays UNKNOWN and remembers it.",
	needs:     needsWAL,
	check: func(e *Evidence, r *report) {
		e.mails(func(m *Mail) {
			for i := range m.Moves {
				checkAfterCancel(e, m, &m.Moves[i], r)
			}
			checkCancelSeen(e, m, r)
		})
	},
}

// checkAfterCancel judges one transition of a row whose cancel had been asked
// for: it must not lead towards another try.
func checkAfterCancel(e *Evidence, m *Mail, mv *Move, r *report) {
	if !isTrue(mv.Before[e.Columns.Mails.CancelAsked]) {
		return
	}
	r.looked(1)
	switch {
	case mv.claim:
		r.breach(m.Key, "claimed, although its cancel had been committed (commit %d)", mv.Order)
	case mv.From == stSending && (mv.To == stFailed || mv.To == stPending):
		r.breach(m.Key, "%s → %s, although its cancel had been committed: it will be tried again (commit %d)", mv.From, mv.To, mv.Order)
	}
}

// checkCancelSeen finds an acknowledged cancel of which the mail's row knows
// nothing. A row that is SENT or EXPIRED may: the cancel came too late.
func checkCancelSeen(e *Evidence, m *Mail, r *report) {
	acknowledged := false
	for _, o := range m.Ops {
		acknowledged = acknowledged || o.Name == "cancel" && o.Outcome == history.OpOK
	}
	if !acknowledged || len(m.Moves) == 0 {
		return
	}
	r.looked(1)
	last := m.Moves[len(m.Moves)-1]
	if (last.To == stDead || last.To == stUnknown) && !isTrue(last.New[e.Columns.Mails.CancelAsked]) {
		r.breach(m.Key, "its cancel was acknowledged, and the row stands at %s and knows nothing of it", last.To)
	}
}

// isTrue reads a boolean as Postgres prints it.
func isTrue(text string) bool { return text == "true" || text == "t" }
