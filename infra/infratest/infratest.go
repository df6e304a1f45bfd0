// Package infratest is the one suite that every provider of package infra must
// pass. It starts a whole stack once and takes it through what runs rely on:
// addresses that work, virtual hosts that do not see each other, servers that
// keep what they confirmed across SIGKILL, and a stop that leaves nothing.
//
// It imports no provider.
package infratest

import (
	"context"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/infra"
)

// Features is what a provider claims. What it does not claim must be refused
// with [infra.ErrUnsupported], so that a fault can say that it was skipped.
type Features struct {
	// Signals: nodes can be killed, paused, resumed and restarted.
	Signals bool
	// PIDs: Node.PID is a process that this machine's /proc shows.
	PIDs bool
	// Guards: Stack.Guard takes processes of the caller.
	Guards bool
	// KafkaKind is "apache" or "kfake".
	KafkaKind string
}

// Bounds of a stack that is not broken, generous for two busy cores.
const (
	startBound = 4 * time.Minute
	actBound   = 2 * time.Minute
	askBound   = 30 * time.Second
	tick       = 200 * time.Millisecond
)

// Run takes a stack of the provider through the suite. The steps build on each
// other, so they run in order and the first that fails ends the run.
func Run(t *testing.T, provider infra.Provider, features Features) {
	logs := t.TempDir()
	require.NotEmpty(t, provider.Name())
	s := &suite{features: features, stack: start(t, provider, logs)}
	for _, step := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"versions", s.versions},
		{"nodes", s.nodes},
		{"postgres", s.postgres},
		{"rabbitmq", s.rabbitmq},
		{"virtual hosts are apart", s.vhosts},
		{"kafka", s.kafka},
		{"postgres keeps a commit across SIGKILL", s.postgresKilled},
		{"postgres paused", s.postgresPaused},
		{"rabbitmq keeps a confirmed message when the leader gets SIGKILL", s.leaderKilled},
		{"rabbitmq goes on when the leader is paused", s.leaderPaused},
		{"rabbitmq's leader moves when it is told to", s.leaderMoved},
		{"rabbitmq cancels consumers and keeps the queue", s.consumersCancelled},
		{"rabbitmq blocks publishers while a node has an alarm", s.alarmed},
		{"rabbitmq goes on when its leader is cut off", s.leaderCutOff},
		{"kafka keeps an acknowledged record across SIGKILL", s.kafkaKilled},
		{"kafka paused", s.kafkaPaused},
		{"restart of what runs", s.restarted},
		{"mend", s.mended},
		{"stop", s.stop},
	} {
		if !t.Run(step.name, step.run) {
			return
		}
	}
}

type suite struct {
	features Features
	stack    infra.Stack
	vhost    string // that the queue of the suite is in
}

func start(t *testing.T, provider infra.Provider, logs string) infra.Stack {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), startBound)
	defer cancel()
	began := time.Now()
	stack, err := provider.Start(ctx, infra.Spec{
		LogDir:   logs,
		Progress: func(part, state string) { t.Logf("%5.1f s  %s: %s", time.Since(began).Seconds(), part, state) },
	})
	require.NoError(t, err)
	t.Cleanup(func() {
		stopping, cancel := context.WithTimeout(context.Background(), actBound)
		defer cancel()
		require.NoError(t, stack.Stop(stopping), "a second stop")
	})
	t.Logf("started in %.1f s", time.Since(began).Seconds())
	return stack
}

// all lists every node of the stack.
func (s *suite) all() []infra.Node {
	return append([]infra.Node{s.stack.Postgres(), s.stack.Kafka()}, s.stack.RabbitMQ().Nodes()...)
}

func (s *suite) versions(t *testing.T) {
	v := s.stack.Versions()
	require.NotEmpty(t, v.Postgres)
	require.NotEmpty(t, v.RabbitMQ)
	require.NotEmpty(t, v.Kafka)
	require.NotEmpty(t, v.Provider)
	require.Equal(t, s.features.KafkaKind, v.KafkaKind)
	require.Equal(t, s.features.KafkaKind, s.stack.Kafka().Kind())
}

func (s *suite) nodes(t *testing.T) {
	require.Len(t, s.stack.RabbitMQ().Nodes(), 3)
	names := map[string]bool{}
	for _, n := range s.all() {
		require.NotEmpty(t, n.Name())
		require.False(t, names[n.Name()], "two nodes are called %s", n.Name())
		names[n.Name()] = true
		require.True(t, n.Running(), n.Name())
		if s.canSignal(n) {
			require.FileExists(t, n.Log())
			require.True(t, filepath.IsAbs(n.Log()))
			s.requireState(t, n, alive)
		}
	}
}

// canSignal reports whether a node is a process that the provider may touch.
func (s *suite) canSignal(n infra.Node) bool {
	return s.features.Signals && (n.Name() != s.stack.Kafka().Name() || s.features.KafkaKind == "apache")
}

// refuses checks a node that cannot be signalled, and reports whether it is one.
func (s *suite) refuses(t *testing.T, n infra.Node) bool {
	if s.canSignal(n) {
		return false
	}
	require.ErrorIs(t, n.Kill(t.Context()), infra.ErrUnsupported)
	require.ErrorIs(t, n.Pause(t.Context()), infra.ErrUnsupported)
	require.ErrorIs(t, n.Resume(t.Context()), infra.ErrUnsupported)
	require.ErrorIs(t, n.Restart(t.Context()), infra.ErrUnsupported)
	require.True(t, n.Running())
	return true
}

func (s *suite) kill(t *testing.T, n infra.Node) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), actBound)
	defer cancel()
	pid := n.PID()
	require.NoError(t, n.Kill(ctx))
	require.False(t, n.Running())
	s.requireGone(t, pid)
	require.NoError(t, n.Kill(ctx), "killing what is gone")
	require.Error(t, n.Pause(ctx), "pausing what is gone")
	require.Error(t, n.Resume(ctx), "resuming what is gone")
}

func (s *suite) restart(t *testing.T, n infra.Node) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), actBound)
	defer cancel()
	before := n.PID()
	began := time.Now()
	require.NoError(t, n.Restart(ctx))
	require.True(t, n.Running())
	if s.features.PIDs {
		require.NotEqual(t, before, n.PID())
	}
	t.Logf("%s restarted in %.1f s", n.Name(), time.Since(began).Seconds())
}

func (s *suite) pause(t *testing.T, n infra.Node) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), askBound)
	defer cancel()
	require.NoError(t, n.Pause(ctx))
	require.True(t, n.Running(), "a paused process exists")
	s.requireState(t, n, halted)
}

func (s *suite) resume(t *testing.T, n infra.Node) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), askBound)
	defer cancel()
	require.NoError(t, n.Resume(ctx))
	s.requireState(t, n, alive)
}

// restarted checks Restart of nodes that run, and of one that is paused.
func (s *suite) restarted(t *testing.T) {
	for _, n := range []infra.Node{s.stack.Postgres(), s.stack.Kafka(), s.stack.RabbitMQ().Nodes()[0]} {
		if s.refuses(t, n) {
			continue
		}
		s.restart(t, n)
	}
	if pg := s.stack.Postgres(); s.canSignal(pg) {
		s.pause(t, pg)
		s.restart(t, pg)
	}
	s.postgres(t)
}

// mended breaks a part of each kind and wants all of them whole.
func (s *suite) mended(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), actBound)
	defer cancel()
	require.NoError(t, s.stack.Mend(ctx), "nothing is broken")
	if s.features.Signals {
		r := s.stack.RabbitMQ()
		require.NoError(t, r.Alarm(ctx, r.Nodes()[0], true))
		require.NoError(t, r.CutOff(ctx, r.Nodes()[2]))
		require.NoError(t, s.stack.Postgres().Kill(ctx))
		if k := s.stack.Kafka(); s.canSignal(k) {
			require.NoError(t, k.Pause(ctx))
		}
		began := time.Now()
		require.NoError(t, s.stack.Mend(ctx))
		t.Logf("mended in %.1f s", time.Since(began).Seconds())
	}
	s.postgres(t)
	require.NoError(t, publish(ctx, s.stack.RabbitMQ().URLs(s.vhost)[2], "to a whole cluster"))
	require.NoError(t, s.produce(ctx, topic, "after the mend"))
	s.awaitOnline(t)
}

// stop checks that nothing answers and no process is left.
func (s *suite) stop(t *testing.T) {
	guarded := exec.Command("/bin/sleep", "1000")
	require.NoError(t, guarded.Start())
	ended := make(chan error, 1)
	go func() { ended <- guarded.Wait() }()
	if s.features.Guards {
		require.NoError(t, s.stack.Guard(guarded.Process.Pid))
	} else {
		require.ErrorIs(t, s.stack.Guard(guarded.Process.Pid), infra.ErrUnsupported)
		require.NoError(t, guarded.Process.Kill())
	}
	var pids []int
	for _, n := range s.all() {
		if s.canSignal(n) {
			pids = append(pids, n.PID())
		}
	}
	if s.features.Signals { // a paused and a killed node must not hold it up
		require.NoError(t, s.stack.RabbitMQ().Nodes()[0].Pause(t.Context()))
		require.NoError(t, s.stack.RabbitMQ().Nodes()[1].Kill(t.Context()))
	}

	ctx, cancel := context.WithTimeout(t.Context(), actBound)
	defer cancel()
	began := time.Now()
	require.NoError(t, s.stack.Stop(ctx))
	t.Logf("stopped in %.1f s", time.Since(began).Seconds())
	for _, pid := range pids {
		s.requireGone(t, pid)
	}
	require.Error(t, <-ended, "the guarded process was killed")
	require.NoError(t, s.stack.Stop(ctx), "a second stop")
}
