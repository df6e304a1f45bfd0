package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"mailproof/fakes/smtp"
	"mailproof/infra"
	"mailproof/infra/guardian"
	"mailproof/infra/provider"
	"mailproof/system/contract"
)

// The tests run the binary as a process against a real Postgres, RabbitMQ and
// Kafka, which the first test starts, and the fake mail server.
var shared struct {
	sync.Mutex
	stack infra.Stack
	dir   string
	bins  map[string]string
}

func TestMain(m *testing.M) {
	guardian.MaybeRun()
	code := m.Run()
	if err := stopShared(); err != nil {
		fmt.Fprintln(os.Stderr, "stop the parts:", err)
		code = 1
	}
	os.Exit(code)
}

func stopShared() error {
	shared.Lock()
	defer shared.Unlock()
	var failed error
	if shared.stack != nil {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		failed = shared.stack.Stop(ctx)
	}
	if shared.dir != "" {
		failed = errors.Join(failed, os.RemoveAll(shared.dir))
	}
	return failed
}

func sharedDir(t *testing.T) string {
	t.Helper()
	if shared.dir == "" {
		dir, err := os.MkdirTemp("", "notifyd")
		require.NoError(t, err)
		shared.dir = dir
	}
	return shared.dir
}

func parts(t *testing.T) infra.Stack {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	if shared.stack == nil {
		ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
		defer cancel()
		p, err := provider.Select(provider.Auto)
		require.NoError(t, err)
		shared.stack, err = p.Start(ctx, infra.Spec{
			LogDir: filepath.Join(sharedDir(t), "logs"), Postgres: true, RabbitMQ: true, Kafka: true, RabbitNodes: 1,
		})
		require.NoError(t, err)
	}
	return shared.stack
}

// binary builds notifyd once; tag "" is the release build.
func binary(t *testing.T, tag string) string {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	if path, ok := shared.bins[tag]; ok {
		return path
	}
	path := filepath.Join(sharedDir(t), "notifyd-"+tag)
	args := append(append([]string{"build"}, raceFlags()...), "-tags", tag, "-o", path, ".")
	build := exec.CommandContext(t.Context(), "go", args...)
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
	if shared.bins == nil {
		shared.bins = map[string]string{}
	}
	shared.bins[tag] = path
	return path
}

// place is a database, virtual host and topic of one test, and a mail server.
type place struct {
	t     *testing.T
	mail  *smtp.Server
	pool  *pgxpool.Pool
	vhost string
	topic string
	kafka *kgo.Client
	env   map[string]string
}

// at is the place as a subtest sees it.
func (p *place) at(t *testing.T) *place {
	sub := *p
	sub.t = t
	return &sub
}

var places atomic.Int64

func newPlace(t *testing.T, opt smtp.Options) *place {
	t.Helper()
	stack := parts(t)
	name := fmt.Sprintf("notifyd%d", places.Add(1))
	ctx := t.Context()
	require.NoError(t, stack.Postgres().CreateDatabase(ctx, name))
	require.NoError(t, stack.RabbitMQ().CreateVhost(ctx, name))
	require.NoError(t, stack.Kafka().CreateTopic(ctx, name, 2))
	require.NoError(t, stack.Kafka().CreateTopic(ctx, name+".mail", 1))
	server, err := smtp.Start(opt)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Close()) })
	pool, err := pgxpool.New(ctx, stack.Postgres().URL(name))
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	producer, err := kgo.NewClient(kgo.SeedBrokers(stack.Kafka().Brokers()...), kgo.DefaultProduceTopic(name))
	require.NoError(t, err)
	t.Cleanup(producer.Close)
	return &place{
		t: t, mail: server, pool: pool, vhost: name, topic: name, kafka: producer,
		env: map[string]string{
			"NOTIFYD_DATABASE_URL":          stack.Postgres().URL(name),
			"NOTIFYD_AMQP_URLS":             strings.Join(stack.RabbitMQ().URLs(name), ","),
			"NOTIFYD_KAFKA_BROKERS":         strings.Join(stack.Kafka().Brokers(), ","),
			"NOTIFYD_KAFKA_TOPIC":           name,
			"NOTIFYD_KAFKA_GROUP":           name,
			"NOTIFYD_MAIL_EVENTS_TOPIC":     name + ".mail",
			"NOTIFYD_KAFKA_SESSION_TIMEOUT": "6s",
			"NOTIFYD_SMTP_ADDR":             server.Addr(),
			"NOTIFYD_RETRY_DELAYS":          "200ms,400ms,800ms",
			"NOTIFYD_SEND_DEADLINE":         "2s",
			"NOTIFYD_LEASE":                 "4s",
			"NOTIFYD_LEASE_MARGIN":          "1s",
			// Off: no test here needs the net, and none may be saved by it.
			"NOTIFYD_SWEEPER": "off",
		},
	}
}

// process is one running notifyd.
type process struct {
	t    *testing.T
	cmd  *exec.Cmd
	addr string
	exit chan error

	mu    sync.Mutex
	lines []map[string]any
	fresh chan struct{} // closed and renewed with each line
	done  bool
}

func (p *place) command(tag string, extra map[string]string, args ...string) *exec.Cmd {
	cmd := exec.Command(binary(p.t, tag), args...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	for _, vars := range []map[string]string{p.env, extra} {
		for k, v := range vars {
			cmd.Env = append(cmd.Env, k+"="+v)
		}
	}
	return cmd
}

func (p *place) migrate() {
	p.t.Helper()
	out, err := p.command("", nil, "migrate").CombinedOutput()
	require.NoError(p.t, err, string(out))
}

// launch starts notifyd; nobody waits for it to be ready.
func (p *place) launch(tag string, extra map[string]string) *process {
	p.t.Helper()
	cmd := p.command(tag, extra)
	stdout, err := cmd.StdoutPipe()
	require.NoError(p.t, err)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	require.NoError(p.t, cmd.Start())
	require.NoError(p.t, parts(p.t).Guard(cmd.Process.Pid))
	n := &process{t: p.t, cmd: cmd, exit: make(chan error, 1), fresh: make(chan struct{})}
	go n.read(stdout)
	p.t.Cleanup(func() {
		n.kill()
		if strings.Contains(stderr.String(), "DATA RACE") {
			p.t.Errorf("notifyd has a data race:\n%s", stderr.String())
		}
		if p.t.Failed() {
			p.t.Logf("notifyd %d said:\n%s\n%s", cmd.Process.Pid, n.text(), stderr.String())
		}
	})
	return n
}

// start starts notifyd and waits until its whole path is up.
func (p *place) start(extra map[string]string) *process {
	p.t.Helper()
	n := p.launch("", extra)
	n.await("ready")
	return n
}

func (n *process) read(stdout io.Reader) {
	lines := bufio.NewScanner(stdout)
	for lines.Scan() {
		var line map[string]any
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			line = map[string]any{"msg": "NOT JSON: " + lines.Text()}
		}
		n.mu.Lock()
		n.lines = append(n.lines, line)
		close(n.fresh)
		n.fresh = make(chan struct{})
		n.mu.Unlock()
	}
	err := n.cmd.Wait()
	n.mu.Lock()
	n.done = true
	close(n.fresh)
	n.mu.Unlock()
	n.exit <- err
}

// await returns the first line with this message.
func (n *process) await(msg string) map[string]any {
	n.t.Helper()
	deadline := time.After(60 * time.Second)
	for seen := 0; ; {
		n.mu.Lock()
		lines, fresh, done := n.lines, n.fresh, n.done
		n.mu.Unlock()
		for ; seen < len(lines); seen++ {
			if lines[seen]["msg"] == msg {
				return lines[seen]
			}
		}
		require.False(n.t, done, "notifyd ended without saying %q", msg)
		select {
		case <-fresh:
		case <-deadline:
			require.FailNow(n.t, "notifyd did not say "+msg)
		}
	}
}

func (n *process) text() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var sb strings.Builder
	for _, l := range n.lines {
		b, _ := json.Marshal(l)
		sb.Write(b)
		sb.WriteByte('\n')
	}
	return sb.String()
}

func (n *process) ended() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.done
}

// kill ends it with SIGKILL; an ended one is left alone.
func (n *process) kill() {
	if !n.ended() {
		_ = n.cmd.Process.Kill()
		n.awaitExit()
	}
}

func (n *process) awaitExit() error {
	n.t.Helper()
	select {
	case err := <-n.exit:
		n.exit <- err
		return err
	case <-time.After(60 * time.Second):
		require.FailNow(n.t, "notifyd did not end")
		return nil
	}
}

// killedItself reports whether the process ended by SIGKILL.
func (n *process) killedItself() bool {
	var exit *exec.ExitError
	return errors.As(n.awaitExit(), &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL
}

func (n *process) get(path string) (int, string) {
	n.t.Helper()
	if n.addr == "" {
		n.addr = n.await("listening")["addr"].(string)
	}
	resp, err := http.Get("http://" + n.addr + path)
	require.NoError(n.t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(n.t, err)
	return resp.StatusCode, string(body)
}

// produce writes events and returns when Kafka has them.
func (p *place) produce(events ...contract.Event) {
	p.t.Helper()
	for _, e := range events {
		value, err := json.Marshal(e)
		require.NoError(p.t, err)
		p.produceRaw(e.BookingID, value)
	}
}

func (p *place) produceRaw(key string, value []byte) {
	p.t.Helper()
	err := p.kafka.ProduceSync(p.t.Context(), &kgo.Record{Key: []byte(key), Value: value}).FirstErr()
	require.NoError(p.t, err)
}

// confirmed is the event of a confirmed booking with a recipient of its own.
func (p *place) confirmed(booking string) contract.Event {
	return contract.Event{
		EventID: uuid.Must(uuid.NewV7()).String(), EventType: contract.BookingConfirmed, Version: 1, OccurredAt: time.Now(),
		BookingID: booking, Generation: 1, DedupeKey: contract.TicketKey(booking, 1),
		Data: contract.EventData{Recipient: booking + "@example.test", Name: "Anna", Event: "Concert", Seats: []string{"A1"}},
	}
}

// state is the row of a key as the database has it.
type state struct {
	Status   string
	Attempts int
	Stamped  bool
	Error    string
}

// awaitState waits until the row of a key is in a state.
func (p *place) awaitState(key, status string) state {
	p.t.Helper()
	var s state
	p.eventually(fmt.Sprintf("%s is %s", key, status), func() (bool, string) {
		err := p.pool.QueryRow(p.t.Context(), `SELECT status, attempts, dlq_published_at IS NOT NULL, coalesce(last_error, '')
			FROM notifications WHERE dedupe_key = $1`, key).Scan(&s.Status, &s.Attempts, &s.Stamped, &s.Error)
		if err != nil {
			return false, err.Error()
		}
		return s.Status == status, fmt.Sprintf("%+v", s)
	})
	return s
}

func (p *place) count(sql string, args ...any) int {
	p.t.Helper()
	var n int
	require.NoError(p.t, p.pool.QueryRow(p.t.Context(), sql, args...).Scan(&n))
	return n
}

// eventually asks until it is told true; the database, the broker and Kafka
// announce nothing that a test could wait for.
func (p *place) eventually(what string, ask func() (bool, string)) {
	p.t.Helper()
	deadline := time.Now().Add(60 * time.Second)
	for {
		ok, seen := ask()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			require.FailNow(p.t, "did not come true: "+what, "last seen: "+seen)
		}
		select {
		case <-p.t.Context().Done():
			require.FailNow(p.t, "test ended: "+what)
		case <-time.After(25 * time.Millisecond):
		}
	}
}

// queue is the broker's own view of a queue.
func (p *place) queue(name string) infra.Queue {
	p.t.Helper()
	queues, err := parts(p.t).RabbitMQ().Queues(p.t.Context(), p.vhost)
	require.NoError(p.t, err)
	for _, q := range queues {
		if q.Name == name {
			return q
		}
	}
	require.FailNow(p.t, "no queue "+name)
	return infra.Queue{}
}

// awaitEmpty waits until no message is left but n dead letters: in a retry
// queue "messages" counts those on their way, which ready and unacked do not.
func (p *place) awaitEmpty(deadLetters int) {
	p.t.Helper()
	p.eventually("the queues are empty", func() (bool, string) {
		queues, err := parts(p.t).RabbitMQ().Queues(p.t.Context(), p.vhost)
		require.NoError(p.t, err)
		for _, q := range queues {
			want := 0
			if q.Name == contract.QueueDLQ {
				want = deadLetters
			}
			if q.Messages != want {
				return false, fmt.Sprintf("%+v", q)
			}
		}
		return true, ""
	})
}
