package amqp

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

const (
	// window bounds the messages of one session whose fate is open. A message
	// leaves the window only after the returns that came before its confirm
	// have been read, and the buffer for returns is as large as the window: it
	// is never full. (amqp091-go drops a return that finds the buffer full for
	// 5 s, and a dropped return would be read as "routed".)
	window = 4096
	// chunk is how many messages one caller writes before others get a turn.
	chunk = 256
)

// Message is one message to publish.
type Message struct {
	Exchange   string
	RoutingKey string
	ID         string // AMQP message-id, for people and for logs
	Headers    map[string]any
	Body       []byte // JSON
}

// Publisher publishes with confirms over one connection that it keeps.
//
// Confirm timeout: it ends the wait of its caller and nothing else. The session
// lives on, since the confirm of a queue that has lost its majority says nothing
// about the other queues, and a new session would turn every other open publish
// into an unknown one. Only when half of the session's window is taken by
// publishes that nobody waits for any more, the session is closed and made anew.
type Publisher struct {
	cfg    Config
	states *states

	mu      sync.Mutex
	current *pubSession
	changed chan struct{} // closed when current or stopped changes
	stopped bool
}

// NewPublisher makes a publisher; Run connects it.
func NewPublisher(cfg Config) *Publisher {
	cfg = cfg.withDefaults()
	return &Publisher{cfg: cfg, states: &states{cfg: cfg}, changed: make(chan struct{})}
}

// Run keeps the publisher connected until ctx ends, and returns nil then. An
// error means that the configuration is unusable. What is still unconfirmed
// when ctx ends becomes ErrUnconfirmed: end the callers of Publish first.
// A publisher that has been stopped stays stopped.
func (p *Publisher) Run(ctx context.Context) error {
	defer p.stop()
	d, err := newDialer(p.cfg)
	if err != nil {
		return err
	}
	var pause backoff
	for ctx.Err() == nil {
		began := time.Now()
		p.runSession(ctx, d)
		if time.Since(began) > healthyAfter {
			pause.reset()
		}
		if ctx.Err() == nil {
			pause.wait(ctx)
		}
	}
	return nil
}

// Connected reports whether a session is open, for readiness.
func (p *Publisher) Connected() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.current != nil
}

func (p *Publisher) runSession(ctx context.Context, d *dialer) {
	s, err := p.open(ctx, d)
	if err != nil {
		if ctx.Err() == nil {
			p.states.set(StateWaiting, err)
		}
		return
	}
	p.setCurrent(s)
	p.states.set(StateConnected, nil)
	cause := s.watch(ctx, p.states)
	p.setCurrent(nil)
	s.end(cause)
	if ctx.Err() == nil {
		p.states.set(StateLost, cause)
	}
}

func (p *Publisher) open(ctx context.Context, d *dialer) (*pubSession, error) {
	l, err := d.dial(ctx)
	if err != nil {
		return nil, err
	}
	s := newPubSession(l, p.cfg.ConfirmTimeout)
	err = l.within(ctx, setupTimeout, func(ctx context.Context) error { return s.prepare(ctx, p.cfg.Setup) })
	if err != nil {
		l.close()
		return nil, err
	}
	return s, nil
}

func (p *Publisher) setCurrent(s *pubSession) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.current = s
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *Publisher) stop() {
	p.mu.Lock()
	p.stopped = true
	p.mu.Unlock()
	p.setCurrent(nil)
}

var errStopped = errors.New("the publisher has been stopped")

// session waits for a session that can be written to.
func (p *Publisher) session(ctx context.Context) (*pubSession, error) {
	for {
		p.mu.Lock()
		s, stopped, changed := p.current, p.stopped, p.changed
		p.mu.Unlock()
		if stopped {
			return nil, errStopped
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if s != nil && !s.ended() {
			return s, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-changed:
		}
	}
}

// Publish sends all messages pipelined, mandatory and persistent, and waits for
// every confirm. The i-th error is nil when message i was confirmed and routed,
// else one of ErrUnconfirmed, ErrUnroutable, ErrRefused, ErrNotSent. While no
// broker can be reached, or its alarm blocks publishers, it waits until ctx
// ends. A message that was written is never written a second time; messages
// that a lost session left unwritten go out over the next one.
//
// It may be called from several goroutines; the messages of one call keep their
// order.
func (p *Publisher) Publish(ctx context.Context, msgs []Message) []error {
	errs := make([]error, len(msgs))
	for next := 0; next < len(msgs); {
		s, err := p.session(ctx)
		if err != nil {
			for ; next < len(msgs); next++ {
				errs[next] = fmt.Errorf("%w: %w", ErrNotSent, err)
			}
			break
		}
		next += s.publish(ctx, msgs[next:], errs[next:])
	}
	return errs
}
