package smtp

import "sync"

// mailStore keeps the latest stored mails within a bound of bytes.
type mailStore struct {
	mu    sync.Mutex
	limit int64
	size  int64
	order []int64
	mails map[int64][]byte
}

func newMailStore(limit int64) *mailStore {
	return &mailStore{limit: limit, mails: map[int64][]byte{}}
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
	defer m.mu.Unlock()
	b, ok := m.mails[id]
	return b, ok
}

func (m *mailStore) reset() {
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.mails)
	m.order, m.size = nil, 0
}
