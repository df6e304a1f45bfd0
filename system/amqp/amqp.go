// Package amqp is the session layer of the system over amqp091-go: it
// reconnects by itself, and it makes two mistakes impossible that the client
// library's own recovery allows.
//
//   - A delivery belongs to the session that brought it. An Ack of a delivery
//     from a session that has ended goes nowhere ([ErrStaleSession]); it can
//     never hit another message that got the same tag.
//   - A publish whose confirm did not come is unknown ([ErrUnconfirmed]), never
//     reported as refused: the broker may have stored it.
//
// Publishing is confirmed, mandatory and persistent (M6-08). Consuming is with
// manual acks; nothing is requeued because of an error (M6-15, M6-18).
//
// A session is: dial one of the URLs → channel → confirm mode or prefetch →
// Setup → use it until the connection or the channel closes. Each session has
// channel objects of its own, so a tag of one session means nothing in another.
// amqp091-go's Recovery is never switched on.
//
// Package amqp imports nothing of the system but contract (topology).
package amqp

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"
)

// Errors of a publish.
var (
	// ErrUnconfirmed: no confirm came (connection lost, timeout). The message
	// may or may not be in a queue.
	ErrUnconfirmed = errors.New("publish not confirmed: the broker may have stored the message")
	// ErrUnroutable: the broker returned the message, no queue is bound.
	ErrUnroutable = errors.New("publish returned: no queue is bound for its routing key")
	// ErrRefused: the broker nacked it (an internal error or a full queue).
	ErrRefused = errors.New("publish refused by the broker")
	// ErrNotSent: not a byte of the message was written, because the context
	// or the publisher ended first, or because its headers cannot be encoded.
	ErrNotSent = errors.New("publish not sent")
	// ErrStaleSession: the delivery's session has ended; the broker delivers
	// the message again.
	ErrStaleSession = errors.New("the session of this delivery has ended")
)

// Defaults of [Config].
const (
	DefaultHeartbeat      = 5 * time.Second
	DefaultConfirmTimeout = 30 * time.Second
)

// Config of a publisher or consumer.
type Config struct {
	// URLs are tried in turn, from a random first one.
	URLs []string
	// Name is shown by the broker's tools: process and duty.
	Name string
	// Heartbeat, default 5 s, rounded to whole seconds by the protocol: a link
	// that is silently dead is given up after three of them.
	Heartbeat time.Duration
	// ConfirmTimeout bounds the wait for one confirm, default 30 s (TRAP-2-10:
	// it must lie well above the p99 of confirm latency; a frozen queue leader
	// alone costs 8 s until the next one is elected).
	ConfirmTimeout time.Duration
	// Setup is run on each new session before it is used, with a channel of
	// the session; it declares the topology. An error closes the session, and
	// it is tried again after a pause.
	Setup func(ctx context.Context, ch Declarer) error
	Log   *slog.Logger
	// OnState is told of each change: connected, lost (with the cause),
	// blocked, unblocked, waiting. Calls come one at a time and hold the session
	// up: it must return soon, and not publish. May be nil.
	OnState func(State, error)
}

func (c Config) withDefaults() Config {
	c.Heartbeat = cmp.Or(c.Heartbeat, DefaultHeartbeat)
	c.ConfirmTimeout = cmp.Or(c.ConfirmTimeout, DefaultConfirmTimeout)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	c.Log = c.Log.With("amqp", c.Name)
	return c
}

// State of a session, for readiness and metrics.
type State string

// The states.
const (
	StateWaiting   State = "waiting" // no broker can be reached
	StateConnected State = "connected"
	StateLost      State = "lost"
	StateBlocked   State = "blocked" // the broker's alarm holds publishers back
	StateUnblocked State = "unblocked"
)

// states reports changes of state to the log and to OnState, one at a time.
type states struct {
	cfg Config

	mu   sync.Mutex
	last State
	text string
}

// set reports st unless nothing changed: a broker that stays away with the same
// error is one change, not one per attempt.
func (s *states) set(st State, cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	text := ""
	if cause != nil {
		text = cause.Error()
	}
	if s.last == st && s.text == text {
		return
	}
	s.last, s.text = st, text
	if st == StateConnected || st == StateUnblocked {
		s.cfg.Log.Info("amqp session", "state", string(st))
	} else {
		s.cfg.Log.Warn("amqp session", "state", string(st), "cause", text)
	}
	if s.cfg.OnState != nil {
		s.cfg.OnState(st, cause)
	}
}
