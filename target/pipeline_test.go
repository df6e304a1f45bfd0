package target_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/fakes/smtp"
	"mailproof/history"
	"mailproof/infra"
	"mailproof/infra/guardian"
	"mailproof/infra/provider"
	"mailproof/target"
)

// parts are real parts and built programs, shared by the tests that need them
// and started by the first.
type parts struct {
	dir      string
	stack    infra.Stack
	binaries target.Binaries
	err      error
	once     sync.Once
}

var shared parts

// orphanEnv turns the test binary into a harness that starts one program, writes
// its pid to the file named, and waits to be killed.
const orphanEnv = "TARGET_TEST_ORPHAN"

func TestMain(m *testing.M) {
	guardian.MaybeRun()
	if path := os.Getenv(orphanEnv); path != "" {
		os.Exit(target.MakeOrphan(path))
	}
	code := m.Run()
	if err := shared.stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func (p *parts) start() error {
	p.once.Do(func() { p.err = p.doStart() })
	return p.err
}

func (p *parts) doStart() (err error) {
	if p.dir, err = os.MkdirTemp("", "mpt"); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	if p.binaries, err = target.Build(ctx, target.BuildConfig{Dir: filepath.Join(p.dir, "bin")}); err != nil {
		return err
	}
	prov, err := provider.Select("")
	if err != nil {
		return err
	}
	p.stack, err = prov.Start(ctx, infra.Spec{LogDir: filepath.Join(p.dir, "nodes")})
	return err
}

func (p *parts) stop() error {
	if p.dir == "" {
		return nil
	}
	err := os.RemoveAll(p.dir)
	if p.stack != nil {
		err = errors.Join(p.stack.Stop(context.Background()), err)
	}
	return err
}

// journal collects process events.
type journal struct {
	mu     sync.Mutex
	events []string
}

func (j *journal) record(r history.Record) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.events = append(j.events, r.Process.Name+" "+r.Process.Event)
}

func (j *journal) has(event string) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Contains(j.events, event)
}

func config(t *testing.T, name string, server *smtp.Server, j *journal) target.PipelineConfig {
	t.Helper()
	require.NoError(t, shared.start())
	return target.PipelineConfig{
		Stack: shared.stack, Name: name, SMTPAddr: server.Addr(), LogDir: t.TempDir(), Binaries: shared.binaries, Policy: "resend",
		RetryDelays: []time.Duration{200 * time.Millisecond, 500 * time.Millisecond}, MaxAttempts: 3,
		SendDeadline: 2 * time.Second, Lease: 4 * time.Second, SweepEvery: time.Second, SweepGrace: 5 * time.Second,
		Record: j.record,
	}
}

func start(t *testing.T, cfg target.PipelineConfig) *target.Pipeline {
	t.Helper()
	p, err := target.StartPipeline(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Stop(context.Background())) })
	return p
}

func mailServer(t *testing.T, rules ...smtp.Rule) *smtp.Server {
	t.Helper()
	s, err := smtp.Start(smtp.Options{Rules: rules})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// settle waits until nothing is pending.
func settle(t *testing.T, p *target.Pipeline) {
	t.Helper()
	var last map[string]string
	require.Eventually(t, func() bool {
		var err error
		last, err = p.Pending(t.Context())
		return err == nil && len(last) == 0
	}, time.Minute, 100*time.Millisecond, "%v", last)
}

func confirm(t *testing.T, p *target.Pipeline, n int) []string {
	t.Helper()
	keys := make([]string, n)
	for i := range n {
		id := fmt.Sprintf("b%d", i)
		outcome, err := p.ConfirmWhy(t.Context(), id, fmt.Sprintf("guest%d@example.test", i))
		require.NoError(t, err)
		require.Equal(t, history.OpOK, outcome)
		keys[i] = p.Key(id, 1)
	}
	return keys
}

// Twenty bookings are confirmed; each mail is stored once, each row is SENT, and
// every piece of the final state is there.
func TestConformance(t *testing.T) {
	server, j := mailServer(t), &journal{}
	p := start(t, config(t, "conf", server, j))
	mark := p.Mark()
	keys := confirm(t, p, 20)
	settle(t, p)
	for _, k := range keys {
		require.Equal(t, 1, server.Verdict(k).Copies, k)
	}

	f, err := p.Final(t.Context())
	require.NoError(t, err)
	require.Len(t, f.Rows, 20)
	for _, r := range f.Rows {
		require.Equal(t, "sent", r.State, r.Key)
		require.Equal(t, 1, r.Attempts, r.Key)
		require.NotEmpty(t, r.EventID)
		require.Contains(t, keys, r.Key)
	}
	require.Len(t, f.Outbox, 20)
	for _, o := range f.Outbox {
		require.True(t, o.Published)
		require.Contains(t, keys, o.Key)
	}
	require.Len(t, f.Topic, 20)
	require.Equal(t, "BookingConfirmed", f.Topic[0].Type)
	require.Empty(t, f.DLQ)
	require.NotNil(t, f.DLQ)
	require.Empty(t, f.Alerts)
	require.Empty(t, f.Pending)
	require.NotEmpty(t, f.Queues)
	for _, q := range f.Queues {
		require.Equal(t, "quorum", q.Type, q.Name)
		require.Equal(t, 3, q.Members, q.Name)
		require.Zero(t, q.Messages, q.Name)
	}
	require.EqualValues(t, 20, f.Counters[`notifyd_sends_total{lane="ticket",outcome="accepted"}`], "%v", f.Counters)
	require.EqualValues(t, 20, f.Counters[`outbox_relay_records_total{result="published"}`], "%v", f.Counters)

	usage := p.Since(mark)
	require.Contains(t, usage, "bookingd-1")
	require.Positive(t, usage["notifyd-1"].CPUSeconds)
	require.Positive(t, usage["notifyd-1"].MaxRSSBytes)

	require.Len(t, p.Databases(), 2)
	require.Equal(t, []string{"bookingd-1", "notifyd-1"}, []string{p.Processes()[0].Name(), p.Processes()[1].Name()})
	require.NoError(t, p.Stop(t.Context()))
	for _, e := range []string{"bookingd-1 started", "bookingd-1 ready", "notifyd-1 ready", "notifyd-1 exited"} {
		require.True(t, j.has(e), e)
	}
	for _, proc := range p.Processes() {
		require.False(t, proc.Running())
		require.Zero(t, proc.PID())
	}
}

// A mail that is refused for good ends DEAD, with a dead letter that Final reads
// and an alert; a repeated confirmation and a cancel tell the truth.
func TestDeadMailAndOperations(t *testing.T) {
	server := mailServer(t, smtp.On(smtp.StageRcpt, smtp.Reply).Code(550).To("bad@example.test").Rule())
	p := start(t, config(t, "dead", server, &journal{}))
	ctx := t.Context()
	require.Equal(t, history.OpOK, p.Confirm(ctx, "bad", "bad@example.test"))
	require.Equal(t, history.OpOK, p.Confirm(ctx, "bad", "bad@example.test"), "the repeat finds it confirmed")
	require.Equal(t, history.OpFail, p.Confirm(ctx, "bad", "other@example.test"), "another booking of the same id")
	require.Equal(t, history.OpFail, p.Confirm(ctx, "a:b", "a@example.test"), "an id that cannot be")
	require.Equal(t, history.OpOK, p.Confirm(ctx, "good", "good@example.test"))
	settle(t, p)
	require.Equal(t, history.OpOK, p.Cancel(ctx, "good"))
	require.Equal(t, history.OpOK, p.Reopen(ctx, "good", 1))
	settle(t, p)
	require.Eventually(t, func() bool { return server.Verdict("ticket:good:v2").Copies == 1 }, time.Minute, 50*time.Millisecond)

	f, err := p.Final(ctx)
	require.NoError(t, err)
	require.Len(t, f.DLQ, 1)
	require.Equal(t, "ticket:bad", f.DLQ[0].Key)
	require.NotEmpty(t, f.DLQ[0].Reason)
	require.Len(t, f.Alerts, 1)
	require.Equal(t, "ticket:bad", f.Alerts[0].Key)
	i := slices.IndexFunc(f.Queues, func(q history.QueueState) bool { return strings.HasSuffix(q.Name, "dlq") })
	require.Equal(t, 1, f.Queues[i].Messages, "the queues are read before the dead letters are taken")
	again, err := p.Final(ctx)
	require.NoError(t, err)
	require.Empty(t, again.DLQ)
}

// Killed, paused, resumed and restarted processes: what is reported, what the
// operations say meanwhile, and nothing lost in the end.
func TestProcesses(t *testing.T) {
	server, j := mailServer(t), &journal{}
	p := start(t, config(t, "procs", server, j))
	ctx := t.Context()
	bookingd, notifyd := p.Processes()[0], p.Processes()[1]

	require.NoError(t, notifyd.Kill(ctx))
	require.False(t, notifyd.Running())
	require.NoError(t, notifyd.Kill(ctx), "gone is gone")
	require.Error(t, notifyd.Pause(ctx))
	keys := confirm(t, p, 5)
	pending, err := p.Pending(ctx)
	require.NoError(t, err)
	require.Len(t, pending, 5)
	for _, k := range keys {
		require.Contains(t, pending, k)
	}
	require.NoError(t, notifyd.Restart(ctx))
	settle(t, p)

	require.NoError(t, bookingd.Pause(ctx))
	short, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
	outcome, err := p.ConfirmWhy(short, "paused", "paused@example.test")
	cancel()
	require.Equal(t, history.OpFail, outcome, "the booking itself was not answered, so it was never confirmed: %v", err)
	require.Error(t, err)
	require.NoError(t, bookingd.Resume(ctx))
	require.Eventually(t, func() bool { return p.Confirm(ctx, "paused", "paused@example.test") == history.OpOK }, 20*time.Second, 50*time.Millisecond)

	pid := bookingd.PID()
	require.NoError(t, bookingd.Kill(ctx))
	require.ErrorIs(t, syscall.Kill(pid, 0), syscall.ESRCH)
	outcome, err = p.ConfirmWhy(ctx, "nobody", "nobody@example.test")
	require.Equal(t, history.OpFail, outcome, "%v", err)
	require.NoError(t, bookingd.Restart(ctx))
	require.NotEqual(t, pid, bookingd.PID())
	require.Equal(t, history.OpOK, p.Confirm(ctx, "nobody", "nobody@example.test"))
	settle(t, p)

	for _, k := range append(keys, "ticket:paused", "ticket:nobody") {
		require.Equal(t, 1, server.Verdict(k).Copies, k)
	}
	for _, e := range []string{"notifyd-1 killed", "bookingd-1 paused", "bookingd-1 resumed", "bookingd-1 killed"} {
		require.True(t, j.has(e), e)
	}
	require.False(t, j.has("notifyd-1 exited"), "a process that the harness killed did not exit by itself")
}

// A program that cannot start quotes its log, and nothing is left behind.
func TestStartFailureIsExplained(t *testing.T) {
	server := mailServer(t)
	cfg := config(t, "broken", server, &journal{})
	cfg.EnvOf = map[string]map[string]string{"notifyd-1": {"NOTIFYD_LEASE": "1s"}}
	_, err := target.StartPipeline(t.Context(), cfg)
	require.ErrorContains(t, err, "NOTIFYD_LEASE")
	cfg.Name = "Not A Word"
	cfg.Stack = nil
	_, err = target.StartPipeline(t.Context(), cfg)
	require.ErrorContains(t, err, "Stack")
	require.ErrorContains(t, err, "Name")
}

// LAB-T4 with the outbox: Kafka is dead while bookings are confirmed, and the
// clients do not notice; when it is back every mail goes out.
func TestKafkaDeadWhileConfirming(t *testing.T) {
	server := mailServer(t)
	p := start(t, config(t, "nokafka", server, &journal{}))
	ctx, kafka := t.Context(), shared.stack.Kafka()
	require.NoError(t, kafka.Kill(ctx))
	defer func() {
		if !kafka.Running() {
			require.NoError(t, kafka.Restart(context.Background()))
		}
	}()
	keys := confirm(t, p, 10)
	pending, err := p.Pending(ctx)
	require.NoError(t, err)
	require.Len(t, pending, 10)
	require.Contains(t, pending[keys[0]], "in the outbox")
	require.NoError(t, kafka.Restart(ctx))
	settle(t, p)
	for _, k := range keys {
		require.Equal(t, 1, server.Verdict(k).Copies, k)
	}
}

// Two booking services: the one whose relay leads is stopped, and keeps its
// connections; what the other confirms is published all the same.
func TestRelayOfAStoppedProcessIsReplaced(t *testing.T) {
	server := mailServer(t)
	cfg := config(t, "standby", server, &journal{})
	cfg.BookingdCount, cfg.RelaySessionTimeout = 2, 2*time.Second
	p := start(t, cfg)
	keys := confirm(t, p, 4)
	settle(t, p)
	leader := p.Processes()[slices.IndexFunc(p.Processes(), func(proc target.Process) bool {
		log, err := os.ReadFile(proc.Log())
		return err == nil && strings.Contains(string(log), "outbox relay leads")
	})]
	require.NoError(t, leader.Pause(t.Context()))
	confirmed := 0
	for i := 0; confirmed < 4; i++ {
		require.Less(t, i, 20)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		id := fmt.Sprintf("late%d", i)
		if p.Confirm(ctx, id, id+"@example.test") == history.OpOK {
			confirmed++
			keys = append(keys, p.Key(id, 1))
		}
		cancel()
	}
	settle(t, p)
	require.NoError(t, leader.Resume(t.Context()))
	for _, k := range keys {
		require.Equal(t, 1, server.Verdict(k).Copies, k)
	}
}

// A harness that is killed leaves no process behind, even one that it had not
// handed to the guardian yet.
func TestProgramsDieWithTheHarness(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "pid")
	harness := exec.Command(os.Args[0])
	harness.Env = append(os.Environ(), orphanEnv+"="+path)
	require.NoError(t, harness.Start())
	var pid int
	require.Eventually(t, func() bool {
		body, err := os.ReadFile(path)
		if err != nil {
			return false
		}
		_, err = fmt.Sscanf(string(body), "%d\n", &pid)
		return err == nil
	}, 20*time.Second, 10*time.Millisecond)
	require.NoError(t, syscall.Kill(pid, 0))
	require.NoError(t, harness.Process.Kill())
	_ = harness.Wait() // killed, as asked
	require.Eventually(t, func() bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }, 10*time.Second, 10*time.Millisecond)
}
