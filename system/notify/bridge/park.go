package bridge

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Batcher is the pool, as far as parking needs it.
type Batcher interface {
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// TableParker parks in the table parked_events.
type TableParker struct{ Pool Batcher }

const insertParked = `
INSERT INTO parked_events (topic, partition, "offset", record_key, body, body_digest, reason)
VALUES ($1, $2, $3, $4, $5, $6, $7)
ON CONFLICT (topic, partition, "offset", body_digest) DO NOTHING`

// Park stores all of p or, with an error, perhaps nothing.
func (t TableParker) Park(ctx context.Context, p []Parked) error {
	batch := &pgx.Batch{}
	for _, r := range p {
		batch.Queue(insertParked, r.Topic, r.Partition, r.Offset, r.Key, r.Value, digest(r.Value), r.Reason)
	}
	if err := t.Pool.SendBatch(ctx, batch).Close(); err != nil {
		return fmt.Errorf("park %d events: %w", len(p), err)
	}
	return nil
}

// digest tells one body from another; 128 bits of it are plenty.
func digest(body []byte) string {
	sum := sha256.Sum256(body)
	return hex.EncodeToString(sum[:16])
}
