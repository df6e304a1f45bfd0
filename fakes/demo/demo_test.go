package demo

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestThePicture: the naive sender doubles, the timid one loses, the careful
// one does neither.
func TestThePicture(t *testing.T) {
	var out strings.Builder
	results, err := Run(context.Background(), &out, Options{Seed: 1, Mails: 120, PerSecond: 1000, Live: true})
	require.NoError(t, err)
	require.Len(t, results, 3)
	naive, timid, careful := results[0].Report, results[1].Report, results[2].Report
	require.NotEmpty(t, naive.Doubled)
	require.Empty(t, naive.Lost)
	require.NotEmpty(t, timid.Lost)
	require.Empty(t, timid.Doubled)
	require.True(t, careful.OK(), "%+v", careful)
	require.Contains(t, out.String(), "told nothing")
}

func TestItStopsWhenAsked(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err := Run(ctx, &strings.Builder{}, Options{Seed: 1})
	require.ErrorIs(t, err, context.Canceled)
}
