package scenarios

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"mailproof/history"
	"mailproof/target"
)

const (
	// maxInFlight bounds the clients at work side by side. An arrival that finds
	// them all busy is not made, and counted: a silent wait would hide the very
	// stall that the latency should show.
	maxInFlight = 512
	// tryTimeout bounds one try of a client; after it the outcome is unknown.
	tryTimeout = 5 * time.Second
	// tryAgain is a client's pause before it repeats an operation.
	tryAgain = 200 * time.Millisecond
	// maxTries of one client: two minutes of a system that does not answer.
	maxTries = 25
)

// clients makes the operations of a workload and records each of their tries.
type clients struct {
	target target.Target
	clock  func() int64
	record func(history.Record)

	intended  atomic.Int64 // arrivals that should have been made so far
	confirmed atomic.Int64
	notMade   atomic.Int64
	lag       atomic.Int64 // longest delay of an arrival behind its schedule, ns
}

// drive makes every arrival at its intended time, from the clock's reading at
// start on, and returns when each has been acknowledged or given up.
func (c *clients) drive(ctx context.Context, start int64, bookings []Booking) {
	slots := make(chan struct{}, maxInFlight)
	var all sync.WaitGroup
	defer all.Wait()
	for _, b := range bookings {
		intended := start + int64(b.At)
		if !c.waitUntil(ctx, intended) {
			return
		}
		c.intended.Add(1)
		c.noteLag(c.clock() - intended)
		select {
		case slots <- struct{}{}:
		default:
			c.notMade.Add(1)
			continue
		}
		all.Go(func() {
			defer func() { <-slots }()
			c.confirm(ctx, b, intended)
		})
	}
}

func (c *clients) noteLag(lag int64) {
	for {
		old := c.lag.Load()
		if lag <= old || c.lag.CompareAndSwap(old, lag) {
			return
		}
	}
}

func (c *clients) waitUntil(ctx context.Context, t int64) bool {
	return pause(ctx, time.Duration(t-c.clock()))
}

// confirm repeats the same booking until it is acknowledged: an outcome that is
// unknown stays unknown in the history, and the next try is an operation of its
// own.
func (c *clients) confirm(ctx context.Context, b Booking, intended int64) {
	for range maxTries {
		if c.try(ctx, b, intended) == history.OpOK {
			c.confirmed.Add(1)
			return
		}
		if !pause(ctx, tryAgain) {
			return
		}
	}
}

func (c *clients) try(ctx context.Context, b Booking, intended int64) history.OpOutcome {
	ctx, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()
	call := c.clock()
	outcome := c.target.Confirm(ctx, b.ID, b.Recipient)
	returned := c.clock()
	c.record(history.Record{T: returned, Kind: history.KindOp, Op: &history.Op{
		Name: "confirm", Booking: b.ID, Key: c.target.Key(b.ID, 1), Recipient: b.Recipient,
		Intended: intended, Call: call, Return: returned, Outcome: outcome,
	}})
	return outcome
}

// pause waits for d and reports whether ctx is still alive.
func pause(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
