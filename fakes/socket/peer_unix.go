//go:build unix

package socket

import (
	"context"
	"net"
	"syscall"
	"time"
)

// PeerGone reports whether the far end of the connection is known to be closed:
// its FIN is the next thing in the socket, or a reset came. Data that waits in
// front of a FIN hides it; then the answer is false.
func PeerGone(c net.Conn) bool {
	raw := rawConn(c)
	if raw == nil {
		return false
	}
	gone := false
	err := raw.Control(func(fd uintptr) { gone, _ = peek(fd) })
	return err == nil && gone
}

// WatchPeer returns true as soon as the far end is known to be closed, false
// when ctx ends or data stands in front. Nobody may read from c meanwhile.
func WatchPeer(ctx context.Context, c net.Conn) bool {
	raw := rawConn(c)
	if raw == nil {
		return false
	}
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = c.SetReadDeadline(time.Unix(1, 0))
		close(interrupted)
	})
	gone := false
	err := raw.Read(func(fd uintptr) bool {
		g, again := peek(fd)
		gone = g
		return !again
	})
	if !stop() {
		<-interrupted
		_ = c.SetReadDeadline(time.Time{})
	}
	return err == nil && gone
}

func peek(fd uintptr) (gone, again bool) {
	var b [1]byte
	n, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	switch {
	case err == syscall.EAGAIN || err == syscall.EINTR:
		return false, true
	case err != nil:
		return true, false
	}
	return n == 0, false
}

func rawConn(c net.Conn) syscall.RawConn {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil
	}
	return raw
}
