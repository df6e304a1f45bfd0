// Package patience repeats a call to a dependency that is away until it
// succeeds: nothing is skipped, acked or committed because Postgres or RabbitMQ
// did not answer (A2-12, AC8).
//
// It guarantees that the waits grow to a bound and are jittered, so that a
// dependency that comes back is not met by everybody at once, and that the
// reason is logged without flooding the log.
//
// It must not import any other package of the system.
package patience

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"time"
)

// Backoff is how the waits grow: First, doubled each time, up to Max.
type Backoff struct{ First, Max time.Duration }

// Default suits a database or broker that restarts: a second's outage costs
// about a second.
func Default() Backoff { return Backoff{First: 50 * time.Millisecond, Max: 2 * time.Second} }

// After is the wait after the n-th failure in a row, n from 1: between half and
// the whole of the step.
func (b Backoff) After(n int) time.Duration {
	step := b.First
	for i := 1; i < n && step < b.Max; i++ {
		step *= 2
	}
	step = min(step, b.Max)
	return step/2 + rand.N(step/2+1)
}

// Counter is told of each failure.
type Counter interface{ Wait(duty string) }

// Retrier repeats calls.
type Retrier struct {
	Backoff Backoff
	// Timeout bounds each single call; 0 leaves it to the call. A server that
	// was stopped keeps its connections open and never answers.
	Timeout time.Duration
	Log     *slog.Logger
	Count   Counter
}

// Do calls f until it returns nil, or until ctx ends: then it returns ctx's
// error. giveUp, when not nil, names errors that no repetition repairs; such an
// error is returned at once.
func (r Retrier) Do(ctx context.Context, duty string, giveUp func(error) bool, f func(context.Context) error) error {
	for n := 1; ; n++ {
		err := r.once(ctx, f)
		if err == nil {
			return nil
		}
		if giveUp != nil && giveUp(err) {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		r.Count.Wait(duty)
		if logWorthy(n) {
			r.Log.Warn("waiting for a dependency", "duty", duty, "failures", n, "error", err)
		}
		if err := Sleep(ctx, r.Backoff.After(n)); err != nil {
			return err
		}
	}
}

func (r Retrier) once(ctx context.Context, f func(context.Context) error) error {
	if r.Timeout <= 0 {
		return f(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, r.Timeout)
	defer cancel()
	return f(ctx)
}

// logWorthy picks the 1st, 2nd, 4th, 8th, … failure.
func logWorthy(n int) bool { return n&(n-1) == 0 }

// Sleep waits for d or until ctx ends.
func Sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
