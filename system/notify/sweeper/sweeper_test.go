package sweeper

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"mailproof/system/amqp"
	"mailproof/system/contract"
	"mailproof/system/delivery"
	"mailproof/system/notify/alerts"
	"mailproof/system/notify/dlq"
	"mailproof/system/notify/doorbell"
	"mailproof/system/notify/metrics"
	"mailproof/system/notify/patience"
)

type world struct {
	over, expired, dead, unknown, late []delivery.Row
	due                                int64
	ready, consumers                   int
	failLeases                         bool

	published []amqp.Message
	alerts    map[string]bool
	stamped   []uuid.UUID
	grace     time.Duration
}

func (w *world) LeaseOver(context.Context, int) ([]delivery.Row, error) {
	if w.failLeases {
		return nil, errors.New("away")
	}
	return w.over, nil
}
func (w *world) Expire(context.Context, int) ([]delivery.Row, error) { return w.expired, nil }
func (w *world) CountDue(context.Context, contract.MailType) (int64, error) {
	return w.due, nil
}

func (w *world) OverdueIn(_ context.Context, _ contract.MailType, grace time.Duration, limit int) ([]delivery.Row, error) {
	w.grace = grace
	return w.late[:min(limit, len(w.late))], nil
}

func (w *world) Unstamped(context.Context, time.Duration, int) ([]delivery.Row, error) {
	return w.dead, nil
}

func (w *world) UnknownRows(_ context.Context, after delivery.After, limit int) ([]delivery.Row, error) {
	var out []delivery.Row
	for _, r := range w.unknown {
		if r.ChangedAt.After(after.ChangedAt) && len(out) < limit {
			out = append(out, r)
		}
	}
	return out, nil
}

func (w *world) DeleteAtRest(context.Context, time.Duration, int) (int64, error) { return 0, nil }

func (w *world) StampDLQ(_ context.Context, rows []delivery.Row) error {
	for _, r := range rows {
		w.stamped = append(w.stamped, r.ID)
	}
	return nil
}

func (w *world) Depth(context.Context, string) (int, int, error) { return w.ready, w.consumers, nil }

func (w *world) Publish(_ context.Context, m []amqp.Message) []error {
	w.published = append(w.published, m...)
	return make([]error, len(m))
}

func (w *world) Raise(ctx context.Context, a ...alerts.Alert) error {
	_, err := w.RaiseNew(ctx, a...)
	return err
}

func (w *world) RaiseNew(_ context.Context, a ...alerts.Alert) (int, error) {
	fresh := 0
	for _, one := range a {
		key := string(one.Kind) + " " + one.Subject + " " + one.Occurrence
		if !w.alerts[key] {
			fresh++
			w.alerts[key] = true
		}
	}
	return fresh, nil
}

func rows(status delivery.Status, n int, age time.Duration) []delivery.Row {
	out := make([]delivery.Row, n)
	for i := range out {
		out[i] = delivery.Row{
			ID: uuid.New(), DedupeKey: "ticket:" + strconv.Itoa(i), Type: contract.TicketConfirmation, Channel: contract.Email,
			Status: status, Version: 3, ChangedAt: time.Now().Add(-age).Add(time.Duration(i) * time.Millisecond),
		}
	}
	return out
}

func (w *world) sweeper(m *metrics.Set) *Sweeper {
	w.alerts = map[string]bool{}
	log := slog.New(slog.DiscardHandler)
	quick := patience.Backoff{First: time.Microsecond, Max: time.Microsecond}
	retry := patience.Retrier{Backoff: quick, Log: log, Count: m}
	ring := doorbell.Ringer{Publisher: w, Backoff: quick, Log: log, Count: m}
	return New(Config{
		Store: w, Ring: ring, Alerts: w, Depth: w, Metrics: m, Log: log,
		Dead:     dlq.Finisher{Store: w, Ring: ring, Alerts: w, Retry: retry, Count: m},
		Interval: time.Second, Grace: time.Minute, Batch: 100, Rate: 1e6, Retention: time.Hour,
		Lanes: []Lane{{Type: contract.TicketConfirmation, Prefetch: 10}}, Timeout: time.Second, RingTimeout: 10 * time.Second,
	})
}

func rescues(t *testing.T, m *metrics.Set) map[string]float64 {
	t.Helper()
	out := map[string]float64{}
	families, err := m.Registry.Gather()
	require.NoError(t, err)
	for _, f := range families {
		if f.GetName() != "notifyd_sweeper_rescues_total" {
			continue
		}
		for _, v := range f.GetMetric() {
			out[v.GetLabel()[0].GetValue()] = v.GetCounter().GetValue()
		}
	}
	return out
}

func TestNothingToDoMovesNothing(t *testing.T) {
	t.Parallel()
	w, m := &world{}, metrics.New()
	require.NoError(t, w.sweeper(m).Round(t.Context()))
	require.Empty(t, rescues(t, m))
	require.Empty(t, w.published)
}

func TestEachCauseIsRescuedAndCounted(t *testing.T) {
	t.Parallel()
	w, m := &world{
		over: append(rows(delivery.Unknown, 2, time.Hour), rows(delivery.Sent, 1, time.Hour)...), dead: rows(delivery.Dead, 3, time.Hour),
		unknown: rows(delivery.Unknown, 4, time.Hour), late: rows(delivery.Pending, 5, time.Hour), due: 5, expired: rows(delivery.Expired, 1, time.Hour),
	}, metrics.New()
	require.NoError(t, w.sweeper(m).Round(t.Context()))
	require.Equal(t, map[string]float64{CauseLeaseOver: 3, CauseDead: 3, CauseUnknown: 2, CauseOverdue: 5}, rescues(t, m),
		"two of the four unknown rows had just been alerted as leases over")
	require.Len(t, w.stamped, 3)
	require.Len(t, w.published, 8)
	require.False(t, w.alerts["mail-expired ticket:0 version 3"], "the store raises it, with the transition")
	require.Equal(t, time.Minute, w.grace)
}

// A lane that is merely slow gets no more doorbells than it has (CASE-2).
func TestRowsThatWaitTheirTurnAreLeftAlone(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		due       int64
		ready     int
		consumers int
		rung      int
	}{
		"a message for each due row":      {due: 5, ready: 5, rung: 0},
		"more messages than due rows":     {due: 5, ready: 9, rung: 0},
		"some doorbells are lost":         {due: 5, ready: 4, rung: 5},
		"the rest stands in full windows": {due: 25, ready: 5, consumers: 2, rung: 0},
		"windows are not wide enough":     {due: 26, ready: 5, consumers: 2, rung: 5},
		"nothing waits, windows unknown":  {due: 5, ready: 0, consumers: 2, rung: 5},
		"empty queue, dead worker's rows": {due: 0, ready: 0, rung: 5},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, m := &world{late: rows(delivery.Pending, 5, time.Hour), due: c.due, ready: c.ready, consumers: c.consumers}, metrics.New()
			require.NoError(t, w.sweeper(m).Round(t.Context()))
			require.Len(t, w.published, c.rung)
		})
	}
}

// A worker that is about to raise the alert itself is not rescued.
func TestYoungUnknownRowsAreLeftToTheirWorker(t *testing.T) {
	t.Parallel()
	w, m := &world{unknown: rows(delivery.Unknown, 2, time.Second)}, metrics.New()
	require.NoError(t, w.sweeper(m).Round(t.Context()))
	require.Empty(t, w.alerts)
}

func TestUnknownRowsAreAlertedOnce(t *testing.T) {
	t.Parallel()
	w, m := &world{unknown: rows(delivery.Unknown, 250, time.Hour)}, metrics.New()
	s := w.sweeper(m)
	for range 3 {
		require.NoError(t, s.Round(t.Context()))
	}
	require.Equal(t, map[string]float64{CauseUnknown: 250}, rescues(t, m))
}

func TestOneFailingDutyDoesNotStopTheOthers(t *testing.T) {
	t.Parallel()
	w, m := &world{failLeases: true, dead: rows(delivery.Dead, 1, time.Hour)}, metrics.New()
	require.Error(t, w.sweeper(m).Round(t.Context()))
	require.Len(t, w.stamped, 1)
}
