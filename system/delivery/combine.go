package delivery

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"
)

// combiner makes one call of those that are asked for while another call is
// under way (a group commit). Nobody waits for company: a question that finds
// nothing under way is put at once, alone.
type combiner[Q, A any] struct {
	most    int           // questions of one call at most
	timeout time.Duration // of one call
	id      func(Q) uuid.UUID
	// several answers each question in order, or leaves it open (nil): then it
	// is put alone, by the one who asked.
	several func(context.Context, []Q) ([]*A, error)
	one     func(context.Context, Q) (A, error)

	mu      sync.Mutex
	waiting []*question[Q, A]
	running bool
}

type question[Q, A any] struct {
	q    Q
	a    A
	err  error
	open bool // to be put alone
	done chan struct{}
}

// ask returns the answer to q, or ctx's error: then the question may have been
// put all the same, as with any statement whose answer was not waited for.
func (c *combiner[Q, A]) ask(ctx context.Context, q Q) (A, error) {
	mine := &question[Q, A]{q: q, done: make(chan struct{})}
	if err := ctx.Err(); err != nil {
		return mine.a, err
	}
	c.mu.Lock()
	c.waiting = append(c.waiting, mine)
	start := !c.running
	c.running = true
	c.mu.Unlock()
	if start {
		// Not by this goroutine: its own answer may come with the first call, and
		// others would hold it back.
		go c.run()
	}
	select {
	case <-mine.done:
		if mine.open {
			return c.one(ctx, q)
		}
		return mine.a, mine.err
	case <-ctx.Done():
		var none A
		return none, ctx.Err()
	}
}

// run puts what waits until nothing does.
func (c *combiner[Q, A]) run() {
	for {
		batch := c.take()
		if len(batch) == 0 {
			return
		}
		c.put(batch)
		for _, q := range batch {
			close(q.done)
		}
	}
}

// take returns the next questions in the order in which they came, each row once:
// two questions about one row are two statements.
func (c *combiner[Q, A]) take() []*question[Q, A] {
	c.mu.Lock()
	defer c.mu.Unlock()
	var batch, rest []*question[Q, A]
	seen := map[uuid.UUID]bool{}
	for _, w := range c.waiting {
		id := c.id(w.q)
		if len(batch) == c.most || seen[id] {
			rest = append(rest, w)
			continue
		}
		seen[id] = true
		batch = append(batch, w)
	}
	c.waiting = rest
	c.running = len(batch) > 0
	return batch
}

func (c *combiner[Q, A]) put(batch []*question[Q, A]) {
	// Not the callers' contexts: one that ends must not end the others' call.
	ctx, cancel := context.WithTimeout(context.Background(), c.timeout)
	defer cancel()
	if len(batch) == 1 {
		batch[0].a, batch[0].err = c.one(ctx, batch[0].q)
		return
	}
	questions := make([]Q, len(batch))
	for i, b := range batch {
		questions[i] = b.q
	}
	answers, err := c.several(ctx, questions)
	for i, b := range batch {
		switch {
		case err == nil && answers[i] != nil:
			b.a = *answers[i]
		case err == nil, dataError(err): // the values of one row must not fail the others
			b.open = true
		default:
			b.err = err
		}
	}
}

// dataError: class 22 (data exception) or 23 (integrity).
func dataError(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && len(pg.Code) == 5 && (pg.Code[:2] == "22" || pg.Code[:2] == "23")
}
