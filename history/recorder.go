package history

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// FileName is the history's file in the folder of a scenario.
const FileName = "history.jsonl"

// flushAfter bounds what a killed harness loses of its evidence.
const flushAfter = time.Second

// ErrClosed is returned by a recorder that was closed.
var ErrClosed = errors.New("the history is closed")

// Recorder appends records to one file. It is safe for concurrent use.
//
// A malformed record is refused: the call returns [ErrMalformed], a record of
// kind "refused" takes its place, and [Recorder.Close] returns the first such
// error, so that it cannot be overlooked. Rules that need more than one record
// are kept here too: the first record is the meta, there is one meta and one
// final, and a client has one operation open at a time.
type Recorder struct {
	// Clock is the time base of the records, set before the first one; nil means
	// [Now].
	Clock func() int64

	mu      sync.Mutex
	file    *os.File
	buf     *bufio.Writer
	enc     *json.Encoder
	flushed time.Time
	closed  bool
	bad     error // the first refusal or write error

	hasMeta  bool
	hasFinal bool
	returned map[string]int64 // client → return of its latest operation
}

// Create makes the file and its folder. An existing file is an error: evidence
// is never overwritten.
func Create(path string) (*Recorder, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("history folder: %w", err)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("create history: %w", err)
	}
	buf := bufio.NewWriterSize(f, 1<<20)
	enc := json.NewEncoder(buf)
	enc.SetEscapeHTML(false)
	return &Recorder{file: f, buf: buf, enc: enc, flushed: time.Now(), returned: map[string]int64{}}, nil
}

// Meta records what the run is judged by. It must be the first record. A zero
// Wall is filled in.
func (r *Recorder) Meta(m Meta) error {
	return r.Record(Record{T: Now(), Kind: KindMeta, Meta: &m})
}

// Phase records that a phase starts now.
func (r *Recorder) Phase(name string) error {
	return r.Record(Record{T: Now(), Kind: KindPhase, Phase: &Phase{Name: name}})
}

// Op records an operation that has returned.
func (r *Recorder) Op(o Op) error { return r.Record(Record{T: o.Return, Kind: KindOp, Op: &o}) }

// Fault records a fault that has been healed, or skipped.
func (r *Recorder) Fault(f Fault) error {
	t := f.End
	if t == 0 {
		t = Now()
	}
	return r.Record(Record{T: t, Kind: KindFault, Fault: &f})
}

// Process records an event in the life of a process, as of now.
func (r *Recorder) Process(p Process) error {
	return r.Record(Record{T: Now(), Kind: KindProcess, Process: &p})
}

// Attempt records one row of the far side's ledger.
func (r *Recorder) Attempt(a Attempt) error {
	return r.Record(Record{T: a.To, Kind: KindAttempt, Attempt: &a})
}

// Change records one committed change of a row.
func (r *Recorder) Change(c Change) error {
	return r.Record(Record{T: Now(), Kind: KindChange, Change: &c})
}

// Final records what was left.
func (r *Recorder) Final(f Final) error {
	return r.Record(Record{T: Now(), Kind: KindFinal, Final: &f})
}

// Note records a line for people.
func (r *Recorder) Note(format string, args ...any) error {
	return r.Record(Record{T: Now(), Kind: KindNote, Note: &Note{Text: fmt.Sprintf(format, args...)}})
}

// Record appends any record.
func (r *Recorder) Record(rec Record) error {
	r.stampWall(&rec)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return ErrClosed
	}
	if err := r.check(rec); err != nil {
		r.remember(err)
		return errors.Join(err, r.write(refusal(rec, err)))
	}
	return r.write(rec)
}

// stampWall pairs the record's time with the wall clock, where a record has
// room for it and the caller left it empty: the pairs place what other clocks
// stamped, a commit for one, on the run's time base.
func (r *Recorder) stampWall(rec *Record) {
	clock := r.Clock
	if clock == nil {
		clock = Now
	}
	wall := func() time.Time { return time.Now().Add(time.Duration(rec.T - clock())) }
	switch {
	case rec.Meta != nil && rec.Meta.Wall.IsZero():
		m := *rec.Meta
		m.Wall = wall()
		rec.Meta = &m
	case rec.Phase != nil && rec.Phase.Wall.IsZero():
		p := *rec.Phase
		p.Wall = wall()
		rec.Phase = &p
	case rec.Process != nil && rec.Process.Wall.IsZero():
		p := *rec.Process
		p.Wall = wall()
		rec.Process = &p
	case rec.Final != nil && rec.Final.Wall.IsZero():
		f := *rec.Final
		f.Wall = wall()
		rec.Final = &f
	}
}

func refusal(rec Record, cause error) Record {
	offered, err := json.Marshal(rec)
	if err != nil {
		offered = []byte(err.Error())
	}
	const keep = 2000 // a final state can be tens of megabytes
	if len(offered) > keep {
		offered = offered[:keep]
	}
	return Record{T: Now(), Kind: KindRefused, Refused: &Refused{Kind: rec.Kind, Reason: cause.Error(), Record: string(offered)}}
}

func (r *Recorder) check(rec Record) error {
	if err := Validate(rec); err != nil {
		return err
	}
	switch {
	case !r.hasMeta && rec.Kind != KindMeta:
		return malformed("the first record must be the meta, not %q", rec.Kind)
	case r.hasMeta && rec.Kind == KindMeta:
		return malformed("a second meta")
	case r.hasFinal && rec.Kind == KindFinal:
		return malformed("a second final")
	case rec.Kind == KindMeta:
		r.hasMeta = true
	case rec.Kind == KindFinal:
		r.hasFinal = true
	case rec.Kind == KindOp && rec.Op.Client != "":
		if last := r.returned[rec.Op.Client]; rec.Op.Call < last {
			return malformed("client %s called %s %s while an operation was open", rec.Op.Client, rec.Op.Name, rec.Op.Key)
		}
		r.returned[rec.Op.Client] = rec.Op.Return
	}
	return nil
}

func (r *Recorder) write(rec Record) error {
	if err := r.enc.Encode(rec); err != nil {
		err = fmt.Errorf("write history: %w", err)
		r.remember(err)
		return err
	}
	if time.Since(r.flushed) < flushAfter {
		return nil
	}
	return r.flush()
}

func (r *Recorder) flush() error {
	r.flushed = time.Now()
	if err := r.buf.Flush(); err != nil {
		err = fmt.Errorf("flush history: %w", err)
		r.remember(err)
		return err
	}
	return nil
}

func (r *Recorder) remember(err error) {
	if r.bad == nil {
		r.bad = err
	}
}

// Close writes everything to disk. It returns the first error of the
// recorder's life, refusals included. A second call does nothing.
func (r *Recorder) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil
	}
	r.closed = true
	err := errors.Join(r.flush(), r.file.Sync(), r.file.Close())
	if r.bad != nil {
		return r.bad
	}
	return err
}
