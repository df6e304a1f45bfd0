// Package bridge carries events from Kafka to the row store and RabbitMQ.
//
// For each batch the order is: insert the rows → publish their doorbells
// (confirmed and mandatory) → stamp them → commit the offsets. A crash between
// two of these steps is made good by reading the batch again: the insert finds
// the rows, and only rows without a stamp are published again (M6-18, A2-10,
// TRAP-M6-7, TRAP-2-1). It guarantees:
//
//   - An offset is committed only when everything before it in its partition is
//     in the table and, where it asks for a mail, confirmed by RabbitMQ.
//   - While Postgres or RabbitMQ is away nothing is skipped and nothing is
//     committed.
//   - An event that nobody can read is parked with its reason and alerted; the
//     partition goes on (A2-12, TRAP-2-5, TRAP-2-6).
//   - An event that asks for a mail and is older than a bound leaves an EXPIRED
//     row and an alert instead of a mail (A2-13, CASE-3). Cancels are never
//     stale.
//
// It must not import the AMQP or database client.
package bridge

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"time"

	"github.com/google/uuid"

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

// Crash points between two steps.
const (
	fpAfterPoll    = "bridge.after-poll"
	fpAfterPark    = "bridge.after-park"
	fpAfterRows    = "bridge.after-rows"
	fpAfterInsert  = "bridge.after-insert"
	fpAfterCancel  = "bridge.after-cancel"
	fpAfterPublish = "bridge.after-publish"
	fpAfterStamp   = "bridge.after-stamp"
	fpAfterCommit  = "bridge.after-commit"
)

// Store is what the bridge needs of the row store.
type Store interface {
	Insert(ctx context.Context, rows []delivery.NewRow) ([]delivery.Inserted, error)
	Cancel(ctx context.Context, c delivery.CancelRequest) (delivery.Cancelling, error)
	StampPublished(ctx context.Context, ids []uuid.UUID) error
}

// Record is one record of the topic.
type Record struct {
	Topic     string
	Partition int32
	Offset    int64
	Key       []byte
	Value     []byte
}

// Parked is a record with the reason why it cannot be read.
type Parked struct {
	Record
	Reason string
}

// Parker keeps unreadable records. Parking the same one again changes nothing.
type Parker interface {
	Park(ctx context.Context, p []Parked) error
}

// Alerts raises alerts.
type Alerts interface {
	Raise(ctx context.Context, a ...alerts.Alert) error
}

// Config of the bridge.
type Config struct {
	Store   Store
	Parker  Parker
	Alerts  Alerts
	Ring    doorbell.Ringer
	Retry   patience.Retrier
	Metrics *metrics.Set
	Log     *slog.Logger
	// Hopeless names database errors that no repetition repairs: the event's
	// own data is at fault (a NUL in a name), and it is parked. nil: none.
	Hopeless func(error) bool
	// StaleAfter is the age from which an event is too old for its mail.
	StaleAfter time.Duration
	// Now is the wall clock, compared with the event's occurred_at; nil means
	// time.Now.
	Now func() time.Time
}

// Bridge processes batches.
type Bridge struct{ cfg Config }

// New makes a bridge.
func New(cfg Config) *Bridge {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &Bridge{cfg: cfg}
}

// batch is the records of one poll, sorted by what they ask for. Within one
// booking the order of events is kept where it matters: inserts come first and
// cancels after them in order, and a cancel touches its own generation and older
// ones only, so a reopening that followed it is safe.
type batch struct {
	parked  []Parked
	mails   []mailEvent
	cancels []cancelEvent
}

type mailEvent struct {
	record Record
	row    delivery.NewRow
}

type cancelEvent struct {
	record Record
	event  contract.Event
}

// Process carries one batch to the point where its offsets may be committed. It
// returns an error only when ctx ends; then nothing may be committed.
func (b *Bridge) Process(ctx context.Context, records []Record) error {
	failpoint.At(fpAfterPoll)
	batch := b.sort(records)
	if err := b.park(ctx, batch.parked...); err != nil {
		return err
	}
	bells, err := b.insert(ctx, batch.mails)
	if err != nil {
		return err
	}
	failpoint.At(fpAfterInsert)
	for _, c := range batch.cancels {
		if err := b.cancel(ctx, c, bells); err != nil {
			return err
		}
	}
	failpoint.At(fpAfterCancel)
	if err := b.publish(ctx, bells); err != nil {
		return err
	}
	b.cfg.Metrics.Bridge("published", len(bells))
	return nil
}

func (b *Bridge) sort(records []Record) batch {
	var out batch
	for _, r := range records {
		e, err := contract.DecodeEvent(r.Value)
		switch {
		case err != nil:
			out.parked = append(out.parked, Parked{Record: r, Reason: err.Error()})
		case e.Generation > math.MaxInt32:
			out.parked = append(out.parked, Parked{Record: r, Reason: fmt.Sprintf("generation %d is out of range", e.Generation)})
		case !e.EventType.CreatesMail():
			out.cancels = append(out.cancels, cancelEvent{record: r, event: e})
		default:
			row, err := b.newRow(e)
			if err != nil {
				out.parked = append(out.parked, Parked{Record: r, Reason: err.Error()})
				continue
			}
			out.mails = append(out.mails, mailEvent{record: r, row: row})
		}
	}
	return out
}

// newRow is the mail that an event asks for.
func (b *Bridge) newRow(e contract.Event) (delivery.NewRow, error) {
	payload, err := json.Marshal(e.Data)
	if err != nil {
		return delivery.NewRow{}, fmt.Errorf("data: %w", err)
	}
	return delivery.NewRow{
		DedupeKey: e.DedupeKey, BookingID: e.BookingID, EventID: e.EventID,
		Type: contract.TicketConfirmation, Channel: contract.Email,
		Recipient: e.Data.Recipient, Payload: payload, Generation: e.Generation,
		Stale: b.cfg.Now().Sub(e.OccurredAt) > b.cfg.StaleAfter,
	}, nil
}

func (b *Bridge) park(ctx context.Context, parked ...Parked) error {
	if len(parked) == 0 {
		return nil
	}
	for i := range parked {
		parked[i].Reason = logging.Plain(parked[i].Reason, 1000)
	}
	err := b.cfg.Retry.Do(ctx, "park events", nil, func(ctx context.Context) error { return b.cfg.Parker.Park(ctx, parked) })
	if err != nil {
		return err
	}
	failpoint.At(fpAfterPark)
	told := make([]alerts.Alert, len(parked))
	for i, p := range parked {
		told[i] = alerts.Alert{
			Kind: alerts.EventParked, Subject: fmt.Sprintf("%s/%d/%d", p.Topic, p.Partition, p.Offset),
			Occurrence: digest(p.Value), Detail: p.Reason,
		}
	}
	b.cfg.Metrics.Bridge("parked", len(parked))
	return b.raise(ctx, told...)
}

// insert makes the rows that are missing and returns the doorbells to ring: one
// for each row that waits and is not stamped.
func (b *Bridge) insert(ctx context.Context, mails []mailEvent) (map[uuid.UUID]doorbell.Bell, error) {
	bells := map[uuid.UUID]doorbell.Bell{}
	if len(mails) == 0 {
		return bells, nil
	}
	found, err := b.insertRows(ctx, mails)
	switch {
	case err == nil:
	case b.hopeless(err) && len(mails) == 1:
		return bells, b.park(ctx, Parked{Record: mails[0].record, Reason: err.Error()})
	case b.hopeless(err):
		return b.insertEach(ctx, mails)
	default:
		return nil, err
	}
	failpoint.At(fpAfterRows)
	for i, f := range found {
		if err := b.accept(ctx, mails[i], f, bells); err != nil {
			return nil, err
		}
	}
	return bells, nil
}

// insertEach finds out which event of a batch the database cannot hold, so that
// it alone is parked.
func (b *Bridge) insertEach(ctx context.Context, mails []mailEvent) (map[uuid.UUID]doorbell.Bell, error) {
	all := map[uuid.UUID]doorbell.Bell{}
	for i := range mails {
		bells, err := b.insert(ctx, mails[i:i+1])
		if err != nil {
			return nil, err
		}
		maps.Copy(all, bells)
	}
	return all, nil
}

func (b *Bridge) insertRows(ctx context.Context, mails []mailEvent) ([]delivery.Inserted, error) {
	rows := make([]delivery.NewRow, len(mails))
	for i, m := range mails {
		rows[i] = m.row
	}
	var found []delivery.Inserted
	err := b.cfg.Retry.Do(ctx, "insert rows", b.hopeless, func(ctx context.Context) error {
		var err error
		found, err = b.cfg.Store.Insert(ctx, rows)
		if err == nil && len(found) != len(rows) {
			err = fmt.Errorf("insert answered for %d of %d rows", len(found), len(rows))
		}
		return err
	})
	return found, err
}

// accept takes note of one inserted row.
func (b *Bridge) accept(ctx context.Context, m mailEvent, f delivery.Inserted, bells map[uuid.UUID]doorbell.Bell) error {
	b.note(m.row, f)
	switch {
	case f.Clash:
		return b.park(ctx, Parked{Record: m.record, Reason: "its event_id stands on a mail with another dedupe_key"})
	case m.row.Stale && f.Status == delivery.Expired:
		// Also when it is not new: the first reader may have died before this.
		b.cfg.Metrics.Bridge("stale", 1)
		return b.raise(ctx, alerts.Alert{
			Kind: alerts.MailExpired, Subject: m.row.DedupeKey, Occurrence: "stale event", EventID: m.row.EventID,
			Detail: fmt.Sprintf("the event is older than %s", b.cfg.StaleAfter),
		})
	case f.NeedsDoorbell():
		bells[f.ID] = bellOf(f.ID, m.row)
	}
	return nil
}

func (b *Bridge) hopeless(err error) bool { return b.cfg.Hopeless != nil && b.cfg.Hopeless(err) }

func (b *Bridge) note(row delivery.NewRow, f delivery.Inserted) {
	result := "duplicate"
	if f.New {
		result = "inserted"
	}
	b.cfg.Metrics.Bridge(result, 1)
	b.cfg.Log.Info("event", "result", result, logging.DedupeKey, row.DedupeKey, logging.EventID, row.EventID, "state", string(f.Status))
}

func bellOf(id uuid.UUID, row delivery.NewRow) doorbell.Bell {
	return doorbell.Bell{
		ID: id, DedupeKey: row.DedupeKey, EventID: row.EventID, BookingID: row.BookingID,
		Type: row.Type, Channel: row.Channel, Recipient: row.Recipient, Payload: row.Payload,
	}
}

// cancel applies one cancel event; a bell for a row that it settled is not
// rung.
func (b *Bridge) cancel(ctx context.Context, c cancelEvent, bells map[uuid.UUID]doorbell.Bell) error {
	e := c.event
	var done delivery.Cancelling
	err := b.cfg.Retry.Do(ctx, "cancel", b.hopeless, func(ctx context.Context) error {
		var err error
		done, err = b.cfg.Store.Cancel(ctx, delivery.CancelRequest{
			BookingID: e.BookingID, DedupeKey: e.DedupeKey, Generation: e.Generation,
			Type: contract.TicketConfirmation, Channel: contract.Email, Recipient: e.Data.Recipient,
		})
		return err
	})
	if b.hopeless(err) {
		return b.park(ctx, Parked{Record: c.record, Reason: err.Error()})
	}
	if err != nil {
		return err
	}
	b.cfg.Metrics.Bridge("cancelled", 1)
	b.cfg.Log.Info("cancel", logging.DedupeKey, e.DedupeKey, logging.EventID, e.EventID,
		"state", string(done.Row.Status), "tombstone", done.Tombstone, "changed", done.Changed)
	for _, row := range append(done.Others, done.Row) {
		if row.Status.Settled() {
			delete(bells, row.ID)
		}
		if row.Status != delivery.Unknown {
			continue
		}
		if err := b.raise(ctx, dlq.Alert(alerts.MailUnknown, row)); err != nil {
			return err
		}
	}
	return nil
}

// publish rings the bells and stamps the rows.
func (b *Bridge) publish(ctx context.Context, bells map[uuid.UUID]doorbell.Bell) error {
	if len(bells) == 0 {
		return nil
	}
	ids := make([]uuid.UUID, 0, len(bells))
	msgs := make([]amqp.Message, 0, len(bells))
	for id, bell := range bells {
		ids, msgs = append(ids, id), append(msgs, doorbell.Main(bell))
	}
	if err := b.cfg.Ring.Ring(ctx, msgs...); err != nil {
		return err
	}
	failpoint.At(fpAfterPublish)
	err := b.cfg.Retry.Do(ctx, "stamp rows", nil, func(ctx context.Context) error { return b.cfg.Store.StampPublished(ctx, ids) })
	if err != nil {
		return err
	}
	failpoint.At(fpAfterStamp)
	return nil
}

func (b *Bridge) raise(ctx context.Context, a ...alerts.Alert) error {
	return b.cfg.Retry.Do(ctx, "alert", nil, func(ctx context.Context) error { return b.cfg.Alerts.Raise(ctx, a...) })
}
