package script

import (
	"context"
	"errors"
	"sort"
	"sync"
	"time"
)

// Hold is one event that waits to be released.
type Hold struct {
	ID        int64  `json:"id"`
	Rule      string `json:"rule"`
	Stage     Stage  `json:"stage"`
	Session   int64  `json:"session"`
	Attempt   int64  `json:"attempt"` // ledger id of the first row; 0 before there is one
	Client    string `json:"client"`
	Key       string `json:"key,omitempty"`
	MessageID string `json:"message_id,omitempty"`
	Recipient string `json:"recipient,omitempty"` // the first one
	Since     int64  `json:"since"`               // monotonic ns
	// PeerGone is set once the client's end of the connection was seen closed.
	PeerGone bool `json:"peer_gone"`
}

// ErrClosed ends a hold because its server closes.
var ErrClosed = errors.New("the server is closing")

// Holds is the set of waiting events of one server.
type Holds struct {
	mu      sync.Mutex
	next    int64
	waiting map[int64]*held
	changed chan struct{} // closed and replaced on each change
	closed  bool
}

type held struct {
	Hold
	free chan struct{}
}

// NewHolds returns an empty set.
func NewHolds() *Holds {
	return &Holds{waiting: map[int64]*held{}, changed: make(chan struct{})}
}

// Wait registers h and returns when it is released (nil), when bound is over
// (context.DeadlineExceeded), or when the set is closed ([ErrClosed]). watch,
// if not nil, runs meanwhile: it returns true when the peer is gone, and must
// return when its context ends.
func (s *Holds) Wait(h Hold, bound time.Duration, watch func(context.Context) bool) (Hold, error) {
	w, err := s.register(h)
	if err != nil {
		return h, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		if watch != nil && watch(ctx) {
			s.update(func() { w.PeerGone = true })
		}
	}()
	select {
	case <-w.free:
	case <-ctx.Done():
		err = context.DeadlineExceeded
	}
	cancel()
	<-watched
	return s.unregister(w, err)
}

func (s *Holds) register(h Hold) (*held, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	s.next++
	h.ID = s.next
	w := &held{Hold: h, free: make(chan struct{})}
	s.waiting[h.ID] = w
	s.signal()
	return w, nil
}

func (s *Holds) unregister(w *held, err error) (Hold, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.waiting, w.ID)
	s.signal()
	if s.closed {
		err = ErrClosed
	}
	return w.Hold, err
}

func (s *Holds) update(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
	s.signal()
}

func (s *Holds) signal() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// List returns what waits, oldest first.
func (s *Holds) List() []Hold {
	out, _ := s.list()
	return out
}

func (s *Holds) list() ([]Hold, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Hold, 0, len(s.waiting))
	for _, w := range s.waiting {
		out = append(out, w.Hold)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].ID < out[j].ID })
	return out, s.changed
}

// Await returns the oldest hold that the filter accepts (nil accepts all), as
// soon as there is one, or ctx's error.
func (s *Holds) Await(ctx context.Context, filter func(Hold) bool) (Hold, error) {
	for {
		all, changed := s.list()
		for _, h := range all {
			if filter == nil || filter(h) {
				return h, nil
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return Hold{}, ctx.Err()
		}
	}
}

// Release lets one hold go on; false when none of that id waits.
func (s *Holds) Release(id int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	w, ok := s.waiting[id]
	if ok {
		w.release()
	}
	return ok
}

// ReleaseAll lets all go on and returns how many that were.
func (s *Holds) ReleaseAll() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.waiting {
		w.release()
	}
	return len(s.waiting)
}

// release is called under the lock; a hold stays listed until its goroutine
// has taken notice, so a second release must be harmless.
func (w *held) release() {
	select {
	case <-w.free:
	default:
		close(w.free)
	}
}

// Close ends all holds, present and future, with [ErrClosed].
func (s *Holds) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, w := range s.waiting {
		w.release()
	}
}

// Changed returns a channel that is closed when a hold begins, ends or loses
// its peer.
func (s *Holds) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}
