package delivery

import (
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"mailproof/system/contract"
	"mailproof/system/outbox"
)

func withOutbox(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	require.NoError(t, outbox.Migrate(t.Context(), pool.Config().ConnString()))
}

// tellingBench is a store that writes events.
func tellingBench(t *testing.T, p Policy) bench {
	t.Helper()
	b := newBench(t, p)
	withOutbox(t, b.pool)
	cfg := testConfig(p)
	cfg.Events = "mail.events"
	require.NoError(t, cfg.Validate())
	return bench{t, b.pool, New(b.pool, cfg)}
}

// events are those written so far, in order.
func (b bench) events() []contract.MailEvent {
	b.t.Helper()
	rows, err := b.pool.Query(b.t.Context(), `SELECT event_id, topic, key, event_type, payload FROM outbox ORDER BY id`)
	require.NoError(b.t, err)
	out, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (contract.MailEvent, error) {
		var id uuid.UUID
		var topic, key, kind string
		var body []byte
		if err := r.Scan(&id, &topic, &key, &kind, &body); err != nil {
			return contract.MailEvent{}, err
		}
		e, err := contract.DecodeMailEvent(body)
		require.Equal(b.t, "mail.events", topic)
		require.Equal(b.t, e.BookingID, key)
		require.Equal(b.t, string(e.EventType), kind)
		require.Equal(b.t, id.String(), e.EventID)
		require.EqualValues(b.t, 7, id.Version())
		return e, err
	})
	require.NoError(b.t, err)
	return out
}

func (b bench) told() []contract.MailEventType {
	kinds := []contract.MailEventType{}
	for _, e := range b.events() {
		kinds = append(kinds, e.EventType)
	}
	return kinds
}

func TestEachEndOfAMailIsTold(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		do   func(b bench, id uuid.UUID)
		want []contract.MailEventType
	}{
		"sent": {func(b bench, id uuid.UUID) {
			must(b.Accepted(b.t.Context(), id, b.claim(id).Token, "p"))(b.t)
		}, []contract.MailEventType{contract.EmailSent}},
		"dead": {func(b bench, id uuid.UUID) {
			must(b.Permanent(b.t.Context(), id, b.claim(id).Token, Refusal{Err: "550"}))(b.t)
		}, []contract.MailEventType{contract.EmailFailed}},
		"failed once, no end": {func(b bench, id uuid.UUID) {
			must(b.Transient(b.t.Context(), id, b.claim(id).Token, Refusal{Err: "451"}))(b.t)
		}, []contract.MailEventType{}},
		"cancelled before the claim, twice": {func(b bench, _ uuid.UUID) {
			b.cancel("1", 1)
			b.cancel("1", 1)
		}, []contract.MailEventType{contract.EmailCancelled}},
		"cancelled while sent, then accepted": {func(b bench, id uuid.UUID) {
			token := b.claim(id).Token
			b.cancel("1", 1)
			require.Empty(b.t, b.told(), "nobody knows yet (TRAP-C2-6)")
			must(b.Accepted(b.t.Context(), id, token, "p"))(b.t)
			b.cancel("1", 1)
		}, []contract.MailEventType{contract.EmailCancelTooLate}},
		"cancelled while sent, then refused": {func(b bench, id uuid.UUID) {
			token := b.claim(id).Token
			b.cancel("1", 1)
			must(b.Transient(b.t.Context(), id, token, Refusal{Err: "451"}))(b.t)
		}, []contract.MailEventType{contract.EmailCancelled}},
		"cancelled after it was sent, twice": {func(b bench, id uuid.UUID) {
			must(b.Accepted(b.t.Context(), id, b.claim(id).Token, "p"))(b.t)
			b.cancel("1", 1)
			b.cancel("1", 1)
		}, []contract.MailEventType{contract.EmailSent, contract.EmailCancelTooLate}},
		"dead, replayed, sent": {func(b bench, id uuid.UUID) {
			must(b.Permanent(b.t.Context(), id, b.claim(id).Token, Refusal{Err: "550"}))(b.t)
			must(b.Replay(b.t.Context(), id, 1))(b.t)
			must(b.Accepted(b.t.Context(), id, b.claim(id).Token, "p"))(b.t)
		}, []contract.MailEventType{contract.EmailFailed, contract.EmailSent}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := tellingBench(t, Resend)
			c.do(b, b.ticket("1"))
			require.Equal(t, c.want, b.told())
			last := int64(0)
			for _, e := range b.events() {
				require.GreaterOrEqual(t, e.Version, last)
				last = e.Version
			}
		})
	}
}

func TestTombstoneAndStaleEventAreTold(t *testing.T) {
	t.Parallel()
	b := tellingBench(t, Resend)
	require.True(t, b.cancel("1", 1).Tombstone)
	stale := ticket("2")
	stale.Stale = true
	require.True(t, b.insert(stale, ticket("3"))[0].New)
	require.Equal(t, []contract.MailEventType{contract.EmailCancelled, contract.EmailFailed}, b.told())
}

// The event is in the transition's own statement: what is rolled back is told
// to nobody.
func TestNoEventWithoutItsTransition(t *testing.T) {
	t.Parallel()
	b := tellingBench(t, Resend)
	id := b.ticket("1")
	token := b.claim(id).Token
	tx := b.begin()
	must(b.On(tx).Accepted(t.Context(), id, token, "p"))(t)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Empty(t, b.told())
	require.Equal(t, Sending, b.get(id).Status)
}

// A mail without a booking has nobody who waits for its events.
func TestCampaignMailsTellNobody(t *testing.T) {
	t.Parallel()
	b := tellingBench(t, Resend)
	row := ticket("1")
	row.BookingID, row.Type = "", contract.Marketing
	id := b.insert(row)[0].ID
	must(b.Accepted(t.Context(), id, b.claim(id).Token, "p"))(t)
	require.Empty(t, b.told())
}

func TestTopicMustBeOne(t *testing.T) {
	t.Parallel()
	cfg := testConfig(Resend)
	cfg.Events = "x'); DROP TABLE notifications; --"
	require.ErrorContains(t, cfg.Validate(), "topic of the mail events")
}

func (b bench) sendAgain(key string) (Row, error) {
	b.t.Helper()
	tx := b.begin()
	row, err := b.On(tx).SendAgain(b.t.Context(), key)
	if err != nil {
		require.NoError(b.t, tx.Rollback(b.t.Context()))
		return row, err
	}
	return row, tx.Commit(b.t.Context())
}

// OB-12: a second sending is a mail of its own.
func TestSendAgain(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	id := b.ticket("1")
	refused := func(key, why string) {
		t.Helper()
		_, err := b.sendAgain(key)
		var r *SendAgainRefused
		require.True(t, errors.As(err, &r), "%v", err)
		require.Contains(t, r.Reason, why)
	}
	refused("ticket:1", "still on its way")
	must(b.Accepted(t.Context(), id, b.claim(id).Token, "p"))(t)

	again, err := b.sendAgain("ticket:1")
	require.NoError(t, err)
	require.Equal(t, "ticket:1:resend:1", again.DedupeKey)
	require.Equal(t, Pending, again.Status)
	first := b.get(id)
	require.Equal(t, first.Recipient, again.Recipient)
	require.JSONEq(t, string(first.Payload), string(again.Payload))
	refused("ticket:1", "second sending is still on its way")
	refused("ticket:1:resend:1", "second sending itself")

	must(b.Accepted(t.Context(), again.ID, b.claim(again.ID).Token, "p2"))(t)
	second, err := b.sendAgain("ticket:1")
	require.NoError(t, err)
	require.Equal(t, "ticket:1:resend:2", second.DedupeKey)

	require.Equal(t, Sent, b.cancel("1", 1).Row.Status)
	require.Equal(t, Cancelled, b.get(second.ID).Status, "a cancel takes the second sending with it")
	refused("ticket:1", "booking is cancelled")

	_, err = b.sendAgain("nobody")
	require.ErrorIs(t, err, ErrNoRow)
	_, err = b.SendAgain(t.Context(), "ticket:1")
	require.ErrorContains(t, err, "not in a transaction")
}

// A cancel and a second sending at once: whichever comes first, no mail of the
// cancelled booking is left waiting.
func TestSendAgainAgainstACancel(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	id := b.ticket("1")
	must(b.Accepted(t.Context(), id, b.claim(id).Token, "p"))(t)
	tx := b.begin()
	again, err := b.On(tx).SendAgain(t.Context(), "ticket:1")
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() {
		_, err := b.Cancel(t.Context(), cancelOf("1", 1))
		done <- err
	}()
	b.waitsForLock(1)
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, <-done)
	require.Equal(t, Cancelled, b.get(again.ID).Status)
}

func TestDeadRowsByFilter(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	for _, booking := range []string{"1", "2", "3"} {
		id := b.ticket(booking)
		must(b.Permanent(t.Context(), id, b.claim(id).Token, Refusal{Err: "550 No such User " + booking}))(t)
	}
	began, err := b.Now(t.Context())
	require.NoError(t, err)
	late := b.ticket("4")
	must(b.Permanent(t.Context(), late, b.claim(late).Token, Refusal{Err: "550"}))(t)
	keys := func(f DeadFilter) []string {
		t.Helper()
		rows, err := b.DeadWhere(t.Context(), f, After{}, 10)
		require.NoError(t, err)
		out := []string{}
		for _, r := range rows {
			out = append(out, r.DedupeKey)
		}
		return out
	}
	require.Equal(t, []string{"ticket:1", "ticket:2", "ticket:3"}, keys(DeadFilter{Until: began}))
	require.Equal(t, []string{"ticket:2"}, keys(DeadFilter{Reason: "no such user 2"}))
	require.Equal(t, []string{"ticket:3"}, keys(DeadFilter{BookingID: "3"}))
	require.Equal(t, []string{"ticket:4"}, keys(DeadFilter{DedupeKey: "ticket:4"}))
	require.Empty(t, keys(DeadFilter{Type: string(contract.Marketing)}))
	require.Empty(t, keys(DeadFilter{OlderThan: time.Hour}))
	require.Len(t, must(b.ByIDs(t.Context(), []uuid.UUID{late, uuid.New()}))(t), 1)
}

// Cancels are forgotten with the tombstones, not before (C-11).
func TestCancelsAreForgottenWithTheirTombstones(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	b.cancel("1", 1)
	must(b.DeleteAtRest(t.Context(), time.Hour, 10))(t)
	count := func() (n int) {
		require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT count(*) FROM cancelled_bookings`).Scan(&n))
		return n
	}
	require.Equal(t, 1, count())
	b.exec(`UPDATE cancelled_bookings SET cancelled_at = now() - interval '2 hours'`)
	must(b.DeleteAtRest(t.Context(), time.Hour, 10))(t)
	require.Zero(t, count())
}

func TestMailEventsAreChecked(t *testing.T) {
	t.Parallel()
	body, err := json.Marshal(contract.MailEvent{EventID: "e", EventType: contract.EmailSent, Schema: 1, Version: 3, DedupeKey: "k", BookingID: "b", Generation: 1})
	require.NoError(t, err)
	_, err = contract.DecodeMailEvent(body)
	require.NoError(t, err)
	for _, bad := range []string{`{`, `{}`, `{"schema":2}`} {
		_, err := contract.DecodeMailEvent([]byte(bad))
		require.ErrorIs(t, err, contract.ErrUndecodable, bad)
	}
}

// A mail that came back is told once, and only when it had been sent.
func TestABounceIsToldOnce(t *testing.T) {
	t.Parallel()
	b := tellingBench(t, Resend)
	id := b.ticket("b1")
	require.NoError(t, b.Bounced(t.Context(), "ticket:b1"))
	require.Empty(t, b.told(), "it was not sent")
	must(b.Accepted(t.Context(), id, b.claim(id).Token, "p"))(t)
	for range 3 {
		require.NoError(t, b.Bounced(t.Context(), "ticket:b1"))
	}
	require.NoError(t, b.Bounced(t.Context(), "ticket:other"))
	require.Equal(t, []contract.MailEventType{contract.EmailSent, contract.EmailBounced}, b.told())
	events := b.events()
	require.Equal(t, events[0].Version, events[1].Version, "the row did not move")
	require.Equal(t, Sent, must(b.Get(t.Context(), id))(t).Status)
}
