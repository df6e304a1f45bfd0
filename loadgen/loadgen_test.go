package loadgen_test

import (
	"context"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"mailproof/loadgen"
)

func drawShape(t *rapid.T) loadgen.Shape {
	rate := rapid.Float64Range(0.1, 5000)
	switch rapid.SampledFrom([]string{"constant", "poisson", "burst", "ramp"}).Draw(t, "shape") {
	case "constant":
		return loadgen.Constant{N: rapid.IntRange(0, 400).Draw(t, "n"), PerSecond: rate.Draw(t, "rate")}
	case "poisson":
		return loadgen.Poisson{N: rapid.IntRange(0, 400).Draw(t, "n"), PerSecond: rate.Draw(t, "rate")}
	case "burst":
		return loadgen.Burst{
			N: rapid.IntRange(0, 400).Draw(t, "n"), Size: rapid.IntRange(1, 50).Draw(t, "size"),
			Every: time.Duration(rapid.IntRange(1, 1e9).Draw(t, "every")),
		}
	default:
		return loadgen.Ramp{From: rapid.Float64Range(0, 200).Draw(t, "from"), To: rate.Draw(t, "to"), Over: time.Duration(rapid.IntRange(1, 1e9).Draw(t, "over"))}
	}
}

func draw(t require.TestingT, s loadgen.Shape, seed uint64) []loadgen.Arrival[uint64] {
	r := rand.New(rand.NewPCG(seed, 1))
	plan, err := loadgen.Draw(s, r, func(int, time.Duration) uint64 { return r.Uint64() })
	require.NoError(t, err)
	return plan
}

func TestSameSeedGivesTheSameSchedule(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s, seed := drawShape(t), rapid.Uint64().Draw(t, "seed")
		plan := draw(t, s, seed)
		require.Equal(t, plan, draw(t, s, seed))
		require.True(t, slices.IsSortedFunc(plan, func(a, b loadgen.Arrival[uint64]) int { return int(a.At - b.At) }))
		for _, a := range plan {
			require.GreaterOrEqual(t, a.At, time.Duration(0))
		}
		if len(plan) > 1 {
			require.NotEqual(t, plan, draw(t, s, seed+1))
		}
	})
}

func TestShapesHaveTheRateAskedFor(t *testing.T) {
	t.Parallel()
	span := func(s loadgen.Shape) (n int, last time.Duration) {
		plan := draw(t, s, 7)
		return len(plan), plan[len(plan)-1].At
	}
	n, last := span(loadgen.Constant{N: 500, PerSecond: 100})
	require.Equal(t, 500, n)
	require.Equal(t, 5*time.Second, last)

	n, last = span(loadgen.Poisson{N: 5000, PerSecond: 100})
	require.Equal(t, 5000, n)
	require.InDelta(t, 50, last.Seconds(), 3)

	n, last = span(loadgen.Burst{N: 1000, Size: 10, Every: time.Second})
	require.Equal(t, 1000, n)
	require.InDelta(t, 99, last.Seconds(), 30)

	n, last = span(loadgen.Ramp{From: 100, To: 300, Over: 10 * time.Second})
	require.InDelta(t, 2000, n, 140) // three standard deviations
	require.InDelta(t, 10, last.Seconds(), 0.1)
}

// The first half of a ramp from nothing has a quarter of its arrivals, and that
// of a falling one the other three quarters.
func TestRampRisesAndFallsEvenly(t *testing.T) {
	t.Parallel()
	early := func(s loadgen.Ramp) float64 {
		plan := draw(t, s, 3)
		n := 0
		for _, a := range plan {
			if a.At < s.Over/2 {
				n++
			}
		}
		return float64(n) / float64(len(plan))
	}
	require.InDelta(t, 0.25, early(loadgen.Ramp{To: 2000, Over: 10 * time.Second}), 0.02)
	require.InDelta(t, 0.75, early(loadgen.Ramp{From: 2000, Over: 10 * time.Second}), 0.02)
	require.InDelta(t, 0.50, early(loadgen.Ramp{From: 1000, To: 1000, Over: 10 * time.Second}), 0.02)
}

func TestCrowdsOfABurstComeAtOneInstant(t *testing.T) {
	t.Parallel()
	crowds := map[time.Duration]int{}
	for _, a := range draw(t, loadgen.Burst{N: 25, Size: 10, Every: time.Second}, 1) {
		crowds[a.At]++
	}
	require.Len(t, crowds, 3)
	require.Equal(t, 10, crowds[0])
}

func TestImpossibleShapesAreRefused(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]loadgen.Shape{
		"no rate":            loadgen.Poisson{N: 1},
		"rate not a number":  loadgen.Poisson{N: 1, PerSecond: math.NaN()},
		"infinite rate":      loadgen.Constant{N: 1, PerSecond: math.Inf(1)},
		"negative count":     loadgen.Constant{N: -1, PerSecond: 1},
		"empty crowds":       loadgen.Burst{N: 1},
		"crowds all at once": loadgen.Burst{N: 2, Size: 1},
		"ramp without time":  loadgen.Ramp{From: 1, To: 2},
		"ramp of nothing":    loadgen.Ramp{Over: time.Second},
		"ramp below zero":    loadgen.Ramp{From: -1, To: 5, Over: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			plan, err := loadgen.Draw(s, rand.New(rand.NewPCG(1, 1)), func(i int, _ time.Duration) int { return i })
			require.Error(t, err)
			require.Empty(t, plan)
		})
	}
	_, err := loadgen.Draw(loadgen.Poisson{}, nil, func(i int, _ time.Duration) int { return i })
	require.NoError(t, err, "nothing at no rate is a load")
}

// bubbleClock is a driver's clock inside a synctest bubble.
func bubbleClock() func() int64 {
	began := time.Now()
	return func() int64 { return int64(time.Since(began)) + 1 }
}

func at(times ...time.Duration) []loadgen.Arrival[int] {
	plan := make([]loadgen.Arrival[int], len(times))
	for i, t := range times {
		plan[i] = loadgen.Arrival[int]{At: t, Op: i}
	}
	return plan
}

func TestArrivalsKeepTheirScheduleWhateverTheSystemDoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		clock := bubbleClock()
		d := &loadgen.Driver{Clock: clock}
		start := clock()
		var mu sync.Mutex
		late := map[int]time.Duration{}
		loadgen.Drive(t.Context(), d, start, at(0, time.Second, 2*time.Second, 2*time.Second), func(ctx context.Context, op int, intended int64) {
			mu.Lock()
			late[op] = time.Duration(clock() - intended)
			mu.Unlock()
			loadgen.Wait(ctx, time.Minute) // the system hangs
		})
		require.Equal(t, map[int]time.Duration{0: 0, 1: 0, 2: 0, 3: 0}, late)
		require.Equal(t, loadgen.Tally{Planned: 4, Due: 4, Made: 4, InFlight: loadgen.DefaultInFlight}, d.Tally())
		require.Empty(t, d.Tally().Shortfall())
	})
}

// A stall of ten seconds is a stall for everybody who came in those seconds.
func TestLatencyIsFreeOfCoordinatedOmission(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		clock := bubbleClock()
		d := &loadgen.Driver{Clock: clock}
		plan, err := loadgen.Draw(loadgen.Constant{N: 200, PerSecond: 10}, nil, func(i int, _ time.Duration) int { return i })
		require.NoError(t, err)
		stalledUntil := clock() + int64(10*time.Second)
		var mu sync.Mutex
		lat := loadgen.NewLatency()
		loadgen.Drive(t.Context(), d, clock(), plan, func(ctx context.Context, _ int, intended int64) {
			loadgen.Wait(ctx, time.Duration(stalledUntil-clock())) // nothing is answered before
			mu.Lock()
			defer mu.Unlock()
			require.NoError(t, lat.Record(time.Duration(clock()-intended)))
		})
		require.EqualValues(t, 200, lat.N())
		require.InDelta(t, 8*time.Second, lat.Quantile(0.90), float64(200*time.Millisecond))
		require.InDelta(t, 9.9, lat.Quantile(1).Seconds(), 0.02)
		require.LessOrEqual(t, lat.Quantile(0.50), loadgen.Resolution)
	})
}

func TestArrivalsThatCouldNotBeMadeAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &loadgen.Driver{Clock: bubbleClock(), InFlight: 2}
		var made atomic.Int64
		loadgen.Drive(t.Context(), d, d.Clock(), at(0, 0, 0, time.Second, 3*time.Second), func(ctx context.Context, _ int, _ int64) {
			made.Add(1)
			loadgen.Wait(ctx, 2*time.Second)
		})
		require.EqualValues(t, 3, made.Load())
		require.Equal(t, loadgen.Tally{Planned: 5, Due: 5, Made: 3, Busy: 2, InFlight: 2}, d.Tally())
		require.Equal(t, "2 of 5 arrivals were not made: all 2 clients were busy", d.Tally().Shortfall())
	})
}

func TestALoadThatIsCutShortSaysSo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &loadgen.Driver{Clock: bubbleClock()}
		ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
		defer cancel()
		loadgen.Drive(ctx, d, d.Clock(), at(0, time.Second, 2*time.Second, 3*time.Second), func(context.Context, int, int64) {})
		tally := d.Tally()
		require.EqualValues(t, 2, tally.Made)
		require.Contains(t, tally.Shortfall(), "2 of 4 arrivals were not made")
		require.Contains(t, tally.Shortfall(), "ended before 2")
	})
}

// A generator that comes late makes its arrivals all the same and tells by how
// much it was late.
func TestLagOfTheGeneratorIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &loadgen.Driver{Clock: bubbleClock()}
		start := d.Clock()
		loadgen.Wait(t.Context(), 3*time.Second)
		loadgen.Drive(t.Context(), d, start, at(time.Second, 2*time.Second), func(context.Context, int, int64) {})
		require.EqualValues(t, 2, d.Tally().Made)
		require.Equal(t, 2*time.Second, d.Tally().WorstLag)
	})
}

// exact is the nearest-rank quantile of sorted samples.
func exact(sorted []time.Duration, q float64) time.Duration {
	return sorted[max(int(math.Ceil(q*float64(len(sorted)))), 1)-1]
}

func drawSamples(t *rapid.T, name string) []time.Duration {
	finite := rapid.Custom(func(t *rapid.T) time.Duration {
		return time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(t, "ns"))
	})
	return rapid.SliceOfN(rapid.OneOf(finite, finite, rapid.Just(loadgen.Never)), 1, 300).Draw(t, name)
}

func TestQuantilesAreThoseOfTheSamples(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		samples := drawSamples(t, "samples")
		l := loadgen.NewLatency()
		for _, s := range samples {
			require.NoError(t, l.Record(s))
		}
		slices.Sort(samples)
		require.EqualValues(t, len(samples), l.N())
		q := rapid.OneOf(rapid.SampledFrom([]float64{0.5, 0.95, 0.99, 1}), rapid.Float64Range(0, 1)).Draw(t, "q")
		want, got := exact(samples, q), l.Quantile(q)
		if want == loadgen.Never {
			require.Equal(t, loadgen.Never, got)
			return
		}
		require.GreaterOrEqual(t, got, want-loadgen.Resolution)
		require.LessOrEqual(t, float64(got), float64(want)*1.001+float64(loadgen.Resolution))
	})
}

func TestMergedIsAsIfRecordedTogether(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		all, sum := loadgen.NewLatency(), loadgen.NewLatency()
		for _, part := range [][]time.Duration{drawSamples(t, "one"), drawSamples(t, "two"), drawSamples(t, "three")} {
			l := loadgen.NewLatency()
			for _, s := range part {
				require.NoError(t, l.Record(s))
				require.NoError(t, all.Record(s))
			}
			require.NoError(t, sum.Merge(l))
		}
		require.Equal(t, all.Summary(), sum.Summary())
	})
}

func TestUndeliveredIsInfinite(t *testing.T) {
	t.Parallel()
	l := loadgen.NewLatency()
	require.Zero(t, l.Quantile(0.95), "no samples, no latency")
	for i := range 100 {
		d := 20 * time.Millisecond
		if i >= 94 {
			d = loadgen.Never
		}
		require.NoError(t, l.Record(d))
	}
	s := l.Summary()
	require.EqualValues(t, 6, s.Undelivered)
	require.InDelta(t, 20, loadgen.Milliseconds(s.P50), 0.02)
	require.Equal(t, loadgen.Never, s.P95)
	require.True(t, math.IsInf(loadgen.Milliseconds(s.P95), 1))
	require.Equal(t, "n 100, p50 20ms, p95 ∞, p99 ∞, max ∞", s.String())
	require.Error(t, l.Record(-time.Nanosecond))
	require.Error(t, l.Record(loadgen.Longest+1))
	require.EqualValues(t, 100, l.N())
}

func TestTextHasThreeDigits(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		1234 * time.Microsecond: "1.23ms", 123456 * time.Microsecond: "123ms",
		1234567 * time.Microsecond: "1.23s", 12345678 * time.Microsecond: "12.3s", loadgen.Never: "∞",
	} {
		require.Equal(t, want, loadgen.Text(d))
	}
}

func TestSamplesAreKeptAsTheyWere(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, loadgen.SamplesFile)
	rapid.Check(t, func(t *rapid.T) {
		samples := rapid.SliceOf(rapid.Custom(func(t *rapid.T) loadgen.Sample {
			return loadgen.Sample{
				Kind: rapid.SampledFrom([]string{"ticket", "campaign"}).Draw(t, "kind"), Key: rapid.String().Draw(t, "key"),
				Intended: rapid.Int64Min(1).Draw(t, "intended"), Accepted: rapid.Int64Min(0).Draw(t, "accepted"), Sent: rapid.Int64Min(0).Draw(t, "sent"),
			}
		})).Draw(t, "samples")
		require.NoError(t, loadgen.WriteSamples(path, samples))
		got, err := loadgen.ReadSamples(path)
		require.NoError(t, err)
		require.Equal(t, len(samples), len(got))
		if len(samples) > 0 {
			require.Equal(t, samples, got)
		}
	})
	require.Equal(t, loadgen.Never, loadgen.Sample{Intended: 5}.Since(0))
	require.Equal(t, 2*time.Nanosecond, loadgen.Sample{Intended: 5}.Since(7))
	_, err := loadgen.ReadSamples(filepath.Join(dir, "missing"))
	require.Error(t, err)
}

// An end that the plan did not know takes the rest of it back.
func TestDriveUntil(t *testing.T) {
	t.Parallel()
	plan := make([]loadgen.Arrival[int], 100)
	for i := range plan {
		plan[i] = loadgen.Arrival[int]{At: time.Duration(i) * 100 * time.Millisecond, Op: i}
	}
	enough := make(chan struct{})
	d := &loadgen.Driver{Clock: func() int64 { return time.Now().UnixNano() }}
	var made atomic.Int64
	loadgen.DriveUntil(t.Context(), d, d.Clock(), plan, enough, func(context.Context, int, int64) {
		if made.Add(1) == 10 {
			close(enough)
		}
	})
	require.GreaterOrEqual(t, made.Load(), int64(10))
	require.Less(t, made.Load(), int64(100))
	require.Equal(t, made.Load(), d.Tally().Planned)
	require.Empty(t, d.Tally().Shortfall())

	ended, cancel := context.WithCancel(t.Context())
	cancel()
	loadgen.DriveUntil(ended, d, d.Clock(), plan, nil, func(context.Context, int, int64) { made.Add(1) })
	require.NotEmpty(t, d.Tally().Shortfall(), "a load that was cut off is one")
}
