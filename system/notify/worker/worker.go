// Package worker turns one delivery of a lane's queue into at most one try to
// send a mail.
//
// What it guarantees, whatever dies and whenever:
//
//   - A delivery is acked only when its row is terminal or UNKNOWN, or after a
//     successor message is confirmed. Order: settle → publish → ack (AC3,
//     TRAP-M6-9). A crash between two of them brings the delivery back, and the
//     row says what is left to do.
//   - Nothing is decided from the message: it is a doorbell.
//   - The mail's bytes are those stored at the first claim (OB-03).
//   - The final dot is not sent once the lease is over, judged by the monotonic
//     clock right before it (a process that was stopped and continued sent in
//     13 of 20 tries without this).
//   - A server that takes no more for now (429) is left alone by the whole lane
//     for as long as it asked, a minute at most, and the mail has lost no try
//     by it (OB-10).
//   - While Postgres or RabbitMQ is away the delivery is held: never acked,
//     never requeued (AC8, TRAP-M6-2).
//   - Every branch ends in an ack, a crash or the end of the process (M6-18,
//     TRAP-M6-11).
//
// It must not import the SMTP client, Kafka or the database driver.
package worker

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
	"mailproof/system/mail"
	"mailproof/system/notify/alerts"
	"mailproof/system/notify/dlq"
	"mailproof/system/notify/doorbell"
	"mailproof/system/notify/logging"
	"mailproof/system/notify/metrics"
	"mailproof/system/notify/patience"
)

// Crash points between two steps.
const (
	fpAfterDelivery = "worker.after-delivery"
	fpAfterClaim    = "worker.after-claim"
	fpAfterRender   = "worker.after-render"
	fpBeforeDot     = "worker.before-dot"
	fpAfterSend     = "worker.after-250"
	fpAfterFailure  = "worker.after-failure"
	fpAfterSettle   = "worker.after-settle"
	fpAfterPublish  = "worker.after-publish"
	fpAfterTrace    = "worker.after-trace"
	fpAfterPark     = "worker.after-park"
	fpAfterAck      = "worker.after-ack"
)

// ErrLeaseOver stops a send before its final dot: the row may be another
// worker's by now.
var ErrLeaseOver = errors.New("the lease on the row is over")

// ErrKeyOver stops a try under a key that the receiver may have forgotten: an
// earlier one may have been accepted, and this one would be a second mail.
var ErrKeyOver = errors.New("the receiver may have forgotten the key of an earlier try")

// Store is what a worker needs of the row store.
type Store interface {
	Claim(ctx context.Context, id uuid.UUID) (delivery.Claim, error)
	StoreRendered(ctx context.Context, id uuid.UUID, token int64, mail []byte) ([]byte, error)
	Accepted(ctx context.Context, id uuid.UUID, token int64, providerID string) (delivery.Outcome, error)
	Transient(ctx context.Context, id uuid.UUID, token int64, r delivery.Refusal) (delivery.Outcome, error)
	Permanent(ctx context.Context, id uuid.UUID, token int64, r delivery.Refusal) (delivery.Outcome, error)
	Ambiguous(ctx context.Context, id uuid.UUID, token int64, reason string) (delivery.Outcome, error)
	Get(ctx context.Context, id uuid.UUID) (delivery.Row, error)
}

// Alerts raises alerts.
type Alerts interface {
	Raise(ctx context.Context, a ...alerts.Alert) error
}

// Limiter holds a lane to a rate (token bucket, M6-17): each try takes a token.
type Limiter interface {
	Wait(ctx context.Context) error
	// Return gives a token back that no try used: 50,000 mails of a campaign that
	// was stopped are laid aside as fast as the database can, not at the rate at
	// which they would have been sent.
	Return()
}

// Config of the workers of one lane.
type Config struct {
	Type contract.MailType
	// Tiers are the delay tiers of the lane, rising.
	Tiers []time.Duration
	// SendDeadline is the hard limit of one try.
	SendDeadline time.Duration
	// From is the sender address.
	From string

	Store  Store
	Sender mail.EmailSender
	// Render makes the mail's bytes from a row; an error is the row's fault and
	// permanent.
	Render func(delivery.Row) ([]byte, error)
	Ring   doorbell.Ringer
	Dead   dlq.Finisher
	Alerts Alerts
	Retry  patience.Retrier
	Limit  Limiter // nil: none
	// KeyLifetime is set where the receiver deduplicates: how long after the
	// first claim a mail whose outcome is open may be sent again (OB-09). 0: the
	// receiver knows no keys, and this bound does not apply.
	KeyLifetime time.Duration
	Metrics     *metrics.Set
	Log         *slog.Logger
	// Pause is how long a lane that the server refuses waits: First after the
	// first refusal, doubled up to Max.
	Pause patience.Backoff
	// Now is the monotonic clock; nil means time.Now.
	Now func() time.Time
}

// Worker handles the deliveries of one lane; its Handle may run side by side.
type Worker struct {
	cfg  Config
	lane string
	gate *gate
}

// New makes the worker of a lane.
func New(cfg Config) *Worker {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	lane := cfg.Type.Lane()
	return &Worker{cfg: cfg, lane: lane, gate: newGate(cfg.Pause, cfg.Now, func(paused bool) { cfg.Metrics.LanePaused(lane, paused) })}
}

// Handle works off one delivery. It returns without an ack only when ctx ends:
// the broker delivers it again.
func (w *Worker) Handle(ctx context.Context, d *amqp.Delivery) {
	w.cfg.Metrics.Delivery(w.lane, d.Redelivered || d.DeliveryCount > 0)
	failpoint.At(fpAfterDelivery)
	if err := w.handle(ctx, d); err != nil {
		w.cfg.Log.Warn("delivery left to the broker", "message_id", d.MessageID, "error", err)
	}
}

func (w *Worker) handle(ctx context.Context, d *amqp.Delivery) error {
	msg, id, err := decode(d.Body)
	if err != nil {
		return w.unreadable(ctx, d, err)
	}
	// A settle that is refused makes the message newly delivered: the row has
	// moved on and is asked again.
	for {
		again, err := w.visit(ctx, d, id, msg)
		if err != nil || !again {
			return err
		}
	}
}

func decode(body []byte) (contract.Message, uuid.UUID, error) {
	msg, err := contract.DecodeMessage(body)
	if err != nil {
		return msg, uuid.Nil, err
	}
	id, err := uuid.Parse(msg.NotificationID)
	if err != nil {
		return msg, uuid.Nil, fmt.Errorf("message body: notificationId: %w", err)
	}
	return msg, id, nil
}

// visit asks the row once and does what it says. again means that the row was
// taken from this worker while it sent.
func (w *Worker) visit(ctx context.Context, d *amqp.Delivery, id uuid.UUID, msg contract.Message) (again bool, err error) {
	if w.cfg.Limit != nil {
		began := w.cfg.Now()
		if err := w.cfg.Limit.Wait(ctx); err != nil {
			return false, err
		}
		w.cfg.Metrics.RateLimited(w.lane, w.cfg.Now().Sub(began).Seconds())
	}
	// After the wait for a token: the lane may have been closed meanwhile.
	pass, err := w.gate.enter(ctx)
	if err != nil {
		return false, err
	}
	defer pass.leave() // after a try it has ended already
	claim, held, err := w.claim(ctx, id)
	if w.cfg.Limit != nil && (err != nil || claim.Row == nil) {
		w.cfg.Limit.Return()
	}
	if errors.Is(err, delivery.ErrNoRow) {
		return false, w.orphan(ctx, d, id)
	}
	if err != nil {
		return false, err
	}
	if claim.Row == nil {
		return false, w.notWon(ctx, d, id, msg, claim)
	}
	w.cfg.Metrics.Claim(w.lane, "won")
	failpoint.At(fpAfterClaim)
	return w.try(ctx, d, *claim.Row, held, pass)
}

// claim asks for the row. The lease is counted from before the question, so it
// ends here no later than in the database.
func (w *Worker) claim(ctx context.Context, id uuid.UUID) (delivery.Claim, held, error) {
	var claim delivery.Claim
	var asked time.Time
	err := w.cfg.Retry.Do(ctx, "claim", noRow, func(ctx context.Context) error {
		var err error
		asked = w.cfg.Now()
		claim, err = w.cfg.Store.Claim(ctx, id)
		return err
	})
	return claim, held{since: asked, until: asked.Add(claim.LeaseLeft)}, err
}

// held is the time of a lease as this process counts it, on the monotonic clock.
type held struct{ since, until time.Time }

func noRow(err error) bool { return errors.Is(err, delivery.ErrNoRow) }

// notWon acks a settled row's message, and sends any other round through the
// tier that covers the wait.
func (w *Worker) notWon(ctx context.Context, d *amqp.Delivery, id uuid.UUID, msg contract.Message, c delivery.Claim) error {
	if !c.Status.Settled() {
		w.cfg.Metrics.Claim(w.lane, "later")
		bell, err := doorbell.Again(id, msg, w.cfg.Type, header(d, contract.HeaderEventID), c.Attempts)
		if err != nil {
			return err
		}
		if err := w.later(ctx, bell, c.Wait); err != nil {
			return err
		}
		return w.ack(d)
	}
	w.cfg.Metrics.Claim(w.lane, "settled")
	// These must leave a trace outside the row. A worker that settled and died
	// may not have left it, and the claim itself ends some rows.
	switch c.Status {
	case delivery.Dead, delivery.Unknown, delivery.Expired:
		if err := w.traceAgain(ctx, id); err != nil {
			return err
		}
	}
	return w.ack(d)
}

func (w *Worker) traceAgain(ctx context.Context, id uuid.UUID) error {
	var row delivery.Row
	err := w.cfg.Retry.Do(ctx, "read row", noRow, func(ctx context.Context) error {
		var err error
		row, err = w.cfg.Store.Get(ctx, id)
		return err
	})
	switch {
	case noRow(err):
		return nil
	case err != nil:
		return err
	case row.Status == delivery.Dead && row.DLQPublishedAt != nil:
		return nil
	}
	return w.trace(ctx, row)
}

// trace leaves what a settled state must leave outside the row.
func (w *Worker) trace(ctx context.Context, row delivery.Row) (err error) {
	switch row.Status {
	case delivery.Dead:
		err = w.cfg.Dead.Finish(ctx, row)
	case delivery.Unknown:
		err = w.raise(ctx, dlq.Alert(alerts.MailUnknown, row))
	case delivery.Expired:
		err = w.raise(ctx, dlq.Alert(alerts.MailExpired, row))
	default:
		return nil
	}
	if err == nil {
		failpoint.At(fpAfterTrace)
	}
	return err
}

func (w *Worker) raise(ctx context.Context, a alerts.Alert) error {
	return w.cfg.Retry.Do(ctx, "alert", nil, func(ctx context.Context) error { return w.cfg.Alerts.Raise(ctx, a) })
}

// later publishes the successor of a message.
func (w *Worker) later(ctx context.Context, b doorbell.Bell, wait time.Duration) error {
	tier := doorbell.Tier(w.cfg.Tiers, wait)
	if err := w.cfg.Ring.Ring(ctx, doorbell.Later(b, tier)); err != nil {
		return err
	}
	w.cfg.Metrics.RetryPublish(contract.RetryQueue(w.cfg.Type, tier))
	failpoint.At(fpAfterPublish)
	return nil
}

// ack settles the delivery. From a session that has ended it goes nowhere: the
// copy that comes again finds the row as it is now.
func (w *Worker) ack(d *amqp.Delivery) error {
	err := d.Ack()
	w.cfg.Metrics.Ack(w.lane, err != nil)
	if err != nil && !errors.Is(err, amqp.ErrStaleSession) {
		return fmt.Errorf("ack: %w", err)
	}
	failpoint.At(fpAfterAck)
	return nil
}

// unreadable parks a message that no repetition repairs (A2-12).
func (w *Worker) unreadable(ctx context.Context, d *amqp.Delivery, cause error) error {
	return w.park(ctx, d, "message/"+d.MessageID, cause.Error())
}

// orphan parks a message whose row is gone: a row is committed before its first
// message, so somebody deleted it (C-05).
func (w *Worker) orphan(ctx context.Context, d *amqp.Delivery, id uuid.UUID) error {
	return w.park(ctx, d, "notification/"+id.String(), "no row of this id")
}

func (w *Worker) park(ctx context.Context, d *amqp.Delivery, subject, reason string) error {
	if err := w.cfg.Ring.Ring(ctx, doorbell.Unreadable(w.cfg.Type, d.Body, reason)); err != nil {
		return err
	}
	w.cfg.Metrics.DeadLetter(w.lane, "unreadable")
	failpoint.At(fpAfterPark)
	err := w.raise(ctx, alerts.Alert{
		Kind: alerts.MessageUndecodable, Subject: subject, Occurrence: d.Queue, Detail: reason,
	})
	if err != nil {
		return err
	}
	return w.ack(d)
}

func header(d *amqp.Delivery, name string) string {
	s, _ := d.Headers[name].(string)
	return s
}

func (w *Worker) logOf(r delivery.Row) *slog.Logger {
	return w.cfg.Log.With(logging.DedupeKey, r.DedupeKey, logging.EventID, r.EventIDText(), logging.Attempts, r.Attempts)
}
