package delivery

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"mailproof/system/contract"
)

// LeaseOver turns SENDING rows past their lease that nobody may claim into
// UNKNOWN (or SENT when a late 250 was flagged), at most limit of them.
func (s *Store) LeaseOver(ctx context.Context, limit int) ([]Row, error) {
	rows, err := s.rows(ctx, sqlLeaseOverBatch, limit, s.cfg.Lease, s.resendable)
	if err != nil {
		return nil, fmt.Errorf("lease over: %w", err)
	}
	return rows, nil
}

// Overdue is [Store.OverdueIn] for every type.
func (s *Store) Overdue(ctx context.Context, grace time.Duration, limit int) ([]Row, error) {
	var all []Row
	for _, t := range []contract.MailType{contract.TicketConfirmation, contract.Marketing} {
		rows, err := s.OverdueIn(ctx, t, grace, limit-len(all))
		if err != nil {
			return nil, err
		}
		all = append(all, rows...)
	}
	return all, nil
}

// OverdueIn finds rows of one type that a worker could claim and that have
// been due for longer than grace (doubling per rescue of the row): their
// doorbell is lost. Each returned row counts as rescued, and will not be
// returned again before its new grace: a sweeper that dies before it has
// published makes a rescue later, never twice as many.
func (s *Store) OverdueIn(ctx context.Context, t contract.MailType, grace time.Duration, limit int) ([]Row, error) {
	if limit <= 0 {
		return nil, nil
	}
	waiting, err := s.rows(ctx, sqlOverdue, limit, grace, string(t))
	if err != nil {
		return nil, fmt.Errorf("overdue %s: %w", t, err)
	}
	if len(waiting) >= limit {
		return waiting, nil
	}
	leases, err := s.rows(ctx, sqlOverdueLease, limit-len(waiting), s.cfg.Lease, s.resendable, grace, string(t))
	if err != nil {
		return nil, fmt.Errorf("overdue leases of %s: %w", t, err)
	}
	return append(waiting, leases...), nil
}

// CountDue counts the waiting rows of one type that are due now: the sweeper
// rings again only while the lane's queue is shorter than that.
func (s *Store) CountDue(ctx context.Context, t contract.MailType) (int64, error) {
	res, err := s.db.Query(ctx, sqlCountDue, string(t))
	if err != nil {
		return 0, fmt.Errorf("count due %s: %w", t, err)
	}
	n, err := pgx.CollectExactlyOneRow(res, pgx.RowTo[int64])
	if err != nil {
		return 0, fmt.Errorf("count due %s: %w", t, err)
	}
	return n, nil
}

// Unstamped lists DEAD rows whose dead letter and alert are not confirmed.
func (s *Store) Unstamped(ctx context.Context, olderThan time.Duration, limit int) ([]Row, error) {
	rows, err := s.rows(ctx, sqlUnstamped, olderThan, limit)
	if err != nil {
		return nil, fmt.Errorf("unstamped dead rows: %w", err)
	}
	return rows, nil
}

// StampDLQ records that the dead letter and the alert of each row, as it was
// read, are confirmed. It takes rows and not ids, because it stamps only the
// version that was read: a row that was replayed and died again meanwhile is
// left unstamped and needs a letter of its own.
func (s *Store) StampDLQ(ctx context.Context, rows []Row) error {
	if len(rows) == 0 {
		return nil
	}
	ids, versions := make([]uuid.UUID, len(rows)), make([]int64, len(rows))
	for i, r := range rows {
		ids[i], versions[i] = r.ID, r.Version
	}
	if _, err := s.db.Exec(ctx, sqlStampDLQ, ids, versions); err != nil {
		return fmt.Errorf("stamp %d dead rows: %w", len(rows), err)
	}
	return nil
}

// Expire ends waiting rows past their expires_at, at most limit of them:
// EXPIRED, or UNKNOWN when a try is unsettled.
func (s *Store) Expire(ctx context.Context, limit int) ([]Row, error) {
	rows, err := s.rows(ctx, sqlExpireBatch, limit)
	if err != nil {
		return nil, fmt.Errorf("expire: %w", err)
	}
	return rows, nil
}

// After is a place in a list that is ordered by the last transition; the zero
// value is its start.
type After struct {
	ChangedAt time.Time
	ID        uuid.UUID
}

// DeadRows lists DEAD rows, oldest death first.
func (s *Store) DeadRows(ctx context.Context, after After, limit int) ([]Row, error) {
	rows, err := s.rows(ctx, sqlListDead, after.ChangedAt, after.ID, limit)
	if err != nil {
		return nil, fmt.Errorf("list dead rows: %w", err)
	}
	return rows, nil
}

// UnknownRows lists UNKNOWN rows, the longest unknown first (OB-07).
func (s *Store) UnknownRows(ctx context.Context, after After, limit int) ([]Row, error) {
	rows, err := s.rows(ctx, sqlListUnknown, after.ChangedAt, after.ID, limit)
	if err != nil {
		return nil, fmt.Errorf("list unknown rows: %w", err)
	}
	return rows, nil
}

// DeleteAtRest removes up to limit SENT, CANCELLED and EXPIRED rows whose last
// transition is older than keep, and says how many. keep must exceed the
// broker's retention: a key that is gone can be sent again (A2-13, C-11).
func (s *Store) DeleteAtRest(ctx context.Context, keep time.Duration, limit int) (int64, error) {
	tag, err := s.db.Exec(ctx, sqlDeleteAtRest, keep, limit)
	if err != nil {
		return 0, fmt.Errorf("delete rows at rest for %s: %w", keep, err)
	}
	if _, err := s.db.Exec(ctx, sqlDeleteCancels, keep, limit); err != nil {
		return 0, fmt.Errorf("delete cancels older than %s: %w", keep, err)
	}
	return tag.RowsAffected(), nil
}

// RaiseAlert records that a person must look at something and reports whether
// that is new. For a key with a row the alert is one per version of the row:
// repeated after a crash it is not new, for a second death it is. For anything
// else it is raised once; use [Store.RaiseIncident] to say which time it is.
func (s *Store) RaiseAlert(ctx context.Context, kind, key, details string) (bool, error) {
	return s.raise(ctx, kind, key, nil, details)
}

// RaiseIncident is RaiseAlert with a name for the incident: the same kind, key
// and incident make one alert.
func (s *Store) RaiseIncident(ctx context.Context, kind, key, incident, details string) (bool, error) {
	return s.raise(ctx, kind, key, &incident, details)
}

func (s *Store) raise(ctx context.Context, kind, key string, incident *string, details string) (bool, error) {
	res, err := s.db.Query(ctx, sqlRaiseAlert, kind, key, details, incident)
	if err != nil {
		return false, fmt.Errorf("alert %s for %s: %w", kind, key, err)
	}
	made, err := pgx.CollectRows(res, pgx.RowTo[int64])
	if err != nil {
		return false, fmt.Errorf("alert %s for %s: %w", kind, key, err)
	}
	return len(made) == 1, nil
}
