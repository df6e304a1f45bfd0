package script

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var vocab = Vocabulary{
	Stages: []Stage{"rcpt", "dot", "stored"},
	Actions: map[Kind][]Stage{
		Accept: {"rcpt", "dot", "stored"}, Drop: {"rcpt", "dot", "stored"}, Reply: {"rcpt", "dot", "stored"},
		HoldUntilReleased: {"dot"}, Delay: {"dot", "stored"}, Greylist: {"rcpt"}, Rate: {"rcpt"},
	},
	KeyKnownAt: []Stage{"dot", "stored"},
}

func engine(t *testing.T, seed uint64, rules ...Rule) *Engine {
	t.Helper()
	e := NewEngine(seed, vocab, true)
	_, err := e.AddAll(rules)
	require.NoError(t, err)
	return e
}

func rule(stage Stage, kind Kind) Rule {
	return Rule{Action: Action{Stage: stage, Kind: kind, Code: 451}}
}

func try(e *Engine, stage Stage, key string) []Strike {
	return e.Decide(Event{Stage: stage, Subject: key, Key: key, Recipients: []string{"a@x"}, Nth: e.Try(key)})
}

// TestDrawsDoNotDependOnOrder asks for 500 keys, once in order and once from
// many goroutines: the same keys are struck.
func TestDrawsDoNotDependOnOrder(t *testing.T) {
	p := 0.3
	r := rule("dot", Drop)
	r.Match.Probability = &p
	run := func(seed uint64, parallel bool) map[string]bool {
		e := engine(t, seed, r)
		struck := map[string]bool{}
		var mu sync.Mutex
		var wg sync.WaitGroup
		one := func(key string) {
			hit := len(try(e, "dot", key)) > 0
			mu.Lock()
			struck[key] = hit
			mu.Unlock()
		}
		for i := range 500 {
			key := fmt.Sprint("k", i)
			if parallel {
				wg.Go(func() { one(key) })
			} else {
				one(key)
			}
		}
		wg.Wait()
		require.Len(t, e.Decisions(0), 500, "every draw is logged, struck or not")
		return struck
	}
	first := run(7, false)
	require.Equal(t, first, run(7, true))
	require.NotEqual(t, first, run(8, false))
	n := 0
	for _, hit := range first {
		if hit {
			n++
		}
	}
	require.InDelta(t, 150, n, 50)
}

func TestOrderOfRules(t *testing.T) {
	accept := rule("dot", Accept)
	accept.Match.Key = "vip*"
	e := engine(t, 1, accept, rule("dot", Delay).with(func(r *Rule) { r.Action.For = 1 }), rule("dot", Drop), rule("dot", Reply))
	require.Empty(t, try(e, "dot", "vip1"), "accept ends the search")
	got := try(e, "dot", "k")
	require.Len(t, got, 2)
	require.Equal(t, []Kind{Delay, Drop}, []Kind{got[0].Action.Kind, got[1].Action.Kind})
	require.Empty(t, try(e, "stored", "k"))
}

func (r Rule) with(f func(*Rule)) Rule { f(&r); return r }

func TestCountThenHeal(t *testing.T) {
	e := engine(t, 1, rule("dot", Drop).with(func(r *Rule) { r.Count = 2 }))
	for i, want := range []int{1, 1, 0, 0} {
		require.Len(t, try(e, "dot", fmt.Sprint(i)), want)
	}
	require.True(t, e.Rules()[0].Healed)
	e.Forget()
	require.Len(t, try(e, "dot", "again"), 1, "a reset lets it strike again")
}

func TestWindowsFollowTheMovableClock(t *testing.T) {
	e := engine(t, 1, rule("dot", Drop).with(func(r *Rule) { r.Match.After, r.Match.Before = Duration(time.Hour), Duration(2*time.Hour) }))
	require.Empty(t, try(e, "dot", "k"))
	e.Advance(time.Hour)
	require.Len(t, try(e, "dot", "k"), 1)
	e.Advance(time.Hour)
	require.Empty(t, try(e, "dot", "k"))
}

func TestGreylistAndRate(t *testing.T) {
	grey := engine(t, 1, rule("rcpt", Greylist).with(func(r *Rule) { r.Action.For = Duration(time.Minute) }))
	ask := func(e *Engine, to string) int {
		return len(e.Decide(Event{Stage: "rcpt", ClientIP: "1.2.3.4", Sender: "s", Recipients: []string{to}}))
	}
	require.Equal(t, 1, ask(grey, "a"))
	require.Equal(t, 1, ask(grey, "a"), "too early")
	grey.Advance(time.Minute)
	require.Equal(t, 0, ask(grey, "a"))
	require.Equal(t, 1, ask(grey, "b"), "another triple")

	rate := engine(t, 1, rule("rcpt", Rate).with(func(r *Rule) { r.Action.Limit, r.Action.For = 2, Duration(time.Hour) }))
	for i, want := range []int{0, 0, 1, 1} {
		require.Equal(t, want, ask(rate, "a"), "event %d", i)
	}
	rate.Advance(time.Hour)
	require.Equal(t, 0, ask(rate, "a"))
}

func TestMagic(t *testing.T) {
	for address, want := range map[string]string{
		"ann+fault-rcpt-451@x":          "rcpt:451",
		"ann+fault-stored-drop@x":       "stored:drop",
		"ann+fault-dot-delay-2s@x":      "dot:delay",
		"ANN+FAULT-x@x":                 "",
		"ann@x":                         "",
		"ann+fault-@x":                  "",
		"ann+fault-rcpt-hold@x":         "", // cannot strike there
		"ann+fault-stored-drop-x0@x":    "",
		"ann+fault-stored-drop-x2-5s@x": "stored:drop",
	} {
		r, ok := ParseMagic(address, vocab)
		require.Equal(t, want != "", ok, address)
		if ok {
			require.Equal(t, want, r.Action.Name(), address)
		}
	}
}

func TestRulesFile(t *testing.T) {
	data, err := os.ReadFile("testdata/rules.json")
	require.NoError(t, err)
	rules, err := ParseRules(data)
	require.NoError(t, err)
	e := engine(t, 1, rules...)
	require.Len(t, e.Rules(), len(rules))
	again, err := json.Marshal(rules)
	require.NoError(t, err)
	back, err := ParseRules(again)
	require.NoError(t, err)
	require.Equal(t, rules, back)
}

func TestRange(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := Range{From: rapid.IntRange(1, 50).Draw(t, "from")}
		if rapid.Bool().Draw(t, "bounded") {
			r.To = rapid.IntRange(r.From, 60).Draw(t, "to")
		}
		back, err := ParseRange(r.String())
		require.NoError(t, err)
		require.Equal(t, r, back)
		n := rapid.IntRange(1, 70).Draw(t, "n")
		require.Equal(t, n >= r.From && (r.To == 0 || n <= r.To), r.Contains(n))
	})
	for _, s := range []string{"x", "0", "-1", "3-1", "1-x", "1-2-3"} {
		_, err := ParseRange(s)
		require.Error(t, err, s)
	}
}

func TestGlobsCrossSlashesAndCase(t *testing.T) {
	require.True(t, Glob("order/*", "order/7/mail"))
	require.True(t, Glob("*@EXAMPLE.com", "Ann@example.COM"))
	require.False(t, Glob("a*", "b"))
	require.True(t, Glob("", ""))
	require.True(t, Glob("Ann@x", "ann@X"))
	require.False(t, Glob("ann@x", "ann@xy"))
	require.True(t, Glob(`\*@x`, "*@x"))
}

func TestHolds(t *testing.T) {
	s := NewHolds()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	done := make(chan error, 3)
	wait := func(bound time.Duration, watch func(context.Context) bool) {
		go func() { _, err := s.Wait(Hold{}, bound, watch); done <- err }()
	}
	wait(time.Minute, nil)
	h, err := s.Await(ctx, nil)
	require.NoError(t, err)
	require.True(t, s.Release(h.ID))
	s.Release(h.ID) // harmless
	require.NoError(t, <-done)
	require.False(t, s.Release(h.ID))

	wait(time.Millisecond, nil)
	require.ErrorIs(t, <-done, context.DeadlineExceeded)

	wait(time.Minute, func(context.Context) bool { return true })
	_, err = s.Await(ctx, func(h Hold) bool { return h.PeerGone })
	require.NoError(t, err)
	require.Equal(t, 1, s.ReleaseAll())
	require.NoError(t, <-done)

	wait(time.Minute, func(c context.Context) bool { <-c.Done(); return false })
	_, err = s.Await(ctx, nil)
	require.NoError(t, err)
	s.Close()
	require.ErrorIs(t, <-done, ErrClosed)
	_, err = s.Wait(Hold{}, time.Minute, nil)
	require.ErrorIs(t, err, ErrClosed)

	expired, stop := context.WithCancel(context.Background())
	stop()
	_, err = s.Await(expired, nil)
	require.ErrorIs(t, err, context.Canceled)
}

// FuzzRules feeds any bytes as rules: they are refused with an error, or give
// an engine that decides without panicking, and survive being written and read
// again.
func FuzzRules(f *testing.F) {
	seed, err := os.ReadFile("testdata/rules.json")
	require.NoError(f, err)
	f.Add(seed)
	f.Add([]byte(`{"action":{"kind":"drop","stage":"dot"}}`))
	f.Add([]byte(`[{"match":{"nth":"1-"},"action":{"kind":"reply","stage":"dot","code":451}}]`))
	f.Fuzz(func(t *testing.T, data []byte) {
		rules, err := ParseRules(data)
		if err != nil {
			return
		}
		e := NewEngine(1, vocab, true)
		if _, err := e.AddAll(rules); err != nil {
			require.Empty(t, e.Rules())
			return
		}
		for _, stage := range vocab.Stages {
			e.Decide(Event{Stage: stage, Key: "k", Subject: "k", Nth: 1, Recipients: []string{"a@x"}})
		}
		written, err := json.Marshal(rules)
		require.NoError(t, err)
		back, err := ParseRules(written)
		require.NoError(t, err)
		again, err := json.Marshal(back)
		require.NoError(t, err)
		require.JSONEq(t, string(written), string(again))
	})
}
