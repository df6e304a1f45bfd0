package faults

import (
	"context"
	"fmt"
	"net/textproto"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/fakes/smtp"
	"mailproof/history"
)

// service is a process that sends one mail after the other. Asked to end, it
// finishes the mail under way, unless it is hasty; asked twice it ends at once,
// unless it is stubborn.
type service struct {
	server          *smtp.Server
	hasty, stubborn bool

	mu     sync.Mutex
	asked  chan struct{} // closed by the first signal
	atOnce chan struct{} // closed by whatever ends it at once
	ended  chan struct{}
	how    string
}

func startService(t *testing.T, server *smtp.Server) *service {
	s := &service{server: server}
	require.NoError(t, s.Begin(t.Context()))
	t.Cleanup(func() { require.NoError(t, s.Kill(context.Background())) })
	return s
}

func (*service) Name() string { return "service" }
func (*service) PID() int     { return 4711 }

func (s *service) Begin(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked, s.atOnce, s.ended = make(chan struct{}), make(chan struct{}), make(chan struct{})
	go s.life(s.asked, s.atOnce, s.ended)
	return nil
}

func (s *service) life(asked, atOnce <-chan struct{}, ended chan<- struct{}) {
	defer close(ended)
	for i := 0; ; i++ {
		sent := make(chan struct{})
		go func() { defer close(sent); s.send(fmt.Sprintf("k%d", i), atOnce) }()
		select {
		case <-sent:
		case <-atOnce:
			<-sent
			s.how = "signal: terminated"
			return
		}
		select {
		case <-asked:
			s.how = cleanEnd
			return
		default:
		}
	}
}

// send ends early, with its connection, when cut is closed.
func (s *service) send(key string, cut <-chan struct{}) {
	c, err := textproto.Dial("tcp", s.server.Addr())
	if err != nil {
		return
	}
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case <-cut:
		case <-done:
		}
		_ = c.Close()
	}()
	for _, line := range []string{"", "EHLO service.w1", "MAIL FROM:<a@x.test>", "RCPT TO:<b@x.test>", "DATA", "X-Dedupe-Key: " + key + "\r\n\r\nhello\r\n."} {
		if line != "" && c.PrintfLine("%s", line) != nil {
			return
		}
		if _, _, err := c.ReadResponse(0); err != nil {
			return
		}
	}
}

func (s *service) current() (asked, atOnce, ended chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked, s.atOnce, s.ended
}

func (s *service) Running() bool {
	_, _, ended := s.current()
	select {
	case <-ended:
		return false
	default:
		return true
	}
}

func (s *service) Terminate(context.Context) error {
	asked, atOnce, _ := s.current()
	select {
	case <-asked:
		if !s.stubborn {
			closeOnce(atOnce)
		}
	default:
		close(asked)
		if s.hasty {
			closeOnce(atOnce)
		}
	}
	return nil
}

func closeOnce(c chan struct{}) {
	select {
	case <-c:
	default:
		close(c)
	}
}

func (s *service) AwaitEnd(ctx context.Context) (string, error) {
	_, _, ended := s.current()
	select {
	case <-ended:
		return s.how, nil
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

func (s *service) AwaitReady(context.Context) error { return nil }

func (s *service) Kill(context.Context) error {
	_, atOnce, ended := s.current()
	closeOnce(atOnce)
	<-ended
	return nil
}

func (s *service) Restart(ctx context.Context) error {
	if err := s.Kill(ctx); err != nil {
		return err
	}
	return s.Begin(ctx)
}

// strike runs one act to its end.
func strike(t *testing.T, act Act) history.Fault {
	t.Helper()
	r := NewRun(InTurn(clock, nil, act)[0], clock)
	require.NoError(t, r.Inject(t.Context()))
	require.NoError(t, r.Wait(t.Context()))
	require.NoError(t, r.Heal(t.Context()))
	require.NoError(t, r.Witness(t.Context()))
	return r.Record()
}

func TestDrained(t *testing.T) {
	t.Parallel()
	server := server(t, smtp.Plain)
	s := startService(t, server)
	f := strike(t, Drained(server, s, 1))
	require.Equal(t, history.Installed, f.Outcome, f.Reason)
	require.Contains(t, f.Witness, "1 sessions were held after their dot when service got SIGTERM")
	require.Len(t, f.Keys, 1)
	require.True(t, s.Running(), "it was started again")
}

// A process that ends with a mail between dot and reply has not drained.
func TestHastyEndHasNoWitness(t *testing.T) {
	t.Parallel()
	server := server(t, smtp.Plain)
	s := startService(t, server)
	s.hasty = true
	f := strike(t, Drained(server, s, 1))
	require.Equal(t, history.Indeterminate, f.Outcome)
	require.Contains(t, f.Reason, "between dot and reply")
	require.Empty(t, f.Witness)
	require.True(t, s.Running(), "it was started again")
}

func TestStoppedAtOnce(t *testing.T) {
	t.Parallel()
	server := server(t, smtp.Plain)
	s := startService(t, server)
	f := strike(t, StoppedAtOnce(server, s))
	require.Equal(t, history.Installed, f.Outcome, f.Reason)
	require.Contains(t, f.Witness, "signal: terminated")
	require.True(t, s.Running())
}

// One that waits on after a second signal is found.
func TestStubbornProcessHasNoWitness(t *testing.T) {
	t.Parallel()
	server := server(t, smtp.Plain)
	s := startService(t, server)
	s.stubborn = true
	began := time.Now()
	f := strike(t, StoppedAtOnce(server, s))
	require.GreaterOrEqual(t, time.Since(began), atOnce, "it was given its time")
	require.Contains(t, f.Reason, "after a second signal")
	require.Empty(t, f.Witness)
}

func TestEnded(t *testing.T) {
	t.Parallel()
	s := startService(t, server(t, smtp.Plain))
	f := strike(t, Ended("asked-to-end", s))
	require.Contains(t, f.Witness, "service got SIGTERM and ended with exit status 0")
	s.hasty = true
	f = strike(t, Ended("asked-to-end", s))
	require.Contains(t, f.Reason, "service ended with signal: terminated")
}

func TestNamedWantsEachPart(t *testing.T) {
	t.Parallel()
	s := startService(t, server(t, smtp.Plain))
	said := func(string) []string { return []string{"database", "RabbitMQ"} }
	_, err := named([]Stoppable{s}, map[string]string{"service": "database: away"}, said)
	require.ErrorContains(t, err, "does not name RabbitMQ")
	why, err := named([]Stoppable{s}, map[string]string{"service": "database: away; publisher: not connected to RabbitMQ"}, said)
	require.NoError(t, err)
	require.Contains(t, listed(why), `service said "database: away;`)
}
