package ledger

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"

	"mailproof/fakes/ledger/spill"
)

// chunkRows is how many rows move to the file at once: small enough that
// nobody waits noticeably.
const chunkRows = 256

// store keeps finished rows in chunks: the newest in memory, the older ones as
// JSON lines in a temporary file that is made when it is first needed.
type store struct {
	keep    int // chunks in memory, the growing one aside
	n       int64
	chunks  []chunk // in memory; all but the last are full
	spilled []span  // in the file, oldest first
	file    *os.File
	size    int64
	err     error
}

// chunk is some rows in the order of their numbers. Rows are added behind, none
// is changed: a copy of the struct is a snapshot that needs no lock.
type chunk struct {
	rows []Attempt
	// before holds, for each row, the number of the one before it of the same
	// key, 0 if there is none.
	before []uint32
}

// span is where a chunk stands in the file: its rows from from to to, then its
// before numbers, 4 bytes each.
type span struct{ from, to int64 }

func (s *store) append(a Attempt, before uint32) {
	s.n++
	if k := len(s.chunks); k == 0 || len(s.chunks[k-1].rows) == chunkRows {
		s.chunks = append(s.chunks, chunk{make([]Attempt, 0, chunkRows), make([]uint32, 0, chunkRows)})
		s.spill()
	}
	c := &s.chunks[len(s.chunks)-1]
	c.rows, c.before = append(c.rows, a), append(c.before, before)
}

// spill moves the oldest chunk to the file when there are too many. A file that
// cannot be written costs memory, never evidence.
func (s *store) spill() {
	if len(s.chunks) <= s.keep+1 || s.err != nil {
		return
	}
	if s.err = s.write(s.chunks[0]); s.err != nil {
		return
	}
	s.chunks[0] = chunk{}
	s.chunks = s.chunks[1:]
}

func (s *store) write(c chunk) error {
	if s.file == nil {
		f, err := spill.Create("fake-ledger-*.jsonl")
		if err != nil {
			return fmt.Errorf("making the ledger's file: %w", err)
		}
		s.file = f
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	for _, a := range c.rows {
		if err := enc.Encode(a); err != nil {
			return fmt.Errorf("encoding ledger row %d: %w", a.ID, err)
		}
	}
	at := span{s.size, s.size + int64(b.Len())}
	if err := binary.Write(&b, binary.LittleEndian, c.before); err != nil {
		return fmt.Errorf("encoding the ledger's index: %w", err)
	}
	if _, err := s.file.WriteAt(b.Bytes(), s.size); err != nil {
		return fmt.Errorf("writing the ledger's file: %w", err)
	}
	s.spilled = append(s.spilled, at)
	s.size += int64(b.Len())
	return nil
}

// after returns rows behind the one numbered seq: copied from memory, or a
// function that reads a chunk from the file, which needs no lock.
func (s *store) after(seq int64) ([]Attempt, func() ([]Attempt, error)) {
	seq = max(0, seq)
	if seq >= s.n {
		return nil, nil
	}
	skip := int(seq % chunkRows)
	c, read := s.chunk(seq + 1)
	if read == nil {
		return append([]Attempt(nil), c.rows[skip:]...), nil
	}
	return nil, func() ([]Attempt, error) {
		c, err := read()
		if err != nil {
			return nil, err
		}
		return c.rows[skip:], nil
	}
}

// chunk returns the one that holds the row numbered seq (1 to n), or a function
// that reads it from the file, which needs no lock.
func (s *store) chunk(seq int64) (chunk, func() (chunk, error)) {
	i := int((seq - 1) / chunkRows)
	if i >= len(s.spilled) {
		return s.chunks[i-len(s.spilled)], nil
	}
	f, at := s.file, s.spilled[i]
	return chunk{}, func() (chunk, error) { return read(f, at) }
}

func read(f *os.File, at span) (chunk, error) {
	rows, err := Decode(io.NewSectionReader(f, at.from, at.to-at.from))
	if err != nil {
		return chunk{}, fmt.Errorf("reading the ledger's file: %w", err)
	}
	c := chunk{rows, make([]uint32, len(rows))}
	if err := binary.Read(io.NewSectionReader(f, at.to, int64(4*len(rows))), binary.LittleEndian, c.before); err != nil {
		return chunk{}, fmt.Errorf("reading the ledger's index: %w", err)
	}
	return c, nil
}

func (s *store) reset() {
	s.n, s.chunks, s.spilled, s.size = 0, nil, nil, 0
	if s.file != nil {
		_ = s.file.Truncate(0)
	}
}

func (s *store) close() error {
	if s.file == nil {
		return nil
	}
	return spill.Close(s.file)
}

// Decode reads rows from JSON lines, as the export writes them.
func Decode(r io.Reader) ([]Attempt, error) {
	var out []Attempt
	dec := json.NewDecoder(r)
	for {
		var a Attempt
		err := dec.Decode(&a)
		if err == io.EOF {
			return out, nil
		}
		if err != nil {
			return out, fmt.Errorf("ledger row %d: %w", len(out)+1, err)
		}
		out = append(out, a)
	}
}
