package amqp

import (
	"fmt"
	"slices"
	"sync"
	"time"
)

// acks collects the acks of one feed, so that the queue hears of many messages
// at once: an ack of its own is an entry of its own in the queue's Raft log,
// written and flushed on a majority of the nodes.
//
// Nothing is acked that no handler has acked: "multiple" is used only up to the
// last tag before the first one that is still in work, and what was settled
// behind that one is acked tag by tag. A tag is never acked twice, since the
// broker closes a channel for it.
//
// An ack that is collected and not yet written is lost with the session, like
// one that was written and not yet read: the message comes again and its handler
// finds it settled.
type acks struct {
	write  func(tag uint64, multiple bool) error
	most   int           // collected at most
	within time.Duration // after the first of them

	mu      sync.Mutex
	floor   uint64 // all tags up to it are acked
	settled map[uint64]bool
	alone   map[uint64]bool // acked by itself, above the floor
	timer   *time.Timer     // runs while something is collected
	err     error           // of a write; the channel is of no use any more
}

// newAcks makes the acks of a feed of a consumer. No more are held back than
// half of what the prefetch leaves beside the deliveries in work: the other half
// is there to work on meanwhile.
func newAcks(cfg ConsumerConfig, write func(tag uint64, multiple bool) error) *acks {
	most := 1
	if cfg.AckWithin > 0 {
		most = max(1, (cfg.Prefetch-cfg.Parallel)/2)
	}
	return &acks{write: write, most: most, within: cfg.AckWithin, settled: map[uint64]bool{}, alone: map[uint64]bool{}}
}

// add acks a delivery, now or within the time.
func (a *acks) add(tag uint64) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.err != nil {
		return a.err
	}
	a.settled[tag] = true
	if len(a.settled) >= a.most {
		return a.flushLocked()
	}
	if a.timer == nil {
		a.timer = time.AfterFunc(a.within, func() { _ = a.flush() }) // the next add returns the error
	}
	return nil
}

// flush writes what is collected.
func (a *acks) flush() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.flushLocked()
}

func (a *acks) flushLocked() error {
	if a.timer != nil {
		a.timer.Stop()
		a.timer = nil
	}
	if a.err != nil {
		return a.err
	}
	last, n := uint64(0), 0 // the last tag of those that "multiple" reaches
	for a.settled[a.floor+1] || a.alone[a.floor+1] {
		a.floor++
		if a.settled[a.floor] {
			last, n = a.floor, n+1
		}
		delete(a.settled, a.floor)
		delete(a.alone, a.floor)
	}
	if n > 0 {
		a.note(a.write(last, n > 1))
	}
	behind := make([]uint64, 0, len(a.settled))
	for tag := range a.settled {
		behind = append(behind, tag)
	}
	slices.Sort(behind)
	for _, tag := range behind {
		a.note(a.write(tag, false))
		a.alone[tag] = true
		delete(a.settled, tag)
	}
	return a.err
}

func (a *acks) note(err error) {
	if err != nil && a.err == nil {
		a.err = fmt.Errorf("%w: %w", ErrStaleSession, err)
	}
}
