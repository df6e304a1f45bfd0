package benchmarks

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/history"
)

const ms = int64(1e6)

func confirmed(key string, at int64) history.Record {
	return history.Record{T: at, Kind: history.KindOp, Op: &history.Op{
		Name: "confirm", Booking: key, Key: key, Recipient: key, Intended: at, Call: at, Return: at, Outcome: history.OpOK,
	}}
}

func kept(key string, at int64) history.Record {
	return history.Record{T: at, Kind: history.KindAttempt, Attempt: &history.Attempt{
		ID: at, Transport: "smtp", Session: 1, Key: key, Recipient: key, From: at, To: at, DotAt: at, Stage: "replied", Stored: true,
	}}
}

// TestRecoveryGap: a gap counts only while mail waits, and the baseline only
// what lies before the first strike.
func TestRecoveryGap(t *testing.T) {
	t.Parallel()
	h := history.FromRecords([]history.Record{
		{T: 1, Kind: history.KindMeta, Meta: &history.Meta{Scenario: "t6.2", Policy: "resend", Server: "plain", Invariants: []string{"x"}, Wall: time.Unix(1, 0)}},
		confirmed("a", 100*ms), kept("a", 110*ms),
		// Nobody waits for 890 ms: no gap.
		confirmed("b", 1000*ms), kept("b", 1030*ms),
		confirmed("c", 2000*ms), confirmed("d", 2100*ms), kept("c", 2050*ms), kept("d", 5100*ms),
		{T: 6000 * ms, Kind: history.KindFault, Fault: &history.Fault{
			Name: "kill", Target: "notifyd-1", Start: 1900 * ms, End: 2200 * ms, Outcome: history.Installed, Witness: "gone", Count: 3,
		}},
	})
	require.Empty(t, h.Problems)
	require.Equal(t, []RecoveryGap{{
		Scenario: "t6.2", Policy: "resend", Fault: "kill", Strikes: 3, BaselineMillis: 30, FaultMillis: 3000, Delivered: 4,
	}}, recoveryOf(h))
}

// TestNoRecoveryWithoutDeliveries: a server that takes nothing has no gap to
// measure.
func TestNoRecoveryWithoutDeliveries(t *testing.T) {
	t.Parallel()
	h := history.FromRecords([]history.Record{
		{T: 1, Kind: history.KindMeta, Meta: &history.Meta{Scenario: "t6.3", Policy: "resend", Server: "plain", Invariants: []string{"x"}, Wall: time.Unix(1, 0)}},
		confirmed("a", 100*ms),
	})
	require.Empty(t, recoveryOf(h))
}
