package bridge

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"mailproof/system/amqp"
	"mailproof/system/contract"
	"mailproof/system/delivery"
	"mailproof/system/notify/alerts"
	"mailproof/system/notify/doorbell"
	"mailproof/system/notify/metrics"
	"mailproof/system/notify/patience"
)

var (
	today   = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	errDied = errors.New("the process has died")
	errNUL  = errors.New("invalid byte sequence")
)

// world keeps what outlives a process: rows, queue, parked events, alerts.
type world struct {
	rows    map[string]*delivery.Row // by dedupe key
	events  map[string]string        // event id → dedupe key
	rung    map[string]int           // messages per dedupe key
	parked  []Parked
	alerts  map[string]int
	steps   []string
	dieAt   int // before this step of a process, from 1; 0: never
	dead    bool
	cancel  context.CancelFunc
	failing map[string]int
}

func newWorld() *world {
	return &world{rows: map[string]*delivery.Row{}, events: map[string]string{}, rung: map[string]int{}, alerts: map[string]int{}, failing: map[string]int{}}
}

func (w *world) step(name string) error {
	if w.dead {
		return errDied
	}
	if len(w.steps)+1 == w.dieAt {
		w.dead = true
		w.cancel()
		return errDied
	}
	if w.failing[name] > 0 {
		w.failing[name]--
		return errors.New("away")
	}
	w.steps = append(w.steps, name)
	return nil
}

func (w *world) Insert(_ context.Context, rows []delivery.NewRow) ([]delivery.Inserted, error) {
	for _, r := range rows {
		if strings.ContainsRune(r.Recipient, 0) {
			return nil, errNUL
		}
	}
	if err := w.step("insert"); err != nil {
		return nil, err
	}
	out := make([]delivery.Inserted, len(rows))
	for i, r := range rows {
		if key, ok := w.events[r.EventID]; ok && key != r.DedupeKey {
			out[i] = delivery.Inserted{ID: w.rows[key].ID, Status: w.rows[key].Status, Clash: true}
			continue
		}
		have, ok := w.rows[r.DedupeKey]
		if !ok {
			have = &delivery.Row{ID: uuid.New(), DedupeKey: r.DedupeKey, Status: delivery.Pending, Generation: r.Generation}
			if r.Stale {
				have.Status = delivery.Expired
			}
			w.rows[r.DedupeKey], w.events[r.EventID] = have, r.DedupeKey
		}
		out[i] = delivery.Inserted{ID: have.ID, New: !ok, Status: have.Status, Published: have.PublishedAt != nil}
	}
	return out, nil
}

func (w *world) Cancel(_ context.Context, c delivery.CancelRequest) (delivery.Cancelling, error) {
	if err := w.step("cancel " + c.DedupeKey); err != nil {
		return delivery.Cancelling{}, err
	}
	have, ok := w.rows[c.DedupeKey]
	if !ok {
		have = &delivery.Row{ID: uuid.New(), DedupeKey: c.DedupeKey, Status: delivery.Cancelled, Generation: c.Generation}
		w.rows[c.DedupeKey] = have
		return delivery.Cancelling{Row: *have, Tombstone: true, Changed: true}, nil
	}
	if have.Status == delivery.Pending {
		have.Status = delivery.Cancelled
		return delivery.Cancelling{Row: *have, Changed: true}, nil
	}
	return delivery.Cancelling{Row: *have}, nil
}

func (w *world) StampPublished(_ context.Context, ids []uuid.UUID) error {
	if err := w.step("stamp"); err != nil {
		return err
	}
	for _, r := range w.rows {
		for _, id := range ids {
			if r.ID == id {
				r.PublishedAt = &today
			}
		}
	}
	return nil
}

func (w *world) Publish(_ context.Context, msgs []amqp.Message) []error {
	errs := make([]error, len(msgs))
	if err := w.step("publish"); err != nil {
		for i := range errs {
			errs[i] = amqp.ErrUnconfirmed
		}
		return errs
	}
	for _, m := range msgs {
		msg, err := contract.DecodeMessage(m.Body)
		if err != nil {
			panic(err)
		}
		w.rung[msg.DedupeKey]++
	}
	return errs
}

func (w *world) Park(_ context.Context, p []Parked) error {
	if err := w.step("park"); err != nil {
		return err
	}
	w.parked = append(w.parked, p...)
	return nil
}

func (w *world) Raise(_ context.Context, a ...alerts.Alert) error {
	if err := w.step("alert"); err != nil {
		return err
	}
	for _, one := range a {
		w.alerts[string(one.Kind)+" "+one.Subject+" "+one.Occurrence]++
	}
	return nil
}

// process runs a bridge of a new process over the records.
func (w *world) process(t *testing.T, records []Record) error {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	w.cancel, w.steps, w.dead = cancel, nil, false
	m := metrics.New()
	quick := patience.Backoff{First: time.Microsecond, Max: time.Microsecond}
	log := slog.New(slog.DiscardHandler)
	b := New(Config{
		Store: w, Parker: w, Alerts: w, Metrics: m, Log: log,
		Ring:       doorbell.Ringer{Publisher: w, Backoff: quick, Log: log, Count: m},
		Retry:      patience.Retrier{Backoff: quick, Log: log, Count: m},
		StaleAfter: 24 * time.Hour, Now: func() time.Time { return today },
		Hopeless: func(err error) bool { return errors.Is(err, errNUL) },
	})
	return b.Process(ctx, records)
}

type option func(*contract.Event)

func event(t *testing.T, offset int64, kind contract.EventType, booking string, options ...option) Record {
	e := contract.Event{
		EventID: fmt.Sprintf("event-%d", offset), EventType: kind, Version: 1, OccurredAt: today.Add(-time.Minute),
		BookingID: booking, Generation: 1, Data: contract.EventData{Recipient: "anna@example.test"},
	}
	for _, o := range options {
		o(&e)
	}
	if e.DedupeKey == "" {
		e.DedupeKey = contract.TicketKey(e.BookingID, e.Generation)
	}
	value, err := json.Marshal(e)
	require.NoError(t, err)
	return Record{Topic: "booking.events", Partition: 1, Offset: offset, Key: []byte(booking), Value: value}
}

func aged(d time.Duration) option { return func(e *contract.Event) { e.OccurredAt = today.Add(-d) } }
func generation(g int) option     { return func(e *contract.Event) { e.Generation = g } }
func sameEvent(id int) option {
	return func(e *contract.Event) { e.EventID = fmt.Sprintf("event-%d", id) }
}
func recipient(addr string) option { return func(e *contract.Event) { e.Data.Recipient = addr } }

func TestOneBatch(t *testing.T) {
	t.Parallel()
	w := newWorld()
	records := []Record{
		event(t, 1, contract.BookingConfirmed, "b1"),
		event(t, 2, contract.BookingConfirmed, "b2"),
		{Topic: "booking.events", Partition: 1, Offset: 3, Value: []byte(`{"version":2}`)},
		event(t, 4, contract.BookingCancelled, "b2"),
		event(t, 5, contract.BookingReopened, "b2", generation(2)),
		event(t, 6, contract.BookingCancelled, "b3"),
		event(t, 7, contract.BookingConfirmed, "b4", aged(25*time.Hour)),
		event(t, 8, contract.BookingCancelled, "b5", aged(1000*time.Hour)),
	}
	require.NoError(t, w.process(t, records))
	require.Equal(t, []string{"park", "alert", "insert", "alert", "cancel ticket:b2", "cancel ticket:b3", "cancel ticket:b5", "publish", "stamp"}, w.steps)
	require.Equal(t, map[string]int{"ticket:b1": 1, "ticket:b2:v2": 1}, w.rung)
	states := map[string]delivery.Status{}
	for key, r := range w.rows {
		states[key] = r.Status
	}
	require.Equal(t, map[string]delivery.Status{
		"ticket:b1": delivery.Pending, "ticket:b2": delivery.Cancelled, "ticket:b2:v2": delivery.Pending,
		"ticket:b3": delivery.Cancelled, "ticket:b4": delivery.Expired, "ticket:b5": delivery.Cancelled,
	}, states)
	require.Len(t, w.parked, 1)
	require.Contains(t, w.parked[0].Reason, "version 2 is not supported")
	require.Equal(t, int64(3), w.parked[0].Offset)
	require.Len(t, w.alerts, 2, "one for the parked event, one for the stale one: %v", w.alerts)
}

// AC1: five copies of an event, and the same intent under another event id.
func TestDuplicatesRingOnce(t *testing.T) {
	t.Parallel()
	w := newWorld()
	var records []Record
	for range 5 {
		records = append(records, event(t, 1, contract.BookingConfirmed, "b1"))
	}
	records = append(records, event(t, 9, contract.BookingConfirmed, "b1"))
	require.NoError(t, w.process(t, records))
	require.NoError(t, w.process(t, records), "the same records once more, after a stamp")
	require.Equal(t, map[string]int{"ticket:b1": 1}, w.rung)
	require.Len(t, w.rows, 1)
}

func TestOneEventForTwoMailsIsParked(t *testing.T) {
	t.Parallel()
	w := newWorld()
	require.NoError(t, w.process(t, []Record{
		event(t, 1, contract.BookingConfirmed, "b1"),
		event(t, 2, contract.BookingConfirmed, "b2", sameEvent(1)),
	}))
	require.Equal(t, map[string]int{"ticket:b1": 1}, w.rung)
	require.Len(t, w.parked, 1)
	require.Contains(t, w.parked[0].Reason, "another dedupe_key")
}

// What the database cannot hold is parked alone; its neighbours go on.
func TestDataTheDatabaseRefusesIsParkedAlone(t *testing.T) {
	t.Parallel()
	w := newWorld()
	require.NoError(t, w.process(t, []Record{
		event(t, 1, contract.BookingConfirmed, "b1"),
		event(t, 2, contract.BookingConfirmed, "b2", recipient("a\x00b@example.test")),
		event(t, 3, contract.BookingConfirmed, "b3"),
	}))
	require.Equal(t, map[string]int{"ticket:b1": 1, "ticket:b3": 1}, w.rung)
	require.Len(t, w.parked, 1)
	require.Equal(t, int64(2), w.parked[0].Offset)
}

func TestNothingIsSkippedWhileADependencyIsAway(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.failing = map[string]int{"insert": 3, "publish": 4, "stamp": 2, "park": 2, "alert": 2, "cancel ticket:b2": 2}
	require.NoError(t, w.process(t, []Record{
		event(t, 1, contract.BookingConfirmed, "b1"),
		{Topic: "booking.events", Offset: 2, Value: []byte("{")},
		event(t, 3, contract.BookingCancelled, "b2"),
	}))
	require.Equal(t, map[string]int{"ticket:b1": 1}, w.rung)
	require.NotNil(t, w.rows["ticket:b1"].PublishedAt)
	require.Len(t, w.parked, 1)
}

// A process that dies before any step has not let its offsets be committed, and
// the next process that reads the records completes them.
func TestDyingAtAnyStepLosesNothing(t *testing.T) {
	t.Parallel()
	records := []Record{
		event(t, 1, contract.BookingConfirmed, "b1"),
		{Topic: "booking.events", Offset: 2, Value: []byte("{")},
		event(t, 3, contract.BookingConfirmed, "b2", aged(48*time.Hour)),
		event(t, 4, contract.BookingCancelled, "b3"),
	}
	whole := newWorld()
	require.NoError(t, whole.process(t, records))
	for i, step := range whole.steps {
		t.Run(fmt.Sprintf("before step %d, %s", i+1, step), func(t *testing.T) {
			t.Parallel()
			w := newWorld()
			w.dieAt = i + 1
			require.Error(t, w.process(t, records), "no offset may be committed")
			w.dieAt = 0
			require.NoError(t, w.process(t, records))
			require.Equal(t, whole.alerts, onlyKeys(w.alerts))
			require.NotEmpty(t, w.parked)
			require.Len(t, w.rows, 3)
			require.NotNil(t, w.rows["ticket:b1"].PublishedAt)
			most := 1
			if step == "stamp" {
				most = 2 // confirmed, not stamped: a second doorbell, which the row absorbs
			}
			require.Equal(t, most, w.rung["ticket:b1"])
		})
	}
}

// onlyKeys: raising the same alert again makes no second row.
func onlyKeys(m map[string]int) map[string]int {
	out := map[string]int{}
	for k := range m {
		out[k] = 1
	}
	return out
}
