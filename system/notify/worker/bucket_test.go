package worker

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

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
