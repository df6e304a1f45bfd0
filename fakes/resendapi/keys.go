package resendapi

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"sync"
	"time"
)

// digest is a truncated SHA-256.
type digest [16]byte

func digestOf(parts ...string) digest {
	h := sha256.New()
	for _, p := range parts {
		_, _ = h.Write([]byte(p))
		_, _ = h.Write([]byte{0})
	}
	return digest(h.Sum(nil)[:16])
}

// start is the digest's beginning, enough to see a change.
func (d digest) start() uint64 { return binary.BigEndian.Uint64(d[:]) }

// record is what is known of one idempotency key.
type record struct {
	payload digest        // as it is compared
	bytes   uint64        // beginning of the digest of the body as sent
	at      time.Duration // of its answer
	serial  int64         // the mail, for a plain send; -1 where answers has it
	running bool
	expired bool // by script, before its time
}

type storedAnswer struct {
	status int
	body   []byte
}

// keys holds idempotency keys for their lifetime, then for as long again to
// recognise a retry that comes too late.
type keys struct {
	opt Idempotency
	max int

	mu    sync.Mutex
	known map[digest]record
	// answers to batches and refusals, by key
	answers map[digest]storedAnswer
	queue   []queued // oldest first
}

type queued struct {
	key digest
	at  time.Duration
}

func newKeys(opt Idempotency, limit int) *keys {
	return &keys{opt: opt, max: limit, known: map[digest]record{}, answers: map[digest]storedAnswer{}}
}

// claim is the answer to a request's key.
type claim uint8

const (
	claimed    claim = iota // go on: the key is in flight now
	replayed                // answer as before
	conflicted              // another payload
	concurrent              // another request runs
)

// begin takes the key for a request, or says why not. old is what was known
// of it.
func (k *keys) begin(key, sent, payload digest, now time.Duration) (c claim, old record, seen bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.sweep(now)
	old, seen = k.known[key]
	switch same := old.payload == payload; {
	case !seen:
	case old.running && !(k.opt.CompareFirst && !same):
		return concurrent, old, seen
	case old.running:
		return conflicted, old, seen
	case k.over(old, now):
	case !same:
		return conflicted, old, seen
	default:
		return replayed, old, seen
	}
	k.known[key] = record{bytes: sent.start(), payload: payload, at: now, running: true}
	return claimed, old, seen
}

// over reports whether the record's lifetime is over: at exactly 24 hours it
// is.
func (k *keys) over(r record, now time.Duration) bool {
	return r.expired || now-r.at >= k.opt.Lifetime
}

// settle keeps what the request was answered with.
func (k *keys) settle(key digest, now time.Duration, serial int64, answer *storedAnswer) {
	k.mu.Lock()
	defer k.mu.Unlock()
	r, ok := k.known[key]
	if !ok {
		return // forgotten meanwhile
	}
	r.running, r.at, r.serial = false, now, serial
	if answer != nil {
		k.answers[key] = *answer
	}
	k.known[key] = r
	k.queue = append(k.queue, queued{key, now})
}

// release gives the key back: nothing was done. What was known of it before
// (an expired record) is not needed any more.
func (k *keys) release(key digest) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if r, ok := k.known[key]; ok && r.running {
		delete(k.known, key)
	}
}

// answer is what a settled key is answered with, unless it is a mail's id.
func (k *keys) answer(key digest) storedAnswer {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.answers[key]
}

// expire ends the key's lifetime now; false when it was not alive.
func (k *keys) expire(key digest, now time.Duration) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	r, ok := k.known[key]
	if !ok || r.running || k.over(r, now) {
		return false
	}
	r.expired = true
	k.known[key] = r
	return true
}

// sweep drops the oldest records: those long over, and what exceeds the bound.
func (k *keys) sweep(now time.Duration) {
	for len(k.queue) > 0 {
		first := k.queue[0]
		if now-first.at < 2*k.opt.Lifetime && len(k.queue) <= k.max {
			return
		}
		k.queue = k.queue[1:]
		if r, ok := k.known[first.key]; ok && !r.running && r.at == first.at {
			delete(k.known, first.key)
			delete(k.answers, first.key)
		}
	}
}

func (k *keys) reset() {
	k.mu.Lock()
	defer k.mu.Unlock()
	clear(k.known)
	clear(k.answers)
	k.queue = nil
}

// payload is the digest by which two requests of one key are compared.
func (k *keys) payload(body []byte, sent digest, batch bool) digest {
	if k.opt.Compare != CompareCanonical {
		return sent
	}
	var v any
	if err := json.Unmarshal(body, &v); err != nil {
		return sent
	}
	if list, ok := v.([]any); ok && batch {
		for i := range list {
			list[i] = canonical(list[i])
		}
	} else {
		v = canonical(v)
	}
	b, err := json.Marshal(v) // sorts the names
	if err != nil {
		return sent
	}
	return digestOf(string(b))
}

// canonical writes one address as a list of one and leaves out what says
// nothing.
func canonical(v any) any {
	m, ok := v.(map[string]any)
	if !ok {
		return v
	}
	for name, field := range m {
		if empty(field) {
			delete(m, name)
			continue
		}
		switch name {
		case "to", "cc", "bcc", "reply_to":
			if s, ok := field.(string); ok {
				m[name] = []any{s}
			}
		}
	}
	return m
}

func empty(v any) bool {
	switch v := v.(type) {
	case nil:
		return true
	case string:
		return v == ""
	case []any:
		return len(v) == 0
	case map[string]any:
		return len(v) == 0
	}
	return false
}
