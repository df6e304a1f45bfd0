package worker

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"mailproof/system/delivery"
)

func TestBucketHoldsItsRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, began := NewBucket(10, 1), time.Now()
		for range 21 {
			require.NoError(t, b.Wait(t.Context()))
		}
		require.InDelta(t, 2, time.Since(began).Seconds(), 0.01)
	})
}

// Whatever the rate and the number of workers: no more tokens come than the rate
// and one for each worker allow, none stays away for longer than a handful, and
// those of a handful come together.
func TestBucketPoursByTheHandful(t *testing.T) {
	for _, c := range []struct {
		perSecond float64
		workers   int
		handful   int // tokens that come together
	}{
		{500, 32, 16}, // half of the workers
		{1000, 32, 16},
		{1e9, 32, 16},
		{100, 32, 5}, // 50 ms
		{10, 32, 1},  // one by one
		{1000, 1, 1}, // nobody to share with
		{0.5, 8, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			b, began := NewBucket(c.perSecond, c.workers), time.Now()
			n := c.workers + 40*c.handful
			times := make(chan time.Duration, n)
			var waiting sync.WaitGroup
			for range c.workers {
				waiting.Go(func() {
					for range n / c.workers {
						assert.NoError(t, b.Wait(t.Context()))
						times <- time.Since(began)
					}
				})
			}
			waiting.Wait()
			close(times)
			together, i := map[time.Duration]int{}, 0
			for at := range times {
				i++
				allowed := float64(c.workers) + at.Seconds()*c.perSecond
				require.LessOrEqual(t, float64(i), allowed+1e-6*allowed+1, "%+v: token %d after %s", c, i, at)
				if i > c.workers {
					together[at]++
					late := at.Seconds() - float64(i-c.workers)/c.perSecond
					require.LessOrEqual(t, late, b.every.Seconds()+0.001, "%+v: token %d after %s", c, i, at)
				}
			}
			most := 0
			for _, k := range together {
				most = max(most, k)
			}
			require.InDelta(t, c.handful, most, 1, "%+v: %v", c, together)
		})
	}
}

// Who gives up leaves its token to the next.
func TestBucketTakesBackWhatNobodyWaitsFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, began := NewBucket(1, 1), time.Now()
		require.NoError(t, b.Wait(t.Context()))
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, b.Wait(ctx), context.DeadlineExceeded)
		require.NoError(t, b.Wait(t.Context()))
		require.InDelta(t, 1, time.Since(began).Seconds(), 0.01)
	})
}

// A token that sent nothing costs no time.
func TestReturnedTokensAreTakenFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, began := NewBucket(1, 1), time.Now()
		for range 1000 {
			require.NoError(t, b.Wait(t.Context()))
			b.Return()
		}
		require.NoError(t, b.Wait(t.Context()))
		require.Zero(t, time.Since(began))
		require.NoError(t, b.Wait(t.Context()))
		require.InDelta(t, 1, time.Since(began).Seconds(), 0.01, "one was returned, one was not")

		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		b.Return()
		require.ErrorIs(t, b.Wait(ctx), context.Canceled)
	})
}

// limits counts what a worker takes and returns.
type limits struct{ taken, returned int }

func (l *limits) Wait(context.Context) error { l.taken++; return nil }
func (l *limits) Return()                    { l.returned++ }

func TestOnlyATryUsesItsToken(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		set      func(*world)
		returned int
	}{
		"sent":            {func(w *world) { w.settled = settledAs(delivery.Sent, 0) }, 0},
		"not due":         {func(w *world) { w.claims = []delivery.Claim{{Status: delivery.Failed, Wait: time.Second}} }, 1},
		"stopped":         {func(w *world) { w.claims = []delivery.Claim{{Status: delivery.Cancelled}} }, 1},
		"the row is gone": {func(w *world) { w.noRow = 1 }, 1},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, l := newWorld(t), &limits{}
			w.limit = l
			c.set(w)
			w.run(t, body(t))
			require.Equal(t, limits{taken: 1, returned: c.returned}, *l)
		})
	}
}
