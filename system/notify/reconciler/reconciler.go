// Package reconciler finds out what became of mails that are UNKNOWN: sent or
// not, only the provider knows (OB-07).
//
// It asks in two ways. A type whose receiver deduplicates (policy same-key) is
// let through for one more try under the same key while the key lives: the try
// brings the id of the first copy back, or makes the only one. For every other
// mail it reads the provider's delivery log, or its list of mails (the provider's
// webhooks are a third source, see package webhook):
//
//	the log shows a copy of the key           found, SENT
//	absence is proven                         tried once more, or CANCELLED when that was asked for
//	everything else                           open: stays UNKNOWN, visible, asked again
//
// What it guarantees: a mail is let go again only on proof. "Not found so far"
// is none. There are two proofs:
//
//   - each try is accounted for: the log shows, for every claim of the row, a
//     session that ended without storing (only where the log has at most one
//     line per try);
//   - the log is complete over the whole time in which a copy could have been
//     kept: from before the first claim to the last lease's end + the server's
//     session timeout + its processing bound, and shows no copy and no session
//     of the key that still runs.
//
// Only the database's clock is used for these times, read before the log is
// asked: what the log may have missed since then does not count. A log that
// answers half, with an error, or with a word that is not known proves nothing.
// The proof carries the row's token: it says nothing of later tries.
//
// A crash between two steps: after found or absent the row has moved and the
// rest is a doorbell, which the sweeper rings when it is lost.
//
// It must not send mails, and must not import a mail client.
package reconciler

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"

	"mailproof/system/amqp"
	"mailproof/system/contract"
	"mailproof/system/delivery"
	"mailproof/system/failpoint"
	"mailproof/system/notify/doorbell"
	"mailproof/system/notify/logging"
)

// Result of one look at one mail.
type Result string

// The results, labels of the metric.
const (
	Found   Result = "found"    // SENT
	Absent  Result = "absent"   // let go again, or CANCELLED
	Asked   Result = "asked"    // let through for a try under the same key
	Open    Result = "open"     // nothing is proven
	Moved   Result = "moved-on" // somebody else moved the row meanwhile
	Failing Result = "failed"   // the log could not be read
)

// Crash points: asked the log → moved the row → rang for it.
const (
	fpAfterLookup = "reconciler.after-lookup"
	fpAfterMove   = "reconciler.after-move"
	fpAfterRing   = "reconciler.after-ring"
)

// Store is what the reconciler needs of the row store.
type Store interface {
	Now(ctx context.Context) (time.Time, error)
	UnknownRows(ctx context.Context, after delivery.After, limit int) ([]delivery.Row, error)
	Found(ctx context.Context, id uuid.UUID, providerID string) (delivery.Outcome, error)
	ProvenAbsent(ctx context.Context, id uuid.UUID, token int64) (delivery.Outcome, error)
	AskAgain(ctx context.Context, id uuid.UUID, token int64, lifetime time.Duration) (delivery.Outcome, error)
}

// Ringer publishes until confirmed.
type Ringer interface {
	Ring(ctx context.Context, msgs ...amqp.Message) error
}

// Counter counts looks by result.
type Counter interface{ Reconciled(result string) }

// Config of the reconciler. All durations are on the database's clock.
type Config struct {
	Store Store
	Ring  Ringer
	Count Counter
	Log   *slog.Logger

	// Provider's log; nil: there is none.
	Provider Log
	Bounds   Bounds

	// SameKey says which types are asked for by a try, while the key is younger
	// than KeyLifetime. A row waits Grace for its first such try, and twice as
	// long for each further attempt it has had.
	SameKey     func(contract.MailType) bool
	KeyLifetime time.Duration
	Grace       time.Duration

	Batch int // rows per statement
	// Timeout bounds one statement, and one question to the log.
	Timeout time.Duration
}

// Bounds are how long after a claim a copy may still be kept.
type Bounds struct {
	// Lease of a claim: no worker sends its dot later.
	Lease time.Duration
	// Session is the server's own limit of a session: what its client has left
	// is over by then.
	Session time.Duration
	// Processing is how long the server may take from the end of a session to
	// the line in its log.
	Processing time.Duration
}

// after is when a copy of a row that became UNKNOWN at t must stand in the log.
// The last claim was before t, so its lease ended before t + Lease.
func (b Bounds) after(t time.Time) time.Time { return t.Add(b.Lease + b.Session + b.Processing) }

// Reconciler reconciles.
type Reconciler struct{ cfg Config }

// New makes a reconciler.
func New(cfg Config) *Reconciler { return &Reconciler{cfg} }

// Tally is how many rows had which result.
type Tally map[Result]int

// Round looks at each UNKNOWN row once that choose wants (nil: all). A row that
// fails does not keep the others from their turn.
func (r *Reconciler) Round(ctx context.Context, choose func(delivery.Row) bool) (Tally, error) {
	tally := Tally{}
	var failed error
	after := delivery.After{}
	for {
		rows, err := r.list(ctx, after)
		if err != nil {
			return tally, errors.Join(failed, err)
		}
		for _, row := range rows {
			after = delivery.After{ChangedAt: row.ChangedAt, ID: row.ID}
			if choose != nil && !choose(row) {
				continue
			}
			res, err := r.One(ctx, row)
			tally[res]++
			if err != nil {
				failed = err // the latest says as much as all of them
			}
			if ctx.Err() != nil {
				return tally, ctx.Err()
			}
		}
		if len(rows) < r.cfg.Batch {
			return tally, failed
		}
	}
}

func (r *Reconciler) list(ctx context.Context, after delivery.After) ([]delivery.Row, error) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	return r.cfg.Store.UnknownRows(ctx, after, r.cfg.Batch)
}

// One looks at one UNKNOWN row.
func (r *Reconciler) One(ctx context.Context, row delivery.Row) (Result, error) {
	res, why, err := r.one(ctx, row)
	r.cfg.Count.Reconciled(string(res))
	log := r.cfg.Log.With(logging.DedupeKey, row.DedupeKey, logging.EventID, row.EventIDText(), logging.Attempts, row.Attempts, "result", string(res))
	switch {
	case err != nil:
		log.Warn("unknown mail not reconciled", "error", err)
		return res, fmt.Errorf("reconcile %s: %w", row.DedupeKey, err)
	case res == Open:
		log.Debug("unknown mail stays unknown", "why", why)
	default:
		log.Info("unknown mail reconciled", "why", why)
	}
	return res, nil
}

func (r *Reconciler) one(ctx context.Context, row delivery.Row) (Result, string, error) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	// Before the log is asked: what comes into it later may be missing.
	now, err := r.cfg.Store.Now(ctx)
	if err != nil {
		return Failing, "", err
	}
	why := "there is no delivery log to ask"
	if r.cfg.Provider != nil {
		page, err := r.cfg.Provider.Lookup(ctx, row)
		if err != nil {
			return Failing, "", fmt.Errorf("delivery log: %w", err)
		}
		v := judge(row, page, now, r.cfg.Bounds)
		why = v.why
		if v.result != Open {
			failpoint.At(fpAfterLookup)
		}
		switch v.result {
		case Found:
			out, err := r.cfg.Store.Found(ctx, row.ID, logging.Plain(v.providerID, 500))
			return r.moved(ctx, out, Found, why, err)
		case Absent:
			out, err := r.cfg.Store.ProvenAbsent(ctx, row.ID, row.Token)
			return r.moved(ctx, out, Absent, why, err)
		}
	}
	if !r.mayAsk(row, now) {
		return Open, why, nil
	}
	out, err := r.cfg.Store.AskAgain(ctx, row.ID, row.Token, r.cfg.KeyLifetime)
	if err == nil && !out.Applied && out.Row.Status == delivery.Unknown && out.Row.Token == row.Token {
		return Open, "it may not be asked for under its key: " + why, nil
	}
	return r.moved(ctx, out, Asked, "the receiver deduplicates: one more try under the same key", err)
}

// mayAsk spares the database and the people a try that the statement refuses,
// and a receiver in trouble a try per round.
func (r *Reconciler) mayAsk(row delivery.Row, now time.Time) bool {
	if r.cfg.SameKey == nil || !r.cfg.SameKey(row.Type) || row.CancelAsked {
		return false
	}
	wait := r.cfg.Grace << min(max(row.Attempts-1, 0), 10)
	return now.Sub(row.ChangedAt) >= wait
}

// moved rings for a row that waits for a worker again.
func (r *Reconciler) moved(ctx context.Context, out delivery.Outcome, res Result, why string, err error) (Result, string, error) {
	if err != nil {
		return Failing, "", err
	}
	if !out.Applied {
		return Moved, "another one was faster", nil
	}
	failpoint.At(fpAfterMove)
	if out.Row.Status.Waiting() {
		if err := r.cfg.Ring.Ring(ctx, doorbell.Main(doorbell.Of(out.Row))); err != nil {
			// The row is due: the sweeper rings for it.
			r.cfg.Log.Warn("the doorbell is left to the sweeper", logging.DedupeKey, out.Row.DedupeKey,
				logging.EventID, out.Row.EventIDText(), logging.Attempts, out.Row.Attempts, "error", err)
		} else {
			failpoint.At(fpAfterRing)
		}
	}
	return res, why, nil
}
