package benchmarks

import (
	"testing"

	"github.com/stretchr/testify/require"

	"mailproof/history"
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
			Result{Hops: &Hops{Way: Way{Total: stretch(20)}, FloorTotal: stretch(10)}}, idleGoal, true, "33 % below",
		},
		"idle missed": {
			Result{Hops: &Hops{Way: Way{Total: stretch(40)}, FloorTotal: stretch(10)}}, idleGoal, false, "33 % above",
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

// hop of a way whose tickets all take the same time.
func hop(name string, ms int64) Stage { return Stage{Name: name, Repeats: stretch(ms)} }

// TestWhatBindsTicketsUnderTheFlood: the hops that grew most are named, in that
// order, and none that did not grow.
func TestWhatBindsTicketsUnderTheFlood(t *testing.T) {
	t.Parallel()
	r := &Result{
		Machine: Machine{Cores: 2}, Latency: flooded(30), Marketing: campaign(1000, 0.5),
		Hops: &Hops{
			Way: Way{Hops: []Stage{hop("commit", 2), hop("Kafka", 5), hop("RabbitMQ", 3), hop("claim", 1)}, Total: stretch(11)},
			Flooded: &FloodedHops{
				Way: Way{Hops: []Stage{hop("commit", 2), hop("Kafka", 4), hop("RabbitMQ", 15), hop("claim", 4)}, Total: stretch(25)},
			},
		},
	}
	require.Equal(t, "hops beyond idle, at p95: RabbitMQ +12 ms, claim +3 ms; the lanes share 2 cores with every broker, and the flood uses 95 % of them",
		floodGoal(r).binds)
	r.Hops.Flooded.Hops[3], r.Hops.Flooded.Hops[0] = hop("claim", 40), hop("commit", 3)
	r.Marketing.Repeats[0].CPU[partNotifyd] = 1
	require.Equal(t, "hops beyond idle, at p95: claim +39 ms, RabbitMQ +12 ms, commit +1 ms", floodGoal(r).binds)
	r.Hops.Flooded = nil
	require.Contains(t, floodGoal(r).binds, "not measured")
	r.Latency = flooded(15)
	require.Empty(t, floodGoal(r).binds, "a goal that is met is bound by nothing")
}

// TestEachLayoutIsComparedWithItsOwnServer: the ratio to idle is that beside the
// same mail server.
func TestEachLayoutIsComparedWithItsOwnServer(t *testing.T) {
	t.Parallel()
	one := func(name string, mailMillis, ms int64) Layout {
		return Layout{Name: name, MailMillis: mailMillis, Repeats: []LatencyRepeat{{Accepted: stretch(ms)[0], Sent: stretch(ms)[0]}}}
	}
	slow := one(layoutSlowOnePool, 200, 880)
	d := &document{Result: &Result{Latency: &Latency{Layouts: []Layout{
		one(layoutIdle, 0, 10), one(layoutSplit, 0, 30), one(layoutSlowIdle, 200, 220), slow,
	}}}}
	require.Equal(t, "4 ×", d.againstIdle(slow, "accepted"))
	require.Equal(t, "3 ×", d.againstIdle(d.Latency.Layouts[1], "SENT"))
	require.Equal(t, "–", d.againstIdle(d.Latency.Layouts[2], "accepted"))
	quick, apart := d.Latency.byServer()
	require.Len(t, quick, 2)
	require.Len(t, apart, 2)
}

// TestOnlyTheTicketsAreFollowed: of a flood's changes nothing is kept.
func TestOnlyTheTicketsAreFollowed(t *testing.T) {
	t.Parallel()
	f := followedMails{keys: map[string]bool{"ticket:1": true}, ids: map[string]bool{}}
	row := func(table string, columns map[string]string) history.Change {
		return history.Change{Table: table, New: columns}
	}
	require.True(t, f.has(row("public.notifications", map[string]string{"id": "7", "dedupe_key": "ticket:1"})))
	require.False(t, f.has(row("public.notifications", map[string]string{"id": "8", "dedupe_key": "campaign:flood:1"})))
	require.True(t, f.has(row("public.notification_mails", map[string]string{"notification_id": "7"})))
	require.False(t, f.has(row("public.notification_mails", map[string]string{"notification_id": "8"})))
	require.True(t, f.has(row("public.outbox", map[string]string{"key": "b"})))
}
