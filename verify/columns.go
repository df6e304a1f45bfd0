package verify

import (
	"fmt"
	"time"
)

// Columns maps the words of the judge to the tables and columns of a system's
// databases, as the write-ahead log names them. It is all that the judge knows
// of a schema; another system gives its own. An empty name means that the
// system has no such column, and the checks that need it are left out.
type Columns struct {
	Mails  MailColumns
	Outbox string // table of the outbox, schema-qualified
	Orders OrderColumns
}

// MailColumns are those of the table with one row per mail.
type MailColumns struct {
	Table         string // schema-qualified
	ID, Key       string
	Status        string
	Attempts      string
	Limit         string
	Token         string
	LockedUntil   string
	NextAttemptAt string
	ExpiresAt     string // from when on a mail that waits is not worth sending
	CancelAsked   string
}

// OrderColumns are those of the orders that mails are about.
type OrderColumns struct {
	Table, ID, Status string
	// Confirmed is the status that a mail must follow.
	Confirmed string
}

// DefaultColumns are those of mailproof's own system.
func DefaultColumns() Columns {
	return Columns{
		Mails: MailColumns{
			Table: "public.notifications", ID: "id", Key: "dedupe_key", Status: "status", Attempts: "attempts",
			Limit: "attempt_limit", Token: "token", LockedUntil: "locked_until", NextAttemptAt: "next_attempt_at",
			ExpiresAt: "expires_at", CancelAsked: "cancel_requested",
		},
		Outbox: "public.outbox",
		Orders: OrderColumns{Table: "public.bookings", ID: "id", Status: "status", Confirmed: "CONFIRMED"},
	}
}

// parsePGTime reads a timestamptz as Postgres prints it.
func parsePGTime(text string) (time.Time, error) {
	for _, layout := range []string{"2006-01-02 15:04:05.999999999-07", "2006-01-02 15:04:05.999999999-07:00", time.RFC3339Nano} {
		if t, err := time.Parse(layout, text); err == nil {
			return t, nil
		}
	}
	return time.Time{}, fmt.Errorf("%q is not a timestamp with time zone", text)
}
