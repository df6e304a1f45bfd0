package benchmarks

import (
	"fmt"
	"math"
	"slices"
	"time"

	"gonum.org/v1/gonum/stat"
)

// Samples are the raw measurements of one stretch, microseconds each, in the
// order in which they were intended.
type Samples struct {
	Micros []int64 `json:"us"`
	// Missing never ended: each counts as infinite.
	Missing int `json:"missing,omitempty"`
}

func (s *Samples) add(d time.Duration) { s.Micros = append(s.Micros, d.Microseconds()) }

// Len counts the missing ones too.
func (s Samples) Len() int { return len(s.Micros) + s.Missing }

// Quantile in milliseconds, +Inf when it falls on a missing one, NaN of
// nothing. It is the smallest sample that at least the share p does not exceed:
// no interpolation, so that each figure is one that was measured.
func (s Samples) Quantile(p float64) float64 {
	if s.Len() == 0 {
		return math.NaN()
	}
	return stat.Quantile(p, stat.Empirical, s.sorted(), nil)
}

// sorted in milliseconds, the missing ones last.
func (s Samples) sorted() []float64 {
	all := make([]float64, 0, s.Len())
	for _, v := range s.Micros {
		all = append(all, float64(v)/1000)
	}
	for range s.Missing {
		all = append(all, math.Inf(1))
	}
	slices.Sort(all)
	return all
}

// pool puts the samples of several repeats together.
func pool(repeats []Samples) Samples {
	var all Samples
	for _, r := range repeats {
		all.Micros = append(all.Micros, r.Micros...)
		all.Missing += r.Missing
	}
	return all
}

// Spread is one figure over the repeats of its measurement.
type Spread struct {
	Median, Min, Max float64
	N                int
}

// spreadOf the figure of each repeat; NaN of none. The median of an even number
// is the mean of the two in the middle.
func spreadOf(figures []float64) Spread {
	if len(figures) == 0 {
		return Spread{Median: math.NaN(), Min: math.NaN(), Max: math.NaN()}
	}
	f := slices.Sorted(slices.Values(figures))
	n := len(f)
	return Spread{Median: (f[(n-1)/2] + f[n/2]) / 2, Min: f[0], Max: f[n-1], N: n}
}

// quantiles takes the same quantile of each repeat.
func quantiles(repeats []Samples, p float64) Spread {
	figures := make([]float64, 0, len(repeats))
	for _, r := range repeats {
		if r.Len() > 0 {
			figures = append(figures, r.Quantile(p))
		}
	}
	return spreadOf(figures)
}

// ratios divides two figures repeat by repeat: what was measured next to each
// other is compared with each other.
func ratios(of, to []Samples, p float64) Spread {
	figures := make([]float64, 0, min(len(of), len(to)))
	for i := range min(len(of), len(to)) {
		if of[i].Len() > 0 && to[i].Len() > 0 {
			figures = append(figures, of[i].Quantile(p)/to[i].Quantile(p))
		}
	}
	return spreadOf(figures)
}

// number writes a figure with three significant digits.
func number(v float64) string {
	switch {
	case math.IsNaN(v):
		return "–"
	case math.IsInf(v, 1):
		return "∞"
	case v == 0:
		return "0"
	case math.Abs(v) >= 1000:
		return fmt.Sprintf("%.0f", v)
	default:
		return trimZeros(fmt.Sprintf("%.*f", max(0, 2-int(math.Floor(math.Log10(math.Abs(v))))), v))
	}
}

func trimZeros(s string) string {
	if !slices.Contains([]byte(s), '.') {
		return s
	}
	for s[len(s)-1] == '0' {
		s = s[:len(s)-1]
	}
	if s[len(s)-1] == '.' {
		s = s[:len(s)-1]
	}
	return s
}

// millis writes milliseconds as people read them.
func millis(ms float64) string {
	switch {
	case math.IsNaN(ms), math.IsInf(ms, 1):
		return number(ms)
	case ms >= 1000:
		return number(ms/1000) + " s"
	default:
		return number(ms) + " ms"
	}
}

// String is median and range, "4.1 (3.9–4.6)".
func (s Spread) String() string {
	if s.N < 2 {
		return number(s.Median)
	}
	return fmt.Sprintf("%s (%s–%s)", number(s.Median), number(s.Min), number(s.Max))
}

// Millis is String with a unit, the median's for all three.
func (s Spread) Millis() string {
	switch {
	case math.IsNaN(s.Median), math.IsInf(s.Median, 1):
		return s.String()
	case s.Median < 1000:
		return s.String() + " ms"
	}
	return Spread{Median: s.Median / 1000, Min: s.Min / 1000, Max: s.Max / 1000, N: s.N}.String() + " s"
}
