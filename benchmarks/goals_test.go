package benchmarks

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func stretch(ms ...int64) []Samples {
	s := Samples{}
	for _, m := range ms {
		s.Micros = append(s.Micros, 1000*m)
	}
	return []Samples{s}
}

// TestGoalsAreJudgedByTheFigures: each goal turns with its figure.
func TestGoalsAreJudgedByTheFigures(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		result Result
		goal   func(*Result) goal
		met    bool
		by     string
	}{
		"idle met": {
			Result{Hops: &Hops{Total: stretch(20), FloorTotal: stretch(10)}}, idleGoal, true, "33 % below",
		},
		"idle missed": {
			Result{Hops: &Hops{Total: stretch(40), FloorTotal: stretch(10)}}, idleGoal, false, "33 % above",
		},
		"flood met": {Result{Latency: flooded(15)}, floodGoal, true, "25 % below"},
		"flood missed": {
			Result{Latency: flooded(30)}, floodGoal, false, "50 % above",
		},
		"one ticket of one never came": {
			Result{Latency: &Latency{Layouts: []Layout{
				{Name: layoutIdle, Repeats: []LatencyRepeat{{Accepted: stretch(10)[0], Sent: stretch(10)[0]}}},
				{Name: layoutSplit, Repeats: []LatencyRepeat{{Accepted: Samples{Missing: 1}, Sent: Samples{Missing: 1}}}},
			}}}, floodLimit, false, "some never arrived",
		},
		"rate met":     {Result{Marketing: campaign(1000, 0.5)}, rateGoal, true, "0 % above"},
		"rate missed":  {Result{Marketing: campaign(500, 0.5)}, rateGoal, false, "50 % below"},
		"share met":    {Result{Machine: Machine{Cores: 2}, Marketing: campaign(1000, 1.25)}, shareGoal, true, "4 % above"},
		"share missed": {Result{Machine: Machine{Cores: 2}, Marketing: campaign(1000, 1)}, shareGoal, false, "17 % below"},
	} {
		g := c.goal(&c.result)
		require.False(t, g.unknown, name)
		require.Equal(t, c.met, g.met, name)
		require.Equal(t, c.by, g.by, name)
	}
}

func flooded(ms int64) *Latency {
	return &Latency{Layouts: []Layout{
		{Name: layoutIdle, Repeats: []LatencyRepeat{{Accepted: stretch(10)[0], Sent: stretch(10)[0]}}},
		{Name: layoutSplit, Repeats: []LatencyRepeat{{Accepted: stretch(ms)[0], Sent: stretch(ms)[0]}}},
	}}
}

// campaign of one repeat at a rate, whose raw stages cost rawMillis per mail.
func campaign(perSecond int, rawMillis float64) *Marketing {
	return &Marketing{
		Mails:   perSecond,
		Repeats: []MarketingRun{{Seconds: 1, Delivered: perSecond, CPU: map[string]float64{partNotifyd: 1.9}}},
		Raw:     []RawStage{{Name: "all", Mails: 1000, Seconds: 1, CPU: map[string]float64{partNotifyd: rawMillis}}},
	}
}

// TestWhatBinds: a throughput below what the cores allow is not called CPU-bound.
func TestWhatBinds(t *testing.T) {
	t.Parallel()
	m := campaign(1000, 1)
	require.Contains(t, m.binds(2), "CPU: 95 %")
	require.Contains(t, m.binds(4), "waiting, not work")
	m.Repeats[0].MachineBusy = 99
	require.Contains(t, m.binds(4), "other programs on the machine")
}

func TestGoalsWithoutFigures(t *testing.T) {
	t.Parallel()
	for _, g := range goals(&Result{}) {
		require.Equal(t, "not measured", g.verdict())
	}
}
