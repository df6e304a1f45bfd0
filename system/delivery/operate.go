package delivery

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// DeadFilter chooses DEAD rows; a zero field chooses all.
type DeadFilter struct {
	Type      string // the mail type
	Reason    string // part of the last error, whatever its case
	BookingID string
	DedupeKey string
	// OlderThan: dead for at least so long, by the database's clock.
	OlderThan time.Duration
	// Until: died at this moment at the latest. A replay gives the moment at
	// which it began, and so never meets a mail that died by it.
	Until time.Time
}

// sqlListDeadWhere is list_dead with a filter.
const sqlListDeadWhere = `-- list_dead_where
SELECT ` + columns + ` FROM notifications n
WHERE n.status = 'DEAD' AND (n.changed_at, n.id) > ($1, $2)
  AND ($4 = '' OR n.type = $4)
  AND ($5 = '' OR position(lower($5) IN lower(coalesce(n.last_error, ''))) > 0)
  AND ($6 = '' OR n.booking_id = $6)
  AND ($7 = '' OR n.dedupe_key = $7)
  AND n.changed_at <= ` + clock + ` - $8::interval
  AND n.changed_at <= coalesce($9::timestamptz, 'infinity')
ORDER BY n.changed_at, n.id
LIMIT $3`

const sqlListByID = `-- list_by_id
SELECT ` + columns + ` FROM notifications n WHERE n.id = ANY($1::uuid[])`

// sqlForgetMail: only of a mail of which there is no copy and no open try.
const sqlForgetMail = `-- forget_mail
DELETE FROM notification_mails m USING notifications n
WHERE m.notification_id = $1 AND n.id = $1 AND n.status = 'PENDING' AND n.unsettled = 0`

const sqlNow = `-- now
SELECT ` + clock

// DeadWhere lists the DEAD rows that the filter chooses, oldest death first.
func (s *Store) DeadWhere(ctx context.Context, f DeadFilter, after After, limit int) ([]Row, error) {
	var until *time.Time
	if !f.Until.IsZero() {
		until = &f.Until
	}
	rows, err := s.rows(ctx, sqlListDeadWhere, after.ChangedAt, after.ID, limit,
		f.Type, f.Reason, f.BookingID, f.DedupeKey, f.OlderThan, until)
	if err != nil {
		return nil, fmt.Errorf("list dead rows: %w", err)
	}
	return rows, nil
}

const sqlCountDead = `-- count_dead
SELECT count(*) FROM notifications n WHERE n.status = 'DEAD'`

// CountDead is how many mails are DEAD, discarded ones included.
func (s *Store) CountDead(ctx context.Context) (int, error) {
	res, err := s.db.Query(ctx, sqlCountDead)
	if err != nil {
		return 0, fmt.Errorf("count dead rows: %w", err)
	}
	n, err := pgx.CollectExactlyOneRow(res, pgx.RowTo[int])
	if err != nil {
		return 0, fmt.Errorf("count dead rows: %w", err)
	}
	return n, nil
}

// ByIDs reads those of the rows that exist, in no order.
func (s *Store) ByIDs(ctx context.Context, ids []uuid.UUID) ([]Row, error) {
	rows, err := s.rows(ctx, sqlListByID, ids)
	if err != nil {
		return nil, fmt.Errorf("read %d rows: %w", len(ids), err)
	}
	return rows, nil
}

// Now reads the database's clock, the only one that counts.
func (s *Store) Now(ctx context.Context) (time.Time, error) {
	res, err := s.db.Query(ctx, sqlNow)
	if err != nil {
		return time.Time{}, fmt.Errorf("read the clock: %w", err)
	}
	now, err := pgx.CollectExactlyOneRow(res, pgx.RowTo[time.Time])
	if err != nil {
		return time.Time{}, fmt.Errorf("read the clock: %w", err)
	}
	return now, nil
}

// maxResends is how often a mail can be sent again.
const maxResends = `50`

// resendKeys are all keys that repetitions of a row's mail can have. They are
// named one by one so that each is a look into the unique index: "begins with"
// has no index under a language's collation, and read the whole table. The
// highest one counts, not how many there are, since retention takes the oldest
// away first.
func resendKeys(row string) string {
	return `ARRAY(SELECT ` + row + `.dedupe_key || ':resend:' || k FROM generate_series(1, ` + maxResends + `) AS k)`
}

// SendAgainRefused says why a mail is not sent again.
type SendAgainRefused struct{ DedupeKey, Reason string }

func (e *SendAgainRefused) Error() string {
	return fmt.Sprintf("%s is not sent again: %s", e.DedupeKey, e.Reason)
}

var (
	// sqlSendAgainLock orders a second sending against a cancel, which locks the
	// same row first: either the cancel is seen here, or it sees the new row.
	sqlSendAgainLock = `-- send_again_lock
SELECT ` + columns + ` FROM notifications n WHERE n.dedupe_key = $1 FOR UPDATE`

	sqlSendAgainCheck = `-- send_again_check
SELECT CASE
    WHEN $1 LIKE '%:resend:%' THEN 'it is a second sending itself, name the first'
    WHEN n.cancel_requested OR n.status = 'CANCELLED' OR EXISTS (
      SELECT FROM cancelled_bookings c WHERE c.booking_id = n.booking_id AND c.generation >= n.generation)
      THEN 'the booking is cancelled'
    WHEN n.status = 'DEAD' THEN 'it is dead: replay it'
    WHEN n.status IN ('PENDING', 'FAILED', 'SENDING') THEN 'it is still on its way'
    WHEN EXISTS (SELECT FROM notifications r WHERE r.dedupe_key = ANY(` + resendKeys("n") + `)
      AND r.status IN ('PENDING', 'FAILED', 'SENDING'))
      THEN 'a second sending is still on its way'
    WHEN EXISTS (SELECT FROM notifications r WHERE r.dedupe_key = n.dedupe_key || ':resend:' || ` + maxResends + `)
      THEN 'it was sent again ` + maxResends + ` times'
    ELSE '' END
FROM notifications n WHERE n.dedupe_key = $1`

	// sqlSendAgain: absent → PENDING under the next key of the intent (OB-12).
	sqlSendAgain = `-- send_again
INSERT INTO notifications AS n
  (id, dedupe_key, booking_id, campaign_id, event_id, type, channel, recipient, payload, status, generation, attempt_limit)
SELECT $2, o.dedupe_key || ':resend:' || (1 + (SELECT coalesce(max(split_part(r.dedupe_key, ':resend:', 2)::int), 0)
    FROM notifications r WHERE r.dedupe_key = ANY(` + resendKeys("o") + `))),
  o.booking_id, o.campaign_id, 'resend:' || $2::uuid, o.type, o.channel, o.recipient, o.payload, 'PENDING', o.generation, $3
FROM notifications o WHERE o.dedupe_key = $1
RETURNING ` + columns
)

// SendAgain makes a second mail of the same intent, for a person who asked for
// it: a row of its own under the key "<key>:resend:<n>", so that no attempt of
// the first can be taken for it. It is refused ([SendAgainRefused]) for a
// cancelled booking, for a DEAD mail (that one is replayed), and while the mail
// or an earlier repetition of it is on its way.
//
// It must run in a transaction ([Store.On]): the lock on the first mail's row
// has to be held until the new row is committed. A later cancel of the booking
// takes the new mail with it.
func (s *Store) SendAgain(ctx context.Context, key string) (Row, error) {
	fail := func(err error) (Row, error) { return Row{}, fmt.Errorf("send %s again: %w", key, err) }
	if _, ok := s.db.(pgx.Tx); !ok {
		return fail(errors.New("not in a transaction"))
	}
	found, err := s.rows(ctx, sqlSendAgainLock, key)
	if err != nil {
		return fail(err)
	}
	if len(found) == 0 {
		return fail(ErrNoRow)
	}
	res, err := s.db.Query(ctx, sqlSendAgainCheck, key)
	if err != nil {
		return fail(err)
	}
	reason, err := pgx.CollectExactlyOneRow(res, pgx.RowTo[string])
	if err != nil {
		return fail(err)
	}
	if reason != "" {
		return Row{}, &SendAgainRefused{DedupeKey: key, Reason: reason}
	}
	id, err := uuid.NewV7()
	if err != nil {
		return fail(err)
	}
	made, err := s.rows(ctx, sqlSendAgain, key, id, s.cfg.MaxAttempts)
	if err != nil {
		return fail(err)
	}
	if len(made) != 1 {
		return fail(fmt.Errorf("%d rows were made", len(made)))
	}
	return made[0], nil
}
