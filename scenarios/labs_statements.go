package scenarios

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// statementStories are the experiments about statements that meet in one
// database.
func statementStories() []labStory {
	return []labStory{
		{name: "lab-atom", what: "rollback after the inserts of booking and outbox row", want: "0 bookings, 0 outbox rows", tell: tellAtom},
		{name: "lab-claim", what: "two workers claim two rows each while the first holds its locks", want: "first k1 k2, second k3 k4 without a wait", tell: tellClaim},
		{name: "lab-dedup", what: "a second insert with the same key", want: "unique violation; with conflict-do-nothing 0 rows", tell: tellDedup},
		{name: "lab-fence", what: "a lease runs out, another worker claims, the first one finishes with its old token", want: "UPDATE 0 with token 1, UPDATE 1 with token 2", tell: tellFence},
		{name: "lab-ab-commit", what: "B inserts the key of A's open transaction, A commits", want: "B waits, then 0 rows", tell: tellAB(true)},
		{name: "lab-ab-rollback", what: "B inserts the key of A's open transaction, A rolls back", want: "B waits, then 1 row", tell: tellAB(false)},
		{name: "lab-c1", what: "the cancel comes first", want: "cancel 1 row, claim 0 rows, CANCELLED", tell: tellC(true)},
		{name: "lab-c2", what: "the worker comes first", want: "claim 1 row, cancel 0 rows, SENT", tell: tellC(false)},
		{name: "lab-c3", what: "the cancel holds the row while the worker comes", want: "the worker waits, then 0 rows, CANCELLED", tell: tellC3},
		{name: "lab-delay", what: "a reminder due in three days, its booking cancelled, the days pass", want: "claimed 0 before, 0 after, 1 CANCELLED", tell: tellDelay},
		{name: "lab-four", what: "one cancel statement over pending, sending, sent, absent", want: "absent CANCELLED, pending CANCELLED, sending SENDING", tell: tellFour},
		{name: "lab-poison", what: "tombstones of two mails that carry their cancel's event id", want: "unique violation; with NULL 2 rows", tell: tellPoison},
	}
}

// The statements, as the document that the experiments come from has them.
const (
	addSQL = `INSERT INTO notifications (id, dedupe_key, booking_id, event_id, type, channel, recipient, payload, status, generation, attempt_limit)
VALUES (gen_random_uuid(), $1, 'lab', gen_random_uuid()::text, 'TICKET_CONFIRMATION', 'EMAIL', 'lab@customers.test', '{}', 'PENDING', 1, 4)`
	claimSQL = `WITH due AS (
  SELECT id FROM notifications
  WHERE (status = 'PENDING' OR status = 'SENDING' AND locked_until < now())
    AND NOT cancel_requested AND coalesce(send_after, now()) <= now()
  ORDER BY dedupe_key LIMIT $1 FOR UPDATE SKIP LOCKED)
UPDATE notifications n SET status = 'SENDING', token = token + 1, attempts = attempts + 1, locked_until = now() + interval '1 minute'
FROM due WHERE n.id = due.id RETURNING n.dedupe_key`
	claimOneSQL = `UPDATE notifications SET status = 'SENDING', token = token + 1, attempts = attempts + 1, locked_until = now() + interval '1 minute'
WHERE dedupe_key = $1 AND status = 'PENDING' AND NOT cancel_requested`
	finishSQL = `UPDATE notifications SET status = 'SENT', sent_at = now(), locked_until = NULL
WHERE dedupe_key = $1 AND status = 'SENDING' AND token = $2`
	cancelSQL    = `UPDATE notifications SET status = 'CANCELLED' WHERE dedupe_key = $1 AND status = 'PENDING'`
	tombstoneSQL = `INSERT INTO notifications (id, dedupe_key, booking_id, event_id, type, channel, recipient, payload, status, generation, attempt_limit)
VALUES (gen_random_uuid(), $1, 'lab', $2, 'TICKET_CONFIRMATION', 'EMAIL', '', '{}', 'CANCELLED', 1, 0)`
	cancelAnySQL = `INSERT INTO notifications AS n (id, dedupe_key, booking_id, event_id, type, channel, recipient, payload, status, generation, attempt_limit)
SELECT gen_random_uuid(), k, 'lab', NULL, 'TICKET_CONFIRMATION', 'EMAIL', '', '{}', 'CANCELLED', 1, 0 FROM unnest($1::text[]) k
ON CONFLICT (dedupe_key) DO UPDATE SET
  status = CASE n.status WHEN 'PENDING' THEN 'CANCELLED' ELSE n.status END, cancel_requested = true
WHERE n.status IN ('PENDING', 'SENDING')
RETURNING dedupe_key || ' ' || status`
)

// table makes the story's empty copy of the system's table, and returns a
// connection that sees it in the table's place.
func (s *stage) table(ctx context.Context) (*pgx.Conn, error) {
	conn, err := s.database(ctx, "notify")
	if err != nil {
		return nil, err
	}
	_, err = conn.Exec(ctx, fmt.Sprintf(`CREATE SCHEMA IF NOT EXISTS %[1]s;
CREATE TABLE IF NOT EXISTS %[1]s.notifications (LIKE public.notifications INCLUDING ALL);
SET search_path = %[1]s`, s.schema))
	if err != nil {
		return nil, errors.Join(err, conn.Close(ctx))
	}
	return conn, nil
}

// two connections to the story's table, with the keys in it.
func (s *stage) two(ctx context.Context, keys ...string) (a, b *pgx.Conn, done func(), err error) {
	if a, err = s.table(ctx); err != nil {
		return nil, nil, nil, err
	}
	if b, err = s.table(ctx); err != nil {
		return nil, nil, nil, errors.Join(err, a.Close(ctx))
	}
	done = func() {
		ctx := context.WithoutCancel(ctx)
		_, _ = a.Close(ctx), b.Close(ctx) // what was seen was seen
	}
	for _, k := range keys {
		if _, err := a.Exec(ctx, addSQL, k); err != nil {
			done()
			return nil, nil, nil, err
		}
	}
	return a, b, done, nil
}

// db is a connection or a transaction.
type db interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

func changed(ctx context.Context, c db, sql string, args ...any) (int64, error) {
	tag, err := c.Exec(ctx, sql, args...)
	return tag.RowsAffected(), err
}

func texts(ctx context.Context, c db, sql string, args ...any) ([]string, error) {
	rows, err := c.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// violation says "unique violation" for that error, and returns any other.
func violation(err error) (string, error) {
	var pg *pgconn.PgError
	switch {
	case err == nil:
		return "no error", nil
	case errors.As(err, &pg) && pg.Code == "23505":
		return "unique violation", nil
	default:
		return "", err
	}
}

func tellAtom(ctx context.Context, s *stage) (string, error) {
	conn, err := s.database(ctx, "booking")
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	tx, err := conn.Begin(ctx)
	if err != nil {
		return "", err
	}
	_, err = tx.Exec(ctx, `INSERT INTO bookings (id, status, recipient) VALUES ($1, 'CONFIRMED', $2)`, s.booking.ID, s.booking.Recipient)
	if err == nil {
		_, err = tx.Exec(ctx, `INSERT INTO outbox (event_id, topic, key, event_type, payload) VALUES (gen_random_uuid(), 'lab', $1, 'BookingConfirmed', '{}')`, s.booking.ID)
	}
	if err = errors.Join(err, tx.Rollback(ctx)); err != nil {
		return "", err
	}
	var bookings, events int
	err = conn.QueryRow(ctx, `SELECT (SELECT count(*) FROM bookings WHERE id = $1), (SELECT count(*) FROM outbox WHERE key = $1)`, s.booking.ID).Scan(&bookings, &events)
	return fmt.Sprintf("%d bookings, %d outbox rows", bookings, events), err
}

func tellClaim(ctx context.Context, s *stage) (string, error) {
	a, b, done, err := s.two(ctx, "k1", "k2", "k3", "k4")
	if err != nil {
		return "", err
	}
	defer done()
	tx, err := a.Begin(ctx)
	if err != nil {
		return "", err
	}
	first, err := texts(ctx, tx, claimSQL, 2)
	if err != nil {
		return "", errors.Join(err, tx.Rollback(ctx))
	}
	// A wait would end in an error: lock_not_available.
	if _, err := b.Exec(ctx, `SET lock_timeout = '1ms'`); err != nil {
		return "", errors.Join(err, tx.Rollback(ctx))
	}
	second, err := texts(ctx, b, claimSQL, 2)
	if err = errors.Join(err, tx.Commit(ctx)); err != nil {
		return "", err
	}
	return fmt.Sprintf("first %s, second %s without a wait", sorted(first), sorted(second)), nil
}

func tellDedup(ctx context.Context, s *stage) (string, error) {
	a, _, done, err := s.two(ctx, "k1")
	if err != nil {
		return "", err
	}
	defer done()
	_, err = a.Exec(ctx, addSQL, "k1")
	how, err := violation(err)
	if err != nil {
		return "", err
	}
	n, err := changed(ctx, a, addSQL+` ON CONFLICT DO NOTHING`, "k1")
	return fmt.Sprintf("%s; with conflict-do-nothing %d rows", how, n), err
}

func tellFence(ctx context.Context, s *stage) (string, error) {
	a, b, done, err := s.two(ctx, "k1")
	if err != nil {
		return "", err
	}
	defer done()
	if _, err := texts(ctx, a, claimSQL, 1); err != nil {
		return "", err
	}
	if _, err := a.Exec(ctx, `UPDATE notifications SET locked_until = now() - interval '1 second'`); err != nil {
		return "", err
	}
	if _, err := texts(ctx, b, claimSQL, 1); err != nil {
		return "", err
	}
	old, err := changed(ctx, a, finishSQL, "k1", 1)
	if err != nil {
		return "", err
	}
	own, err := changed(ctx, b, finishSQL, "k1", 2)
	return fmt.Sprintf("UPDATE %d with token 1, UPDATE %d with token 2", old, own), err
}

// meet runs a statement on b while a holds a transaction open, waits until
// Postgres says that it waits for a lock, ends the transaction, and returns how
// many rows the statement changed.
func meet(ctx context.Context, s *stage, b *pgx.Conn, end func(context.Context) error, sql string, args ...any) (waited bool, n int64, err error) {
	type answer struct {
		n   int64
		err error
	}
	pid := b.PgConn().PID()
	got := make(chan answer, 1)
	go func() {
		n, err := changed(ctx, b, sql, args...)
		got <- answer{n, err}
	}()
	_, waitErr := await(ctx, s, "the second statement waits", "notify",
		`SELECT coalesce(wait_event_type, '') FROM pg_stat_activity WHERE pid = $1`,
		func(event string) bool { return event == "Lock" || len(got) > 0 }, int32(pid))
	waited = len(got) == 0
	endErr := end(context.WithoutCancel(ctx))
	x := <-got
	return waited, x.n, errors.Join(waitErr, endErr, x.err)
}

func waits(waited bool) string {
	if waited {
		return "waits"
	}
	return "does not wait"
}

func tellAB(commit bool) func(context.Context, *stage) (string, error) {
	return func(ctx context.Context, s *stage) (string, error) {
		a, b, done, err := s.two(ctx)
		if err != nil {
			return "", err
		}
		defer done()
		tx, err := a.Begin(ctx)
		if err != nil {
			return "", err
		}
		if _, err := tx.Exec(ctx, addSQL, "k1"); err != nil {
			return "", errors.Join(err, tx.Rollback(ctx))
		}
		end, rows := tx.Rollback, "row"
		if commit {
			end, rows = tx.Commit, "rows"
		}
		waited, n, err := meet(ctx, s, b, end, addSQL+` ON CONFLICT DO NOTHING`, "k1")
		return fmt.Sprintf("B %s, then %d %s", waits(waited), n, rows), err
	}
}

func tellC(cancelFirst bool) func(context.Context, *stage) (string, error) {
	return func(ctx context.Context, s *stage) (string, error) {
		a, b, done, err := s.two(ctx, "k1")
		if err != nil {
			return "", err
		}
		defer done()
		var words []string
		steps := []struct {
			name, sql string
			on        *pgx.Conn
		}{{"cancel", cancelSQL, a}, {"claim", claimOneSQL, b}}
		if !cancelFirst {
			steps[0], steps[1] = steps[1], steps[0]
		}
		for _, step := range steps {
			n, err := changed(ctx, step.on, step.sql, "k1")
			if err != nil {
				return "", err
			}
			words = append(words, fmt.Sprintf("%s %s", step.name, rowCount(n)))
		}
		// The worker, if it has the row, has sent the mail.
		if _, err := b.Exec(ctx, finishSQL, "k1", 1); err != nil {
			return "", err
		}
		status, err := texts(ctx, a, `SELECT status FROM notifications`)
		return strings.Join(append(words, status...), ", "), err
	}
}

func rowCount(n int64) string {
	if n == 1 {
		return "1 row"
	}
	return fmt.Sprintf("%d rows", n)
}

func tellC3(ctx context.Context, s *stage) (string, error) {
	a, b, done, err := s.two(ctx, "k1")
	if err != nil {
		return "", err
	}
	defer done()
	tx, err := a.Begin(ctx)
	if err != nil {
		return "", err
	}
	if _, err := tx.Exec(ctx, cancelSQL, "k1"); err != nil {
		return "", errors.Join(err, tx.Rollback(ctx))
	}
	waited, n, err := meet(ctx, s, b, tx.Commit, claimOneSQL, "k1")
	if err != nil {
		return "", err
	}
	status, err := texts(ctx, a, `SELECT status FROM notifications`)
	return fmt.Sprintf("the worker %s, then %s, %s", waits(waited), rowCount(n), strings.Join(status, " ")), err
}

func tellDelay(ctx context.Context, s *stage) (string, error) {
	a, b, done, err := s.two(ctx, "k1")
	if err != nil {
		return "", err
	}
	defer done()
	if _, err := a.Exec(ctx, `UPDATE notifications SET send_after = now() + interval '3 days'`); err != nil {
		return "", err
	}
	before, err := texts(ctx, b, claimSQL, 10)
	if err != nil {
		return "", err
	}
	if _, err := a.Exec(ctx, cancelSQL, "k1"); err != nil {
		return "", err
	}
	if _, err := a.Exec(ctx, `UPDATE notifications SET send_after = send_after - interval '4 days'`); err != nil {
		return "", err
	}
	after, err := texts(ctx, b, claimSQL, 10)
	if err != nil {
		return "", err
	}
	n, err := texts(ctx, a, `SELECT count(*)::text FROM notifications WHERE status = 'CANCELLED'`)
	return fmt.Sprintf("claimed %d before, %d after, %s CANCELLED", len(before), len(after), strings.Join(n, "")), err
}

func tellFour(ctx context.Context, s *stage) (string, error) {
	a, _, done, err := s.two(ctx, "pending", "sending", "sent")
	if err != nil {
		return "", err
	}
	defer done()
	for _, key := range []string{"sending", "sent"} {
		if _, err := a.Exec(ctx, claimOneSQL, key); err != nil {
			return "", err
		}
	}
	if _, err := a.Exec(ctx, finishSQL, "sent", 1); err != nil {
		return "", err
	}
	got, err := texts(ctx, a, cancelAnySQL, []string{"pending", "sending", "sent", "absent"})
	return strings.ReplaceAll(sortedBy(got, ","), ",", ", "), err
}

func tellPoison(ctx context.Context, s *stage) (string, error) {
	a, _, done, err := s.two(ctx)
	if err != nil {
		return "", err
	}
	defer done()
	if _, err := a.Exec(ctx, tombstoneSQL, "k1", "the cancel's"); err != nil {
		return "", err
	}
	_, err = a.Exec(ctx, tombstoneSQL, "k2", "the cancel's")
	how, err := violation(err)
	if err != nil {
		return "", err
	}
	var n int64
	for _, key := range []string{"k3", "k4"} {
		one, err := changed(ctx, a, tombstoneSQL, key, nil)
		if err != nil {
			return "", err
		}
		n += one
	}
	return fmt.Sprintf("%s; with NULL %d rows", how, n), nil
}

func sorted(words []string) string { return sortedBy(words, " ") }

func sortedBy(words []string, between string) string {
	words = slices.Clone(words)
	slices.Sort(words)
	return strings.Join(words, between)
}
