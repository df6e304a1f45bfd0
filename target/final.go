package target

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	amqp091 "github.com/rabbitmq/amqp091-go"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"mailproof/history"
	"mailproof/system/contract"
)

const (
	// dialTimeout of one broker node when the rest of a run is read.
	dialTimeout = 5 * time.Second
	// topicTimeout bounds reading the whole topic.
	topicTimeout = time.Minute
	// drainPoll is how often a queue is looked at whose messages somebody holds.
	drainPoll = 20 * time.Millisecond
	// quorumTick is how often quorum queues refresh the figures that the
	// broker's tool lists (rabbit.quorum_tick_interval).
	quorumTick = 5 * time.Second
)

// query reads one result set from one of the run's databases.
func query[T any](ctx context.Context, url, what, sql string, scan pgx.RowToFunc[T], args ...any) ([]T, error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }() // only read
	rows, err := conn.Query(ctx, sql, args...)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	out, err := pgx.CollectRows(rows, scan)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return out, nil
}

// Final reads all that was left, and empties the dead-letter queue: the run is
// over. The queues' figures are from before that.
func (p *Pipeline) Final(ctx context.Context) (history.Final, error) {
	var f history.Final
	var errs []error
	read := func(err error) { errs = append(errs, err) }
	var err error
	f.Rows, err = p.rows(ctx)
	read(err)
	f.Outbox, err = p.outbox(ctx)
	read(err)
	f.Alerts, err = p.alerts(ctx)
	read(err)
	f.Pending, err = p.Pending(ctx)
	read(err)
	f.Queues, err = p.queuesAtRest(ctx)
	read(err)
	f.DLQ, err = p.drainDLQ(ctx, letters(f.Queues))
	read(err)
	f.Topic, err = p.readTopic(ctx)
	read(err)
	f.Counters, err = p.Counters(ctx)
	read(err)
	return f, errors.Join(errs...)
}

const rowsSQL = `
SELECT dedupe_key, booking_id, recipient, lower(status), attempts, token, unsettled,
       coalesce(event_id::text, ''), coalesce(provider_msg_id, ''), coalesce(last_error, ''), dlq_published_at IS NOT NULL
FROM notifications ORDER BY created_at, id`

func (p *Pipeline) rows(ctx context.Context) ([]history.MailState, error) {
	return query(ctx, p.dbs[notifyDB], "rows of the mails", rowsSQL, pgx.RowToStructByPos[history.MailState])
}

const outboxSQL = `
SELECT event_id::text, coalesce(payload->>'dedupe_key', ''), coalesce(payload->>'booking_id', ''),
       published_at IS NOT NULL, dead_at IS NOT NULL, octet_length(payload::text)
FROM outbox ORDER BY id`

func (p *Pipeline) outbox(ctx context.Context) ([]history.OutboxLeft, error) {
	return query(ctx, p.dbs[bookingDB], "outbox", outboxSQL, pgx.RowToStructByPos[history.OutboxLeft])
}

const (
	alertsSQL = `SELECT kind, dedupe_key, created_at FROM alerts ORDER BY id`
	// An event is alerted once alerted_at is stamped.
	deadOutboxSQL = `
SELECT 'dead-outbox', coalesce(payload->>'dedupe_key', ''), alerted_at FROM outbox
WHERE dead_at IS NOT NULL AND alerted_at IS NOT NULL ORDER BY id`
)

func (p *Pipeline) alerts(ctx context.Context) ([]history.Alert, error) {
	mails, err := query(ctx, p.dbs[notifyDB], "alerts", alertsSQL, pgx.RowToStructByPos[history.Alert])
	if err != nil {
		return nil, err
	}
	events, err := query(ctx, p.dbs[bookingDB], "alerts of dead events", deadOutboxSQL, pgx.RowToStructByPos[history.Alert])
	return append(mails, events...), err
}

// queuesAtRest reads the queues' figures. A quorum queue refreshes them every
// quorumTick only: figures that show no rest are read again until they cannot be
// older than this call.
func (p *Pipeline) queuesAtRest(ctx context.Context) ([]history.QueueState, error) {
	for begin := time.Now(); ; {
		old := time.Since(begin) < 2*quorumTick
		qs, err := p.queues(ctx)
		if err != nil || !old || p.restShown(qs) {
			return qs, err
		}
		select {
		case <-ctx.Done():
			return qs, nil
		case <-time.After(quorumTick / 10):
		}
	}
}

// restShown reports whether the figures agree with what is true at rest: the
// dead-letter queue's with the broker's live count, and nothing elsewhere.
func (p *Pipeline) restShown(qs []history.QueueState) bool {
	dead, err := p.countDLQ()
	for _, q := range qs {
		want := 0
		if q.Name == contract.QueueDLQ {
			want = dead
		}
		if err != nil || q.Messages != want || q.Ready != want || q.Unacked != 0 {
			return false
		}
	}
	return true
}

// countDLQ asks the queue itself how many messages wait in it.
func (p *Pipeline) countDLQ() (int, error) {
	conn, ch, err := p.channel()
	if err != nil {
		return 0, err
	}
	defer func() { _ = conn.Close() }() // only asked
	q, err := ch.QueueDeclarePassive(contract.QueueDLQ, true, false, false, false, nil)
	return q.Messages, err
}

func (p *Pipeline) queues(ctx context.Context) ([]history.QueueState, error) {
	qs, err := p.cfg.Stack.RabbitMQ().Queues(ctx, p.vhost)
	if err != nil {
		return nil, fmt.Errorf("queues: %w", err)
	}
	out := make([]history.QueueState, len(qs))
	for i, q := range qs {
		out[i] = history.QueueState{
			Name: q.Name, Type: q.Type, Leader: q.Leader, Members: len(q.Members), Online: len(q.Online),
			Messages: q.Messages, Ready: q.Ready, Unacked: q.Unacked,
		}
	}
	return out, nil
}

// channel opens a channel on the first node that answers.
func (p *Pipeline) channel() (*amqp091.Connection, *amqp091.Channel, error) {
	var errs []error
	for _, url := range p.cfg.Stack.RabbitMQ().URLs(p.vhost) {
		conn, err := amqp091.DialConfig(url, amqp091.Config{Dial: func(network, addr string) (net.Conn, error) {
			c, err := net.DialTimeout(network, addr, dialTimeout)
			if err != nil {
				return nil, err
			}
			return c, c.SetDeadline(time.Now().Add(dialTimeout)) // of the handshake; the client resets it
		}})
		if err != nil {
			errs = append(errs, err)
			continue
		}
		ch, err := conn.Channel()
		if err == nil {
			return conn, ch, nil
		}
		errs = append(errs, err, conn.Close())
	}
	return nil, nil, fmt.Errorf("no RabbitMQ node answers: %w", errors.Join(errs...))
}

// letters is how many messages the dead-letter queue holds.
func letters(qs []history.QueueState) int {
	for _, q := range qs {
		if q.Name == contract.QueueDLQ {
			return q.Messages
		}
	}
	return 0
}

// drainDLQ takes every message out of the dead-letter queue. They are acked:
// getting and requeueing would drop them at the delivery limit.
//
// The mail service sees that the queue changes and looks its letters through: it
// may hold some of them for a moment, and gives them back. want is how many
// there are.
func (p *Pipeline) drainDLQ(ctx context.Context, want int) ([]history.DeadLetter, error) {
	conn, ch, err := p.channel()
	if err != nil {
		return nil, fmt.Errorf("dead-letter queue: %w", err)
	}
	defer func() { _ = conn.Close() }() // every message was acked one by one
	out := []history.DeadLetter{}
	for patience := time.Now().Add(quorumTick); ctx.Err() == nil; {
		d, ok, err := ch.Get(contract.QueueDLQ, false)
		if err != nil {
			return out, fmt.Errorf("dead-letter queue: %w", err)
		}
		if !ok && len(out) < want && time.Now().Before(patience) {
			time.Sleep(drainPoll) // no event tells that a message was given back
			continue
		}
		if !ok {
			return out, nil
		}
		out = append(out, letter(d))
		if err := d.Ack(false); err != nil {
			return out, fmt.Errorf("dead-letter queue: ack: %w", err)
		}
	}
	return out, fmt.Errorf("dead-letter queue: %w", ctx.Err())
}

// letter reads a dead letter; one that cannot be read has no key.
func letter(d amqp091.Delivery) history.DeadLetter {
	reason, _ := d.Headers[contract.HeaderReason].(string)
	if reason == "" { // dead-lettered by the broker itself
		reason, _ = d.Headers["x-first-death-reason"].(string)
	}
	m, err := contract.DecodeMessage(d.Body)
	if err != nil {
		return history.DeadLetter{Reason: strings.TrimSpace(reason + " (" + err.Error() + ")")}
	}
	return history.DeadLetter{Key: m.DedupeKey, Reason: reason}
}

// readTopic reads every record of the topic, from its first offset to the end
// as it is now.
func (p *Pipeline) readTopic(ctx context.Context) ([]history.TopicRecord, error) {
	ctx, cancel := context.WithTimeout(ctx, topicTimeout)
	defer cancel()
	recs, err := readTopic(ctx, p.cfg.Stack.Kafka().Brokers(), p.topic)
	if err != nil {
		return nil, fmt.Errorf("topic %s: %w", p.topic, err)
	}
	out := make([]history.TopicRecord, len(recs))
	for i, r := range recs {
		out[i] = history.TopicRecord{Partition: r.Partition, Offset: r.Offset, Booking: string(r.Key)}
		var e contract.Event
		if json.Unmarshal(r.Value, &e) == nil { // what cannot be read has no key
			out[i].EventID, out[i].Key, out[i].Type = e.EventID, e.DedupeKey, string(e.EventType)
		}
	}
	return out, nil
}

func readTopic(ctx context.Context, brokers []string, topic string) ([]*kgo.Record, error) {
	cl, err := kgo.NewClient(kgo.SeedBrokers(brokers...))
	if err != nil {
		return nil, err
	}
	defer cl.Close()
	ends, err := kadm.NewClient(cl).ListEndOffsets(ctx, topic)
	if err == nil {
		err = ends.Error()
	}
	if err != nil {
		return nil, err
	}
	left := map[int32]int64{} // partition → end
	from := map[int32]kgo.Offset{}
	ends.Each(func(o kadm.ListedOffset) {
		if o.Offset > 0 {
			left[o.Partition], from[o.Partition] = o.Offset, kgo.NewOffset().AtStart()
		}
	})
	out := []*kgo.Record{}
	if len(left) == 0 {
		return out, nil
	}
	cl.AddConsumePartitions(map[string]map[int32]kgo.Offset{topic: from})
	for len(left) > 0 {
		fs := cl.PollFetches(ctx)
		if err := fs.Err(); err != nil {
			return nil, err
		}
		fs.EachRecord(func(r *kgo.Record) {
			end, ok := left[r.Partition]
			if !ok || r.Offset >= end {
				return
			}
			out = append(out, r)
			if r.Offset == end-1 {
				delete(left, r.Partition)
			}
		})
	}
	return out, nil
}

// Counters reads the services' counters once more and adds those of earlier
// lives as they were last read. After a SIGKILL each sum is a lower bound: what
// a process counted within the last second of its life died with it.
func (p *Pipeline) Counters(ctx context.Context) (map[string]float64, error) {
	var errs []error
	for _, prog := range p.programs {
		errs = append(errs, p.counters.scrape(ctx, prog))
	}
	return p.counters.sum(), errors.Join(errs...)
}

const (
	// What the mail service has and has not settled. DEAD counts as settled once
	// its dead letter and its alert are confirmed.
	unsettledSQL = `
SELECT dedupe_key,
       status || ' after ' || attempts || ' of ' || attempt_limit || ' tries'
       || CASE WHEN status = 'SENDING' THEN ', leased for ' || round(extract(epoch FROM locked_until - clock_timestamp())::numeric, 1) || ' s'
               WHEN status = 'DEAD' THEN ', its dead letter is not confirmed'
               WHEN next_attempt_at > clock_timestamp() THEN ', due in ' || round(extract(epoch FROM next_attempt_at - clock_timestamp())::numeric, 1) || ' s'
               ELSE ', due' END
       || CASE WHEN published_at IS NULL THEN ', never published' ELSE '' END
       || coalesce(', last error: ' || left(last_error, 80), '')
FROM notifications
WHERE campaign_id IS NULL
  AND (status IN ('PENDING', 'SENDING', 'FAILED') OR (status = 'DEAD' AND dlq_published_at IS NULL) OR (status = 'UNKNOWN' AND $1))`

	// A campaign's mails are counted: 50,000 reasons a few times per second would
	// load the very machine that is measured. No row of it is read but in the index.
	unsettledCampaignsSQL = `
SELECT campaign_id, status, count(*) FROM notifications
WHERE campaign_id IS NOT NULL AND (status IN ('PENDING', 'SENDING', 'FAILED') OR (status = 'UNKNOWN' AND $1))
GROUP BY campaign_id, status ORDER BY campaign_id, status`

	// Every event that some mail must follow, or that is not published yet.
	eventsSQL = `
SELECT coalesce(payload->>'dedupe_key', event_id::text), published_at IS NOT NULL, attempts, coalesce(left(last_error, 80), '')
FROM outbox WHERE dead_at IS NULL`

	keysSQL   = `SELECT dedupe_key FROM notifications`
	parkedSQL = `SELECT body FROM parked_events WHERE body IS NOT NULL`
)

type event struct {
	Key       string
	Published bool
	Attempts  int
	LastError string
}

// Pending says for each mail that is not settled what it waits for: in the
// outbox, between Kafka and the mail service, or in the mail service. The mails
// of a campaign stand together under its name and their number.
func (p *Pipeline) Pending(ctx context.Context) (map[string]string, error) {
	// The outbox is read first: what it published later cannot be missed, what
	// arrives meanwhile is found in the mail service.
	events, err := query(ctx, p.dbs[bookingDB], "pending events", eventsSQL, pgx.RowToStructByPos[event])
	if err != nil {
		return nil, err
	}
	pending, err := p.notArrived(ctx, events)
	if err != nil {
		return nil, err
	}
	type unsettled struct{ Key, Reason string }
	rows, err := query(ctx, p.dbs[notifyDB], "unsettled mails", unsettledSQL, pgx.RowToStructByPos[unsettled], p.cfg.ReconcileEvery > 0)
	if err != nil {
		return nil, err
	}
	for _, r := range rows {
		pending[r.Key] = r.Reason
	}
	return pending, p.pendingCampaigns(ctx, pending)
}

func (p *Pipeline) pendingCampaigns(ctx context.Context, pending map[string]string) error {
	type part struct {
		Campaign, Status string
		N                int
	}
	parts, err := query(ctx, p.dbs[notifyDB], "unsettled campaigns", unsettledCampaignsSQL, pgx.RowToStructByPos[part], p.cfg.ReconcileEvery > 0)
	if err != nil {
		return err
	}
	total, reason := map[string]int{}, map[string]string{}
	for _, c := range parts {
		total[c.Campaign] += c.N
		reason[c.Campaign] += fmt.Sprintf(" %s %d", c.Status, c.N)
	}
	for campaign, n := range total {
		pending[fmt.Sprintf("campaign:%s, %d mails", campaign, n)] = strings.TrimSpace(reason[campaign])
	}
	return nil
}

// notArrived finds events of which the mail service has no row.
func (p *Pipeline) notArrived(ctx context.Context, events []event) (map[string]string, error) {
	pending := map[string]string{}
	var missing []event
	p.mu.Lock()
	for _, e := range events {
		switch {
		case !e.Published:
			pending[e.Key] = fmt.Sprintf("in the outbox, %d failed publishes %s", e.Attempts, e.LastError)
		case !p.seen[e.Key]:
			missing = append(missing, e)
		}
	}
	p.mu.Unlock()
	if len(missing) == 0 {
		return pending, nil
	}
	keys, err := query(ctx, p.dbs[notifyDB], "keys", keysSQL, pgx.RowTo[string])
	if err != nil {
		return nil, err
	}
	parked, err := query(ctx, p.dbs[notifyDB], "parked events", parkedSQL, pgx.RowTo[[]byte])
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range keys {
		p.seen[k] = true
	}
	for _, body := range parked {
		var e contract.Event
		if json.Unmarshal(body, &e) == nil { // what cannot be read is no event of the outbox
			p.seen[e.DedupeKey] = true
		}
	}
	for _, e := range missing {
		if !p.seen[e.Key] {
			pending[e.Key] = "published, not yet with the mail service"
		}
	}
	return pending, nil
}

// removeParts removes what the run had on the shared parts: databases, and the
// queues, which would go on costing their nodes. The topic and the empty
// virtual host stay until the stack is stopped.
func (p *Pipeline) removeParts(ctx context.Context) error {
	return errors.Join(p.dropDatabases(ctx), p.deleteQueues(ctx))
}

func (p *Pipeline) dropDatabases(ctx context.Context) error {
	if len(p.dbs) == 0 {
		return nil
	}
	conn, err := pgx.Connect(ctx, p.cfg.Stack.Postgres().URL("postgres"))
	if err != nil {
		return fmt.Errorf("drop the run's databases: %w", err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }() // nothing is buffered
	var errs []error
	for service := range p.dbs {
		name := p.database(service)
		if _, err := conn.Exec(ctx, "DROP DATABASE IF EXISTS "+pgx.Identifier{name}.Sanitize()+" WITH (FORCE)"); err != nil {
			errs = append(errs, fmt.Errorf("drop database %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

func (p *Pipeline) deleteQueues(ctx context.Context) error {
	if len(p.programs) == 0 {
		return nil // the virtual host may not exist
	}
	qs, err := p.cfg.Stack.RabbitMQ().Queues(ctx, p.vhost)
	if err != nil || len(qs) == 0 {
		return err
	}
	conn, ch, err := p.channel()
	if err != nil {
		return fmt.Errorf("delete the run's queues: %w", err)
	}
	defer func() { _ = conn.Close() }() // each deletion was answered
	var errs []error
	for _, q := range qs {
		if _, err := ch.QueueDelete(q.Name, false, false, false); err != nil {
			errs = append(errs, fmt.Errorf("delete queue %s: %w", q.Name, err))
		}
	}
	return errors.Join(errs...)
}
