package outbox

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// Event is something that happened, to be told to other services.
type Event struct {
	Topic string
	// Key decides the partition. Whoever writes several events of one key holds
	// a lock on the aggregate meanwhile, so that ids and commits agree.
	Key  string
	Type string
	// Body makes the JSON from the event's id, which is made by [Write].
	Body func(eventID uuid.UUID) ([]byte, error)
}

const writeSQL = `
INSERT INTO outbox (event_id, topic, key, event_type, payload)
VALUES ($1, $2, $3, $4, $5)`

// Write inserts the event in the caller's transaction and returns its id. The
// event exists if and only if tx commits. The id is made here and not when the
// row is published, so that a second publish is recognised (TRAP-2-2).
func Write(ctx context.Context, tx pgx.Tx, e Event) (uuid.UUID, error) {
	id, args, err := e.row()
	if err != nil {
		return uuid.Nil, err
	}
	if _, err := tx.Exec(ctx, writeSQL, args...); err != nil {
		return uuid.Nil, fmt.Errorf("write outbox: %s of %s: %w", e.Type, e.Key, err)
	}
	return id, nil
}

// Queue is [Write] as part of a batch that the caller sends inside its
// transaction, to spare a round trip while it holds its locks.
func Queue(b *pgx.Batch, e Event) (uuid.UUID, error) {
	id, args, err := e.row()
	if err != nil {
		return uuid.Nil, err
	}
	b.Queue(writeSQL, args...)
	return id, nil
}

// row makes the event's id and body.
func (e Event) row() (uuid.UUID, []any, error) {
	if e.Topic == "" || e.Key == "" || e.Type == "" || e.Body == nil {
		return uuid.Nil, nil, errors.New("write outbox: topic, key, type and body are all needed")
	}
	id, err := uuid.NewV7()
	if err != nil {
		return uuid.Nil, nil, fmt.Errorf("write outbox: %s of %s: %w", e.Type, e.Key, err)
	}
	body, err := e.Body(id)
	if err != nil {
		return uuid.Nil, nil, fmt.Errorf("write outbox: body of %s of %s: %w", e.Type, e.Key, err)
	}
	return id, []any{id, e.Topic, e.Key, e.Type, body}, nil
}
