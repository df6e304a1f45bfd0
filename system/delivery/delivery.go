package delivery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
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

// Waiting reports whether a row in this state waits for a worker.
func (s Status) Waiting() bool { return s == Pending || s == Failed }

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
	CampaignID     *string
	EventID        *string // nil on tombstones
	Type           contract.MailType
	Channel        contract.Channel
	Recipient      string
	Payload        []byte // JSON, what the template shows
	Status         Status
	Generation     int
	Attempts       int // rises with each claim; a try that was free is taken back
	AttemptLimit   int
	Token          int64 // fencing token: rises with each claim, never reset
	Unsettled      int   // attempts whose outcome is not durably known
	CancelAsked    bool  // column cancel_requested
	LateAccepted   bool  // an earlier token's 250 came while another holds the row
	LateProviderID *string
	LockedUntil    *time.Time
	NextAttemptAt  *time.Time
	SendAfter      *time.Time
	ExpiresAt      *time.Time
	PublishedAt    *time.Time
	DLQPublishedAt *time.Time
	FirstClaimedAt *time.Time
	Rendered       []byte // the mail's bytes, stored at the first claim, never changed; read by Claim, Get and ByKey only
	ProviderMsgID  *string
	LastError      *string
	Rescues        int // doorbells rung again by the sweeper since the last claim
	CreatedAt      time.Time
	ChangedAt      time.Time // of the last transition
	SentAt         *time.Time
	Version        int64 // rises with each transition
}

// EventIDText is the event's id, empty for a tombstone.
func (r Row) EventIDText() string {
	if r.EventID == nil {
		return ""
	}
	return *r.EventID
}

// dest is where a row of the statements' common columns is scanned to.
func (r *Row) dest() []any {
	return []any{
		&r.ID, &r.DedupeKey, &r.BookingID, &r.CampaignID, &r.EventID, &r.Type, &r.Channel, &r.Recipient, &r.Payload,
		&r.Status, &r.Generation, &r.Attempts, &r.AttemptLimit, &r.Token, &r.Unsettled,
		&r.CancelAsked, &r.LateAccepted, &r.LateProviderID,
		&r.LockedUntil, &r.NextAttemptAt, &r.SendAfter, &r.ExpiresAt, &r.PublishedAt, &r.DLQPublishedAt,
		&r.FirstClaimedAt, &r.ProviderMsgID, &r.LastError, &r.Rescues, &r.CreatedAt, &r.ChangedAt, &r.SentAt, &r.Version,
	}
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
	// Events is the topic of the mail events, which are written into table
	// outbox of the same database; the caller migrates that table and runs its
	// relay. Empty: none are written.
	Events string
}

// Validate names everything that is wrong with the configuration.
func (c Config) Validate() error {
	var errs []error
	if c.Lease <= 0 {
		errs = append(errs, fmt.Errorf("lease %s is not above zero", c.Lease))
	}
	if c.MaxAttempts < 1 {
		errs = append(errs, fmt.Errorf("max attempts %d is below 1", c.MaxAttempts))
	}
	if len(c.RetryDelays) == 0 {
		errs = append(errs, errors.New("no retry delay is given: a failed try would be repeated at once"))
	}
	for i, d := range c.RetryDelays {
		if d <= 0 {
			errs = append(errs, fmt.Errorf("retry delay %d is %s, not above zero", i+1, d))
		}
	}
	if err := c.ValidateEvents(); err != nil {
		errs = append(errs, err)
	}
	for t, p := range c.Policies {
		if p != SameKey && p != Resend && p != Hold {
			errs = append(errs, fmt.Errorf("policy %q of %s is not known", p, t))
		}
	}
	return errors.Join(errs...)
}

// resendable lists the types whose mails may be sent again after an outcome
// that is not known.
func (c Config) resendable() []string {
	types := []string{}
	for t, p := range c.Policies {
		if p == SameKey || p == Resend {
			types = append(types, string(t))
		}
	}
	slices.Sort(types)
	return types
}

// DB is what the statements run on: a pool, or a transaction of the caller.
type DB interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// Store runs the transitions.
type Store struct {
	db         DB
	cfg        Config
	resendable []string
	telling    map[string]string // statement → the same, with its event
	tooLate    string            // "" where no events are written
	bounced    string            // likewise
}

// New makes a store. The pool's database must have been migrated; the service
// checks cfg with [Config.Validate] at start.
func New(pool *pgxpool.Pool, cfg Config) *Store {
	return &Store{
		db: pool, cfg: cfg, resendable: cfg.resendable(),
		telling: tellingStatements(cfg.Events), tooLate: cancelTooLate(cfg.Events), bounced: bounced(cfg.Events),
	}
}

// On is the same store inside a transaction of the caller, for a business
// transaction that inserts or cancels a mail with its own rows (A1-01, C-02).
// The transaction must be READ COMMITTED, and nothing may be sent inside it
// (A1-08).
func (s *Store) On(tx pgx.Tx) *Store {
	inside := *s
	inside.db = tx
	return &inside
}

// statement is sql, or what stands in its place where events are written.
func (s *Store) statement(sql string) string {
	if told, ok := s.telling[sql]; ok {
		return told
	}
	return sql
}

// ErrNoRow is returned for an id that has no row.
var ErrNoRow = errors.New("no such notification")

// ErrNotHeld is returned to a caller that needs to hold the row and does not.
var ErrNotHeld = errors.New("the row is not held under this token")

// NewRow is a mail that should be sent.
type NewRow struct {
	DedupeKey  string
	BookingID  string
	CampaignID string // empty when the mail belongs to none
	EventID    string
	Type       contract.MailType
	Channel    contract.Channel
	Recipient  string
	Payload    []byte // JSON; empty means {}
	Generation int
	SendAfter  *time.Time
	ExpiresAt  *time.Time
	// Stale is set for an event that came too late to be sent: its row is
	// EXPIRED from the start and keeps the key taken (A2-13).
	Stale bool
}

// Inserted says what an insert found.
type Inserted struct {
	ID        uuid.UUID
	New       bool // this call made the row
	Status    Status
	Published bool // a message was confirmed by the broker before
	// Clash is set when the event id stands on a row with another dedupe key:
	// one event asked for two mails, and this one has no row. The caller parks
	// the event.
	Clash bool
}

// NeedsDoorbell reports whether a message must still be published for the row.
func (i Inserted) NeedsDoorbell() bool { return i.Status.Waiting() && !i.Published && !i.Clash }

// Insert makes the rows that do not exist yet, and says for each input, in
// order, which row there is now (E1–E3 of A2-10). Two callers with the same
// key: the second waits for the first's transaction, then finds its row
// (A2-11).
func (s *Store) Insert(ctx context.Context, rows []NewRow) ([]Inserted, error) {
	if len(rows) == 0 {
		return nil, nil
	}
	in, err := newColumns(rows)
	if err != nil {
		return nil, fmt.Errorf("insert: %w", err)
	}
	res, err := s.db.Query(ctx, s.statement(sqlInsert), s.cfg.MaxAttempts, in.ids, in.keys, in.bookings, in.campaigns, in.events,
		in.types, in.channels, in.recipients, in.payloads, in.stale, in.generations, in.sendAfter, in.expiresAt)
	if err != nil {
		return nil, fmt.Errorf("insert %d notifications: %w", len(rows), err)
	}
	made, err := pgx.CollectRows(res, pgx.RowTo[uuid.UUID])
	if err != nil {
		return nil, fmt.Errorf("insert %d notifications: %w", len(rows), err)
	}
	isNew := make(map[uuid.UUID]bool, len(made))
	for _, id := range made {
		isNew[id] = true
	}
	out := make([]Inserted, len(rows))
	var others []int
	for i, id := range in.ids {
		if !isNew[id] {
			others = append(others, i)
			continue
		}
		out[i] = Inserted{ID: id, New: true, Status: Pending}
		if rows[i].Stale {
			out[i].Status = Expired
		}
	}
	if len(others) == 0 {
		return out, nil
	}
	return out, s.lookAtInserted(ctx, rows, others, out)
}

// lookAtInserted fills in, after the insert, what stood in its way.
func (s *Store) lookAtInserted(ctx context.Context, rows []NewRow, others []int, out []Inserted) error {
	keys := make([]string, len(others))
	events := make([]string, len(others))
	for j, i := range others {
		keys[j], events[j] = rows[i].DedupeKey, rows[i].EventID
	}
	found, err := s.rows(ctx, sqlInsertLook, keys, events)
	if err != nil {
		return fmt.Errorf("insert: look at %d existing rows: %w", len(others), err)
	}
	byKey, byEvent := map[string]Row{}, map[string]Row{}
	for _, r := range found {
		byKey[r.DedupeKey] = r
		if r.EventID != nil {
			byEvent[*r.EventID] = r
		}
	}
	for _, i := range others {
		r, ok := byKey[rows[i].DedupeKey]
		clash := !ok
		if clash {
			r, ok = byEvent[rows[i].EventID]
		}
		if !ok {
			// The row that stood in the way was removed in between.
			return fmt.Errorf("insert %s: neither new nor found, try again", rows[i].DedupeKey)
		}
		out[i] = Inserted{ID: r.ID, Status: r.Status, Published: r.PublishedAt != nil, Clash: clash}
	}
	return nil
}

// insertColumns are the arrays that the insert statement takes, one element for
// each row.
type insertColumns struct {
	ids                                                           []uuid.UUID
	keys, bookings, events, types, channels, recipients, payloads []string
	campaigns                                                     []*string
	stale                                                         []bool
	generations                                                   []int
	sendAfter, expiresAt                                          []*time.Time
}

func newColumns(rows []NewRow) (insertColumns, error) {
	var c insertColumns
	for _, r := range rows {
		if err := r.validate(); err != nil {
			return c, err
		}
		// Ordered by time, so that new keys land on the same index pages.
		id, err := uuid.NewV7()
		if err != nil {
			return c, fmt.Errorf("new id for %s: %w", r.DedupeKey, err)
		}
		payload := string(r.Payload)
		if payload == "" {
			payload = "{}"
		}
		c.ids = append(c.ids, id)
		c.keys = append(c.keys, r.DedupeKey)
		c.bookings = append(c.bookings, r.BookingID)
		c.campaigns = append(c.campaigns, nilIfEmpty(r.CampaignID))
		c.events = append(c.events, r.EventID)
		c.types = append(c.types, string(r.Type))
		c.channels = append(c.channels, string(r.Channel))
		c.recipients = append(c.recipients, r.Recipient)
		c.payloads = append(c.payloads, payload)
		c.stale = append(c.stale, r.Stale)
		c.generations = append(c.generations, r.Generation)
		c.sendAfter = append(c.sendAfter, r.SendAfter)
		c.expiresAt = append(c.expiresAt, r.ExpiresAt)
	}
	return c, nil
}

func (r NewRow) validate() error {
	switch {
	case r.DedupeKey == "":
		return fmt.Errorf("event %q: dedupe key is empty", r.EventID)
	case r.EventID == "":
		return fmt.Errorf("%s: event id is empty", r.DedupeKey)
	case r.Generation < 1:
		return fmt.Errorf("%s: generation %d is below 1", r.DedupeKey, r.Generation)
	}
	return nil
}

func nilIfEmpty(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// StampPublished records that the broker confirmed a message for each row. It
// may be repeated.
func (s *Store) StampPublished(ctx context.Context, ids []uuid.UUID) error {
	if len(ids) == 0 {
		return nil
	}
	if _, err := s.db.Exec(ctx, sqlStampPublished, ids); err != nil {
		return fmt.Errorf("stamp %d rows as published: %w", len(ids), err)
	}
	return nil
}

// Outcome is what a settle found.
type Outcome struct {
	// Applied is false when the caller no longer held the row: it treats its
	// message as newly delivered and looks again.
	Applied bool
	// Flagged is set, with Applied false, when a late 250 was noted on a row
	// that another worker holds: that one's settle makes it SENT.
	Flagged bool
	Row     Row           // the row after the statement
	Wait    time.Duration // until the next try, when Row.Status is FAILED
}

// Accepted records a 250. It is right for a token that moved on too: a row
// that waits or is UNKNOWN becomes SENT, and one that another worker holds is
// flagged (Outcome.Flagged). A settled row is left alone.
func (s *Store) Accepted(ctx context.Context, id uuid.UUID, token int64, providerID string) (Outcome, error) {
	out, found, err := s.settle(ctx, sqlAccepted, id, token, providerID)
	if err != nil || found {
		return out, wrapID("accepted", id, err)
	}
	out, found, err = s.settle(ctx, sqlAcceptedLate, id, token, providerID)
	if err != nil {
		return Outcome{}, wrapID("accepted late", id, err)
	}
	if !found {
		return s.refused(ctx, "accepted", id)
	}
	if out.Row.Status == Sending {
		out.Applied, out.Flagged = false, true
	}
	return out, nil
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

// Transient records that the mail was definitely not taken and may be later:
// FAILED with its next_attempt_at, or the end when the attempts are used up or
// a cancel was requested.
func (s *Store) Transient(ctx context.Context, id uuid.UUID, token int64, r Refusal) (Outcome, error) {
	var after *time.Duration
	if r.RetryAfter > 0 {
		after = &r.RetryAfter
	}
	out, found, err := s.settle(ctx, sqlTransient, id, token, r.Free, after, s.cfg.RetryDelays, r.Err)
	return s.settled(ctx, "transient", id, out, found, err)
}

// Permanent records that the mail was definitely not taken and never will be
// (AC5). RetryAfter and Free mean nothing here.
func (s *Store) Permanent(ctx context.Context, id uuid.UUID, token int64, r Refusal) (Outcome, error) {
	out, found, err := s.settle(ctx, sqlPermanent, id, token, r.Err)
	return s.settled(ctx, "permanent", id, out, found, err)
}

// Ambiguous records that the mail may have been taken: by the type's policy it
// is tried again or becomes UNKNOWN. The attempt stays unsettled.
func (s *Store) Ambiguous(ctx context.Context, id uuid.UUID, token int64, reason string) (Outcome, error) {
	out, found, err := s.settle(ctx, sqlAmbiguous, id, token, s.resendable, s.cfg.RetryDelays, reason)
	return s.settled(ctx, "ambiguous", id, out, found, err)
}

// settle runs a statement that returns the row and its wait, if it applied.
func (s *Store) settle(ctx context.Context, sql string, args ...any) (Outcome, bool, error) {
	res, err := s.db.Query(ctx, s.statement(sql), args...)
	if err != nil {
		return Outcome{}, false, err
	}
	out, err := pgx.CollectExactlyOneRow(res, scanOutcome)
	if errors.Is(err, pgx.ErrNoRows) {
		return Outcome{}, false, nil
	}
	return out, err == nil, err
}

func scanOutcome(r pgx.CollectableRow) (Outcome, error) {
	o := Outcome{Applied: true}
	err := r.Scan(append(o.Row.dest(), &o.Wait)...)
	o.Wait = max(o.Wait, 0)
	return o, err
}

// settled finishes a transition: a refused one is looked at afterwards.
func (s *Store) settled(ctx context.Context, what string, id uuid.UUID, out Outcome, found bool, err error) (Outcome, error) {
	if err != nil {
		return Outcome{}, wrapID(what, id, err)
	}
	if found {
		return out, nil
	}
	return s.refused(ctx, what, id)
}

func (s *Store) refused(ctx context.Context, what string, id uuid.UUID) (Outcome, error) {
	row, err := s.Get(ctx, id)
	if err != nil {
		return Outcome{}, fmt.Errorf("%s refused: %w", what, err)
	}
	return Outcome{Row: row}, nil
}

// StoreRendered keeps the mail's bytes and returns the ones that are to be
// sent: those stored first, by whichever attempt (OB-03). It returns
// [ErrNotHeld] when the caller no longer holds the row.
func (s *Store) StoreRendered(ctx context.Context, id uuid.UUID, token int64, mail []byte) ([]byte, error) {
	stored, err := s.bytes(ctx, sqlStoreMail, id, token, mail)
	if err == nil {
		return stored, nil
	}
	if errors.Is(err, pgx.ErrNoRows) {
		stored, err = s.bytes(ctx, sqlStoreMailLook, id, token)
	}
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotHeld
	}
	return stored, wrapID("store mail", id, err)
}

func (s *Store) bytes(ctx context.Context, sql string, args ...any) ([]byte, error) {
	res, err := s.db.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectExactlyOneRow(res, pgx.RowTo[[]byte])
}

// Replay gives a DEAD row extra more tries (at least one). It is refused, with
// Applied false, for any other state and for a cancelled mail: a mail that was
// sent is never sent again by it (AC7).
func (s *Store) Replay(ctx context.Context, id uuid.UUID, extra int) (Outcome, error) {
	if extra < 1 {
		return Outcome{}, fmt.Errorf("replay %s: %d more attempts is below 1", id, extra)
	}
	out, found, err := s.settle(ctx, sqlReplay, id, extra)
	return s.settled(ctx, "replay", id, out, found, err)
}

// ForgetMail removes the stored bytes of a mail that was just replayed, so that
// its next try renders it anew: for mails whose very bytes were refused. It must
// run in the transaction of the replay ([Store.On]). A dead mail has no try whose
// outcome is open, so nobody has a copy of the old bytes; of any other mail
// nothing is removed. Message-ID and key stay: they derive from the key.
func (s *Store) ForgetMail(ctx context.Context, id uuid.UUID) error {
	if _, ok := s.db.(pgx.Tx); !ok {
		return fmt.Errorf("forget the mail of %s: not in a transaction", id)
	}
	if _, err := s.db.Exec(ctx, sqlForgetMail, id); err != nil {
		return fmt.Errorf("forget the mail of %s: %w", id, err)
	}
	return nil
}

// Found records that the provider's log shows an UNKNOWN mail as delivered.
func (s *Store) Found(ctx context.Context, id uuid.UUID, providerID string) (Outcome, error) {
	out, found, err := s.settle(ctx, sqlFound, id, providerID)
	return s.settled(ctx, "found", id, out, found, err)
}

// Bounced tells that a mail that was SENT came back. The row keeps its state: the
// mail went out, and is not sent again. It does nothing for a row in any other
// state, or one without a booking, or told before.
func (s *Store) Bounced(ctx context.Context, key string) error {
	if s.bounced == "" {
		return nil
	}
	if _, err := s.db.Exec(ctx, s.bounced, key); err != nil {
		return fmt.Errorf("bounced %s: %w", key, err)
	}
	return nil
}

// ProvenAbsent records a proof that an UNKNOWN mail was not delivered and will
// not be by any earlier attempt: it is tried once more, or is CANCELLED when
// that was asked for. "Not found so far" is no such proof.
//
// token is the row's as it was when the proof was made (Row.Token): the proof
// says nothing of later attempts, so it is refused, with Applied false, for a
// row that was tried again and is UNKNOWN once more.
func (s *Store) ProvenAbsent(ctx context.Context, id uuid.UUID, token int64) (Outcome, error) {
	out, found, err := s.settle(ctx, sqlProvenAbsent, id, token)
	return s.settled(ctx, "proven absent", id, out, found, err)
}

// Park ends a waiting row that no sender of this system can take, visibly: it
// becomes DEAD with the reason, and so gets a dead letter and an alert.
func (s *Store) Park(ctx context.Context, id uuid.UUID, reason string) (Outcome, error) {
	out, found, err := s.settle(ctx, sqlPark, id, reason)
	return s.settled(ctx, "park", id, out, found, err)
}

// Get reads one row.
func (s *Store) Get(ctx context.Context, id uuid.UUID) (Row, error) {
	r, err := s.one(ctx, sqlGet, id)
	return r, wrapID("get", id, err)
}

// ByKey reads the row of a dedupe key.
func (s *Store) ByKey(ctx context.Context, key string) (Row, error) {
	r, err := s.one(ctx, sqlGetByKey, key)
	if err != nil {
		return r, fmt.Errorf("get %s: %w", key, err)
	}
	return r, nil
}

// one reads a row with its mail.
func (s *Store) one(ctx context.Context, sql string, args ...any) (Row, error) {
	res, err := s.db.Query(ctx, sql, args...)
	if err != nil {
		return Row{}, err
	}
	row, err := pgx.CollectExactlyOneRow(res, scanWithMail)
	if errors.Is(err, pgx.ErrNoRows) {
		return Row{}, ErrNoRow
	}
	return row, err
}

func scanRow(r pgx.CollectableRow) (Row, error) {
	var row Row
	err := r.Scan(row.dest()...)
	return row, err
}

func scanWithMail(r pgx.CollectableRow) (Row, error) {
	var row Row
	err := r.Scan(append(row.dest(), &row.Rendered)...)
	return row, err
}

func (s *Store) rows(ctx context.Context, sql string, args ...any) ([]Row, error) {
	res, err := s.db.Query(ctx, s.statement(sql), args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(res, scanRow)
}

func wrapID(what string, id uuid.UUID, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s %s: %w", what, id, err)
}
