// Package socket holds what every fake server needs of the operating system: a
// listening socket that can be shut and opened again, the knowledge whether the
// far end of a connection is gone, and a clock that nothing bends.
//
// It imports nothing of this module.
package socket

import (
	"errors"
	"fmt"
	"net"
	"sync"
)

// Gate is a listening socket that can be shut and opened again on the same
// port while a server waits in Accept.
type Gate struct {
	address string

	mu     sync.Mutex
	l      net.Listener // nil while shut
	opened chan struct{}
	closed bool
}

// Open listens on a TCP address.
func Open(addr string) (*Gate, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, err
	}
	return &Gate{address: l.Addr().String(), l: l, opened: make(chan struct{})}, nil
}

// Addr is the host and port that was listened on first.
func (g *Gate) Addr() string { return g.address }

// Accept waits for the next connection, also while the gate is shut; it fails
// with net.ErrClosed once the gate is closed.
func (g *Gate) Accept() (net.Conn, error) {
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

// Shut closes the socket: the kernel refuses new connections.
func (g *Gate) Shut() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.l == nil || g.closed {
		return nil
	}
	err := g.l.Close()
	g.l = nil
	return err
}

// Reopen listens again on the same port.
func (g *Gate) Reopen() error {
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

// Close ends Accept for good.
func (g *Gate) Close() error {
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
