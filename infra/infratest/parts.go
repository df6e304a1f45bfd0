package infratest

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"mailproof/infra"
)

// States of proc(5), as far as they matter.
const (
	alive  = "RSDI" // runs or waits
	halted = "T"
	zombie = "Z"
)

// requireState checks what the kernel says of a node's process.
func (s *suite) requireState(t *testing.T, n infra.Node, letters string) {
	t.Helper()
	if !s.features.PIDs {
		return
	}
	require.Positive(t, n.PID(), n.Name())
	state, ok := processState(n.PID())
	require.True(t, ok, "%s has no process %d", n.Name(), n.PID())
	require.Contains(t, letters, state, n.Name())
}

// requireGone accepts a zombie: who reaps it is not the provider's to choose.
func (s *suite) requireGone(t *testing.T, pid int) {
	t.Helper()
	if !s.features.PIDs {
		return
	}
	if state, ok := processState(pid); ok {
		require.Equal(t, zombie, state, "process %d is left", pid)
	}
}

// processState is a letter; ok is false when there is no such process.
func processState(pid int) (letter string, ok bool) {
	status, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		return "", false
	}
	_, after, ok := strings.Cut(string(status), "\nState:\t")
	return after[:min(1, len(after))], ok
}

// eventually repeats ask until it succeeds; the last error is the finding.
func eventually(t *testing.T, what string, ask func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), actBound)
	defer cancel()
	for {
		one, stop := context.WithTimeout(ctx, askBound)
		err := ask(one)
		stop()
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			require.NoError(t, err, what)
		case <-time.After(tick):
		}
	}
}

// Postgres.

func (s *suite) query(ctx context.Context, database, sql string, args ...any) (text string, err error) {
	conn, err := pgx.Connect(ctx, s.stack.Postgres().URL(database))
	if err != nil {
		return "", err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	err = conn.QueryRow(ctx, sql, args...).Scan(&text)
	return text, err
}

func (s *suite) postgres(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), askBound)
	defer cancel()
	for setting, want := range map[string]string{"wal_level": "logical", "fsync": "on", "full_page_writes": "on"} {
		got, err := s.query(ctx, "postgres", "SELECT current_setting($1)", setting)
		require.NoError(t, err)
		require.Equal(t, want, got, setting)
	}
	name := "Conform " + strconv.FormatInt(time.Now().UnixNano(), 36) // needs quoting, in SQL and in the URL
	require.NoError(t, s.stack.Postgres().CreateDatabase(ctx, name))
	require.Error(t, s.stack.Postgres().CreateDatabase(ctx, name), "it exists")
	got, err := s.query(ctx, name, "SELECT current_database()::text")
	require.NoError(t, err)
	require.Equal(t, name, got)
	slot := "conform_" + strconv.FormatInt(time.Now().UnixNano(), 36)
	_, err = s.query(ctx, name, "SELECT lsn::text FROM pg_create_logical_replication_slot($1, 'test_decoding')", slot)
	require.NoError(t, err, "the evidence of a run is read through a logical slot")
	_, err = s.query(ctx, name, "SELECT pg_drop_replication_slot($1)::text", slot)
	require.NoError(t, err)
}

func (s *suite) postgresKilled(t *testing.T) {
	pg := s.stack.Postgres()
	if s.refuses(t, pg) {
		return
	}
	ctx, cancel := context.WithTimeout(t.Context(), actBound)
	defer cancel()
	_, err := s.query(ctx, "postgres", "WITH made AS (SELECT 1) SELECT txid_current()::text FROM made")
	require.NoError(t, err)
	conn, err := pgx.Connect(ctx, pg.URL("postgres"))
	require.NoError(t, err)
	_, err = conn.Exec(ctx, "CREATE TABLE kept (n int); INSERT INTO kept VALUES (42)")
	require.NoError(t, err)
	var backend int
	require.NoError(t, conn.QueryRow(ctx, "SELECT pg_backend_pid()").Scan(&backend))

	s.kill(t, pg)
	s.requireGone(t, backend) // a backend that outlives its postmaster could still commit
	require.Error(t, conn.Ping(ctx))
	s.restart(t, pg)
	got, err := s.query(ctx, "postgres", "SELECT n::text FROM kept")
	require.NoError(t, err)
	require.Equal(t, "42", got)
}

func (s *suite) postgresPaused(t *testing.T) {
	pg := s.stack.Postgres()
	if s.refuses(t, pg) {
		return
	}
	conn, err := pgx.Connect(t.Context(), pg.URL("postgres"))
	require.NoError(t, err)
	defer conn.Close(context.Background())

	s.pause(t, pg)
	answered := make(chan error, 1)
	go func() {
		var one int
		answered <- conn.QueryRow(t.Context(), "SELECT 1").Scan(&one)
	}()
	select {
	case err := <-answered:
		require.Fail(t, "an open session must hang while the server is paused", "%v", err)
	case <-time.After(500 * time.Millisecond): // an absence has no event to wait for
	}
	s.resume(t, pg)
	require.NoError(t, <-answered, "the session goes on")
}

// RabbitMQ.

// queueName is the queue that the steps share.
const queueName = "q.conform"

func (s *suite) rabbitmq(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), actBound)
	defer cancel()
	s.vhost = "conform/1" // needs quoting in the URL
	require.NoError(t, s.stack.RabbitMQ().CreateVhost(ctx, s.vhost))
	require.Len(t, s.stack.RabbitMQ().URLs(s.vhost), 3)
	require.NoError(t, declare(s.stack.RabbitMQ().URLs(s.vhost)[0]))
	for i, url := range s.stack.RabbitMQ().URLs(s.vhost) {
		require.NoError(t, publish(ctx, url, fmt.Sprintf("from node %d", i)))
	}
	for _, url := range s.stack.RabbitMQ().URLs("") {
		conn, err := amqp.Dial(url)
		require.NoError(t, err, "the default virtual host")
		require.NoError(t, conn.Close())
	}
	eventually(t, "the queue is listed", func(ctx context.Context) error {
		q, err := s.queue(ctx)
		if err != nil {
			return err
		}
		if q.Type != "quorum" || len(q.Members) != 3 || len(q.Online) != 3 || q.Messages != 3 || q.Ready != 3 || q.Unacked != 0 {
			return fmt.Errorf("got %+v", q)
		}
		return nil
	})
}

func (s *suite) queue(ctx context.Context) (infra.Queue, error) {
	queues, err := s.stack.RabbitMQ().Queues(ctx, s.vhost)
	if err != nil {
		return infra.Queue{}, err
	}
	for _, q := range queues {
		if q.Name == queueName {
			return q, nil
		}
	}
	return infra.Queue{}, fmt.Errorf("no queue %s among %v", queueName, queues)
}

// declare makes the queue. It fails while a node is paused: a change of the
// cluster's own tables waits for every node that is not known to be down.
func declare(url string) error {
	conn, err := amqp.DialConfig(url, amqp.Config{Dial: amqp.DefaultDial(5 * time.Second)})
	if err != nil {
		return err
	}
	defer conn.CloseDeadline(time.Now().Add(time.Second))
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	args := amqp.Table{amqp.QueueTypeArg: amqp.QueueTypeQuorum}
	_, err = ch.QueueDeclare(queueName, true, false, false, false, args)
	return err
}

// publisher is a channel in confirm mode on a connection of its own.
type publisher struct {
	conn    *amqp.Connection
	channel *amqp.Channel
}

func openPublisher(url string) (*publisher, error) {
	conn, err := amqp.DialConfig(url, amqp.Config{Heartbeat: 5 * time.Second, Dial: amqp.DefaultDial(5 * time.Second)})
	if err != nil {
		return nil, err
	}
	p := &publisher{conn: conn}
	if p.channel, err = conn.Channel(); err == nil {
		err = p.channel.Confirm(false)
	}
	if err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

func (p *publisher) close() { _ = p.conn.CloseDeadline(time.Now().Add(time.Second)) }

// publish returns when the broker has confirmed the message.
func (p *publisher) publish(ctx context.Context, body string) error {
	message := amqp.Publishing{DeliveryMode: amqp.Persistent, Body: []byte(body)}
	confirm, err := p.channel.PublishWithDeferredConfirm("", queueName, true, false, message)
	if err != nil {
		return err
	}
	acked, err := confirm.WaitContext(ctx)
	if err == nil && !acked {
		err = fmt.Errorf("message %q was not confirmed", body)
	}
	return err
}

// publish publishes one message through a connection of its own.
func publish(ctx context.Context, url, body string) error {
	p, err := openPublisher(url)
	if err != nil {
		return err
	}
	defer p.close()
	return p.publish(ctx, body)
}

// take reads every message that is ready, with acks, in any order.
func take(url string) ([]string, error) {
	conn, err := amqp.DialConfig(url, amqp.Config{Dial: amqp.DefaultDial(5 * time.Second)})
	if err != nil {
		return nil, err
	}
	defer conn.CloseDeadline(time.Now().Add(time.Second))
	ch, err := conn.Channel()
	if err != nil {
		return nil, err
	}
	var bodies []string
	for {
		d, ok, err := ch.Get(queueName, false)
		if err != nil || !ok {
			return bodies, err
		}
		if err := d.Ack(false); err != nil {
			return bodies, err
		}
		bodies = append(bodies, string(d.Body))
	}
}

func (s *suite) vhosts(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), actBound)
	defer cancel()
	const other = "conform-2"
	_, err := amqp.Dial(s.stack.RabbitMQ().URLs(other)[0])
	require.Error(t, err, "a virtual host that nobody made")
	require.NoError(t, s.stack.RabbitMQ().CreateVhost(ctx, other))
	queues, err := s.stack.RabbitMQ().Queues(ctx, other)
	require.NoError(t, err)
	require.Empty(t, queues)
	require.NoError(t, declare(s.stack.RabbitMQ().URLs(other)[0]))
	require.NoError(t, publish(ctx, s.stack.RabbitMQ().URLs(other)[0], "apart"), "the same name is another queue")
	q, err := s.queue(ctx)
	require.NoError(t, err)
	require.Equal(t, 3, q.Messages, "the first virtual host has what it had")
	_, err = s.stack.RabbitMQ().Leader(ctx, other, "q.none")
	require.ErrorContains(t, err, "not_found")
}

func (s *suite) leader(t *testing.T) infra.Node {
	t.Helper()
	var leader infra.Node
	eventually(t, "the queue has a leader", func(ctx context.Context) (err error) {
		leader, err = s.stack.RabbitMQ().Leader(ctx, s.vhost, queueName)
		return err
	})
	return leader
}

// nextLeader waits until another node leads.
func (s *suite) nextLeader(t *testing.T, former infra.Node) infra.Node {
	t.Helper()
	var next infra.Node
	eventually(t, "another node leads", func(ctx context.Context) (err error) {
		next, err = s.stack.RabbitMQ().Leader(ctx, s.vhost, queueName)
		if err == nil && next.Name() == former.Name() {
			err = fmt.Errorf("%s still leads", former.Name())
		}
		return err
	})
	return next
}

// otherURL is that of a node which is not n.
func (s *suite) otherURL(n infra.Node) string {
	for i, other := range s.stack.RabbitMQ().Nodes() {
		if other.Name() != n.Name() {
			return s.stack.RabbitMQ().URLs(s.vhost)[i]
		}
	}
	return ""
}

func (s *suite) leaderKilled(t *testing.T) {
	leader := s.leader(t)
	if s.refuses(t, leader) {
		return
	}
	other := s.otherURL(leader)
	_, err := take(other)
	require.NoError(t, err)
	require.NoError(t, publish(t.Context(), other, "confirmed before"))

	s.kill(t, leader)
	eventually(t, "a publish after the leader's end", func(ctx context.Context) error {
		return publish(ctx, other, "confirmed after")
	})
	next := s.nextLeader(t, leader)
	s.restart(t, leader)
	s.awaitOnline(t)
	bodies, err := take(s.otherURL(next))
	require.NoError(t, err)
	require.Contains(t, bodies, "confirmed before")
	require.Contains(t, bodies, "confirmed after")
}

// awaitOnline waits until the queue has all its members again.
func (s *suite) awaitOnline(t *testing.T) {
	t.Helper()
	eventually(t, "all members are online", func(ctx context.Context) error {
		q, err := s.queue(ctx)
		if err == nil && len(q.Online) != 3 {
			err = fmt.Errorf("online: %v", q.Online)
		}
		return err
	})
}

// requireListBounded checks that the list answers or fails, and does not hang,
// while a node is paused. RabbitMQ's own tool waits for that node: 3.x can be
// asked around it, 4.x cannot.
func (s *suite) requireListBounded(t *testing.T) {
	t.Helper()
	began := time.Now()
	_, err := s.stack.RabbitMQ().Queues(t.Context(), s.vhost)
	require.Less(t, time.Since(began), askBound)
	t.Logf("the list of queues took %.1f s while a node was paused, error: %v", time.Since(began).Seconds(), err)
}

func (s *suite) leaderPaused(t *testing.T) {
	leader := s.leader(t)
	if s.refuses(t, leader) {
		return
	}
	other := s.otherURL(leader)
	// A channel that has published already is told of the next leader. A new one
	// would ask the paused node, which the cluster's tables name as the leader
	// until the net tick time of 60 s is over.
	p, err := openPublisher(other)
	require.NoError(t, err)
	defer p.close()
	require.NoError(t, p.publish(t.Context(), "confirmed before"))

	s.pause(t, leader)
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), askBound)
	defer cancel()
	require.NoError(t, p.publish(ctx, "confirmed meanwhile"))
	t.Logf("confirmed %.1f s after the pause", time.Since(began).Seconds())
	s.requireListBounded(t)
	next := s.nextLeader(t, leader)
	s.resume(t, leader)
	s.awaitOnline(t)
	bodies, err := take(s.otherURL(next))
	require.NoError(t, err)
	require.Contains(t, bodies, "confirmed meanwhile")
}

// Kafka.

const topic = "conform"

func (s *suite) kafka(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), askBound)
	defer cancel()
	require.NoError(t, s.stack.Kafka().CreateTopic(ctx, topic, 3))
	require.Error(t, s.stack.Kafka().CreateTopic(ctx, topic, 3), "it exists")
	require.NoError(t, s.produce(ctx, topic, "first"))
	require.Error(t, s.produce(ctx, "no-such-topic", "lost"), "a topic must not make itself")
	s.requireRecords(t, "first")
}

func (s *suite) produce(ctx context.Context, topic, value string) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(s.stack.Kafka().Brokers()...))
	if err != nil {
		return err
	}
	defer client.Close()
	return client.ProduceSync(ctx, &kgo.Record{Topic: topic, Key: []byte("k"), Value: []byte(value)}).FirstErr()
}

// requireRecords reads the topic from its start until every value was seen.
func (s *suite) requireRecords(t *testing.T, values ...string) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(s.stack.Kafka().Brokers()...), kgo.ConsumeTopics(topic))
	require.NoError(t, err)
	defer client.Close()
	ctx, cancel := context.WithTimeout(t.Context(), askBound)
	defer cancel()
	missing := map[string]bool{}
	for _, v := range values {
		missing[v] = true
	}
	for len(missing) > 0 {
		fetched := client.PollFetches(ctx)
		require.NoError(t, ctx.Err(), "records not seen: %v", missing)
		fetched.EachRecord(func(r *kgo.Record) { delete(missing, string(r.Value)) })
	}
}

func (s *suite) kafkaKilled(t *testing.T) {
	k := s.stack.Kafka()
	if s.refuses(t, k) {
		return
	}
	require.NoError(t, s.produce(t.Context(), topic, "before SIGKILL"))
	s.kill(t, k)
	s.restart(t, k)
	eventually(t, "a record after the restart", func(ctx context.Context) error {
		return s.produce(ctx, topic, "after SIGKILL")
	})
	s.requireRecords(t, "first", "before SIGKILL", "after SIGKILL")
}

func (s *suite) kafkaPaused(t *testing.T) {
	k := s.stack.Kafka()
	if s.refuses(t, k) {
		return
	}
	s.pause(t, k)
	short, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	require.Error(t, s.produce(short, topic, "never acknowledged"))
	s.resume(t, k)
	eventually(t, "a record after the pause", func(ctx context.Context) error {
		return s.produce(ctx, topic, "after the pause")
	})
	s.requireRecords(t, "after the pause")
}
