package loadgen

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Never is the latency of what was not delivered: longer than any other.
const Never = time.Duration(math.MaxInt64)

const (
	// Resolution is the smallest difference that a [Latency] sees.
	Resolution = time.Microsecond
	// Longest is the longest finite latency that it takes.
	Longest = 24 * time.Hour
	// digits are the significant decimal digits of each figure: it is at most
	// 0.1 % above the sample that it stands for.
	digits = 3
)

// Latency is a distribution of latencies in an HdrHistogram (three significant
// digits over the whole range, in constant memory), beside a count of what never
// arrived. Use [NewLatency]. It is not safe for concurrent use; distributions of
// several goroutines are merged.
type Latency struct {
	arrived *hdrhistogram.Histogram
	never   int64
}

// NewLatency returns an empty distribution.
func NewLatency() *Latency {
	return &Latency{arrived: hdrhistogram.New(int64(Resolution), int64(Longest), digits)}
}

// Record adds a latency, or [Never]. A negative one is an error: the two clocks
// that it was taken with do not agree. So is one above [Longest].
func (l *Latency) Record(d time.Duration) error {
	switch {
	case d == Never:
		l.never++
		return nil
	case d < 0:
		return fmt.Errorf("latency of %s: it was over before it began", d)
	case d > Longest:
		return fmt.Errorf("latency of %s: longer than %s, say Never", d, Longest)
	}
	if err := l.arrived.RecordValue(int64(d)); err != nil {
		return fmt.Errorf("latency of %s: %w", d, err)
	}
	return nil
}

// Merge adds the samples of another distribution.
func (l *Latency) Merge(other *Latency) error {
	if dropped := l.arrived.Merge(other.arrived); dropped > 0 {
		return errors.New("latencies of different ranges cannot be merged")
	}
	l.never += other.never
	return nil
}

// N is how many samples there are, with those that never arrived.
func (l *Latency) N() int64 { return l.arrived.TotalCount() + l.never }

// Undelivered is how many of them never arrived.
func (l *Latency) Undelivered() int64 { return l.never }

// Quantile is the smallest latency that at least the share q of all samples does
// not exceed (nearest rank): [Never] where too many did not arrive, 0 without
// samples.
func (l *Latency) Quantile(q float64) time.Duration {
	n := l.N()
	if n == 0 {
		return 0
	}
	rank := min(max(int64(math.Ceil(q*float64(n))), 1), n)
	arrived := l.arrived.TotalCount()
	if rank > arrived {
		return Never
	}
	// The histogram counts by the arrived alone, and rounds to the nearest rank.
	v := l.arrived.ValueAtPercentile(100 * float64(rank) / float64(arrived))
	return time.Duration(min(v, l.arrived.Max()))
}

// Summary of a distribution.
type Summary struct {
	N, Undelivered     int64
	P50, P95, P99, Max time.Duration // Never where it is infinite
}

// Summary of the samples so far.
func (l *Latency) Summary() Summary {
	return Summary{
		N: l.N(), Undelivered: l.never,
		P50: l.Quantile(0.50), P95: l.Quantile(0.95), P99: l.Quantile(0.99), Max: l.Quantile(1),
	}
}

func (s Summary) String() string {
	return fmt.Sprintf("n %d, p50 %s, p95 %s, p99 %s, max %s", s.N, Text(s.P50), Text(s.P95), Text(s.P99), Text(s.Max))
}

// Text is a latency for people, three digits or "∞".
func Text(d time.Duration) string {
	switch {
	case d == Never:
		return "∞"
	case d >= 10*time.Second:
		return d.Round(100 * time.Millisecond).String()
	case d >= time.Second:
		return d.Round(10 * time.Millisecond).String()
	case d >= 100*time.Millisecond:
		return d.Round(time.Millisecond).String()
	default:
		return d.Round(10 * time.Microsecond).String()
	}
}

// Milliseconds is a latency as a number, +Inf for [Never].
func Milliseconds(d time.Duration) float64 {
	if d == Never {
		return math.Inf(1)
	}
	return float64(d) / float64(time.Millisecond)
}
