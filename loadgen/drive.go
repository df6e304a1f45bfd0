package loadgen

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// DefaultInFlight is how many operations a [Driver] has open at most. It stands
// for the file descriptors and memory that a generator has; a schedule that
// needs more is not made, and that is said.
const DefaultInFlight = 512

// Driver makes arrivals at their intended times. Several schedules may be driven
// side by side or one after the other; the tally is of them all.
type Driver struct {
	// Clock gives monotonic nanoseconds, the time base of intended times.
	Clock func() int64
	// InFlight bounds the operations at work side by side; 0 means
	// [DefaultInFlight]. An arrival that finds them all busy is not made: to wait
	// for a free one would hide the very stall that the latency should show.
	InFlight int

	once    sync.Once
	slots   chan struct{}
	planned atomic.Int64
	due     atomic.Int64
	made    atomic.Int64
	busy    atomic.Int64
	lag     atomic.Int64
}

// Drive makes every arrival of the plan, whose times must not fall, from the
// clock's reading at start on. It returns when each operation has returned. do
// is given the intended time on the driver's clock. When ctx ends, what is left
// is not made.
func Drive[T any](ctx context.Context, d *Driver, start int64, plan []Arrival[T], do func(ctx context.Context, op T, intended int64)) {
	DriveUntil(ctx, d, start, plan, nil, do)
}

// DriveUntil is [Drive] with an end that the plan does not know: once enough is
// closed, the rest of the plan is taken back, which is no shortfall.
func DriveUntil[T any](ctx context.Context, d *Driver, start int64, plan []Arrival[T], enough <-chan struct{}, do func(ctx context.Context, op T, intended int64)) {
	slots := d.places()
	d.planned.Add(int64(len(plan)))
	var all sync.WaitGroup
	defer all.Wait()
	for i, a := range plan {
		intended := start + int64(a.At)
		if !waitUnless(ctx, enough, time.Duration(intended-d.Clock())) {
			if ctx.Err() == nil {
				d.planned.Add(int64(i - len(plan)))
			}
			return
		}
		d.due.Add(1)
		d.noteLag(d.Clock() - intended)
		select {
		case slots <- struct{}{}:
		default:
			d.busy.Add(1)
			continue
		}
		d.made.Add(1)
		all.Go(func() {
			defer func() { <-slots }()
			do(ctx, a.Op, intended)
		})
	}
}

func (d *Driver) places() chan struct{} {
	d.once.Do(func() {
		if d.InFlight <= 0 {
			d.InFlight = DefaultInFlight
		}
		d.slots = make(chan struct{}, d.InFlight)
	})
	return d.slots
}

func (d *Driver) noteLag(lag int64) {
	for {
		old := d.lag.Load()
		if lag <= old || d.lag.CompareAndSwap(old, lag) {
			return
		}
	}
}

// Tally is what a driver did.
type Tally struct {
	Planned int64 // arrivals of the schedules that were begun
	Due     int64 // whose time has come
	Made    int64
	// Busy is how many of those due were not made: every place was taken.
	Busy     int64
	InFlight int
	// WorstLag is the longest delay of an arrival behind its intended time: the
	// generator's own share of a latency, at most.
	WorstLag time.Duration
}

// Tally of the driver so far.
func (d *Driver) Tally() Tally {
	d.places()
	return Tally{
		Planned: d.planned.Load(), Due: d.due.Load(), Made: d.made.Load(), Busy: d.busy.Load(),
		InFlight: d.InFlight, WorstLag: time.Duration(d.lag.Load()),
	}
}

// Shortfall says which arrivals a finished drive did not make and why; "" when
// all were made. A run with a shortfall measured the generator, and must fail.
func (t Tally) Shortfall() string {
	missing := t.Planned - t.Made
	switch {
	case missing == 0:
		return ""
	case missing == t.Busy:
		return fmt.Sprintf("%d of %d arrivals were not made: all %d clients were busy", missing, t.Planned, t.InFlight)
	default:
		return fmt.Sprintf("%d of %d arrivals were not made: all %d clients were busy for %d, the load was ended before %d",
			missing, t.Planned, t.InFlight, t.Busy, missing-t.Busy)
	}
}

// Wait waits for d and reports whether ctx is still alive.
func Wait(ctx context.Context, d time.Duration) bool { return waitUnless(ctx, nil, d) }

// waitUnless is Wait that end cuts short.
func waitUnless(ctx context.Context, end <-chan struct{}, d time.Duration) bool {
	select {
	case <-end: // also where nothing has to be waited for
		return false
	default:
	}
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-end:
		return false
	case <-ctx.Done():
		return false
	}
}
