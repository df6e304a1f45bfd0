package benchmarks

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	amqp091 "github.com/rabbitmq/amqp091-go"
	"github.com/twmb/franz-go/pkg/kgo"

	"mailproof/fakes/smtp"
	"mailproof/history"
	"mailproof/loadgen"
)

// The steps of the serial floor, in order.
const (
	stepCommit = "commit"
	stepKafka  = "Kafka"
	stepInsert = "insert"
	stepRabbit = "RabbitMQ"
	stepClaim  = "claim"
	stepSMTP   = "SMTP"
	stepMark   = "mark"
)

// bareTimeout bounds one answer to a bare client.
const bareTimeout = 10 * time.Second

// serial makes the durable round trips that a ticket cannot do without, one
// after the other, with bare clients on connections that are kept: what is left
// of the system when everything of it but its promises is taken away.
type serial struct {
	pg       *pgx.Conn
	producer *kgo.Client
	consumer *kgo.Client
	topic    string
	rabbit   *bareQueue
	server   *smtp.Server
	mail     *bareSMTP
	n        int
}

const serialTables = `
CREATE TABLE floor_outbox (id bigserial PRIMARY KEY, body text NOT NULL);
CREATE TABLE floor_mails (id bigint PRIMARY KEY, body text NOT NULL, state text NOT NULL)`

// floorEvent is about as long as an event of the system.
var floorEvent = strings.Repeat("e", 450)

// floorMail is about as long as a ticket mail with its headers.
var floorMail = strings.Repeat(strings.Repeat("m", 70)+"\r\n", 40)

func (l *lab) startSerial(ctx context.Context) (_ *serial, err error) {
	name := l.name("floor")
	s := &serial{topic: name}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("serial floor: %w", err), s.stop(ctx))
		}
	}()
	if s.pg, err = l.bareDatabase(ctx, name, serialTables); err != nil {
		return nil, err
	}
	if err := l.stack.Kafka().CreateTopic(ctx, s.topic, 1); err != nil {
		return nil, err
	}
	brokers := kgo.SeedBrokers(l.stack.Kafka().Brokers()...)
	if s.producer, err = kgo.NewClient(brokers, kgo.RequiredAcks(kgo.AllISRAcks())); err != nil {
		return nil, err
	}
	if s.consumer, err = kgo.NewClient(brokers, kgo.ConsumeTopics(s.topic)); err != nil {
		return nil, err
	}
	if s.rabbit, err = l.bareQueue(ctx, name); err != nil {
		return nil, err
	}
	if err := s.rabbit.consume(1, 1); err != nil {
		return nil, err
	}
	if s.server, err = smtp.Start(smtp.Options{Clock: history.Now}); err != nil {
		return nil, err
	}
	if s.mail, err = dialSMTP(s.server.Addr()); err != nil {
		return nil, err
	}
	return s, nil
}

// bareDatabase makes a database with tables of its own.
func (l *lab) bareDatabase(ctx context.Context, name, tables string) (*pgx.Conn, error) {
	if err := l.stack.Postgres().CreateDatabase(ctx, name); err != nil {
		return nil, err
	}
	conn, err := pgx.Connect(ctx, l.stack.Postgres().URL(name))
	if err != nil {
		return nil, err
	}
	if _, err := conn.Exec(ctx, tables); err != nil {
		return nil, errors.Join(err, conn.Close(ctx))
	}
	return conn, nil
}

func (s *serial) stop(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), bareTimeout)
	defer cancel()
	var errs []error
	if s.pg != nil {
		errs = append(errs, s.pg.Close(ctx))
	}
	if s.producer != nil {
		s.producer.Close()
	}
	if s.consumer != nil {
		s.consumer.Close()
	}
	if s.rabbit != nil {
		errs = append(errs, s.rabbit.close())
	}
	if s.mail != nil {
		errs = append(errs, s.mail.close())
	}
	if s.server != nil {
		errs = append(errs, s.server.Close())
	}
	return errors.Join(errs...)
}

// steps in order, each with what it does.
func (s *serial) steps() []struct {
	name, what string
	do         func(context.Context) error
} {
	return []struct {
		name, what string
		do         func(context.Context) error
	}{
		{stepCommit, "pgx: INSERT of an event, committed", s.commit},
		{stepKafka, "franz-go: acks=all produce, and fetch by a waiting consumer", s.throughKafka},
		{stepInsert, "pgx: INSERT of the mail's row, committed", s.insert},
		{stepRabbit, "amqp091-go: confirmed publish to a quorum queue, and delivery", s.throughRabbit},
		{stepClaim, "pgx: UPDATE of the row, committed", s.update("SENDING")},
		{stepSMTP, "MAIL, RCPT, DATA, dot, 250 on a kept connection", s.send},
		{stepMark, "pgx: UPDATE of the row, committed", s.update("SENT")},
	}
}

// run makes one round at each intended time and times its steps. The rounds of a
// single client: one that is due while the one before it runs waits for it, and
// counts from its own beginning.
func (s *serial) run(ctx context.Context, arrivals schedule) (steps []Samples, total Samples, err error) {
	steps = make([]Samples, len(s.steps()))
	for range warmUp {
		if err := s.round(ctx, func(int, time.Duration) {}); err != nil {
			return nil, total, err
		}
	}
	start := history.Now()
	for _, a := range arrivals {
		if !loadgen.Wait(ctx, time.Duration(start+int64(a.At)-history.Now())) {
			return steps, total, context.Cause(ctx)
		}
		began := history.Now()
		if err := s.round(ctx, func(i int, d time.Duration) { steps[i].add(d) }); err != nil {
			return steps, total, err
		}
		total.add(time.Duration(history.Now() - began))
	}
	return steps, total, nil
}

func (s *serial) round(ctx context.Context, took func(i int, d time.Duration)) error {
	s.n++
	for i, step := range s.steps() {
		began := history.Now()
		bounded, cancel := context.WithTimeout(ctx, bareTimeout)
		err := step.do(bounded)
		cancel()
		if err != nil {
			return fmt.Errorf("serial floor: %s: %w", step.name, err)
		}
		took(i, time.Duration(history.Now()-began))
	}
	return nil
}

func (s *serial) commit(ctx context.Context) error {
	_, err := s.pg.Exec(ctx, `INSERT INTO floor_outbox (body) VALUES ($1)`, floorEvent)
	return err
}

func (s *serial) throughKafka(ctx context.Context) error {
	if err := s.producer.ProduceSync(ctx, &kgo.Record{Topic: s.topic, Value: []byte(floorEvent)}).FirstErr(); err != nil {
		return err
	}
	for {
		fetches := s.consumer.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return err
		}
		if fetches.NumRecords() > 0 {
			return nil
		}
	}
}

func (s *serial) insert(ctx context.Context) error {
	_, err := s.pg.Exec(ctx, `INSERT INTO floor_mails (id, body, state) VALUES ($1, $2, 'PENDING')`, s.n, floorEvent)
	return err
}

func (s *serial) update(state string) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := s.pg.Exec(ctx, `UPDATE floor_mails SET state = $2 WHERE id = $1`, s.n, state)
		return err
	}
}

func (s *serial) throughRabbit(ctx context.Context) error {
	if err := s.rabbit.publish(ctx, []byte(floorEvent)); err != nil {
		return err
	}
	select {
	case d, ok := <-s.rabbit.deliveries:
		if !ok {
			return errors.New("the broker ended the consumer")
		}
		return d.Ack(false) // written, not waited for: the system does not wait either
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *serial) send(context.Context) error { return s.mail.send(fmt.Sprintf("floor:%d", s.n)) }

// bareQueue is one quorum queue with a publisher's channel and a consumer's.
type bareQueue struct {
	conns      []*amqp091.Connection
	out        *amqp091.Channel
	name       string
	url        string
	deliveries chan amqp091.Delivery
}

// bareQueue makes a virtual host with one quorum queue.
func (l *lab) bareQueue(ctx context.Context, name string) (*bareQueue, error) {
	if err := l.stack.RabbitMQ().CreateVhost(ctx, name); err != nil {
		return nil, err
	}
	q := &bareQueue{name: name, url: l.stack.RabbitMQ().URLs(name)[0], deliveries: make(chan amqp091.Delivery, 1024)}
	var err error
	if q.out, err = q.channel(); err != nil {
		return nil, errors.Join(err, q.close())
	}
	_, err = q.out.QueueDeclare(name, true, false, false, false, amqp091.Table{"x-queue-type": "quorum"})
	if err == nil {
		err = q.out.Confirm(false)
	}
	if err != nil {
		return nil, errors.Join(err, q.close())
	}
	return q, nil
}

// channel on a connection of its own.
func (q *bareQueue) channel() (*amqp091.Channel, error) {
	conn, err := amqp091.Dial(q.url)
	if err != nil {
		return nil, err
	}
	q.conns = append(q.conns, conn)
	return conn.Channel()
}

// consume starts n consumers whose deliveries come together.
func (q *bareQueue) consume(n, prefetch int) error {
	for range n {
		ch, err := q.channel()
		if err != nil {
			return err
		}
		if err := ch.Qos(prefetch, 0, false); err != nil {
			return err
		}
		in, err := ch.Consume(q.name, "", false, false, false, false, nil)
		if err != nil {
			return err
		}
		go func() {
			for d := range in {
				q.deliveries <- d
			}
		}()
	}
	return nil
}

func (q *bareQueue) publish(ctx context.Context, body []byte) error {
	confirm, err := q.start(ctx, body)
	if err != nil {
		return err
	}
	ok, err := confirm.WaitContext(ctx)
	if err == nil && !ok {
		err = errors.New("the broker refused a message")
	}
	return err
}

// start publishes without waiting for the confirm.
func (q *bareQueue) start(ctx context.Context, body []byte) (*amqp091.DeferredConfirmation, error) {
	return q.out.PublishWithDeferredConfirmWithContext(ctx, "", q.name, true, false,
		amqp091.Publishing{DeliveryMode: amqp091.Persistent, Body: body})
}

func (q *bareQueue) close() error {
	var errs []error
	if q.out != nil {
		_, err := q.out.QueueDelete(q.name, false, false, false)
		errs = append(errs, err)
	}
	for _, c := range q.conns {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

// bareSMTP is a connection on which mails are sent one after the other.
type bareSMTP struct {
	conn net.Conn
	in   *bufio.Reader
}

func dialSMTP(addr string) (*bareSMTP, error) {
	conn, err := net.DialTimeout("tcp", addr, bareTimeout)
	if err != nil {
		return nil, err
	}
	c := &bareSMTP{conn: conn, in: bufio.NewReader(conn)}
	err = c.expect('2')
	if err == nil {
		err = c.say('2', "EHLO bare.mailproof.test\r\n")
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return c, nil
}

func (c *bareSMTP) say(class byte, text string) error {
	if err := c.conn.SetDeadline(time.Now().Add(bareTimeout)); err != nil {
		return err
	}
	if _, err := c.conn.Write([]byte(text)); err != nil {
		return err
	}
	return c.expect(class)
}

// expect reads one reply, all of its lines.
func (c *bareSMTP) expect(class byte) error {
	for {
		line, err := c.in.ReadString('\n')
		if err != nil {
			return err
		}
		if len(line) < 4 || line[0] != class {
			return fmt.Errorf("the mail server said %q", line)
		}
		if line[3] != '-' {
			return nil
		}
	}
}

func (c *bareSMTP) send(key string) error {
	for _, step := range []struct {
		class byte
		text  string
	}{
		{'2', "MAIL FROM:<tickets@example.test>\r\n"},
		{'2', "RCPT TO:<guest@customers.test>\r\n"},
		{'3', "DATA\r\n"},
		{'2', "X-Dedupe-Key: " + key + "\r\nSubject: floor\r\n\r\n" + floorMail + ".\r\n"},
	} {
		if err := c.say(step.class, step.text); err != nil {
			return err
		}
	}
	return nil
}

func (c *bareSMTP) close() error {
	return errors.Join(c.say('2', "QUIT\r\n"), c.conn.Close())
}
