package booking

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"mailproof/system/contract"
)

// Status of a booking.
type Status string

// The states of a booking.
const (
	New       Status = "NEW"
	Confirmed Status = "CONFIRMED"
	Cancelled Status = "CANCELLED"
)

// Booking is one booking as clients see it.
type Booking struct {
	ID         string    `json:"id"`
	Status     Status    `json:"status"`
	Generation int       `json:"generation"`
	Recipient  string    `json:"recipient"`
	Name       string    `json:"name,omitempty"`
	Locale     string    `json:"locale,omitempty"`
	Event      string    `json:"event,omitempty"`
	Seats      []string  `json:"seats,omitempty"`
	Amount     string    `json:"amount,omitempty"`
	Currency   string    `json:"currency,omitempty"`
	CreatedAt  time.Time `json:"created_at"`
	UpdatedAt  time.Time `json:"updated_at"`
}

// Request is what a client says to create a booking.
type Request struct {
	// ID makes the request repeatable; without it the server makes one, and a
	// repeat makes a second booking.
	ID        string   `json:"id"`
	Recipient string   `json:"recipient"`
	Name      string   `json:"name"`
	Locale    string   `json:"locale"`
	Event     string   `json:"event"`
	Seats     []string `json:"seats"`
	Amount    string   `json:"amount"` // decimal, in Currency
	Currency  string   `json:"currency"`
}

// The errors that a client can do something about.
var (
	ErrNotFound = errors.New("no such booking")
	// ErrOutcomeUnknown: the answer to COMMIT was lost. Repeating the request
	// settles it.
	ErrOutcomeUnknown = errors.New("the outcome is unknown: the request may have been carried out; repeat it")
)

// InvalidError names the field of a request that cannot be used.
type InvalidError struct{ Field, Reason string }

func (e *InvalidError) Error() string { return e.Field + " " + e.Reason }

// ConflictError says why the booking's state does not allow the operation.
type ConflictError struct {
	Reason string
	// Booking as it is; zero if it must not be shown.
	Booking Booking
}

func (e *ConflictError) Error() string { return e.Reason }

const (
	maxText  = 500
	maxSeats = 100
)

var (
	// A colon is not allowed: "ticket:a:v2" must mean the second generation of
	// "a", never the first of "a:v2". The length keeps the key within the 256
	// characters that a provider takes (OB-04).
	idPattern       = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$`)
	amountPattern   = regexp.MustCompile(`^[0-9]{1,12}(\.[0-9]{1,4})?$`)
	currencyPattern = regexp.MustCompile(`^[A-Z]{3}$`)
)

// ValidID reports whether a booking may have this id.
func ValidID(id string) bool { return idPattern.MatchString(id) }

// Validate names the first field that cannot be used, as an [InvalidError].
func (r Request) Validate() error {
	if r.ID != "" && !ValidID(r.ID) {
		return &InvalidError{"id", "must match " + idPattern.String()}
	}
	if strings.TrimSpace(r.Recipient) == "" {
		return &InvalidError{"recipient", "must not be empty"}
	}
	if len(r.Seats) > maxSeats {
		return &InvalidError{"seats", fmt.Sprintf("must not be more than %d", maxSeats)}
	}
	texts := []struct{ field, value string }{
		{"recipient", r.Recipient}, {"name", r.Name}, {"locale", r.Locale}, {"event", r.Event},
	}
	for _, seat := range r.Seats {
		texts = append(texts, struct{ field, value string }{"seats", seat})
	}
	for _, t := range texts {
		if reason := unusable(t.value); reason != "" {
			return &InvalidError{t.field, reason}
		}
	}
	if r.Amount != "" && !amountPattern.MatchString(r.Amount) {
		return &InvalidError{"amount", "must match " + amountPattern.String()}
	}
	if (r.Amount != "" || r.Currency != "") && !currencyPattern.MatchString(r.Currency) {
		return &InvalidError{"currency", "must be a code of three capital letters when there is an amount"}
	}
	return nil
}

// unusable says why a text cannot be kept: Postgres has no NUL, and a line break
// in a recipient or a name would become a header of its own in the mail.
func unusable(s string) string {
	switch {
	case len(s) > maxText:
		return fmt.Sprintf("must not be longer than %d bytes", maxText)
	case !utf8.ValidString(s):
		return "must be UTF-8"
	case strings.ContainsFunc(s, unicode.IsControl):
		return "must not contain control characters"
	}
	return ""
}

// same reports whether a repeated request asks for the booking that is there.
func (b Booking) same(r Request) bool {
	return b.Recipient == r.Recipient && b.Name == r.Name && b.Locale == r.Locale && b.Event == r.Event &&
		b.Amount == r.Amount && b.Currency == r.Currency && strings.Join(b.Seats, "\x00") == strings.Join(r.Seats, "\x00")
}

// Op is a transition that a client asks for.
type Op string

// The transitions.
const (
	Confirm Op = "confirm"
	Cancel  Op = "cancel"
	Reopen  Op = "reopen"
)

// step is what a transition does to a booking. A nil step changes nothing.
type step struct {
	status     Status
	generation int
	event      contract.EventType
}

// decide is the whole state machine. seen is the generation that the client
// knows, 0 if it did not say. A nil step without an error means that what was
// asked for is so already.
func decide(b Booking, op Op, seen int) (*step, error) {
	if seen > b.Generation {
		return nil, conflict(b, "the booking is at generation %d, not yet at %d", b.Generation, seen)
	}
	late := seen > 0 && seen < b.Generation
	switch op {
	case Confirm:
		return decideConfirm(b, late)
	case Cancel:
		if late || b.Status == Cancelled {
			return nil, nil // a generation ends by being cancelled only
		}
		return &step{Cancelled, b.Generation, contract.BookingCancelled}, nil
	case Reopen:
		return decideReopen(b, seen, late)
	default:
		return nil, fmt.Errorf("unknown operation %q", op)
	}
}

func decideConfirm(b Booking, late bool) (*step, error) {
	switch {
	case late:
		return nil, conflict(b, "that generation was cancelled; the booking is at generation %d", b.Generation)
	case b.Status == Cancelled:
		return nil, conflict(b, "the booking is cancelled")
	case b.Status == Confirmed:
		return nil, nil
	}
	return &step{Confirmed, b.Generation, contract.BookingConfirmed}, nil
}

func decideReopen(b Booking, seen int, late bool) (*step, error) {
	switch {
	case late:
		return nil, nil // it was reopened from there
	case b.Status == Cancelled:
		return &step{Confirmed, b.Generation + 1, contract.BookingReopened}, nil
	case seen == 0 && b.Status == Confirmed && b.Generation > 1:
		return nil, nil // most likely the repeat of the reopen that led here
	}
	return nil, conflict(b, "only a cancelled booking can be reopened, this one is %s", b.Status)
}

func conflict(b Booking, format string, args ...any) error {
	return &ConflictError{Reason: fmt.Sprintf(format, args...), Booking: b}
}
