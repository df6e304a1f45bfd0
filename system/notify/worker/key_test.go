package worker

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/system/amqp"
	"mailproof/system/contract"
	"mailproof/system/delivery"
)

// OB-09: a key that the receiver may have forgotten is not used while an earlier
// try of it is open; nothing is sent, and the settle says so.
func TestNoTryUnderAForgottenKey(t *testing.T) {
	t.Parallel()
	first := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for name, c := range map[string]struct {
		lifetime  time.Duration
		unsettled int
		age       time.Duration
		sends     bool
	}{
		"old, an earlier try is open":   {23 * time.Hour, 2, 23 * time.Hour, false},
		"young":                         {23 * time.Hour, 2, 23*time.Hour - time.Second, true},
		"old, each earlier try settled": {23 * time.Hour, 1, 48 * time.Hour, true},
		"the receiver knows no keys":    {0, 2, 48 * time.Hour, true},
	} {
		w := newWorld(t)
		r := w.claims[0].Row
		r.FirstClaimedAt, r.ChangedAt, r.Unsettled = &first, first.Add(c.age), c.unsettled
		w.settled = settledAs(delivery.Unknown, 0)
		if c.sends {
			w.settled = settledAs(delivery.Sent, 0)
		}
		one := w.worker()
		one.cfg.KeyLifetime = c.lifetime
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		w.cancel = cancel
		one.Handle(ctx, amqp.NewDelivery(amqp.Delivery{Body: body(t), Queue: contract.QueueTicket}, func() error { return w.step("ack") }))
		cancel()
		want := []string{"claim", "permanent", "alert mail-unknown", "ack"}
		if c.sends {
			want = []string{"claim", "store mail", sending, "accepted", "ack"}
		}
		require.Equal(t, want, w.steps, name)
	}
}
