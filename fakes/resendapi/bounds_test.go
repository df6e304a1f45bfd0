package resendapi

import (
	"bytes"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestContentsAreBounded: beyond the bound the oldest contents go. The mails do
// not: a reader that takes 404 for proof of absence must not get it.
func TestContentsAreBounded(t *testing.T) {
	c := start(t, Options{KeepMails: 40 << 20})
	first := c.ok(c.send("k", "ann@x.test")).id(t)
	for range 12 {
		c.srv.mails.put(append([]byte("{}"), bytes.Repeat([]byte{' '}, 8<<20)...), entry{})
	}
	last := c.ok(c.send("k2", "bob@x.test")).id(t)
	require.LessOrEqual(t, c.srv.mails.total, int64(40<<20+2*segmentSize))
	r := c.do("GET", "/emails/"+first, "")
	require.Equal(t, 500, r.status)
	require.Contains(t, r.body, errDropped.Error())
	c.ok(c.do("GET", "/emails/"+last, ""))
	c.ok(c.do("GET", "/emails?limit=1", ""))
	r = c.do("GET", "/emails?limit=100", "")
	require.Equal(t, 500, r.status, "nor may a list leave it out")
	require.Equal(t, first, c.ok(c.send("k", "ann@x.test")).id(t), "the key still knows its answer")
}

// TestThousandSlowClients: connections that send half a request and wait keep
// nobody from being served; one too many is closed.
func TestThousandSlowClients(t *testing.T) {
	c := start(t, Options{MaxConnections: 1001})
	for i := range 1000 {
		nc, err := net.Dial("tcp", c.srv.Addr())
		require.NoError(t, err)
		defer nc.Close()
		_, err = fmt.Fprintf(nc, "POST /emails HTTP/1.1\r\nHost: x\r\nIdempotency-Key: slow%d\r\nContent-Length: 1000\r\n\r\n{", i)
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool { return c.srv.Totals().Open == 1000 }, 10*time.Second, 5*time.Millisecond)
	c.ok(c.send("k", "ann@x.test"))
	nc, err := net.Dial("tcp", c.srv.Addr())
	require.NoError(t, err)
	defer nc.Close()
	_, err = nc.Read(make([]byte, 1))
	require.Error(t, err, "one connection too many")
	require.EqualValues(t, 1, c.srv.Totals().Stored)
}
