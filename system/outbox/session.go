package outbox

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"mailproof/system/plans"
)

// session is the relay's own connection. While it lives and has locked, it
// holds the advisory lock. Every statement of the relay runs on it, one at a
// time, so that a statement that succeeded proves that the lock was held.
type session struct {
	conn *pgx.Conn
	cfg  *Config
	// spoke is when the server last answered.
	spoke time.Time
}

// row is one unpublished event.
type row struct {
	id         int64
	eventID    uuid.UUID
	topic      string
	key        string
	eventType  string
	payload    []byte
	attempts   int
	rejections int
	// wait is the rest of the row's backoff.
	wait time.Duration
}

const (
	lockSQL = `SELECT pg_try_advisory_lock($1)`

	// The order is by id alone; a row is found by its status, never by an id
	// that was reached before. A row in backoff holds back those after it
	// (A2-04).
	unpublishedSQL = `
SELECT id, event_id, topic, key, event_type, payload::text, attempts, rejections,
       (extract(epoch FROM greatest(next_attempt_at - clock_timestamp(), interval '0')) * 1000000)::bigint
FROM outbox
WHERE published_at IS NULL AND dead_at IS NULL
ORDER BY id
LIMIT $1`

	// Marks exactly the rows that were acknowledged: "id <= n" would also mark
	// a lower id that was committed meanwhile and never published.
	markSQL = `
UPDATE outbox SET published_at = clock_timestamp(), next_attempt_at = NULL
WHERE id = ANY($1) AND published_at IS NULL`

	// The broker's failure: noted, but it never leads to dead.
	failedSQL = `
UPDATE outbox SET attempts = attempts + 1, last_error = left($2, 500)
WHERE id = $1 AND published_at IS NULL`

	// The record's own failure. $3 is the limit, $4 the backoff in microseconds.
	rejectedSQL = `
UPDATE outbox SET
    attempts = attempts + 1,
    rejections = rejections + 1,
    last_error = left($2, 500),
    next_attempt_at = clock_timestamp() + $4 * interval '1 microsecond',
    dead_at = CASE WHEN rejections + 1 >= $3 THEN clock_timestamp() END
WHERE id = $1 AND published_at IS NULL AND dead_at IS NULL
RETURNING dead_at IS NOT NULL`

	unalertedSQL = `
SELECT id, event_id, topic, key, event_type, coalesce(last_error, '')
FROM outbox
WHERE dead_at IS NOT NULL AND alerted_at IS NULL
ORDER BY id
LIMIT 100`

	alertedSQL = `UPDATE outbox SET alerted_at = clock_timestamp() WHERE id = $1`

	// Looks at the oldest rows only, by primary key, so that it costs the same
	// whatever the table's size. Dead rows stay and must not stand in the way of
	// those behind them: a thousand of them would end all purging. ARRAY, because
	// the planner would join by reading the whole table.
	purgeSQL = `
DELETE FROM outbox
WHERE id = ANY(ARRAY(SELECT id FROM outbox WHERE dead_at IS NULL ORDER BY id LIMIT ` + purgeLimit + `))
  AND published_at < clock_timestamp() - $1 * interval '1 microsecond'`

	purgeLimit = `1000`
	purgeBatch = 1000 // the same, to compare with
)

// openSession connects. The server ends the session when it hears nothing for
// SessionTimeout; that is what frees the lock of a stopped process.
func openSession(ctx context.Context, cfg *Config) (*session, error) {
	cc, err := pgx.ParseConfig(cfg.DatabaseURL)
	if err != nil {
		return nil, fmt.Errorf("relay session: %w", err)
	}
	millis := func(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }
	cc.RuntimeParams["application_name"] = "outbox-relay " + cfg.Instance
	cc.RuntimeParams["idle_session_timeout"] = millis(cfg.SessionTimeout)
	cc.RuntimeParams["statement_timeout"] = millis(cfg.QueryTimeout)
	// A cut link is noticed by the server too, when it has something to say.
	cc.RuntimeParams["tcp_user_timeout"] = millis(cfg.SessionTimeout)
	plans.Steady(cc.RuntimeParams)

	ctx, cancel := context.WithTimeout(ctx, cfg.QueryTimeout)
	defer cancel()
	conn, err := pgx.ConnectConfig(ctx, cc)
	if err != nil {
		return nil, fmt.Errorf("relay session: %w", err)
	}
	s := &session{conn: conn, cfg: cfg, spoke: time.Now()}
	if err := s.checkDirect(ctx); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// errPooled says that a pooler stands between the relay and Postgres.
var errPooled = errors.New("relay session: the connection goes through a pooler, which would separate the session " +
	"from its advisory lock: give the relay a direct database URL")

// checkDirect compares the backend that the connection was promised with the
// one that answers: a pooler makes up the first.
func (s *session) checkDirect(ctx context.Context) error {
	var pid uint32
	if err := s.conn.QueryRow(ctx, `SELECT pg_backend_pid()`).Scan(&pid); err != nil {
		return fmt.Errorf("relay session: %w", err)
	}
	if pid != s.conn.PgConn().PID() {
		return errPooled
	}
	return nil
}

// do runs one statement. It ignores the caller's cancellation, so that a relay
// that stops can still mark what was acknowledged, and is bounded by
// QueryTimeout.
func (s *session) do(ctx context.Context, what string, f func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.QueryTimeout)
	defer cancel()
	if err := f(ctx); err != nil {
		return fmt.Errorf("relay session: %s: %w", what, err)
	}
	s.spoke = time.Now()
	return nil
}

func (s *session) exec(ctx context.Context, what, sql string, args ...any) error {
	return s.do(ctx, what, func(ctx context.Context) error {
		_, err := s.conn.Exec(ctx, sql, args...)
		return err
	})
}

// tryLock reports whether the session holds the lock now. It must not be called
// again once it has said yes: the lock counts.
func (s *session) tryLock(ctx context.Context) (bool, error) {
	var ok bool
	err := s.do(ctx, "lock", func(ctx context.Context) error {
		return s.conn.QueryRow(ctx, lockSQL, s.cfg.LockID).Scan(&ok)
	})
	return ok, err
}

func (s *session) listen(ctx context.Context) error {
	return s.exec(ctx, "listen", `LISTEN `+channel)
}

func (s *session) unpublished(ctx context.Context) ([]row, error) {
	var rows []row
	err := s.do(ctx, "read the batch", func(ctx context.Context) error {
		rs, err := s.conn.Query(ctx, unpublishedSQL, s.cfg.BatchSize)
		if err != nil {
			return err
		}
		rows, err = pgx.CollectRows(rs, scanRow)
		return err
	})
	return rows, err
}

func scanRow(r pgx.CollectableRow) (row, error) {
	var x row
	var waitMicros *int64 // null where next_attempt_at is
	err := r.Scan(&x.id, &x.eventID, &x.topic, &x.key, &x.eventType, &x.payload, &x.attempts, &x.rejections, &waitMicros)
	if waitMicros != nil {
		x.wait = time.Duration(*waitMicros) * time.Microsecond
	}
	return x, err
}

func (s *session) mark(ctx context.Context, rows []row) error {
	ids := make([]int64, len(rows))
	for i := range rows {
		ids[i] = rows[i].id
	}
	return s.exec(ctx, fmt.Sprintf("mark %d published", len(ids)), markSQL, ids)
}

func (s *session) failed(ctx context.Context, r row, cause error) error {
	return s.exec(ctx, "note a failure of "+r.eventID.String(), failedSQL, r.id, cause.Error())
}

// rejected notes that the broker refused this very record and reports whether
// that was once too often.
func (s *session) rejected(ctx context.Context, r row, cause error) (dead bool, err error) {
	err = s.do(ctx, "note a rejection of "+r.eventID.String(), func(ctx context.Context) error {
		wait := backoff(s.cfg.BackoffUnit, r.attempts+1)
		err := s.conn.QueryRow(ctx, rejectedSQL, r.id, cause.Error(), s.cfg.MaxRejections, wait.Microseconds()).Scan(&dead)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil // somebody else settled it
		}
		return err
	})
	return dead, err
}

func (s *session) unalerted(ctx context.Context) ([]Dead, error) {
	var dead []Dead
	err := s.do(ctx, "read dead events", func(ctx context.Context) error {
		rs, err := s.conn.Query(ctx, unalertedSQL)
		if err != nil {
			return err
		}
		dead, err = pgx.CollectRows(rs, pgx.RowToStructByPos[Dead])
		return err
	})
	return dead, err
}

func (s *session) alerted(ctx context.Context, d Dead) error {
	return s.exec(ctx, "stamp the alert of "+d.EventID.String(), alertedSQL, d.ID)
}

// purge deletes one batch of published rows past their retention and reports how
// many there were.
func (s *session) purge(ctx context.Context) (n int64, err error) {
	err = s.do(ctx, "purge", func(ctx context.Context) error {
		tag, err := s.conn.Exec(ctx, purgeSQL, s.cfg.Retention.Microseconds())
		n = tag.RowsAffected()
		return err
	})
	return n, err
}

// ping keeps the session, and with it the lock, alive.
func (s *session) ping(ctx context.Context) error {
	return s.do(ctx, "ping", s.conn.Ping)
}

// silent is how long the server has not been heard of. It counts the time that
// the process was stopped.
func (s *session) silent() time.Duration { return time.Since(s.spoke) }

// await waits until the doorbell rings or d has passed.
func (s *session) await(ctx context.Context, d time.Duration) error {
	wait, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	_, err := s.conn.WaitForNotification(wait)
	if err == nil || wait.Err() != nil && !s.conn.IsClosed() {
		return nil
	}
	return fmt.Errorf("relay session: wait for the doorbell: %w", err)
}

// pause waits for d and keeps the session alive meanwhile.
func (s *session) pause(ctx context.Context, d time.Duration) error {
	for end := time.Now().Add(d); ctx.Err() == nil; {
		left := time.Until(end)
		if left <= 0 {
			return nil
		}
		sleep(ctx, min(left, s.cfg.PingInterval))
		if err := s.ping(ctx); err != nil {
			return err
		}
	}
	return nil
}

// close ends the session; the server frees the lock with it.
func (s *session) close() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = s.conn.Close(ctx) // the session ends either way
}

// backoff after the n-th failure: min(2^n, 60) units (A2-04).
func backoff(unit time.Duration, n int) time.Duration {
	const saturated = 6 // 2^6 exceeds the bound
	return unit * time.Duration(min(1<<min(n, saturated), maxBackoff))
}
