package worker

import (
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"

	"mailproof/system/delivery"
	"mailproof/system/mail"
)

// What a lease is derived from (OB-02, ADR 0011): the try, and the whole time
// for which the row was held, in buckets that tell 29 s from 31 s; the age of a
// mail when it is sent; and throttles.
func TestWhatIsMeasured(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.slow = 31 * time.Second
	w.settled = settledAs(delivery.Sent, 0)
	sent := w.now.Add(time.Minute)
	w.settled.Row.CreatedAt, w.settled.Row.SentAt = w.now, &sent
	w.run(t, body(t))
	for name, seconds := range map[string]float64{"notifyd_send_seconds": 31, "notifyd_hold_seconds": 31, "notifyd_mail_seconds": 60} {
		h := metric(t, w, name).GetHistogram()
		require.EqualValues(t, 1, h.GetSampleCount(), name)
		require.InDelta(t, seconds, h.GetSampleSum(), 0.1, name)
	}
	held := metric(t, w, "notifyd_hold_seconds").GetHistogram()
	require.EqualValues(t, 0, below(held, 30))
	require.EqualValues(t, 1, below(held, 32.5))
	require.Zero(t, metric(t, w, "notifyd_sends_in_flight").GetGauge().GetValue())

	throttled := newWorld(t)
	f := failure(mail.StageRcpt)
	f.Free, f.RetryAfter = true, time.Minute
	throttled.sendErr = &mail.TransientError{Failure: f}
	throttled.settled = settledAs(delivery.Failed, time.Minute)
	throttled.run(t, body(t))
	require.EqualValues(t, 1, metric(t, throttled, "notifyd_throttles_total").GetCounter().GetValue())
}

// metric is the one of that name, without regard to its labels.
func metric(t *testing.T, w *world, name string) *dto.Metric {
	t.Helper()
	families, err := w.metrics.Registry.Gather()
	require.NoError(t, err)
	for _, f := range families {
		if f.GetName() == name {
			require.Len(t, f.GetMetric(), 1, name)
			return f.GetMetric()[0]
		}
	}
	require.Fail(t, "no metric "+name)
	return nil
}

// below counts the samples of the bucket with that bound.
func below(h *dto.Histogram, bound float64) uint64 {
	for _, b := range h.GetBucket() {
		if b.GetUpperBound() == bound {
			return b.GetCumulativeCount()
		}
	}
	return 99 // there is no such bucket
}
