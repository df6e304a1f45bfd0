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
// It imports nothing of this module but its own [tally].
package ledger

import (
	"context"
	"errors"
	"sort"
	"strconv"
	"sync"

	"mailproof/fakes/ledger/tally"
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
	// RetryAfter is how long the answer asked the client to stay away (HTTP
	// Retry-After), in nanoseconds; 0 where it named nothing.
	RetryAfter int64 `json:"retry_after,omitempty"`
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
	Breach bool `json:"breach,omitempty"`
	// Findings name what the client did that a careful one does not: a retry
	// with another key, a key where no server looks for it.
	Findings []string `json:"findings,omitempty"`
	BodyHash string   `json:"body_hash,omitempty"` // sha256 of the mail as read, hex
	Size     int64    `json:"size,omitempty"`      // bytes of it
	Subject  string   `json:"subject,omitempty"`
}

// Open reports whether the try still runs.
func (a Attempt) Open() bool { return a.Seq == 0 }

// Ledger is safe for concurrent use. Its memory is bounded: the latest finished
// rows and the latest keys are held, older ones stand in temporary files and
// are read back when asked for. What grows is under 2 bytes of index for each
// key, and as much for each key and recipient.
type Ledger struct {
	mu       sync.Mutex
	nextID   int64
	open     map[int64]*Row
	finished store
	// keys counts what is known of a key: its copies for a recipient, whether
	// it was stored under a dedupe key, and the number of its newest finished
	// row, from which the chain of the others starts (see chunk.before).
	keys     *tally.Tally
	changed  chan struct{}
	watched  bool // somebody took changed since it was made
	totals   Totals
	sessions sessions
}

// Totals count over the whole life of the ledger.
type Totals struct {
	Rows         int64 `json:"rows"` // finished
	Open         int64 `json:"open"`
	Stored       int64 `json:"stored"`
	Doubled      int64 `json:"doubled"` // copies beyond the first of their key and recipient
	Deduplicated int64 `json:"deduplicated"`
	Accepted     int64 `json:"accepted"` // final answers 2yz written whole
	Refused      int64 `json:"refused"`  // 4yz, 5yz
	Silent       int64 `json:"silent"`   // none
	Struck       int64 `json:"struck"`   // rows that a fault struck
	Breaches     int64 `json:"breaches"`
	Findings     int64 `json:"findings"` // rows with any
	Sessions     int64 `json:"sessions"`
}

// New returns an empty ledger that holds about keep finished rows in memory; 0
// means 16,384.
func New(keep int) *Ledger {
	if keep <= 0 {
		keep = 16_384
	}
	return &Ledger{
		open: map[int64]*Row{}, finished: store{keep: max(1, keep/chunkRows)},
		keys:    tally.New(0),
		changed: make(chan struct{}),
	}
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
		if r.l.keys.Put(tally.KeyOf("deduped", dedup, r.a.Recipient), 1) != 0 {
			r.a.Deduplicated = true
			r.l.totals.Deduplicated++
			return false, true
		}
	}
	r.a.Stored, r.a.StoredAt = true, now
	r.a.Copy = r.l.copy(r.a)
	r.l.totals.Stored++
	if r.a.Copy > 1 {
		r.l.totals.Doubled++
	}
	return true, false
}

// Duplicate says of a running row that its mail is known already and that no
// further copy is kept.
func (r *Row) Duplicate() {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	if r.done || r.a.Deduplicated {
		return
	}
	r.a.Deduplicated = true
	r.l.totals.Deduplicated++
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

// copy counts one more copy of the row's key for its recipient. A mail with
// neither key nor Message-ID is like no other.
func (l *Ledger) copy(a Attempt) int {
	if a.Key == "" && a.MessageID == "" {
		return 1
	}
	return int(l.keys.Add(tally.KeyOf("copies", a.Identity(), a.Recipient)))
}

func (l *Ledger) append(a Attempt) {
	a.Seq = l.finished.n + 1
	l.finished.append(a, l.keys.Put(newest(a.Identity()), uint32(a.Seq)))
	l.totals.count(a)
	l.signal()
}

// newest is where the number of a key's newest finished row is kept.
func newest(key string) tally.Key { return tally.KeyOf("newest", key) }

func (l *Ledger) signal() {
	if !l.watched {
		return
	}
	close(l.changed)
	l.changed, l.watched = make(chan struct{}), false
}

func (t *Totals) count(a Attempt) {
	t.Rows++
	switch {
	case a.ReplyWritten && a.Code >= 200 && a.Code < 300:
		t.Accepted++
	case a.ReplyWritten:
		t.Refused++
	default:
		t.Silent++
	}
	if a.Fault != "" {
		t.Struck++
	}
	if a.Breach {
		t.Breaches++
	}
	if len(a.Findings) > 0 {
		t.Findings++
	}
}

// Totals returns the counts so far.
func (l *Ledger) Totals() Totals {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.totals
	t.Open, t.Sessions = int64(len(l.open)), l.sessions.n
	return t
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

// Snapshot returns all rows by ID, running ones included. Long ledgers are
// better read with [Ledger.Each].
func (l *Ledger) Snapshot() ([]Attempt, error) {
	// Running rows are taken first: one that finishes meanwhile is then found
	// among the finished ones and replaces its older self.
	l.mu.Lock()
	running := make(map[int64]Attempt, len(l.open))
	for id, r := range l.open {
		running[id] = r.a
	}
	l.mu.Unlock()
	var out []Attempt
	err := l.Each(0, func(a Attempt) bool {
		delete(running, a.ID)
		out = append(out, a)
		return true
	})
	for _, a := range running {
		out = append(out, a)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].ID < out[j].ID })
	return out, err
}

// Running returns the rows of tries that still run, by ID.
func (l *Ledger) Running() []Attempt {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]Attempt, 0, len(l.open))
	for _, r := range l.open {
		out = append(out, r.a)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].ID < out[j].ID })
	return out
}

// Each calls f for the finished rows after the one numbered seq, in the order
// in which they finished, until f returns false. It holds no lock while f runs.
func (l *Ledger) Each(seq int64, f func(Attempt) bool) error {
	for {
		rows, err := l.batch(seq)
		if err != nil || len(rows) == 0 {
			return err
		}
		for _, a := range rows {
			if !f(a) {
				return nil
			}
			seq = a.Seq
		}
	}
}

// Since returns the finished rows after the one numbered seq.
func (l *Ledger) Since(seq int64) ([]Attempt, error) {
	var out []Attempt
	err := l.Each(seq, func(a Attempt) bool {
		out = append(out, a)
		return true
	})
	return out, err
}

// batch returns some of the rows after the one numbered seq; none when there
// are none.
func (l *Ledger) batch(seq int64) ([]Attempt, error) {
	l.mu.Lock()
	rows, read := l.finished.after(seq)
	l.mu.Unlock()
	if read == nil {
		return rows, nil
	}
	return read()
}

// Changed returns a channel that is closed when another row finishes, and the
// number of the last one that did.
func (l *Ledger) Changed() (<-chan struct{}, int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.watched = true
	return l.changed, l.finished.n
}

// Subscribe sends each row as it finishes, from now on, until ctx ends; then
// the channel is closed. A slow reader slows nobody and misses nothing.
func (l *Ledger) Subscribe(ctx context.Context) <-chan Attempt {
	_, seq := l.Changed()
	out := make(chan Attempt)
	go func() {
		defer close(out)
		l.follow(ctx, seq, out)
	}()
	return out
}

func (l *Ledger) follow(ctx context.Context, seq int64, out chan<- Attempt) {
	for {
		changed, last := l.Changed()
		if last < seq {
			seq = 0 // reset meanwhile
		}
		err := l.Each(seq, func(a Attempt) bool {
			select {
			case out <- a:
				seq = a.Seq
				return true
			case <-ctx.Done():
				return false
			}
		})
		if err != nil || ctx.Err() != nil {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
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
	l.keys.Reset()
	l.finished.reset()
	l.totals, l.sessions, l.nextID = Totals{}, sessions{}, 0
	l.signal()
}

// Close gives the temporary files back. The rows and keys in memory stay
// readable; to ask for others is an error from then on.
func (l *Ledger) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return errors.Join(l.finished.close(), l.keys.Close())
}

// Err is why older rows or keys could not be written to a temporary file, or
// nil: they are then kept in memory. A file that could not be read back is told
// here too: a key that it held may have been counted as a new one.
func (l *Ledger) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return errors.Join(l.finished.err, l.keys.Err())
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
	// Findings of all tries, each once.
	Findings []string `json:"findings,omitempty"`
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
	for _, f := range a.Findings {
		if !contains(v.Findings, f) {
			v.Findings = append(v.Findings, f)
		}
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
func (l *Ledger) Verdict(key string) (Verdict, error) {
	rows, err := l.Of(key)
	return Judge(key, rows), err
}

// Of returns all rows of one key (or Message-ID), by ID, running ones included.
// It does not read the rest of the ledger.
func (l *Ledger) Of(key string) ([]Attempt, error) {
	rows, seq, err := l.find(key)
	var c chunk
	for seq != 0 && err == nil {
		if c.rows == nil || seq < c.rows[0].Seq {
			if c, err = l.chunk(seq); err != nil || c.rows == nil {
				break
			}
		}
		i := seq - c.rows[0].Seq
		if c.rows[i].Identity() == key {
			rows = append(rows, c.rows[i])
		}
		seq = int64(c.before[i])
	}
	sort.Slice(rows, func(i, j int) bool { return rows[i].ID < rows[j].ID })
	return rows, err
}

// find returns the running rows of a key and the number of its newest finished
// one, 0 if there is none.
func (l *Ledger) find(key string) (running []Attempt, seq int64, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.open {
		if r.a.Identity() == key {
			running = append(running, r.a)
		}
	}
	last, err := l.keys.Get(newest(key))
	return running, int64(last), err
}

// chunk returns the rows around the one numbered seq; none when the ledger was
// reset meanwhile.
func (l *Ledger) chunk(seq int64) (chunk, error) {
	l.mu.Lock()
	if seq > l.finished.n {
		l.mu.Unlock()
		return chunk{}, nil
	}
	c, read := l.finished.chunk(seq)
	l.mu.Unlock()
	if read == nil {
		return c, nil
	}
	return read()
}

// Verdicts judges all keys, in the order in which they were first seen.
func (l *Ledger) Verdicts() ([]Verdict, error) {
	rows, err := l.Snapshot()
	return Fold(rows), err
}

// Fold judges all keys of the rows, in the order in which they first stand
// there. Tries that ended before the mail was read belong to no key; they are
// left out.
func Fold(rows []Attempt) []Verdict {
	var order []string
	by := map[string][]Attempt{}
	for _, a := range rows {
		if a.DotAt == 0 {
			continue
		}
		k := a.Identity()
		if by[k] == nil {
			order = append(order, k)
		}
		by[k] = append(by[k], a)
	}
	out := make([]Verdict, 0, len(order))
	for _, k := range order {
		out = append(out, Judge(k, by[k]))
	}
	return out
}
