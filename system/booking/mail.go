package booking

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"mailproof/system/contract"
)

// MailStatus is what is known of a booking's mail. Nothing is told before the
// mail service has said so: a cancelled booking's mail is "pending" until it is
// known whether the cancel came in time (C-12, TRAP-C2-6).
type MailStatus string

// The states of a booking's mail.
const (
	MailPending   MailStatus = "pending" // nothing was heard yet
	MailSent      MailStatus = "sent"
	MailFailed    MailStatus = "failed" // not sent; the mail service may still send it later
	MailCancelled MailStatus = "cancelled"
	MailTooLate   MailStatus = "too-late" // the cancel came after the mail had gone out
	MailBounced   MailStatus = "bounced"  // it was sent, and the recipient's server gave it back
)

// Mail is the mail of a booking's generation.
type Mail struct {
	Status MailStatus `json:"status"`
	// Since is when the mail service came to know it; nil while pending.
	Since *time.Time `json:"since,omitempty"`
}

func statusOf(t contract.MailEventType) MailStatus {
	switch t {
	case contract.EmailSent:
		return MailSent
	case contract.EmailFailed:
		return MailFailed
	case contract.EmailCancelled:
		return MailCancelled
	case contract.EmailCancelTooLate:
		return MailTooLate
	case contract.EmailBounced:
		return MailBounced
	default:
		return MailPending
	}
}

const (
	// Events come at least once, and after a rebalance in any order: the newest
	// version counts; of two with the same one the answer to the cancel outweighs
	// that the mail was sent, and that it came back outweighs both.
	hearSQL = `
INSERT INTO booking_mails AS m (dedupe_key, booking_id, generation, event_type, version, occurred_at)
VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (dedupe_key) DO UPDATE SET
    event_type = EXCLUDED.event_type, version = EXCLUDED.version, occurred_at = EXCLUDED.occurred_at, heard_at = now()
WHERE (EXCLUDED.version, array_position(ARRAY['EmailCancelTooLate', 'EmailBounced'], EXCLUDED.event_type) IS NOT NULL,
       EXCLUDED.event_type = 'EmailBounced')
    > (m.version, array_position(ARRAY['EmailCancelTooLate', 'EmailBounced'], m.event_type) IS NOT NULL,
       m.event_type = 'EmailBounced')`

	mailSQL = `SELECT event_type, occurred_at FROM booking_mails WHERE dedupe_key = $1`
)

// Mails keeps what the mail service tells.
type Mails struct{ Pool *pgxpool.Pool }

// Hear takes note of events, all or none of them. It may be repeated.
func (m Mails) Hear(ctx context.Context, events []contract.MailEvent) error {
	var batch pgx.Batch
	for _, e := range events {
		batch.Queue(hearSQL, e.DedupeKey, e.BookingID, e.Generation, string(e.EventType), e.Version, e.OccurredAt)
	}
	// One implicit transaction: pgx sends a batch as one.
	if err := m.Pool.SendBatch(ctx, &batch).Close(); err != nil {
		return fmt.Errorf("hear %d mail events: %w", len(events), err)
	}
	return nil
}

// Mail is what is known of the booking's mail; nil before it was ever to have
// one.
func (s *Service) Mail(ctx context.Context, b Booking) (*Mail, error) {
	ctx, cancel := s.detach(ctx)
	defer cancel()
	var kind contract.MailEventType
	var at time.Time
	err := s.pool.QueryRow(ctx, mailSQL, contract.TicketKey(b.ID, b.Generation)).Scan(&kind, &at)
	switch {
	case err == nil:
		return &Mail{Status: statusOf(kind), Since: &at}, nil
	case !errors.Is(err, pgx.ErrNoRows):
		return nil, fmt.Errorf("read the mail of booking %s: %w", b.ID, err)
	case b.Status == New:
		return nil, nil
	}
	return &Mail{Status: MailPending}, nil
}
