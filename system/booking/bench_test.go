package booking

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// benchPool has a database with b.N new bookings, "b1" …
func benchPool(b *testing.B) *pgxpool.Pool {
	b.Helper()
	url := pg.NewDatabase(b)
	require.NoError(b, Migrate(b.Context(), url))
	pc, err := pgxpool.ParseConfig(url)
	require.NoError(b, err)
	pc.MaxConns = 16
	pool, err := pgxpool.NewWithConfig(b.Context(), pc)
	require.NoError(b, err)
	b.Cleanup(pool.Close)
	_, err = pool.Exec(b.Context(), `INSERT INTO bookings (id, status, recipient)
SELECT 'b' || i, 'NEW', 'guest' || i || '@example.test' FROM generate_series(1, $1) i`, b.N)
	require.NoError(b, err)
	return pool
}

// inParallel calls f once for each of b.N bookings from 16 goroutines.
func inParallel(b *testing.B, f func(ctx context.Context, id string) error) {
	b.Helper()
	var next atomic.Int64
	b.SetParallelism(8) // times GOMAXPROCS
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if err := f(context.Background(), fmt.Sprintf("b%d", next.Add(1))); err != nil {
				b.Error(err)
				return
			}
		}
	})
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "confirms/s")
}

func BenchmarkConfirm(b *testing.B) {
	s := NewService(benchPool(b), ServiceConfig{})
	inParallel(b, func(ctx context.Context, id string) error {
		_, _, err := s.Do(ctx, Confirm, id, 0)
		return err
	})
}

// BenchmarkRawTransaction is the ceiling: one update and one insert of the same
// size in a transaction, with nothing around them.
func BenchmarkRawTransaction(b *testing.B) {
	pool := benchPool(b)
	body := `{"event_id": "01a22cc8-c0b8-7649-b8ab-bad26dbdbfca", "event_type": "BookingConfirmed", "version": 1, "occurred_at": "2026-01-02T03:04:05.678Z", "booking_id": "b-1", "generation": 1, "dedupe_key": "ticket:b-1", "data": {"recipient": "guest1@example.test"}}`
	inParallel(b, func(ctx context.Context, id string) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `UPDATE bookings SET status = 'CONFIRMED', updated_at = now() WHERE id = $1`, id); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, `INSERT INTO outbox (event_id, topic, key, event_type, payload) VALUES ($1, 't', $2, 'BookingConfirmed', $3)`, uuid.New(), id, body)
			return err
		})
	})
}
