package resendapi

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"sync"
	"time"

	"mailproof/fakes/ledger/spill"
	"mailproof/fakes/ledger/tally"
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

// digestOf's result is spread evenly, so it is a tally's key as it is.
func (d digest) key() tally.Key { return tally.KeyOfHash(d) }

// record is what is known of one idempotency key.
type record struct {
	payload digest        // as it is compared
	bytes   uint64        // beginning of the digest of the body as sent
	at      time.Duration // of its answer
	serial  int64         // the mail, for a plain send; -1 where the answer was kept
	answer  span          // the kept answer, else of no length
	status  uint16        // its status
	running bool
	expired bool // by script, before its time
	// kept is the kept answer, where begin says replayed and serial is -1.
	kept storedAnswer
}

// span is where something stands in a log.
type span struct {
	off  int64
	size uint32
}

// recordBytes is a settled record's size in its table.
const recordBytes = 56

func (r *record) encode(b *[recordBytes]byte) {
	copy(b[:16], r.payload[:])
	binary.LittleEndian.PutUint64(b[16:], r.bytes)
	binary.LittleEndian.PutUint64(b[24:], uint64(r.at))
	binary.LittleEndian.PutUint64(b[32:], uint64(r.serial))
	binary.LittleEndian.PutUint64(b[40:], uint64(r.answer.off))
	binary.LittleEndian.PutUint32(b[48:], r.answer.size)
	binary.LittleEndian.PutUint16(b[52:], r.status)
	b[54] = flag(r.expired)
}

func decodeRecord(b *[recordBytes]byte) record {
	return record{
		payload: digest(b[:16]),
		bytes:   binary.LittleEndian.Uint64(b[16:]),
		at:      time.Duration(binary.LittleEndian.Uint64(b[24:])),
		serial:  int64(binary.LittleEndian.Uint64(b[32:])),
		answer:  span{int64(binary.LittleEndian.Uint64(b[40:])), binary.LittleEndian.Uint32(b[48:])},
		status:  binary.LittleEndian.Uint16(b[52:]),
		expired: b[54] != 0,
	}
}

func flag(b bool) byte {
	if b {
		return 1
	}
	return 0
}

type storedAnswer struct {
	status int
	body   []byte
}

// keys holds idempotency keys for their lifetime, then for as long again to
// recognise a retry that comes too late. In memory stand those in flight; what
// was settled stands in files, found through a tally.
type keys struct {
	opt  Idempotency
	max  int64
	fail func(error)

	mu      sync.Mutex
	running map[digest]record
	settled *spill.Table // in the order of their answers
	number  *tally.Tally // of a key's record in settled, from 1; 0 for none
	answers spill.Log    // to batches and refusals
	oldest  int64        // records before this one are forgotten
	// oldestAt is the oldest one's time, read already for the record asked.
	oldestAt time.Duration
	asked    int64
}

// newKeys remembers at most limit settled keys. fail is told of each file that
// cannot be read or written.
func newKeys(opt Idempotency, limit int, fail func(error)) *keys {
	return &keys{
		opt: opt, max: int64(limit), fail: fail, running: map[digest]record{},
		settled: spill.NewTable(recordBytes), number: tally.New(0), asked: -1,
	}
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
	old, _, seen = k.find(key)
	switch same := old.payload == payload; {
	case !seen:
	case old.running && !(k.opt.CompareFirst && !same):
		return concurrent, old, seen
	case old.running:
		return conflicted, old, seen
	case k.over(old, now):
		k.number.Put(key.key(), 0)
	case !same:
		return conflicted, old, seen
	default:
		if old.serial < 0 {
			old.kept = k.answer(old)
		}
		return replayed, old, seen
	}
	k.running[key] = record{bytes: sent.start(), payload: payload, at: now, running: true}
	return claimed, old, seen
}

// find returns what is known of the key, and its number if it is settled.
func (k *keys) find(key digest) (r record, n int64, ok bool) {
	if r, ok = k.running[key]; ok {
		return r, 0, true
	}
	v, err := k.number.Get(key.key())
	k.failed(err)
	n = int64(v) - 1
	if n < k.oldest {
		return record{}, 0, false
	}
	r, err = k.read(n)
	k.failed(err)
	return r, n, err == nil
}

func (k *keys) read(n int64) (record, error) {
	var b [recordBytes]byte
	err := k.settled.Read(b[:], n)
	return decodeRecord(&b), err
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
	r, ok := k.running[key]
	if !ok {
		return // forgotten meanwhile
	}
	delete(k.running, key)
	r.at, r.serial = now, serial
	if answer != nil {
		off, err := k.answers.Append(answer.body)
		k.failed(err)
		r.answer, r.status = span{off, uint32(len(answer.body))}, uint16(answer.status)
	}
	var b [recordBytes]byte
	r.encode(&b)
	n, err := k.settled.Append(b[:])
	k.failed(err)
	k.number.Put(key.key(), uint32(n)+1)
}

// release gives the key back: nothing was done. What was known of it before
// (an expired record) is not needed any more.
func (k *keys) release(key digest) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.running, key)
}

// answer is what a settled key was answered with, unless it is a mail's id.
func (k *keys) answer(r record) storedAnswer {
	x := storedAnswer{int(r.status), make([]byte, r.answer.size)}
	k.failed(k.answers.Read(x.body, r.answer.off))
	return x
}

// expire ends the key's lifetime now; false when it was not alive.
func (k *keys) expire(key digest, now time.Duration) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	r, n, ok := k.find(key)
	if !ok || r.running || k.over(r, now) {
		return false
	}
	r.expired = true
	var b [recordBytes]byte
	r.encode(&b)
	err := k.settled.Write(b[:], n)
	k.failed(err)
	return err == nil
}

// sweep forgets the oldest records: those long over, and what exceeds the bound.
func (k *keys) sweep(now time.Duration) {
	k.oldest = max(k.oldest, k.settled.Len()-k.max)
	for ; k.oldest < k.settled.Len(); k.oldest++ {
		if k.asked != k.oldest {
			r, err := k.read(k.oldest)
			if k.failed(err); err != nil {
				continue
			}
			k.oldestAt, k.asked = r.at, k.oldest
		}
		if now-k.oldestAt < 2*k.opt.Lifetime {
			return
		}
	}
}

func (k *keys) failed(err error) {
	if err != nil {
		k.fail(err)
	}
}

func (k *keys) reset() {
	k.mu.Lock()
	defer k.mu.Unlock()
	clear(k.running)
	k.number.Reset()
	k.failed(errors.Join(k.settled.Reset(), k.answers.Reset()))
	k.oldest, k.asked = 0, -1
}

func (k *keys) close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return errors.Join(k.number.Err(), k.number.Close(), k.settled.Reset(), k.answers.Reset())
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
