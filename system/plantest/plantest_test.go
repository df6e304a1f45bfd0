package plantest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"mailproof/system/outbox/outboxtest"
)

// judge collects what a check finds.
type judge struct {
	testing.TB
	found []string
}

func (j *judge) Errorf(format string, args ...any) {
	j.found = append(j.found, fmt.Sprintf(format, args...))
}

// A statement without an index is found, one with an index is not, one that
// examines too many rows is, and looking changes nothing.
func TestCheckFindsScans(t *testing.T) {
	server, err := outboxtest.Start()
	require.NoError(t, err)
	defer func() { require.NoError(t, server.Stop()) }()
	conn, err := pgx.Connect(t.Context(), server.NewDatabase(t))
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.Background()) }()
	for _, sql := range []string{
		`CREATE TABLE things (id bigint PRIMARY KEY, kind text NOT NULL)`,
		`INSERT INTO things SELECT i, 'kind ' || i % 100 FROM generate_series(1, 20000) AS i`,
		`VACUUM ANALYZE things`,
	} {
		_, err := conn.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	out := filepath.Join(t.TempDir(), "plans.jsonl")
	t.Setenv(outEnv, out)

	j := &judge{TB: t}
	e := New(j, tx, "things", 20_000)
	e.Explain("by id", `SELECT * FROM things WHERE id = $1::bigint`, 7)
	e.Explain("range", `SELECT * FROM things WHERE id BETWEEN $1::bigint AND $2::bigint`, 1, 50)
	e.Explain("by kind", `DELETE FROM things WHERE kind = $1`, "kind 3")
	e.Check(func(string) int64 { return 10 })

	require.Len(t, j.found, 6, "%v", j.found) // per plan: the scan and its rows, and the range
	for _, want := range []string{
		"by kind (custom plan): Seq Scan on things", "by kind (generic plan): Seq Scan on things",
	} {
		require.Contains(t, j.found, want)
	}
	var left int
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT count(*) FROM things`).Scan(&left))
	require.Equal(t, 20_000, left)
	written, err := os.ReadFile(out)
	require.NoError(t, err)
	require.Contains(t, string(written), `"statement":"by kind"`)
}

func TestLiterals(t *testing.T) {
	t.Parallel()
	type kind string
	var none *string
	text := `a "quoted" one`
	require.Equal(t, []any{
		"MARKETING", "1500000 microseconds", nil, []byte("raw"), "7", `{"1","2"}`, `{"a \"quoted\" one",NULL}`, "true",
	}, literals([]any{
		kind("MARKETING"), 1500 * time.Millisecond, none, []byte("raw"), 7, []int{1, 2}, []*string{&text, none}, true,
	}))
}
