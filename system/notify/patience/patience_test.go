package patience

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

type counter map[string]int

func (c counter) Wait(duty string) { c[duty]++ }

func retrier(c counter) Retrier {
	return Retrier{Backoff: Backoff{First: time.Millisecond, Max: 2 * time.Millisecond}, Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Count: c}
}

func TestDoRepeatsUntilItWorks(t *testing.T) {
	t.Parallel()
	c, calls := counter{}, 0
	err := retrier(c).Do(t.Context(), "database", nil, func(context.Context) error {
		calls++
		if calls < 4 {
			return errors.New("away")
		}
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, 4, calls)
	require.Equal(t, 3, c["database"])
}

func TestDoStopsWithItsContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	err := retrier(counter{}).Do(ctx, "database", nil, func(context.Context) error { cancel(); return errors.New("away") })
	require.ErrorIs(t, err, context.Canceled)
}

func TestDoReturnsWhatCannotBeRepaired(t *testing.T) {
	t.Parallel()
	hopeless := errors.New("no such row")
	err := retrier(counter{}).Do(t.Context(), "database", func(err error) bool { return errors.Is(err, hopeless) },
		func(context.Context) error { return hopeless })
	require.ErrorIs(t, err, hopeless)
}

func TestBackoffStaysWithinItsBounds(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		b := Backoff{First: time.Duration(rapid.IntRange(1, 1000).Draw(t, "first")) * time.Millisecond, Max: 5 * time.Second}
		got := b.After(rapid.IntRange(1, 10_000).Draw(t, "n"))
		require.GreaterOrEqual(t, got, b.First/2)
		require.LessOrEqual(t, got, b.Max)
	})
}
