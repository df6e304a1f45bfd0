package spill

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// TestLikeASlice: whatever is appended, overwritten and flushed, what is read
// is what a slice would have; reads and writes cross the border of the file.
func TestLikeASlice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var l Log
		defer func() { require.NoError(t, l.Reset()) }()
		var model []byte
		for range rapid.IntRange(0, 60).Draw(t, "steps") {
			switch rapid.IntRange(0, 4).Draw(t, "step") {
			case 0:
				require.NoError(t, rapid.SampledFrom([]func() error{l.Flush, l.Seal}).Draw(t, "flush")())
			case 1:
				if len(model) > 0 {
					from := rapid.IntRange(0, len(model)-1).Draw(t, "from")
					b := rapid.SliceOfN(rapid.Byte(), 0, len(model)-from).Draw(t, "over")
					require.NoError(t, l.Write(b, int64(from)))
					copy(model[from:], b)
				}
			case 2:
				big := make([]byte, rapid.IntRange(0, 3*tailBytes).Draw(t, "big"))
				off, err := l.Append(big)
				require.NoError(t, err)
				require.EqualValues(t, len(model), off)
				model = append(model, big...)
			default:
				b := rapid.SliceOfN(rapid.Byte(), 0, 20).Draw(t, "bytes")
				off, err := l.Append(b)
				require.NoError(t, err)
				require.EqualValues(t, len(model), off)
				model = append(model, b...)
			}
			from := rapid.IntRange(0, len(model)).Draw(t, "read from")
			got := make([]byte, rapid.IntRange(0, len(model)-from).Draw(t, "read"))
			require.NoError(t, l.Read(got, int64(from)))
			require.Equal(t, string(model[from:from+len(got)]), string(got))
			require.Error(t, l.Read(got, int64(len(model)-len(got)+1)))
			require.EqualValues(t, len(model), l.Len())
			require.LessOrEqual(t, len(l.tail), tailBytes)
		}
	})
}

func TestTable(t *testing.T) {
	tb := NewTable(8)
	var b [8]byte
	const n = 3 * tailBytes / 8
	for i := range n {
		binary.LittleEndian.PutUint64(b[:], uint64(i))
		at, err := tb.Append(b[:])
		require.NoError(t, err)
		require.EqualValues(t, i, at)
	}
	binary.LittleEndian.PutUint64(b[:], 7)
	require.NoError(t, tb.Write(b[:], 5))
	require.NoError(t, tb.Write(b[:], n-1))
	for i, want := range map[int64]uint64{0: 0, 5: 7, 6: 6, n - 2: n - 2, n - 1: 7} {
		require.NoError(t, tb.Read(b[:], i))
		require.Equal(t, want, binary.LittleEndian.Uint64(b[:]))
	}
	require.NoError(t, tb.Reset())
	require.Zero(t, tb.Len())
}

// TestNoFileCostsMemory: the failure is told once, and every byte is there.
func TestNoFileCostsMemory(t *testing.T) {
	t.Setenv("TMPDIR", filepath.Join(t.TempDir(), "missing"))
	var l Log
	one := make([]byte, tailBytes)
	one[3] = 9
	_, err := l.Append(one)
	require.ErrorIs(t, err, os.ErrNotExist)
	off, err := l.Append([]byte("abc"))
	require.NoError(t, err)
	got := make([]byte, 3)
	require.NoError(t, l.Read(got, off))
	require.Equal(t, "abc", string(got))
	require.NoError(t, l.Read(got, 1))
	require.Equal(t, []byte{0, 0, 9}, got)
	require.NoError(t, l.Reset())
}
