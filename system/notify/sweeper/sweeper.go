// Package sweeper is the net beneath the message path: it moves rows that lost
// their doorbell or whose worker died.
//
// In a system without faults it moves nothing: each rescue is counted by cause
// and should be explained by a fault. It guarantees that
//
//   - a lease that is over and that nobody may claim becomes UNKNOWN, with an
//     alert (TRAP-1-2);
//   - a row that is due and that no message rings for gets a new doorbell, but
//     only while its lane's queue is shorter than the lane's due rows, with a
//     grace that doubles per row, and at a bounded rate: a slow lane is not
//     made slower by doorbells for rows that wait their turn;
//   - a DEAD row ends with its dead letter and alert, an UNKNOWN row with its
//     alert, whoever died in between;
//   - a row past its expiry becomes EXPIRED, with an alert (OB-11).
//
// Several sweepers may run at once. It must not send mails.
package sweeper

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"golang.org/x/time/rate"

	"mailproof/system/amqp"
	"mailproof/system/contract"
	"mailproof/system/delivery"
	"mailproof/system/failpoint"
	"mailproof/system/notify/alerts"
	"mailproof/system/notify/dlq"
	"mailproof/system/notify/doorbell"
	"mailproof/system/notify/logging"
	"mailproof/system/notify/metrics"
	"mailproof/system/notify/patience"
)

// Causes of a rescue.
const (
	CauseLeaseOver = "lease-over"
	CauseOverdue   = "overdue"
	CauseDead      = "dead-unstamped"
	CauseUnknown   = "unknown-unalerted"
)

// Crash points between two steps.
const (
	fpAfterLeases  = "sweeper.after-leases"
	fpAfterExpired = "sweeper.after-expired"
	fpAfterOverdue = "sweeper.after-overdue"
	fpAfterRing    = "sweeper.after-ring"
)

// Causes lists them.
func Causes() []string { return []string{CauseLeaseOver, CauseOverdue, CauseDead, CauseUnknown} }

// Store is what the sweeper needs of the row store.
type Store interface {
	LeaseOver(ctx context.Context, limit int) ([]delivery.Row, error)
	CountDue(ctx context.Context, t contract.MailType) (int64, error)
	OverdueIn(ctx context.Context, t contract.MailType, grace time.Duration, limit int) ([]delivery.Row, error)
	Unstamped(ctx context.Context, olderThan time.Duration, limit int) ([]delivery.Row, error)
	// Expire also raises [AlertsOf] the rows, in its own transaction: nobody looks
	// for an EXPIRED row that lacks its alert.
	Expire(ctx context.Context, limit int) ([]delivery.Row, error)
	UnknownRows(ctx context.Context, after delivery.After, limit int) ([]delivery.Row, error)
	DeleteAtRest(ctx context.Context, keep time.Duration, limit int) (int64, error)
}

// Alerts raises alerts.
type Alerts interface {
	Raise(ctx context.Context, a ...alerts.Alert) error
	RaiseNew(ctx context.Context, a ...alerts.Alert) (int, error)
}

// Depth says how many messages wait in a queue, and how many consumers it has.
type Depth interface {
	Depth(ctx context.Context, queue string) (ready, consumers int, err error)
}

// Lane is a mail type whose doorbells the sweeper rings.
type Lane struct {
	Type contract.MailType
	// Prefetch of each consumer of the lane's queue: so many messages can stand
	// in its window.
	Prefetch int
}

// Config of the sweeper.
type Config struct {
	Store   Store
	Ring    doorbell.Ringer
	Dead    dlq.Finisher
	Alerts  Alerts
	Depth   Depth
	Metrics *metrics.Set
	Log     *slog.Logger

	Interval time.Duration // between two rounds
	Grace    time.Duration // a row may be due for so long without a worker
	Batch    int           // rows per cause and round at most
	Rate     float64       // doorbells per second at most
	// Retention is how long rows at rest are kept.
	Retention time.Duration
	Lanes     []Lane
	// Timeout bounds one statement, RingTimeout the publishing of one duty:
	// while RabbitMQ is away leases and alerts must still be looked after.
	Timeout     time.Duration
	RingTimeout time.Duration
}

// Sweeper sweeps.
type Sweeper struct {
	cfg   Config
	limit *rate.Limiter
	seen  delivery.After // UNKNOWN rows up to here have their alert
}

// New makes a sweeper.
func New(cfg Config) *Sweeper {
	return &Sweeper{cfg: cfg, limit: rate.NewLimiter(rate.Limit(cfg.Rate), chunkSize)}
}

// chunkSize is how many doorbells are published together.
const chunkSize = 50

// Run sweeps each interval until ctx ends.
func (s *Sweeper) Run(ctx context.Context) error {
	for {
		if err := patience.Sleep(ctx, s.cfg.Interval); err != nil {
			return nil
		}
		if err := s.Round(ctx); err != nil && ctx.Err() == nil {
			s.cfg.Log.Warn("sweep not complete, the next one goes on", "error", err)
		}
	}
}

// Round does each duty once. A duty that fails does not keep the others from
// their turn.
func (s *Sweeper) Round(ctx context.Context) error {
	failed := errors.Join(s.leases(ctx), s.expired(ctx), s.dead(ctx), s.unknown(ctx), s.retention(ctx))
	for _, lane := range s.cfg.Lanes {
		failed = errors.Join(failed, s.overdue(ctx, lane))
	}
	return failed
}

type rowQuery func(ctx context.Context) ([]delivery.Row, error)

func (s *Sweeper) query(ctx context.Context, q rowQuery) ([]delivery.Row, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	return q(ctx)
}

func (s *Sweeper) leases(ctx context.Context) error {
	rows, err := s.query(ctx, func(ctx context.Context) ([]delivery.Row, error) { return s.cfg.Store.LeaseOver(ctx, s.cfg.Batch) })
	if err != nil {
		return err
	}
	if len(rows) > 0 {
		failpoint.At(fpAfterLeases)
	}
	s.note(CauseLeaseOver, rows)
	return s.alert(ctx, rows)
}

func (s *Sweeper) expired(ctx context.Context) error {
	rows, err := s.query(ctx, func(ctx context.Context) ([]delivery.Row, error) { return s.cfg.Store.Expire(ctx, s.cfg.Batch) })
	if err == nil && len(rows) > 0 {
		// The end of a mail's worth is no rescue: it is not counted as one.
		failpoint.At(fpAfterExpired)
	}
	return err
}

// alert tells of rows by the state they are in.
func (s *Sweeper) alert(ctx context.Context, rows []delivery.Row) error {
	return s.cfg.Alerts.Raise(ctx, AlertsOf(rows)...)
}

// AlertsOf are the alerts of rows that the sweeper ended, by their state.
func AlertsOf(rows []delivery.Row) []alerts.Alert {
	var told []alerts.Alert
	for _, r := range rows {
		switch r.Status {
		case delivery.Unknown:
			told = append(told, dlq.Alert(alerts.MailUnknown, r))
		case delivery.Expired:
			told = append(told, dlq.Alert(alerts.MailExpired, r))
		}
	}
	return told
}

// dead finishes rows whose worker died between the settle and the stamp. The
// grace keeps it from racing with a worker that is about to do it.
func (s *Sweeper) dead(ctx context.Context) error {
	rows, err := s.query(ctx, func(ctx context.Context) ([]delivery.Row, error) {
		return s.cfg.Store.Unstamped(ctx, s.cfg.Grace, s.cfg.Batch)
	})
	if err != nil {
		return err
	}
	s.note(CauseDead, rows)
	ctx, cancel := context.WithTimeout(ctx, s.cfg.RingTimeout)
	defer cancel()
	return s.cfg.Dead.Finish(ctx, rows...)
}

// unknown alerts for rows whose worker died between the settle and the alert.
// It goes on where the last round ended, a minute back: two transitions can be
// committed in another order than their times say. The grace keeps it from
// racing with a worker that is about to raise the alert.
func (s *Sweeper) unknown(ctx context.Context) error {
	const overlap = time.Minute
	after := s.seen
	for {
		rows, err := s.query(ctx, func(ctx context.Context) ([]delivery.Row, error) {
			return s.cfg.Store.UnknownRows(ctx, after, s.cfg.Batch)
		})
		if err != nil {
			return err
		}
		for _, r := range rows {
			if time.Since(r.ChangedAt) < s.cfg.Grace {
				return nil
			}
			fresh, err := s.cfg.Alerts.RaiseNew(ctx, dlq.Alert(alerts.MailUnknown, r))
			if err != nil {
				return err
			}
			if fresh > 0 {
				s.note(CauseUnknown, []delivery.Row{r})
			}
			after = delivery.After{ChangedAt: r.ChangedAt, ID: r.ID}
			s.seen = delivery.After{ChangedAt: r.ChangedAt.Add(-overlap)}
		}
		if len(rows) < s.cfg.Batch {
			return nil
		}
	}
}

// retention removes rows at rest in batches, so that no statement holds many
// locks (A1-09).
func (s *Sweeper) retention(ctx context.Context) error {
	for range maxBatches {
		n, err := s.deleteAtRest(ctx)
		if err != nil || n < int64(s.cfg.Batch) {
			return err
		}
	}
	return nil
}

// maxBatches bounds the deletes of one round.
const maxBatches = 20

func (s *Sweeper) deleteAtRest(ctx context.Context) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	return s.cfg.Store.DeleteAtRest(ctx, s.cfg.Retention, s.cfg.Batch)
}

// overdue rings again for one lane.
func (s *Sweeper) overdue(ctx context.Context, lane Lane) error {
	waiting, err := s.waitTheirTurn(ctx, lane)
	if err != nil || waiting {
		return err
	}
	rows, err := s.query(ctx, func(ctx context.Context) ([]delivery.Row, error) {
		return s.cfg.Store.OverdueIn(ctx, lane.Type, s.cfg.Grace, s.cfg.Batch)
	})
	if err != nil {
		return err
	}
	if len(rows) > 0 {
		failpoint.At(fpAfterOverdue)
	}
	s.note(CauseOverdue, rows)
	return s.ring(ctx, rows)
}

// waitTheirTurn reports whether there is a message for each due row: then no
// doorbell is lost, and more of them would make a slow lane slower. While
// messages wait in the queue the consumers' windows are full and count too; with
// an empty queue nobody can tell what stands in them, and the grace decides: it
// should exceed prefetch × send deadline.
func (s *Sweeper) waitTheirTurn(ctx context.Context, lane Lane) (bool, error) {
	queryCtx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	due, err := s.cfg.Store.CountDue(queryCtx, lane.Type)
	if err != nil {
		return false, err
	}
	ready, consumers, err := s.cfg.Depth.Depth(ctx, lane.Type.Queue())
	if err != nil {
		return false, err
	}
	return ready > 0 && int64(ready+consumers*lane.Prefetch) >= due, nil
}

// ring publishes in chunks, at the rate.
func (s *Sweeper) ring(ctx context.Context, rows []delivery.Row) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.RingTimeout)
	defer cancel()
	for chunk := range slices.Chunk(rows, chunkSize) {
		if err := s.limit.WaitN(ctx, len(chunk)); err != nil {
			return err
		}
		msgs := make([]amqp.Message, len(chunk))
		for i, r := range chunk {
			msgs[i] = doorbell.Main(doorbell.Of(r))
		}
		if err := s.cfg.Ring.Ring(ctx, msgs...); err != nil {
			return err
		}
		failpoint.At(fpAfterRing)
	}
	return nil
}

// note counts and logs rescues.
func (s *Sweeper) note(cause string, rows []delivery.Row) {
	s.cfg.Metrics.Rescue(cause, len(rows))
	for _, r := range rows {
		s.cfg.Log.Warn("rescued", "cause", cause, logging.DedupeKey, r.DedupeKey, logging.EventID, r.EventIDText(),
			logging.Attempts, r.Attempts, "state", string(r.Status))
	}
}
