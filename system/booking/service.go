package booking

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"mailproof/system/contract"
	"mailproof/system/failpoint"
	"mailproof/system/outbox"
)

// Crash points of a transition: written → committed → answered.
const (
	fpBeforeCommit = "booking.before-commit"
	fpAfterCommit  = "booking.after-commit"
)

// Service runs the operations on a database that was migrated.
type Service struct {
	pool *pgxpool.Pool
	cfg  ServiceConfig
}

// ServiceConfig of a [Service].
type ServiceConfig struct {
	// Topic of the events.
	Topic string
	// Timeout of one operation. It does not end with the client's connection:
	// a client that hangs up must not make a commit ambiguous. Default 10 s.
	Timeout time.Duration
	// OnEvent is called after each commit that wrote an event; it must not
	// block. It rings the relay's doorbell.
	OnEvent func()
	// Log gets a line for each event that was committed. Default: none.
	Log *slog.Logger
}

// NewService makes a service.
func NewService(pool *pgxpool.Pool, cfg ServiceConfig) *Service {
	if cfg.Topic == "" {
		cfg.Topic = contract.TopicBookingEvents
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = 10 * time.Second
	}
	if cfg.OnEvent == nil {
		cfg.OnEvent = func() {}
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Service{pool: pool, cfg: cfg}
}

const (
	columns = `id, status, generation, recipient, name, locale, event, seats, amount, currency, created_at, updated_at`

	insertSQL = `
INSERT INTO bookings (id, status, recipient, name, locale, event, seats, amount, currency)
VALUES ($1, 'NEW', $2, $3, $4, $5, $6, $7, $8)
ON CONFLICT (id) DO NOTHING
RETURNING ` + columns

	getSQL = `SELECT ` + columns + ` FROM bookings WHERE id = $1`

	// The lock is held until the event is in the outbox: that is what makes ids
	// and commits agree per booking.
	// The time is the database's, of the moment that the row was found.
	lockSQL = `SELECT ` + columns + `, clock_timestamp() FROM bookings WHERE id = $1 FOR UPDATE`

	moveSQL = `UPDATE bookings SET status = $2, generation = $3, updated_at = $4 WHERE id = $1`
)

func scan(row pgx.Row, more ...any) (Booking, error) {
	var b Booking
	err := row.Scan(append([]any{
		&b.ID, &b.Status, &b.Generation, &b.Recipient, &b.Name, &b.Locale, &b.Event, &b.Seats,
		&b.Amount, &b.Currency, &b.CreatedAt, &b.UpdatedAt,
	}, more...)...)
	return b, err
}

// detach gives an operation its own end, whatever the client does.
func (s *Service) detach(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), s.cfg.Timeout)
}

// Create makes a booking, or finds the one that the same request made before.
// The same id with other contents is a [ConflictError].
func (s *Service) Create(ctx context.Context, r Request) (b Booking, created bool, err error) {
	if err := r.Validate(); err != nil {
		return Booking{}, false, err
	}
	if r.ID == "" {
		id, err := uuid.NewV7()
		if err != nil {
			return Booking{}, false, fmt.Errorf("create: %w", err)
		}
		r.ID = id.String()
	}
	if r.Seats == nil {
		r.Seats = []string{}
	}
	ctx, cancel := s.detach(ctx)
	defer cancel()
	conn, err := s.pool.Acquire(ctx) // apart, since failing to get one is no lost answer
	if err != nil {
		return Booking{}, false, fmt.Errorf("create %s: %w", r.ID, err)
	}
	b, err = scan(conn.QueryRow(ctx, insertSQL, r.ID, r.Recipient, r.Name, r.Locale, r.Event, r.Seats, r.Amount, r.Currency))
	conn.Release()
	if err == nil {
		return b, true, nil
	}
	if !errors.Is(err, pgx.ErrNoRows) {
		return Booking{}, false, fmt.Errorf("create %s: %w", r.ID, outcome(err))
	}
	b, err = s.get(ctx, r.ID)
	if err != nil {
		return Booking{}, false, err
	}
	if !b.same(r) {
		return Booking{}, false, &ConflictError{Reason: "a booking with this id and other contents exists"}
	}
	return b, false, nil
}

// Get reads a booking, or returns [ErrNotFound].
func (s *Service) Get(ctx context.Context, id string) (Booking, error) {
	if !ValidID(id) {
		return Booking{}, fmt.Errorf("%w: %q", ErrNotFound, id)
	}
	ctx, cancel := s.detach(ctx)
	defer cancel()
	return s.get(ctx, id)
}

func (s *Service) get(ctx context.Context, id string) (Booking, error) {
	b, err := scan(s.pool.QueryRow(ctx, getSQL, id))
	return b, found(id, err)
}

func found(id string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, pgx.ErrNoRows):
		return fmt.Errorf("%w: %s", ErrNotFound, id)
	default:
		return fmt.Errorf("read booking %s: %w", id, err)
	}
}

// Do carries out one transition. seen is the generation that the client knows, 0
// if it did not say. changed is false when it was so already.
func (s *Service) Do(ctx context.Context, op Op, id string, seen int) (b Booking, changed bool, err error) {
	if !ValidID(id) {
		return Booking{}, false, fmt.Errorf("%w: %q", ErrNotFound, id)
	}
	ctx, cancel := s.detach(ctx)
	defer cancel()
	tx, err := s.pool.Begin(ctx)
	if err != nil {
		return Booking{}, false, fmt.Errorf("%s %s: %w", op, id, err)
	}
	// Nothing was committed on any path that gets here without Commit.
	defer func() { _ = tx.Rollback(ctx) }()

	b, event, err := s.do(ctx, tx, op, id, seen)
	if err != nil || event == uuid.Nil {
		return b, false, err
	}
	log := s.cfg.Log.With("dedupe_key", contract.TicketKey(b.ID, b.Generation), "event_id", event.String(), "op", string(op))
	failpoint.At(fpBeforeCommit)
	if err := tx.Commit(ctx); err != nil {
		err = outcome(err)
		if errors.Is(err, ErrOutcomeUnknown) {
			log.WarnContext(ctx, "event perhaps written, the answer to COMMIT was lost")
		}
		return Booking{}, false, fmt.Errorf("%s %s: %w", op, id, err)
	}
	failpoint.At(fpAfterCommit)
	log.InfoContext(ctx, "event written")
	s.cfg.OnEvent()
	return b, true, nil
}

// do returns the id of the event that it wrote; none when it is so already.
func (s *Service) do(ctx context.Context, tx pgx.Tx, op Op, id string, seen int) (Booking, uuid.UUID, error) {
	var now time.Time
	b, err := scan(tx.QueryRow(ctx, lockSQL, id), &now)
	if err := found(id, err); err != nil {
		return Booking{}, uuid.Nil, err
	}
	step, err := decide(b, op, seen)
	if err != nil || step == nil {
		return b, uuid.Nil, err
	}
	b.Status, b.Generation, b.UpdatedAt = step.status, step.generation, now
	var batch pgx.Batch // one round trip for both while the row is locked
	batch.Queue(moveSQL, b.ID, b.Status, b.Generation, b.UpdatedAt)
	event, err := outbox.Queue(&batch, s.event(b, step.event))
	if err != nil {
		return Booking{}, uuid.Nil, err
	}
	if err := tx.SendBatch(ctx, &batch).Close(); err != nil {
		return Booking{}, uuid.Nil, fmt.Errorf("%s %s: %w", op, id, err)
	}
	return b, event, nil
}

// event is fat: the mail needs nothing but it (A2-09).
func (s *Service) event(b Booking, t contract.EventType) outbox.Event {
	return outbox.Event{
		Topic: s.cfg.Topic, Key: b.ID, Type: string(t),
		Body: func(id uuid.UUID) ([]byte, error) {
			return json.Marshal(contract.Event{
				EventID: id.String(), EventType: t, Version: contract.EventVersion, OccurredAt: b.UpdatedAt,
				BookingID: b.ID, Generation: b.Generation, DedupeKey: contract.TicketKey(b.ID, b.Generation),
				Data: contract.EventData{
					Recipient: b.Recipient, Name: b.Name, Locale: b.Locale, Event: b.Event,
					Seats: b.Seats, Amount: b.Amount, Currency: b.Currency,
				},
			})
		},
	}
}

// outcome tells a commit that failed from one of which nobody knows. Only an
// error that the server itself gave, in a session that it kept, says that
// nothing was committed. pgconn.SafeToRetry is of no use here: when the answer
// to COMMIT is lost, pgx 5.12 reports "conn closed", which it calls safe.
func outcome(err error) error {
	var pgErr *pgconn.PgError
	switch {
	case errors.Is(err, pgx.ErrTxCommitRollback):
		return err
	case errors.As(err, &pgErr) && pgErr.Severity == "ERROR":
		return err
	default:
		return fmt.Errorf("%w: %w", ErrOutcomeUnknown, err)
	}
}
