//go:build !unix

package socket

import (
	"context"
	"net"
)

// PeerGone is unknown here.
func PeerGone(net.Conn) bool { return false }

// WatchPeer is unknown here.
func WatchPeer(context.Context, net.Conn) bool { return false }
