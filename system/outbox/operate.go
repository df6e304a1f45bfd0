package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Entry is an event as people see it.
type Entry struct {
	EventID     uuid.UUID  `json:"event_id"`
	Type        string     `json:"event_type"`
	Topic       string     `json:"topic"`
	Key         string     `json:"key"`
	CreatedAt   time.Time  `json:"created_at"`
	PublishedAt *time.Time `json:"published_at,omitempty"`
	DeadAt      *time.Time `json:"dead_at,omitempty"`
	Attempts    int        `json:"attempts"` // that failed
	LastError   string     `json:"last_error,omitempty"`
}

const (
	entryColumns = `event_id, event_type, topic, key, created_at, published_at, dead_at, attempts, coalesce(last_error, '')`

	deadSQL = `SELECT ` + entryColumns + ` FROM outbox WHERE dead_at IS NOT NULL ORDER BY id LIMIT $1`

	// find reads the whole table: it is asked by a person, rarely, and an index
	// on the key would cost every event a write.
	findSQL = `SELECT ` + entryColumns + ` FROM outbox WHERE key = $1 ORDER BY id LIMIT $2`

	reviveSQL = `
UPDATE outbox SET dead_at = NULL, alerted_at = NULL, rejections = 0, next_attempt_at = NULL
WHERE event_id = $1 AND dead_at IS NOT NULL`
)

// Operator is the part of a pool that these functions need.
type Operator interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// ListDead lists at most limit dead events, the oldest first.
func ListDead(ctx context.Context, db Operator, limit int) ([]Entry, error) {
	return entries(ctx, db, "dead events", deadSQL, limit)
}

// Find lists what the outbox still has of a key (a booking), at most limit.
func Find(ctx context.Context, db Operator, key string, limit int) ([]Entry, error) {
	return entries(ctx, db, "events of "+key, findSQL, key, limit)
}

func entries(ctx context.Context, db Operator, what, sql string, args ...any) ([]Entry, error) {
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		return nil, fmt.Errorf("outbox: %s: %w", what, err)
	}
	out, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Entry])
	if err != nil {
		return nil, fmt.Errorf("outbox: %s: %w", what, err)
	}
	return out, nil
}

// ErrNotDead is returned for an event that is not there or not dead.
var ErrNotDead = errors.New("no dead event of this id")

// Revive lets the relay try a dead event again, with as many refusals allowed as
// at first. Its event_id stays, so a copy that did reach the topic is absorbed by
// whoever reads it. Events of its key that came later may have been published
// before it.
func Revive(ctx context.Context, db Operator, event uuid.UUID) error {
	tag, err := db.Exec(ctx, reviveSQL, event)
	if err != nil {
		return fmt.Errorf("outbox: revive %s: %w", event, err)
	}
	if tag.RowsAffected() == 0 {
		return fmt.Errorf("outbox: revive %s: %w", event, ErrNotDead)
	}
	return nil
}
