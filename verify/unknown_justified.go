package verify

import (
	"slices"

	"mailproof/history"
)

var unknownJustified = rule{
	name:      "unknown-justified",
	statement: "UNKNOWN is the truth and no hiding place: an attempt of the mail was unsettled, and the policy does not allow another try.",
	check: func(e *Evidence, r *report) {
		e.mails(func(m *Mail) {
			if m.State() != unknown {
				return
			}
			r.looked(1)
			if !e.hasUnsettledAttempt(m) {
				r.breach(m.Key, "UNKNOWN, and every attempt was answered, and nothing kept the system from writing that down")
				return
			}
			if policy := e.policy(m); policy != "hold" && !e.usedUp(m) && !m.MayBeCancelled() && !m.refusedForGood() {
				r.breach(m.Key, "UNKNOWN after %d of %d attempts: policy %s tries again", m.Rows[0].Attempts, e.limit(m), policy)
			}
		})
	},
}

// refusedForGood: no policy tries again then, and an earlier attempt that is open
// keeps the mail from being called dead.
func (m *Mail) refusedForGood() bool { return slices.ContainsFunc(m.Attempts, refusedForGood) }

// hasUnsettledAttempt looks for one in the ledger, or, since a worker that died
// before it reached the server leaves none there, for a claim that a fault cut
// short.
func (e *Evidence) hasUnsettledAttempt(m *Mail) bool {
	for _, a := range m.Attempts {
		if e.unsettled(m, a, e.End) != "" {
			return true
		}
	}
	lease := e.Meta.Lease.Nanoseconds()
	for i := range m.Moves {
		if mv := &m.Moves[i]; mv.claim && e.workerStruck(mv.At-sameInstant, mv.At+lease) {
			return true
		}
	}
	return len(m.Moves) == 0 && len(m.Attempts) < m.Rows[0].Attempts && e.workerStruck(e.Start, e.End)
}

// limit is how many attempts the mail may have: the configured number, or what
// a replay or the reconciler raised it to. The row's own word does not count
// before that.
func (e *Evidence) limit(m *Mail) int {
	limit := e.Meta.MaxAttempts
	for i := range m.Moves {
		mv := &m.Moves[i]
		if !revives(mv) {
			continue
		}
		if n, ok := number(mv.New, e.Columns.Mails.Limit); ok {
			limit = max(limit, int(n))
		}
	}
	return limit
}

// revives reports a replay, or an absence that was proven.
func revives(mv *Move) bool {
	return mv.To == stPending && (mv.From == stDead || mv.From == stUnknown)
}

func (e *Evidence) usedUp(m *Mail) bool {
	return m.Rows[0].Attempts >= e.limit(m)
}

func replayed(m *Mail, from, to int64) bool {
	for i := range m.Moves {
		mv := &m.Moves[i]
		if revives(mv) && mv.At >= from && mv.At <= to {
			return true
		}
	}
	for _, o := range m.Ops {
		if o.Name == "replay" && o.Outcome != history.OpFail && o.Call <= to && o.Return >= from {
			return true
		}
	}
	return false
}
