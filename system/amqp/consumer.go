package amqp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"
)

// Defaults of [ConsumerConfig].
const (
	DefaultUnackedGrace = 30 * time.Second
	// stopGrace is how long handlers get to return after their context was
	// cancelled at the end of the drain.
	stopGrace = 5 * time.Second
)

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

	acker *acker
}

// acker makes the ack happen at most once: a second basic.ack of a tag closes
// the channel with everything that is unacked on it.
type acker struct {
	once sync.Once
	ack  func() error
	err  error
	done atomic.Bool
}

// NewDelivery joins a delivery and the function that acks it: for tests of
// handlers.
func NewDelivery(d Delivery, ack func() error) *Delivery {
	d.acker = &acker{ack: ack}
	return &d
}

// Ack settles the delivery. After the session has ended it does nothing and
// returns [ErrStaleSession]. A second call returns what the first one did. A nil
// error says that the ack was written; if the session is lost in that moment
// the message can still come again.
func (d *Delivery) Ack() error {
	a := d.acker
	a.once.Do(func() {
		a.err = a.ack()
		a.done.Store(true)
	})
	return a.err
}

// Handler processes one delivery. It must call Ack once the message is settled,
// before it returns. While it runs, its place in the prefetch window is taken.
// It is never asked to decide about a requeue: a delivery that was not acked
// comes again when its session ends, and [ConsumerConfig.UnackedGrace] sees to
// that. The session may end while a handler runs; its ctx goes on, since a mail
// half sent does not get better by stopping.
type Handler func(ctx context.Context, d *Delivery)

// ConsumerConfig of one queue.
type ConsumerConfig struct {
	Config
	Queue string
	// Consumers is the number of channels, each with a consumer of its own;
	// Prefetch is per consumer: the messages it holds, in work or waiting.
	Consumers int
	Prefetch  int
	// Parallel is how many deliveries of one consumer are in work at a time,
	// default 1: with 8 consumers and prefetch 10, 8 mails are on their way and
	// up to 72 wait next to them (M6-03). It holds over reconnects: a handler
	// that still works for a lost session keeps its place.
	Parallel int
	// AckWithin is how long acks may be collected before they are written, at
	// most until half of the places that the prefetch leaves beside the handlers
	// are taken by them. Default 0: each is written at once. What it costs: as
	// many settled messages more can come again after a crash.
	AckWithin time.Duration
	// UnackedGrace, default 30 s: a delivery whose handler returned without Ack
	// is given back by opening its consumer's channel anew after this time, so
	// that no message stays unacked for ever (M6-18, TRAP-M6-11).
	UnackedGrace time.Duration
	Handle       Handler
}

func (c ConsumerConfig) validate() error {
	switch {
	case c.Queue == "":
		return errors.New("amqp consumer: no queue is configured")
	case c.Consumers < 1:
		return fmt.Errorf("amqp consumer of %s: %d consumers, need at least 1", c.Queue, c.Consumers)
	case c.Prefetch < 1:
		return fmt.Errorf("amqp consumer of %s: prefetch %d, need at least 1 (0 would be without a limit)", c.Queue, c.Prefetch)
	case c.Parallel < 1 || c.Parallel > c.Prefetch:
		return fmt.Errorf("amqp consumer of %s: %d parallel handlers, need 1 to prefetch %d", c.Queue, c.Parallel, c.Prefetch)
	case c.AckWithin < 0:
		return fmt.Errorf("amqp consumer of %s: acks within %v, must not be negative", c.Queue, c.AckWithin)
	case c.Handle == nil:
		return fmt.Errorf("amqp consumer of %s: no handler", c.Queue)
	}
	return nil
}

// Consumer consumes one queue over one connection that it keeps.
//
// A channel that the broker closes, or a consumer that it cancels, is opened
// anew on the same connection and leaves the other consumers at work.
type Consumer struct {
	cfg    ConsumerConfig
	states *states

	mu        sync.Mutex
	consuming int // lanes that consume now

	handlers sync.WaitGroup
}

// NewConsumer makes a consumer; Run connects it.
func NewConsumer(cfg ConsumerConfig) *Consumer {
	cfg.Config = cfg.withDefaults()
	cfg.Parallel = cmp.Or(cfg.Parallel, 1)
	cfg.UnackedGrace = cmp.Or(cfg.UnackedGrace, DefaultUnackedGrace)
	return &Consumer{cfg: cfg, states: &states{cfg: cfg.Config}}
}

// Connected reports whether every consumer of the queue is consuming now, for
// readiness.
func (c *Consumer) Connected() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.consuming == c.cfg.Consumers
}

// Run consumes until ctx ends, then stops taking deliveries, gives those that
// no handler has seen back to the queue, waits until the handlers have returned
// (their ctx is not cancelled before drain has passed), and closes. It returns
// nil, or an error when the configuration is unusable or handlers did not
// return within 5 s after their ctx was cancelled. A Consumer runs once.
func (c *Consumer) Run(ctx context.Context, drain time.Duration) error {
	if err := c.cfg.validate(); err != nil {
		return err
	}
	d, err := newDialer(c.cfg.Config)
	if err != nil {
		return err
	}
	work, cancelWork := context.WithCancel(context.WithoutCancel(ctx))
	defer cancelWork()
	lanes := make([]*lane, c.cfg.Consumers)
	for i := range lanes {
		lanes[i] = &lane{c: c, n: i, work: work, places: make(chan struct{}, c.cfg.Parallel)}
	}

	var last *link
	var pause backoff
	for ctx.Err() == nil {
		began := time.Now()
		last = c.runSession(ctx, d, lanes)
		if time.Since(began) > healthyAfter {
			pause.reset()
		}
		if ctx.Err() == nil {
			pause.wait(ctx)
		}
	}
	// The link is kept open so that the handlers' acks still count.
	err = c.drain(drain, cancelWork)
	if last != nil {
		for _, ln := range lanes {
			ln.feed.close(last)
		}
		last.close()
	}
	return err
}

// runSession opens a link and consumes until it is lost or ctx ends. In the
// latter case it returns the link, still open.
func (c *Consumer) runSession(ctx context.Context, d *dialer, lanes []*lane) *link {
	l, err := c.open(ctx, d)
	if err != nil {
		if ctx.Err() == nil {
			c.states.set(StateWaiting, err)
		}
		return nil
	}
	sess, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var running sync.WaitGroup
	for _, ln := range lanes {
		running.Go(func() { ln.serve(sess, l) })
	}
	var cause error
	select {
	case <-ctx.Done():
	case e := <-l.closed:
		cause = closeCause("connection", e)
	}
	cancel(cause)
	running.Wait()
	if cause == nil {
		return l
	}
	l.close()
	return nil
}

func (c *Consumer) open(ctx context.Context, d *dialer) (*link, error) {
	l, err := d.dial(ctx)
	if err != nil {
		return nil, err
	}
	if c.cfg.Setup == nil {
		return l, nil
	}
	err = l.within(ctx, setupTimeout, func(ctx context.Context) error {
		ch, err := l.Channel()
		if err != nil {
			return fmt.Errorf("open channel: %w", err)
		}
		if err := c.cfg.Setup(ctx, ch); err != nil {
			return fmt.Errorf("setup: %w", err)
		}
		return ch.Close()
	})
	if err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

// drain waits for the handlers.
func (c *Consumer) drain(limit time.Duration, cancelWork context.CancelFunc) error {
	returned := make(chan struct{})
	go func() {
		c.handlers.Wait()
		close(returned)
	}()
	if waitFor(returned, limit) {
		return nil
	}
	cancelWork()
	if waitFor(returned, stopGrace) {
		return nil
	}
	return fmt.Errorf("amqp consumer of %s: handlers still running %v after their context was cancelled", c.cfg.Queue, stopGrace)
}

func waitFor(done <-chan struct{}, limit time.Duration) bool {
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case <-done:
		return true
	case <-t.C:
		return false
	}
}

// laneUp and laneDown keep count of the lanes that consume; the state is
// "connected" while all of them do.
func (c *Consumer) laneUp() {
	c.mu.Lock()
	c.consuming++
	all := c.consuming == c.cfg.Consumers
	c.mu.Unlock()
	if all {
		c.states.set(StateConnected, nil)
	}
}

func (c *Consumer) laneDown(cause error, stopping bool) {
	c.mu.Lock()
	wasAll := c.consuming == c.cfg.Consumers
	c.consuming--
	c.mu.Unlock()
	if wasAll && !stopping {
		c.states.set(StateLost, cause)
	}
}

// lane is one of the consumers. It outlives sessions, and so does the bound on
// its handlers.
type lane struct {
	c      *Consumer
	n      int
	work   context.Context // of the handlers
	places chan struct{}   // one token per running handler
	feed   *feed           // the last one; nil before
}

// serve keeps a channel consuming until sess ends.
func (ln *lane) serve(sess context.Context, l *link) {
	var pause backoff
	for sess.Err() == nil {
		began := time.Now()
		err := ln.consume(sess, l)
		if time.Since(began) > healthyAfter {
			pause.reset()
		}
		if sess.Err() != nil || l.IsClosed() {
			return
		}
		ln.c.cfg.Log.Warn("amqp consumer channel", "queue", ln.c.cfg.Queue, "cause", err.Error())
		pause.wait(sess)
	}
}

// feed is one channel with its consumer: a lane's session. Its tags mean nothing
// anywhere else.
type feed struct {
	ch         *amqp091.Channel
	tag        string
	deliveries <-chan amqp091.Delivery
	closed     chan *amqp091.Error
	cancelled  chan string
	unacked    chan struct{} // a handler returned without an ack
	acks       *acks
	ended      atomic.Bool
}

var errUnacked = errors.New("a delivery was left unacked")

// consume runs one feed and returns the cause of its end.
func (ln *lane) consume(sess context.Context, l *link) error {
	f, err := ln.openFeed(l)
	ln.feed = f
	if err != nil {
		f.close(l)
		return err
	}
	ln.c.laneUp()
	cause := ln.pump(sess, f)
	stopping := sess.Err() != nil && !l.IsClosed()
	ln.c.laneDown(cause, stopping)
	if f.ch.IsClosed() {
		f.ended.Store(true)
		return cause
	}
	f.stop(l)
	if stopping { // the handlers at work still ack over this channel
		return cause
	}
	ln.idle(sess)
	f.close(l)
	return cause
}

func (ln *lane) openFeed(l *link) (*feed, error) {
	f := &feed{tag: "c" + strconv.Itoa(ln.n), unacked: make(chan struct{}, 1)}
	cfg := ln.c.cfg
	err := l.within(context.Background(), setupTimeout, func(context.Context) (err error) {
		if f.ch, err = l.Channel(); err != nil {
			return fmt.Errorf("open channel: %w", err)
		}
		f.acks = newAcks(cfg, f.ch.Ack)
		f.closed = f.ch.NotifyClose(make(chan *amqp091.Error, 1))
		f.cancelled = f.ch.NotifyCancel(make(chan string, 1))
		if err = f.ch.Qos(cfg.Prefetch, 0, false); err != nil {
			return fmt.Errorf("prefetch %d: %w", cfg.Prefetch, err)
		}
		if f.deliveries, err = f.ch.Consume(cfg.Queue, f.tag, false, false, false, false, nil); err != nil {
			return fmt.Errorf("consume %s: %w", cfg.Queue, err)
		}
		return nil
	})
	return f, err
}

// pump hands deliveries to handlers until the feed or sess ends. It takes a
// place first and a delivery then: what has no place waits in the prefetch
// buffer and can be given back.
func (ln *lane) pump(sess context.Context, f *feed) error {
	var grace <-chan time.Time
	deliveries, held := f.deliveries, false
	defer func() {
		if held {
			<-ln.places
		}
	}()
	for {
		var place chan<- struct{}
		var next <-chan amqp091.Delivery
		if held {
			next = deliveries
		} else {
			place = ln.places
		}
		select {
		case place <- struct{}{}:
			held = true
		case d, ok := <-next:
			if !ok { // the reason follows over closed or cancelled
				deliveries = nil
				continue
			}
			held = false
			ln.start(f, d)
		case <-sess.Done():
			return context.Cause(sess)
		case err := <-f.closed:
			return closeCause("channel", err)
		case <-f.cancelled:
			return errors.New("consumer cancelled by the broker")
		case <-f.unacked:
			if grace == nil {
				grace = time.After(ln.c.cfg.UnackedGrace)
			}
		case <-grace:
			return errUnacked
		}
	}
}

// start runs the handler in the place that pump has taken.
func (ln *lane) start(f *feed, in amqp091.Delivery) {
	d := NewDelivery(Delivery{
		Body:          in.Body,
		Headers:       in.Headers,
		MessageID:     in.MessageId,
		RoutingKey:    in.RoutingKey,
		Queue:         ln.c.cfg.Queue,
		Redelivered:   in.Redelivered,
		DeliveryCount: deliveryCount(in.Headers),
	}, func() error { return f.ack(in.DeliveryTag) })
	ln.c.handlers.Go(func() {
		defer func() { <-ln.places }()
		ln.c.cfg.Handle(ln.work, d)
		if d.acker.done.Load() || f.ended.Load() {
			return
		}
		ln.c.cfg.Log.Warn("amqp handler returned without ack", "queue", d.Queue, "message_id", d.MessageID)
		select {
		case f.unacked <- struct{}{}:
		default:
		}
	})
}

func (f *feed) ack(tag uint64) error {
	if f.ended.Load() {
		return ErrStaleSession
	}
	return f.acks.add(tag)
}

// stop takes no more deliveries and gives back those that no handler has seen.
// They are requeued here and now, not because of an error: with the channel
// open they would wait until the last handler is done.
func (f *feed) stop(l *link) {
	_ = l.within(context.Background(), closeTimeout, func(context.Context) error {
		if err := f.ch.Cancel(f.tag, false); err != nil {
			return err
		}
		for d := range f.deliveries {
			if err := f.ch.Nack(d.DeliveryTag, false, true); err != nil {
				return err
			}
		}
		return nil
	}) // an error means that the link is gone, and the broker requeues by itself
}

// close ends the feed; the broker requeues what is unacked on it.
func (f *feed) close(l *link) {
	if f == nil || f.ended.Swap(true) || f.ch == nil {
		return
	}
	_ = l.within(context.Background(), closeTimeout, func(context.Context) error { return errors.Join(f.acks.flush(), f.ch.Close()) })
}

// idle waits until no handler of the lane runs, or sess ends.
func (ln *lane) idle(sess context.Context) {
	taken := 0
	defer func() {
		for range taken {
			<-ln.places
		}
	}()
	for range cap(ln.places) {
		select {
		case ln.places <- struct{}{}:
			taken++
		case <-sess.Done():
			return
		}
	}
}

// deliveryCount reads the quorum queue's own count. RabbitMQ sends 0 on a first
// delivery up to 3.11, and no header from 3.12 on.
func deliveryCount(h amqp091.Table) int64 {
	switch n := h["x-delivery-count"].(type) {
	case int64:
		return n
	case int32:
		return int64(n)
	default:
		return 0
	}
}
