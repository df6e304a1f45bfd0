// Package tally counts per key in bounded memory: the keys that were seen
// lately stand in a map of fixed size, all others in sorted temporary files.
//
// Guarantees:
//
//   - Exact: what [Tally.Add] and [Tally.Put] return is what a map of all keys
//     would. Only if a file cannot be read is a key taken for a new one, and
//     then [Tally.Err] says so.
//   - Two names never share a count: keys are 128 bits of SHA-256, a function
//     of which no two inputs with the same 128 bits can be found in practice
//     (for 2^40 names the chance of any such pair is below 2^-48).
//   - A file that cannot be written costs memory, never a count.
//
// What grows is a filter of 12 bits and an eighth of a byte of index for each
// key in the files.
//
// A Tally is not safe for concurrent use: its owner has a lock. It imports
// nothing of this module but package spill.
package tally

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"slices"
)

// Key names what is counted.
type Key struct{ hi, lo uint64 }

func (k Key) compare(o Key) int {
	if c := cmp.Compare(k.hi, o.hi); c != 0 {
		return c
	}
	return cmp.Compare(k.lo, o.lo)
}

// KeyOf hashes parts; ("ab", "c") and ("a", "bc") are different keys.
func KeyOf(parts ...string) Key {
	var room [256]byte // most names fit, so that nothing is allocated
	b := room[:0]
	for _, p := range parts {
		b = binary.AppendUvarint(b, uint64(len(p)))
		b = append(b, p...)
	}
	sum := sha256.Sum256(b)
	return Key{binary.BigEndian.Uint64(sum[:8]), binary.BigEndian.Uint64(sum[8:16])}
}

// KeyOfHash makes a key of a hash that is evenly spread already.
func KeyOfHash(sum [16]byte) Key {
	return Key{binary.BigEndian.Uint64(sum[:8]), binary.BigEndian.Uint64(sum[8:])}
}

// DefaultRecent is how many keys stand in the map unless [New] is told
// otherwise: about 2 MB.
const DefaultRecent = 32_768

// Tally maps keys to counts.
type Tally struct {
	limit  int
	recent map[Key]uint32
	runs   []*run // oldest first; a later one overrules an earlier
	err    error
}

// New returns an empty tally that holds recent keys in memory; 0 means
// [DefaultRecent].
func New(recent int) *Tally {
	if recent <= 0 {
		recent = DefaultRecent
	}
	return &Tally{limit: recent, recent: make(map[Key]uint32, recent)}
}

// Get returns the key's count, 0 if it has none. An error says that the file
// that may hold it cannot be read.
func (t *Tally) Get(k Key) (uint32, error) {
	if v, ok := t.recent[k]; ok {
		return v, nil
	}
	for _, r := range slices.Backward(t.runs) {
		v, ok, err := r.find(k)
		if ok || err != nil {
			return v, err
		}
	}
	return 0, nil
}

// known is Get for those who count on.
func (t *Tally) known(k Key) uint32 {
	v, err := t.Get(k)
	t.fail(err)
	return v
}

// Add counts the key once more and returns how often it was counted.
func (t *Tally) Add(k Key) uint32 {
	v := t.known(k) + 1
	t.set(k, v)
	return v
}

// Put gives the key a value and returns the one it had, 0 if none.
func (t *Tally) Put(k Key, v uint32) (old uint32) {
	old = t.known(k)
	t.set(k, v)
	return old
}

func (t *Tally) set(k Key, v uint32) {
	t.recent[k] = v
	if len(t.recent) >= t.limit && t.err == nil {
		t.fail(t.spill())
	}
}

// spill moves the map to a file. The map is cleared only after the file is
// whole.
func (t *Tally) spill() error {
	all := make([]entry, 0, len(t.recent))
	for k, v := range t.recent {
		all = append(all, entry{k, v})
	}
	slices.SortFunc(all, func(a, b entry) int { return a.key.compare(b.key) })
	w, err := newWriter(len(all))
	if err != nil {
		return err
	}
	for _, e := range all {
		w.put(e)
	}
	r, err := w.close()
	if err != nil {
		return err
	}
	t.runs = append(t.runs, r)
	clear(t.recent)
	return t.merge()
}

// Files that are merged at once: of more, each lookup asks more filters; of
// fewer, each entry is copied more often. mergeLevels bounds how long a merge
// holds the owner up: the largest file has DefaultRecent * 4² entries, 10 MB;
// a lookup asks one filter more for each half a million keys.
const (
	mergeFiles  = 4
	mergeLevels = 2
)

// merge joins the last files once there are enough of the same level.
func (t *Tally) merge() error {
	for len(t.runs) >= mergeFiles {
		last := t.runs[len(t.runs)-mergeFiles:]
		level := last[mergeFiles-1].level
		if last[0].level != level || level >= mergeLevels {
			return nil
		}
		all, err := join(last)
		if err != nil {
			return err
		}
		var errs []error
		for _, r := range last {
			errs = append(errs, r.close())
		}
		t.runs = append(t.runs[:len(t.runs)-mergeFiles], all)
		if err := errors.Join(errs...); err != nil {
			return err
		}
	}
	return nil
}

// Reset forgets all keys.
func (t *Tally) Reset() {
	clear(t.recent)
	t.fail(t.Close())
	t.runs = nil
}

// Close gives the files back. Keys that stand in memory stay readable; to ask
// for another one is an error from then on.
func (t *Tally) Close() error {
	var errs []error
	for _, r := range t.runs {
		errs = append(errs, r.close())
	}
	return errors.Join(errs...)
}

// Err is the first failure of a file, or nil. From then on all new keys stand
// in memory.
func (t *Tally) Err() error { return t.err }

func (t *Tally) fail(err error) {
	if t.err == nil {
		t.err = err
	}
}
