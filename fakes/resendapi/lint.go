package resendapi

import (
	"encoding/binary"
	"errors"
	"hash/maphash"
	"strings"
	"sync"
	"time"

	"mailproof/fakes/ledger/spill"
	"mailproof/fakes/ledger/tally"
)

// The findings: what a client does that a careful one does not.
const (
	// FindingKeyInMail: the key stands among the mail's own headers, where the
	// API does not look for it. Nothing is deduplicated.
	FindingKeyInMail = "key-in-mail-headers"
	// FindingNewKey: the same mail to the same people came before, under
	// another key.
	FindingNewKey = "new-key"
	// FindingNoKey: the same mail to the same people came before, and this try
	// has no key.
	FindingNoKey = "repeat-without-key"
	// FindingChangedPayload: the key was used for another payload (409).
	FindingChangedPayload = "changed-payload"
	// FindingChangedBytes: the payload means the same and its bytes differ. A
	// server that compares bytes would answer 409.
	FindingChangedBytes = "changed-bytes"
	// FindingLate: the key came again after its lifetime; the mail was sent
	// again.
	FindingLate = "key-expired"
)

// lintWindow is how long a mail's contents are remembered.
const lintWindow = 24 * time.Hour

// memory remembers under which key a mail's contents came last. The sightings
// stand in a file, found through a tally.
type memory struct {
	seeds [2]maphash.Seed
	fail  func(error)

	mu        sync.Mutex
	sightings *spill.Table
	number    *tally.Tally // of the contents' latest sighting, from 1
}

// sighting is one mail that came.
type sighting struct {
	key digest
	any bool // with a key
	at  time.Duration
}

const sightingBytes = 25

func (s sighting) encode(b *[sightingBytes]byte) {
	copy(b[:16], s.key[:])
	binary.LittleEndian.PutUint64(b[16:], uint64(s.at))
	b[24] = flag(s.any)
}

func decodeSighting(b *[sightingBytes]byte) sighting {
	return sighting{digest(b[:16]), b[24] != 0, time.Duration(binary.LittleEndian.Uint64(b[16:]))}
}

// newMemory remembers nothing yet. fail is told of each file that cannot be
// read or written.
func newMemory(fail func(error)) *memory {
	return &memory{
		seeds: [2]maphash.Seed{maphash.MakeSeed(), maphash.MakeSeed()}, fail: fail,
		sightings: spill.NewTable(sightingBytes), number: tally.New(0),
	}
}

// look says what is to be found about a mail and remembers it.
func (m *memory) look(x *mail, key string, keyed digest, now time.Duration) []string {
	var out []string
	for name := range x.Headers {
		switch strings.ToLower(name) {
		case "idempotency-key", "x-idempotency-key", "resend-idempotency-key":
			out = append(out, FindingKeyInMail)
		}
	}
	last, known := m.swap(m.contents(x), sighting{keyed, key != "", now})
	switch recent := known && now-last.at < lintWindow; {
	case !recent:
	case key == "":
		out = append(out, FindingNoKey)
	case !last.any || last.key != keyed:
		out = append(out, FindingNewKey)
	}
	return out
}

// swap remembers a sighting and returns the one before it of the same contents.
func (m *memory) swap(contents tally.Key, s sighting) (last sighting, known bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var b [sightingBytes]byte
	s.encode(&b)
	n, err := m.sightings.Append(b[:])
	m.failed(err)
	before := m.number.Put(contents, uint32(n)+1)
	if before == 0 {
		return sighting{}, false
	}
	err = m.sightings.Read(b[:], int64(before)-1)
	m.failed(err)
	return decodeSighting(&b), err == nil
}

func (m *memory) failed(err error) {
	if err != nil {
		m.fail(err)
	}
}

func (m *memory) contents(x *mail) tally.Key {
	var sum [16]byte
	for i, seed := range m.seeds {
		binary.LittleEndian.PutUint64(sum[8*i:], contents(seed, x))
	}
	return tally.KeyOfHash(sum)
}

// contents hashes each field by itself, which is faster than one after another
// into one hash, then the hashes.
func contents(seed maphash.Seed, x *mail) uint64 {
	var room [256]byte
	b := room[:0]
	add := func(s string) { b = binary.LittleEndian.AppendUint64(b, maphash.String(seed, s)) }
	for _, list := range []addresses{x.To, x.Cc, x.Bcc} {
		b = binary.LittleEndian.AppendUint64(b, uint64(len(list)))
		for _, a := range list {
			add(a)
		}
	}
	add(x.From)
	add(x.Subject)
	for _, f := range [][]byte{x.HTML, x.Text, x.Template} {
		b = binary.LittleEndian.AppendUint64(b, maphash.Bytes(seed, f))
	}
	return maphash.Bytes(seed, b)
}

func (m *memory) reset() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.number.Reset()
	m.failed(m.sightings.Reset())
}

func (m *memory) close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return errors.Join(m.number.Err(), m.number.Close(), m.sightings.Reset())
}
