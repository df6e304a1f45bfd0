package kafka

import (
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
)

// A cluster id that begins with "-" is taken for an option by StorageTool: one
// start in 64 would fail.
func TestClusterIDIsNoOption(t *testing.T) {
	t.Parallel()
	drawn := []uuid.UUID{{0xf8}, {0xfb, 0xff}, {0x40, 1}} // -AAAA…, -_8AA…, QAEAA…
	draws := 0
	id := ClusterID(func() uuid.UUID { draws++; return drawn[draws-1] })
	require.Equal(t, 3, draws)
	require.Equal(t, "QAEAAAAAAAAAAAAAAAAAAA", id)
}
