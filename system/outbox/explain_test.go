package outbox

import (
	"context"
	"os"
	"regexp"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"mailproof/system/plantest"
)

// No statement of the relay reads the whole table, however many published rows
// the retention keeps: with 50 events of a thousand unpublished and one dead.
// "make plans" runs it with a million.
func TestNoStatementScansTheTable(t *testing.T) {
	t.Parallel()
	rows := plantest.Rows(t, 50_000)
	tx := filledOutbox(t, rows)
	e := plantest.New(t, tx, "outbox", rows)

	var pending, dead int64
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT min(id) FILTER (WHERE published_at IS NULL AND dead_at IS NULL),
		min(id) FILTER (WHERE dead_at IS NOT NULL) FROM outbox`).Scan(&pending, &dead))
	const batch = 500
	ids := make([]int64, batch)
	for i := range ids {
		ids[i] = pending + int64(i)
	}
	e.Explain("write", writeSQL, uuid.New(), "topic", "key", "Type", "{}")
	e.Explain("unpublished", unpublishedSQL, batch)
	e.Explain("mark", markSQL, ids)
	e.Explain("failed", failedSQL, pending, "no broker")
	e.Explain("rejected", rejectedSQL, pending, "too large", 10, int64(1000))
	e.Explain("unalerted", unalertedSQL)
	e.Explain("alerted", alertedSQL, dead)
	e.Explain("purge", purgeSQL, int64(1))
	e.Explain("backlog", backlogSQL)
	for _, name := range statementNames(t, "session.go", "write.go", "metrics.go") {
		require.True(t, name == "lock" || e.Statements()[name], "statement %q was not explained", name)
	}
	e.Check(func(statement string) int64 {
		switch statement {
		case "backlog":
			return int64(rows/20 + 2*rows/1000) // it counts the unpublished and the dead
		case "purge":
			return 2*purgeBatch + int64(rows/1000) // the dead ones stay and are passed by
		case "unalerted":
			return int64(rows / 1000)
		default:
			return batch
		}
	})
}

func filledOutbox(t *testing.T, rows int) pgx.Tx {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), newDatabase(t))
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	for _, sql := range []string{
		`INSERT INTO outbox (event_id, topic, key, event_type, payload, created_at, published_at, dead_at, alerted_at)
SELECT gen_random_uuid(), 'booking.events', 'b-' || i, 'BookingConfirmed', '` + benchBody + `', s.at,
  CASE WHEN i % 1000 > 0 AND i <= $1 - $1 / 20 THEN s.at + interval '20 ms' END,
  CASE WHEN i % 1000 = 0 THEN s.at END, CASE WHEN i % 1000 = 0 AND i <= $1 / 2 THEN s.at END
FROM generate_series(1, $1::int) AS i, LATERAL (SELECT now() - interval '1 second' * ($1 - i) AS at) AS s`,
	} {
		_, err := pool.Exec(t.Context(), sql, rows)
		require.NoError(t, err)
	}
	_, err = pool.Exec(t.Context(), `VACUUM ANALYZE outbox`)
	require.NoError(t, err)
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	return tx
}

// statementNames of constants "nameSQL".
func statementNames(t *testing.T, files ...string) []string {
	t.Helper()
	var names []string
	for _, file := range files {
		src, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, m := range regexp.MustCompile("(\\w+)SQL += +`").FindAllStringSubmatch(string(src), -1) {
			names = append(names, m[1])
		}
	}
	require.NotEmpty(t, names)
	return names
}
