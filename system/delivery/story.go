package delivery

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// sqlListByBooking reads all mails of a booking, of every generation and with
// the repetitions that somebody asked for.
const sqlListByBooking = `-- list_by_booking
SELECT ` + columns + ` FROM notifications n
WHERE n.booking_id = $1 AND n.booking_id <> ''
ORDER BY n.created_at, n.id
LIMIT $2`

const sqlCancelOf = `-- cancel_of
SELECT generation, cancelled_at FROM cancelled_bookings WHERE booking_id = $1`

// sqlAlertsOf: the kinds ($1) are named so that the unique index is used.
const sqlAlertsOf = `-- alerts_of
SELECT kind, incident, details, created_at, resolved_at FROM alerts
WHERE kind = ANY($1::text[]) AND dedupe_key = $2
ORDER BY created_at, id
LIMIT 100`

// sqlToldOf finds a row's mail events by their ids, which are made from the row:
// table outbox has no other index that leads to them.
const sqlToldOf = `-- told_of
SELECT o.event_id::text, o.event_type, o.created_at, o.published_at, o.dead_at
FROM outbox o WHERE o.event_id = ANY(ARRAY(
  SELECT ` + mailEventID + `
  FROM (SELECT n.id, v.version, t.told FROM notifications n, generate_series(1, n.version) AS v(version),
    unnest(ARRAY['EmailSent', 'EmailFailed', 'EmailCancelled', 'EmailCancelTooLate', 'EmailBounced']) AS t(told) WHERE n.id = $1) AS m))
ORDER BY o.id`

// ByBooking lists the mails of a booking, the oldest first, at most limit.
func (s *Store) ByBooking(ctx context.Context, booking string, limit int) ([]Row, error) {
	rows, err := s.rows(ctx, sqlListByBooking, booking, limit)
	if err != nil {
		return nil, fmt.Errorf("mails of booking %s: %w", booking, err)
	}
	return rows, nil
}

// BookingCancel is the newest cancel of a booking that was heard of.
type BookingCancel struct {
	Generation  int       `json:"generation"`
	CancelledAt time.Time `json:"cancelled_at"` // when it was heard here, by the database's clock
}

// CancelOf returns the booking's cancel, nil when none was heard of.
func (s *Store) CancelOf(ctx context.Context, booking string) (*BookingCancel, error) {
	res, err := s.db.Query(ctx, sqlCancelOf, booking)
	if err != nil {
		return nil, fmt.Errorf("cancel of booking %s: %w", booking, err)
	}
	c, err := pgx.CollectExactlyOneRow(res, pgx.RowToStructByPos[BookingCancel])
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("cancel of booking %s: %w", booking, err)
	}
	return &c, nil
}

// RaisedAlert is a row of table alerts.
type RaisedAlert struct {
	Kind       string     `json:"kind"`
	Incident   string     `json:"incident"`
	Details    string     `json:"details"`
	CreatedAt  time.Time  `json:"created_at"`
	ResolvedAt *time.Time `json:"resolved_at,omitempty"`
}

// AlertsOf lists the alerts of the kinds about a key, the oldest first.
func (s *Store) AlertsOf(ctx context.Context, kinds []string, key string) ([]RaisedAlert, error) {
	return story[RaisedAlert](ctx, s, "alerts of "+key, sqlAlertsOf, kinds, key)
}

// ToldEvent is a mail event in table outbox.
type ToldEvent struct {
	EventID     string     `json:"event_id"`
	Type        string     `json:"event_type"`
	CreatedAt   time.Time  `json:"created_at"`
	PublishedAt *time.Time `json:"published_at,omitempty"`
	DeadAt      *time.Time `json:"dead_at,omitempty"`
}

// ToldOf lists the mail events of a row that the outbox still has. The store
// must be one that writes them: else there may be no such table.
func (s *Store) ToldOf(ctx context.Context, r Row) ([]ToldEvent, error) {
	if s.cfg.Events == "" {
		return nil, nil
	}
	return story[ToldEvent](ctx, s, "mail events of "+r.DedupeKey, sqlToldOf, r.ID)
}

func story[T any](ctx context.Context, s *Store, what, sql string, args ...any) ([]T, error) {
	res, err := s.db.Query(ctx, sql, args...)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	out, err := pgx.CollectRows(res, pgx.RowToStructByPos[T])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return out, nil
}
