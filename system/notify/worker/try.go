package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"mailproof/system/amqp"
	"mailproof/system/contract"
	"mailproof/system/delivery"
	"mailproof/system/failpoint"
	"mailproof/system/mail"
	"mailproof/system/notify/alerts"
	"mailproof/system/notify/doorbell"
	"mailproof/system/notify/logging"
)

// result is one try's outcome, as the row is told of it.
type result struct {
	outcome    string // label of the metric, word of the log
	providerID string
	refusal    delivery.Refusal
	err        error
	lane       bool // the server refused the lane, not the mail
	throttled  bool // the server takes no more for now
}

// The outcomes.
const (
	accepted  = "accepted"
	transient = "transient"
	permanent = "permanent"
	ambiguous = "ambiguous"
	refused   = "lane-refused"
)

// try sends a claimed row once, settles it, and does what the settled row asks
// for. again means that the settle was refused.
func (w *Worker) try(ctx context.Context, d *amqp.Delivery, row delivery.Row, held held, pass *pass) (again bool, err error) {
	log := w.logOf(row)
	end := w.cfg.Metrics.Begin(w.lane)
	res, err := w.send(ctx, row, held.until)
	end()
	if errors.Is(err, delivery.ErrNotHeld) {
		w.cfg.Metrics.RefusedSettle(w.lane)
		log.Warn("the row was no longer held before the try, looking again")
		return true, nil
	}
	if err != nil {
		return false, err
	}
	if res.throttled {
		w.gate.hold(res.refusal.RetryAfter)
	}
	pass.report(res.lane)
	out, err := w.settle(ctx, row, res)
	if err != nil {
		return false, err
	}
	w.measure(out, res, held.since)
	log = log.With(logging.ProviderID, res.providerID, "outcome", res.outcome, "state", string(out.Row.Status))
	if !out.Applied {
		w.cfg.Metrics.RefusedSettle(w.lane)
		log.Warn("the row was no longer held, looking again", "error", res.err)
		return true, nil
	}
	if res.err != nil {
		log.Warn("not sent", "error", res.err, "wait", out.Wait.String())
	} else {
		log.Info("sent")
	}
	failpoint.At(fpAfterSettle)
	return false, w.conclude(ctx, d, out, res)
}

// measure notes for how long the row was held and, at its end, how old the mail
// is. The second is a difference of two times of the database's clock.
func (w *Worker) measure(out delivery.Outcome, res result, asked time.Time) {
	w.cfg.Metrics.Held(w.lane, w.cfg.Now().Sub(asked).Seconds())
	if res.refusal.Free && !res.lane {
		w.cfg.Metrics.Throttled(w.lane)
	}
	if out.Applied && out.Row.Status == delivery.Sent && out.Row.SentAt != nil {
		w.cfg.Metrics.Sent(w.lane, out.Row.SentAt.Sub(out.Row.CreatedAt).Seconds())
	}
}

// conclude publishes what the settled row asks for, and acks.
func (w *Worker) conclude(ctx context.Context, d *amqp.Delivery, out delivery.Outcome, res result) error {
	if !out.Row.Status.Settled() {
		if err := w.later(ctx, doorbell.Of(out.Row), out.Wait); err != nil {
			return err
		}
	} else if err := w.trace(ctx, out.Row); err != nil {
		return err
	}
	if err := w.ack(d); err != nil {
		return err
	}
	if !res.lane {
		return nil
	}
	return w.raise(ctx, alerts.Alert{
		Kind: alerts.LaneRefused, Subject: w.lane, Occurrence: w.gate.episode(),
		EventID: header(d, contract.HeaderEventID), Detail: res.err.Error(),
	})
}

// send renders at the first claim and makes one try with the stored bytes. An
// error means that no try was made: the row is no longer held, or ctx ended.
func (w *Worker) send(ctx context.Context, row delivery.Row, leaseEnd time.Time) (result, error) {
	if w.keyOver(row) {
		// This try has sent nothing: settled as such it leaves the earlier ones
		// open, and the row becomes UNKNOWN. After a crash before that the next
		// claim comes by here again.
		return refuse(permanent, ErrKeyOver), nil
	}
	if row.Channel != contract.Email {
		return refuse(permanent, fmt.Errorf("channel %s is not supported", row.Channel)), nil
	}
	bytes, err := w.rendered(ctx, row)
	switch {
	case errors.Is(err, errTemplate):
		return refuse(permanent, err), nil
	case err != nil:
		return result{}, err
	}
	failpoint.At(fpAfterRender)
	sendCtx, cancel := context.WithTimeout(ctx, w.cfg.SendDeadline)
	defer cancel()
	began := w.cfg.Now()
	id, err := w.cfg.Sender.Send(sendCtx, mail.Message{
		From: w.cfg.From, To: row.Recipient, IdempotencyKey: row.DedupeKey, Bytes: bytes,
	}, func() error {
		failpoint.At(fpBeforeDot)
		if !w.cfg.Now().Before(leaseEnd) {
			return ErrLeaseOver
		}
		return nil
	})
	res := classify(id, err)
	w.cfg.Metrics.Send(w.lane, res.outcome, w.cfg.Now().Sub(began).Seconds())
	if err == nil {
		failpoint.At(fpAfterSend)
	} else {
		failpoint.At(fpAfterFailure)
	}
	return res, nil
}

// keyOver: a try before this one is open, and the key is too old to tell. The
// claim's own time is the database's, as is that of the first claim.
func (w *Worker) keyOver(row delivery.Row) bool {
	return w.cfg.KeyLifetime > 0 && row.Unsettled > 1 && row.FirstClaimedAt != nil &&
		row.ChangedAt.Sub(*row.FirstClaimedAt) >= w.cfg.KeyLifetime
}

var errTemplate = errors.New("the mail cannot be rendered")

// rendered is the mail's bytes: stored once, the same ever after.
func (w *Worker) rendered(ctx context.Context, row delivery.Row) ([]byte, error) {
	if len(row.Rendered) > 0 {
		return row.Rendered, nil
	}
	fresh, err := w.cfg.Render(row)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errTemplate, err)
	}
	var stored []byte
	err = w.cfg.Retry.Do(ctx, "store rendered mail", notHeld, func(ctx context.Context) error {
		var err error
		stored, err = w.cfg.Store.StoreRendered(ctx, row.ID, row.Token, fresh)
		return err
	})
	return stored, err
}

func notHeld(err error) bool { return errors.Is(err, delivery.ErrNotHeld) }

func refuse(outcome string, err error) result {
	return result{outcome: outcome, err: err, refusal: delivery.Refusal{Err: logging.Plain(err.Error(), 1000)}}
}

// classify turns the sender's answer into what the row is told. An error of an
// unknown kind is ambiguous: to call it a refusal could lose or double a mail.
func classify(id string, err error) result {
	if err == nil {
		return result{outcome: accepted, providerID: logging.Plain(id, 500)}
	}
	var (
		laneErr *mail.LaneError
		temp    *mail.TransientError
		perm    *mail.PermanentError
		amb     *mail.AmbiguousError
	)
	switch {
	case errors.As(err, &amb):
		return refuse(ambiguous, err)
	case errors.As(err, &laneErr):
		r := refuse(refused, err)
		r.lane = true
		r.refusal.Free = true
		r.refusal.RetryAfter = laneErr.RetryAfter
		return r
	case errors.As(err, &perm):
		return refuse(permanent, err)
	case errors.As(err, &temp):
		r := refuse(transient, err)
		r.refusal.RetryAfter, r.refusal.Free = temp.RetryAfter, temp.Free
		r.throttled = temp.Free && temp.Code != 0 // else it was never tried
		return r
	default:
		return refuse(ambiguous, fmt.Errorf("unclassified: %w", err))
	}
}

// settle tells the row. It repeats until the database answers: what the server
// said must not be forgotten. A repetition of a settle that had been applied is
// refused by the row and found settled when it is asked again.
func (w *Worker) settle(ctx context.Context, row delivery.Row, res result) (delivery.Outcome, error) {
	var out delivery.Outcome
	err := w.cfg.Retry.Do(ctx, "settle", noRow, func(ctx context.Context) error {
		var err error
		switch res.outcome {
		case accepted:
			out, err = w.cfg.Store.Accepted(ctx, row.ID, row.Token, res.providerID)
		case permanent:
			out, err = w.cfg.Store.Permanent(ctx, row.ID, row.Token, res.refusal)
		case ambiguous:
			out, err = w.cfg.Store.Ambiguous(ctx, row.ID, row.Token, res.refusal.Err)
		case refused:
			r := res.refusal
			if r.RetryAfter == 0 {
				r.RetryAfter = w.gate.left()
			}
			out, err = w.cfg.Store.Transient(ctx, row.ID, row.Token, r)
		default:
			out, err = w.cfg.Store.Transient(ctx, row.ID, row.Token, res.refusal)
		}
		return err
	})
	if noRow(err) {
		// Deleted under our hands: looking again finds no row and parks the
		// message.
		return delivery.Outcome{}, nil
	}
	return out, err
}
