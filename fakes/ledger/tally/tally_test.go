package tally

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func get(t require.TestingT, tl *Tally, k Key) uint32 {
	v, err := tl.Get(k)
	require.NoError(t, err)
	return v
}

// TestLikeAMap: whatever is counted in whatever order, with files made every
// few keys, the answers are those of a map.
func TestLikeAMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tl := New(rapid.IntRange(2, 15).Draw(t, "recent"))
		defer func() { require.NoError(t, tl.Close()) }()
		model := map[int]uint32{}
		for range rapid.IntRange(0, 200).Draw(t, "steps") {
			k := rapid.IntRange(0, 60).Draw(t, "key")
			switch rapid.IntRange(0, 9).Draw(t, "step") {
			case 0:
				v := rapid.Uint32Range(1, 9).Draw(t, "value")
				require.Equal(t, model[k], tl.Put(KeyOf(strconv.Itoa(k)), v))
				model[k] = v
			case 1:
				require.Equal(t, model[k], get(t, tl, KeyOf(strconv.Itoa(k))))
			default:
				model[k]++
				require.Equal(t, model[k], tl.Add(KeyOf(strconv.Itoa(k))))
			}
		}
		for k, v := range model {
			require.Equal(t, v, get(t, tl, KeyOf(strconv.Itoa(k))))
		}
		require.NoError(t, tl.Err())
	})
}

// TestCloseKeysAreTwo: keys that differ in their last bit only, in files that
// are searched and merged.
func TestCloseKeysAreTwo(t *testing.T) {
	tl := New(64)
	defer tl.Close()
	key := func(i int) Key { return Key{7, uint64(i)} }
	const n = 3000
	for i := range n {
		require.EqualValues(t, 0, tl.Put(key(i), uint32(i+1)), i)
	}
	for i := range n {
		require.EqualValues(t, i+1, get(t, tl, key(i)))
	}
	require.NotEqual(t, KeyOf("ab", "c"), KeyOf("a", "bc"))
	require.NotEqual(t, KeyOf("a", "b"), KeyOf("ab"))
	long := make([]byte, 1000)
	sum := sha256.Sum256(append(binary.AppendUvarint(nil, 1000), long...))
	require.Equal(t, sum[:8], binary.BigEndian.AppendUint64(nil, KeyOf(string(long)).hi))
	require.Equal(t, sum[8:16], binary.BigEndian.AppendUint64(nil, KeyOf(string(long)).lo))
}

// TestFilesAreFew: merging keeps the number of files small, and Reset
// gives all of them back.
func TestFilesAreFew(t *testing.T) {
	tl := New(100)
	for i := range 30_000 {
		tl.Add(KeyOf(strconv.Itoa(i)))
	}
	require.NoError(t, tl.Err())
	levels := map[int]int{}
	for _, r := range tl.runs {
		levels[r.level]++
	}
	require.Less(t, levels[0], mergeFiles)
	require.Less(t, levels[1], mergeFiles)
	require.LessOrEqual(t, levels[2], 30_000/(100*mergeFiles*mergeFiles))
	tl.Reset()
	require.Empty(t, tl.runs)
	require.EqualValues(t, 1, tl.Add(KeyOf("7")))
	require.NoError(t, tl.Close())
}

// TestNoFileCostsMemoryNotCounts: where no file can be made, all keys stay in
// memory and the failure is told.
func TestNoFileCostsMemoryNotCounts(t *testing.T) {
	t.Setenv("TMPDIR", filepath.Join(t.TempDir(), "missing"))
	tl := New(10)
	for range 3 {
		for i := range 50 {
			tl.Add(KeyOf(strconv.Itoa(i)))
		}
	}
	require.ErrorIs(t, tl.Err(), os.ErrNotExist)
	for i := range 50 {
		require.EqualValues(t, 3, get(t, tl, KeyOf(strconv.Itoa(i))))
	}
}

// TestAReadThatFailsIsTold: a key whose file is gone is taken for a new one,
// but not in silence.
func TestAReadThatFailsIsTold(t *testing.T) {
	tl := New(10)
	for i := range 10 {
		tl.Add(KeyOf(strconv.Itoa(i)))
	}
	require.Len(t, tl.runs, 1)
	require.NoError(t, tl.Close())
	_, err := tl.Get(KeyOf("3"))
	require.ErrorIs(t, err, os.ErrClosed)
	require.EqualValues(t, 1, tl.Add(KeyOf("3")))
	require.ErrorIs(t, tl.Err(), os.ErrClosed)
}

// TestTwoBytesAKey: a key in the files costs its filter's bits and its share
// of the index, 1.625 bytes.
func TestTwoBytesAKey(t *testing.T) {
	tl := New(0)
	defer tl.Close()
	fill := func(from, to int) uint64 {
		for i := from; i < to; i++ {
			tl.Add(KeyOf(strconv.Itoa(i)))
		}
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := fill(0, 2*DefaultRecent)
	after := fill(2*DefaultRecent, 10*DefaultRecent)
	perKey := (float64(after) - float64(before)) / (8 * DefaultRecent)
	t.Logf("%.2f bytes a key", perKey)
	require.Less(t, perKey, 3.0)
}

func BenchmarkAdd(b *testing.B) {
	b.Run("new", func(b *testing.B) {
		tl := New(0)
		defer tl.Close()
		for i := 0; b.Loop(); i++ {
			tl.Add(KeyOf("mail:", strconv.Itoa(i)))
		}
	})
	b.Run("known", func(b *testing.B) {
		tl := New(0)
		defer tl.Close()
		names := make([]string, 200_000)
		for i := range names {
			names[i] = fmt.Sprint("k", i)
			tl.Add(KeyOf("mail:", names[i]))
		}
		for i := 0; b.Loop(); i++ {
			tl.Add(KeyOf("mail:", names[i%len(names)]))
		}
	})
}
