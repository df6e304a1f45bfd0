package campaign

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"mailproof/system/amqp"
	"mailproof/system/contract"
	"mailproof/system/delivery"
)

// mortal is a process's hold on the world: its steps are counted, and at one of
// them the process dies, either before the step or right after it took effect.
type mortal struct {
	*world
	mu    sync.Mutex
	after int  // steps it may still make; negative: any number
	late  bool // the last step takes effect, and nobody hears of it
	dead  bool
}

// step reports whether a step takes effect, and whether its caller hears of it.
func (m *mortal) step() (done, told bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.dead:
		return false, false
	case m.after < 0:
		return true, true
	case m.after == 0:
		m.dead = true
		return m.late, false
	}
	m.after--
	return true, true
}

// through makes one step of a call that answers.
func through[T any](m *mortal, f func() (T, error)) (T, error) {
	var none T
	done, told := m.step()
	if !done {
		return none, errDied
	}
	v, err := f()
	if !told {
		return none, errDied
	}
	return v, err
}

func (m *mortal) CampaignStopped(ctx context.Context, id string) (*time.Time, error) {
	return through(m, func() (*time.Time, error) { return m.world.CampaignStopped(ctx, id) })
}

func (m *mortal) StopCampaign(ctx context.Context, id string) error {
	_, err := through(m, func() (struct{}, error) { return struct{}{}, m.world.StopCampaign(ctx, id) })
	return err
}

func (m *mortal) Insert(ctx context.Context, rows []delivery.NewRow) ([]delivery.Inserted, error) {
	return through(m, func() ([]delivery.Inserted, error) { return m.world.Insert(ctx, rows) })
}

func (m *mortal) StampPublished(ctx context.Context, ids []uuid.UUID) error {
	_, err := through(m, func() (struct{}, error) { return struct{}{}, m.world.StampPublished(ctx, ids) })
	return err
}

func (m *mortal) Publish(ctx context.Context, msgs []amqp.Message) []error {
	errs, err := through(m, func() ([]error, error) { return m.world.Publish(ctx, msgs), nil })
	if err == nil {
		return errs
	}
	return slices.Repeat([]error{errDied}, len(msgs))
}

// people of the model. Some are spelt in several ways, and two are not the same
// for all that they look alike.
func spellings() map[string][]string {
	return map[string][]string{
		"ann":  {"ann@x.test", "Ann@X.test", "  ANN@x.TEST "},
		"bob":  {"bob@x.test", "BOB@x.test"},
		"cy":   {"cy@x.test"},
		"cy+":  {"cy+shop@x.test"},
		"dora": {"dörte@exämple.test", "DÖRTE@EXÄMPLE.test"},
		"eve":  {"eve@x.test"},
		"fay":  {"fay@x.test", "fay@X.TEST"},
	}
}

// call is one call for the campaign by one process.
type call struct {
	who    []string // in the order of its lines, repeats included
	lines  []string
	window int
	batch  int
	after  int
	late   bool
	broken bool // the body ends in a line that is none
}

func drawCall(t *rapid.T) call {
	all := spellings()
	who := rapid.SliceOfN(rapid.SampledFrom(slices.Sorted(maps.Keys(all))), 1, 12).Draw(t, "who")
	c := call{
		who: who, window: rapid.IntRange(1, 3).Draw(t, "window"), batch: rapid.IntRange(1, 4).Draw(t, "batch"),
		after: rapid.IntRange(-1, 14).Draw(t, "dies after"), late: rapid.Bool().Draw(t, "late"),
		broken: rapid.IntRange(0, 4).Draw(t, "body") == 0,
	}
	for _, w := range who {
		c.lines = append(c.lines, line(rapid.SampledFrom(all[w]).Draw(t, "spelling")))
	}
	if c.broken {
		c.lines = append(c.lines, `{"to":"x@`)
	}
	return c
}

// answer is what the caller hears.
type answer struct {
	receipt Receipt
	err     error
}

func (c call) send(w *world) answer {
	m := &mortal{world: w, after: c.after, late: c.late}
	s := w.service(func(cfg *Config) {
		cfg.Store, cfg.Window, cfg.Batch = m, c.window, c.batch
		cfg.Ring.Publisher = m
		cfg.Step = 5 * time.Millisecond         // what is never confirmed is given up
		cfg.Log = slog.New(slog.DiscardHandler) // the world's is one call's
	})
	r, err := s.Send(context.Background(), request(c.lines...))
	return answer{r, err}
}

// Whatever calls there were, side by side and one after the other, whoever died in
// them and wherever, each person who was ever taken has exactly one row; an
// acknowledged call has taken all of its own, each rung for and stamped; and
// nothing new is taken once a stop is acknowledged. Then a call that is let through
// mends whatever the others left half done.
func TestAnyCallsLeaveOneRowForEachRecipient(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld()
		asked := map[string]bool{} // keys
		stopped := false
		for range rapid.IntRange(1, 4).Draw(t, "rounds") {
			if rapid.IntRange(0, 5).Draw(t, "stop") == 0 {
				m := &mortal{world: w, after: rapid.IntRange(-1, 1).Draw(t, "stop dies after"), late: rapid.Bool().Draw(t, "stop late")}
				err := w.service(func(c *Config) { c.Store = m }).Stop(context.Background(), "spring")
				stopped = stopped || err == nil
			}
			before := len(w.rows)
			calls := []call{drawCall(t)}
			if rapid.Bool().Draw(t, "two at once") {
				calls = append(calls, drawCall(t))
			}
			answers := make([]answer, len(calls))
			var together sync.WaitGroup
			for i, c := range calls {
				together.Go(func() { answers[i] = c.send(w) })
			}
			together.Wait()
			for i, c := range calls {
				for _, who := range c.who {
					asked[keyOf(who)] = true
				}
				judgeAnswer(t, w, c, answers[i], stopped)
			}
			if stopped {
				require.Len(t, w.rows, before, "taken after the stop was acknowledged")
			}
			judgeRows(t, w, asked)
		}
		mend(t, w)
	})
}

func keyOf(who string) string { return contract.CampaignKey("spring", spellings()[who][0]) }

func judgeAnswer(t *rapid.T, w *world, c call, a answer, stopped bool) {
	r := a.receipt
	require.LessOrEqual(t, r.New+r.Known, r.Read)
	require.LessOrEqual(t, r.Read, len(c.who))
	switch {
	case a.err == nil:
		require.False(t, stopped, "a stopped campaign took a call")
		require.False(t, c.broken, "a broken line was swallowed")
		require.Equal(t, len(c.who), r.Read)
		require.Equal(t, r.Read, r.New+r.Known)
		for _, who := range c.who {
			row := w.rows[keyOf(who)]
			require.NotNil(t, row, "%s was acknowledged, and has no row", who)
			require.NotNil(t, row.PublishedAt, who)
			require.NotEmpty(t, w.rung[row.DedupeKey], "%s was acknowledged, and nobody was rung for", who)
		}
	case errors.Is(a.err, ErrStopped):
		require.True(t, w.stopped["spring"], "nobody had stopped it")
	}
}

// judgeRows wants no row but of those who were asked for, each under its own key
// and at an address that somebody gave.
func judgeRows(t *rapid.T, w *world, asked map[string]bool) {
	for key, row := range w.rows {
		require.True(t, asked[key], "a row of somebody who was never asked for")
		require.Equal(t, key, contract.CampaignKey("spring", row.Recipient))
		require.Equal(t, row.Recipient, strings.TrimSpace(row.Recipient))
		if row.PublishedAt != nil {
			require.NotEmpty(t, w.rung[key], "stamped, and nobody was rung for")
		}
	}
}

// mend repeats everybody's call, undisturbed.
func mend(t *rapid.T, w *world) {
	var lines []string
	for _, who := range slices.Sorted(maps.Keys(spellings())) {
		lines = append(lines, line(spellings()[who][0]))
	}
	before := len(w.rows)
	r, err := w.service(func(c *Config) { c.Window = 3 }).Send(context.Background(), request(lines...))
	if w.stopped["spring"] {
		require.ErrorIs(t, err, ErrStopped)
		require.Len(t, w.rows, before)
		return
	}
	require.NoError(t, err)
	require.Equal(t, Receipt{Campaign: "spring", Read: len(lines), New: len(lines) - before, Known: before}, r)
	require.Len(t, w.rows, len(lines))
	for key, row := range w.rows {
		require.NotNil(t, row.PublishedAt, key)
		require.NotEmpty(t, w.rung[key], key)
	}
	seen := map[uuid.UUID]bool{}
	for key, row := range w.rows {
		require.False(t, seen[row.ID], fmt.Sprintf("%s shares its row", key))
		seen[row.ID] = true
	}
}
