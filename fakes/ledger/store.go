package ledger

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
)

// chunkRows is how many rows move to the file at once: small enough that
// nobody waits noticeably.
const chunkRows = 256

// store keeps finished rows in chunks: the newest in memory, the older ones as
// JSON lines in a temporary file that is made when it is first needed.
type store struct {
	keep    int // chunks in memory, the growing one aside
	n       int64
	chunks  [][]Attempt // in memory; all but the last are full
	spilled []span      // in the file, oldest first
	file    *os.File
	size    int64
	err     error
}

type span struct{ from, to int64 } // bytes of the file

func (s *store) append(a Attempt) {
	s.n++
	if k := len(s.chunks); k == 0 || len(s.chunks[k-1]) == chunkRows {
		s.chunks = append(s.chunks, make([]Attempt, 0, chunkRows))
		s.spill()
	}
	k := len(s.chunks) - 1
	s.chunks[k] = append(s.chunks[k], a)
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
	s.chunks[0] = nil
	s.chunks = s.chunks[1:]
}

func (s *store) write(rows []Attempt) error {
	if s.file == nil {
		f, err := os.CreateTemp("", "fake-ledger-*.jsonl")
		if err != nil {
			return fmt.Errorf("making the ledger's file: %w", err)
		}
		s.file = f
		// Unlinked at once where the system allows it, so that nothing is left
		// after a crash; elsewhere close removes it.
		_ = os.Remove(f.Name())
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	for _, a := range rows {
		if err := enc.Encode(a); err != nil {
			return fmt.Errorf("encoding ledger row %d: %w", a.ID, err)
		}
	}
	if _, err := s.file.WriteAt(b.Bytes(), s.size); err != nil {
		return fmt.Errorf("writing the ledger's file: %w", err)
	}
	s.spilled = append(s.spilled, span{s.size, s.size + int64(b.Len())})
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
	chunk, skip := int(seq/chunkRows), int(seq%chunkRows)
	if chunk >= len(s.spilled) {
		return append([]Attempt(nil), s.chunks[chunk-len(s.spilled)][skip:]...), nil
	}
	f, at := s.file, s.spilled[chunk]
	return nil, func() ([]Attempt, error) {
		rows, err := Decode(io.NewSectionReader(f, at.from, at.to-at.from))
		if err != nil {
			return nil, fmt.Errorf("reading the ledger's file: %w", err)
		}
		return rows[skip:], nil
	}
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
	name := s.file.Name()
	err := s.file.Close()
	_ = os.Remove(name)
	return err
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
