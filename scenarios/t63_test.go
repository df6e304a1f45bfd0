package scenarios

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/history"
	"mailproof/verify"
)

// down is a history of two mails with the given number of tries each.
func down(cpu float64, deliveries float64, tries ...int) *history.History {
	h := &history.History{
		Meta: &history.Meta{Scenario: "t6.3", MaxAttempts: 4},
		Final: &history.Final{
			Usage: map[string]history.Usage{"notifyd-1": {CPUSeconds: cpu, WallSeconds: 100}},
			Counters: map[string]float64{
				`notifyd_deliveries_total{lane="ticket",redelivered="false"}`: deliveries,
				`notifyd_deliveries_total{lane="ticket",redelivered="true"}`:  0,
			},
		},
	}
	for i, n := range tries {
		key := fmt.Sprintf("ticket:%d", i)
		h.Ops = append(h.Ops, history.Op{Name: "confirm", Key: key, Outcome: history.OpOK})
		h.Final.Rows = append(h.Final.Rows, history.MailState{Key: key})
		for range n {
			h.Attempts = append(h.Attempts, history.Attempt{Key: key})
		}
	}
	return h
}

// renamed gives the measured process another name.
func renamed(h *history.History, name string) *history.History {
	h.Final.Usage = map[string]history.Usage{name: h.Final.Usage["notifyd-1"]}
	return h
}

// replaced lets the mail service end and start again in the faults phase.
func replaced(h *history.History) *history.History {
	h.Phases = []history.Phase{{Name: "faults", At: 10}, {Name: "heal", At: 20}, {Name: "judge", At: 30}}
	h.Processes = []history.Process{{Name: "notifyd-1", Event: "exited", At: 15}, {Name: "notifyd-1", Event: "started", At: 16}}
	return h
}

func TestSMTPDownIsJudgedByTriesCPUAndDeliveries(t *testing.T) {
	t.Parallel()
	idle := func(v float64) ownFindings {
		var o ownFindings
		o.measure(idleCPU, v, "%", "")
		return o
	}
	for _, c := range []struct {
		name    string
		h       *history.History
		own     ownFindings
		verdict verify.Verdict
		says    string
	}{
		{"as configured", down(12, 8, 4, 4), idle(1), verify.Pass, ""},
		{"one try too many", down(12, 9, 4, 5), idle(1), verify.Fail, "the server saw 5 tries, 4 are configured"},
		{"given up early", down(12, 7, 4, 3), idle(1), verify.Fail, "the server saw 3 tries"},
		{"hot loop by CPU", down(31, 8, 4, 4), idle(1), verify.Fail, "31.0 % of a core"},
		{"hot loop by deliveries", down(12, 800, 4, 4), idle(1), verify.Fail, "800 messages for 8 tries"},
		{"machine too slow to tell", down(40, 8, 4, 4), idle(35), verify.Invalid, "when idle"},
		{"idle never measured", down(12, 8, 4, 4), ownFindings{}, verify.Invalid, "not measured"},
		{"only another service measured", renamed(down(12, 8, 4, 4), "bookingd-1"), idle(1), verify.Invalid, "not measured"},
		{"died and was replaced", replaced(down(1, 8, 4, 4)), idle(1), verify.Invalid, "not measured"},
		{"nothing counted", down(12, 0, 4, 4), idle(1), verify.Invalid, "counted no deliveries"},
	} {
		judgeSMTPDown(c.h, &c.own)
		got := verify.Pass
		for _, f := range c.own.Findings {
			got = verify.Worse(got, f.Verdict)
			require.Contains(t, f.Text, c.says, c.name)
		}
		require.Equal(t, c.verdict, got, c.name)
		require.Len(t, c.own.checked, 2, c.name)
	}
}

func TestScenarioOwnJudgeIsFoundByName(t *testing.T) {
	t.Parallel()
	require.NotNil(t, judgeOf(down(1, 8, 4, 4)))
	require.Nil(t, judgeOf(&history.History{Meta: &history.Meta{Scenario: "t6.1"}, Final: &history.Final{}}))
	require.Nil(t, judgeOf(&history.History{}))
	require.Equal(t, 10*time.Second, smtpDown(Draw{RealDelays: true}).System.RetryDelays[0])
}
