package verify

import (
	"time"

	"mailproof/history"
)

// dotTolerance absorbs what lies between a worker's last look at its clock and
// the server's stamp of the dot: the scheduling of two processes on a busy
// machine, and the pairing of two clocks. A worker that was stopped past its
// lease and sends all the same is later than that by as long as it was stopped.
const dotTolerance = time.Second

// It judges what at-most-one must excuse: under policy resend a copy of a worker
// that was stopped past its lease counts as justified, whether or not it looked
// at its clock when it woke.
//
// What it does not see: a worker that lost its lease before it began the attempt.
// The newest claim is then another's, and the dot is held to that one's lease;
// at-most-one and no-needless-send excuse no such copy. Nor can any worker look
// at its clock in the very instant of the write: one that is stopped between the
// two (microseconds) is found here, and is no fault of the system.
var dotWithinLease = rule{
	name:      "dot-within-lease",
	statement: "No worker sends the final dot before its claim is committed or after its row was settled, nor after its lease is over: the mail may be another's, or nobody's any more.",
	needs:     needsWAL,
	check: func(e *Evidence, r *report) {
		e.mails(func(m *Mail) {
			for _, a := range m.Attempts {
				checkDot(e, m, a, r)
			}
		})
	},
}

// checkDot compares the time at which the dot was read with the lease of the
// claim that the attempt was made under.
//
// The time of reading stands for the time of writing. That does not hold where
// the script made the server read the body late, or where the process was dead
// by then and the dot on its way: such attempts say nothing. A session that was
// held at an earlier stage is judged: a client has no leave to write the mail
// before the 354 (RFC 5321 3.3), so the dot follows the hold. So is one held at
// the dot: the ledger stamps it before it holds.
func checkDot(e *Evidence, m *Mail, a *history.Attempt, r *report) {
	if a.DotAt == 0 || e.dotWasOnItsWay(a) {
		return
	}
	if len(m.Moves) == 0 {
		return // nothing-lost and no-phantom judge a mail without a row
	}
	r.looked(1)
	claim := m.claimOf(a)
	if claim == nil {
		r.breach(m.Key, "the dot of attempt %d by %s was read before any claim of its row was committed: a cancel or a second worker would not have seen it", a.ID, a.Client)
		return
	}
	until, err := e.leaseEnd(claim)
	if err != nil {
		r.find(HarnessError, m.Key, "column %s of a row that is being sent: %v", e.Columns.Mails.LockedUntil, err)
		return
	}
	if late := time.Duration(a.DotAt - until); late > dotTolerance {
		r.breach(m.Key, "the dot of attempt %d by %s was read %s after its lease was over (token %s, commit %d)",
			a.ID, a.Client, late.Round(time.Millisecond), claim.New[e.Columns.Mails.Token], claim.Order)
		return
	}
	if end := m.settleOf(claim); end != nil && time.Duration(a.DotAt-end.At) > dotTolerance {
		r.breach(m.Key, "the dot of attempt %d by %s was read %s after its row had become %s (commit %d), and no claim came between",
			a.ID, a.Client, time.Duration(a.DotAt-end.At).Round(time.Millisecond), orNone(end.To), end.Order)
	}
}

// settleOf is the change by which the row of a claim left SENDING, nil if it has
// not.
func (m *Mail) settleOf(claim *Move) *Move {
	for i := range m.Moves {
		if mv := &m.Moves[i]; mv.Order > claim.Order && mv.From == stSending && mv.To != stSending {
			return mv
		}
	}
	return nil
}

// claimOf is the newest claim that was committed when the attempt began.
func (m *Mail) claimOf(a *history.Attempt) *Move {
	var newest *Move
	for i := range m.Moves {
		if mv := &m.Moves[i]; mv.claim && mv.At <= a.From+sameInstant && (newest == nil || mv.At >= newest.At) {
			newest = mv
		}
	}
	return newest
}

// leaseEnd is when the lease of a claim is over, on the run's time base: as the
// row says, or, for a system that keeps no such column, the configured lease
// after the commit.
func (e *Evidence) leaseEnd(claim *Move) (int64, error) {
	column := e.Columns.Mails.LockedUntil
	if column == "" {
		return claim.At + e.Meta.Lease.Nanoseconds(), nil
	}
	until, err := parsePGTime(claim.New[column])
	if err != nil {
		return 0, err
	}
	return e.Monotonic(until), nil
}
