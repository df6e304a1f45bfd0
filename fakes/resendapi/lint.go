package resendapi

import (
	"hash/maphash"
	"strings"
	"sync"
	"time"
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

// lintKept bounds the mails remembered, lintWindow how long they are.
const (
	lintKept   = 1 << 16
	lintWindow = 24 * time.Hour
)

// memory remembers under which key a mail's contents came last.
type memory struct {
	seed maphash.Seed

	mu    sync.Mutex
	seen  map[uint64]sighting
	order []uint64 // a ring once it is full
	next  int
}

type sighting struct {
	key digest
	any bool // with a key
	at  time.Duration
}

func newMemory() *memory { return &memory{seed: maphash.MakeSeed(), seen: map[uint64]sighting{}} }

// look says what is to be found about a mail and remembers it.
func (m *memory) look(x *mail, key string, keyed digest, now time.Duration) []string {
	var out []string
	for name := range x.Headers {
		switch strings.ToLower(name) {
		case "idempotency-key", "x-idempotency-key", "resend-idempotency-key":
			out = append(out, FindingKeyInMail)
		}
	}
	d := m.contents(x)
	m.mu.Lock()
	defer m.mu.Unlock()
	last, known := m.seen[d]
	switch recent := known && now-last.at < lintWindow; {
	case !recent:
	case key == "":
		out = append(out, FindingNoKey)
	case !last.any || last.key != keyed:
		out = append(out, FindingNewKey)
	}
	m.seen[d] = sighting{keyed, key != "", now}
	if !known {
		m.remember(d)
	}
	return out
}

func (m *memory) remember(d uint64) {
	if len(m.order) < lintKept {
		m.order = append(m.order, d)
		return
	}
	delete(m.seen, m.order[m.next])
	m.order[m.next] = d
	m.next = (m.next + 1) % lintKept
}

func (m *memory) contents(x *mail) uint64 {
	var h maphash.Hash
	h.SetSeed(m.seed)
	for _, list := range []addresses{x.To, x.Cc, x.Bcc} {
		for _, a := range list {
			_, _ = h.WriteString(a)
			_ = h.WriteByte(1)
		}
		_ = h.WriteByte(0)
	}
	for _, s := range []string{x.From, x.Subject, string(x.HTML), string(x.Text), string(x.Template)} {
		_, _ = h.WriteString(s)
		_ = h.WriteByte(0)
	}
	return h.Sum64()
}

func (m *memory) reset() {
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.seen)
	m.order, m.next = nil, 0
}
