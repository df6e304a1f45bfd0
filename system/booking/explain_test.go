package booking

import (
	"context"
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/system/plantest"
)

// No statement of the booking service reads a whole table. "make plans" runs it
// with a million bookings.
func TestNoStatementScansTheTable(t *testing.T) {
	t.Parallel()
	rows := plantest.Rows(t, 50_000)
	f := newFixture(t)
	for _, sql := range []string{
		`INSERT INTO bookings (id, status, generation, recipient, name, event, seats, amount, currency)
SELECT 'b-' || i, CASE WHEN i % 20 = 0 THEN 'CANCELLED' WHEN i % 50 = 1 THEN 'NEW' ELSE 'CONFIRMED' END, 1 + (i % 100 = 0)::int,
  'guest' || i || '@example.test', 'Guest', 'Final', ARRAY['A-1', 'A-2'], '90.00', 'EUR' FROM generate_series(1, $1::int) AS i`,
		`INSERT INTO booking_mails (dedupe_key, booking_id, generation, event_type, version, occurred_at)
SELECT 'ticket:b-' || i, 'b-' || i, 1, 'EmailSent', 3, now() FROM generate_series(1, $1::int) AS i`,
	} {
		_, err := f.pool.Exec(t.Context(), sql, rows)
		require.NoError(t, err)
	}
	for _, table := range []string{"bookings", "booking_mails"} {
		_, err := f.pool.Exec(t.Context(), `VACUUM ANALYZE `+table)
		require.NoError(t, err)
	}
	tx, err := f.pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })

	e := plantest.New(t, tx, "booking", rows)
	for _, id := range []string{"new-booking", "b-7"} {
		e.Explain("insert", insertSQL, id, "guest@example.test", "Guest", "en", "Final", []string{"A-1"}, "90.00", "EUR")
	}
	e.Explain("get", getSQL, "b-7")
	e.Explain("lock", lockSQL, "b-7")
	e.Explain("move", moveSQL, "b-7", "CANCELLED", 1, time.Now())
	e.Explain("hear", hearSQL, "ticket:b-7", "b-7", 1, "EmailCancelled", int64(9), time.Now())
	e.Explain("mail", mailSQL, "ticket:b-7")
	e.Explain("leftovers", leftoversSQL, "b-5", leftoversPage, int64(0))
	for _, file := range []string{"service.go", "mail.go", "reemit.go"} {
		src, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, m := range regexp.MustCompile("(\\w+)SQL += *`").FindAllStringSubmatch(string(src), -1) {
			require.True(t, e.Statements()[m[1]], "statement %q was not explained", m[1])
		}
	}
	e.Check(func(statement string) int64 {
		if statement == "leftovers" {
			return 2 * leftoversPage // a page, and the mails of the cancelled ones
		}
		return 1
	})
}
