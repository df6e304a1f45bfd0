package smtp

import "net"

// acceptor is the listener that go-smtp sees.
type acceptor struct{ s *Server }

func (a acceptor) Accept() (net.Conn, error) {
	for {
		nc, err := a.s.gate.Accept()
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

func (a acceptor) Close() error { return a.s.gate.Close() }

func (a acceptor) Addr() net.Addr {
	addr, _ := net.ResolveTCPAddr("tcp", a.s.gate.Addr())
	return addr
}
