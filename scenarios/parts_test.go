package scenarios

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/history"
	"mailproof/verify"
)

const sec = int64(time.Second)

// partRun is a run in which a part was broken from second 10 to 13 and another
// from 20 to 22, both got over: the golden good history.
func partRun() *history.History {
	h := &history.History{
		End: 40 * sec, Final: &history.Final{At: 39 * sec, Counters: map[string]float64{}},
		Faults: []history.Fault{
			{Name: "second", Target: "kafka", Start: 20 * sec, End: 22 * sec, Outcome: history.Installed, Witness: "seen"},
			{Name: "first", Target: "postgres", Start: 10 * sec, End: 13 * sec, Outcome: history.Installed, Witness: "seen"},
		},
		Processes: []history.Process{
			{Name: "notifyd-1", Event: "started", At: sec},
			{Name: "notifyd-1", Event: "ready", At: 2 * sec},
			{Name: "notifyd-1", Event: "unready", Detail: "database: away", At: 11 * sec},
			{Name: "notifyd-1", Event: "ready", At: 13 * sec},
			{Name: "notifyd-1", Event: "exited", Detail: "exit status 0", At: 40 * sec}, // the run is over
		},
	}
	for t := int64(5); t < 35; t++ {
		h.Ops = append(h.Ops, history.Op{Name: "confirm", Intended: t * sec, Outcome: history.OpOK})
		if t < 10 || t > 13 && t < 20 || t > 24 {
			h.Attempts = append(h.Attempts, history.Attempt{Stored: true, DotAt: t*sec + sec/2})
		}
	}
	return h
}

func TestPartsAreJudged(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		edit    func(h *history.History)
		verdict verify.Verdict
		text    string
	}{
		"good": {edit: func(*history.History) {}},
		"nothing was confirmed meanwhile": {
			edit: func(h *history.History) { h.Ops = h.Ops[:4] }, verdict: verify.Invalid, text: "nothing was confirmed while",
		},
		"no delivery after the first": {
			edit: func(h *history.History) {
				kept := h.Attempts[:0]
				for _, a := range h.Attempts {
					if a.DotAt < 13*sec || a.DotAt > 22*sec {
						kept = append(kept, a)
					}
				}
				h.Attempts = kept
			}, verdict: verify.Fail, text: "first struck postgres until 13.0 s; nothing was delivered for 7.0 s",
		},
		"no delivery after the last": {
			edit: func(h *history.History) {
				for i := range h.Attempts {
					h.Attempts[i].Stored = h.Attempts[i].DotAt < 20*sec
				}
			}, verdict: verify.Fail, text: "second struck kafka",
		},
		"a process was started again": {
			edit: func(h *history.History) {
				h.Processes = append(h.Processes, history.Process{Name: "notifyd-1", Event: "started", At: 14 * sec})
			}, verdict: verify.Fail, text: "notifyd-1 was started again at 14.0 s",
		},
		"a process ended by itself": {
			edit: func(h *history.History) { h.Processes[4].At = 12 * sec }, verdict: verify.Fail, text: "notifyd-1 ended by itself at 12.0 s",
		},
		"not ready at the end": {
			edit: func(h *history.History) { h.Processes = append(h.Processes[:3:3], h.Processes[4:]...) }, verdict: verify.Fail, text: "not ready at the end",
		},
		"never red": {
			edit: func(h *history.History) { h.Processes = append(h.Processes[:2:2], h.Processes[3:]...) }, verdict: verify.Fail, text: "every process said it was ready while first",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := partRun()
			c.edit(h)
			var own ownFindings
			judgeParts("first")(h, &own)
			if c.verdict == "" {
				require.Empty(t, own.Findings)
				return
			}
			require.NotEmpty(t, own.Findings)
			require.Equal(t, c.verdict, own.Findings[0].Verdict)
			require.Contains(t, own.Findings[0].Text, c.text)
		})
	}
}

// A process that a fault is about may end and be started.
func TestAFaultOfAProcessExplainsItsEnd(t *testing.T) {
	t.Parallel()
	h := partRun()
	h.Faults[0].Target = "notifyd-1"
	h.Processes = append(h.Processes,
		history.Process{Name: "notifyd-1", Event: "exited", At: 20 * sec}, history.Process{Name: "notifyd-1", Event: "started", At: 21 * sec},
		history.Process{Name: "notifyd-1", Event: "ready", At: 22 * sec})
	var own ownFindings
	judgeParts("first")(h, &own)
	require.Empty(t, own.Findings)
}

// A gap counts to the fault in whose time it lies.
func TestGapsAreMeasured(t *testing.T) {
	t.Parallel()
	var own ownFindings
	measureParts(partRun(), &own)
	first, ok := own.measured("longest gap without a delivery, first")
	require.True(t, ok)
	require.InDelta(t, 4.5, first, 0.001, "from the fault to the next delivery")
	second, _ := own.measured("longest gap without a delivery, second")
	require.InDelta(t, 5.5, second, 0.001)
	after, _ := own.measured("first delivery after second")
	require.InDelta(t, 3.5, after, 0.001)
}

func TestDrainedMailsAreTriedOnce(t *testing.T) {
	t.Parallel()
	judge := func(attempts ...history.Attempt) ownFindings {
		var own ownFindings
		judgeDrained(&history.History{Faults: []history.Fault{{Name: faultDrained, Keys: []string{"k1"}}}, Attempts: attempts}, &own)
		return own
	}
	require.Empty(t, judge(history.Attempt{Key: "k1"}, history.Attempt{Key: "k2"}, history.Attempt{Key: "k2"}).Findings)
	require.Equal(t, verify.Fail, judge(history.Attempt{Key: "k1"}, history.Attempt{Key: "k1"}).Findings[0].Verdict)
	var own ownFindings
	judgeDrained(&history.History{}, &own)
	require.Equal(t, verify.Invalid, own.Findings[0].Verdict)
}

func TestQueueOutlivesItsLeader(t *testing.T) {
	t.Parallel()
	judge := func(call, dot int64) ownFindings {
		var own ownFindings
		judgeOutlived(&history.History{
			Faults:   []history.Fault{{Name: faultLeaderKilled, Start: 10 * sec, End: 20 * sec}},
			Ops:      []history.Op{{Name: "confirm", Key: "k", Call: call}},
			Attempts: []history.Attempt{{Key: "k", Stored: true, DotAt: dot}},
		}, &own)
		return own
	}
	require.Empty(t, judge(11*sec, 12*sec).Findings)
	before := judge(9*sec, 12*sec)
	require.Equal(t, verify.Fail, before.Findings[0].Verdict, "it was with the queue before")
	require.Equal(t, 1, before.checked[0].Findings)
	require.Equal(t, verify.Fail, judge(11*sec, 21*sec).Findings[0].Verdict, "it was delivered after")
}
