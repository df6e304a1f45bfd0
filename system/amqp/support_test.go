package amqp

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"
)

const patience = 20 * time.Second // for events on a loaded machine; never slept through

// eventually polls a condition that has no event of its own: the broker's view.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	require.Eventually(t, cond, patience, 20*time.Millisecond, what)
}

// proxy stands between a client and the broker. It can cut every connection,
// refuse new ones, hold back what the broker says, and speak in its place.
type proxy struct {
	t      *testing.T
	ln     net.Listener
	target string
	url    string

	mu     sync.Mutex
	pairs  map[*pair]bool
	refuse bool
	held   chan struct{} // closed while the broker may speak
	opened atomic.Int64
	wg     sync.WaitGroup
}

type pair struct {
	client, broker net.Conn
	say            sync.Mutex // frames of one writer at a time towards the client
}

func newProxy(t *testing.T, target string) *proxy {
	t.Helper()
	u, err := url.Parse(target)
	require.NoError(t, err)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &proxy{t: t, ln: ln, target: u.Host, pairs: make(map[*pair]bool), held: make(chan struct{})}
	close(p.held)
	u.Host = ln.Addr().String()
	p.url = u.String()
	p.wg.Go(p.accept)
	t.Cleanup(func() {
		_ = ln.Close()
		p.release()
		p.cut()
		p.wg.Wait()
	})
	return p
}

func (p *proxy) accept() {
	for {
		c, err := p.ln.Accept()
		if err != nil {
			return
		}
		p.opened.Add(1)
		p.mu.Lock()
		refuse := p.refuse
		p.mu.Unlock()
		if refuse {
			_ = c.Close()
			continue
		}
		b, err := net.Dial("tcp", p.target)
		if err != nil {
			_ = c.Close()
			continue
		}
		pr := &pair{client: c, broker: b}
		p.mu.Lock()
		p.pairs[pr] = true
		p.mu.Unlock()
		p.wg.Go(func() { _, _ = io.Copy(b, c); pr.close() })
		p.wg.Go(func() { p.speak(pr); pr.close() })
	}
}

// speak forwards the broker's words, unless they are held back.
func (p *proxy) speak(pr *pair) {
	buf := make([]byte, 64<<10)
	for {
		n, err := pr.broker.Read(buf)
		if n > 0 {
			p.mu.Lock()
			held := p.held
			p.mu.Unlock()
			<-held
			pr.say.Lock()
			_, werr := pr.client.Write(buf[:n])
			pr.say.Unlock()
			if werr != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func (pr *pair) close() {
	_ = pr.client.Close()
	_ = pr.broker.Close()
}

// cut closes every connection that is open.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for pr := range p.pairs {
		pr.close()
		delete(p.pairs, pr)
	}
}

// hold keeps back what the broker says from now on.
func (p *proxy) hold() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held = make(chan struct{})
}

func (p *proxy) release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.held:
	default:
		close(p.held)
	}
}

func (p *proxy) refuseNew(v bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refuse = v
}

// inject says one frame in the broker's place. The link must be quiet, so that
// the frame does not land inside another one.
func (p *proxy) inject(frame []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for pr := range p.pairs {
		pr.say.Lock()
		_, err := pr.client.Write(frame)
		pr.say.Unlock()
		require.NoError(p.t, err)
	}
}

// method is a method frame of channel 0 (AMQP 0-9-1, 2.3.5).
func method(class, id byte, args ...byte) []byte {
	payload := append([]byte{0, class, 0, id}, args...)
	frame := []byte{1, 0, 0, 0, 0, 0, byte(len(payload))}
	return append(append(frame, payload...), 0xCE)
}

// broker is the real one, seen from a test.
type broker struct {
	t    *testing.T
	url  string
	conn *amqp091.Connection
}

var names atomic.Int64

func name(prefix string) string { return fmt.Sprintf("%s.%d", prefix, names.Add(1)) }

func connect(t *testing.T) *broker {
	t.Helper()
	u := brokerURL(t)
	conn, err := amqp091.Dial(u)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return &broker{t: t, url: u, conn: conn}
}

func (b *broker) channel() *amqp091.Channel {
	b.t.Helper()
	ch, err := b.conn.Channel()
	require.NoError(b.t, err)
	return ch
}

// queue declares a quorum queue that is reached through the default exchange.
func (b *broker) queue(args amqp091.Table) string {
	b.t.Helper()
	q := name("test.q")
	if args == nil {
		args = amqp091.Table{}
	}
	args["x-queue-type"] = "quorum"
	_, err := b.channel().QueueDeclare(q, true, false, false, false, args)
	require.NoError(b.t, err)
	b.t.Cleanup(func() { b.deleteQueue(q) })
	return q
}

func (b *broker) deleteQueue(q string) {
	ch, err := b.conn.Channel()
	if err != nil {
		return
	}
	_, _ = ch.QueueDelete(q, false, false, false)
	_ = ch.Close()
}

// ready is the number of messages that wait for a consumer.
func (b *broker) ready(q string) int {
	ch := b.channel()
	defer ch.Close()
	st, err := ch.QueueDeclarePassive(q, true, false, false, false, nil)
	require.NoError(b.t, err)
	return st.Messages
}

// put publishes with confirms, past the code under test.
func (b *broker) put(q string, ids ...string) {
	b.t.Helper()
	ch := b.channel()
	defer ch.Close()
	require.NoError(b.t, ch.Confirm(false))
	for _, id := range ids {
		dc, err := ch.PublishWithDeferredConfirm("", q, true, false, amqp091.Publishing{
			MessageId: id, Body: []byte(id), DeliveryMode: amqp091.Persistent,
		})
		require.NoError(b.t, err)
		require.True(b.t, dc.Wait())
	}
}

// take drains a queue and returns its messages in order.
func (b *broker) take(q string) []amqp091.Delivery {
	b.t.Helper()
	var out []amqp091.Delivery
	for n := b.ready(q); n > 0; n = b.ready(q) {
		ch := b.channel()
		deliveries, err := ch.Consume(q, "", true, false, false, false, nil)
		require.NoError(b.t, err)
		for range n {
			select {
			case d := <-deliveries:
				out = append(out, d)
			case <-time.After(patience):
				require.FailNow(b.t, "the queue holds back what it counts as ready")
			}
		}
		require.NoError(b.t, ch.Close())
	}
	return out
}

// leftover is what is in the queue after its consumers have gone. The broker
// gives their unacked messages back in its own time; that there are none shows
// only in that none appear for a while.
func (b *broker) leftover(q string) []amqp091.Delivery {
	b.t.Helper()
	var out []amqp091.Delivery
	for quiet := time.Now(); time.Since(quiet) < time.Second; time.Sleep(50 * time.Millisecond) {
		if more := b.take(q); len(more) > 0 {
			out, quiet = append(out, more...), time.Now()
		}
	}
	return out
}

// stateLog collects what OnState says.
type stateLog struct {
	mu   sync.Mutex
	seen []State
	errs []error
	c    chan State
}

func newStateLog() *stateLog { return &stateLog{c: make(chan State, 1000)} }

func (l *stateLog) on(s State, err error) {
	l.mu.Lock()
	l.seen = append(l.seen, s)
	l.errs = append(l.errs, err)
	l.mu.Unlock()
	l.c <- s
}

// await skips states until s comes.
func (l *stateLog) await(t *testing.T, s State) {
	t.Helper()
	deadline := time.After(patience)
	for {
		select {
		case got := <-l.c:
			if got == s {
				return
			}
		case <-deadline:
			require.FailNow(t, "state did not come", "%s; seen %v", s, l.all())
		}
	}
}

func (l *stateLog) all() []State {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]State(nil), l.seen...)
}

func testLog(t *testing.T) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), nil)).With("test", t.Name())
}

// startPublisher runs a publisher until the test ends.
func startPublisher(t *testing.T, cfg Config) (*Publisher, *stateLog) {
	t.Helper()
	st := newStateLog()
	cfg.OnState, cfg.Log, cfg.Name = st.on, testLog(t), t.Name()
	p := NewPublisher(cfg)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	return p, st
}

// running is a consumer at work.
type running struct {
	*Consumer
	states *stateLog
	stop   context.CancelFunc
	done   chan error
}

func startConsumer(t *testing.T, cfg ConsumerConfig, drain time.Duration) *running {
	t.Helper()
	st := newStateLog()
	cfg.OnState, cfg.Log, cfg.Name = st.on, testLog(t), t.Name()
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{Consumer: NewConsumer(cfg), states: st, stop: cancel, done: make(chan error, 1)}
	go func() { r.done <- r.Run(ctx, drain); close(r.done) }()
	t.Cleanup(func() {
		cancel()
		for range r.done { //nolint:revive // waits until Run has returned
		}
	})
	return r
}
