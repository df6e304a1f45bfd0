package wal_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"mailproof/history"
	"mailproof/history/wal"
	"mailproof/infra"
	"mailproof/infra/guardian"
	"mailproof/infra/provider"
)

func TestMain(m *testing.M) {
	guardian.MaybeRun()
	os.Exit(m.Run())
}

// server is a Postgres of the test's own.
func server(t testing.TB) infra.Postgres {
	t.Helper()
	p, err := provider.Select("")
	require.NoError(t, err)
	stack, err := p.Start(t.Context(), infra.Spec{LogDir: t.TempDir(), Postgres: true})
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(t, stack.Stop(ctx))
	})
	pg := stack.Postgres()
	require.NoError(t, pg.CreateDatabase(t.Context(), "shop"))
	return pg
}

func connect(t testing.TB, pg infra.Postgres) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), pg.URL("shop"))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func exec(t testing.TB, conn *pgx.Conn, sql string, args ...any) {
	t.Helper()
	_, err := conn.Exec(t.Context(), sql, args...)
	require.NoError(t, err, sql)
}

// sink keeps changes.
type sink struct {
	mu      sync.Mutex
	changes []history.Change
}

func (s *sink) add(c history.Change) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changes = append(s.changes, c)
	return nil
}

func start(t testing.TB, pg infra.Postgres, cfg wal.Config) (*wal.Collector, *sink) {
	t.Helper()
	s := &sink{}
	cfg.Database, cfg.URL, cfg.Sink = "shop", pg.URL("shop"), s.add
	c, err := wal.Start(t.Context(), cfg)
	require.NoError(t, err)
	return c, s
}

func stop(t testing.TB, c *wal.Collector) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	require.NoError(t, c.Stop(ctx))
}

func TestCollector(t *testing.T) {
	pg := server(t)
	// Whatever the server's processes need stays; the collector must leave
	// nothing of its own.
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())

	t.Run("values of every kind", func(t *testing.T) { testValues(t, pg) })
	t.Run("commit order, rollback, other tables", func(t *testing.T) { testOrder(t, pg) })
	t.Run("table made later", func(t *testing.T) { testLateTable(t, pg) })
	t.Run("a sink that fails ends it", func(t *testing.T) { testSinkFails(t, pg) })
	t.Run("a slot that vanished is no whole evidence", func(t *testing.T) { testSlotGone(t, pg) })
	t.Run("stop gives up with its context", func(t *testing.T) { testStopBounded(t, pg) })
	t.Run("killed with SIGKILL", func(t *testing.T) { testKilled(t, pg) })
}

func testValues(t *testing.T, pg infra.Postgres) {
	conn := connect(t, pg)
	exec(t, conn, `CREATE TYPE "my ]type" AS ENUM ('it''s', 'b')`)
	exec(t, conn, `CREATE TABLE "order" (id int PRIMARY KEY, "a b[""" text, tags text[], at timestamptz, raw bytea,
		flag bool, bits bit(3), kind "my ]type", doc jsonb, n numeric, f float8, rendered text)`)
	exec(t, conn, `ALTER TABLE "order" REPLICA IDENTITY FULL`)
	c, s := start(t, pg, wal.Config{Tables: []string{"public.order"}, Drop: []string{"raw", "rendered"}})
	// The session's own settings must not show in the evidence.
	exec(t, conn, `SET timezone = 'Asia/Ho_Chi_Minh'; SET datestyle = 'German'`)
	big := make([]byte, 100_000) // large enough to be stored out of line
	for i := range big {
		big[i] = 'a' + byte(rand.IntN(26))
	}
	exec(t, conn, `INSERT INTO "order" VALUES (1, $1, '{a,"b c",NULL}', '2026-03-01 12:00:00.25+00', '\x0001ff', true, B'101', 'it''s',
		'{"k": "it''s"}', 'NaN', '-Infinity', $2)`, "it's\nUPDATE: new-tuple: null", string(big))
	exec(t, conn, `UPDATE "order" SET flag = false, tags = NULL`)
	exec(t, conn, `DELETE FROM "order"`)
	stop(t, c)

	require.Len(t, s.changes, 3)
	insert, update, remove := s.changes[0], s.changes[1], s.changes[2]
	require.Equal(t, "public.order", insert.Table)
	require.Equal(t, []string{"INSERT", "UPDATE", "DELETE"}, []string{insert.Op, update.Op, remove.Op})
	rendered := insert.New["rendered"]
	require.Regexp(t, `^\(100000 bytes, sha256 [0-9a-f]{16}\)$`, rendered)
	want := map[string]string{
		"id": "1", `a b["`: "it's\nUPDATE: new-tuple: null", "tags": `{a,"b c",NULL}`, "at": "2026-03-01 12:00:00.25+00",
		"raw": insert.New["raw"], "flag": "true", "bits": "101", "kind": "it's", "doc": `{"k": "it's"}`, "n": "NaN", "f": "-Infinity",
		"rendered": rendered,
	}
	require.Contains(t, want["raw"], "3 bytes")
	require.Equal(t, want, insert.New)
	require.Equal(t, want, update.Old)
	want["flag"] = "false"
	delete(want, "tags")
	require.Equal(t, want, update.New, "a large value that was left as it was is known from the row before")
	require.Equal(t, want, remove.Old)
	require.WithinDuration(t, time.Now(), insert.CommitAt, time.Minute)
	require.NotZero(t, insert.XID)
	require.NotEmpty(t, insert.LSN)
	requireNoSlots(t, conn)
}

func requireNoSlots(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	var n int
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM pg_replication_slots").Scan(&n))
	require.Zero(t, n, "slots hold back the log for ever")
}

func testOrder(t *testing.T, pg infra.Postgres) {
	first, second := connect(t, pg), connect(t, pg)
	exec(t, first, `CREATE TABLE mails (id int PRIMARY KEY, status text); CREATE TABLE noise (id int)`)
	c, s := start(t, pg, wal.Config{Tables: []string{"public.mails"}})
	exec(t, first, `BEGIN; INSERT INTO mails VALUES (1, 'a')`)
	exec(t, second, `INSERT INTO mails VALUES (2, 'b'); INSERT INTO noise VALUES (1)`)
	exec(t, first, `INSERT INTO mails VALUES (3, 'c'); COMMIT`)
	exec(t, first, `BEGIN; INSERT INTO mails VALUES (4, 'd'); ROLLBACK`)
	exec(t, first, `UPDATE mails SET status = 'e' WHERE id = 2`)
	exec(t, first, `TRUNCATE noise, mails`)
	stop(t, c)

	var ids []string
	for i, ch := range s.changes {
		require.EqualValues(t, i+1, ch.Order)
		ids = append(ids, ch.New["id"])
	}
	require.Equal(t, []string{"2", "1", "3", "2"}, ids, "commit order, not the order of the statements")
	require.Equal(t, s.changes[1].XID, s.changes[2].XID)
	require.False(t, s.changes[2].CommitAt.Before(s.changes[0].CommitAt))
	require.EqualValues(t, 3, c.Stats().Transactions)
	requireNoSlots(t, first)
}

func testLateTable(t *testing.T, pg infra.Postgres) {
	conn := connect(t, pg)
	c, s := start(t, pg, wal.Config{Tables: []string{"public.late"}})
	exec(t, conn, `CREATE TABLE late (id int PRIMARY KEY); INSERT INTO late VALUES (1)`)
	stop(t, c)
	require.Len(t, s.changes, 1)
}

func testSinkFails(t *testing.T, pg infra.Postgres) {
	conn := connect(t, pg)
	exec(t, conn, `CREATE TABLE full_disk (id int PRIMARY KEY)`)
	c, err := wal.Start(t.Context(), wal.Config{
		Database: "shop", URL: pg.URL("shop"), Tables: []string{"public.full_disk"},
		Sink: func(history.Change) error { return os.ErrClosed },
	})
	require.NoError(t, err)
	exec(t, conn, `INSERT INTO full_disk VALUES (1)`)
	require.ErrorIs(t, c.Stop(t.Context()), os.ErrClosed)
	requireNoSlots(t, conn)
}

func testSlotGone(t *testing.T, pg infra.Postgres) {
	conn := connect(t, pg)
	c, _ := start(t, pg, wal.Config{Tables: []string{"public.mails"}})
	require.Eventually(t, func() bool { // it cannot be dropped while it is read
		exec(t, conn, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
		_, err := conn.Exec(t.Context(), "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
		return err == nil
	}, 10*time.Second, 10*time.Millisecond)
	require.ErrorContains(t, c.Stop(t.Context()), "does not exist")
}

func testStopBounded(t *testing.T, pg infra.Postgres) {
	c, _ := start(t, pg, wal.Config{Tables: []string{"public.mails"}})
	require.NoError(t, pg.Kill(t.Context()))
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	err := c.Stop(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "wal of shop")
	require.NoError(t, pg.Restart(t.Context()))
	exec(t, connect(t, pg), "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
}

// testKilled writes from several sessions while the server is killed five times
// with SIGKILL, and once stopped: every row that is there at the end was seen
// exactly once, and nothing else.
func testKilled(t *testing.T, pg infra.Postgres) {
	conn := connect(t, pg)
	exec(t, conn, `CREATE TABLE kept (id bigint PRIMARY KEY)`)
	c, s := start(t, pg, wal.Config{Tables: []string{"public.kept"}})
	writing, quit := context.WithCancel(t.Context())
	var writers sync.WaitGroup
	var acked atomic.Int64
	for w := range 4 {
		writers.Go(func() { write(writing, pg, int64(w)<<32, &acked) })
	}
	for range 5 {
		before := acked.Load()
		require.Eventually(t, func() bool { return acked.Load() > before+100 }, time.Minute, time.Millisecond)
		require.NoError(t, pg.Kill(t.Context()))
		require.NoError(t, pg.Restart(t.Context()))
		// A checkpoint writes the slot's position down, so that some crashes
		// take it back and some do not.
		if before%2 == 0 {
			exec(t, connect(t, pg), "CHECKPOINT")
		}
	}
	require.NoError(t, pg.Pause(t.Context()))
	require.NoError(t, pg.Resume(t.Context()))
	quit()
	writers.Wait()
	stop(t, c)

	seen := map[string]int{}
	for i, ch := range s.changes {
		require.EqualValues(t, i+1, ch.Order)
		seen[ch.New["id"]]++
	}
	conn = connect(t, pg)
	rows, err := conn.Query(t.Context(), "SELECT id::text FROM kept")
	require.NoError(t, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.GreaterOrEqual(t, int64(len(ids)), acked.Load())
	require.Len(t, seen, len(ids))
	for _, id := range ids {
		require.Equal(t, 1, seen[id], "row %s", id)
	}
	require.NotZero(t, c.Stats().Reconnects)
	t.Logf("%d rows, %+v", len(ids), c.Stats())
	requireNoSlots(t, conn)
}

// write commits rows one by one, reconnecting as a client would.
func write(ctx context.Context, pg infra.Postgres, id int64, acked *atomic.Int64) {
	var conn *pgx.Conn
	defer func() {
		if conn != nil {
			_ = conn.Close(context.Background())
		}
	}()
	for ctx.Err() == nil {
		if conn == nil || conn.IsClosed() {
			c, err := pgx.Connect(ctx, pg.URL("shop"))
			if err != nil {
				time.Sleep(5 * time.Millisecond) // a client's backoff: it is refused at once while the server is down
				continue
			}
			conn = c
		}
		id++
		if _, err := conn.Exec(ctx, "INSERT INTO kept VALUES ($1)", id); err == nil {
			acked.Add(1)
		}
	}
}

// BenchmarkCollector reads 50,000 committed updates of a row as wide as a
// mail's, old and new values.
func BenchmarkCollector(b *testing.B) {
	const transactions = 50_000
	pg := server(b)
	conn := connect(b, pg)
	exec(b, conn, `CREATE TABLE mails (id int PRIMARY KEY, status text, attempts int, a text, b text, at timestamptz, doc jsonb)`)
	exec(b, conn, `ALTER TABLE mails REPLICA IDENTITY FULL`)
	exec(b, conn, `INSERT INTO mails VALUES (1, 'PENDING', 0, repeat('a', 40), repeat('b', 40), now(), '{"booking": "0123456789", "seats": ["A1", "A2"]}')`)
	exec(b, conn, `SET synchronous_commit = off`)
	for b.Loop() {
		b.StopTimer()
		c, s := start(b, pg, wal.Config{Tables: []string{"public.mails"}})
		exec(b, conn, fmt.Sprintf(`DO $$ BEGIN FOR i IN 1..%d LOOP UPDATE mails SET attempts = i; COMMIT; END LOOP; END $$`, transactions))
		b.StartTimer()
		stop(b, c)
		b.StopTimer()
		require.Len(b, s.changes, transactions)
		b.StartTimer()
	}
	b.ReportMetric(float64(transactions*b.N)/b.Elapsed().Seconds(), "tx/s")
}
