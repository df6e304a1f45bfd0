// Package ledger is what a fake server really did: one row per try to hand
// over one mail to one recipient. It is the ground truth that a client cannot
// have: after a lost answer only the server knows.
//
// Guarantees:
//
//   - A row appears when the try begins, is changed while it runs, and never
//     changes after it is finished.
//   - Finished rows are numbered without gaps in the order in which they
//     finished (Seq); readers follow that number and miss nothing.
//   - Copies are counted per key and recipient, under one lock with the
//     decision to store, so that two tries at once cannot both be the first.
//
// It imports nothing of this module.
package ledger

import (
	"context"
	"crypto/sha256"
	"sort"
	"strconv"
	"sync"
)

// Attempt is one row.
type Attempt struct {
	// ID counts tries in the order in which they began, Seq in the order in
	// which they ended; Seq is 0 while the try runs.
	ID        int64  `json:"id"`
	Seq       int64  `json:"seq"`
	Transport string `json:"transport"` // smtp, resend
	Session   int64  `json:"session"`
	Client    string `json:"client"` // EHLO name or User-Agent
	Key       string `json:"key"`    // dedupe key as the server read it
	MessageID string `json:"message_id"`
	Sender    string `json:"sender"`
	Recipient string `json:"recipient"` // "" when the try ended before one was named
	From      int64  `json:"from"`      // monotonic ns: the try began
	To        int64  `json:"to"`        // monotonic ns: it ended; 0 while it runs
	// Stage is the last stage reached: mail, rcpt, data, body, dot, stored,
	// replied.
	Stage string `json:"stage"`
	// DotAt is when the final dot (the whole request body) had been read; 0 if
	// it never was. StoredAt is when the copy was kept.
	DotAt    int64 `json:"dot_at"`
	StoredAt int64 `json:"stored_at"`
	// Stored: a copy was kept; the recipient has it. Copy says the how-manieth
	// of its key for its recipient it is.
	Stored bool `json:"stored"`
	Copy   int  `json:"copy,omitempty"`
	// Deduplicated: the key was known and no further copy was kept.
	Deduplicated bool `json:"deduplicated"`
	// Reply is the first line of the final answer that was decided on; Code
	// its number.
	Reply string `json:"reply,omitempty"`
	Code  int    `json:"code,omitempty"`
	// ReplyWritten: the whole final answer was handed to the socket and the
	// kernel took it. That is all a server can know: the client may have died
	// before it read it. PeerGone is set when the client's end was already
	// seen closed before the answer was written (or the try ended).
	ReplyWritten bool `json:"reply_written"`
	PeerGone     bool `json:"peer_gone,omitempty"`
	// ClosedWithoutStoring: the try is over and nothing was kept, by this try
	// or by an earlier one of the same key that it was recognised as. It is
	// proof of absence.
	ClosedWithoutStoring bool `json:"closed_without_storing"`
	// Fault names the actions that struck ("stored:drop", several joined by
	// commas), Rules their rules.
	Fault string   `json:"fault,omitempty"`
	Rules []string `json:"rules,omitempty"`
	// Breach: the script made the server break the protocol: it promised and
	// discarded, or refused and kept.
	Breach   bool   `json:"breach,omitempty"`
	BodyHash string `json:"body_hash,omitempty"` // sha256 of the mail as read, hex
	Size     int64  `json:"size,omitempty"`      // bytes of it
	Subject  string `json:"subject,omitempty"`
}

// Open reports whether the try still runs.
func (a Attempt) Open() bool { return a.Seq == 0 }

// Ledger is safe for concurrent use.
type Ledger struct {
	mu      sync.Mutex
	nextID  int64
	open    map[int64]*Row
	rows    []Attempt // finished; rows[i].Seq == i+1
	copies  map[digest]int
	changed chan struct{}
}

type digest [16]byte

// New returns an empty ledger.
func New() *Ledger {
	return &Ledger{open: map[int64]*Row{}, copies: map[digest]int{}, changed: make(chan struct{})}
}

// Row is the handle of a running try.
type Row struct {
	l    *Ledger
	a    Attempt
	done bool
}

// Begin opens a row.
func (l *Ledger) Begin(a Attempt) *Row {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.nextID++
	a.ID, a.Seq = l.nextID, 0
	r := &Row{l: l, a: a}
	l.open[a.ID] = r
	return r
}

// ID is the row's number.
func (r *Row) ID() int64 { return r.a.ID } // never written after Begin

// Get returns the row as it stands.
func (r *Row) Get() Attempt {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	return r.a
}

// Update changes a running row; it does nothing to a finished one and returns
// false.
func (r *Row) Update(f func(*Attempt)) bool {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	if r.done {
		return false
	}
	f(&r.a)
	return true
}

// Store keeps a copy for the row, unless dedup names a key of which the
// recipient has one already. It does nothing to a finished row: a mail whose
// session was declared closed without storing stays that way.
func (r *Row) Store(dedup string, now int64) (stored, duplicate bool) {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	if r.done {
		return false, false
	}
	if dedup != "" {
		d := hash("dedup", dedup, r.a.Recipient)
		if r.l.copies[d] > 0 {
			r.a.Deduplicated = true
			return false, true
		}
		r.l.copies[d]++
	}
	r.a.Stored, r.a.StoredAt = true, now
	d := hash("copy", r.a.Identity(), r.a.Recipient)
	r.l.copies[d]++
	r.a.Copy = r.l.copies[d]
	return true, false
}

// Finish ends the try: f may change it one last time. A second call does
// nothing.
func (r *Row) Finish(now int64, f func(*Attempt)) {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	if r.done {
		return
	}
	if f != nil {
		f(&r.a)
	}
	r.done = true
	r.a.To = now
	r.a.ClosedWithoutStoring = !r.a.Stored && !r.a.Deduplicated
	r.l.append(r.a)
	delete(r.l.open, r.a.ID)
}

func (l *Ledger) append(a Attempt) {
	a.Seq = int64(len(l.rows)) + 1
	l.rows = append(l.rows, a)
	close(l.changed)
	l.changed = make(chan struct{})
}

// Identity is what copies are counted by: the dedupe key, else the Message-ID,
// else the row's own number, which makes it unlike any other.
func (a Attempt) Identity() string {
	switch {
	case a.Key != "":
		return a.Key
	case a.MessageID != "":
		return a.MessageID
	}
	return "#" + strconv.FormatInt(a.ID, 10)
}

// Snapshot returns all rows by ID, running ones included.
func (l *Ledger) Snapshot() []Attempt {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := append(make([]Attempt, 0, len(l.rows)+len(l.open)), l.rows...)
	for _, r := range l.open {
		out = append(out, r.a)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].ID < out[j].ID })
	return out
}

// Since returns the finished rows after the one numbered seq, and a channel
// that is closed once there are more.
func (l *Ledger) Since(seq int64) ([]Attempt, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	seq = max(0, min(seq, int64(len(l.rows))))
	return append([]Attempt(nil), l.rows[seq:]...), l.changed
}

// Subscribe sends each row as it finishes, from now on, until ctx ends; then
// the channel is closed. A slow reader slows nobody and misses nothing.
func (l *Ledger) Subscribe(ctx context.Context) <-chan Attempt {
	l.mu.Lock()
	seq := int64(len(l.rows))
	l.mu.Unlock()
	out := make(chan Attempt)
	go func() {
		defer close(out)
		for {
			rows, changed := l.Since(seq)
			for _, a := range rows {
				select {
				case out <- a:
					seq = a.Seq
				case <-ctx.Done():
					return
				}
			}
			if len(rows) > 0 {
				continue
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	}()
	return out
}

// Reset forgets all rows and copies. Tries that still run are forgotten too:
// they never show.
func (l *Ledger) Reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.open {
		r.done = true
	}
	clear(l.open)
	clear(l.copies)
	l.rows, l.nextID = nil, 0
}

// Verdict is what became of one key, over all its tries and recipients.
type Verdict struct {
	Key      string `json:"key"`
	Attempts int    `json:"attempts"`
	// Copies kept per recipient, and the largest of them.
	Recipients map[string]int `json:"recipients"`
	Copies     int            `json:"copies"`
	// Deduplicated tries; Accepted and Refused answers that were written whole
	// (2yz; 4yz and 5yz); Silent tries that ended without one.
	Deduplicated int `json:"deduplicated"`
	Accepted     int `json:"accepted"`
	Refused      int `json:"refused"`
	Silent       int `json:"silent"`
	Breaches     int `json:"breaches"`
	Running      int `json:"running"`
	// ProvenAbsent: all tries are over and nothing was kept.
	ProvenAbsent bool `json:"proven_absent"`
	// Verdict in a word: once, doubled, absent, unseen, running.
	Verdict string `json:"verdict"`
}

// Judge folds the rows of one key.
func Judge(key string, rows []Attempt) Verdict {
	v := Verdict{Key: key, Recipients: map[string]int{}}
	for _, a := range rows {
		v.add(a)
	}
	switch {
	case v.Copies > 1:
		v.Verdict = "doubled"
	case v.Copies == 1:
		v.Verdict = "once"
	case v.Running > 0:
		v.Verdict = "running"
	case v.Attempts == 0:
		v.Verdict = "unseen"
	default:
		v.Verdict, v.ProvenAbsent = "absent", true
	}
	return v
}

func (v *Verdict) add(a Attempt) {
	v.Attempts++
	if a.Open() {
		v.Running++
	}
	if a.Stored {
		v.Recipients[a.Recipient]++
		v.Copies = max(v.Copies, v.Recipients[a.Recipient])
	}
	if a.Deduplicated {
		v.Deduplicated++
	}
	if a.Breach {
		v.Breaches++
	}
	switch {
	case a.ReplyWritten && a.Code >= 200 && a.Code < 300:
		v.Accepted++
	case a.ReplyWritten:
		v.Refused++
	case !a.Open():
		v.Silent++
	}
}

// Verdict judges one key (or Message-ID, for mails without a key).
func (l *Ledger) Verdict(key string) Verdict {
	var rows []Attempt
	for _, a := range l.Snapshot() {
		if a.Key == key || (a.Key == "" && a.MessageID == key) {
			rows = append(rows, a)
		}
	}
	return Judge(key, rows)
}

func hash(parts ...string) digest {
	h := sha256.New()
	for _, p := range parts {
		h.Write([]byte(p))
		h.Write([]byte{0})
	}
	return digest(h.Sum(nil)[:16])
}
