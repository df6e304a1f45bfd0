package amqp

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"
)

// pubSession is one connection with one channel in confirm mode. It ends when
// either is closed, and is never used again.
type pubSession struct {
	link    *link
	ch      *amqp091.Channel
	timeout time.Duration // of one confirm

	chClosed chan *amqp091.Error
	blocked  chan amqp091.Blocking

	writer chan struct{} // one token while somebody writes: a lock that a context can leave
	seq    uint64        // of the last message; guarded by writer
	slots  chan struct{} // one token per message in the window

	failed chan error    // somebody asks for the end of the session
	dead   chan struct{} // closed at its end
	cause  error         // set before dead is closed

	mu        sync.Mutex
	open      chan struct{} // closed while the broker takes messages
	returns   chan amqp091.Return
	returned  map[string]string    // correlation id → the broker's words
	refused   map[string]time.Time // destination → since when nothing but nacks came from it
	abandoned []inflight           // in the window, but nobody waits for them any more
}

// inflight is a message that was written and whose fate is open.
type inflight struct {
	i       int    // index in the caller's slice
	id      string // correlation id, unique in the session
	to      string // exchange and routing key
	confirm *amqp091.DeferredConfirmation
	until   time.Time
}

func newPubSession(l *link, timeout time.Duration) *pubSession {
	s := &pubSession{
		link:     l,
		timeout:  timeout,
		writer:   make(chan struct{}, 1),
		slots:    make(chan struct{}, window),
		failed:   make(chan error, 1),
		dead:     make(chan struct{}),
		open:     make(chan struct{}),
		returned: make(map[string]string),
		refused:  make(map[string]time.Time),
	}
	close(s.open)
	return s
}

// prepare makes the channel ready: returns, topology, confirms.
func (s *pubSession) prepare(ctx context.Context, setup func(context.Context, Declarer) error) error {
	ch, err := s.link.Channel()
	if err != nil {
		return fmt.Errorf("open channel: %w", err)
	}
	s.ch = ch
	s.chClosed = ch.NotifyClose(make(chan *amqp091.Error, 1))
	s.returns = ch.NotifyReturn(make(chan amqp091.Return, window))
	s.blocked = s.link.NotifyBlocked(make(chan amqp091.Blocking, 16))
	if setup != nil {
		if err := setup(ctx, ch); err != nil {
			return fmt.Errorf("setup: %w", err)
		}
	}
	if err := ch.Confirm(false); err != nil {
		return fmt.Errorf("confirm mode: %w", err)
	}
	return nil
}

// watch follows the session and returns the cause of its end.
func (s *pubSession) watch(ctx context.Context, st *states) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-s.failed:
			return err
		case err := <-s.link.closed:
			return closeCause("connection", err)
		case err := <-s.chClosed:
			return closeCause("channel", err)
		case b, ok := <-s.blocked:
			if !ok {
				s.blocked = nil // the notice of the close follows
				continue
			}
			s.setBlocked(b, st)
		}
	}
}

func closeCause(what string, err *amqp091.Error) error {
	if err == nil { // closed without a reason
		return fmt.Errorf("%s closed", what)
	}
	return fmt.Errorf("%s closed: %w", what, err)
}

func (s *pubSession) setBlocked(b amqp091.Blocking, st *states) {
	if b.Active {
		s.mu.Lock()
		s.open = make(chan struct{})
		s.mu.Unlock()
		st.set(StateBlocked, errors.New(b.Reason))
		return
	}
	s.mu.Lock()
	select {
	case <-s.open:
	default:
		close(s.open)
	}
	s.mu.Unlock()
	st.set(StateUnblocked, nil)
}

// end closes the session; every open confirm resolves as "not acked".
func (s *pubSession) end(cause error) {
	s.cause = cause
	close(s.dead)
	s.link.close()
}

// ended reports whether the session can no longer be written to. It may be true
// shortly before dead is closed.
func (s *pubSession) ended() bool {
	select {
	case <-s.dead:
		return true
	default:
		return s.ch.IsClosed()
	}
}

// fail asks for the end of the session; the first cause counts.
func (s *pubSession) fail(err error) {
	select {
	case s.failed <- err:
	default:
	}
}

// publish writes messages until all are written, or ctx or the session ends,
// and settles every one it has written. It returns how many are settled; their
// errs are final.
func (s *pubSession) publish(ctx context.Context, msgs []Message, errs []error) int {
	timer := time.NewTimer(s.timeout)
	defer timer.Stop()
	open := make([]inflight, 0, len(msgs))
	next, settled := 0, 0
	for next < len(msgs) {
		slots := s.reserve(ctx, min(chunk, len(msgs)-next), settled == len(open))
		if slots == 0 && settled == len(open) {
			break // ctx or the session has ended
		}
		if slots == 0 { // the window is full, in part with our own
			errs[open[settled].i] = s.settle(ctx, open[settled], timer)
			settled++
			continue
		}
		var ok bool
		if next, ok = s.write(ctx, msgs, next, next+slots, errs, &open); !ok {
			break
		}
	}
	for ; settled < len(open); settled++ {
		errs[open[settled].i] = s.settle(ctx, open[settled], timer)
	}
	return next
}

// reserve takes up to n places of the window. It waits for the first one only
// if block is set: the caller has no place of its own that it could free.
func (s *pubSession) reserve(ctx context.Context, n int, block bool) int {
	s.reap()
	got := 0
	for ; got < n; got++ {
		select {
		case s.slots <- struct{}{}:
			continue
		default:
		}
		break
	}
	if got > 0 || !block {
		return got
	}
	select {
	case s.slots <- struct{}{}:
		return 1
	case <-ctx.Done():
	case <-s.dead:
	}
	return 0
}

func (s *pubSession) release(n int) {
	for range n {
		<-s.slots
	}
}

// write publishes msgs[from:to], for which places are reserved. It returns the
// index of the first message that was not written, and whether to go on.
func (s *pubSession) write(ctx context.Context, msgs []Message, from, to int, errs []error, open *[]inflight) (int, bool) {
	if !s.lock(ctx) {
		s.release(to - from)
		return from, false
	}
	defer func() { <-s.writer }()
	for i := from; i < to; i++ {
		f, err := s.writeOne(msgs[i])
		if err == nil {
			f.i = i
			*open = append(*open, f)
			continue
		}
		if errors.Is(err, ErrNotSent) { // this message can never be encoded
			errs[i] = err
			s.release(1)
			continue
		}
		s.release(to - i)
		s.fail(fmt.Errorf("publish: %w", err))
		if errors.Is(err, amqp091.ErrClosed) {
			// Reported before the last frame: the broker has no whole message.
			return i, false
		}
		errs[i] = fmt.Errorf("%w: %w", ErrUnconfirmed, err)
		return i + 1, false
	}
	return to, true
}

// lock waits for the right to write: nobody else writes, and no alarm of the
// broker holds publishers back. (A blocked broker stops reading the socket; a
// write would hang there, out of reach of any context.)
func (s *pubSession) lock(ctx context.Context) bool {
	select {
	case s.writer <- struct{}{}:
	case <-ctx.Done():
		return false
	case <-s.dead:
		return false
	}
	s.mu.Lock()
	open := s.open
	s.mu.Unlock()
	select {
	case <-open:
		if ctx.Err() == nil {
			return true
		}
	case <-ctx.Done():
	case <-s.dead:
	}
	<-s.writer
	return false
}

// writeOne publishes one message. Its correlation id is a number of the
// session, so that a return finds its message even where ids repeat.
func (s *pubSession) writeOne(m Message) (inflight, error) {
	headers := ownHeaders(m.Headers)
	if err := headers.Validate(); err != nil {
		return inflight{}, fmt.Errorf("%w: headers of message %q: %w", ErrNotSent, m.ID, err)
	}
	s.seq++
	id := strconv.FormatUint(s.seq, 10)
	confirm, err := s.ch.PublishWithDeferredConfirm(m.Exchange, m.RoutingKey, true, false, amqp091.Publishing{
		Headers:       headers,
		ContentType:   "application/json",
		DeliveryMode:  amqp091.Persistent,
		CorrelationId: id,
		MessageId:     m.ID,
		Body:          m.Body,
	})
	if err != nil {
		return inflight{}, err
	}
	return inflight{id: id, to: m.Exchange + " " + m.RoutingKey, confirm: confirm, until: time.Now().Add(s.timeout)}, nil
}

// ownHeaders leaves out what the broker writes about dead letters. Up to
// RabbitMQ 3.13 a published x-death is believed, and a message whose next queue
// is named there is dropped as a cycle.
func ownHeaders(in map[string]any) amqp091.Table {
	out := make(amqp091.Table, len(in))
	for k, v := range in {
		if k == "x-death" || k == "x-delivery-count" || strings.HasPrefix(k, "x-first-death-") || strings.HasPrefix(k, "x-last-death-") {
			continue
		}
		out[k] = v
	}
	return out
}

// settle waits for the fate of one written message and frees its place.
func (s *pubSession) settle(ctx context.Context, f inflight, timer *time.Timer) error {
	select {
	case <-f.confirm.Done():
		return s.fate(f)
	default:
	}
	timer.Reset(time.Until(f.until))
	select {
	case <-f.confirm.Done():
		return s.fate(f)
	case <-ctx.Done():
		s.abandon(f)
		return fmt.Errorf("%w: %w", ErrUnconfirmed, ctx.Err())
	case <-timer.C:
		s.abandon(f)
		return fmt.Errorf("%w: no confirm within %v", ErrUnconfirmed, s.timeout)
	}
}

// fate reads a resolved confirm. amqp091-go resolves the open confirms of a
// closed channel like a nack; it marks the channel as closed first, so a nack
// on an open channel is the broker's own.
func (s *pubSession) fate(f inflight) error {
	words, returned := s.takeReturn(f.id)
	s.release(1)
	switch {
	case f.confirm.Acked() && returned:
		return fmt.Errorf("%w (%s)", ErrUnroutable, words)
	case f.confirm.Acked():
		s.taken(f.to)
		return nil
	case s.ch.IsClosed():
		<-s.dead // follows at once, with the cause
		return fmt.Errorf("%w: %w", ErrUnconfirmed, s.cause)
	default:
		s.refuse(f.to)
		return ErrRefused
	}
}

// refusals is for how long a destination may refuse every message before the
// session is made anew.
const refusals = time.Second

// refuse counts a nack. A channel of the broker asks a quorum queue whether it
// takes messages once, at the first publish, of the leader that it knows; when
// that one has just died the channel refuses every later message, also long after
// the next leader has been elected. Only another channel asks again.
func (s *pubSession) refuse(to string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	since, known := s.refused[to]
	if !known {
		s.refused[to] = time.Now()
		return
	}
	if d := time.Since(since); d > refusals {
		s.fail(fmt.Errorf("%s has refused every message for %s", to, d.Round(time.Millisecond)))
	}
}

func (s *pubSession) taken(to string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.refused, to)
}

// takeReturn says whether the message was returned. A return comes before its
// confirm, and the one reader of the connection has put it into the buffer
// before it resolved the confirm.
func (s *pubSession) takeReturn(id string) (words string, returned bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.readReturns()
	words, returned = s.returned[id]
	delete(s.returned, id)
	return words, returned
}

func (s *pubSession) readReturns() {
	for {
		select {
		case r, ok := <-s.returns:
			if !ok {
				s.returns = nil // closed with the channel; a nil channel is never ready
				return
			}
			s.returned[r.CorrelationId] = fmt.Sprintf("%d %s, exchange %q, key %q", r.ReplyCode, r.ReplyText, r.Exchange, r.RoutingKey)
		default:
			return
		}
	}
}

// abandon leaves a message in the window without a waiter.
func (s *pubSession) abandon(f inflight) {
	s.mu.Lock()
	s.abandoned = append(s.abandoned, f)
	n := len(s.abandoned)
	s.mu.Unlock()
	if n >= window/2 {
		s.fail(fmt.Errorf("%d publishes were never confirmed", n))
	}
}

// reap frees the places of abandoned messages that have been confirmed late.
func (s *pubSession) reap() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.abandoned) == 0 {
		return
	}
	s.readReturns()
	kept := s.abandoned[:0]
	for _, f := range s.abandoned {
		select {
		case <-f.confirm.Done():
			delete(s.returned, f.id)
			s.release(1)
		default:
			kept = append(kept, f)
		}
	}
	s.abandoned = kept
}
