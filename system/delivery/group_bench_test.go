package delivery

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"mailproof/system/contract"
)

// life is what a worker asks of the store for one mail.
type life interface {
	Claim(ctx context.Context, id uuid.UUID) (Claim, error)
	StoreRendered(ctx context.Context, id uuid.UUID, token int64, mail []byte) ([]byte, error)
	Accepted(ctx context.Context, id uuid.UUID, token int64, providerID string) (Outcome, error)
}

// BenchmarkMailsAtWork is the store's share of a marketing mail (claim, stored
// mail, 250) for so many workers, alone and in groups, with a log that is flushed
// as in service; and of one that a stopped campaign lays aside.
func BenchmarkMailsAtWork(b *testing.B) {
	require.NoError(b, server.exec(b.Context(), `ALTER SYSTEM SET fsync = on`, `SELECT pg_reload_conf()`))
	defer func() {
		require.NoError(b, server.exec(context.Background(), `ALTER SYSTEM SET fsync = off`, `SELECT pg_reload_conf()`))
	}()
	for _, stopped := range []bool{false, true} {
		for _, workers := range []int{1, 8, 16, 32} {
			for _, grouped := range []bool{false, true} {
				name := fmt.Sprintf("stopped=%t/workers=%d/grouped=%t", stopped, workers, grouped)
				b.Run(name, func(b *testing.B) { benchLife(b, workers, grouped, stopped) })
			}
		}
	}
}

func benchLife(b *testing.B, workers int, grouped, stopped bool) {
	name := fmt.Sprintf("bench%d", server.created.Add(1))
	require.NoError(b, server.exec(b.Context(), "CREATE DATABASE "+name+" TEMPLATE "+template))
	cfg, err := pgxpool.ParseConfig(server.URL(name))
	require.NoError(b, err)
	cfg.MaxConns = 6 // as NOTIFYD_MARKETING_POOL
	pool, err := pgxpool.NewWithConfig(b.Context(), cfg)
	require.NoError(b, err)
	defer func() {
		pool.Close()
		require.NoError(b, server.exec(context.Background(), "DROP DATABASE "+name+" WITH (FORCE)"))
	}()
	s := New(pool, testConfig(Hold))
	var store life = s
	if grouped {
		store = NewGroup(s, time.Minute, workers)
	}
	ids := make([]uuid.UUID, 0, b.N)
	for from := 0; from < b.N; from += 500 {
		rows := make([]NewRow, 0, 500)
		for i := from; i < min(from+500, b.N); i++ {
			key := contract.CampaignKey("bench", fmt.Sprint(i))
			rows = append(rows, NewRow{
				DedupeKey: key, EventID: key, CampaignID: "bench", Type: contract.Marketing, Channel: contract.Email,
				Recipient: "a@example.com", Payload: []byte(`{"template":"offer","data":{"headline":"h","text":"t"}}`), Generation: 1,
			})
		}
		found, err := s.Insert(b.Context(), rows)
		require.NoError(b, err)
		for _, f := range found {
			ids = append(ids, f.ID)
		}
	}
	if stopped {
		require.NoError(b, s.StopCampaign(b.Context(), "bench"))
	}
	mail := make([]byte, 2000)
	var next atomic.Int64
	var group errgroup.Group
	before := commits(b, pool)
	b.ResetTimer()
	for range workers {
		group.Go(func() error {
			for {
				i := next.Add(1) - 1
				if i >= int64(len(ids)) {
					return nil
				}
				c, err := store.Claim(b.Context(), ids[i])
				if err != nil || c.Row == nil {
					if err == nil && stopped {
						continue
					}
					return fmt.Errorf("not won: %+v: %w", c, err)
				}
				if _, err := store.StoreRendered(b.Context(), ids[i], c.Token, mail); err != nil {
					return err
				}
				if _, err := store.Accepted(b.Context(), ids[i], c.Token, "250"); err != nil {
					return err
				}
			}
		})
	}
	require.NoError(b, group.Wait())
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "mails/s")
	b.ReportMetric(float64(commits(b, pool)-before)/float64(b.N), "transactions/mail")
}

// commits counts the database's transactions: unlike a rate it says the same on a
// busy machine. (A backend reports them at most once a second, so it is asked to
// now, on each connection.)
func commits(b *testing.B, pool *pgxpool.Pool) int64 {
	b.Helper()
	conns := pool.AcquireAllIdle(b.Context())
	for _, c := range conns {
		_, err := c.Exec(b.Context(), `SELECT pg_stat_force_next_flush()`)
		require.NoError(b, err)
	}
	for _, c := range conns {
		c.Release()
	}
	var n int64
	require.NoError(b, pool.QueryRow(b.Context(), `SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()`).Scan(&n))
	return n
}
