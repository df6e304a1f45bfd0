package ports

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestLieBelowSourcePorts(t *testing.T) {
	t.Parallel()
	low := lowestSourcePort()
	p := &Chooser{}
	seen := map[int]bool{}
	for range 50 {
		port, err := p.Next()
		require.NoError(t, err)
		require.Less(t, port, low)
		require.GreaterOrEqual(t, port, lowestPort)
		require.False(t, seen[port], "port %d twice", port)
		seen[port] = true
	}
}
