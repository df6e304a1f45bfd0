// Package pgproxy is a proxy in front of a Postgres server that knows enough of
// the protocol to lose exactly the answer that matters: the statement was
// executed, its transaction is committed, the server has said so, and the client
// never hears of it. It can also refuse, reset, stall and slow down connections.
//
// It guarantees that a loss has happened as it is told: the server's
// CommandComplete was read, and the ReadyForQuery after it said that the session
// is outside of a transaction (PostgreSQL documentation, "Message Flow": an
// extended query outside of a transaction block commits at Sync, so that
// CommandComplete alone proves nothing). Only then are both sides closed.
//
// What it does not do: TLS (it declines, as a server without TLS does), and
// replication streams.
//
// It knows nothing of the system under test, and must not import system/.
package pgproxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"
)

// dialTimeout of the server behind the proxy.
const dialTimeout = 5 * time.Second

// Proxy stands between clients and one server.
type Proxy struct {
	server   string
	listener net.Listener

	mu       sync.Mutex
	sessions map[*session]struct{}
	losses   []*Loss
	refusing bool
	delay    time.Duration
	open     chan struct{} // closed while nothing is stalled
	refused  int
	stalled  int
	closed   bool

	all sync.WaitGroup
}

// Start listens on a free port of loopback for the server at host:port.
func Start(server string) (*Proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("postgres proxy: %w", err)
	}
	p := &Proxy{server: server, listener: l, sessions: map[*session]struct{}{}, open: make(chan struct{})}
	close(p.open)
	p.all.Go(p.accept)
	return p, nil
}

// Addr is the host and port that clients connect to.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Close ends the proxy and every connection through it.
func (p *Proxy) Close() error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	err := p.listener.Close()
	p.Reset()
	p.all.Wait()
	if err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("postgres proxy: %w", err)
	}
	return nil
}

func (p *Proxy) accept() {
	for {
		conn, err := p.listener.Accept()
		if err != nil {
			return // closed
		}
		p.all.Go(func() { p.serve(conn) })
	}
}

func (p *Proxy) serve(client net.Conn) {
	p.mu.Lock()
	turnedAway := p.refusing || p.closed
	if turnedAway {
		p.refused++
	}
	p.mu.Unlock()
	if turnedAway {
		reset(client)
		return
	}
	server, err := net.DialTimeout("tcp", p.server, dialTimeout)
	if err != nil {
		reset(client) // as the server itself would
		return
	}
	s := newSession(p, client, server)
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		s.cut()
		return
	}
	p.sessions[s] = struct{}{}
	p.mu.Unlock()
	s.run()
	p.mu.Lock()
	delete(p.sessions, s)
	p.mu.Unlock()
}

// reset closes a connection without the four-way goodbye: the other end reads
// "connection reset by peer".
func reset(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // on a closed socket: it is gone already
	}
	_ = c.Close()
}

// Refuse turns new connections away, or takes them again. Open ones go on.
func (p *Proxy) Refuse(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refusing = on
}

// Refused is how many connections were turned away so far.
func (p *Proxy) Refused() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.refused
}

// Reset cuts every open connection and returns how many there were. What the
// server was doing for them it may or may not complete.
func (p *Proxy) Reset() int {
	p.mu.Lock()
	all := make([]*session, 0, len(p.sessions))
	for s := range p.sessions {
		all = append(all, s)
	}
	p.mu.Unlock()
	for _, s := range all {
		s.cut()
	}
	return len(all)
}

// Stall lets nothing through in either direction until it is called again with
// false. Connections stay open: nobody learns of anything.
func (p *Proxy) Stall(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.open:
		if on {
			p.open = make(chan struct{})
		}
	default:
		if !on {
			close(p.open)
		}
	}
}

// Stalled is how many messages have had to wait so far.
func (p *Proxy) Stalled() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stalled
}

// Delay holds each answer back for d: whatever ends in ReadyForQuery.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

func (p *Proxy) answerDelay() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.delay
}

// gate is closed when a message may pass.
func (p *Proxy) gate() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.open:
	default:
		p.stalled++
	}
	return p.open
}

// Order says which answers are to be lost.
type Order struct {
	// Statement is text that the statement holds, in any case; "COMMIT" matches
	// the end of a transaction. Required.
	Statement string
	// After is text that a statement of the same transaction must have held
	// before, for a COMMIT; "" is any transaction.
	After string
	// Tag that the answer must have, "UPDATE 1"; "" is any. An answer with
	// another one is passed on.
	Tag string
	// Count of answers to lose, and Every: each that many-th execution only. 0
	// means 1.
	Count, Every int
}

// Loss is an order that was given.
type Loss struct {
	order Order
	done  chan struct{}

	mu    sync.Mutex
	seen  int // executions that matched
	lost  int
	tags  map[string]int // what the server had answered
	armed int            // executions under way whose answer shall be lost
}

// LoseAnswers gives an order; several may stand side by side.
func (p *Proxy) LoseAnswers(o Order) *Loss {
	o.Count, o.Every = max(1, o.Count), max(1, o.Every)
	l := &Loss{order: o, done: make(chan struct{}), tags: map[string]int{}}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.losses = append(p.losses, l)
	return l
}

// Cancel ends an order; answers under way still get lost.
func (p *Proxy) Cancel(l *Loss) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.losses {
		if p.losses[i] == l {
			p.losses = append(p.losses[:i:i], p.losses[i+1:]...)
			return
		}
	}
}

// Done is closed when as many answers were lost as were ordered.
func (l *Loss) Done() <-chan struct{} { return l.done }

// Lost is how many answers were lost, and what the server had said in them:
// command tags, "COMMIT" or "UPDATE 1", with their number.
func (l *Loss) Lost() (n int, tags map[string]int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	tags = make(map[string]int, len(l.tags))
	for tag, n := range l.tags {
		tags[tag] = n
	}
	return l.lost, tags
}

// arm picks the order that an execution falls under, nil for none.
func (p *Proxy) arm(statement string, before []string) *Loss {
	p.mu.Lock()
	losses := p.losses
	p.mu.Unlock()
	for _, l := range losses {
		if l.order.matches(statement, before) && l.take() {
			return l
		}
	}
	return nil
}

func (o Order) matches(statement string, before []string) bool {
	if !holds(statement, o.Statement) {
		return false
	}
	if o.After == "" {
		return true
	}
	for _, b := range before {
		if holds(b, o.After) {
			return true
		}
	}
	return false
}

// counts reports whether an answer with this tag is one to lose: the end of a
// transaction that failed is ROLLBACK, and a statement without an answer has none.
func (o Order) counts(tag string) bool {
	return tag != "" && tag != "ROLLBACK" && (o.Tag == "" || o.Tag == tag)
}

func holds(statement, text string) bool {
	return strings.Contains(strings.ToLower(statement), strings.ToLower(text))
}

// take counts an execution and reports whether its answer shall be lost.
func (l *Loss) take() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lost+l.armed >= l.order.Count {
		return false
	}
	if l.seen++; l.seen%l.order.Every != 0 {
		return false
	}
	l.armed++
	return true
}

// settle says what became of an execution that was taken.
func (l *Loss) settle(lost bool, tag string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.armed--
	if !lost {
		return
	}
	l.lost++
	l.tags[tag]++
	if l.lost == l.order.Count {
		close(l.done)
	}
}

// Await waits until the order is carried out.
func (l *Loss) Await(ctx context.Context) error {
	select {
	case <-l.done:
		return nil
	case <-ctx.Done():
		n, _ := l.Lost()
		return fmt.Errorf("%d of %d answers to %q were lost: %w", n, l.order.Count, l.order.Statement, ctx.Err())
	}
}
