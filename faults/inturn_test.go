package faults

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"mailproof/history"
)

// ticks is a clock that moves by one with each reading.
func ticks() func() int64 {
	n := int64(0)
	return func() int64 { n++; return n }
}

func TestActsStrikeInTurn(t *testing.T) {
	t.Parallel()
	var order []string
	note := func(what string) { order = append(order, what) } // acts never overlap: no lock
	act := func(name string) Act {
		return Act{Title: name, Part: "part", Strike: func(context.Context) (Witness, error) {
			note(name)
			return Witness{Text: "seen " + name, Count: 1}, nil
		}}
	}
	clock := ticks()
	var runs []*Run
	for _, f := range InTurn(clock, func(context.Context) error { note("settled"); return nil }, act("one"), act("two")) {
		runs = append(runs, NewRun(f, func() int64 { return 1000 }))
	}
	for _, r := range runs {
		require.NoError(t, r.Inject(t.Context()))
	}
	for _, r := range runs {
		require.NoError(t, r.Wait(t.Context()))
		require.NoError(t, r.Heal(t.Context()))
		require.NoError(t, r.Witness(t.Context()))
	}
	require.Equal(t, []string{"one", "settled", "two", "settled"}, order)
	one, two := runs[0].Record(), runs[1].Record()
	require.Equal(t, history.Installed, one.Outcome)
	require.Equal(t, "seen one", one.Witness)
	require.Less(t, one.Start, one.End)
	require.Less(t, one.End, two.Start, "the record's span is the act's, not that of Inject and Heal")
	require.Less(t, two.End, int64(1000))
}

// An act that failed is mended, has no witness, and the next one strikes.
func TestActThatFailsIsMended(t *testing.T) {
	t.Parallel()
	mended, struck := false, false
	all := InTurn(ticks(), nil,
		Act{
			Title: "broken", Part: "part",
			Strike: func(context.Context) (Witness, error) { return Witness{}, errors.New("no") },
			Mend:   func(context.Context) error { mended = true; return nil },
		},
		Act{Title: "next", Strike: func(context.Context) (Witness, error) { struck = true; return Witness{Text: "seen"}, nil }})
	runs := []*Run{NewRun(all[0], ticks()), NewRun(all[1], ticks())}
	for _, r := range runs {
		require.NoError(t, r.Inject(t.Context()))
	}
	require.NoError(t, runs[1].Wait(t.Context()))
	for _, r := range runs {
		require.NoError(t, r.Heal(t.Context()))
		require.NoError(t, r.Witness(t.Context()))
	}
	require.True(t, mended)
	require.True(t, struck)
	require.Equal(t, history.Indeterminate, runs[0].Record().Outcome)
	require.Empty(t, runs[0].Record().Witness)
}

// An act whose turn has not come when the run is healed does not strike.
func TestActBeforeItsTurn(t *testing.T) {
	t.Parallel()
	begun := make(chan struct{})
	all := InTurn(ticks(), nil,
		Act{Title: "long", Strike: func(ctx context.Context) (Witness, error) {
			close(begun)
			<-ctx.Done()
			return Witness{}, ctx.Err()
		}},
		Act{Title: "never", Strike: func(context.Context) (Witness, error) {
			return Witness{}, errors.New("it struck")
		}})
	first, second := NewRun(all[0], ticks()), NewRun(all[1], ticks())
	require.NoError(t, first.Inject(t.Context()))
	require.NoError(t, second.Inject(t.Context()))
	<-begun
	require.NoError(t, second.Heal(t.Context()))
	require.NoError(t, first.Heal(t.Context()))
	require.NoError(t, second.Witness(t.Context()))
	require.Empty(t, second.Record().Witness)
	require.Equal(t, history.Installed, second.Record().Outcome, "without a witness: the judge calls the run invalid")
}

// The record spans Strike alone: Ready comes before, Restore after.
func TestActInThreeSteps(t *testing.T) {
	t.Parallel()
	clock := ticks()
	var readyAt, restoredAt int64
	f := InTurn(clock, nil, Act{
		Title: "three", Part: "part",
		Ready:   func(context.Context) error { readyAt = clock(); return nil },
		Strike:  func(context.Context) (Witness, error) { return Witness{Text: "away", Count: 1}, nil },
		Restore: func(context.Context) (string, error) { restoredAt = clock(); return ", and back", nil },
	})[0]
	r := NewRun(f, ticks())
	require.NoError(t, r.Inject(t.Context()))
	require.NoError(t, r.Wait(t.Context()))
	require.NoError(t, r.Heal(t.Context()))
	require.NoError(t, r.Witness(t.Context()))
	require.Equal(t, "away, and back", r.Record().Witness)
	require.Less(t, readyAt, r.Record().Start)
	require.Less(t, r.Record().End, restoredAt)

	mended := false
	f = InTurn(clock, nil, Act{
		Title: "unrestored", Part: "part",
		Strike:  func(context.Context) (Witness, error) { return Witness{Text: "away"}, nil },
		Restore: func(context.Context) (string, error) { return "", errors.New("no") },
		Mend:    func(context.Context) error { mended = true; return nil },
	})[0]
	r = NewRun(f, ticks())
	require.NoError(t, r.Inject(t.Context()))
	require.NoError(t, r.Wait(t.Context()))
	require.NoError(t, r.Heal(t.Context()))
	require.True(t, mended)
	require.Equal(t, history.Indeterminate, r.Record().Outcome)
}
