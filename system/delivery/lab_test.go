package delivery

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"mailproof/system/contract"
)

// testLease is short, since a takeover needs a server that has been up for
// longer than a lease. No test depends on it running out or not: bench.claim
// and bench.leaseRunsOut set the row's own time.
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

func (b bench) claim(id uuid.UUID) Row {
	b.t.Helper()
	c, err := b.Claim(b.t.Context(), id)
	require.NoError(b.t, err)
	require.NotNil(b.t, c.Row, "claim refused: %s, wait %s", c.Status, c.Wait)
	// Held for as long as the test needs: only leaseRunsOut ends it.
	b.exec(`UPDATE notifications SET locked_until = now() + interval '1 hour' WHERE id = $1`, id)
	return *c.Row
}

func (b bench) refusedClaim(id uuid.UUID) Claim {
	b.t.Helper()
	c, err := b.Claim(b.t.Context(), id)
	require.NoError(b.t, err)
	require.Nil(b.t, c.Row, "claim won")
	return c
}

// leaseRunsOut and the like move the row's times instead of waiting for them.
func (b bench) leaseRunsOut(id uuid.UUID) {
	b.exec(`UPDATE notifications SET locked_until = now() - interval '1 second' WHERE id = $1 AND status = 'SENDING'`, id)
}

func (b bench) becomesDue(id uuid.UUID) {
	b.exec(`UPDATE notifications SET next_attempt_at = now() - interval '1 second' WHERE id = $1`, id)
}

func (b bench) exec(sql string, args ...any) {
	b.t.Helper()
	_, err := b.pool.Exec(b.t.Context(), sql, args...)
	require.NoError(b.t, err)
}

func (b bench) get(id uuid.UUID) Row {
	b.t.Helper()
	r, err := b.Get(b.t.Context(), id)
	require.NoError(b.t, err)
	return r
}

func (b bench) cancel(booking string, generation int) Cancelling {
	b.t.Helper()
	c, err := b.Cancel(b.t.Context(), cancelOf(booking, generation))
	require.NoError(b.t, err)
	return c
}

func cancelOf(booking string, generation int) CancelRequest {
	return CancelRequest{BookingID: booking, DedupeKey: contract.TicketKey(booking, generation), Generation: generation}
}

func (b bench) begin() pgx.Tx {
	b.t.Helper()
	tx, err := b.pool.Begin(b.t.Context())
	require.NoError(b.t, err)
	b.t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(b.t.Context())) })
	return tx
}

// waitsForLock returns when n sessions of the database wait for a lock.
func (b bench) waitsForLock(n int) {
	b.t.Helper()
	require.Eventually(b.t, func() bool {
		var waiting int
		err := b.pool.QueryRow(b.t.Context(), `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&waiting)
		return err == nil && waiting == n
	}, 10*time.Second, 5*time.Millisecond, "no session waits for a lock")
}

func must[T any](v T, err error) func(t *testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		require.NoError(t, err)
		return v
	}
}

func ids(rows []Row) []uuid.UUID {
	var out []uuid.UUID
	for _, r := range rows {
		out = append(out, r.ID)
	}
	return out
}

// LAB-CLAIM: two workers, the first holds its locks; neither waits and neither
// gets a row of the other.
func TestLabClaim(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	var want []uuid.UUID
	for _, booking := range []string{"1", "2", "3", "4"} {
		want = append(want, b.ticket(booking))
	}
	claimTwo := func(tx pgx.Tx) []uuid.UUID {
		claims, err := b.On(tx).ClaimBatch(t.Context(), contract.TicketConfirmation, 2)
		require.NoError(t, err)
		var got []uuid.UUID
		for _, c := range claims {
			require.Equal(t, int64(1), c.Row.Token)
			got = append(got, c.Row.ID)
		}
		return got
	}
	first, second := b.begin(), b.begin()
	require.ElementsMatch(t, want[:2], claimTwo(first))
	require.ElementsMatch(t, want[2:], claimTwo(second), "while the first still holds its locks")
}

// LAB-DEDUP: a second insert of the key is an error without ON CONFLICT, and no
// row with it.
func TestLabDedup(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	b.ticket("42")
	_, err := b.pool.Exec(t.Context(), `INSERT INTO notifications
		(id, dedupe_key, booking_id, event_id, type, channel, recipient, payload, status, generation, attempt_limit)
		VALUES (gen_random_uuid(), 'ticket:42', '42', 'other', 'TICKET_CONFIRMATION', 'EMAIL', 'a@example.com', '{}', 'PENDING', 1, 3)`)
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "notifications_dedupe_key", pgErr.ConstraintName)
	require.False(t, b.insert(ticket("42"))[0].New)
}

// LAB-FENCE: the lease runs out, another claims; the first one's finish changes
// nothing, the second one's does.
func TestLabFence(t *testing.T) {
	t.Parallel()
	for name, settle := range map[string]func(b bench, id uuid.UUID, token int64) (Outcome, error){
		"transient": func(b bench, id uuid.UUID, token int64) (Outcome, error) {
			return b.Transient(b.t.Context(), id, token, Refusal{Err: "451"})
		},
		"permanent": func(b bench, id uuid.UUID, token int64) (Outcome, error) {
			return b.Permanent(b.t.Context(), id, token, Refusal{Err: "550"})
		},
		"ambiguous": func(b bench, id uuid.UUID, token int64) (Outcome, error) {
			return b.Ambiguous(b.t.Context(), id, token, "no reply")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, Resend)
			id := b.ticket("42")
			first := b.claim(id)
			b.leaseRunsOut(id)
			second := b.claim(id)
			require.Equal(t, first.Token+1, second.Token)
			require.Equal(t, 2, second.Unsettled)

			before := b.get(id)
			out, err := settle(b, id, first.Token)
			require.NoError(t, err)
			require.False(t, out.Applied)
			require.Equal(t, before, b.get(id), "an old token changed the row")

			out, err = settle(b, id, second.Token)
			require.NoError(t, err)
			require.True(t, out.Applied)
			require.NotEqual(t, Sending, out.Row.Status)
		})
	}
}

// LAB-FENCE with a 250: it is never thrown away. The holder's settle makes the
// row SENT whatever it brings.
func TestLateAcceptedIsKept(t *testing.T) {
	t.Parallel()
	for name, settle := range map[string]func(b bench, r Row) (Outcome, error){
		"transient": func(b bench, r Row) (Outcome, error) {
			return b.Transient(b.t.Context(), r.ID, r.Token, Refusal{Err: "451"})
		},
		"permanent": func(b bench, r Row) (Outcome, error) {
			return b.Permanent(b.t.Context(), r.ID, r.Token, Refusal{Err: "550"})
		},
		"ambiguous": func(b bench, r Row) (Outcome, error) {
			return b.Ambiguous(b.t.Context(), r.ID, r.Token, "no reply")
		},
		"lease over": func(b bench, r Row) (Outcome, error) {
			b.leaseRunsOut(r.ID)
			rows, err := b.LeaseOver(b.t.Context(), 10)
			return Outcome{Applied: len(rows) == 1, Row: rows[0]}, err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, Resend)
			id := b.ticket("42")
			first := b.claim(id)
			b.leaseRunsOut(id)
			second := b.claim(id)

			out := must(b.Accepted(t.Context(), id, first.Token, "first"))(t)
			require.False(t, out.Applied)
			require.True(t, out.Flagged)
			require.Equal(t, Sending, out.Row.Status)
			require.Positive(t, b.refusedClaim(id).Wait, "the holder still holds it")

			out = must(settle(b, second))(t)
			require.True(t, out.Applied)
			require.Equal(t, Sent, out.Row.Status)
			require.Equal(t, "first", *out.Row.ProviderMsgID)
			require.NotNil(t, out.Row.SentAt)
		})
	}
}

func TestLateAcceptedSettlesAWaitingAndAnUnknownRow(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	id := b.ticket("waits")
	first := b.claim(id)
	b.leaseRunsOut(id)
	second := b.claim(id)
	must(b.Transient(t.Context(), id, second.Token, Refusal{Err: "451"}))(t)
	out := must(b.Accepted(t.Context(), id, first.Token, "first"))(t)
	require.True(t, out.Applied)
	require.Equal(t, Sent, out.Row.Status)

	hold := New(b.pool, testConfig(Hold))
	id = b.ticket("unknown")
	first = b.claim(id)
	b.leaseRunsOut(id)
	require.Len(t, must(hold.LeaseOver(t.Context(), 10))(t), 1)
	require.Equal(t, Unknown, b.get(id).Status)
	out = must(hold.Accepted(t.Context(), id, first.Token, "first"))(t)
	require.True(t, out.Applied)
	require.Equal(t, Sent, out.Row.Status)
}

// LAB-AB-COMMIT and LAB-AB-ROLLBACK: a second consumer waits for the first
// one's transaction; then it finds its row, or makes the row itself.
func TestLabABCommit(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	tx := b.begin()
	a := must(b.On(tx).Insert(t.Context(), []NewRow{ticket("42")}))(t)
	require.True(t, a[0].New)
	other := b.insertInBackground(ticket("42"))
	b.waitsForLock(1)
	require.NoError(t, tx.Commit(t.Context()))
	got := <-other
	require.False(t, got.New)
	require.Equal(t, a[0].ID, got.ID)
	require.Equal(t, Pending, got.Status)
}

func TestLabABRollback(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	tx := b.begin()
	a := must(b.On(tx).Insert(t.Context(), []NewRow{ticket("42")}))(t)
	other := b.insertInBackground(ticket("42"))
	b.waitsForLock(1)
	require.NoError(t, tx.Rollback(t.Context()))
	got := <-other
	require.True(t, got.New)
	require.NotEqual(t, a[0].ID, got.ID)
}

func (b bench) insertInBackground(r NewRow) <-chan Inserted {
	out := make(chan Inserted, 1)
	go func() {
		defer close(out)
		got, err := b.Insert(b.t.Context(), []NewRow{r})
		if assert.NoError(b.t, err) {
			out <- got[0]
		}
	}()
	return out
}

// LAB-E1, LAB-E2, LAB-E3: the first delivery makes a row; the same event again
// does not, nor does another event for the same intent.
func TestLabE1E2E3(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	e1 := b.insert(ticket("42"))[0]
	require.True(t, e1.New)
	require.True(t, e1.NeedsDoorbell())

	e2 := b.insert(ticket("42"))[0]
	require.Equal(t, Inserted{ID: e1.ID, Status: Pending}, e2)
	require.True(t, e2.NeedsDoorbell(), "nothing was published yet")

	require.NoError(t, b.StampPublished(t.Context(), []uuid.UUID{e1.ID}))
	again := ticket("42")
	again.EventID = "another event"
	e3 := b.insert(again)[0]
	require.Equal(t, Inserted{ID: e1.ID, Status: Pending, Published: true}, e3)
	require.False(t, e3.NeedsDoorbell())
}

func TestInsertOfABatchAnswersInOrder(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	old := b.ticket("2")
	stale := ticket("3")
	stale.Stale = true
	twin := ticket("1")
	twin.EventID = "twin"
	got := b.insert(ticket("1"), ticket("2"), stale, twin)
	require.True(t, got[0].New)
	require.Equal(t, Inserted{ID: old, Status: Pending}, got[1])
	require.Equal(t, Inserted{ID: got[2].ID, New: true, Status: Expired}, got[2])
	require.False(t, got[2].NeedsDoorbell())
	require.Equal(t, Inserted{ID: got[0].ID, Status: Pending}, got[3], "the same key twice in one batch")
	require.Equal(t, Expired, b.get(got[2].ID).Status)
}

// One event that asks for two mails: the second has no row, and that must not
// look like a duplicate.
func TestInsertTellsAnEventThatAsksForTwoMails(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	id := b.ticket("42")
	other := ticket("42")
	other.DedupeKey = "reminder:42"
	require.Equal(t, Inserted{ID: id, Status: Pending, Clash: true}, b.insert(other)[0])
}

func TestInsertRefusesWhatHasNoKey(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	for name, spoil := range map[string]func(*NewRow){
		"dedupe key is empty":   func(r *NewRow) { r.DedupeKey = "" },
		"event id is empty":     func(r *NewRow) { r.EventID = "" },
		"generation 0 is below": func(r *NewRow) { r.Generation = 0 },
	} {
		bad := ticket("42")
		spoil(&bad)
		_, err := b.Insert(t.Context(), []NewRow{ticket("41"), bad})
		require.ErrorContains(t, err, name)
	}
	rows := must(b.DeadRows(t.Context(), After{}, 1))(t)
	require.Empty(t, rows)
}

// LAB-FOUR: a cancel over each of the four states.
func TestLabFour(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	pending, sending, sent := b.ticket("pending"), b.ticket("sending"), b.ticket("sent")
	b.claim(sending)
	must(b.Accepted(t.Context(), sent, b.claim(sent).Token, "p"))(t)

	c := b.cancel("pending", 1)
	require.True(t, c.Changed)
	require.Equal(t, Cancelled, b.get(pending).Status)

	c = b.cancel("sending", 1)
	require.True(t, c.Changed)
	require.Equal(t, Sending, c.Row.Status)
	require.True(t, c.Row.CancelAsked)

	before := b.get(sent)
	c = b.cancel("sent", 1)
	require.False(t, c.Changed)
	require.Equal(t, Sent, c.Row.Status, "too late")
	require.Equal(t, before, b.get(sent))

	c = b.cancel("absent", 1)
	require.True(t, c.Changed)
	require.True(t, c.Tombstone)
	require.Equal(t, Cancelled, c.Row.Status)
	require.Nil(t, c.Row.EventID)

	for _, booking := range []string{"pending", "sending", "absent"} {
		again := b.cancel(booking, 1)
		require.False(t, again.Changed, "%s: the same cancel again", booking)
		require.False(t, again.Tombstone)
	}
}

// LAB-FLAG: a transient failure of a mail whose cancel lost.
func TestLabFlag(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	id := b.ticket("42")
	r := b.claim(id)
	b.cancel("42", 1)
	out := must(b.Transient(t.Context(), id, r.Token, Refusal{Err: "451"}))(t)
	require.Equal(t, Cancelled, out.Row.Status)
	require.Zero(t, b.refusedClaim(id).Wait)
}

// LAB-TOMB: the cancel comes before the confirmation.
func TestLabTomb(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	c := b.cancel("42", 1)
	in := b.insert(ticket("42"))[0]
	require.Equal(t, Inserted{ID: c.Row.ID, Status: Cancelled}, in)
	require.False(t, in.NeedsDoorbell())
	require.Equal(t, Cancelled, b.refusedClaim(in.ID).Status)
}

// LAB-POISON: the tombstones of two mails that one cancel event is about.
func TestLabPoison(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	for _, key := range []string{"ticket:42", "reminder:42"} {
		req := cancelOf("42", 1)
		req.DedupeKey = key
		require.True(t, must(b.Cancel(t.Context(), req))(t).Tombstone, key)
	}
	// With the event's id on both, the second violates notifications_event_id.
	_, err := b.pool.Exec(t.Context(), `UPDATE notifications SET event_id = 'the cancel'`)
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "notifications_event_id", pgErr.ConstraintName)
}

// LAB-C1: cancel first.
func TestLabC1(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	id := b.ticket("42")
	require.Equal(t, Cancelled, b.cancel("42", 1).Row.Status)
	require.Equal(t, Claim{Status: Cancelled}, b.refusedClaim(id))
}

// LAB-C2: the worker first; the cancel waits for its lock and is too late.
func TestLabC2(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	id := b.ticket("42")
	tx := b.begin()
	require.NotNil(t, must(b.On(tx).Claim(t.Context(), id))(t).Row)
	done := make(chan Cancelling, 1)
	go func() {
		defer close(done)
		c, err := b.Cancel(t.Context(), cancelOf("42", 1))
		if assert.NoError(t, err) {
			done <- c
		}
	}()
	b.waitsForLock(1)
	require.NoError(t, tx.Commit(t.Context()))
	c := <-done
	require.Equal(t, Sending, c.Row.Status)
	require.True(t, c.Row.CancelAsked)
}

// LAB-C3: the cancel holds the lock while the worker comes.
func TestLabC3(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	id := b.ticket("42")
	tx := b.begin()
	require.Equal(t, Cancelled, must(b.On(tx).Cancel(t.Context(), cancelOf("42", 1)))(t).Row.Status)
	done := make(chan Claim, 1)
	go func() {
		defer close(done)
		c, err := b.Claim(t.Context(), id)
		if assert.NoError(t, err) {
			done <- c
		}
	}()
	b.waitsForLock(1)
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, Claim{Status: Cancelled}, <-done)
}

// TRAP-C2-4 and an old cancel: a reopened booking has a key of its own, which
// its own cancel stops and an older one does not.
func TestCancelKnowsGenerations(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	b.cancel("42", 1)
	reopened := ticket("42")
	reopened.DedupeKey, reopened.EventID, reopened.Generation = contract.TicketKey("42", 2), "reopened", 2
	in := b.insert(reopened)[0]
	require.True(t, in.New)

	old := b.cancel("42", 1)
	require.False(t, old.Changed)
	require.Empty(t, old.Others)
	require.Equal(t, Pending, b.get(in.ID).Status, "an old cancel delivered late")

	odd := cancelOf("42", 1)
	odd.DedupeKey = reopened.DedupeKey
	require.False(t, must(b.Cancel(t.Context(), odd))(t).Changed, "the newer key under an older generation")
	require.Equal(t, Pending, b.get(in.ID).Status)

	require.True(t, b.cancel("42", 2).Changed)
	require.Equal(t, Cancelled, b.get(in.ID).Status)
}

// C-04: all mails of the booking, and only of this one.
func TestCancelStopsTheBookingsOtherMails(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	b.ticket("42")
	other := b.ticket("43")
	reminder := ticket("42")
	reminder.DedupeKey, reminder.EventID = "reminder:42", "reminder"
	id := b.insert(reminder)[0].ID
	c := b.cancel("42", 1)
	require.Equal(t, []uuid.UUID{id}, ids(c.Others))
	require.Equal(t, Cancelled, b.get(id).Status)
	require.Equal(t, Pending, b.get(other).Status)
}
