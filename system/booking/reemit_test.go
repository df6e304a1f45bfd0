package booking

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/system/contract"
)

// What is written again is the present state, under the same key and a new event
// id; a booking that was never confirmed has nothing to say.
func TestReEmit(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	for _, id := range []string{"new", "confirmed", "cancelled", "reopened"} {
		_, _, err := f.service.Create(ctx, Request{ID: id, Recipient: id + "@example.test"})
		require.NoError(t, err)
	}
	do := func(op Op, ids ...string) {
		t.Helper()
		for _, id := range ids {
			_, _, err := f.service.Do(ctx, op, id, 0)
			require.NoError(t, err)
		}
	}
	do(Confirm, "confirmed", "cancelled", "reopened")
	do(Cancel, "cancelled", "reopened")
	do(Reopen, "reopened")

	for id, want := range map[string]struct {
		kind contract.EventType
		key  string
	}{
		"new": {"", ""}, "confirmed": {contract.BookingConfirmed, "ticket:confirmed"},
		"cancelled": {contract.BookingCancelled, "ticket:cancelled"}, "reopened": {contract.BookingReopened, "ticket:reopened:v2"},
	} {
		event, kind, err := f.service.ReEmit(ctx, id)
		require.NoError(t, err, id)
		require.Equal(t, want.kind, kind, id)
		if kind == "" {
			continue
		}
		var body []byte
		require.NoError(t, f.pool.QueryRow(ctx, `SELECT payload FROM outbox WHERE event_id = $1`, event).Scan(&body))
		e, err := contract.DecodeEvent(body)
		require.NoError(t, err)
		require.Equal(t, want.key, e.DedupeKey)
		var same int
		require.NoError(t, f.pool.QueryRow(ctx, `SELECT count(*) FROM outbox WHERE event_type = $1 AND payload->>'dedupe_key' = $2
			AND payload->>'occurred_at' = $3::jsonb#>>'{occurred_at}'`, string(kind), want.key, body).Scan(&same))
		require.Equal(t, 2, same, "%s: the time is that of what happened", id)
	}
	_, _, err := f.service.ReEmit(ctx, "nobody")
	require.ErrorIs(t, err, ErrNotFound)
	require.NotErrorIs(t, err, ErrOutcomeUnknown, "the database said that there is none")
}

// Left over are cancelled bookings of whose mail nothing final was heard, over
// more than one page.
func TestLeftovers(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	_, err := f.pool.Exec(ctx, `INSERT INTO bookings (id, status, generation, recipient, updated_at)
SELECT 'b-' || i, CASE WHEN i % 2 = 0 THEN 'CANCELLED' ELSE 'CONFIRMED' END, 1 + (i % 4 = 0)::int, 'a@example.test',
  now() - CASE WHEN i % 10 = 0 THEN interval '1 second' ELSE interval '1 hour' END
FROM generate_series(1, 2 * $1::int + 10) AS i`, leftoversPage)
	require.NoError(t, err)
	_, err = f.pool.Exec(ctx, `INSERT INTO booking_mails (dedupe_key, booking_id, generation, event_type, version, occurred_at)
SELECT 'ticket:' || id || CASE generation WHEN 1 THEN '' ELSE ':v2' END, id, generation,
  CASE WHEN id LIKE '%2' THEN 'EmailSent' WHEN id LIKE '%4' THEN 'EmailCancelled'
    WHEN id LIKE '%16' THEN 'EmailBounced' ELSE 'EmailCancelTooLate' END, 1, now()
FROM bookings WHERE id LIKE '%2' OR id LIKE '%4' OR id LIKE '%6'`)
	require.NoError(t, err)
	found, err := f.service.Leftovers(ctx, time.Minute)
	require.NoError(t, err)
	// Of the even ones: …0 is too fresh, …4 and …6 have their answer (…16: the mail
	// came back, which outweighs that it was too late), …2 (sent, and the cancel
	// not answered) and …8 (nothing heard) are left.
	require.Len(t, found, 2*(2*leftoversPage+10)/10)
	for _, id := range found {
		require.Regexp(t, `[28]$`, id)
	}
}
