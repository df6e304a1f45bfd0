package benchmarks

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestQuantile(t *testing.T) {
	t.Parallel()
	s := Samples{Micros: []int64{4000, 1000, 3000, 2000}}
	require.InDelta(t, 2.0, s.Quantile(0.5), 1e-9)
	require.InDelta(t, 4.0, s.Quantile(0.95), 1e-9)
	require.InDelta(t, 4.0, s.Quantile(1), 1e-9)
	require.True(t, math.IsNaN(Samples{}.Quantile(0.5)))
}

// TestMissingCountsAsInfinite: a mail that never came cannot be left out of a
// percentile.
func TestMissingCountsAsInfinite(t *testing.T) {
	t.Parallel()
	s := Samples{Micros: []int64{1000, 1000, 1000}, Missing: 1}
	require.InDelta(t, 1.0, s.Quantile(0.75), 1e-9)
	require.True(t, math.IsInf(s.Quantile(0.95), 1))
	require.Equal(t, "∞", millis(s.Quantile(0.95)))
}

func TestSpread(t *testing.T) {
	t.Parallel()
	require.Equal(t, "2 (1–3)", spreadOf([]float64{3, 1, 2}).String())
	require.Equal(t, "1.5 (1–2) ms", spreadOf([]float64{1, 2}).Millis())
	require.Equal(t, "1.5 (0.9–2) s", spreadOf([]float64{900, 2000, 1500}).Millis())
	require.Equal(t, "7", spreadOf([]float64{7}).String())
	require.Equal(t, "–", spreadOf(nil).Millis())
}

func TestNumber(t *testing.T) {
	t.Parallel()
	for v, want := range map[float64]string{0: "0", 0.0123: "0.0123", 1: "1", 1.006: "1.01", 12.34: "12.3", 999.6: "1000", 1234.5: "1234", 100: "100"} {
		require.Equal(t, want, number(v), v)
	}
}

func TestRatiosAreTakenRepeatByRepeat(t *testing.T) {
	t.Parallel()
	of := []Samples{{Micros: []int64{2000}}, {Micros: []int64{30_000}}}
	to := []Samples{{Micros: []int64{1000}}, {Micros: []int64{10_000}}}
	require.Equal(t, Spread{Median: 2.5, Min: 2, Max: 3, N: 2}, ratios(of, to, 0.5))
}

func TestCompactKeepsEverythingButLayout(t *testing.T) {
	t.Parallel()
	require.Equal(t, `{"a": [1,-2.5e3], "b": [], "c": ["[1, 2]", 3]}`, string(compact([]byte("{\"a\": [\n 1,\n -2.5e3\n], \"b\": [], \"c\": [\"[1, 2]\", 3]}"))))
}

func TestParseStat(t *testing.T) {
	t.Parallel()
	pid, parent, times, err := parseStat([]byte("42 (a (strange) name) S 7 42 42 0 -1 4194560 1 2 3 4 150 50 30 20 20 0 1 0 99 0 0"))
	require.NoError(t, err)
	require.Equal(t, 42, pid)
	require.Equal(t, 7, parent)
	require.Equal(t, 200*clockTick, times.alive)
	require.Equal(t, 50*clockTick, times.reaped)
	_, _, _, err = parseStat([]byte("42 (cut) S 7"))
	require.Error(t, err)
}

// TestProcessTree: a parent's tree holds its children, and those that ended.
func TestProcessTree(t *testing.T) {
	t.Parallel()
	table := procTable{
		own:      map[int]procTime{1: {alive: 1, reaped: 10}, 2: {alive: 100}, 3: {alive: 1000}, 9: {alive: 1e6}},
		children: map[int][]int{1: {2}, 2: {3}},
	}
	require.EqualValues(t, 1111, table.tree(1))
}
