package target

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"mailproof/system/contract"
)

const sentSQL = `SELECT dedupe_key, sent_at FROM notifications WHERE dedupe_key = ANY($1) AND sent_at IS NOT NULL`

// SentAt is when each of these mails became SENT, by key: the time of the
// statement on the database's wall clock.
func (p *Pipeline) SentAt(ctx context.Context, keys []string) (map[string]time.Time, error) {
	type sent struct {
		Key string
		At  time.Time
	}
	rows, err := query(ctx, p.dbs[notifyDB], "times of SENT", sentSQL, pgx.RowToStructByPos[sent], keys)
	if err != nil {
		return nil, err
	}
	out := make(map[string]time.Time, len(rows))
	for _, r := range rows {
		out[r.Key] = r.At
	}
	return out, nil
}

// Produced is when the relay handed each event to its producer, by dedupe key:
// the timestamp of its record, whole milliseconds of the wall clock.
func (p *Pipeline) Produced(ctx context.Context) (map[string]time.Time, error) {
	ctx, cancel := context.WithTimeout(ctx, topicTimeout)
	defer cancel()
	recs, err := readTopic(ctx, p.cfg.Stack.Kafka().Brokers(), p.topic)
	if err != nil {
		return nil, fmt.Errorf("topic %s: %w", p.topic, err)
	}
	out := make(map[string]time.Time, len(recs))
	for _, r := range recs {
		var e contract.Event
		if json.Unmarshal(r.Value, &e) == nil {
			out[e.DedupeKey] = r.Timestamp
		}
	}
	return out, nil
}

const deadAtSQL = `SELECT recipient, dlq_published_at FROM notifications WHERE status = 'DEAD' AND dlq_published_at IS NOT NULL`

// DeadAt is when the dead letter of each dead mail was known to be confirmed, by
// recipient, on the database's wall clock.
func (p *Pipeline) DeadAt(ctx context.Context) (map[string]time.Time, error) {
	type dead struct {
		Recipient string
		At        time.Time
	}
	rows, err := query(ctx, p.dbs[notifyDB], "times of dead letters", deadAtSQL, pgx.RowToStructByPos[dead])
	if err != nil {
		return nil, err
	}
	out := make(map[string]time.Time, len(rows))
	for _, r := range rows {
		out[r.Recipient] = r.At
	}
	return out, nil
}
