package scenarios

import (
	"fmt"
	"net/mail"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/history"
	"mailproof/verify"
)

func TestEachBookingHasItsFateAndSoHasItsAddress(t *testing.T) {
	t.Parallel()
	s := permanentErrors()
	draw := func(seed uint64) Plan {
		p := mustPlan(t, seed, s.Name, s.Load)
		s.Adjust(&p, rng(seed, s.Name, "adjust"))
		return p
	}
	plan := draw(7)
	require.Equal(t, plan, draw(7))
	require.NotEqual(t, plan, draw(8))
	count, shares, seen := map[string]int{}, 0, map[string]bool{}
	for _, b := range plan.Faults {
		f, ok := fateOf(b.Recipient)
		require.True(t, ok, b.Recipient)
		count[f.name]++
		require.False(t, seen[b.Recipient], "one mail per recipient")
		seen[b.Recipient] = true
		a, err := mail.ParseAddress(b.Recipient)
		isAddress := err == nil && a.Address == b.Recipient
		require.Equal(t, f.forms == nil, isAddress, b.Recipient)
	}
	for _, f := range fates() {
		shares += f.share
		require.InDelta(t, len(plan.Faults)*f.share/fateShares, count[f.name], 12, f.name)
		for _, g := range fates() {
			require.True(t, f.name == g.name || !strings.Contains(f.name, g.name), "%s is told from %s by its address", f.name, g.name)
		}
	}
	require.Equal(t, fateShares, shares)
	for _, b := range plan.Baseline {
		_, ok := fateOf(b.Recipient)
		require.False(t, ok, b.Recipient)
	}
}

// life is a mail of the scenario as the evidence shows it.
type life struct {
	f         fate
	attempts  int
	moves     []string // statuses after PENDING
	state     string
	letters   int
	alerted   bool
	published bool // its dead letter is stamped
}

func rightLife(f fate) life {
	seen, claims := f.tries(4)
	l := life{f: f, attempts: seen, state: f.end()}
	for i := range claims {
		l.moves = append(l.moves, "SENDING")
		if i < claims-1 {
			l.moves = append(l.moves, "FAILED")
		}
	}
	l.moves = append(l.moves, strings.ToUpper(l.state))
	if l.state == "dead" {
		l.letters, l.alerted, l.published = 1, true, true
	}
	return l
}

// evidenceOf writes the history of such lives.
func evidenceOf(tiers float64, lives ...life) *history.History {
	wall := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	h := &history.History{
		Meta: &history.Meta{Scenario: "t6.4", Policy: "resend", MaxAttempts: 4, RetryDelays: []time.Duration{time.Second}, Wall: wall},
		Final: &history.Final{Counters: map[string]float64{
			`notifyd_retry_publishes_total{tier="q.notify.retry.1s"}`: tiers,
		}},
	}
	order, attempt := int64(0), int64(0)
	for i, l := range lives {
		key := fmt.Sprintf("ticket:%03d", i)
		recipient := fmt.Sprintf("%s%04d@customers.test", l.f.name, i)
		h.Ops = append(h.Ops, history.Op{Name: "confirm", Booking: key, Key: key, Recipient: recipient, Outcome: history.OpOK})
		row := map[string]string{"id": key, "dedupe_key": key, "status": "PENDING"}
		change := func(op string, set map[string]string) {
			order++
			next := map[string]string{}
			for k, v := range row {
				next[k] = v
			}
			for k, v := range set {
				next[k] = v
			}
			h.Changes = append(h.Changes, history.Change{
				Database: "notify", Table: "public.notifications", Op: op, Order: order,
				CommitAt: wall.Add(time.Duration(order) * time.Millisecond), At: order * 1e6, Old: row, New: next,
			})
			row = next
		}
		change("INSERT", nil)
		for n, to := range l.moves {
			change("UPDATE", map[string]string{"status": to, "token": fmt.Sprint(n)})
			if to == "SENDING" && l.attempts > n/2 {
				attempt++
				h.Attempts = append(h.Attempts, history.Attempt{ID: attempt, Key: key, Recipient: recipient, From: order * 1e6, To: order*1e6 + 1})
			}
		}
		if l.published {
			change("UPDATE", map[string]string{"dlq_published_at": "2026-03-01 12:00:01+00"})
		}
		h.Final.Rows = append(h.Final.Rows, history.MailState{Key: key, State: l.state})
		for range l.letters {
			h.Final.DLQ = append(h.Final.DLQ, history.DeadLetter{Key: key})
		}
		if l.alerted {
			h.Final.Alerts = append(h.Final.Alerts, history.Alert{Kind: "mail-dead", Key: key})
		}
	}
	return h
}

func TestPermanentErrorsAreJudgedMailByMail(t *testing.T) {
	t.Parallel()
	with := func(name string, change func(*life)) []life {
		var all []life
		for _, f := range fates() {
			l := rightLife(f)
			if f.name == name {
				change(&l)
			}
			all = append(all, l)
		}
		return all
	}
	right := with("", nil)
	const due = 1 + 2 + 3 // greylisted, busy, full
	for _, c := range []struct {
		name      string
		lives     []life
		tiers     float64
		verdict   verify.Verdict
		invariant string
		says      string
	}{
		{"as it must be", right, due, verify.Pass, "", ""},
		{"a permanent error tried again", with("rejected", func(l *life) {
			l.attempts, l.moves = 2, []string{"SENDING", "FAILED", "SENDING", "DEAD"}
		}), due, verify.Fail, deadAtOnce, "rejected: "},
		{"a malformed address waited", with("malformed", func(l *life) {
			l.moves = []string{"SENDING", "FAILED", "SENDING", "DEAD"}
		}), due, verify.Fail, deadAtOnce, "malformed: "},
		{"a server was asked about no address", with("malformed", func(l *life) { l.attempts = 1 }), due, verify.Fail, deadAtOnce, "saw 1 tries, 0 are right"},
		{"no dead letter", with("unknown-user", func(l *life) { l.letters = 0 }), due, verify.Fail, deadAtOnce, "0 dead letters"},
		{"two dead letters", with("unknown-user", func(l *life) { l.letters = 2 }), due, verify.Fail, deadAtOnce, "2 dead letters"},
		{"no alert", with("too-large", func(l *life) { l.alerted = false }), due, verify.Fail, deadAtOnce, "alerted: false"},
		{"not dead", with("bad-mailbox", func(l *life) { l.state = "sent" }), due, verify.Fail, deadAtOnce, `its state is "sent"`},
		{"through a tier all the same", right, due + 4, verify.Fail, deadAtOnce, "10 messages went through the delay tiers for 6"},
		{"nothing counted", right, 0, verify.Invalid, deadAtOnce, "counted no message"},
		{"a transient error given up at once", with("greylisted", func(l *life) {
			l.attempts, l.moves, l.state, l.letters, l.alerted = 1, []string{"SENDING", "DEAD"}, "dead", 1, true
		}), due - 1, verify.Fail, stillTried, "greylisted: "},
		{"given up early", with("full", func(l *life) {
			l.attempts, l.moves = 3, l.moves[2:]
		}), due - 1, verify.Fail, stillTried, "full: the server saw 3 tries, 4 are right"},
		{"a kind is missing", right[1:], due, verify.Invalid, deadAtOnce, "no mail of kind malformed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var own ownFindings
			judgePermanentErrors(evidenceOf(c.tiers, c.lives...), &own)
			got := verify.Pass
			var texts []string
			for _, f := range own.Findings {
				got = verify.Worse(got, f.Verdict)
				require.Equal(t, c.invariant, f.Invariant, f.Text)
				texts = append(texts, f.Text)
			}
			require.Equal(t, c.verdict, got, "%v", texts)
			require.Contains(t, strings.Join(texts, "\n"), c.says)
			require.Len(t, own.checked, 2)
		})
	}
}
