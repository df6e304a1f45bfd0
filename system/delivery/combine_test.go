package delivery

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// calls is a database that answers when it is let to.
type calls struct {
	mu   sync.Mutex
	seen [][]uuid.UUID
	gate chan struct{} // nil: open
	err  error         // of a call for several
	left map[uuid.UUID]bool
}

func (c *calls) note(ids ...uuid.UUID) {
	c.mu.Lock()
	c.seen = append(c.seen, ids)
	c.mu.Unlock()
	if c.gate != nil {
		<-c.gate
	}
}

func (c *calls) combiner(most int) *combiner[uuid.UUID, string] {
	return &combiner[uuid.UUID, string]{
		most: most, flights: 1, timeout: time.Second, id: func(id uuid.UUID) uuid.UUID { return id },
		one: func(_ context.Context, id uuid.UUID) (string, error) {
			c.note(id)
			return "alone " + id.String(), nil
		},
		several: func(_ context.Context, ids []uuid.UUID) ([]*string, error) {
			c.note(ids...)
			if c.err != nil {
				return nil, c.err
			}
			out := make([]*string, len(ids))
			for i, id := range ids {
				if text := "together " + id.String(); !c.left[id] {
					out[i] = &text
				}
			}
			return out, nil
		},
	}
}

// together asks for all of ids while a first question is under way, and returns
// the answers.
func together(t *testing.T, c *calls, most int, ids ...uuid.UUID) ([]string, []error) {
	t.Helper()
	com := c.combiner(most)
	c.gate = make(chan struct{})
	var running sync.WaitGroup
	running.Go(func() { _, _ = com.ask(t.Context(), uuid.New()) })
	synctest.Wait()
	answers, errs := make([]string, len(ids)), make([]error, len(ids))
	for i, id := range ids {
		running.Go(func() { answers[i], errs[i] = com.ask(t.Context(), id) })
		synctest.Wait() // in order
	}
	close(c.gate)
	running.Wait()
	c.seen = c.seen[1:]
	return answers, errs
}

// A worker that is alone has its own statement, at once and in its own
// goroutine.
func TestCombinerWaitsForNobody(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &calls{}
		com, began := c.combiner(10), time.Now()
		for range 3 {
			id := uuid.New()
			a, err := com.ask(t.Context(), id)
			require.NoError(t, err)
			require.Equal(t, "alone "+id.String(), a)
		}
		require.Zero(t, time.Since(began))
		require.Len(t, c.seen, 3)
	})
}

func TestCombinerJoinsWhatWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a, b, d, e := uuid.New(), uuid.New(), uuid.New(), uuid.New()
		c := &calls{left: map[uuid.UUID]bool{b: true}}
		answers, errs := together(t, c, 3, a, b, d, e)
		require.Equal(t, []error{nil, nil, nil, nil}, errs)
		require.Equal(t, []string{"together " + a.String(), "alone " + b.String(), "together " + d.String(), "alone " + e.String()}, answers)
		require.Equal(t, []uuid.UUID{a, b, d}, c.seen[0], "three at most")
		require.Len(t, c.seen, 3)
	})
}

// Two questions about one row are two statements.
func TestCombinerAsksForARowOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a, b := uuid.New(), uuid.New()
		c := &calls{}
		_, errs := together(t, c, 10, a, a, b)
		require.Equal(t, []error{nil, nil, nil}, errs)
		require.Equal(t, [][]uuid.UUID{{a, b}, {a}}, c.seen)
	})
}

// The values of one row fail the statement: each is asked for alone.
func TestCombinerTellsDataFromTheDatabase(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a, b := uuid.New(), uuid.New()
		c := &calls{err: &pgconn.PgError{Code: "22021"}}
		answers, errs := together(t, c, 10, a, b)
		require.Equal(t, []error{nil, nil}, errs)
		require.Equal(t, []string{"alone " + a.String(), "alone " + b.String()}, answers)

		away := errors.New("away")
		c = &calls{err: away}
		_, errs = together(t, c, 10, a, b)
		require.Equal(t, []error{away, away}, errs)
		require.Len(t, c.seen, 1)
	})
}

// One that leaves does not end the others' statement, and is not asked for.
func TestCombinerIsLeftAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &calls{gate: make(chan struct{})}
		com := c.combiner(10)
		var running sync.WaitGroup
		ask := func(ctx context.Context, want error) {
			running.Go(func() {
				_, err := com.ask(ctx, uuid.New())
				if !errors.Is(err, want) {
					panic(err)
				}
			})
			synctest.Wait()
		}
		ctx, cancel := context.WithCancel(t.Context())
		ask(t.Context(), nil)
		ask(ctx, context.Canceled)
		ask(t.Context(), nil)
		ask(t.Context(), nil)
		cancel()
		synctest.Wait()
		close(c.gate)
		running.Wait()
		require.Len(t, c.seen, 2)
		require.Len(t, c.seen[1], 2)
		require.Zero(t, com.underWay)
		require.Empty(t, com.waiting)
	})
}

// Two calls may be under way; what comes then waits for the first to end.
func TestCombinerFlights(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &calls{gate: make(chan struct{})}
		com := c.combiner(10)
		com.flights = 2
		var running sync.WaitGroup
		for range 5 {
			running.Go(func() { _, _ = com.ask(t.Context(), uuid.New()) })
		}
		synctest.Wait()
		require.Len(t, c.seen, 2)
		c.gate <- struct{}{} // one ends: the three others go together
		synctest.Wait()
		require.Len(t, c.seen, 3)
		require.Len(t, c.seen[2], 3)
		close(c.gate)
		running.Wait()
		require.Zero(t, com.underWay)
	})
}

// With many workers a second call waits for a crowd, and is there for it: a call
// that hangs must not hold up all others. Those who are no crowd are put when a
// call ends.
func TestCombinerCrowd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &calls{gate: make(chan struct{})}
		com := c.combiner(10)
		com.flights, com.crowd = 2, 3
		var running sync.WaitGroup
		ask := func(n int) {
			for range n {
				running.Go(func() { _, _ = com.ask(t.Context(), uuid.New()) })
			}
			synctest.Wait()
		}
		ask(1)
		require.Len(t, c.seen, 1, "nobody waits for company")
		ask(2)
		require.Len(t, c.seen, 1, "two are no crowd")
		ask(1)
		require.Len(t, c.seen, 2)
		require.Len(t, c.seen[1], 3, "the crowd goes together")
		ask(2)
		require.Len(t, c.seen, 2)
		c.gate <- struct{}{}
		synctest.Wait()
		require.Len(t, c.seen, 2, "two are no crowd while a call is under way")
		c.gate <- struct{}{}
		synctest.Wait()
		require.Len(t, c.seen, 3, "the last call's end leads them")
		require.Len(t, c.seen[2], 2)
		close(c.gate)
		running.Wait()
		require.Zero(t, com.underWay)
		require.Empty(t, com.waiting)
	})
}

// However many ask, and whoever gives up, each is answered for itself and nothing
// is left behind.
func TestCombinerAnswersEverybody(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		c := &calls{}
		com := c.combiner(rapid.IntRange(1, 8).Draw(t, "most"))
		com.flights = rapid.IntRange(1, 3).Draw(t, "flights")
		com.crowd = rapid.IntRange(0, 8).Draw(t, "crowd")
		workers, each := rapid.IntRange(1, 20).Draw(t, "workers"), rapid.IntRange(1, 20).Draw(t, "each")
		impatient := rapid.IntRange(2, 9).Draw(t, "impatient")
		var running sync.WaitGroup
		wrong := make(chan string, workers*each)
		for w := range workers {
			running.Go(func() {
				for i := range each {
					ctx, cancel := context.WithCancel(context.Background())
					if (w+i)%impatient == 0 {
						go cancel()
					}
					id := uuid.New()
					got, err := com.ask(ctx, id)
					cancel()
					if err == nil && !strings.HasSuffix(got, id.String()) {
						wrong <- got
					}
				}
			})
		}
		running.Wait()
		require.Empty(t, wrong, "an answer to another's question")
		require.Zero(t, com.underWay)
		require.Empty(t, com.waiting)
	})
}
