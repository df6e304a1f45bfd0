//go:build !unix

package smtp

import (
	"context"
	"net"
)

// peerGone is unknown here.
func peerGone(net.Conn) bool { return false }

// watchPeer is unknown here.
func watchPeer(context.Context, net.Conn) bool { return false }
