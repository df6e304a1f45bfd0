package delivery

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"

	"mailproof/system/contract"
)

// CancelRequest is a cancelled booking as the mail service sees it.
type CancelRequest struct {
	BookingID  string
	DedupeKey  string
	Generation int
	Type       contract.MailType // of a tombstone; empty means TICKET_CONFIRMATION
	Channel    contract.Channel  // of a tombstone; empty means EMAIL
	Recipient  string
}

// Cancelling is what a cancel found.
type Cancelling struct {
	Row       Row
	Tombstone bool // there was no row: one was left behind for a late confirmation
	Changed   bool
	// Others are the booking's other mails that this cancel changed (C-04).
	Others []Row
}

// Cancel stops every mail of the booking up to the request's generation. The
// answer about the named key is in Row: CANCELLED, or SENT (too late), or
// SENDING and UNKNOWN with CancelAsked, whose answer comes when the attempt
// settles. A cancel that is older than the key's generation changes nothing.
// It may be repeated: Changed is then false and the row the same (C-09).
func (s *Store) Cancel(ctx context.Context, c CancelRequest) (Cancelling, error) {
	if err := c.validate(); err != nil {
		return Cancelling{}, fmt.Errorf("cancel: %w", err)
	}
	// Noted before the mails are looked at: a mail that was sent already keeps
	// its row as it is, and must not be sent again for a cancelled booking.
	if _, err := s.db.Exec(ctx, sqlNoteCancel, c.BookingID, c.Generation); err != nil {
		return Cancelling{}, fmt.Errorf("cancel %s: note booking %s: %w", c.DedupeKey, c.BookingID, err)
	}
	out, err := s.cancelKey(ctx, c)
	if err != nil {
		return Cancelling{}, fmt.Errorf("cancel %s: %w", c.DedupeKey, err)
	}
	// A crash here leaves the others: the event is delivered again and the
	// first half changes nothing then.
	out.Others, err = s.rows(ctx, sqlCancelBooking, c.BookingID, c.Generation, c.DedupeKey)
	if err != nil {
		return Cancelling{}, fmt.Errorf("cancel %s: other mails of booking %s: %w", c.DedupeKey, c.BookingID, err)
	}
	if s.tooLate == "" {
		return out, nil
	}
	if _, err := s.db.Exec(ctx, s.tooLate, c.BookingID, c.Generation); err != nil {
		return Cancelling{}, fmt.Errorf("cancel %s: tell that it came too late: %w", c.DedupeKey, err)
	}
	return out, nil
}

func (c CancelRequest) validate() error {
	switch {
	case c.DedupeKey == "":
		return fmt.Errorf("booking %q: dedupe key is empty", c.BookingID)
	case c.BookingID == "":
		return fmt.Errorf("%s: booking id is empty", c.DedupeKey)
	case c.Generation < 1:
		return fmt.Errorf("%s: generation %d is below 1", c.DedupeKey, c.Generation)
	}
	return nil
}

func (s *Store) cancelKey(ctx context.Context, c CancelRequest) (Cancelling, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return Cancelling{}, fmt.Errorf("new id: %w", err)
	}
	changed, err := s.rows(ctx, sqlCancel, id, c.DedupeKey, c.BookingID,
		string(cmp.Or(c.Type, contract.TicketConfirmation)), string(cmp.Or(c.Channel, contract.Email)),
		c.Recipient, c.Generation, s.cfg.MaxAttempts)
	if err != nil {
		return Cancelling{}, err
	}
	if len(changed) == 1 {
		return Cancelling{Row: changed[0], Tombstone: changed[0].ID == id, Changed: true}, nil
	}
	row, err := s.ByKey(ctx, c.DedupeKey)
	if errors.Is(err, ErrNoRow) {
		return Cancelling{}, errors.New("refused by a row that was removed since, try again")
	}
	return Cancelling{Row: row}, err
}
