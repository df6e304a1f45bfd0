package outbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/goleak"

	"mailproof/system/outbox/outboxtest"
)

const topic = "events"

// pg is the server of this test binary.
var pg *outboxtest.Postgres

// relayEnv makes the test binary a relay of its own process: "database broker".
const (
	relayEnv = "OUTBOX_TEST_RELAY"
	dieEnv   = "OUTBOX_TEST_DIE" // it kills itself between publish and mark
)

func TestMain(m *testing.M) {
	if args := strings.Fields(os.Getenv(relayEnv)); len(args) == 2 {
		os.Exit(relayProcess(args[0], args[1]))
	}
	os.Exit(withPostgres(m))
}

func withPostgres(m *testing.M) int {
	var err error
	if pg, err = outboxtest.Start(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := m.Run()
	if err := pg.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

func relayProcess(url, broker string) int {
	r, err := NewRelay(fast(url, broker, "child"))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if os.Getenv(dieEnv) != "" {
		r.beforeMark = func() error { return syscall.Kill(os.Getpid(), syscall.SIGKILL) }
	}
	if err := r.Run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// fast is a relay's configuration with short waits.
func fast(url, broker, instance string) Config {
	return Config{
		DatabaseURL: url, Brokers: []string{broker}, Instance: instance,
		StandbyInterval: 50 * time.Millisecond, PollInterval: 50 * time.Millisecond,
		PingInterval: 100 * time.Millisecond, SessionTimeout: 2 * time.Second,
		ProduceTimeout: 500 * time.Millisecond, DeliveryTimeout: time.Second,
		BackoffUnit: time.Millisecond, Log: slog.New(slog.DiscardHandler),
		KafkaOpts: []kgo.Opt{kgo.MetadataMinAge(50 * time.Millisecond)},
	}
}

// env is one database and one stand-in for Kafka.
type env struct {
	url    string
	pool   *pgxpool.Pool
	kafka  *kfake.Cluster
	broker string
}

func newEnv(t *testing.T, opts ...kfake.Opt) *env {
	t.Helper()
	c, err := kfake.NewCluster(append([]kfake.Opt{kfake.NumBrokers(1), kfake.SeedTopics(3, topic)}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return &env{url: newDatabase(t), pool: nil, kafka: c, broker: c.ListenAddrs()[0]}
}

func newDatabase(t *testing.T) string {
	t.Helper()
	url := pg.NewDatabase(t)
	require.NoError(t, Migrate(t.Context(), url))
	return url
}

func (e *env) db(t *testing.T) *pgxpool.Pool {
	t.Helper()
	if e.pool == nil {
		p, err := pgxpool.New(t.Context(), e.url)
		require.NoError(t, err)
		t.Cleanup(p.Close)
		e.pool = p
	}
	return e.pool
}

func event(topic, key, body string) Event {
	return Event{Topic: topic, Key: key, Type: "Happened", Body: func(id uuid.UUID) ([]byte, error) {
		return json.Marshal(map[string]string{"event_id": id.String(), "body": body})
	}}
}

// write commits one event.
func (e *env) write(t *testing.T, ev Event) uuid.UUID {
	t.Helper()
	var id uuid.UUID
	require.NoError(t, pgx.BeginFunc(t.Context(), e.db(t), func(tx pgx.Tx) (err error) {
		id, err = Write(t.Context(), tx, ev)
		return err
	}))
	return id
}

// start runs a relay until the test ends or stop is called.
func start(t *testing.T, cfg Config) (r *Relay, stop func()) {
	t.Helper()
	r, err := NewRelay(cfg)
	require.NoError(t, err)
	return r, run(t, r)
}

func run(t *testing.T, r *Relay) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-done)
	})
	t.Cleanup(stop)
	return stop
}

// consume reads n records of the topic from its start.
func (e *env) consume(t *testing.T, topic string, n int) []*kgo.Record {
	t.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(e.broker), kgo.ConsumeTopics(topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.MetadataMinAge(50*time.Millisecond))
	require.NoError(t, err)
	defer cl.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var out []*kgo.Record
	for len(out) < n {
		fs := cl.PollFetches(ctx)
		require.NoError(t, ctx.Err(), "%d of %d records", len(out), n)
		out = append(out, fs.Records()...)
	}
	return out
}

// stored counts what the broker keeps.
func (e *env) stored(t *testing.T, topic string) int {
	t.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(e.broker))
	require.NoError(t, err)
	defer cl.Close()
	ends, err := kadm.NewClient(cl).ListEndOffsets(t.Context(), topic)
	require.NoError(t, err)
	n := 0
	ends.Each(func(o kadm.ListedOffset) { n += int(o.Offset) })
	return n
}

// state of one row of the outbox.
type state struct {
	Published            bool
	Attempts, Rejections int
	LastError            string
	Dead, Alerted        bool
}

func (e *env) state(t *testing.T, id uuid.UUID) state {
	t.Helper()
	var s state
	require.NoError(t, e.db(t).QueryRow(t.Context(), `
SELECT published_at IS NOT NULL, attempts, rejections, coalesce(last_error, ''), dead_at IS NOT NULL, alerted_at IS NOT NULL
FROM outbox WHERE event_id = $1`, id).Scan(&s.Published, &s.Attempts, &s.Rejections, &s.LastError, &s.Dead, &s.Alerted))
	return s
}

func (e *env) eventually(t *testing.T, id uuid.UUID, what string, ok func(state) bool) {
	t.Helper()
	require.Eventually(t, func() bool { return ok(e.state(t, id)) }, 20*time.Second, 10*time.Millisecond, what)
}

func published(s state) bool { return s.Published }

func TestConfigNamesEverythingWrong(t *testing.T) {
	t.Parallel()
	_, err := NewRelay(Config{SessionTimeout: time.Second, DeliveryTimeout: time.Second, BatchSize: -1})
	require.Error(t, err)
	for _, want := range []string{"DatabaseURL", "Brokers", "SessionTimeout", "DeliveryTimeout", "BatchSize"} {
		require.ErrorContains(t, err, want)
	}
}

func TestBackoff(t *testing.T) {
	t.Parallel()
	var got []time.Duration
	for n := 1; n <= 8; n++ {
		got = append(got, backoff(time.Second, n))
	}
	require.Equal(t, []time.Duration{
		2 * time.Second, 4 * time.Second, 8 * time.Second, 16 * time.Second, 32 * time.Second,
		time.Minute, time.Minute, time.Minute,
	}, got)
}

// LAB-ATOM: a rollback leaves nothing, in the table and on the topic.
func TestRollbackLeavesNothing(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	undone := errors.New("undone")
	err := pgx.BeginFunc(t.Context(), e.db(t), func(tx pgx.Tx) error {
		_, err := Write(t.Context(), tx, event(topic, "a", "never"))
		require.NoError(t, err)
		return undone
	})
	require.ErrorIs(t, err, undone)
	_, _ = start(t, fast(e.url, e.broker, "r"))
	id := e.write(t, event(topic, "a", "kept"))
	recs := e.consume(t, topic, 1)
	require.Equal(t, id.String(), header(recs[0], "event_id"))
	e.eventually(t, id, "marked", published)
	require.Equal(t, 1, e.stored(t, topic))
}

func header(r *kgo.Record, key string) string {
	for _, h := range r.Headers {
		if h.Key == key {
			return string(h.Value)
		}
	}
	return ""
}

func TestWriteRefusesAnIncompleteEvent(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	for _, ev := range []Event{{}, {Topic: topic, Key: "k"}, {Topic: topic, Key: "k", Type: "T"}} {
		err := pgx.BeginFunc(t.Context(), e.db(t), func(tx pgx.Tx) error {
			_, err := Write(t.Context(), tx, ev)
			return err
		})
		require.Error(t, err)
	}
	bad := errors.New("no body")
	err := pgx.BeginFunc(t.Context(), e.db(t), func(tx pgx.Tx) error {
		_, err := Write(t.Context(), tx, Event{Topic: topic, Key: "k", Type: "T", Body: func(uuid.UUID) ([]byte, error) { return nil, bad }})
		return err
	})
	require.ErrorIs(t, err, bad)
}

// What the topic carries: key, headers, and the body with the row's event_id.
func TestRecord(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	id := e.write(t, event(topic, "booking-1", "hello"))
	require.Equal(t, uuid.Version(7), id.Version())
	_, _ = start(t, fast(e.url, e.broker, "r"))
	r := e.consume(t, topic, 1)[0]
	require.Equal(t, "booking-1", string(r.Key))
	require.Equal(t, "Happened", header(r, "event_type"))
	var body map[string]string
	require.NoError(t, json.Unmarshal(r.Value, &body))
	require.Equal(t, map[string]string{"event_id": id.String(), "body": "hello"}, body)
}

// LAB-BATCH: five rows, the third times out: 1 and 2 are marked, 3 has one
// attempt and its error, and the next scan publishes 3, 4, 5.
func TestPrefixIsMarkedWhenTheThirdTimesOut(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	ids := []uuid.UUID{
		e.write(t, event(topic, "a", "1")),
		e.write(t, event(topic, "b", "2")),
		e.write(t, event("not-there-yet", "c", "3")),
		e.write(t, event(topic, "d", "4")),
		e.write(t, event(topic, "e", "5")),
	}
	cfg := fast(e.url, e.broker, "r")
	cfg.BackoffUnit = 50 * time.Millisecond
	_, _ = start(t, cfg)
	e.eventually(t, ids[2], "the third failed", func(s state) bool { return s.Attempts >= 1 })
	for i, want := range []bool{true, true, false, false, false} {
		require.Equal(t, want, e.state(t, ids[i]).Published, "row %d", i+1)
	}
	third := e.state(t, ids[2])
	require.NotEmpty(t, third.LastError)
	require.Zero(t, third.Rejections, "a time-out is not the record's own fault")
	require.Zero(t, e.state(t, ids[3]).Attempts)

	createTopic(t, e, "not-there-yet")
	for _, id := range ids[2:] {
		e.eventually(t, id, "published after all", published)
	}
}

func createTopic(t *testing.T, e *env, name string) {
	t.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(e.broker))
	require.NoError(t, err)
	defer cl.Close()
	_, err = kadm.NewClient(cl).CreateTopic(t.Context(), 1, 1, nil, name)
	require.NoError(t, err)
}

// A record that is too large is dead after MaxRejections tries of its own,
// alerted, and nothing else suffers (A2-05).
func TestOwnFaultEndsDeadAndAlerted(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	first := e.write(t, event(topic, "a", "1"))
	big := e.write(t, event(topic, "a", strings.Repeat("x", 2000)))
	last := e.write(t, event(topic, "a", "3"))
	cfg := fast(e.url, e.broker, "r")
	cfg.MaxRejections = 3
	cfg.KafkaOpts = append(cfg.KafkaOpts, kgo.ProducerBatchMaxBytes(1024), kgo.ProducerBatchCompression(kgo.NoCompression()))
	alerts := make(chan Dead, 10)
	var calls atomic.Int64
	cfg.OnDead = func(_ context.Context, d Dead) error {
		if calls.Add(1) == 1 {
			return errors.New("nobody answers")
		}
		alerts <- d
		return nil
	}
	_, stop := start(t, cfg)
	e.eventually(t, last, "the one behind it goes on", published)
	require.True(t, e.state(t, first).Published)
	s := e.state(t, big)
	require.True(t, s.Dead)
	require.Equal(t, 3, s.Rejections)
	require.Equal(t, 3, s.Attempts)
	require.False(t, s.Published)
	require.False(t, s.Alerted, "the alert failed")
	b, err := ReadBacklog(t.Context(), e.db(t))
	require.NoError(t, err)
	require.Equal(t, Backlog{Dead: 1}, b)
	stop()

	_, _ = start(t, cfg) // whoever leads next repeats the alert
	require.Equal(t, big, (<-alerts).EventID)
	e.eventually(t, big, "the alert is stamped", func(s state) bool { return s.Alerted })
}

// A broker that refuses a batch does not say for whose sake: its records go
// alone, and only the guilty one is blamed and ends dead.
func TestRefusedBatchIsSplit(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	var ids []uuid.UUID
	for i := range 10 {
		body := fmt.Sprint(i)
		if i == 4 {
			body = "guilty"
		}
		ids = append(ids, e.write(t, event(topic, "same", body)))
	}
	var batches atomic.Int64
	e.kafka.ControlKey(int16(kmsg.Produce), func(kreq kmsg.Request) (kmsg.Response, error, bool) {
		e.kafka.KeepControl()
		req := kreq.(*kmsg.ProduceRequest)
		for _, rt := range req.Topics {
			for _, rp := range rt.Partitions {
				var batch kmsg.RecordBatch
				if err := batch.ReadFrom(rp.Records); err != nil {
					t.Errorf("produced batch: %v", err)
				}
				if batch.NumRecords > 1 {
					batches.Add(1)
				}
				if batch.NumRecords > 1 || strings.Contains(string(rp.Records), "guilty") {
					return refuse(req, kerr.MessageTooLarge), nil, true
				}
			}
		}
		return nil, nil, false
	})
	cfg := fast(e.url, e.broker, "r")
	cfg.MaxRejections = 2
	cfg.KafkaOpts = append(cfg.KafkaOpts, kgo.ProducerBatchCompression(kgo.NoCompression()))
	_, _ = start(t, cfg)
	for i, id := range ids {
		if i == 4 {
			e.eventually(t, id, "the guilty one is dead", func(s state) bool { return s.Dead && s.Rejections == 2 })
			continue
		}
		e.eventually(t, id, "published", published)
		require.Zero(t, e.state(t, id).Rejections)
		require.Zero(t, e.state(t, id).Attempts)
	}
	require.Positive(t, batches.Load(), "no batch was refused")
}

// refuse answers a produce request with one error for every partition.
func refuse(req *kmsg.ProduceRequest, cause *kerr.Error) kmsg.Response {
	resp := req.ResponseKind().(*kmsg.ProduceResponse)
	for _, t := range req.Topics {
		rt := kmsg.NewProduceResponseTopic()
		rt.Topic, rt.TopicID = t.Topic, t.TopicID
		for _, p := range t.Partitions {
			rp := kmsg.NewProduceResponseTopicPartition()
			rp.Partition, rp.ErrorCode = p.Partition, cause.Code
			rt.Partitions = append(rt.Partitions, rp)
		}
		resp.Topics = append(resp.Topics, rt)
	}
	return resp
}

// LAB-T4 with the outbox: the order is committed while the broker is dead, for
// longer than MaxRejections tries; when it is back the event goes out.
func TestDeadBrokerNeverKillsAnEvent(t *testing.T) {
	t.Parallel()
	port := freePort(t)
	e := &env{url: newDatabase(t), broker: fmt.Sprintf("127.0.0.1:%d", port)}
	cfg := fast(e.url, e.broker, "r")
	cfg.MaxRejections = 1
	_, _ = start(t, cfg)
	id := e.write(t, event(topic, "a", "1"))
	e.eventually(t, id, "given up twice", func(s state) bool { return s.Attempts >= 2 })
	s := e.state(t, id)
	require.Zero(t, s.Rejections)
	require.False(t, s.Dead)

	c, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.Ports(port), kfake.SeedTopics(1, topic))
	require.NoError(t, err)
	t.Cleanup(c.Close)
	e.eventually(t, id, "published when the broker is back", published)
}

func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	return l.Addr().(*net.TCPAddr).Port
}

// A transaction with a lower id may commit after a higher one was published.
func TestLowerIDCommittedLaterIsPublished(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	_, _ = start(t, fast(e.url, e.broker, "r"))
	slow, err := e.db(t).Begin(t.Context())
	require.NoError(t, err)
	low, err := Write(t.Context(), slow, event(topic, "slow", "1"))
	require.NoError(t, err)
	high := e.write(t, event(topic, "fast", "2"))
	e.eventually(t, high, "the higher id is published", published)
	require.NoError(t, slow.Commit(t.Context()))
	e.eventually(t, low, "the lower id is published too", published)
	recs := e.consume(t, topic, 2)
	require.Len(t, recs, 2)
}

// A lower id that is committed between the read of a batch and its mark is not
// marked with it.
func TestMarkTouchesOnlyWhatWasPublished(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	slow, err := e.db(t).Begin(t.Context())
	require.NoError(t, err)
	low, err := Write(t.Context(), slow, event(topic, "slow", "1"))
	require.NoError(t, err)
	high := e.write(t, event(topic, "fast", "2"))
	r, err := NewRelay(fast(e.url, e.broker, "r"))
	require.NoError(t, err)
	var once sync.Once
	r.beforeMark = func() (err error) {
		once.Do(func() { err = slow.Commit(context.Background()) })
		return err
	}
	run(t, r)
	e.eventually(t, high, "the higher id is published", published)
	e.eventually(t, low, "the lower id is published", published)
	require.Len(t, e.consume(t, topic, 2), 2)
}

// A relay that dies between acknowledgement and mark publishes the same
// event_id again (A2-08, TRAP-2-2).
func TestKilledBetweenPublishAndMark(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	id := e.write(t, event(topic, "a", "1"))
	child := relayChild(t, e, dieEnv+"=1")
	err := child.Wait()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, syscall.SIGKILL, exit.Sys().(syscall.WaitStatus).Signal())
	require.Equal(t, 1, e.stored(t, topic))
	require.False(t, e.state(t, id).Published)

	_, _ = start(t, fast(e.url, e.broker, "next"))
	recs := e.consume(t, topic, 2)
	e.eventually(t, id, "marked", published)
	require.Equal(t, id.String(), header(recs[0], "event_id"))
	require.Equal(t, id.String(), header(recs[1], "event_id"))
	require.Equal(t, recs[0].Value, recs[1].Value)
}

func relayChild(t *testing.T, e *env, extra ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), append(extra, relayEnv+"="+e.url+" "+e.broker)...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(t, cmd.Start())
	return cmd
}

// LAB-LOCK: t, f, and t after the first is gone.
func TestOneRelayAtATime(t *testing.T) {
	t.Parallel()
	cfg := fast(newDatabase(t), "127.0.0.1:1", "a").withDefaults()
	a, err := openSession(t.Context(), &cfg)
	require.NoError(t, err)
	b, err := openSession(t.Context(), &cfg)
	require.NoError(t, err)
	defer b.close()

	var got []bool
	try := func(s *session) {
		ok, err := s.tryLock(t.Context())
		require.NoError(t, err)
		got = append(got, ok)
	}
	try(a)
	try(b)
	a.close()
	require.Eventually(t, func() bool { // the server frees it a moment after the close
		ok, err := b.tryLock(t.Context())
		return err == nil && ok
	}, 5*time.Second, 5*time.Millisecond)
	require.Equal(t, []bool{true, false}, got)
}

// A stopped holder keeps its connection and yet loses the lock; woken up, it
// finds its session gone and stands by.
func TestStoppedHolderLosesTheLock(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	child := relayChild(t, e)
	defer func() {
		require.NoError(t, child.Process.Kill())
		_ = child.Wait() // killed, as asked
	}()
	holder := func() string {
		var name string
		err := e.db(t).QueryRow(t.Context(), `
SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.granted AND a.datname = current_database()`).Scan(&name)
		if errors.Is(err, pgx.ErrNoRows) {
			return ""
		}
		require.NoError(t, err)
		return name
	}
	require.Eventually(t, func() bool { return holder() == "outbox-relay child" }, 20*time.Second, 10*time.Millisecond)
	require.NoError(t, child.Process.Signal(syscall.SIGSTOP))
	stopped := time.Now()

	second, _ := start(t, fast(e.url, e.broker, "second"))
	id := e.write(t, event(topic, "a", "1"))
	e.eventually(t, id, "the second relay publishes", published)
	require.True(t, second.Leading())
	require.Equal(t, "outbox-relay second", holder())
	require.Less(t, time.Since(stopped), 10*time.Second)

	require.NoError(t, child.Process.Signal(syscall.SIGCONT))
	standsBy := func() bool {
		var n int
		err := e.db(t).QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity
WHERE application_name = 'outbox-relay child' AND datname = current_database() AND backend_start > $1`, stopped).Scan(&n)
		return err == nil && n == 1
	}
	require.Eventually(t, standsBy, 20*time.Second, 10*time.Millisecond, "the woken relay connects anew and stands by")
	again := e.write(t, event(topic, "a", "2"))
	e.eventually(t, again, "published", published)
	require.Equal(t, "outbox-relay second", holder())
	require.Equal(t, 2, e.stored(t, topic), "the woken relay published nothing")
}

// The relay goes on after its session was ended under it.
func TestLostSession(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	r, _ := start(t, fast(e.url, e.broker, "r"))
	require.Eventually(t, r.Leading, 20*time.Second, 5*time.Millisecond)
	_, err := e.db(t).Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE application_name = 'outbox-relay r' AND datname = current_database()`)
	require.NoError(t, err)
	id := e.write(t, event(topic, "a", "1"))
	e.eventually(t, id, "published in a new session", published)
}

// A database that is away is logged ever more seldom, and the relay leads as soon
// as it is back.
func TestDatabaseAwayIsLoggedSeldom(t *testing.T) {
	t.Parallel()
	var log strings.Builder
	cfg := Config{
		DatabaseURL: "postgres://nobody@127.0.0.1:1/none", Brokers: []string{"127.0.0.1:1"}, Instance: "r",
		Log: slog.New(slog.NewTextHandler(&log, nil)),
	}
	r, err := NewRelay(cfg)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 5*reconnectAfter)
	defer cancel()
	require.NoError(t, r.Run(ctx))
	require.Contains(t, log.String(), "failures=1")
	require.Contains(t, log.String(), "failures=4")
	require.NotContains(t, log.String(), "failures=3")
}

// The doorbell spares the wait for the next poll; many presses are few rings.
func TestDoorbell(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	cfg := fast(e.url, e.broker, "r")
	cfg.PollInterval, cfg.SessionTimeout = 30*time.Second, time.Minute
	r, _ := start(t, cfg)
	require.Eventually(t, r.Leading, 20*time.Second, 5*time.Millisecond)
	first := e.write(t, event(topic, "a", "0")) // seen by the first scan, or by the ring
	rung := &countingExecer{Execer: e.db(t)}
	bell := NewDoorbell(rung, 20*time.Millisecond, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); bell.Run(ctx) }()
	begin := time.Now()
	bell.Press()
	e.eventually(t, first, "published", published)
	for i := range 100 {
		id := e.write(t, event(topic, "a", fmt.Sprint(i)))
		bell.Press()
		if i == 99 {
			e.eventually(t, id, "published", published)
		}
	}
	took := time.Since(begin)
	require.Less(t, took, cfg.PollInterval)
	cancel()
	<-done
	require.LessOrEqual(t, rung.n.Load(), int64(took/(20*time.Millisecond))+2)
}

type countingExecer struct {
	Execer
	n atomic.Int64
}

func (c *countingExecer) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	c.n.Add(1)
	return c.Execer.Exec(ctx, sql, args...)
}

// Many writers, a broker that errs and relays that are cut off at random: all
// events arrive, and per key their first copies are in order.
func TestOrderPerKeyUnderFaults(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	const keys, perKey = 8, 40
	rng := rand.New(rand.NewPCG(1, 2))
	var mu sync.Mutex
	var cut atomic.Int64
	e.kafka.ControlKey(int16(kmsg.Produce), func(req kmsg.Request) (kmsg.Response, error, bool) {
		e.kafka.KeepControl()
		mu.Lock()
		defer mu.Unlock()
		switch rng.IntN(6) {
		case 0:
			cut.Add(1)
			return nil, errors.New("cut"), true
		case 1:
			cut.Add(1)
			return refuse(req.(*kmsg.ProduceRequest), kerr.NotEnoughReplicas), nil, true
		default:
			return nil, nil, false
		}
	})
	cfg := fast(e.url, e.broker, "r")
	cfg.BatchSize = 25
	r, err := NewRelay(cfg)
	require.NoError(t, err)
	var marks int
	r.beforeMark = func() error {
		if marks++; marks%5 == 0 {
			return errors.New("the term ends between publish and mark")
		}
		return nil
	}
	run(t, r)

	db := e.db(t)
	_, err = db.Exec(t.Context(), `CREATE TABLE agg (key text PRIMARY KEY, n int NOT NULL)`)
	require.NoError(t, err)
	var writers sync.WaitGroup
	for k := range keys {
		key := fmt.Sprintf("k%d", k)
		_, err := db.Exec(t.Context(), `INSERT INTO agg VALUES ($1, 0)`, key)
		require.NoError(t, err)
		for range 2 {
			writers.Go(func() {
				for range perKey / 2 {
					err := pgx.BeginFunc(t.Context(), db, func(tx pgx.Tx) error {
						var n int
						if err := tx.QueryRow(t.Context(), `UPDATE agg SET n = n + 1 WHERE key = $1 RETURNING n`, key).Scan(&n); err != nil {
							return err
						}
						_, err := Write(t.Context(), tx, event(topic, key, fmt.Sprint(n)))
						return err
					})
					if err != nil {
						t.Errorf("write %s: %v", key, err)
						return
					}
				}
			})
		}
	}
	writers.Wait()
	require.Eventually(t, func() bool {
		b, err := ReadBacklog(t.Context(), db)
		return err == nil && b == Backlog{}
	}, 60*time.Second, 20*time.Millisecond)
	require.Positive(t, cut.Load(), "no fault struck")

	seen := map[string]int{} // key → highest number so far
	for _, rec := range e.consume(t, topic, e.stored(t, topic)) {
		var body struct{ Body string }
		require.NoError(t, json.Unmarshal(rec.Value, &body))
		var n int
		_, err := fmt.Sscan(body.Body, &n)
		require.NoError(t, err)
		key := string(rec.Key)
		require.LessOrEqual(t, n, seen[key]+1, "%s: %d came before %d", key, n, seen[key]+1)
		seen[key] = max(seen[key], n)
	}
	require.Len(t, seen, keys)
	for key, n := range seen {
		require.Equal(t, perKey, n, key)
	}
}

// Stopping waits for what is in flight, marks it, and leaves no goroutine.
func TestStopDrains(t *testing.T) {
	c, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, topic))
	require.NoError(t, err)
	defer c.Close()
	e := &env{url: newDatabase(t), kafka: c, broker: c.ListenAddrs()[0]}
	id := e.write(t, event(topic, "a", "1"))
	arrived, release := make(chan struct{}), make(chan struct{})
	c.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		close(arrived)
		c.SleepControl(func() { <-release })
		return nil, nil, false
	})
	before := goleak.IgnoreCurrent()
	r, err := NewRelay(fast(e.url, e.broker, "r"))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	<-arrived
	cancel()
	close(release)
	require.NoError(t, <-done)
	require.True(t, e.state(t, id).Published)
	goleak.VerifyNone(t, before, goleak.IgnoreTopFunction("github.com/twmb/franz-go/pkg/kfake.(*clientConn).read"))
}

// Rows past their retention go, the unpublished and the dead stay.
func TestPurge(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	old, fresh, waiting := e.write(t, event(topic, "a", "1")), e.write(t, event(topic, "a", "2")), e.write(t, event(topic, "a", "3"))
	_, err := e.db(t).Exec(t.Context(), `
UPDATE outbox SET published_at = CASE event_id WHEN $1 THEN now() - interval '8 days' WHEN $2 THEN now() - interval '6 days' END`, old, fresh)
	require.NoError(t, err)
	cfg := fast(e.url, e.broker, "r").withDefaults()
	s, err := openSession(t.Context(), &cfg)
	require.NoError(t, err)
	defer s.close()
	n, err := s.purge(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 1, n)
	left, err := e.db(t).Query(t.Context(), `SELECT event_id FROM outbox ORDER BY id`)
	require.NoError(t, err)
	ids, err := pgx.CollectRows(left, pgx.RowTo[uuid.UUID])
	require.NoError(t, err)
	require.Equal(t, []uuid.UUID{fresh, waiting}, ids)
}

// Migrating twice at once, and again, is harmless.
func TestMigrateConcurrently(t *testing.T) {
	t.Parallel()
	url := pg.NewDatabase(t)
	errs := make(chan error, 3)
	for range 3 {
		go func() { errs <- Migrate(t.Context(), url) }()
	}
	for range 3 {
		require.NoError(t, <-errs)
	}
	require.NoError(t, Migrate(t.Context(), url))
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(context.Background())) }()
	var identity string
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT relreplident::text FROM pg_class WHERE relname = 'outbox'`).Scan(&identity))
	require.Equal(t, "f", identity)
}

// Published rows past their retention go, however many there are and however
// many dead ones, which stay, lie before them (TRAP-1-9).
func TestRetentionKeepsUpAndPassesTheDead(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	fill := func(n int, dead bool) {
		t.Helper()
		_, err := e.db(t).Exec(t.Context(), `
INSERT INTO outbox (event_id, topic, key, event_type, payload, created_at, published_at, dead_at, alerted_at)
SELECT gen_random_uuid(), 'topic', 'k', 'T', '{}', s.at, CASE WHEN NOT $2 THEN s.at END, CASE WHEN $2 THEN s.at END, CASE WHEN $2 THEN s.at END
FROM generate_series(1, $1::int), LATERAL (SELECT now() - interval '8 days' AS at) AS s`, n, dead)
		require.NoError(t, err)
	}
	fill(purgeBatch+100, true)
	fill(3*purgeBatch+100, false)
	_, _ = start(t, fast(e.url, e.broker, "r"))
	require.Eventually(t, func() bool {
		var published, dead int
		err := e.db(t).QueryRow(t.Context(), `SELECT count(published_at), count(dead_at) FROM outbox`).Scan(&published, &dead)
		return err == nil && published == 0 && dead == purgeBatch+100
	}, 20*time.Second, 10*time.Millisecond)
}

// A dead event is published under its own event_id once a person lets it, and
// only a dead one can be revived (ADR 0010).
func TestReviveIsPublished(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	big := e.write(t, event(topic, "a", strings.Repeat("x", 2000)))
	small := fast(e.url, e.broker, "r")
	small.MaxRejections = 1
	small.KafkaOpts = append(small.KafkaOpts, kgo.ProducerBatchMaxBytes(1024), kgo.ProducerBatchCompression(kgo.NoCompression()))
	_, stop := start(t, small)
	e.eventually(t, big, "dead", func(s state) bool { return s.Dead })
	stop()
	dead, err := ListDead(t.Context(), e.db(t), 10)
	require.NoError(t, err)
	require.Len(t, dead, 1)
	require.Equal(t, big, dead[0].EventID)
	require.NotEmpty(t, dead[0].LastError)

	require.NoError(t, Revive(t.Context(), e.db(t), big))
	require.ErrorIs(t, Revive(t.Context(), e.db(t), big), ErrNotDead)
	_, _ = start(t, fast(e.url, e.broker, "r2")) // the bound was raised
	require.Equal(t, big.String(), header(e.consume(t, topic, 1)[0], "event_id"))
	e.eventually(t, big, "published", published)
	found, err := Find(t.Context(), e.db(t), "a", 10)
	require.NoError(t, err)
	require.Len(t, found, 1)
	require.NotNil(t, found[0].PublishedAt)
	require.Nil(t, found[0].DeadAt)
}
