package booking

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"mailproof/system/contract"
	"mailproof/system/outbox"
)

// leftoversSQL pages through the bookings by their key: it is asked by a person,
// rarely, and an index over the status would end heap-only updates. A booking is
// left over when it was cancelled and the mail service has not said what became
// of its mail. That a mail came back is an answer: it had been sent, and the event
// outweighs the one that says so to the cancel. A scalar subquery, which is a look into the index for each row: as
// EXISTS the planner may read all mails for one page.
const leftoversSQL = `
SELECT b.id, b.status = 'CANCELLED' AND b.updated_at < now() - $3 * interval '1 microsecond'
  AND NOT coalesce((SELECT m.event_type IN ('EmailCancelled', 'EmailCancelTooLate', 'EmailBounced') FROM booking_mails m
    WHERE m.dedupe_key = 'ticket:' || b.id || CASE WHEN b.generation > 1 THEN ':v' || b.generation ELSE '' END), false)
FROM bookings b WHERE b.id > $1 ORDER BY b.id LIMIT $2`

const leftoversPage = 1000

// Leftovers lists bookings that were cancelled at least age ago and of whose mail
// nobody has said that it is cancelled, that it was too late, or that it came back.
func (s *Service) Leftovers(ctx context.Context, age time.Duration) ([]string, error) {
	var found []string
	for after := ""; ; {
		ids, left, err := s.leftoversAfter(ctx, after, age)
		if err != nil {
			return nil, fmt.Errorf("left-over bookings: %w", err)
		}
		found = append(found, left...)
		if len(ids) < leftoversPage {
			return found, nil
		}
		after = ids[len(ids)-1]
	}
}

func (s *Service) leftoversAfter(ctx context.Context, after string, age time.Duration) (ids, left []string, err error) {
	ctx, cancel := s.detach(ctx)
	defer cancel()
	rows, err := s.pool.Query(ctx, leftoversSQL, after, leftoversPage, age.Microseconds())
	if err != nil {
		return nil, nil, err
	}
	var id string
	var isLeft bool
	_, err = pgx.ForEachRow(rows, []any{&id, &isLeft}, func() error {
		ids = append(ids, id)
		if isLeft {
			left = append(left, id)
		}
		return nil
	})
	return ids, left, err
}

// ReEmit writes the event of a booking's present state once more, under a new
// event_id: for an event that never arrived. It is harmless where it did arrive:
// a mail has its key already, and a cancel that is heard twice changes nothing.
// A booking that was never confirmed has no event; the type is empty then.
func (s *Service) ReEmit(ctx context.Context, id string) (event uuid.UUID, t contract.EventType, err error) {
	if !ValidID(id) {
		return uuid.Nil, "", fmt.Errorf("%w: %q", ErrNotFound, id)
	}
	ctx, cancel := s.detach(ctx)
	defer cancel()
	key := ""
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		var now time.Time // the event keeps the time of what happened
		b, err := scan(tx.QueryRow(ctx, lockSQL, id), &now)
		if err := found(id, err); err != nil {
			return err
		}
		key = contract.TicketKey(b.ID, b.Generation)
		if t = stateEvent(b); t == "" {
			return nil
		}
		event, err = outbox.Write(ctx, tx, s.event(b, t))
		return err
	})
	if errors.Is(err, ErrNotFound) {
		return uuid.Nil, "", fmt.Errorf("re-emit: %w", err)
	}
	if err != nil {
		return uuid.Nil, "", fmt.Errorf("re-emit %s: %w", id, outcome(err))
	}
	if t != "" {
		s.cfg.Log.InfoContext(ctx, "event written again", "dedupe_key", key, "event_id", event.String(), "event_type", string(t))
		s.cfg.OnEvent()
	}
	return event, t, nil
}

// stateEvent is the event that led to a booking's state.
func stateEvent(b Booking) contract.EventType {
	switch {
	case b.Status == Cancelled:
		return contract.BookingCancelled
	case b.Status == Confirmed && b.Generation > 1:
		return contract.BookingReopened
	case b.Status == Confirmed:
		return contract.BookingConfirmed
	default:
		return ""
	}
}
