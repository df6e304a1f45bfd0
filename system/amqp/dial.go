package amqp

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"
)

const (
	dialTimeout      = 5 * time.Second  // one TCP connect
	handshakeTimeout = 10 * time.Second // TLS and AMQP until the connection is open
	setupTimeout     = 30 * time.Second // channel, confirm or qos, and Setup: declaring a quorum queue takes an election
	closeTimeout     = 2 * time.Second  // an orderly close; then the socket is closed
	// writeTimeout ends a write into a socket that nobody reads: amqp091-go's
	// writes know no context, and heartbeats from the broker keep such a
	// connection alive.
	writeTimeout = 30 * time.Second

	backoffMin = 100 * time.Millisecond
	backoffMax = 3 * time.Second
	// healthyAfter is how long a session must have lived to count as working.
	// One that dies sooner keeps the backoff growing: a broker that accepts us
	// and closes the channel at once must not be called in a loop.
	healthyAfter = 5 * time.Second
)

// link is an open connection and the socket beneath it.
type link struct {
	*amqp091.Connection
	sock   net.Conn
	closed chan *amqp091.Error // one value at most, then closed
}

// close ends the connection in order, and the socket in any case.
func (l *link) close() {
	hard := time.AfterFunc(closeTimeout, func() { _ = l.sock.Close() })
	defer hard.Stop()
	_ = l.Connection.Close() // closed already, or cut: nothing else to do
	_ = l.sock.Close()
}

// socket is a net.Conn whose writes end.
type socket struct{ net.Conn }

func (s socket) Write(b []byte) (int, error) {
	if err := s.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return 0, err
	}
	return s.Conn.Write(b)
}

// dialer opens links to one of several nodes.
type dialer struct {
	cfg  Config
	next int // index of the URL to try
}

func newDialer(cfg Config) (*dialer, error) {
	if len(cfg.URLs) == 0 {
		return nil, errors.New("amqp: no URL is configured")
	}
	for i, u := range cfg.URLs {
		if _, err := amqp091.ParseURI(u); err != nil {
			return nil, fmt.Errorf("amqp: URL %d of %d: %w", i+1, len(cfg.URLs), err)
		}
	}
	return &dialer{cfg: cfg, next: rand.IntN(len(cfg.URLs))}, nil
}

// dial tries each URL once, from the one after the last that was used, and
// returns the first link. The URL's password is in no error.
func (d *dialer) dial(ctx context.Context) (*link, error) {
	var errs []error
	for range d.cfg.URLs {
		u := d.cfg.URLs[d.next]
		d.next = (d.next + 1) % len(d.cfg.URLs)
		l, err := d.dialOne(ctx, u)
		if err == nil {
			return l, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		errs = append(errs, fmt.Errorf("%s: %w", hostOf(u), err))
	}
	return nil, errors.Join(errs...)
}

func (d *dialer) dialOne(ctx context.Context, u string) (*link, error) {
	l := &link{}
	stop := func() bool { return true }
	defer func() { stop() }()
	props := amqp091.NewConnectionProperties()
	props.SetClientConnectionName(d.cfg.Name)
	conn, err := amqp091.DialConfig(u, amqp091.Config{
		Heartbeat:  d.cfg.Heartbeat,
		Properties: props,
		Dial: func(network, addr string) (net.Conn, error) {
			sock, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			l.sock = sock
			stop = context.AfterFunc(ctx, func() { _ = sock.Close() }) // the handshake knows no context
			// Cleared by amqp091-go once the connection is open.
			return socket{sock}, sock.SetDeadline(time.Now().Add(handshakeTimeout))
		},
	})
	if err != nil {
		if l.sock != nil {
			_ = l.sock.Close()
		}
		return nil, err
	}
	l.Connection = conn
	l.closed = conn.NotifyClose(make(chan *amqp091.Error, 1))
	return l, nil
}

// within runs f, a sequence of calls on the link that know no context, and
// closes the socket beneath them when ctx ends or d has passed.
func (l *link) within(ctx context.Context, d time.Duration, f func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = l.sock.Close() })
	defer stop()
	err := f(ctx)
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("%w (%w)", ctx.Err(), err)
	}
	return err
}

func hostOf(u string) string {
	parsed, err := url.Parse(u)
	if err != nil {
		return "amqp"
	}
	return parsed.Host
}

// backoff is the pause between sessions: doubling, capped, and jittered so that
// the workers of a fleet do not come back in step.
type backoff struct{ d time.Duration }

func (b *backoff) reset() { b.d = 0 }

// wait pauses, or returns early when ctx ends.
func (b *backoff) wait(ctx context.Context) {
	b.d = min(max(2*b.d, backoffMin), backoffMax)
	t := time.NewTimer(b.d/2 + rand.N(b.d/2))
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
