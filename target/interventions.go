package target

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"mailproof/system/contract"
)

// What follows puts the system into states that its own parts rarely reach:
// doorbells that are lost, events that nobody can read or publish.

const statesSQL = `SELECT dedupe_key, lower(status) FROM notifications`

// States is the state of each mail's row, in the words of package history.
func (p *Pipeline) States(ctx context.Context) (map[string]string, error) {
	type row struct{ Key, State string }
	rows, err := query(ctx, p.dbs[notifyDB], "states of the mails", statesSQL, pgx.RowToStructByPos[row])
	if err != nil {
		return nil, err
	}
	states := make(map[string]string, len(rows))
	for _, r := range rows {
		states[r.Key] = r.State
	}
	return states, nil
}

// LoseDoorbells empties the tickets' delay tiers, as somebody who purges the
// wrong queue does, and returns how many messages were lost.
func (p *Pipeline) LoseDoorbells(context.Context) (int, error) {
	conn, ch, err := p.channel()
	if err != nil {
		return 0, fmt.Errorf("lose doorbells: %w", err)
	}
	defer func() { _ = conn.Close() }() // each purge was answered
	lost := 0
	for _, d := range p.cfg.RetryDelays {
		n, err := ch.QueuePurge(contract.RetryQueue(contract.TicketConfirmation, d), false)
		if err != nil {
			return lost, fmt.Errorf("lose doorbells: %w", err)
		}
		lost += n
	}
	return lost, nil
}

const expireSQL = `UPDATE notifications SET expires_at = clock_timestamp() WHERE dedupe_key = ANY($1) AND status = 'FAILED'`

// Outdate makes mails that wait for their next try worthless from now on, and
// returns how many it found waiting.
func (p *Pipeline) Outdate(ctx context.Context, keys []string) (int, error) {
	n, err := p.exec(ctx, notifyDB, expireSQL, keys)
	if err != nil {
		return 0, fmt.Errorf("outdate mails: %w", err)
	}
	return n, nil
}

func (p *Pipeline) exec(ctx context.Context, service, sql string, args ...any) (int, error) {
	conn, err := pgx.Connect(ctx, p.dbs[service])
	if err != nil {
		return 0, err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }() // the statement was answered
	tag, err := conn.Exec(ctx, sql, args...)
	return int(tag.RowsAffected()), err
}

// ProduceGarbage puts a record that nobody can read on the topic of the events.
func (p *Pipeline) ProduceGarbage(ctx context.Context, key, value string) error {
	producer, err := kgo.NewClient(kgo.SeedBrokers(p.cfg.Stack.Kafka().Brokers()...))
	if err != nil {
		return fmt.Errorf("produce garbage: %w", err)
	}
	defer producer.Close()
	if err := producer.ProduceSync(ctx, &kgo.Record{Topic: p.topic, Key: []byte(key), Value: []byte(value)}).FirstErr(); err != nil {
		return fmt.Errorf("produce garbage: %w", err)
	}
	return nil
}

const parkedLikeSQL = `
SELECT (SELECT count(*) FROM parked_events WHERE body = $1),
       (SELECT count(*) FROM alerts a JOIN parked_events e
        ON a.kind = 'event-parked' AND a.dedupe_key = e.topic || '/' || e.partition || '/' || e."offset"
        WHERE e.body = $1)`

// ParkedLike is how many events with that body stand parked, and how many alerts
// tell of them.
func (p *Pipeline) ParkedLike(ctx context.Context, value string) (parked, alerts int, err error) {
	type counts struct{ Parked, Alerts int }
	rows, err := query(ctx, p.dbs[notifyDB], "parked events", parkedLikeSQL, pgx.RowToStructByPos[counts], []byte(value))
	if err != nil {
		return 0, 0, err
	}
	return rows[0].Parked, rows[0].Alerts, nil
}

// insertBrokenSQL has a topic name that no broker takes.
const insertBrokenSQL = `
INSERT INTO outbox (event_id, topic, key, event_type, payload) VALUES ($1, 'no topic!', $2, 'BookingConfirmed', $3)`

// WriteRefusedEvent writes an event into the outbox that the broker refuses for
// its own sake, and rings nobody.
func (p *Pipeline) WriteRefusedEvent(ctx context.Context, name string) error {
	payload, err := json.Marshal(map[string]string{"dedupe_key": name})
	if err != nil {
		return fmt.Errorf("write a refused event: %w", err)
	}
	if _, err := p.exec(ctx, bookingDB, insertBrokenSQL, uuid.New(), name, payload); err != nil {
		return fmt.Errorf("write a refused event: %w", err)
	}
	return nil
}

const deadEventSQL = `
SELECT count(*) FROM outbox WHERE payload->>'dedupe_key' = $1 AND dead_at IS NOT NULL AND alerted_at IS NOT NULL`

// DeadEvent reports that the event is dead and that its alert is stamped.
func (p *Pipeline) DeadEvent(ctx context.Context, name string) (bool, error) {
	n, err := query(ctx, p.dbs[bookingDB], "dead event", deadEventSQL, pgx.RowTo[int], name)
	return err == nil && n[0] == 1, err
}

// ReplayOne gives the dead mail of a key more tries, asked of one process.
func (p *Pipeline) ReplayOne(ctx context.Context, process, key string, attempts int) (ReplayReport, error) {
	var r ReplayReport
	err := p.adminOf(ctx, process, http.MethodPost, "/admin/dlq/replay", map[string]any{
		"key": key, "attempts": attempts, "actor": "mailproof", "why": "the server is healed",
	}, &r)
	return r, err
}

// DiscardOne gives the dead mail of a key up, asked of one process.
func (p *Pipeline) DiscardOne(ctx context.Context, process, key string) error {
	var r struct{}
	return p.adminOf(ctx, process, http.MethodPost, "/admin/dlq/discard", map[string]any{
		"key": key, "actor": "mailproof", "why": "nobody wants it",
	}, &r)
}

// SendAgain asks one process for a second mail of the same intent and returns
// its key.
func (p *Pipeline) SendAgain(ctx context.Context, process, key string) (string, error) {
	var r struct {
		Key string `json:"dedupe_key"`
	}
	err := p.adminOf(ctx, process, http.MethodPost, "/admin/mail/send-again", map[string]any{
		"key": key, "actor": "mailproof", "why": "the customer asks for it",
	}, &r)
	return r.Key, err
}

// againsSQL: the service numbers the mails that were sent again by their keys.
const againsSQL = `SELECT dedupe_key FROM notifications WHERE dedupe_key LIKE $1 AND dedupe_key <> $2 ORDER BY dedupe_key`

// SentAgain are the keys of the mails that were made from a key's.
func (p *Pipeline) SentAgain(ctx context.Context, key string) ([]string, error) {
	like := strings.NewReplacer(`\`, `\\`, `%`, `\%`, `_`, `\_`).Replace(key) + ":%"
	return query(ctx, p.dbs[notifyDB], "mails sent again", againsSQL, pgx.RowTo[string], like, key)
}
