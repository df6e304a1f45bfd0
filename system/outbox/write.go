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
	if e.Topic == "" || e.Key == "" || e.Type == "" || e.Body == nil {
		return uuid.Nil, errors.New("write outbox: topic, key, type and body are all needed")
	}
	id, err := uuid.NewV7()
	if err != nil {
		return uuid.Nil, fmt.Errorf("write outbox: %s of %s: %w", e.Type, e.Key, err)
	}
	body, err := e.Body(id)
	if err != nil {
		return uuid.Nil, fmt.Errorf("write outbox: body of %s of %s: %w", e.Type, e.Key, err)
	}
	if _, err := tx.Exec(ctx, writeSQL, id, e.Topic, e.Key, e.Type, body); err != nil {
		return uuid.Nil, fmt.Errorf("write outbox: %s of %s: %w", e.Type, e.Key, err)
	}
	return id, nil
}
