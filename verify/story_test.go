package verify_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/history"
	"mailproof/verify"
)

// The story of a mail is what a person reads first; this is one, whole.
func TestStory(t *testing.T) {
	t.Parallel()
	w := newWorld("resend", "plain")
	w.mail("other").delivered()
	m := w.mail("b1")
	m.confirmed().claimed("notifyd-1.w1").try(lost250).unclear()
	m.claimed("notifyd-1.w1").try()
	w.fault("lose-250", "smtp server", time.Second).Keys = []string{m.key}
	for range 3 {
		w.process("notifyd-1", "killed")
		w.process("notifyd-1", "started")
	}
	w.pass(simLease)
	m.claimed("notifyd-2.w1").try(refuse("550 5.1.1 gone")).unknown()
	w.process("notifyd-3", "started")
	e := verify.NewEvidence(w.rest().history(), verify.DefaultColumns())

	require.Equal(t, []string{
		"    -784.0 ms  fault       lose-250 on smtp server begins",
		"       0.0 ms  client      confirm of booking b1: ok after 0.5 ms",
		"       2.0 ms  row         created as PENDING (commit 4)",
		"       3.0 ms  row         PENDING → SENDING, attempts 1, token 1 (commit 5)",
		"       4.0 ms  server      attempt 2 from notifyd-1.w1 for b1@customers.test, session 2, struck by stored:drop",
		"       5.0 ms  server      attempt 2: dot read, a copy is kept",
		"       6.0 ms  server      attempt 2 over at stored: no whole reply written",
		"       7.0 ms  row         SENDING → FAILED, next try due 201.0 ms later (commit 6)",
		"     213.0 ms  row         FAILED → SENDING, attempts 2, token 2 (commit 7)",
		"     214.0 ms  server      attempt 3 from notifyd-1.w1 for b1@customers.test, session 3",
		"     215.0 ms  server      attempt 3: dot read, a copy is kept",
		"     216.0 ms  server      attempt 3 over at replied: replied 250 2.0.0 ok",
		"     216.0 ms  fault       lose-250 healed: the far side saw it",
		"     217.0 ms  process     notifyd-1 (pid 42) killed",
		"     218.0 ms  process     notifyd-1 (pid 42) started",
		"     219.0 ms  process     notifyd-1 (pid 42) killed",
		"     222.0 ms  process     notifyd-1: 3 more events up to here",
		"    4223.0 ms  row         SENDING → SENDING, attempts 3, token 3 (commit 8)",
		"    4224.0 ms  server      attempt 4 from notifyd-2.w1 for b1@customers.test, session 4",
		"    4226.0 ms  server      attempt 4 over at rcpt: replied 550 5.1.1 gone, closed without storing",
		"    4227.0 ms  row         SENDING → UNKNOWN (commit 9)",
		"       end     row         unknown, 3 attempts, token 0, 0 unsettled",
		"       end     outbox      event event-b1, published true, dead false",
		"       end     alert       mail-unknown ×1",
		"       end     customer    2 copies",
	}, e.Story(m.key))
	require.Nil(t, e.Story("ticket:nobody"))
}

func TestLatencyCountsWhatNeverCame(t *testing.T) {
	t.Parallel()
	w := newWorld("hold", "plain")
	for i := range 18 {
		m := w.mail(simName(i))
		m.op("confirm", history.OpOK)
		m.relayed().arrives()
		w.pass(time.Duration(i) * 10 * time.Millisecond)
		m.claimed("notifyd-1.w1").try().sent()
	}
	w.mail("lost").op("confirm", history.OpOK)
	w.mail("also lost").op("confirm", history.OpOK)
	w.mail("cancelled").confirmed().cancelled()
	w.mail("unknown to the client").op("confirm", history.OpUnknown)
	res := w.rest().judge()
	// The mail with the n-th shortest way needs 6 ms and (n-1) times 10 ms.
	require.Equal(t, verify.Latency{N: 20, P50: 95, P95: -1, P99: -1, Max: -1}, rounded(res.Latency))
	require.Equal(t, verify.Counts{Confirmed: 21, Delivered: 18, Lost: 2, Cancelled: 1}, res.Counts)
}

// A client that came to its call two seconds late, since the one before it hung,
// has waited for two seconds more: what counts is when it meant to call.
func TestLatencyCountsFromTheIntendedTime(t *testing.T) {
	t.Parallel()
	w := newWorld("hold", "plain")
	for i := range 10 {
		m := w.mail(simName(i))
		o := m.op("confirm", history.OpOK)
		if i >= 4 {
			o.Intended -= int64(2 * time.Second)
		}
		m.relayed().arrives().claimed("notifyd-1.w1").try().sent()
	}
	res := w.rest().judge()
	requirePass(t, res)
	require.InDelta(t, 2005, res.Latency.P50, 10)
	require.InDelta(t, 2005, res.Latency.P95, 10)
}

func rounded(l verify.Latency) verify.Latency {
	l.P50 = float64(int(l.P50 + 0.5))
	return l
}

func TestVerdictsOutweighEachOther(t *testing.T) {
	t.Parallel()
	order := []verify.Verdict{verify.Pass, verify.SkippedRun, verify.Invalid, verify.Unknown, verify.HarnessError, verify.Fail}
	exit := []int{0, 0, 3, 2, 4, 1}
	for i, worse := range order {
		require.Equal(t, exit[i], worse.ExitCode(), worse)
		for _, better := range order[:i+1] {
			require.Equal(t, worse, verify.Worse(better, worse))
			require.Equal(t, worse, verify.Worse(worse, better))
		}
	}
}

func TestGuaranteeNamesTheRow(t *testing.T) {
	t.Parallel()
	for mode, want := range map[[2]string]string{
		sameKey: "exactly one copy", resend: "unsettled attempts", hold: "UNKNOWN", {"resend", "deduplicating"}: "exactly one copy",
	} {
		text := verify.Guarantee(history.Meta{Policy: mode[0], Server: mode[1]})
		require.Contains(t, text, want)
		require.Contains(t, text, "Nothing is lost")
	}
}

// A system that shows less is judged by less, and says so.
func TestMissingEvidenceIsSkipped(t *testing.T) {
	t.Parallel()
	w := newWorld("hold", "plain")
	w.mail("b1").delivered()
	w.rest()
	w.dropChange("PENDING")
	w.dropChange("SENDING")
	w.dropChange("SENT")
	w.final.Topic, w.final.Queues = nil, nil

	skipped := map[string]string{}
	for _, c := range w.judge().Checked {
		if c.Skipped != "" {
			skipped[c.Name] = c.Skipped
		}
	}
	require.Equal(t, verify.Pass, w.judge().Verdict)
	for _, name := range []string{"single-flight", "terminal-is-final", "legal-transitions", "cancel-is-honoured"} {
		require.Contains(t, skipped[name], "no changes of public.notifications")
	}
	require.Contains(t, skipped["relay-complete"], "topic")
	require.Contains(t, skipped["queue-conservation"], "queues")
	require.Len(t, skipped, 11)

	w.meta.Invariants = verify.Names()
	require.Equal(t, verify.Invalid, w.judge().Verdict, "named, so it must be judged")
	w.meta.Params[history.ParamEvidence] = "outbox"
	require.Equal(t, verify.Pass, w.judge().Verdict, "unless the target cannot show it")
}

func TestOnlyNamedInvariantsJudge(t *testing.T) {
	t.Parallel()
	w := newWorld("hold", "plain")
	w.mail("b0").delivered()
	w.mail("b1").op("confirm", history.OpOK)
	w.rest()
	w.meta.Invariants = []string{"no-phantom"}
	res := w.judge()
	require.Equal(t, verify.Pass, res.Verdict)
	var names []string
	for _, c := range res.Checked {
		names = append(names, c.Name)
	}
	require.Equal(t, []string{"well-formed-history", "assurance", "no-phantom", "provider-breach"}, names)
}

func TestABrokenSystemIsToldInBounds(t *testing.T) {
	t.Parallel()
	w := newWorld("hold", "plain")
	for i := range 3 * verify.MaxFindings {
		w.mail(simName(i)).op("confirm", history.OpOK)
	}
	w.rest()
	w.final.Outbox, w.final.Topic = []history.OutboxLeft{}, []history.TopicRecord{}
	w.meta.Invariants = []string{"nothing-lost"}
	res := w.judge()
	require.Len(t, res.Findings, verify.MaxFindings)
	require.Equal(t, 3*verify.MaxFindings, res.Counts.Lost)
	stories := 0
	for _, f := range res.Findings {
		if len(f.Story) > 0 {
			stories++
		}
	}
	require.Equal(t, verify.MaxStories, stories)
	for _, c := range res.Checked {
		if c.Name == "nothing-lost" {
			require.Equal(t, 3*verify.MaxFindings, c.Findings)
		}
	}
}
