package delivery

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"
)

// combiner makes one call of those that are asked for while calls are under way
// (a group commit). Nobody waits for company: a question that finds no call under
// way is put at once, alone, by the one who asks. The others wait for the end of
// a call, or until they are a crowd and another call may be under way; then one of
// them puts its own and theirs.
type combiner[Q, A any] struct {
	most    int           // questions of one call at most
	flights int           // calls under way at most
	crowd   int           // questions that begin a further call while one is under way
	timeout time.Duration // of a call for several
	id      func(Q) uuid.UUID
	// several answers each question in order, or leaves it open (nil): then it
	// is put alone, by the one who asked.
	several func(context.Context, []Q) ([]*A, error)
	one     func(context.Context, Q) (A, error)

	mu       sync.Mutex
	waiting  []*question[Q, A]
	underWay int
}

type question[Q, A any] struct {
	q     Q
	a     A
	err   error
	open  bool          // to be put alone
	leads bool          // it is this one's turn to put questions
	turn  chan struct{} // closed once it is answered, or leads
}

// ask returns the answer to q. When ctx ends first, or with it, the question may
// have been put all the same, as with any statement whose answer was not waited
// for.
func (c *combiner[Q, A]) ask(ctx context.Context, q Q) (A, error) {
	mine := &question[Q, A]{q: q, turn: make(chan struct{})}
	c.mu.Lock()
	if c.mayBegin(len(c.waiting) + 1) {
		c.underWay++
		c.mu.Unlock()
		c.lead(ctx, mine)
		return c.answer(ctx, mine)
	}
	c.waiting = append(c.waiting, mine)
	c.mu.Unlock()
	select {
	case <-mine.turn:
	case <-ctx.Done():
		if c.leave(mine) {
			return mine.a, ctx.Err()
		}
		<-mine.turn
	}
	if mine.leads {
		c.lead(ctx, mine)
	}
	return c.answer(ctx, mine)
}

// mayBegin: a call for so many questions may begin now.
func (c *combiner[Q, A]) mayBegin(questions int) bool {
	return c.underWay == 0 || c.underWay < c.flights && questions >= c.crowd
}

func (c *combiner[Q, A]) answer(ctx context.Context, mine *question[Q, A]) (A, error) {
	if mine.open {
		return c.one(ctx, mine.q)
	}
	return mine.a, mine.err
}

// leave takes a question back that nobody has put yet.
func (c *combiner[Q, A]) leave(mine *question[Q, A]) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := slices.Index(c.waiting, mine)
	if at < 0 {
		return false
	}
	c.waiting = slices.Delete(c.waiting, at, at+1)
	return true
}

// pass ends a call: the one that has waited longest may put the next. Those that
// are left waiting are led by the end of a call that is still under way.
func (c *combiner[Q, A]) pass() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.underWay--
	if len(c.waiting) == 0 || !c.mayBegin(len(c.waiting)) {
		return
	}
	c.underWay++
	next := c.waiting[0]
	c.waiting = slices.Delete(c.waiting, 0, 1)
	next.leads = true
	close(next.turn)
}

// lead puts mine, and with it what waits.
func (c *combiner[Q, A]) lead(ctx context.Context, mine *question[Q, A]) {
	defer c.pass()
	batch := c.take(mine)
	if len(batch) == 1 {
		mine.a, mine.err = c.one(ctx, mine.q)
		return
	}
	// The end of one's context must not end the others' call.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.timeout)
	defer cancel()
	c.put(ctx, batch)
	for _, b := range batch[1:] {
		close(b.turn)
	}
}

// take adds to mine what waits, in the order in which it came, each row once:
// two questions about one row are two statements.
func (c *combiner[Q, A]) take(mine *question[Q, A]) []*question[Q, A] {
	c.mu.Lock()
	defer c.mu.Unlock()
	batch, seen := []*question[Q, A]{mine}, map[uuid.UUID]bool{c.id(mine.q): true}
	c.waiting = slices.DeleteFunc(c.waiting, func(w *question[Q, A]) bool {
		id := c.id(w.q)
		if len(batch) == c.most || seen[id] {
			return false
		}
		seen[id] = true
		batch = append(batch, w)
		return true
	})
	return batch
}

func (c *combiner[Q, A]) put(ctx context.Context, batch []*question[Q, A]) {
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
