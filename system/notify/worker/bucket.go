package worker

import (
	"context"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// Bucket is a token bucket that takes tokens back and gives them out by the
// handful. It is safe for concurrent use by the workers of one lane.
//
// Workers that get their tokens one by one ask the database one by one: at 500
// mails per second each has a statement, and a commit, of its own. Those that get
// them in the same moment share theirs (delivery.Group), and leave the machine to
// the tickets until the next handful.
type Bucket struct {
	tokens   *rate.Limiter
	began    time.Time
	every    time.Duration // of a handful; 0: tokens come one by one
	returned atomic.Int64
}

var _ Limiter = (*Bucket)(nil)

// longestHandful bounds how unevenly a bucket pours: nobody who counts mails per
// second sees it.
const longestHandful = 50 * time.Millisecond

// NewBucket makes a bucket of that many tokens per second for so many workers: it
// holds at most a token for each of them, and a handful is for half of them, so
// that the others can end their mails meanwhile.
func NewBucket(perSecond float64, workers int) *Bucket {
	b := &Bucket{tokens: rate.NewLimiter(rate.Limit(perSecond), workers), began: time.Now()}
	if handful := min(float64(workers)/2, perSecond*longestHandful.Seconds()); handful >= 2 {
		b.every = time.Duration(handful / perSecond * float64(time.Second))
	}
	return b
}

// Wait takes a token, one that was returned if there is one, else the next. The
// error is that of ctx.
func (b *Bucket) Wait(ctx context.Context) error {
	for {
		n := b.returned.Load()
		if n == 0 {
			return b.next(ctx)
		}
		if b.returned.CompareAndSwap(n, n-1) {
			return ctx.Err()
		}
	}
}

// next takes the next token of the limiter, with the handful to which it belongs.
func (b *Bucket) next(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	now := time.Now()
	token := b.tokens.ReserveN(now, 1)
	wait := token.DelayFrom(now)
	if wait > 0 && b.every > 0 {
		due := now.Add(wait).Sub(b.began)
		wait += (b.every - due%b.every) % b.every
	}
	if wait <= 0 {
		return nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		token.Cancel()
		return ctx.Err()
	}
}

// Return gives a token back for the next one to take.
func (b *Bucket) Return() { b.returned.Add(1) }
