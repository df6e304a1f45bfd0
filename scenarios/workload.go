package scenarios

import (
	"context"
	"sync/atomic"
	"time"

	"mailproof/history"
	"mailproof/loadgen"
	"mailproof/target"
)

const (
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
	driver *loadgen.Driver

	confirmed atomic.Int64
}

func newClients(t target.Target, clock func() int64, record func(history.Record)) *clients {
	return &clients{target: t, clock: clock, record: record, driver: &loadgen.Driver{Clock: clock}}
}

// drive makes every operation at its intended time, from the clock's reading at
// start on, and returns when each has been acknowledged or given up. Once enough
// is closed (nil: never), no more come.
func (c *clients) drive(ctx context.Context, start int64, bookings []Booking, enough <-chan struct{}) {
	loadgen.DriveUntil(ctx, c.driver, start, schedule(bookings), enough, c.act)
}

// act repeats an operation until it is acknowledged: an outcome that is unknown
// stays unknown in the history, and the next try is an operation of its own.
func (c *clients) act(ctx context.Context, a action, intended int64) {
	name, do := "confirm", func(ctx context.Context) history.OpOutcome { return c.target.Confirm(ctx, a.ID, a.Recipient) }
	if a.cancel {
		// One that comes before its confirmation was acknowledged is refused, and
		// repeated like any other.
		name, do = "cancel", func(ctx context.Context) history.OpOutcome { return c.target.Cancel(ctx, a.ID) }
	}
	for range maxTries {
		if c.try(ctx, a.Booking, name, intended, do) == history.OpOK {
			if !a.cancel {
				c.confirmed.Add(1)
			}
			return
		}
		if !pause(ctx, tryAgain) {
			return
		}
	}
}

func (c *clients) try(ctx context.Context, b Booking, name string, intended int64, do func(context.Context) history.OpOutcome) history.OpOutcome {
	ctx, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()
	call := c.clock()
	outcome := do(ctx)
	returned := c.clock()
	c.record(history.Record{T: returned, Kind: history.KindOp, Op: &history.Op{
		Name: name, Booking: b.ID, Key: c.target.Key(b.ID, 1), Recipient: b.Recipient,
		Intended: intended, Call: call, Return: returned, Outcome: outcome,
	}})
	return outcome
}

// pause waits for d and reports whether ctx is still alive.
func pause(ctx context.Context, d time.Duration) bool { return loadgen.Wait(ctx, d) }
