package dlq

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"mailproof/system/delivery"
)

// Entry is one line of the audit.
type Entry struct {
	Action  string    `json:"action"` // replay, discard, send-again
	Version int64     `json:"row_version"`
	Actor   string    `json:"actor"`
	Reason  string    `json:"reason"`
	At      time.Time `json:"at"`
}

// Audit reads table dlq_audit.
type Audit struct{ DB Querier }

// Querier is the part of a pool that reading needs.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

const (
	// Locks the row in the version that the person saw: a replay that was first
	// makes the discard find nothing.
	insertAudit = `
WITH seen AS (
  SELECT n.id, n.dedupe_key, n.version FROM notifications n
  WHERE n.id = $2 AND n.version = $3 AND ($1 <> 'discard' OR n.status = 'DEAD')
  FOR UPDATE
)
INSERT INTO dlq_audit (action, notification_id, dedupe_key, row_version, actor, reason)
SELECT $1, id, dedupe_key, version, $4, $5 FROM seen
ON CONFLICT (notification_id, row_version) WHERE action = 'discard' DO NOTHING`

	discardedSQL = `
SELECT notification_id, max(row_version) FROM dlq_audit
WHERE action = 'discard' AND notification_id = ANY($1::uuid[]) GROUP BY notification_id`

	auditOfSQL = `
SELECT action, row_version, actor, reason, at FROM dlq_audit WHERE notification_id = $1 ORDER BY id`
)

// writeAudit reports whether the row was still as the caller saw it.
func writeAudit(ctx context.Context, tx pgx.Tx, action string, r delivery.Row, actor, reason string) (bool, error) {
	tag, err := tx.Exec(ctx, insertAudit, action, r.ID, r.Version, actor, reason)
	if err != nil {
		return false, fmt.Errorf("audit of %s %s: %w", action, r.DedupeKey, err)
	}
	return tag.RowsAffected() == 1, nil
}

// Discarded says for each of the rows that was ever discarded at which version
// it was so last.
func (a Audit) Discarded(ctx context.Context, ids []uuid.UUID) (map[uuid.UUID]int64, error) {
	rows, err := a.DB.Query(ctx, discardedSQL, ids)
	if err != nil {
		return nil, fmt.Errorf("discarded mails: %w", err)
	}
	out := map[uuid.UUID]int64{}
	var id uuid.UUID
	var version int64
	_, err = pgx.ForEachRow(rows, []any{&id, &version}, func() error { out[id] = version; return nil })
	if err != nil {
		return nil, fmt.Errorf("discarded mails: %w", err)
	}
	return out, nil
}

// Of lists what was done about one mail.
func (a Audit) Of(ctx context.Context, id uuid.UUID) ([]Entry, error) {
	rows, err := a.DB.Query(ctx, auditOfSQL, id)
	if err != nil {
		return nil, fmt.Errorf("audit of %s: %w", id, err)
	}
	entries, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Entry])
	if err != nil {
		return nil, fmt.Errorf("audit of %s: %w", id, err)
	}
	return entries, nil
}
