package loadgen

import (
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"time"
)

// Shape is how arrivals lie in time.
type Shape interface {
	// Times are the intended times from the start of the load on, none before
	// the one before it. What is random comes from r.
	Times(r *rand.Rand) iter.Seq[time.Duration]
	// Validate says what is wrong with the shape's figures.
	Validate() error
}

// Constant is N arrivals at even gaps, the first one gap after the start.
type Constant struct {
	N         int
	PerSecond float64
}

// Poisson is N arrivals of customers who know nothing of each other: gaps are
// exponential, so that two may come at almost the same time.
type Poisson struct {
	N         int
	PerSecond float64 // mean
}

// Burst is N arrivals in crowds of Size at one instant, with exponential gaps
// of mean Every between the crowds. The last crowd has what is left.
type Burst struct {
	N, Size int
	Every   time.Duration
}

// Ramp is a Poisson process whose rate goes evenly from From to To arrivals per
// second over Over, and ends there.
type Ramp struct {
	From, To float64
	Over     time.Duration
}

var (
	_ Shape = Constant{}
	_ Shape = Poisson{}
	_ Shape = Burst{}
	_ Shape = Ramp{}
)

// Validate wants a rate for what is to come.
func (c Constant) Validate() error { return validRate("constant", c.N, c.PerSecond) }

// Validate wants a rate for what is to come.
func (p Poisson) Validate() error { return validRate("poisson", p.N, p.PerSecond) }

func validRate(shape string, n int, perSecond float64) error {
	switch {
	case n < 0:
		return fmt.Errorf("%s: %d arrivals", shape, n)
	case n > 0 && !(perSecond > 0 && !math.IsInf(perSecond, 1)):
		return fmt.Errorf("%s: %g arrivals per second, must be above zero and finite", shape, perSecond)
	}
	return nil
}

// Validate wants crowds of at least one, and time between them.
func (b Burst) Validate() error {
	switch {
	case b.N < 0:
		return fmt.Errorf("burst: %d arrivals", b.N)
	case b.N > 0 && b.Size < 1:
		return fmt.Errorf("burst: crowds of %d, must be at least 1", b.Size)
	case b.N > b.Size && b.Every <= 0:
		return fmt.Errorf("burst: %s between crowds, must be above zero", b.Every)
	}
	return nil
}

// Validate wants rates that are none below zero and not both zero.
func (r Ramp) Validate() error {
	switch {
	case r.Over <= 0:
		return fmt.Errorf("ramp: over %s, must be above zero", r.Over)
	case !(r.From >= 0 && r.To >= 0 && r.From+r.To > 0) || math.IsInf(r.From+r.To, 1):
		return fmt.Errorf("ramp: from %g to %g arrivals per second, must not be negative, nor both zero", r.From, r.To)
	}
	return nil
}

// Times draws nothing.
func (c Constant) Times(*rand.Rand) iter.Seq[time.Duration] {
	return func(yield func(time.Duration) bool) {
		for i := range c.N {
			// From the index, so that rounding does not add up.
			if !yield(seconds(float64(i+1) / c.PerSecond)) {
				return
			}
		}
	}
}

// Times draws one number per arrival, as it is asked for.
func (p Poisson) Times(r *rand.Rand) iter.Seq[time.Duration] {
	return func(yield func(time.Duration) bool) {
		var at time.Duration
		for range p.N {
			at += seconds(r.ExpFloat64() / p.PerSecond)
			if !yield(at) {
				return
			}
		}
	}
}

// Times draws one number per crowd.
func (b Burst) Times(r *rand.Rand) iter.Seq[time.Duration] {
	return func(yield func(time.Duration) bool) {
		var at time.Duration
		for i := range b.N {
			if i > 0 && i%b.Size == 0 {
				at += time.Duration(r.ExpFloat64() * float64(b.Every))
			}
			if !yield(at) {
				return
			}
		}
	}
}

// Times draws one number per arrival. A Poisson process of rate 1 is bent to
// the ramp: its k-th arrival e comes when the ramp has brought e on average,
// From·t + (To−From)·t²/(2·Over) = e.
func (r Ramp) Times(rnd *rand.Rand) iter.Seq[time.Duration] {
	return func(yield func(time.Duration) bool) {
		over := r.Over.Seconds()
		all := (r.From + r.To) / 2 * over
		for e := rnd.ExpFloat64(); e <= all; e += rnd.ExpFloat64() {
			if !yield(min(seconds(r.when(e, over)), r.Over)) {
				return
			}
		}
	}
}

// when solves the equation of [Ramp.Times] for t, in the form that loses no
// digits where the slope is near zero.
func (r Ramp) when(e, over float64) float64 {
	slope := (r.To - r.From) / over
	root := math.Sqrt(max(r.From*r.From+2*slope*e, 0))
	return 2 * e / (r.From + root)
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// Arrival is one operation and when it should be made, from the start of its
// load on.
type Arrival[T any] struct {
	At time.Duration
	Op T
}

// Draw draws a schedule. op makes the i-th operation, from 0; it may draw from r
// itself. The same shape and the same state of r give the same schedule.
func Draw[T any](s Shape, r *rand.Rand, op func(i int, at time.Duration) T) ([]Arrival[T], error) {
	if err := s.Validate(); err != nil {
		return nil, fmt.Errorf("load: %w", err)
	}
	var arrivals []Arrival[T]
	for at := range s.Times(r) {
		arrivals = append(arrivals, Arrival[T]{At: at, Op: op(len(arrivals), at)})
	}
	return arrivals, nil
}
