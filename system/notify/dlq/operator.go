package dlq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"golang.org/x/time/rate"

	"mailproof/system/amqp"
	"mailproof/system/delivery"
	"mailproof/system/failpoint"
	"mailproof/system/notify/doorbell"
	"mailproof/system/notify/logging"
)

// Crash points of a replay and of a second sending.
const (
	fpReplayMoved  = "replay.after-move"
	fpReplayRung   = "replay.after-ring"
	fpReplayTidied = "replay.after-letters"
	fpDiscarded    = "discard.after-audit"
	fpAgainMade    = "send-again.after-insert"
	fpAgainRung    = "send-again.after-ring"
)

// ErrInvalid marks what was asked for wrongly.
var ErrInvalid = errors.New("not a valid request")

// Operator carries out what people decide about dead mails. It reads the table
// and never the queue; the queue is only brought in line afterwards.
//
// Replay, for each mail: DEAD → PENDING with more tries, and the audit row, in
// one transaction → doorbell, confirmed → dead letter removed. A crash leaves
//
//	before the transaction   nothing done
//	before the doorbell      a waiting row with a letter: the cleaner of notifyd, or the
//	                         next command, rings for it; the sweeper would too
//	before the letter        a letter too many: the cleaner removes it
//
// so a replay that was cut off is simply run again. A mail that was sent
// meanwhile is not DEAD and therefore not moved (AC7).
type Operator struct {
	Store   *delivery.Store
	DB      Beginner
	Ring    doorbell.Ringer
	Cleaner Cleaner
	Audit   Audit
	Log     *slog.Logger
	Limits  Limits
}

// Limits of what one request may ask for.
type Limits struct {
	// Statement bounds each question to the database.
	Statement time.Duration
}

// Beginner begins transactions: the pool.
type Beginner interface {
	Begin(ctx context.Context) (pgx.Tx, error)
}

// ReplayRequest says what to replay and how.
type ReplayRequest struct {
	Filter delivery.DeadFilter
	// Attempts is how many more tries each mail gets, at least one.
	Attempts int
	// Rate in mails per second; 0 means as fast as it goes.
	Rate   float64
	DryRun bool
	Actor  string
	Reason string
	// RenderAnew forgets the bytes that were refused, for mails that a bad deploy
	// rendered. Nobody has a copy of a dead mail. A provider that remembers keys of
	// refused requests would refuse other bytes under the same key.
	RenderAnew bool
}

// Report is what a request did.
type Report struct {
	Matched   int      `json:"matched"`             // DEAD and chosen by the filter
	Replayed  int      `json:"replayed,omitempty"`  // moved and rung for
	Discarded int      `json:"discarded,omitempty"` // given up
	Refused   int      `json:"refused"`             // not DEAD any more, or cancelled
	Skipped   int      `json:"skipped"`             // discarded earlier, and not named by key
	Letters   Tally    `json:"letters"`
	DryRun    bool     `json:"dry_run"`
	Keys      []string `json:"keys,omitempty"` // the first ones
}

// maxKeys bounds the keys of a report.
const maxKeys = 20

func (r *Report) key(k string) {
	if len(r.Keys) < maxKeys {
		r.Keys = append(r.Keys, k)
	}
}

// List lists dead mails, the oldest death first, without discarded ones.
func (o Operator) List(ctx context.Context, f delivery.DeadFilter, limit int) ([]delivery.Row, error) {
	var out []delivery.Row
	err := o.each(ctx, f, func(rows []delivery.Row, discarded map[uuid.UUID]int64) error {
		for _, r := range rows {
			if isDiscarded(r, discarded) && f.DedupeKey == "" {
				continue
			}
			if out = append(out, r); len(out) == limit {
				return errEnough
			}
		}
		return nil
	})
	return out, err
}

var errEnough = errors.New("enough")

func isDiscarded(r delivery.Row, discarded map[uuid.UUID]int64) bool {
	v, ok := discarded[r.ID]
	return ok && v == r.Version
}

// each goes through the rows in pages of chunk.
func (o Operator) each(ctx context.Context, f delivery.DeadFilter, do func([]delivery.Row, map[uuid.UUID]int64) error) error {
	var after delivery.After
	for {
		rows, err := bounded(ctx, o.Limits.Statement, func(ctx context.Context) ([]delivery.Row, error) {
			return o.Store.DeadWhere(ctx, f, after, chunk)
		})
		if err != nil || len(rows) == 0 {
			return err
		}
		ids := make([]uuid.UUID, len(rows))
		for i, r := range rows {
			ids[i] = r.ID
		}
		discarded, err := bounded(ctx, o.Limits.Statement, func(ctx context.Context) (map[uuid.UUID]int64, error) {
			return o.Audit.Discarded(ctx, ids)
		})
		if err != nil {
			return err
		}
		if err := do(rows, discarded); err != nil {
			if errors.Is(err, errEnough) {
				return nil
			}
			return err
		}
		last := rows[len(rows)-1]
		after = delivery.After{ChangedAt: last.ChangedAt, ID: last.ID}
	}
}

func bounded[T any](ctx context.Context, d time.Duration, f func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	return f(ctx)
}

// Replay gives the chosen mails more tries. It ends with the mails that were
// dead when it began: one that dies again by it is not met twice.
func (o Operator) Replay(ctx context.Context, req ReplayRequest) (Report, error) {
	report := Report{DryRun: req.DryRun}
	if err := req.validate(); err != nil {
		return report, err
	}
	began, err := bounded(ctx, o.Limits.Statement, o.Store.Now)
	if err != nil {
		return report, err
	}
	if req.Filter.Until.IsZero() {
		req.Filter.Until = began
	}
	rung := map[uuid.UUID]bool{}
	pace := newPace(req.Rate)
	err = o.each(ctx, req.Filter, func(rows []delivery.Row, discarded map[uuid.UUID]int64) error {
		for _, part := range pace.parts(o.chosen(rows, discarded, req, &report)) {
			if err := pace.wait(ctx, len(part)); err != nil {
				return err
			}
			if err := o.replay(ctx, part, req, rung, &report); err != nil {
				return err
			}
		}
		return nil
	})
	if req.DryRun {
		return report, err
	}
	// Also when nothing was moved: of two replays at once each may have met
	// letters of mails that only the other moved.
	var tidyErr error
	report.Letters, tidyErr = o.Cleaner.Tidy(ctx, rung)
	failpoint.At(fpReplayTidied)
	return report, errors.Join(err, tidyErr)
}

func (r ReplayRequest) validate() error {
	switch {
	case r.Attempts < 1:
		return fmt.Errorf("%w: %d more attempts is below 1", ErrInvalid, r.Attempts)
	case r.Rate < 0:
		return fmt.Errorf("%w: a rate of %g is negative", ErrInvalid, r.Rate)
	case r.Actor == "":
		return fmt.Errorf("%w: nobody is named as actor", ErrInvalid)
	}
	return nil
}

// chosen leaves out what a person gave up, unless it is named by its key.
func (o Operator) chosen(rows []delivery.Row, discarded map[uuid.UUID]int64, req ReplayRequest, report *Report) []delivery.Row {
	var out []delivery.Row
	for _, r := range rows {
		report.Matched++
		if isDiscarded(r, discarded) && req.Filter.DedupeKey == "" {
			report.Skipped++
			continue
		}
		report.key(r.DedupeKey)
		out = append(out, r)
	}
	if req.DryRun {
		return nil
	}
	return out
}

// replay moves some rows and rings for them together. A mail moved and not rung
// for still has its letter.
func (o Operator) replay(ctx context.Context, rows []delivery.Row, req ReplayRequest, rung map[uuid.UUID]bool, report *Report) error {
	var msgs []amqp.Message
	var moved []delivery.Row
	for _, r := range rows {
		row, ok, err := o.move(ctx, r, req)
		if err != nil {
			return err
		}
		if !ok {
			report.Refused++
			continue
		}
		moved, msgs = append(moved, row), append(msgs, doorbell.Main(doorbell.Of(row)))
	}
	failpoint.At(fpReplayMoved)
	if err := o.Ring.Ring(ctx, msgs...); err != nil {
		return err
	}
	failpoint.At(fpReplayRung)
	for _, r := range moved {
		rung[r.ID] = true
		report.Replayed++
		o.Log.Info("replayed", logging.DedupeKey, r.DedupeKey, logging.EventID, r.EventIDText(), logging.Attempts, r.Attempts, "limit", r.AttemptLimit, "actor", req.Actor)
	}
	return nil
}

// move is one row's transition and its audit, both or neither.
func (o Operator) move(ctx context.Context, r delivery.Row, req ReplayRequest) (delivery.Row, bool, error) {
	ctx, cancel := context.WithTimeout(ctx, o.Limits.Statement)
	defer cancel()
	var out delivery.Outcome
	err := pgx.BeginFunc(ctx, o.DB, func(tx pgx.Tx) error {
		var err error
		out, err = o.Store.On(tx).Replay(ctx, r.ID, req.Attempts)
		if err != nil || !out.Applied {
			return err
		}
		if req.RenderAnew {
			if err := o.Store.On(tx).ForgetMail(ctx, r.ID); err != nil {
				return err
			}
		}
		_, err = writeAudit(ctx, tx, "replay", out.Row, req.Actor, req.Reason)
		return err
	})
	if errors.Is(err, delivery.ErrNoRow) {
		return r, false, nil // deleted meanwhile
	}
	if err != nil {
		return r, false, fmt.Errorf("replay %s: %w", r.DedupeKey, err)
	}
	return out.Row, out.Applied, nil
}

// DiscardRequest says what to give up, and why.
type DiscardRequest struct {
	Filter delivery.DeadFilter
	DryRun bool
	Actor  string
	Reason string
}

// Discard gives dead mails up: their rows stay DEAD for those who ask later,
// they are listed no more, and their letters are removed. It is undone by a
// replay that names the key.
func (o Operator) Discard(ctx context.Context, req DiscardRequest) (Report, error) {
	report := Report{DryRun: req.DryRun}
	if req.Actor == "" || req.Reason == "" {
		return report, fmt.Errorf("%w: a discard needs an actor and a reason", ErrInvalid)
	}
	err := o.each(ctx, req.Filter, func(rows []delivery.Row, before map[uuid.UUID]int64) error {
		for _, r := range rows {
			report.Matched++
			if isDiscarded(r, before) {
				report.Skipped++
				continue
			}
			report.key(r.DedupeKey)
			if req.DryRun {
				continue
			}
			done, err := o.discard(ctx, r, req)
			if err != nil {
				return err
			}
			if !done {
				report.Refused++
				continue
			}
			report.Discarded++
		}
		return nil
	})
	if report.Discarded == 0 {
		return report, err
	}
	failpoint.At(fpDiscarded)
	var tidyErr error
	report.Letters, tidyErr = o.Cleaner.Tidy(ctx, nil)
	return report, errors.Join(err, tidyErr)
}

func (o Operator) discard(ctx context.Context, r delivery.Row, req DiscardRequest) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, o.Limits.Statement)
	defer cancel()
	done := false
	err := pgx.BeginFunc(ctx, o.DB, func(tx pgx.Tx) (err error) {
		done, err = writeAudit(ctx, tx, "discard", r, req.Actor, req.Reason)
		return err
	})
	if err != nil {
		return false, fmt.Errorf("discard %s: %w", r.DedupeKey, err)
	}
	if done {
		o.Log.Info("discarded", logging.DedupeKey, r.DedupeKey, logging.EventID, r.EventIDText(), logging.Attempts, r.Attempts, "actor", req.Actor, "reason", req.Reason)
	}
	return done, nil
}

// SendAgain makes a second mail of the same intent under a new key (OB-12). A
// crash before its doorbell leaves a waiting row that the sweeper rings for.
func (o Operator) SendAgain(ctx context.Context, key, actor, reason string) (delivery.Row, error) {
	if actor == "" || reason == "" {
		return delivery.Row{}, fmt.Errorf("%w: a second sending needs an actor and a reason", ErrInvalid)
	}
	row, err := o.again(ctx, key, actor, reason)
	if err != nil {
		return row, err
	}
	failpoint.At(fpAgainMade)
	o.Log.Info("sent again", logging.DedupeKey, row.DedupeKey, logging.EventID, row.EventIDText(), "actor", actor, "reason", reason)
	if err := o.Ring.Ring(ctx, doorbell.Main(doorbell.Of(row))); err != nil {
		return row, err
	}
	failpoint.At(fpAgainRung)
	return row, o.Store.StampPublished(ctx, []uuid.UUID{row.ID})
}

func (o Operator) again(ctx context.Context, key, actor, reason string) (row delivery.Row, err error) {
	ctx, cancel := context.WithTimeout(ctx, o.Limits.Statement)
	defer cancel()
	err = pgx.BeginFunc(ctx, o.DB, func(tx pgx.Tx) error {
		if row, err = o.Store.On(tx).SendAgain(ctx, key); err != nil {
			return err
		}
		_, err = writeAudit(ctx, tx, "send-again", row, actor, reason)
		return err
	})
	return row, err
}

// Dossier is all that is known of one mail.
type Dossier struct {
	Row       delivery.Row
	Discarded bool
	Audit     []Entry
}

// Inspect reads one mail by its key, dead or not.
func (o Operator) Inspect(ctx context.Context, key string) (Dossier, error) {
	row, err := bounded(ctx, o.Limits.Statement, func(ctx context.Context) (delivery.Row, error) { return o.Store.ByKey(ctx, key) })
	if err != nil {
		return Dossier{}, err
	}
	entries, err := bounded(ctx, o.Limits.Statement, func(ctx context.Context) ([]Entry, error) { return o.Audit.Of(ctx, row.ID) })
	if err != nil {
		return Dossier{}, err
	}
	d := Dossier{Row: row, Audit: entries}
	for _, e := range entries {
		d.Discarded = d.Discarded || e.Action == "discard" && e.Version == row.Version
	}
	return d, nil
}

// pace spreads a replay, so that a server that has just come back is not met by
// all mails at once (OB-10).
type pace struct {
	limit *rate.Limiter
	most  int
}

func newPace(perSecond float64) pace {
	if perSecond <= 0 {
		return pace{limit: rate.NewLimiter(rate.Inf, chunk), most: chunk}
	}
	most := min(chunk, max(1, int(perSecond)))
	return pace{limit: rate.NewLimiter(rate.Limit(perSecond), most), most: most}
}

func (p pace) parts(rows []delivery.Row) [][]delivery.Row {
	var out [][]delivery.Row
	for len(rows) > 0 {
		n := min(p.most, len(rows))
		out, rows = append(out, rows[:n]), rows[n:]
	}
	return out
}

func (p pace) wait(ctx context.Context, n int) error { return p.limit.WaitN(ctx, n) }
