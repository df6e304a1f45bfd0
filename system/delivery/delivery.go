package delivery

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"mailproof/system/contract"
)

// Status is the state of a row.
type Status string

// The states. PENDING and FAILED are the waiting states: FAILED is a row
// waiting after a try that failed.
const (
	Pending   Status = "PENDING"
	Sending   Status = "SENDING"
	Sent      Status = "SENT"
	Failed    Status = "FAILED"
	Unknown   Status = "UNKNOWN"
	Dead      Status = "DEAD"
	Cancelled Status = "CANCELLED"
	Expired   Status = "EXPIRED"
)

// Settled reports whether a message about a row in this state may be acked
// without a successor: the row is terminal, or UNKNOWN and the reconciler's.
func (s Status) Settled() bool {
	switch s {
	case Sent, Unknown, Dead, Cancelled, Expired:
		return true
	default:
		return false
	}
}

// Policy says what happens to a mail whose outcome is not known.
type Policy string

// The policies for an ambiguous outcome.
const (
	SameKey Policy = "same-key" // the receiver deduplicates: send again under the same key
	Resend  Policy = "resend"   // plain SMTP: a rare duplicate before a loss
	Hold    Policy = "hold"     // must not double: UNKNOWN until it is reconciled
)

// Row is one notification.
type Row struct {
	ID             uuid.UUID
	DedupeKey      string
	BookingID      string
	EventID        *string // nil on tombstones
	Type           contract.MailType
	Channel        contract.Channel
	Recipient      string
	Payload        []byte // JSON, what the template shows
	Status         Status
	Generation     int
	Attempts       int // rises with each claim
	AttemptLimit   int
	Token          int64 // fencing token: rises with each claim, never reset
	Unsettled      int   // attempts whose outcome is not durably known
	CancelAsked    bool  // column cancel_requested
	LockedUntil    *time.Time
	NextAttemptAt  *time.Time
	SendAfter      *time.Time
	ExpiresAt      *time.Time
	PublishedAt    *time.Time
	DLQPublishedAt *time.Time
	FirstClaimedAt *time.Time
	Rendered       []byte // the mail's bytes, stored at the first claim, never changed
	ProviderMsgID  *string
	LastError      *string
	CreatedAt      time.Time
	SentAt         *time.Time
	Version        int64 // rises with each transition
}

// Config is what the statements need to know.
type Config struct {
	// Lease is how long a claim holds a row. It must exceed the sender's
	// deadline plus a margin; the service checks that at start.
	Lease time.Duration
	// RetryDelays is the wait after the first, second, … failed try. The last
	// one repeats.
	RetryDelays []time.Duration
	// MaxAttempts is the attempt limit of a new row.
	MaxAttempts int
	// Policies per mail type; a type that is missing here is held.
	Policies map[contract.MailType]Policy
}

// Store runs the transitions on a pool.
type Store struct {
	pool *pgxpool.Pool
	cfg  Config
}

// New makes a store. The pool's database must have been migrated.
func New(pool *pgxpool.Pool, cfg Config) *Store { return &Store{pool: pool, cfg: cfg} }

// NewRow is a mail that should be sent.
type NewRow struct {
	DedupeKey  string
	BookingID  string
	EventID    string
	Type       contract.MailType
	Channel    contract.Channel
	Recipient  string
	Payload    []byte
	Generation int
	SendAfter  *time.Time
	ExpiresAt  *time.Time
}

// Inserted says what an insert found.
type Inserted struct {
	ID        uuid.UUID
	New       bool // this call made the row
	Status    Status
	Published bool // a message was confirmed by the broker before
}

// Claim is the answer to a worker that asks for a row.
type Claim struct {
	// Row is set when the claim was won: the caller holds the row until
	// LeaseLeft has passed since the call was made.
	Row       *Row
	LeaseLeft time.Duration
	// Otherwise Status is the row's state and Wait the time until asking again
	// makes sense: zero when the row is settled.
	Status Status
	Wait   time.Duration
	// Token and Attempts of the row as it is, for the log.
	Token    int64
	Attempts int
}

// ErrNoRow is returned for an id that has no row.
var ErrNoRow = errors.New("no such notification")

// Outcome is what a settle found.
type Outcome struct {
	// Applied is false when the caller no longer held the row and nothing
	// changed: it treats its message as newly delivered and looks again.
	Applied bool
	Row     Row           // the row after the statement
	Wait    time.Duration // until the next try, when Row.Status is FAILED
}

var errTODO = errors.New("not written yet")

func (s *Store) Insert(ctx context.Context, rows []NewRow) ([]Inserted, error) { return nil, errTODO }
func (s *Store) StampPublished(ctx context.Context, ids []uuid.UUID) error     { return errTODO }
func (s *Store) Claim(ctx context.Context, id uuid.UUID) (Claim, error)        { return Claim{}, errTODO }
func (s *Store) StoreRendered(ctx context.Context, id uuid.UUID, token int64, mail []byte) ([]byte, error) {
	return nil, errTODO
}

func (s *Store) Accepted(ctx context.Context, id uuid.UUID, token int64, providerID string) (Outcome, error) {
	return Outcome{}, errTODO
}

// Refusal describes a definite failure of one try.
type Refusal struct {
	Err string
	// RetryAfter overrides the configured delay when the server named one.
	RetryAfter time.Duration
	// Free is set for a throttle (429) or a refusal of the whole lane: the try
	// costs no attempt.
	Free bool
}

func (s *Store) Transient(ctx context.Context, id uuid.UUID, token int64, r Refusal) (Outcome, error) {
	return Outcome{}, errTODO
}

func (s *Store) Permanent(ctx context.Context, id uuid.UUID, token int64, r Refusal) (Outcome, error) {
	return Outcome{}, errTODO
}

func (s *Store) Ambiguous(ctx context.Context, id uuid.UUID, token int64, reason string) (Outcome, error) {
	return Outcome{}, errTODO
}

// LeaseOver turns SENDING rows past their lease that nobody may claim into
// UNKNOWN (or SENT when a late 250 was flagged), at most limit of them.
func (s *Store) LeaseOver(ctx context.Context, limit int) ([]Row, error) { return nil, errTODO }

// Overdue lists rows that a worker could claim and that have been due for
// longer than grace (doubling per rescue of the row): their doorbell is lost.
func (s *Store) Overdue(ctx context.Context, grace time.Duration, limit int) ([]Row, error) {
	return nil, errTODO
}

// Unstamped lists DEAD rows whose dead letter and alert are not confirmed.
func (s *Store) Unstamped(ctx context.Context, olderThan time.Duration, limit int) ([]Row, error) {
	return nil, errTODO
}
func (s *Store) StampDLQ(ctx context.Context, ids []uuid.UUID) error { return errTODO }

// CancelRequest is a cancelled booking as the mail service sees it.
type CancelRequest struct {
	BookingID  string
	DedupeKey  string
	Generation int
	Type       contract.MailType
	Channel    contract.Channel
	Recipient  string
}

// Cancelling is what a cancel found.
type Cancelling struct {
	Row       Row
	Tombstone bool // there was no row: one was left behind for a late confirmation
	Changed   bool
}

func (s *Store) Cancel(ctx context.Context, c CancelRequest) (Cancelling, error) {
	return Cancelling{}, errTODO
}
func (s *Store) Expire(ctx context.Context, limit int) ([]Row, error) { return nil, errTODO }
func (s *Store) Replay(ctx context.Context, id uuid.UUID, extra int) (Outcome, error) {
	return Outcome{}, errTODO
}
func (s *Store) Found(ctx context.Context, id uuid.UUID, providerID string) (Outcome, error) {
	return Outcome{}, errTODO
}
func (s *Store) ProvenAbsent(ctx context.Context, id uuid.UUID) (Outcome, error) {
	return Outcome{}, errTODO
}
func (s *Store) Get(ctx context.Context, id uuid.UUID) (Row, error) { return Row{}, errTODO }
