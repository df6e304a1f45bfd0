// Package amqp is the session layer of the system over amqp091-go: it
// reconnects by itself, and it makes two mistakes impossible that the client
// library's own recovery allows.
//
//   - A delivery carries the generation of its session. An Ack of a delivery
//     from a session that has ended goes nowhere; it can never hit another
//     message that got the same tag.
//   - A publish whose confirm did not come is unknown ([ErrUnconfirmed]), never
//     reported as refused: the broker may have stored it.
//
// Publishing is confirmed and mandatory. Consuming is with manual acks.
//
// Package amqp imports nothing of the system but contract (topology).
package amqp

import (
	"context"
	"errors"
	"log/slog"
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
	// ErrStaleSession: the delivery's session has ended; the broker delivers
	// the message again.
	ErrStaleSession = errors.New("the session of this delivery has ended")
)

// Config of a publisher or consumer.
type Config struct {
	// URLs are tried in turn, from a random first one.
	URLs []string
	// Name is shown by the broker's tools: process and duty.
	Name string
	// Heartbeat, default 5 s: a dead link is seen after about two of them.
	Heartbeat time.Duration
	// ConfirmTimeout bounds the wait for one confirm, default 30 s (TRAP-2-10:
	// it must lie well above the p99 of confirm latency).
	ConfirmTimeout time.Duration
	// Setup is run on each new session before it is used, with the session's
	// channel; it declares the topology.
	Setup func(ctx context.Context, ch Declarer) error
	Log   *slog.Logger
	// OnState is told of each change: connected, lost (with the cause),
	// blocked, unblocked, waiting. May be nil.
	OnState func(State, error)
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

// Message is one message to publish.
type Message struct {
	Exchange   string
	RoutingKey string
	ID         string // message id, used to match returns
	Headers    map[string]any
	Body       []byte
}

// Delivery is one message handed to a handler.
type Delivery struct {
	Body        []byte
	Headers     map[string]any
	MessageID   string
	RoutingKey  string
	Queue       string
	Redelivered bool
	// DeliveryCount is how often the quorum queue had delivered it before.
	DeliveryCount int64

	ack func() error
}

// Ack settles the delivery. After the session has ended it does nothing and
// returns [ErrStaleSession].
func (d *Delivery) Ack() error { return d.ack() }

// Publisher publishes with confirms over one connection that it keeps.
type Publisher struct{ cfg Config }

// NewPublisher makes a publisher; Run connects it.
func NewPublisher(cfg Config) *Publisher { return &Publisher{cfg: cfg} }

// Run keeps the publisher connected until ctx ends.
func (p *Publisher) Run(ctx context.Context) error { return errors.New("not written yet") }

// Publish sends all messages pipelined, mandatory and persistent, and waits for
// every confirm. The i-th error is nil when message i was confirmed and routed,
// else one of ErrUnconfirmed, ErrUnroutable, ErrRefused. While no broker can be
// reached it waits until ctx ends.
func (p *Publisher) Publish(ctx context.Context, msgs []Message) []error { return nil }

// Handler processes one delivery. It must call Ack once the message is settled.
// It returns when it is done; while it runs its place in the prefetch window is
// taken. It is never asked to decide about a requeue: a delivery that was not
// acked comes again when the session ends.
type Handler func(ctx context.Context, d *Delivery)

// ConsumerConfig of one queue.
type ConsumerConfig struct {
	Config
	Queue string
	// Consumers is the number of handlers at work side by side, each with its
	// own channel; Prefetch is per consumer.
	Consumers int
	Prefetch  int
	Handle    Handler
}

// Consumer consumes one queue over one connection that it keeps.
type Consumer struct{ cfg ConsumerConfig }

// NewConsumer makes a consumer; Run connects it.
func NewConsumer(cfg ConsumerConfig) *Consumer { return &Consumer{cfg: cfg} }

// Run consumes until ctx ends, then stops taking deliveries, waits until the
// handlers have returned (their ctx is not cancelled before drain has passed),
// and closes.
func (c *Consumer) Run(ctx context.Context, drain time.Duration) error {
	return errors.New("not written yet")
}

// Connected reports whether every consumer of the queue is consuming now, for
// readiness.
func (c *Consumer) Connected() bool { return false }
