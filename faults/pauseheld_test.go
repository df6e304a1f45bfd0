package faults

import (
	"context"
	"errors"
	"fmt"
	"net/textproto"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/fakes/script"
	"mailproof/fakes/smtp"
	"mailproof/history"
)

// sleeper is a process that sends one mail after the other, each under a key of
// its own, and does nothing while it is stopped. What it left unsent when it was
// stopped its mate sends.
type sleeper struct {
	server *smtp.Server
	looks  bool // at the clock, before the dot
	pauses atomic.Int64
	wakes  atomic.Int64

	mu      sync.Mutex
	awake   chan struct{} // closed while it runs
	current string        // key under way
	mate    func(key string)
}

func startSleeper(t *testing.T, s *smtp.Server, looks bool) *sleeper {
	v := &sleeper{server: s, looks: looks, awake: make(chan struct{})}
	close(v.awake)
	v.mate = func(key string) { _ = v.send("mate.w1", key) }
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ctx.Err() == nil; i++ {
			key := fmt.Sprintf("k%d", i)
			v.mu.Lock()
			v.current = key
			v.mu.Unlock()
			_ = v.send("sleeper.w1", key)
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
	return v
}

func (*sleeper) Name() string                  { return "sleeper" }
func (*sleeper) PID() int                      { return 4711 }
func (*sleeper) Kill(context.Context) error    { return errors.New("is not killed here") }
func (*sleeper) Restart(context.Context) error { return errors.New("is not started here") }

func (v *sleeper) Pause(context.Context) error {
	v.pauses.Add(1)
	v.mu.Lock()
	defer v.mu.Unlock()
	v.awake = make(chan struct{})
	if v.mate != nil {
		go v.mate(v.current)
	}
	return nil
}

func (v *sleeper) Resume(context.Context) error {
	v.wakes.Add(1)
	v.mu.Lock()
	defer v.mu.Unlock()
	close(v.awake)
	return nil
}

// stopped waits while the process is stopped, and reports whether it was.
func (v *sleeper) stopped() bool {
	v.mu.Lock()
	awake := v.awake
	v.mu.Unlock()
	select {
	case <-awake:
		return false
	default:
		<-awake
		return true
	}
}

func (v *sleeper) send(client, key string) error {
	c, err := textproto.Dial("tcp", v.server.Addr())
	if err != nil {
		return err
	}
	defer c.Close()
	for _, step := range []struct {
		line string
		code int
	}{{"", 220}, {"EHLO " + client, 250}, {"MAIL FROM:<shop@x.test>", 250}, {"RCPT TO:<" + key + "@x.test>", 250}, {"DATA", 354}} {
		if step.line != "" {
			if err := c.PrintfLine("%s", step.line); err != nil {
				return err
			}
		}
		if _, _, err := c.ReadResponse(step.code); err != nil {
			return err
		}
	}
	if client == "sleeper.w1" && v.stopped() && v.looks {
		return errors.New("too late")
	}
	if err := c.PrintfLine("X-Dedupe-Key: %s\r\n\r\nyour ticket\r\n.", key); err != nil {
		return err
	}
	_, _, err = c.ReadResponse(250)
	return err
}

func noGap() time.Duration { return time.Millisecond }

func TestPauseWhileHeldWakesAWorkerWhoseMailIsGone(t *testing.T) {
	for name, looks := range map[string]bool{"it looks at the clock": true, "it sends all the same": false} {
		t.Run(name, func(t *testing.T) {
			s := server(t, smtp.Plain)
			v := startSleeper(t, s, looks)
			f := NewPauseWhileHeld(s, v, 3, 300*time.Millisecond, noGap)
			run := NewRun(f, clock)
			require.NoError(t, run.Inject(t.Context()))
			require.NoError(t, run.Wait(t.Context()))
			require.NoError(t, run.Heal(t.Context()))
			require.NoError(t, run.Witness(t.Context()))
			record := run.Record()
			require.Equal(t, history.Installed, record.Outcome, record.Reason)
			require.Equal(t, 3, record.Count)
			require.Len(t, record.Keys, 3)
			require.EqualValues(t, 3, v.wakes.Load())
			require.Contains(t, record.Witness, "process ids [4711]")
			want, sent := 1, "; 0 of them sent it"
			if !looks {
				want, sent = 2, "; 3 of them sent it"
			}
			require.Contains(t, record.Witness, sent)
			for _, key := range record.Keys {
				require.Equal(t, want, s.Verdict(key).Copies, key)
			}
			require.Empty(t, s.Holds())
			require.Empty(t, s.Rules())
		})
	}
}

func TestPauseWhileHeldThatIsCutShortLeavesTheProcessRunning(t *testing.T) {
	s := server(t, smtp.Plain)
	v := startSleeper(t, s, true)
	f := NewPauseWhileHeld(s, v, 1, time.Hour, noGap)
	run := NewRun(f, clock)
	require.NoError(t, run.Inject(t.Context()))
	require.Eventually(t, func() bool { return v.pauses.Load() == 1 }, 10*time.Second, time.Millisecond)
	require.NoError(t, run.Heal(t.Context()))
	require.EqualValues(t, 1, v.wakes.Load())
	require.NoError(t, run.Witness(t.Context()))
	require.Empty(t, run.Record().Witness)
}

// A sender that had given its session up is not one that was woken.
func TestPauseWhileHeldDoesNotCountASenderThatHadLeft(t *testing.T) {
	s := server(t, smtp.Plain)
	hung := &hungUp{server: s}
	f := NewPauseWhileHeld(s, hung, 1, 0, noGap)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			hung.dataThenNothing()
		}
	}()
	run := NewRun(f, clock)
	require.NoError(t, run.Inject(t.Context()))
	require.NoError(t, run.Wait(t.Context()))
	require.NoError(t, run.Heal(t.Context()))
	cancel()
	<-done
	require.Equal(t, history.Indeterminate, run.Record().Outcome)
	require.Contains(t, run.Record().Reason, "had given up")
}

// hungUp closes its session just before it is stopped.
type hungUp struct {
	sleeper
	server *smtp.Server
	conn   atomic.Pointer[textproto.Conn]
}

// dataThenNothing says DATA and waits for its session's end.
func (h *hungUp) dataThenNothing() {
	c, err := textproto.Dial("tcp", h.server.Addr())
	if err != nil {
		return
	}
	defer c.Close()
	h.conn.Store(c)
	for _, line := range []string{"EHLO sleeper.w1", "MAIL FROM:<shop@x.test>", "RCPT TO:<a@x.test>", "DATA"} {
		if _, _, err := c.ReadResponse(2); err != nil || c.PrintfLine("%s", line) != nil {
			return
		}
	}
	_, _, _ = c.ReadResponse(3)
}

func (h *hungUp) Pause(ctx context.Context) error {
	hold, err := h.server.AwaitHold(ctx, nil)
	if err != nil {
		return err
	}
	if err := h.conn.Load().Close(); err != nil {
		return err
	}
	_, err = h.server.AwaitHold(ctx, func(x script.Hold) bool { return x.ID == hold.ID && x.PeerGone })
	return err
}

func (*hungUp) Resume(context.Context) error { return nil }
