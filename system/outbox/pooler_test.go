package outbox

import (
	"fmt"
	"net"
	"net/url"
	"testing"

	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/stretchr/testify/require"
)

// TRAP-2-9: through a transaction pooler, which gives its client a cancel key of
// its own making since it has no backend for it yet, no session is opened, so
// that nobody believes to hold a lock that lives in somebody else's session. A
// proxy that passes the server's key on is no pooler.
func TestNoSessionThroughAPooler(t *testing.T) {
	t.Parallel()
	direct := newDatabase(t)
	for name, c := range map[string]struct {
		pid  func(uint32) uint32
		want error
	}{
		"pooler": {func(pid uint32) uint32 { return pid + 1 }, errPooled},
		"proxy":  {func(pid uint32) uint32 { return pid }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := fast(between(t, direct, c.pid), "127.0.0.1:1", "a").withDefaults()
			s, err := openSession(t.Context(), &cfg)
			require.ErrorIs(t, err, c.want)
			if s != nil {
				s.close()
			}
		})
	}
}

// between returns the database's URL through a proxy that changes the process id
// of the cancel key.
func between(t *testing.T, database string, pid func(uint32) uint32) string {
	t.Helper()
	u, err := url.Parse(database)
	require.NoError(t, err)
	server := u.Host
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	go func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer client.Close()
				_ = pass(client, server, pid) // ends when either side does
			}()
		}
	}()
	u.Host = l.Addr().String()
	q := u.Query()
	q.Set("sslmode", "disable")
	u.RawQuery = q.Encode()
	return u.String()
}

func pass(client net.Conn, server string, pid func(uint32) uint32) error {
	conn, err := net.Dial("tcp", server)
	if err != nil {
		return fmt.Errorf("dial: %w", err)
	}
	defer conn.Close()
	back, front := pgproto3.NewBackend(client, client), pgproto3.NewFrontend(conn, conn)
	hello, err := back.ReceiveStartupMessage()
	if err != nil {
		return err
	}
	front.Send(hello)
	if err := front.Flush(); err != nil {
		return err
	}
	go func() {
		defer conn.Close()
		for {
			m, err := back.Receive()
			if err != nil {
				return
			}
			front.Send(m)
			if front.Flush() != nil {
				return
			}
		}
	}()
	for {
		m, err := front.Receive()
		if err != nil {
			return err
		}
		if key, ok := m.(*pgproto3.BackendKeyData); ok {
			key.ProcessID = pid(key.ProcessID)
		}
		back.Send(m)
		if err := back.Flush(); err != nil {
			return err
		}
	}
}
