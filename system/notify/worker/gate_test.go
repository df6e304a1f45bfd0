package worker

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/system/notify/patience"
)

func testGate(edges *[]bool) *gate {
	return newGate(patience.Backoff{First: 10 * time.Second, Max: time.Minute}, time.Now, func(p bool) { *edges = append(*edges, p) })
}

// A closed lane lets one worker at a time through, and only after the pause.
func TestGateProbesOneAtATime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var edges []bool
		g := testGate(&edges)
		first, err := g.enter(t.Context())
		require.NoError(t, err)
		first.report(true)
		require.Equal(t, []bool{true}, edges)

		var inside, most, passed atomic.Int32
		probes := make(chan *pass)
		for range 5 {
			go func() {
				p, err := g.enter(t.Context())
				if err != nil {
					return
				}
				most.Store(max(most.Load(), inside.Add(1)))
				passed.Add(1)
				probes <- p
				inside.Add(-1)
			}()
		}
		time.Sleep(4 * time.Second)
		require.Zero(t, passed.Load(), "the pause is at least half its step")
		p := <-probes
		synctest.Wait()
		require.Equal(t, int32(1), passed.Load())
		p.report(true) // still refused: the next pause
		p = <-probes
		synctest.Wait()
		require.Equal(t, int32(2), passed.Load())
		p.report(false) // open again: the others pass at once
		for range 3 {
			(<-probes).report(false)
		}
		require.Equal(t, []bool{true, false}, edges)
	})
}

func TestGateGivesAnUnusedProbeToTheNext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var edges []bool
		g := testGate(&edges)
		p, err := g.enter(t.Context())
		require.NoError(t, err)
		p.report(true)
		p, err = g.enter(t.Context())
		require.NoError(t, err)
		p.leave()
		next, err := g.enter(t.Context())
		require.NoError(t, err)
		p.report(false) // ended: says nothing
		require.True(t, g.probing)
		next.report(false)
		require.Zero(t, g.refusals)
	})
}

// Tries under way when the lane closes count as the same refusal.
func TestGateCountsOneRefusalForTriesUnderWay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var edges []bool
		g := testGate(&edges)
		a, err := g.enter(t.Context())
		require.NoError(t, err)
		b, err := g.enter(t.Context())
		require.NoError(t, err)
		a.report(true)
		until := g.until
		b.report(true)
		require.Equal(t, until, g.until)
		require.Equal(t, 1, g.refusals)
	})
}

// A server that takes no more is left alone by everybody for as long as it asked.
func TestGateHoldsForAThrottle(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		asked []time.Duration
		wait  time.Duration
	}{
		"as long as it asked for":        {[]time.Duration{7 * time.Second}, 7 * time.Second},
		"no time named: the first pause": {[]time.Duration{0}, 10 * time.Second},
		"hours: the longest pause":       {[]time.Duration{24 * time.Hour}, time.Minute},
		"the longest of several":         {[]time.Duration{7 * time.Second, 20 * time.Second, time.Second}, 20 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var edges []bool
				g := testGate(&edges)
				for _, d := range c.asked {
					g.hold(d)
				}
				began := time.Now()
				for range 5 { // together, and each of them once it is over
					p, err := g.enter(t.Context())
					require.NoError(t, err)
					require.Equal(t, c.wait, time.Since(began))
					p.report(false)
				}
				require.Empty(t, edges, "a throttle is no refusal of the lane")
			})
		})
	}
}

// A probe that is throttled opens the lane, and nobody follows before it may.
func TestGateHoldsBehindAProbe(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var edges []bool
		g := testGate(&edges)
		p, err := g.enter(t.Context())
		require.NoError(t, err)
		p.report(true)
		p, err = g.enter(t.Context())
		require.NoError(t, err)
		waited := make(chan time.Duration)
		began := time.Now()
		go func() {
			if _, err := g.enter(t.Context()); err == nil {
				waited <- time.Since(began)
			}
		}()
		synctest.Wait()
		g.hold(5 * time.Second)
		p.report(false)
		require.Equal(t, 5*time.Second, <-waited)
	})
}

func TestGateEndsWithItsContext(t *testing.T) {
	t.Parallel()
	var edges []bool
	g := testGate(&edges)
	p, err := g.enter(t.Context())
	require.NoError(t, err)
	p.report(true)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = g.enter(ctx)
	require.ErrorIs(t, err, context.Canceled)
}
