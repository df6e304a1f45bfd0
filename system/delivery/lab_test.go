package delivery

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"mailproof/system/contract"
)

// testLease is short, so that a lease can run out within a test; nothing waits
// for it by sleeping: see leaseRunsOut.
const testLease = 100 * time.Millisecond

func testConfig(p Policy) Config {
	return Config{
		Lease:       testLease,
		RetryDelays: []time.Duration{10 * time.Second, time.Minute, 5 * time.Minute},
		MaxAttempts: 3,
		Policies:    map[contract.MailType]Policy{contract.TicketConfirmation: p, contract.Marketing: p},
	}
}

// bench is a store with a database of its own.
type bench struct {
	t    *testing.T
	pool *pgxpool.Pool
	*Store
}

func newBench(t *testing.T, p Policy) bench {
	t.Helper()
	pool := newDatabase(t)
	return bench{t, pool, New(pool, testConfig(p))}
}

func ticket(booking string) NewRow {
	return NewRow{
		DedupeKey: contract.TicketKey(booking, 1), BookingID: booking, EventID: "event-" + booking,
		Type: contract.TicketConfirmation, Channel: contract.Email, Recipient: booking + "@example.com",
		Payload: []byte(`{"bookingId":"` + booking + `"}`), Generation: 1,
	}
}

func (b bench) insert(rows ...NewRow) []Inserted {
	b.t.Helper()
	out, err := b.Insert(b.t.Context(), rows)
	require.NoError(b.t, err)
	return out
}

func (b bench) ticket(booking string) uuid.UUID {
	b.t.Helper()
	return b.insert(ticket(booking))[0].ID
}

func TestSmoke(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	id := b.ticket("b1")
	c, err := b.Claim(t.Context(), id)
	require.NoError(t, err)
	require.NotNil(t, c.Row)
	out, err := b.Transient(t.Context(), id, c.Token, Refusal{Err: "451"})
	require.NoError(t, err)
	require.True(t, out.Applied)
	require.Equal(t, Failed, out.Row.Status)
	c, err = b.Claim(t.Context(), id)
	require.NoError(t, err)
	require.Nil(t, c.Row)
	require.InDelta(t, 10, c.Wait.Seconds(), 1)
	can, err := b.Cancel(t.Context(), CancelRequest{BookingID: "b1", DedupeKey: "ticket:b1", Generation: 1})
	require.NoError(t, err)
	require.Equal(t, Cancelled, can.Row.Status)
	new, err := b.RaiseAlert(t.Context(), "dead", "ticket:b1", "x")
	require.NoError(t, err)
	require.True(t, new)
}
