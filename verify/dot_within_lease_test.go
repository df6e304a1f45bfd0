package verify_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/history"
	"mailproof/verify"
)

const dotName = "dot-within-lease"

// wokenLate is a life in which a worker is stopped in the middle of an attempt,
// wakes after so long, and its dot is read then.
func wokenLate(m *mail, asleep time.Duration, how ...func(*history.Attempt)) {
	w := m.w
	m.confirmed().claimed("notifyd-1.w1").try(how...)
	late := m.lastTry
	w.process("notifyd-1", "paused")
	w.pass(asleep)
	w.process("notifyd-1", "resumed")
	w.step()
	late.DotAt, late.To = w.now, w.now+1000
	w.step()
	m.sent()
}

func dotFindings(t *testing.T, w *world) (found []verify.Finding, looked int) {
	t.Helper()
	res := w.rest().judge()
	for _, f := range res.Findings {
		if f.Invariant == dotName {
			found = append(found, f)
		}
	}
	for _, c := range res.Checked {
		if c.Name == dotName {
			require.Empty(t, c.Skipped)
			looked = c.Looked
		}
	}
	return found, looked
}

func TestWhichDotsAreHeldToTheLease(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		life   func(m *mail)
		late   bool
		judged int
	}{
		{"in time", func(m *mail) { m.delivered() }, false, 1},
		{"at the end of the lease, as busy cores allow", func(m *mail) { wokenLate(m, simLease+500*time.Millisecond) }, false, 1},
		{"woken and sent", func(m *mail) { wokenLate(m, simLease+2*time.Second) }, true, 1},
		{"the server read the body late", func(m *mail) {
			wokenLate(m, simLease+2*time.Second, func(a *history.Attempt) { a.Fault = "body:hold" })
		}, false, 0},
		{"held before the 354: the dot follows", func(m *mail) {
			wokenLate(m, simLease+2*time.Second, func(a *history.Attempt) { a.Fault = "data:hold" })
		}, true, 1},
		{"held at the dot: the answer is late, the dot was not", func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(func(a *history.Attempt) { a.Fault = "dot:hold" })
			m.lastTry.To += int64(simLease + 3*time.Second)
			m.w.pass(simLease + 4*time.Second)
			m.claimed("notifyd-2.w1").try().sent()
		}, false, 2},
		{"killed, its dot on the way", func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(func(a *history.Attempt) { a.ReplyWritten = false })
			m.w.process("notifyd-1", "killed")
			m.lastTry.DotAt += int64(simLease + 2*time.Second)
			m.lastTry.To = m.lastTry.DotAt
			m.w.pass(simLease + 3*time.Second)
			m.claimed("notifyd-2.w1").try().sent()
		}, false, 1},
		{"woken, and closed without the dot", func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(func(a *history.Attempt) {
				a.DotAt, a.Stored, a.ReplyWritten, a.Reply, a.ClosedWithoutStoring = 0, false, true, "451 4.4.2 Connection lost", true
			})
			asleep := m.lastTry
			m.w.process("notifyd-1", "paused")
			m.w.pass(simLease + 2*time.Second)
			m.claimed("notifyd-2.w1").try().sent()
			m.w.process("notifyd-1", "resumed")
			asleep.To = m.w.now + 1000
		}, false, 1},
		{"its own lease counts, not that of the claim before", func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuse("451 later")).failed()
			m.w.pass(simLease)
			m.claimed("notifyd-1.w1").try().sent()
		}, false, 1},
		{"the lease of who took over is no excuse", func(m *mail) {
			w := m.w
			m.confirmed().claimed("notifyd-1.w1").try()
			late := m.lastTry
			w.process("notifyd-1", "paused")
			w.pass(simLease + 2*time.Second)
			m.claimed("notifyd-2.w1").try().sent()
			w.process("notifyd-1", "resumed")
			w.step()
			late.DotAt, late.To = w.now, w.now+1000
		}, true, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld("resend", "plain")
			c.life(w.mail("b1"))
			found, looked := dotFindings(t, w)
			require.Equal(t, c.judged, looked)
			if !c.late {
				require.Empty(t, found)
				return
			}
			require.Len(t, found, 1)
			require.Equal(t, "ticket:b1", found[0].Key)
			require.Equal(t, verify.Fail, found[0].Verdict)
			require.Contains(t, found[0].Text, "after its lease was over (token 1,")
		})
	}
}

// A system without a column for the lease is judged by the configured one.
func TestTheConfiguredLeaseCountsWhereTheRowNamesNone(t *testing.T) {
	t.Parallel()
	columns := verify.DefaultColumns()
	columns.Mails.LockedUntil = ""
	for asleep, late := range map[time.Duration]bool{simLease: false, simLease + 2*time.Second: true} {
		w := newWorld("resend", "plain")
		w.meta.Invariants = []string{dotName}
		wokenLate(w.mail("b1"), asleep)
		res := verify.Judge(w.rest().history(), verify.WithColumns(columns))
		require.Equal(t, late, res.Verdict == verify.Fail, explain(res))
	}
}

func TestALeaseThatCannotBeReadIsTheHarnessesFault(t *testing.T) {
	t.Parallel()
	w := newWorld("resend", "plain")
	w.meta.Invariants = []string{dotName}
	w.mail("b1").delivered()
	for _, r := range w.records {
		if r.Change != nil && r.Change.New["status"] == "SENDING" {
			r.Change.New["locked_until"] = "soon"
		}
	}
	res := w.rest().judge()
	require.Equal(t, verify.HarnessError, res.Verdict, explain(res))
}

// The mails of a stopped process are handed on by the sweeper: that is what it is
// there for.
func TestRescuesAreExplainedByAStoppedProcess(t *testing.T) {
	t.Parallel()
	w := newWorld("resend", "plain")
	struckLives("resend", "plain")["stopped past its lease, taken over"](w.mail("b1"))
	w.rest()
	w.final.Counters[`sweeper_rescues_total{cause="overdue"}`] = 3
	requirePass(t, w.judge())
}
