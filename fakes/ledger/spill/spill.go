// Package spill keeps what need not stand in memory in temporary files.
//
// It imports nothing of this module.
package spill

import (
	"fmt"
	"os"
)

// Create makes a temporary file; pattern is os.CreateTemp's. It is unlinked at
// once where the system allows it, so that nothing is left after a crash;
// elsewhere Close removes it.
func Create(pattern string) (*os.File, error) {
	f, err := os.CreateTemp("", pattern)
	if err != nil {
		return nil, err
	}
	_ = os.Remove(f.Name())
	return f, nil
}

// Close gives a file of Create back.
func Close(f *os.File) error {
	err := f.Close()
	_ = os.Remove(f.Name()) // gone already where open files can be unlinked
	return err
}

// tailBytes is how much is collected before it is written.
const tailBytes = 64 << 10

// Log is bytes that are appended, read and overwritten by offset: the last 64 KiB
// in memory, all before them in a temporary file that is made when it is first
// needed. The zero value is an empty log.
//
// A file that cannot be written costs memory, never a byte: from then on all
// that is appended stays in memory.
//
// A Log is not safe for concurrent use: its owner has a lock.
type Log struct {
	file    *os.File
	written int64 // in the file
	tail    []byte
	failed  bool
}

// Len is how many bytes were appended.
func (l *Log) Len() int64 { return l.written + int64(len(l.tail)) }

// Append adds b and returns its offset. An error says that the file could not
// be written; b is kept all the same. It is returned once.
func (l *Log) Append(b []byte) (int64, error) {
	off := l.Len()
	l.tail = append(l.tail, b...)
	if len(l.tail) < tailBytes || l.failed {
		return off, nil
	}
	if err := l.Flush(); err != nil {
		l.failed = true
		return off, err
	}
	return off, nil
}

// Flush moves what is in memory to the file.
func (l *Log) Flush() error {
	if l.file == nil {
		f, err := Create("fake-spill-*")
		if err != nil {
			return fmt.Errorf("making a spill file: %w", err)
		}
		l.file = f
	}
	if _, err := l.file.WriteAt(l.tail, l.written); err != nil {
		return fmt.Errorf("writing a spill file: %w", err)
	}
	l.written += int64(len(l.tail))
	if cap(l.tail) > 4*tailBytes {
		l.tail = nil // a large one must not be kept for good
	}
	l.tail = l.tail[:0]
	return nil
}

// Seal is Flush for a log that nothing is appended to any more: it also gives
// the memory back.
func (l *Log) Seal() error {
	if err := l.Flush(); err != nil {
		return err
	}
	l.tail = nil
	return nil
}

// Read fills b from the offset. It is an error to read what was not appended.
func (l *Log) Read(b []byte, off int64) error {
	if err := l.within(b, off); err != nil {
		return err
	}
	if n := l.inFile(b, off); n > 0 {
		if _, err := l.file.ReadAt(b[:n], off); err != nil {
			return fmt.Errorf("reading a spill file: %w", err)
		}
		b, off = b[n:], off+n
	}
	if len(b) > 0 {
		copy(b, l.tail[off-l.written:])
	}
	return nil
}

// Write overwrites from the offset. It is an error to write behind the end.
func (l *Log) Write(b []byte, off int64) error {
	if err := l.within(b, off); err != nil {
		return err
	}
	if n := l.inFile(b, off); n > 0 {
		if _, err := l.file.WriteAt(b[:n], off); err != nil {
			return fmt.Errorf("writing a spill file: %w", err)
		}
		b, off = b[n:], off+n
	}
	if len(b) > 0 {
		copy(l.tail[off-l.written:], b)
	}
	return nil
}

func (l *Log) within(b []byte, off int64) error {
	if off < 0 || off+int64(len(b)) > l.Len() {
		return fmt.Errorf("a spill file has %d bytes; asked for %d at %d", l.Len(), len(b), off)
	}
	return nil
}

// inFile is how many bytes of b, from the offset on, stand in the file.
func (l *Log) inFile(b []byte, off int64) int64 {
	return min(int64(len(b)), max(0, l.written-off))
}

// Reset makes the log empty and gives its file back.
func (l *Log) Reset() error {
	var err error
	if l.file != nil {
		err = Close(l.file)
	}
	*l = Log{}
	return err
}

// Table is records of one size by number, from 0, in a Log.
type Table struct {
	log  Log
	size int64
}

// NewTable returns an empty table of records of size bytes.
func NewTable(size int) *Table { return &Table{size: int64(size)} }

// Len is how many records there are.
func (t *Table) Len() int64 { return t.log.Len() / t.size }

// Append adds a record and returns its number; for the error see [Log.Append].
func (t *Table) Append(record []byte) (int64, error) {
	off, err := t.log.Append(record[:t.size])
	return off / t.size, err
}

// Read fills record with the n-th.
func (t *Table) Read(record []byte, n int64) error {
	return t.log.Read(record[:t.size], n*t.size)
}

// Write overwrites the n-th record.
func (t *Table) Write(record []byte, n int64) error {
	return t.log.Write(record[:t.size], n*t.size)
}

// Reset makes the table empty and gives its file back.
func (t *Table) Reset() error { return t.log.Reset() }
