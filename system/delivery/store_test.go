package delivery

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"mailproof/system/contract"
)

func TestConfigNamesEverythingThatIsWrong(t *testing.T) {
	t.Parallel()
	require.NoError(t, testConfig(Resend).Validate())
	err := Config{
		RetryDelays: []time.Duration{time.Second, 0},
		Policies:    map[contract.MailType]Policy{contract.Marketing: "maybe"},
	}.Validate()
	for _, want := range []string{"lease 0s", "max attempts 0", "retry delay 2 is 0s", `policy "maybe" of MARKETING`} {
		require.ErrorContains(t, err, want)
	}
	require.ErrorContains(t, Config{Lease: 1, MaxAttempts: 1}.Validate(), "no retry delay")
}

// A type without a policy is held: the safe side.
func TestResendableTypes(t *testing.T) {
	t.Parallel()
	cfg := Config{Policies: map[contract.MailType]Policy{contract.TicketConfirmation: SameKey, contract.Marketing: Hold}}
	require.Equal(t, []string{"TICKET_CONFIRMATION"}, cfg.resendable())
	cfg.Policies[contract.Marketing] = Resend
	require.Equal(t, []string{"MARKETING", "TICKET_CONFIRMATION"}, cfg.resendable())
	require.Empty(t, Config{}.resendable())
}

// Processes of a deployment start together: each migrates, one does it.
func TestMigrateSideBySide(t *testing.T) {
	t.Parallel()
	var pools []*pgxpool.Pool
	first := newDatabaseFrom(t, "template1")
	for range 4 {
		pool, err := pgxpool.NewWithConfig(t.Context(), first.Config())
		require.NoError(t, err)
		defer pool.Close()
		pools = append(pools, pool)
	}
	g, ctx := errgroup.WithContext(t.Context())
	for _, pool := range pools {
		g.Go(func() error { return Migrate(ctx, pool) })
	}
	require.NoError(t, g.Wait())
	require.NoError(t, Migrate(t.Context(), first), "once more")

	var identity string
	require.NoError(t, first.QueryRow(t.Context(),
		`SELECT relreplident::text FROM pg_class WHERE relname = 'notifications'`).Scan(&identity))
	require.Equal(t, "f", identity, "old and new values in the WAL")
	var applied int
	require.NoError(t, first.QueryRow(t.Context(), `SELECT count(*) FROM goose_delivery WHERE version_id > 0`).Scan(&applied))
	files, err := migrationFiles.ReadDir("migrations")
	require.NoError(t, err)
	require.Equal(t, len(files), applied, "each once")
}

func TestUnknownIDs(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	id := uuid.New()
	_, err := b.Claim(t.Context(), id)
	require.ErrorIs(t, err, ErrNoRow)
	_, err = b.Accepted(t.Context(), id, 1, "p")
	require.ErrorIs(t, err, ErrNoRow)
	_, err = b.Transient(t.Context(), id, 1, Refusal{})
	require.ErrorIs(t, err, ErrNoRow)
	_, err = b.ByKey(t.Context(), "nobody")
	require.ErrorIs(t, err, ErrNoRow)
	_, err = b.Replay(t.Context(), id, 0)
	require.ErrorContains(t, err, "below 1")
}

// AC4: exactly N tries at the configured delays, then DEAD, once.
func TestTriesFollowTheDelays(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	cfg := testConfig(Resend)
	cfg.MaxAttempts = 5
	s := bench{t, b.pool, New(b.pool, cfg)}
	id := s.ticket("42")
	for try, delay := range []time.Duration{10 * time.Second, time.Minute, 5 * time.Minute, 5 * time.Minute} {
		r := s.claim(id)
		require.Equal(t, try+1, r.Attempts)
		out := must(s.Transient(t.Context(), id, r.Token, Refusal{Err: "451"}))(t)
		require.Equal(t, Failed, out.Row.Status)
		require.Equal(t, delay, out.Wait)
		require.Equal(t, delay, out.Row.NextAttemptAt.Sub(out.Row.ChangedAt))
		require.InDelta(t, delay.Seconds(), s.refusedClaim(id).Wait.Seconds(), 5)
		s.becomesDue(id)
	}
	out := must(s.Transient(t.Context(), id, s.claim(id).Token, Refusal{Err: "451 at last"}))(t)
	require.Equal(t, Dead, out.Row.Status)
	require.Zero(t, out.Wait)
	require.Equal(t, "451 at last", *out.Row.LastError)
	require.Equal(t, Claim{Status: Dead, Token: 5, Attempts: 5}, s.refusedClaim(id))
}

// AC5: a permanent refusal ends it at once.
func TestPermanentEndsAtOnce(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	id := b.ticket("42")
	out := must(b.Permanent(t.Context(), id, b.claim(id).Token, Refusal{Err: "550"}))(t)
	require.Equal(t, Dead, out.Row.Status)
	require.Equal(t, 1, out.Row.Attempts)
	require.Nil(t, out.Row.DLQPublishedAt)
}

// A throttle costs no attempt, and the server's own wait counts.
func TestThrottleIsFree(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	id := b.ticket("42")
	for range 10 {
		r := b.claim(id)
		require.Equal(t, 1, r.Attempts)
		out := must(b.Transient(t.Context(), id, r.Token, Refusal{Err: "429", Free: true, RetryAfter: 7 * time.Second}))(t)
		require.Equal(t, Failed, out.Row.Status)
		require.Equal(t, 7*time.Second, out.Wait)
		require.Zero(t, out.Row.Attempts)
		require.Zero(t, out.Row.Unsettled)
		b.becomesDue(id)
	}
	require.Equal(t, int64(11), b.claim(id).Token, "the token rises all the same")
}

func TestAmbiguousByPolicy(t *testing.T) {
	t.Parallel()
	for policy, want := range map[Policy]Status{Hold: Unknown, Resend: Failed, SameKey: Failed} {
		t.Run(string(policy), func(t *testing.T) {
			t.Parallel()
			b := newBench(t, policy)
			id := b.ticket("42")
			out := must(b.Ambiguous(t.Context(), id, b.claim(id).Token, "no reply after the dot"))(t)
			require.Equal(t, want, out.Row.Status)
			require.Equal(t, 1, out.Row.Unsettled)
			if want == Failed {
				require.Equal(t, 10*time.Second, out.Wait)
			}
		})
	}
}

// R12: a row past its lease that a cancel was requested for must not wait for
// ever; neither must one whose tries are used up. Both by redelivery and by
// sweep.
func TestLeaseOverThatNobodyMayClaim(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	held := func(booking string) uuid.UUID {
		id := b.ticket(booking)
		b.claim(id)
		b.leaseRunsOut(id)
		return id
	}
	cancelled, usedUp := held("cancelled"), held("used up")
	b.cancel("cancelled", 1)
	b.exec(`UPDATE notifications SET attempt_limit = 1 WHERE id = $1`, usedUp)
	claimable := held("claimable")

	require.Equal(t, Unknown, b.refusedClaim(cancelled).Status)
	require.True(t, b.get(cancelled).CancelAsked)
	require.Equal(t, []uuid.UUID{usedUp}, ids(must(b.LeaseOver(t.Context(), 10))(t)))
	require.Equal(t, Unknown, b.get(usedUp).Status)
	require.Equal(t, Sending, b.get(claimable).Status)
	require.Equal(t, int64(2), b.claim(claimable).Token)
}

// A takeover needs the database to have been up for longer than a lease: what
// was sent while it was down could not be marked.
func TestTakeoverWaitsAfterTheDatabaseStarted(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	cfg := testConfig(Resend)
	cfg.Lease = 24 * time.Hour
	slow := bench{t, b.pool, New(b.pool, cfg)}
	id := b.ticket("42")
	b.claim(id)
	b.leaseRunsOut(id)

	c := slow.refusedClaim(id)
	require.Equal(t, Sending, c.Status)
	require.Greater(t, c.Wait, 23*time.Hour)
	require.Empty(t, must(slow.ClaimBatch(t.Context(), contract.TicketConfirmation, 10))(t))
	slow.exec(`UPDATE notifications SET cancel_requested = true WHERE id = $1`, id)
	require.Empty(t, must(slow.LeaseOver(t.Context(), 10))(t))
	require.Equal(t, Sending, b.get(id).Status)
	require.Equal(t, Unknown, b.refusedClaim(id).Status, "with a lease that is shorter than the server's life")
}

// C-13 and LAB-DELAY: a reminder waits in its row, and a cancel finds it there.
func TestLabDelay(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	inThreeDays := time.Now().Add(72 * time.Hour)
	reminder := ticket("42")
	reminder.SendAfter = &inThreeDays
	id := b.insert(reminder)[0].ID
	require.InDelta(t, 72, b.refusedClaim(id).Wait.Hours(), 0.1)
	require.Empty(t, must(b.ClaimBatch(t.Context(), contract.TicketConfirmation, 10))(t))
	require.Empty(t, must(b.Overdue(t.Context(), 0, 10))(t))

	require.Equal(t, Cancelled, b.cancel("42", 1).Row.Status)
	b.exec(`UPDATE notifications SET send_after = now() - interval '1 hour'`)
	require.Equal(t, Claim{Status: Cancelled}, b.refusedClaim(id))
}

func TestExpiry(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	past := time.Now().Add(-time.Hour)
	var old []uuid.UUID
	for _, booking := range []string{"1", "2", "3"} {
		r := ticket(booking)
		r.ExpiresAt = &past
		old = append(old, b.insert(r)[0].ID)
	}
	b.exec(`UPDATE notifications SET unsettled = 1, status = 'FAILED', attempts = 1 WHERE id = $1`, old[1])
	fresh := b.ticket("4")

	require.Equal(t, Expired, b.refusedClaim(old[0]).Status, "by the claim itself")
	require.ElementsMatch(t, old[1:], ids(must(b.Expire(t.Context(), 10))(t)))
	require.Equal(t, Unknown, b.get(old[1]).Status, "a try may have delivered it")
	require.Equal(t, Expired, b.get(old[2]).Status)
	require.Equal(t, Pending, b.get(fresh).Status)
}

// SMS is stored and parked where people look.
func TestChannelWithoutASenderIsParked(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	sms := ticket("42")
	sms.Channel = contract.SMS
	id := b.insert(sms)[0].ID
	require.Equal(t, Claim{Status: Dead}, withoutToken(b.refusedClaim(id)))
	r := b.get(id)
	require.Equal(t, "channel SMS is not supported", *r.LastError)
	require.Equal(t, []uuid.UUID{id}, ids(must(b.Unstamped(t.Context(), 0, 10))(t)))
}

func withoutToken(c Claim) Claim { c.Token, c.Attempts = 0, 0; return c }

// C-14: one flag stops a campaign's mails at their claim.
func TestStoppedCampaign(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	mail := func(n int, campaign string) uuid.UUID {
		r := ticket(fmt.Sprintf("%s-%d", campaign, n))
		r.Type, r.CampaignID, r.BookingID = contract.Marketing, campaign, ""
		return b.insert(r)[0].ID
	}
	waiting, tried, running, other := mail(1, "spring"), mail(2, "spring"), mail(3, "spring"), mail(1, "autumn")
	b.exec(`UPDATE notifications SET unsettled = 1 WHERE id = $1`, tried)
	b.claim(running)
	require.NoError(t, b.StopCampaign(t.Context(), "spring"))
	require.NoError(t, b.StopCampaign(t.Context(), "spring"), "again")

	require.Equal(t, Cancelled, b.refusedClaim(waiting).Status)
	require.Equal(t, Unknown, b.refusedClaim(tried).Status)
	require.Positive(t, b.refusedClaim(running).Wait, "its attempt goes on")
	b.leaseRunsOut(running)
	require.Equal(t, Unknown, b.refusedClaim(running).Status)
	require.True(t, b.get(running).CancelAsked)
	claims := must(b.ClaimBatch(t.Context(), contract.Marketing, 10))(t)
	require.Len(t, claims, 1)
	require.Equal(t, other, claims[0].Row.ID)
}

// The bytes of a mail are written once, by a holder, and never change (OB-03).
func TestRenderedMailIsWrittenOnce(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	id := b.ticket("42")
	_, err := b.StoreRendered(t.Context(), id, 0, []byte("before the claim"))
	require.ErrorIs(t, err, ErrNotHeld)

	first := b.claim(id)
	require.Nil(t, first.Rendered)
	require.Equal(t, "one", string(must(b.StoreRendered(t.Context(), id, first.Token, []byte("one")))(t)))
	require.Equal(t, "one", string(must(b.StoreRendered(t.Context(), id, first.Token, []byte("two")))(t)), "the first stays")

	b.leaseRunsOut(id)
	second := b.claim(id)
	require.Equal(t, "one", string(second.Rendered), "a takeover sends the same bytes")
	require.Equal(t, first.FirstClaimedAt, second.FirstClaimedAt)
	_, err = b.StoreRendered(t.Context(), id, first.Token, []byte("three"))
	require.ErrorIs(t, err, ErrNotHeld)
	require.Equal(t, "one", string(must(b.StoreRendered(t.Context(), id, second.Token, []byte("four")))(t)))
}

// AC7: a replay sends a dead mail again and nothing else.
func TestReplay(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	sent, dead, cancelled := b.ticket("sent"), b.ticket("dead"), b.ticket("cancelled")
	must(b.Accepted(t.Context(), sent, b.claim(sent).Token, "p"))(t)
	for _, id := range []uuid.UUID{dead, cancelled} {
		must(b.Permanent(t.Context(), id, b.claim(id).Token, Refusal{Err: "550"}))(t)
	}
	b.cancel("cancelled", 1)
	for id, want := range map[uuid.UUID]Status{sent: Sent, cancelled: Cancelled} {
		out := must(b.Replay(t.Context(), id, 2))(t)
		require.False(t, out.Applied)
		require.Equal(t, want, out.Row.Status)
	}
	out := must(b.Replay(t.Context(), dead, 2))(t)
	require.True(t, out.Applied)
	require.Equal(t, Pending, out.Row.Status)
	require.Equal(t, 3, out.Row.AttemptLimit, "one used, two more")
	require.False(t, must(b.Replay(t.Context(), dead, 2))(t).Applied, "once")
	require.Equal(t, int64(2), b.claim(dead).Token, "the token is kept")
}

// A replay may forget the bytes that were refused, of a mail that was dead and of
// none other; without a transaction of the replay's it forgets nothing.
func TestForgetMail(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	forget := func(id uuid.UUID) {
		t.Helper()
		tx := b.begin()
		require.NoError(t, b.On(tx).ForgetMail(t.Context(), id))
		require.NoError(t, tx.Commit(t.Context()))
	}
	dead, open, sent := b.ticket("dead"), b.ticket("open"), b.ticket("sent")
	for _, id := range []uuid.UUID{dead, open, sent} {
		token := b.claim(id).Token
		must(b.StoreRendered(t.Context(), id, token, []byte("broken")))(t)
		switch id {
		case dead:
			must(b.Permanent(t.Context(), id, token, Refusal{Err: "550"}))(t)
			must(b.Replay(t.Context(), id, 1))(t)
		case open:
			must(b.Ambiguous(t.Context(), id, token, "no reply"))(t) // waits, and may have left a copy
		case sent:
			must(b.Accepted(t.Context(), id, token, "p"))(t)
		}
	}
	require.Error(t, b.ForgetMail(t.Context(), dead))
	require.Equal(t, "broken", string(b.get(dead).Rendered))
	for _, id := range []uuid.UUID{dead, open, sent} {
		forget(id)
	}
	require.Empty(t, b.get(dead).Rendered)
	require.Equal(t, "broken", string(b.get(open).Rendered))
	require.Equal(t, "broken", string(b.get(sent).Rendered))
	claimed := b.claim(dead)
	require.Equal(t, "fixed", string(must(b.StoreRendered(t.Context(), dead, claimed.Token, []byte("fixed")))(t)))
}

// A letter that was confirmed for one death is not taken for the next one's.
func TestEachDeathNeedsItsOwnLetter(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	id := b.ticket("42")
	die := func() {
		must(b.Permanent(t.Context(), id, b.claim(id).Token, Refusal{Err: "550"}))(t)
	}
	die()
	first := must(b.Unstamped(t.Context(), 0, 10))(t)
	require.Len(t, first, 1)
	require.Empty(t, must(b.Unstamped(t.Context(), time.Hour, 10))(t), "the worker gets its time first")
	fresh := must(b.RaiseAlert(t.Context(), "dead", first[0].DedupeKey, "550"))(t)
	require.True(t, fresh)

	must(b.Replay(t.Context(), id, 1))(t)
	die()
	require.NoError(t, b.StampDLQ(t.Context(), first))
	second := must(b.Unstamped(t.Context(), 0, 10))(t)
	require.Len(t, second, 1, "the second death is not stamped by the first one's letter")
	require.True(t, must(b.RaiseAlert(t.Context(), "dead", first[0].DedupeKey, "550"))(t), "a new incident")
	require.False(t, must(b.RaiseAlert(t.Context(), "dead", first[0].DedupeKey, "550"))(t), "the same one again")

	require.NoError(t, b.StampDLQ(t.Context(), second))
	require.Empty(t, must(b.Unstamped(t.Context(), 0, 10))(t))
	require.Equal(t, []uuid.UUID{id}, ids(must(b.DeadRows(t.Context(), After{}, 10))(t)))
}

func TestIncidents(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	raise := func(incident string) bool {
		return must(b.RaiseIncident(t.Context(), "lane-paused", "ticket", incident, "535"))(t)
	}
	require.True(t, raise("1"))
	require.False(t, raise("1"))
	require.True(t, raise("2"))
	require.True(t, must(b.RaiseAlert(t.Context(), "parked", "no such key", "why"))(t))
	require.False(t, must(b.RaiseAlert(t.Context(), "parked", "no such key", "why"))(t))
}

// TRAP: a proof of absence is about the attempts that it was made for.
func TestProofCoversTheAttemptsUpToItsToken(t *testing.T) {
	t.Parallel()
	b := newBench(t, Hold)
	id := b.ticket("42")
	lost := func() Row {
		return must(b.Ambiguous(t.Context(), id, b.claim(id).Token, "no reply"))(t).Row
	}
	first := lost()
	require.True(t, must(b.ProvenAbsent(t.Context(), id, first.Token))(t).Applied)
	second := lost()
	require.Equal(t, Unknown, second.Status)
	require.False(t, must(b.ProvenAbsent(t.Context(), id, first.Token))(t).Applied, "another reconciler, with the first proof")
	require.Equal(t, []uuid.UUID{id}, ids(must(b.UnknownRows(t.Context(), After{}, 10))(t)))

	b.cancel("42", 1)
	require.Equal(t, Cancelled, must(b.ProvenAbsent(t.Context(), id, second.Token))(t).Row.Status)
}

func TestProvenAbsentGivesOneMoreTry(t *testing.T) {
	t.Parallel()
	b := newBench(t, Hold)
	id := b.ticket("42")
	b.exec(`UPDATE notifications SET attempt_limit = 1`)
	r := must(b.Ambiguous(t.Context(), id, b.claim(id).Token, "no reply"))(t).Row
	out := must(b.ProvenAbsent(t.Context(), id, r.Token))(t)
	require.Equal(t, Pending, out.Row.Status)
	require.Zero(t, out.Row.Unsettled)
	require.Equal(t, 2, out.Row.AttemptLimit)
	r = must(b.Ambiguous(t.Context(), id, b.claim(id).Token, "no reply"))(t).Row
	require.Equal(t, Sent, must(b.Found(t.Context(), id, "p"))(t).Row.Status)
	require.False(t, must(b.ProvenAbsent(t.Context(), id, r.Token))(t).Applied)
}

// The sweeper's grace doubles with each rescue, and a claim ends the count.
func TestOverdueGraceGrowsPerRow(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	id := b.ticket("42")
	overdue := func() []uuid.UUID { return ids(must(b.Overdue(t.Context(), time.Minute, 10))(t)) }
	sinceRescue := func(d time.Duration) {
		b.exec(`UPDATE notifications SET rescued_at = now() - $1::interval`, d)
	}
	require.Empty(t, overdue(), "due for less than the grace")
	b.exec(`UPDATE notifications SET next_attempt_at = now() - interval '1 hour'`)
	require.Equal(t, int64(1), must(b.CountDue(t.Context(), contract.TicketConfirmation))(t))
	require.Zero(t, must(b.CountDue(t.Context(), contract.Marketing))(t))
	require.Empty(t, must(b.OverdueIn(t.Context(), contract.Marketing, 0, 10))(t))
	require.Empty(t, must(b.OverdueIn(t.Context(), contract.TicketConfirmation, 0, 0))(t), "none allowed")
	version := b.get(id).Version

	require.Equal(t, []uuid.UUID{id}, overdue())
	require.Empty(t, overdue(), "a second sweeper, or the same one again")
	for rescues, wait := range []time.Duration{2 * time.Minute, 4 * time.Minute, 8 * time.Minute} {
		sinceRescue(wait - time.Second)
		require.Empty(t, overdue())
		sinceRescue(wait + time.Second)
		require.Equal(t, []uuid.UUID{id}, overdue())
		require.Equal(t, rescues+2, b.get(id).Rescues)
	}
	require.Equal(t, version, b.get(id).Version, "a rescue is no transition")
	require.Zero(t, b.claim(id).Rescues)

	b.exec(`UPDATE notifications SET locked_until = now() - interval '61 seconds'`)
	require.Equal(t, []uuid.UUID{id}, overdue(), "a lease that a worker may take over")
	require.Empty(t, overdue())
	hold := New(b.pool, testConfig(Hold))
	b.exec(`UPDATE notifications SET rescued_at = NULL`)
	require.Empty(t, must(hold.Overdue(t.Context(), time.Minute, 10))(t), "under hold nobody may")
}

func TestRetentionKeepsWhatSomebodyWaitsFor(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	sent, dead, pending := b.ticket("sent"), b.ticket("dead"), b.ticket("pending")
	r := b.claim(sent)
	must(b.StoreRendered(t.Context(), sent, r.Token, []byte("mail")))(t)
	must(b.Accepted(t.Context(), sent, r.Token, "p"))(t)
	must(b.Permanent(t.Context(), dead, b.claim(dead).Token, Refusal{Err: "550"}))(t)
	for i := range 3 {
		b.cancel(fmt.Sprintf("absent-%d", i), 1)
	}
	b.exec(`UPDATE notifications SET changed_at = now() - interval '8 days'`)
	recent := b.cancel("recent", 1).Row.ID

	week := 7 * 24 * time.Hour
	require.Equal(t, int64(3), must(b.DeleteAtRest(t.Context(), week, 3))(t), "in batches")
	require.Equal(t, int64(1), must(b.DeleteAtRest(t.Context(), week, 3))(t))
	require.Zero(t, must(b.DeleteAtRest(t.Context(), week, 3))(t))
	for _, id := range []uuid.UUID{dead, pending, recent} {
		b.get(id)
	}
	var mails int
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT count(*) FROM notification_mails`).Scan(&mails))
	require.Zero(t, mails)
}

func TestListsAreRead(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	var want []uuid.UUID
	for i := range 5 {
		id := b.ticket(fmt.Sprint(i))
		must(b.Permanent(t.Context(), id, b.claim(id).Token, Refusal{Err: "550"}))(t)
		want = append(want, id)
	}
	var got []uuid.UUID
	var after After
	for {
		page := must(b.DeadRows(t.Context(), after, 2))(t)
		if len(page) == 0 {
			break
		}
		got = append(got, ids(page)...)
		last := page[len(page)-1]
		after = After{last.ChangedAt, last.ID}
	}
	require.Equal(t, want, got)
}

// OB-09: beyond the key's life a repetition would be a second mail.
func TestAskAgainNeedsALiveKey(t *testing.T) {
	t.Parallel()
	b := newBench(t, SameKey)
	id := b.ticket("42")
	b.exec(`UPDATE notifications SET attempt_limit = 1`)
	lost := func() Row {
		return must(b.Ambiguous(t.Context(), id, b.claim(id).Token, "no reply"))(t).Row
	}
	r := lost()
	require.Equal(t, Unknown, r.Status)
	require.False(t, must(b.AskAgain(t.Context(), id, r.Token, 0))(t).Applied)
	out := must(b.AskAgain(t.Context(), id, r.Token, time.Hour))(t)
	require.Equal(t, Pending, out.Row.Status)
	require.Equal(t, 1, out.Row.Unsettled, "nothing is proven")
	require.Equal(t, 2, out.Row.AttemptLimit)
	require.Equal(t, Sent, must(b.Accepted(t.Context(), id, b.claim(id).Token, "p"))(t).Row.Status)

	b.exec(`UPDATE notifications SET status = 'UNKNOWN', sent_at = NULL, token = 9, first_claimed_at = now() - interval '24 hours'`)
	require.False(t, must(b.AskAgain(t.Context(), id, 9, 23*time.Hour))(t).Applied)
	require.True(t, must(b.AskAgain(t.Context(), id, 9, 25*time.Hour))(t).Applied)
}

func TestAlertOfAnUnknownMailIsResolved(t *testing.T) {
	t.Parallel()
	b := newBench(t, Hold)
	id, other := b.ticket("42"), b.ticket("43")
	for _, id := range []uuid.UUID{id, other} {
		r := must(b.Ambiguous(t.Context(), id, b.claim(id).Token, "no reply"))(t).Row
		require.True(t, must(b.RaiseAlert(t.Context(), "mail-unknown", r.DedupeKey, "?"))(t))
	}
	require.Zero(t, must(b.ResolveUnknown(t.Context(), "mail-unknown"))(t))
	must(b.Found(t.Context(), id, "p"))(t)
	require.EqualValues(t, 1, must(b.ResolveUnknown(t.Context(), "mail-unknown"))(t))
	require.Zero(t, must(b.ResolveUnknown(t.Context(), "mail-unknown"))(t), "once")
}

// Counts are of one type, and tell due from waiting and a lease that is over
// from one that lives.
func TestCount(t *testing.T) {
	t.Parallel()
	b := newBench(t, Hold)
	none, err := b.Count(t.Context(), contract.TicketConfirmation)
	require.NoError(t, err)
	require.Equal(t, Counts{}, none)

	b.ticket("waits")
	later := ticket("later")
	at := time.Now().Add(time.Hour)
	later.SendAfter = &at
	b.insert(later)
	b.claim(b.ticket("sends"))
	over := b.ticket("over")
	b.claim(over)
	b.leaseRunsOut(over)
	dead := b.ticket("dead")
	must(b.Permanent(t.Context(), dead, b.claim(dead).Token, Refusal{Err: "550"}))(t)
	unknown := b.ticket("unknown")
	must(b.Ambiguous(t.Context(), unknown, b.claim(unknown).Token, "no reply"))(t)
	b.exec(`UPDATE notifications SET changed_at = now() - interval '1 hour' WHERE id = $1`, unknown)
	b.exec(`UPDATE notifications SET created_at = now() - interval '1 minute' WHERE booking_id = 'waits'`)

	c, err := b.Count(t.Context(), contract.TicketConfirmation)
	require.NoError(t, err)
	require.InDelta(t, time.Hour, c.OldestUnknown, float64(time.Minute))
	require.InDelta(t, time.Minute, c.OldestDue, float64(time.Minute))
	require.GreaterOrEqual(t, c.OldestDue, time.Minute)
	c.OldestUnknown, c.OldestDue = 0, 0
	require.Equal(t, Counts{Waiting: 2, Due: 1, Sending: 2, LeasesOver: 1, Unknown: 1, Dead: 1, Unstamped: 1}, c)
	others, err := b.Count(t.Context(), contract.Marketing)
	require.NoError(t, err)
	require.Equal(t, Counts{}, others)
}
