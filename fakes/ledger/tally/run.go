package tally

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"os"
	"sort"

	"mailproof/fakes/ledger/spill"
)

type entry struct {
	key   Key
	value uint32
}

func (e entry) encode(b []byte) {
	binary.BigEndian.PutUint64(b, e.key.hi)
	binary.BigEndian.PutUint64(b[8:], e.key.lo)
	binary.BigEndian.PutUint32(b[16:], e.value)
}

func decode(b []byte) entry {
	return entry{Key{binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:])}, binary.BigEndian.Uint32(b[16:])}
}

const (
	entryBytes = 20 // the key's halves, big-endian, and the value
	// blockEntries are read at once to find one: 2,560 bytes, below a page.
	blockEntries = 128
)

// run is a file of entries sorted by key. It never changes.
type run struct {
	file   *os.File
	n      int
	level  int // how many merges its entries went through
	filter filter
	firsts []Key // of each block
}

// find looks a key up: most keys that are not there cost no read.
func (r *run) find(k Key) (uint32, bool, error) {
	if !r.filter.has(k) {
		return 0, false, nil
	}
	b := sort.Search(len(r.firsts), func(i int) bool { return r.firsts[i].compare(k) > 0 }) - 1
	if b < 0 {
		return 0, false, nil
	}
	n := min(blockEntries, r.n-b*blockEntries)
	var room [blockEntries * entryBytes]byte
	block := room[:n*entryBytes]
	if _, err := r.file.ReadAt(block, int64(b*blockEntries*entryBytes)); err != nil {
		return 0, false, fmt.Errorf("reading the counts' file: %w", err)
	}
	at := func(i int) entry { return decode(block[i*entryBytes:]) }
	i := sort.Search(n, func(i int) bool { return at(i).key.compare(k) >= 0 })
	if i == n || at(i).key != k {
		return 0, false, nil
	}
	return at(i).value, true, nil
}

func (r *run) close() error { return spill.Close(r.file) }

// writer makes a run of at most n entries, which come in order.
type writer struct {
	r   *run
	buf *bufio.Writer
	// room is put's, here so that it is not allocated for each entry.
	room [entryBytes]byte
}

func newWriter(n int) (*writer, error) {
	f, err := spill.Create("fake-tally-*")
	if err != nil {
		return nil, fmt.Errorf("making the counts' file: %w", err)
	}
	r := &run{file: f, filter: newFilter(n), firsts: make([]Key, 0, n/blockEntries+1)}
	return &writer{r: r, buf: bufio.NewWriterSize(f, 64<<10)}, nil
}

func (w *writer) put(e entry) {
	if w.r.n%blockEntries == 0 {
		w.r.firsts = append(w.r.firsts, e.key)
	}
	w.r.n++
	w.r.filter.add(e.key)
	e.encode(w.room[:])
	_, _ = w.buf.Write(w.room[:]) // close reports the first failure
}

func (w *writer) close() (*run, error) {
	if err := w.buf.Flush(); err != nil {
		return nil, errors.Join(fmt.Errorf("writing the counts' file: %w", err), w.r.close())
	}
	return w.r, nil
}

// reader yields a run's entries in order.
type reader struct {
	buf  *bufio.Reader
	now  entry
	more bool
	err  error
}

func (r *run) reader() *reader {
	rd := &reader{buf: bufio.NewReaderSize(io.NewSectionReader(r.file, 0, int64(r.n*entryBytes)), 64<<10), more: true}
	rd.next()
	return rd
}

func (r *reader) next() {
	b, err := r.buf.Peek(entryBytes)
	if err == nil {
		r.now = decode(b)
		_, err = r.buf.Discard(entryBytes)
	}
	if err == nil {
		return
	}
	r.more = false
	if len(b) > 0 || !errors.Is(err, io.EOF) {
		r.err = fmt.Errorf("reading the counts' file: %w", err)
	}
}

// join makes one run of several, the oldest first; where more than one has a
// key the newest counts. They stay as they are.
func join(runs []*run) (*run, error) {
	n := 0
	readers := make([]*reader, 0, len(runs))
	for _, r := range runs {
		n += r.n
		readers = append(readers, r.reader())
	}
	w, err := newWriter(n)
	if err != nil {
		return nil, err
	}
	w.r.level = runs[0].level + 1
	for e, ok := least(readers); ok; e, ok = least(readers) {
		w.put(e)
		for _, r := range readers {
			if r.more && r.now.key == e.key {
				r.next()
			}
		}
	}
	for _, r := range readers {
		if r.err != nil {
			return nil, errors.Join(r.err, w.r.close())
		}
	}
	return w.close()
}

// least returns the entry of the least key, as the newest of the readers that
// stand at it has it; false at the end of all.
func least(readers []*reader) (e entry, ok bool) {
	for _, r := range readers {
		if r.more && (!ok || r.now.key.compare(e.key) <= 0) {
			e, ok = r.now, true
		}
	}
	return e, ok
}

// filter is a Bloom filter in blocks of a cache line: "no" is certain, "yes"
// is wrong in about 1 of 150 cases.
type filter []filterBlock

type filterBlock [8]uint64

const (
	filterBits   = 12 // for each key
	filterProbes = 6
)

func newFilter(n int) filter { return make(filter, n*filterBits/512+1) }

// block is the key's. The key is a hash already: its upper half chooses the
// block, 9 bits of the lower one each bit.
func (f filter) block(k Key) *filterBlock {
	i, _ := bits.Mul64(k.hi, uint64(len(f)))
	return &f[i]
}

func (f filter) add(k Key) {
	b, h := f.block(k), k.lo
	for range filterProbes {
		b[h>>6&7] |= 1 << (h & 63)
		h >>= 9
	}
}

func (f filter) has(k Key) bool {
	b, h := f.block(k), k.lo
	for range filterProbes {
		if b[h>>6&7]&(1<<(h&63)) == 0 {
			return false
		}
		h >>= 9
	}
	return true
}
