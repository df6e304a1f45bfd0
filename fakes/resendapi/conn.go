package resendapi

import (
	"context"
	"errors"
	"net"
	"sync"

	"mailproof/fakes/ledger"
	"mailproof/fakes/script"
)

// conn is one connection, for the ledger's sessions and for faults that need
// the socket.
type conn struct {
	*net.TCPConn
	srv  *Server
	id   int64
	from int64

	mu       sync.Mutex
	client   string
	last     string // the last request: "POST /emails"
	requests int
	strikes  []script.Strike // outside of any mail
	closed   bool
}

type connKey struct{}

// connOf is the connection that a request came over.
func connOf(ctx context.Context) *conn {
	c, _ := ctx.Value(connKey{}).(*conn)
	return c
}

// request notes that one more was read and returns its number.
func (c *conn) request(client, line string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.client, c.last = client, line
	c.requests++
	return c.requests
}

func (c *conn) note(s script.Strike) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.strikes = append(c.strikes, s)
}

// Close is called by net/http, or by a fault.
func (c *conn) Close() error {
	c.mu.Lock()
	was := c.closed
	c.closed = true
	s := ledger.Session{ID: c.id, Client: c.client, From: c.from, Last: c.last, Mails: c.requests}
	for _, st := range c.strikes {
		s.Fault, s.Rules = joined(s.Fault, st.Action.Name()), append(s.Rules, st.Rule)
	}
	c.mu.Unlock()
	if !was {
		// First the record, then the socket: who sees it closed finds it.
		c.srv.leave(c)
		s.To = c.srv.opt.Clock()
		c.srv.ledger.AddSession(s)
	}
	return c.TCPConn.Close()
}

// kill closes from this end: with a FIN, or with a reset.
func (c *conn) kill(reset bool) {
	if reset {
		_ = c.SetLinger(0)
	}
	_ = c.Close()
}

func joined(list, more string) string {
	if list == "" {
		return more
	}
	return list + "," + more
}

// acceptor is the listener that net/http sees: rules of stage connect strike
// before it.
type acceptor struct {
	s     *Server
	ready chan *conn
}

func (a acceptor) Accept() (net.Conn, error) {
	select {
	case c := <-a.ready:
		return c, nil
	case <-a.s.done:
		return nil, net.ErrClosed
	}
}

func (a acceptor) Close() error { return a.s.gate.Close() }

func (a acceptor) Addr() net.Addr {
	addr, _ := net.ResolveTCPAddr("tcp", a.s.gate.Addr())
	return addr
}

// run takes connections off the gate until it is closed.
func (a acceptor) run() error {
	for {
		nc, err := a.s.gate.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		tcp, ok := nc.(*net.TCPConn)
		if !ok {
			_ = nc.Close()
			continue
		}
		c := &conn{TCPConn: tcp, srv: a.s, from: a.s.opt.Clock()}
		if !a.s.enter(c) {
			_ = nc.Close()
			continue
		}
		a.admit(c)
	}
}

// admit hands the connection on, in a goroutine of its own if a rule may make
// it wait.
func (a acceptor) admit(c *conn) {
	if a.s.engine.Quiet() {
		a.pass(c)
		return
	}
	if !a.s.begin() {
		_ = c.Close()
		return
	}
	go func() {
		defer a.s.running.Done()
		x := &call{s: a.s, conn: c}
		if !x.at(StageConnect).gone {
			a.pass(c)
		}
	}()
}

func (a acceptor) pass(c *conn) {
	select {
	case a.ready <- c:
	case <-a.s.done:
		_ = c.Close()
	}
}
