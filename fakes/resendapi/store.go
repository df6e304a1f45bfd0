package resendapi

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"mailproof/fakes/script"
)

// fate is what becomes of a mail.
type fate uint8

const (
	fateDelivered fate = iota
	fateBounced
	fateComplained
	fateSuppressed
	fateFailed
	fateDeferred
)

// entry is what memory holds of one kept mail; its contents stand on disk.
type entry struct {
	off      int64
	size     int32
	segment  int32
	at       time.Duration // accepted, on the movable clock
	due      time.Duration // when it is sent; at, unless it was scheduled
	after    time.Duration // the fate comes so long after due
	fate     fate
	bounce   uint8 // index of its type in bounceKinds
	canceled bool
	plan     uint16 // rises with each change of due: events of older plans are void
}

// segmentSize is how much of the mails' contents is given back at once when
// the bound is reached.
const segmentSize = 32 << 20

// flushSize is how much is collected before it is written.
const flushSize = 64 << 10

// segment is a file of contents.
type segment struct {
	file    *os.File
	flushed int64
	buf     []byte
}

func (g *segment) size() int64 { return g.flushed + int64(len(g.buf)) }

const chunkEntries = 4096

// mailStore keeps mails: contents in temporary files within a bound of bytes,
// a small entry of each in memory. It never forgets that a mail exists.
type mailStore struct {
	limit int64

	mu       sync.Mutex
	chunks   [][]entry
	n        int64
	segments []*segment // nil where given back
	oldest   int        // first that is not nil
	total    int64
	rows     [1 << 14]rowMail // ledger rows of the latest mails, a ring by row
}

type rowMail struct{ row, serial int64 }

var errDropped = errors.New("the contents of this mail were dropped to stay within Options.KeepMails")

func newMailStore(limit int64) *mailStore { return &mailStore{limit: limit} }

// put keeps a mail and returns its serial number, from 0. The mail is kept
// even when its contents could not be written.
func (m *mailStore) put(contents []byte, e entry) (int64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.write(contents, &e)
	if err != nil {
		e.size = -1
	}
	if m.n%chunkEntries == 0 {
		m.chunks = append(m.chunks, make([]entry, 0, chunkEntries))
	}
	last := len(m.chunks) - 1
	m.chunks[last] = append(m.chunks[last], e)
	m.n++
	return m.n - 1, err
}

func (m *mailStore) write(b []byte, e *entry) error {
	if len(m.segments) == 0 || m.segments[len(m.segments)-1].size() >= segmentSize {
		if err := m.grow(); err != nil {
			return err
		}
	}
	i := len(m.segments) - 1
	g := m.segments[i]
	e.segment, e.off, e.size = int32(i), g.size(), int32(len(b))
	g.buf = append(g.buf, b...)
	m.total += int64(len(b))
	if len(g.buf) >= flushSize {
		return g.flush()
	}
	return nil
}

func (g *segment) flush() error {
	n, err := g.file.WriteAt(g.buf, g.flushed)
	g.flushed += int64(n)
	g.buf = g.buf[:copy(g.buf, g.buf[n:])]
	if cap(g.buf) > 4*flushSize {
		g.buf = append([]byte(nil), g.buf...)
	}
	if err != nil {
		return fmt.Errorf("writing the mails' file: %w", err)
	}
	return nil
}

// grow begins a segment and gives the oldest back while there is too much.
func (m *mailStore) grow() error {
	if len(m.segments) > 0 {
		if err := m.segments[len(m.segments)-1].flush(); err != nil {
			return err
		}
	}
	f, err := os.CreateTemp("", "fake-mails-*.json")
	if err != nil {
		return fmt.Errorf("making the mails' file: %w", err)
	}
	// Unlinked at once where the system allows it, so that nothing is left
	// after a crash; elsewhere drop removes it.
	_ = os.Remove(f.Name())
	m.segments = append(m.segments, &segment{file: f})
	for m.total > m.limit && m.oldest < len(m.segments)-1 {
		m.total -= m.segments[m.oldest].size()
		_ = m.segments[m.oldest].drop()
		m.segments[m.oldest] = nil
		m.oldest++
	}
	return nil
}

func (g *segment) drop() error {
	err := g.file.Close()
	_ = os.Remove(g.file.Name())
	return err
}

// get returns a mail's entry; ok is false when there is no such mail.
func (m *mailStore) get(serial int64) (e entry, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.at(serial)
	if p == nil {
		return e, false
	}
	return *p, true
}

func (m *mailStore) at(serial int64) *entry {
	if serial < 0 || serial >= m.n {
		return nil
	}
	return &m.chunks[serial/chunkEntries][serial%chunkEntries]
}

// change runs f on a mail's entry under the lock.
func (m *mailStore) change(serial int64, f func(*entry)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p := m.at(serial); p != nil {
		f(p)
	}
}

// contents reads what was kept of a mail.
func (m *mailStore) contents(serial int64) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.at(serial)
	if p == nil || p.size < 0 || m.segments[p.segment] == nil {
		return nil, errDropped
	}
	g, b := m.segments[p.segment], make([]byte, p.size)
	done := 0
	if p.off < g.flushed {
		n, err := g.file.ReadAt(b[:min(int64(len(b)), g.flushed-p.off)], p.off)
		if err != nil {
			return nil, fmt.Errorf("reading the mails' file: %w", err)
		}
		done = n
	}
	copy(b[done:], g.buf[max(0, p.off-g.flushed):])
	return b, nil
}

func (m *mailStore) count() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.n
}

// name remembers which mail a ledger row kept.
func (m *mailStore) name(row, serial int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.rows[row%int64(len(m.rows))] = rowMail{row, serial}
}

// of returns the mail that a ledger row kept, if it is one of the latest.
func (m *mailStore) of(row int64) (serial int64, ok bool) {
	if row <= 0 {
		return 0, false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.rows[row%int64(len(m.rows))]
	return r.serial, r.row == row
}

func (m *mailStore) reset() {
	_ = m.close()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.chunks, m.n, m.segments, m.oldest, m.total = nil, 0, nil, 0, 0
	clear(m.rows[:])
}

func (m *mailStore) close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var errs []error
	for i, g := range m.segments {
		if g != nil {
			errs = append(errs, g.drop())
			m.segments[i] = nil
		}
	}
	m.segments = nil
	return errors.Join(errs...)
}

// fateOf names the fates in rules.
var fateOf = map[script.Kind]fate{
	Deliver: fateDelivered, Bounce: fateBounced, Complain: fateComplained,
	Suppress: fateSuppressed, Fail: fateFailed, Defer: fateDeferred,
}
