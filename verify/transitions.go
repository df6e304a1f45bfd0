package verify

import "slices"

// legal is the state table: status before → statuses that may follow. ""
// stands for no row. Transitions out of a final state are terminal-is-final's.
var legal = map[string][]string{
	"": {stPending, stCancelled, stExpired},
	// W → DEAD without a try: a channel that has no sender.
	stPending: {stSending, stSent, stUnknown, stCancelled, stExpired, stDead},
	stFailed:  {stSending, stSent, stUnknown, stCancelled, stExpired, stDead},
	stSending: {stSent, stFailed, stUnknown, stDead, stCancelled},
	stUnknown: {stSent, stCancelled, stPending},
}

var legalTransitions = rule{
	name:      "legal-transitions",
	statement: "Every committed transition of a row stands in the state table.",
	needs:     needsWAL,
	check: func(e *Evidence, r *report) {
		e.mails(func(m *Mail) {
			for i := range m.Moves {
				mv := &m.Moves[i]
				if mv.From == mv.To || mv.Op == "DELETE" {
					continue
				}
				r.looked(1)
				if next, ok := legal[mv.From]; ok && !slices.Contains(next, mv.To) {
					r.breach(m.Key, "%s → %s is no transition of the state table (commit %d)", orNone(mv.From), mv.To, mv.Order)
				}
			}
		})
	},
}

var terminalIsFinal = rule{
	name:      "terminal-is-final",
	statement: "SENT, CANCELLED and EXPIRED are never left; DEAD only by a replay, which must not undo a cancel, or by a cancel; no unfinished row is deleted.",
	needs:     needsWAL,
	check: func(e *Evidence, r *report) {
		e.mails(func(m *Mail) {
			for i := range m.Moves {
				checkFinal(e, m, &m.Moves[i], r)
			}
		})
	},
}

func checkFinal(e *Evidence, m *Mail, mv *Move, r *report) {
	r.looked(1)
	if mv.Op == "DELETE" {
		switch mv.From {
		case stPending, stFailed, stSending, stUnknown:
			r.breach(m.Key, "the row was deleted while it was %s (commit %d)", mv.From, mv.Order)
		}
		return
	}
	if mv.From == mv.To {
		return
	}
	switch mv.From {
	case stSent, stCancelled, stExpired:
		r.breach(m.Key, "%s is final, and the row went on to %s (commit %d)", mv.From, mv.To, mv.Order)
	case stDead:
		if mv.To == stPending && isTrue(mv.Before[e.Columns.Mails.CancelAsked]) {
			r.breach(m.Key, "a replay of a mail whose cancel was asked for (commit %d)", mv.Order)
		} else if mv.To != stPending && mv.To != stCancelled {
			r.breach(m.Key, "DEAD → %s, only a replay or a cancel leaves DEAD (commit %d)", mv.To, mv.Order)
		}
	}
}

func orNone(status string) string {
	if status == "" {
		return "(no row)"
	}
	return status
}
