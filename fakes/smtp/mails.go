package smtp

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
)

// mailStore keeps the beginning of the latest stored mails within a bound of
// bytes, and all of every mail in a folder if there is one.
type mailStore struct {
	limit int64
	dir   string // "" for none

	mu    sync.Mutex
	size  int64
	order []int64
	mails map[int64][]byte
}

func newMailStore(limit int64, dir string) (*mailStore, error) {
	if dir != "" {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, fmt.Errorf("folder for mails: %w", err)
		}
	}
	return &mailStore{limit: limit, dir: dir, mails: map[int64][]byte{}}, nil
}

func (m *mailStore) put(id int64, b []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mails[id] = b
	m.order = append(m.order, id)
	m.size += int64(len(b))
	for m.size > m.limit && len(m.order) > 0 {
		m.size -= int64(len(m.mails[m.order[0]]))
		delete(m.mails, m.order[0])
		m.order = m.order[1:]
	}
}

func (m *mailStore) get(id int64) ([]byte, bool) {
	m.mu.Lock()
	b, ok := m.mails[id]
	m.mu.Unlock()
	if ok || m.dir == "" {
		return b, ok
	}
	b, err := os.ReadFile(m.path(id))
	return b, err == nil
}

// reset forgets the mails in memory. Files are the caller's and stay.
func (m *mailStore) reset() {
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.mails)
	m.order, m.size = nil, 0
}

func (m *mailStore) path(id int64) string {
	return filepath.Join(m.dir, strconv.FormatInt(id, 10)+".eml")
}

// spool is the file that a mail is written to while it is read. Only a stored
// mail keeps it. The nil spool is one that keeps nothing.
type spool struct {
	m   *mailStore
	f   *os.File
	err error
}

func (m *mailStore) spool() *spool {
	if m.dir == "" {
		return nil
	}
	f, err := os.CreateTemp(m.dir, ".incoming-*")
	return &spool{m, f, err}
}

func (s *spool) write(b []byte) {
	if s == nil || s.err != nil {
		return
	}
	_, s.err = s.f.Write(b)
}

// keep gives the file the name of a ledger row.
func (s *spool) keep(id int64) {
	if s == nil || s.err != nil {
		return
	}
	s.err = os.Link(s.f.Name(), s.m.path(id))
}

// close removes the working name and returns the first error.
func (s *spool) close() error {
	if s == nil || s.f == nil {
		return s.failed()
	}
	return errors.Join(s.failed(), s.f.Close(), os.Remove(s.f.Name()))
}

func (s *spool) failed() error {
	if s == nil || s.err == nil {
		return nil
	}
	return fmt.Errorf("keeping a mail on disk: %w", s.err)
}
