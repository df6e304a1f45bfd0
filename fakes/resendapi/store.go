package resendapi

import (
	"encoding/binary"
	"errors"
	"sync"
	"time"

	"mailproof/fakes/ledger/spill"
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

// entry is what is known of one kept mail beside its contents.
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

// entryBytes is an entry's size in its table.
const entryBytes = 48

func (e *entry) encode(b *[entryBytes]byte) {
	binary.LittleEndian.PutUint64(b[:], uint64(e.off))
	binary.LittleEndian.PutUint32(b[8:], uint32(e.size))
	binary.LittleEndian.PutUint32(b[12:], uint32(e.segment))
	binary.LittleEndian.PutUint64(b[16:], uint64(e.at))
	binary.LittleEndian.PutUint64(b[24:], uint64(e.due))
	binary.LittleEndian.PutUint64(b[32:], uint64(e.after))
	b[40], b[41], b[42] = byte(e.fate), e.bounce, flag(e.canceled)
	binary.LittleEndian.PutUint16(b[44:], e.plan)
}

func decodeEntry(b *[entryBytes]byte) entry {
	return entry{
		off:      int64(binary.LittleEndian.Uint64(b[:])),
		size:     int32(binary.LittleEndian.Uint32(b[8:])),
		segment:  int32(binary.LittleEndian.Uint32(b[12:])),
		at:       time.Duration(binary.LittleEndian.Uint64(b[16:])),
		due:      time.Duration(binary.LittleEndian.Uint64(b[24:])),
		after:    time.Duration(binary.LittleEndian.Uint64(b[32:])),
		fate:     fate(b[40]),
		bounce:   b[41],
		canceled: b[42] != 0,
		plan:     binary.LittleEndian.Uint16(b[44:]),
	}
}

// mailStore keeps mails in temporary files: contents within a bound of bytes,
// the entry of each for good. It never forgets that a mail exists.
type mailStore struct {
	limit int64
	fail  func(error)

	mu       sync.Mutex
	entries  *spill.Table
	segments []*spill.Log // of contents; nil where given back
	oldest   int          // first that is not nil
	total    int64
	rows     [1 << 14]rowMail // ledger rows of the latest mails, a ring by row
}

type rowMail struct{ row, serial int64 }

var errDropped = errors.New("the contents of this mail were dropped to stay within Options.KeepMails")

// newMailStore keeps at most about limit bytes of contents. fail is told of
// each file that cannot be read or written.
func newMailStore(limit int64, fail func(error)) *mailStore {
	return &mailStore{limit: limit, fail: fail, entries: spill.NewTable(entryBytes)}
}

// put keeps a mail and returns its serial number, from 0.
func (m *mailStore) put(contents []byte, e entry) int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.segments) == 0 || m.segments[len(m.segments)-1].Len() >= segmentSize {
		m.grow()
	}
	i := len(m.segments) - 1
	off, err := m.segments[i].Append(contents)
	m.failed(err)
	e.segment, e.off, e.size = int32(i), off, int32(len(contents))
	m.total += int64(len(contents))
	var b [entryBytes]byte
	e.encode(&b)
	serial, err := m.entries.Append(b[:])
	m.failed(err)
	return serial
}

// grow begins a segment and gives the oldest back while there is too much.
func (m *mailStore) grow() {
	if len(m.segments) > 0 {
		m.failed(m.segments[len(m.segments)-1].Seal())
	}
	m.segments = append(m.segments, &spill.Log{})
	for m.total > m.limit && m.oldest < len(m.segments)-1 {
		m.total -= m.segments[m.oldest].Len()
		m.failed(m.segments[m.oldest].Reset())
		m.segments[m.oldest] = nil
		m.oldest++
	}
}

func (m *mailStore) failed(err error) {
	if err != nil {
		m.fail(err)
	}
}

// get returns a mail's entry; ok is false when there is no such mail.
func (m *mailStore) get(serial int64) (e entry, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.at(serial)
}

func (m *mailStore) at(serial int64) (e entry, ok bool) {
	if serial < 0 || serial >= m.entries.Len() {
		return entry{}, false
	}
	var b [entryBytes]byte
	err := m.entries.Read(b[:], serial)
	m.failed(err)
	return decodeEntry(&b), err == nil
}

// change runs f on a mail's entry under the lock.
func (m *mailStore) change(serial int64, f func(*entry)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, ok := m.at(serial)
	if !ok {
		return
	}
	f(&e)
	var b [entryBytes]byte
	e.encode(&b)
	m.failed(m.entries.Write(b[:], serial))
}

// contents reads what was kept of a mail.
func (m *mailStore) contents(serial int64) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, ok := m.at(serial)
	if !ok || m.segments[e.segment] == nil {
		return nil, errDropped
	}
	b := make([]byte, e.size)
	return b, m.segments[e.segment].Read(b, e.off)
}

func (m *mailStore) count() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.entries.Len()
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
	m.failed(m.close())
	m.mu.Lock()
	defer m.mu.Unlock()
	m.oldest, m.total = 0, 0
	clear(m.rows[:])
}

func (m *mailStore) close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	errs := []error{m.entries.Reset()}
	for _, g := range m.segments {
		if g != nil {
			errs = append(errs, g.Reset())
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
