package benchmarks

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// fakeRun runs parts that start no server.
func fakeRun(t *testing.T, ctx context.Context, size size, chosen ...part) (*Result, error) {
	t.Helper()
	out := filepath.Join(t.TempDir(), "doc.md")
	r := &runner{cfg: Config{Out: out, Say: func(string) {}}, size: size, result: &Result{Schema: SchemaVersion}}
	err := r.run(ctx, chosen, time.Now())
	saved, readErr := Read(jsonPath(out))
	require.NoError(t, readErr)
	_, statErr := os.Stat(out)
	require.NoError(t, statErr)
	return saved, err
}

func measured(r *runner, _ context.Context) error {
	r.result.Dead = &Dead{Mails: 7}
	return nil
}

// TestAPartThatFailsLosesNothing: an error, a panic and a part that hangs leave
// the others' figures in the document, each with its reason.
func TestAPartThatFailsLosesNothing(t *testing.T) {
	t.Parallel()
	bounds := size{partBound: 50 * time.Millisecond, runBound: time.Minute}
	saved, err := fakeRun(t, t.Context(), bounds,
		part{name: "error", do: func(*runner, context.Context) error { return errors.New("no broker answered") }},
		part{name: "panic", do: func(*runner, context.Context) error { panic("index out of range") }},
		part{name: "hang", do: func(_ *runner, ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) }},
		part{name: "skip", do: func(*runner, context.Context) error { return skipped("nothing there") }},
		part{name: "good", do: measured},
	)
	require.ErrorIs(t, err, errPart)
	require.ErrorContains(t, err, "no broker answered")
	require.Len(t, saved.Parts, 5)
	require.Equal(t, "no broker answered", saved.Parts[0].Error)
	require.Equal(t, "panic: index out of range", saved.Parts[1].Error)
	require.Contains(t, saved.Parts[2].Error, "not done within")
	require.Equal(t, "nothing there", saved.Parts[3].Skipped)
	require.Empty(t, saved.Parts[4].Error)
	require.Equal(t, 7, saved.Dead.Mails)
}

// TestAnInterruptKeepsWhatWasMeasured: the parts after it are not begun, and the
// document says that it was cut short.
func TestAnInterruptKeepsWhatWasMeasured(t *testing.T) {
	t.Parallel()
	ctx, interrupt := context.WithCancelCause(t.Context())
	cause := errors.New("interrupted by the user")
	saved, err := fakeRun(t, ctx, size{partBound: time.Minute, runBound: time.Minute},
		part{name: "good", do: measured},
		part{name: "cut", do: func(_ *runner, ctx context.Context) error {
			interrupt(cause)
			<-ctx.Done()
			return context.Cause(ctx)
		}},
		part{name: "never", do: func(*runner, context.Context) error { t.Error("begun after the interrupt"); return nil }},
	)
	require.ErrorIs(t, err, cause)
	require.True(t, saved.Run.Interrupted)
	require.Len(t, saved.Parts, 2)
	require.Equal(t, "interrupted", saved.Parts[1].Error)
	require.Equal(t, 7, saved.Dead.Mails)
}

// TestTheRunIsBounded: a part that has no time left is skipped.
func TestTheRunIsBounded(t *testing.T) {
	t.Parallel()
	saved, err := fakeRun(t, t.Context(), size{partBound: time.Minute, runBound: -time.Second}, part{name: "late", do: measured})
	require.NoError(t, err)
	require.Contains(t, saved.Parts[0].Skipped, "were over")
	require.Nil(t, saved.Dead)
}

func TestOnlyKnowsItsParts(t *testing.T) {
	t.Parallel()
	chosen, err := choose([]string{"queues", "hops"})
	require.NoError(t, err)
	require.Len(t, chosen, 2)
	require.Equal(t, "hops", chosen[0].name)
	_, err = choose([]string{"hops", "hoops"})
	require.ErrorContains(t, err, `"hoops"`)
}

func TestQueueOverTime(t *testing.T) {
	t.Parallel()
	second := int64(time.Second)
	require.Equal(t, []QueuePoint{{0, 3}, {1_000_000, 1}, {2_000_000, 0}},
		queueOverTime(3, []int64{second, second / 2, 2 * second}, 0, 2*second, 2))
	require.InDelta(t, 1.5, perSecond([]int64{second, second / 2, 2 * second, 9 * second}, 0, 2*second), 1e-9)
	require.Zero(t, perSecond(nil, 5, 5))
}

// TestSameSeedSameTickets: a run can be repeated, and no two purposes share
// arrivals.
func TestSameSeedSameTickets(t *testing.T) {
	t.Parallel()
	a, err := drawTickets(7, "idle0", 20, 10)
	require.NoError(t, err)
	b, err := drawTickets(7, "idle0", 20, 10)
	require.NoError(t, err)
	require.Equal(t, a, b)
	c, err := drawTickets(7, "idle1", 20, 10)
	require.NoError(t, err)
	require.NotEqual(t, a[0].Op.booking, c[0].Op.booking)
	require.Equal(t, "idle0-00001@customers.test", a[0].Op.recipient)
	require.Equal(t, 19, a[19].Op.i)
}
