package history

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
)

// History is a run's evidence, grouped and in order.
type History struct {
	Meta      *Meta     // nil when the file has none
	Phases    []Phase   // by time
	Ops       []Op      // by call
	Faults    []Fault   // by start
	Processes []Process // by time
	Attempts  []Attempt // by first byte
	Changes   []Change  // by database, then commit order
	Final     *Final    // nil when the run ended before it was read
	Notes     []Note
	Depths    []Depth // by time
	Refused   []Refused
	// Start and End are the earliest and the latest time of any record.
	Start, End int64
	// pairs of the two clocks, in order; both rise.
	pairs []clockPair
	jump  time.Duration // see ClockJump
	// Problems are lines that could not be read or contradict themselves.
	Problems []Problem
}

// Problem is a line of the file that is no evidence.
type Problem struct {
	Line int // from 1; 0: no single line is at fault
	Err  error
}

func (p Problem) Error() string {
	if p.Line == 0 {
		return p.Err.Error()
	}
	return fmt.Sprintf("line %d: %v", p.Line, p.Err)
}

// maxProblems bounds what is kept of a file that is no history at all.
const maxProblems = 100

// Load reads a history. It reads on past a bad line and lists it in Problems
// with its number: a run that was cut short can still be looked at. The error
// is about the file itself.
func Load(path string) (*History, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open history: %w", err)
	}
	defer f.Close()
	h, err := Read(f)
	if err != nil {
		return nil, fmt.Errorf("read history %s: %w", path, err)
	}
	return h, nil
}

// Read is [Load] on a stream.
func Read(r io.Reader) (*History, error) {
	h := &History{}
	in := bufio.NewReaderSize(r, 1<<20)
	for line := 1; ; line++ {
		// A final state is one line of many megabytes, so no line limit.
		text, err := in.ReadBytes('\n')
		if len(bytes.TrimSpace(text)) > 0 {
			h.addLine(line, text)
		}
		if errors.Is(err, io.EOF) {
			h.arrange()
			return h, nil
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
	}
}

func (h *History) addLine(line int, text []byte) {
	rec, err := Decode(text)
	if err == nil {
		err = Validate(rec)
	}
	if err == nil {
		err = h.add(rec)
	}
	if err != nil {
		h.problem(Problem{Line: line, Err: err})
	}
}

func (h *History) problem(p Problem) {
	if len(h.Problems) < maxProblems {
		h.Problems = append(h.Problems, p)
	}
}

// FromRecords builds a history from records in memory. Problems name their
// position, from 1.
func FromRecords(records []Record) *History {
	h := &History{}
	for i, rec := range records {
		err := Validate(rec)
		if err == nil {
			err = h.add(rec)
		}
		if err != nil {
			h.problem(Problem{Line: i + 1, Err: err})
		}
	}
	h.arrange()
	return h
}

func (h *History) add(rec Record) error {
	if h.Start == 0 || rec.T < h.Start {
		h.Start = rec.T
	}
	h.End = max(h.End, rec.T)
	switch rec.Kind {
	case KindMeta:
		if h.Meta != nil {
			return malformed("a second meta")
		}
		h.Meta = rec.Meta
		h.Meta.At = rec.T
	case KindFinal:
		if h.Final != nil {
			return malformed("a second final")
		}
		h.Final = rec.Final
		h.Final.At = rec.T
	case KindPhase:
		rec.Phase.At = rec.T
		h.Phases = append(h.Phases, *rec.Phase)
	case KindOp:
		h.Ops = append(h.Ops, *rec.Op)
	case KindFault:
		h.Faults = append(h.Faults, *rec.Fault)
	case KindProcess:
		rec.Process.At = rec.T
		h.Processes = append(h.Processes, *rec.Process)
	case KindAttempt:
		h.Attempts = append(h.Attempts, *rec.Attempt)
	case KindChange:
		h.Changes = append(h.Changes, *rec.Change)
	case KindNote:
		rec.Note.At = rec.T
		h.Notes = append(h.Notes, *rec.Note)
	case KindDepth:
		rec.Depth.At = rec.T
		h.Depths = append(h.Depths, *rec.Depth)
	case KindRefused:
		h.Refused = append(h.Refused, *rec.Refused)
	}
	return nil
}

func (h *History) arrange() {
	byTime := func(a, b int64) int {
		switch {
		case a < b:
			return -1
		case a > b:
			return 1
		}
		return 0
	}
	slices.SortStableFunc(h.Phases, func(a, b Phase) int { return byTime(a.At, b.At) })
	slices.SortStableFunc(h.Ops, func(a, b Op) int { return byTime(a.Call, b.Call) })
	slices.SortStableFunc(h.Faults, func(a, b Fault) int { return byTime(a.Start, b.Start) })
	slices.SortStableFunc(h.Processes, func(a, b Process) int { return byTime(a.At, b.At) })
	slices.SortStableFunc(h.Attempts, func(a, b Attempt) int {
		if c := byTime(a.From, b.From); c != 0 {
			return c
		}
		return byTime(a.ID, b.ID)
	})
	slices.SortStableFunc(h.Depths, func(a, b Depth) int { return byTime(a.At, b.At) })
	slices.SortStableFunc(h.Changes, func(a, b Change) int {
		if a.Database != b.Database {
			return strings.Compare(a.Database, b.Database)
		}
		return byTime(a.Order, b.Order)
	})
	h.fillIn()
	h.pairClocks()
	for i := range h.Changes {
		h.Changes[i].At = h.Monotonic(h.Changes[i].CommitAt)
	}
}

// fillIn makes the old and the new row of each difference whole again. A row
// before a change and the one after the change before it are the same map, and
// nobody may write to it.
func (h *History) fillIn() {
	type row struct{ db, table, name string }
	last := map[row]map[string]string{}
	for i := range h.Changes {
		c := &h.Changes[i]
		r := row{c.Database, c.Table, c.Row}
		switch {
		case c.Row == "":
			continue
		case c.Op == "DELETE":
			delete(last, r)
			continue
		case c.Delta:
			before := last[r]
			if before == nil {
				h.problem(Problem{Err: malformed("change %d of %s is a difference to a row that the log does not hold", c.Order, c.Table)})
				continue
			}
			c.New, c.Old, c.Delta = applied(before, c.Old, c.New), before, false
		}
		last[r] = c.New
	}
}

// applied is the row before with a difference made to it: columns that only the
// old side names became NULL.
func applied(before, old, new map[string]string) map[string]string {
	after := make(map[string]string, len(before)+len(new))
	for column, v := range before {
		if _, changed := old[column]; !changed {
			after[column] = v
		}
	}
	maps.Copy(after, new)
	return after
}

// Phase returns when a phase began and when the next one did; ok is false when
// the run never reached it. The last phase ends with the history.
func (h *History) Phase(name string) (from, to int64, ok bool) {
	for i, p := range h.Phases {
		if p.Name != name {
			continue
		}
		if i+1 < len(h.Phases) {
			return p.At, h.Phases[i+1].At, true
		}
		return p.At, h.End, true
	}
	return 0, 0, false
}
