package kafka

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

type member func()

func (m member) CloseAllowingRebalance() { m() }

func TestLeaveIsBounded(t *testing.T) {
	t.Parallel()
	require.True(t, Leave(member(func() {}), time.Minute))
	stuck := make(chan struct{})
	defer close(stuck)
	require.False(t, Leave(member(func() { <-stuck }), time.Millisecond))
}
