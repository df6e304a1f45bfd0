package faults

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
)

// campaign runs a fault's strikes in the background. The zero value has not
// been started.
type campaign struct {
	of     int
	struck *atomic.Int64
	done   chan struct{}
	life   *life
}

type life struct {
	mu   sync.Mutex
	stop context.CancelFunc // nil until started
	err  error
}

func newCampaign(of int) campaign {
	return campaign{of: of, struck: new(atomic.Int64), done: make(chan struct{}), life: new(life)}
}

// Done is closed after the last strike, or the first that failed.
func (c *campaign) Done() <-chan struct{} { return c.done }

// Progress is the number of strikes made, and planned.
func (c *campaign) Progress() (struck, of int) { return int(c.struck.Load()), c.of }

func (c *campaign) struckOnce() { c.struck.Add(1) }

// start runs the strikes until they end or finish is called. A panic becomes an
// error of the campaign.
func (c *campaign) start(ctx context.Context, strikes func(context.Context) error) {
	ctx, stop := context.WithCancel(ctx)
	c.life.mu.Lock()
	c.life.stop = stop
	c.life.mu.Unlock()
	go func() {
		defer close(c.done)
		defer stop()
		defer func() {
			if p := recover(); p != nil {
				c.fail(fmt.Errorf("%w: %v\n%s", ErrPanic, p, debug.Stack()))
			}
		}()
		if err := strikes(ctx); err != nil && ctx.Err() == nil {
			c.fail(err)
		}
	}()
}

func (c *campaign) fail(err error) {
	c.life.mu.Lock()
	defer c.life.mu.Unlock()
	c.life.err = err
}

// finish ends the campaign and waits for the strike under way. It returns the
// error that ended it early, if any.
func (c *campaign) finish(ctx context.Context) error {
	c.life.mu.Lock()
	stop := c.life.stop
	c.life.mu.Unlock()
	if stop == nil {
		return nil
	}
	stop()
	select {
	case <-c.done:
	case <-ctx.Done():
		return fmt.Errorf("waiting for the strike under way: %w", ctx.Err())
	}
	c.life.mu.Lock()
	defer c.life.mu.Unlock()
	return c.life.err
}

// sleep waits for d and reports whether ctx is still alive.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
