package worker

import (
	"context"
	"sync/atomic"

	"golang.org/x/time/rate"
)

// Bucket is a token bucket that takes tokens back. It is safe for concurrent
// use by the workers of one lane.
type Bucket struct {
	tokens   *rate.Limiter
	returned atomic.Int64
}

var _ Limiter = (*Bucket)(nil)

// NewBucket makes a bucket of that many tokens per second which holds at most
// burst of them.
func NewBucket(perSecond float64, burst int) *Bucket {
	return &Bucket{tokens: rate.NewLimiter(rate.Limit(perSecond), burst)}
}

// Wait takes a token, one that was returned if there is one, else the next. The
// error is that of ctx, or says that its deadline comes before the token.
func (b *Bucket) Wait(ctx context.Context) error {
	for {
		n := b.returned.Load()
		if n == 0 {
			return b.tokens.Wait(ctx)
		}
		if b.returned.CompareAndSwap(n, n-1) {
			return ctx.Err()
		}
	}
}

// Return gives a token back for the next one to take.
func (b *Bucket) Return() { b.returned.Add(1) }
