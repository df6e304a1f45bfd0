package smtp

import (
	"errors"
	"fmt"
	"net"
	"sync"
)

// gate is a listening socket that can be shut and opened again on the same
// port while a server waits in Accept.
type gate struct {
	address string

	mu     sync.Mutex
	l      net.Listener // nil while shut
	opened chan struct{}
	closed bool
}

func openGate(addr string) (*gate, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, err
	}
	return &gate{address: l.Addr().String(), l: l, opened: make(chan struct{})}, nil
}

func (g *gate) addr() string { return g.address }

func (g *gate) accept() (net.Conn, error) {
	for {
		g.mu.Lock()
		l, opened, closed := g.l, g.opened, g.closed
		g.mu.Unlock()
		if closed {
			return nil, net.ErrClosed
		}
		if l == nil {
			<-opened
			continue
		}
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			continue // shut or closed meanwhile: look again
		}
		return c, err
	}
}

func (g *gate) shut() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.l == nil || g.closed {
		return nil
	}
	err := g.l.Close()
	g.l = nil
	return err
}

func (g *gate) reopen() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.l != nil || g.closed {
		return nil
	}
	l, err := net.Listen("tcp", g.address)
	if err != nil {
		return fmt.Errorf("listening again on %s: %w", g.address, err)
	}
	g.l = l
	close(g.opened)
	g.opened = make(chan struct{})
	return nil
}

func (g *gate) close() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil
	}
	g.closed = true
	close(g.opened)
	if g.l == nil {
		return nil
	}
	err := g.l.Close()
	g.l = nil
	return err
}

// acceptor is the listener that go-smtp sees.
type acceptor struct{ s *Server }

func (a acceptor) Accept() (net.Conn, error) {
	for {
		nc, err := a.s.gate.accept()
		if err != nil {
			return nil, err
		}
		c := newConn(a.s, nc)
		if a.s.enter(c) {
			return c, nil
		}
		_ = nc.Close()
	}
}

func (a acceptor) Close() error { return a.s.gate.close() }

func (a acceptor) Addr() net.Addr {
	addr, _ := net.ResolveTCPAddr("tcp", a.s.gate.addr())
	return addr
}
