package delivery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"mailproof/system/contract"
)

// The differential test makes the search be about the SQL: every state of a
// row, reachable or not, under every statement, on a real Postgres; outcome
// and resulting row must be the model's.

const (
	diffToken      = 2 // of every row; events come with 1 (an old holder) and 2
	diffGeneration = 2
	diffLimit      = 3
	diffVersion    = 7
)

// diffEvent is one call of the store and its counterpart in the model.
type diffEvent struct {
	name  string
	run   func(ctx context.Context, s *Store, r Row) (applied bool, err error)
	model func(m model, r modelRow) (modelRow, bool)
	// batch, instead of run, is called once for the whole table.
	batch func(ctx context.Context, s *Store, limit int) ([]Row, error)
	// group is run with many callers at once.
	group func(ctx context.Context, g *Group, r Row) (applied bool, err error)
}

func TestStatementsAgreeWithTheModel(t *testing.T) {
	t.Parallel()
	pool := newDatabase(t)
	begin, compared := time.Now(), 0
	withOutbox(t, pool)
	for policy, topic := range map[Policy]string{Hold: "", Resend: "mail.events", SameKey: ""} {
		cfg := testConfig(policy)
		cfg.Events = topic // what writes an event moves the row in the same way
		cfg.MaxAttempts = diffLimit
		s := New(pool, cfg)
		m := model{policy: policy, attempts: diffLimit}
		for _, e := range diffEvents() {
			t.Run(string(policy)+"/"+e.name, func(t *testing.T) {
				compared += compare(t, pool, s, m, e)
			})
		}
	}
	t.Logf("%d pairs of state and statement compared in %s", compared, time.Since(begin).Round(time.Millisecond))
}

func compare(t *testing.T, pool *pgxpool.Pool, s *Store, m model, e diffEvent) int {
	t.Helper()
	ctx := t.Context()
	states := diffStates()
	before := fillTable(t, pool, s, states)

	applied, err := e.runAll(ctx, s, before)
	require.NoError(t, err)

	after := diffRows(t, s)
	for i, state := range states {
		want, changes := e.model(m, state)
		got, row, was := abstract(after[before[i].ID], state), after[before[i].ID], before[i]
		want.deaths, want.sms, want.stopped = 0, state.sms, state.stopped
		require.Equal(t, want, got, "%s under %s on %+v", e.name, m.policy, state)
		require.Equal(t, changes, applied[i], "%s under %s on %+v: applied", e.name, m.policy, state)
		if !changes {
			require.Equal(t, was, row, "%s under %s on %+v: refused, and yet the row changed", e.name, m.policy, state)
			continue
		}
		if e.name == "stamp_dlq" {
			require.Equal(t, was.Version, row.Version, "a stamp is no transition")
		} else {
			require.Greater(t, row.Version, was.Version, "%s under %s on %+v: version", e.name, m.policy, state)
		}
		require.Equal(t, intent(was), intent(row), "%s under %s on %+v: what the mail is", e.name, m.policy, state)
	}
	return len(states)
}

// runAll gives each row the event once, and says for which it applied.
func (e diffEvent) runAll(ctx context.Context, s *Store, rows []Row) ([]bool, error) {
	applied := make([]bool, len(rows))
	if e.batch != nil {
		changed, err := e.batch(ctx, s, len(rows))
		for i, r := range rows {
			applied[i] = slices.ContainsFunc(changed, func(c Row) bool { return c.ID == r.ID })
		}
		return applied, err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(8)
	if e.group != nil {
		together := NewGroup(s, time.Minute, 1)
		g.SetLimit(100)
		e.run = func(ctx context.Context, _ *Store, r Row) (bool, error) { return e.group(ctx, together, r) }
	}
	for i := range rows {
		g.Go(func() (err error) {
			applied[i], err = e.run(ctx, s, rows[i])
			return err
		})
	}
	return applied, g.Wait()
}

// intent is what no transition may change.
func intent(r Row) Row {
	return Row{
		ID: r.ID, DedupeKey: r.DedupeKey, BookingID: r.BookingID, CampaignID: r.CampaignID, EventID: r.EventID,
		Type: r.Type, Channel: r.Channel, Recipient: r.Recipient, Payload: r.Payload, Generation: r.Generation,
		SendAfter: r.SendAfter, ExpiresAt: r.ExpiresAt, PublishedAt: r.PublishedAt, CreatedAt: r.CreatedAt,
	}
}

// diffStates is a product of everything that a guard reads.
func diffStates() []modelRow {
	bools := []bool{false, true}
	var out []modelRow
	for status := mPending; status <= mExpired; status++ {
		for attempts := uint8(1); attempts <= diffLimit; attempts++ {
			for unsettled := uint8(0); unsettled <= 2; unsettled++ {
				for _, cancel := range bools {
					for _, late := range bools {
						for _, clock := range bools {
							for _, old := range bools {
								out = appendStates(out, modelRow{
									status: status, attempts: attempts, limit: diffLimit, token: diffToken,
									unsettled: unsettled, cancel: cancel, late: late,
									due: clock && status.waiting(), over: clock && status == mSending,
									stamped: clock && status == mDead, old: old,
								}, clock)
							}
						}
					}
				}
			}
		}
	}
	return out
}

// appendStates leaves out what no row can be (a held row has an unsettled
// attempt) and doubles, and adds the rarer dimensions where they are not
// hidden by another one.
func appendStates(out []modelRow, r modelRow, clock bool) []modelRow {
	if r.status == mSending && r.unsettled == 0 {
		return out
	}
	if clock && !r.due && !r.over && !r.stamped {
		return out
	}
	out = append(out, r)
	if r.late || r.old || r.attempts == 2 {
		return out
	}
	sms, stopped := r, r
	sms.sms, stopped.stopped = true, true
	return append(out, sms, stopped)
}

// fillTable replaces the table's rows by one for each state, and returns them.
func fillTable(t *testing.T, pool *pgxpool.Pool, s *Store, states []modelRow) []Row {
	t.Helper()
	ctx := t.Context()
	_, err := pool.Exec(ctx, `TRUNCATE notifications, stopped_campaigns, alerts, notification_mails`)
	require.NoError(t, err)
	require.NoError(t, s.StopCampaign(ctx, "stopped"))

	now := time.Now()
	past, future := now.Add(-time.Second), now.Add(time.Hour)
	ids := make([]uuid.UUID, len(states))
	values := make([][]any, len(states))
	for i, r := range states {
		ids[i] = uuid.New()
		values[i] = []any{
			ids[i], fmt.Sprintf("key-%d", i), fmt.Sprintf("booking-%d", i), when(r.stopped, "stopped"), fmt.Sprintf("event-%d", i),
			contract.TicketConfirmation, channelOf(r), "a@example.com", []byte(`{}`),
			modelStatusNames[r.status], diffGeneration, r.attempts, r.limit, r.token, r.unsettled, r.cancel,
			r.late, when(r.late, "late"),
			at(r.status == mSending, r.over, past, future), at(r.status.waiting(), r.due, past, future),
			when(r.old, past), when(r.stamped, past), when(r.status == mSent, past),
			past, now, diffVersion, past,
		}
	}
	_, err = pool.CopyFrom(ctx, pgx.Identifier{"notifications"}, []string{
		"id", "dedupe_key", "booking_id", "campaign_id", "event_id",
		"type", "channel", "recipient", "payload",
		"status", "generation", "attempts", "attempt_limit", "token", "unsettled", "cancel_requested",
		"late_accepted", "late_provider_id",
		"locked_until", "next_attempt_at",
		"expires_at", "dlq_published_at", "sent_at",
		"created_at", "changed_at", "version", "first_claimed_at",
	}, pgx.CopyFromRows(values))
	require.NoError(t, err)

	byID := diffRows(t, s)
	rows := make([]Row, len(ids))
	for i, id := range ids {
		rows[i] = byID[id]
	}
	return rows
}

func when[T any](set bool, v T) *T {
	if !set {
		return nil
	}
	return &v
}

func at(set, over bool, past, future time.Time) *time.Time {
	if over {
		return when(set, past)
	}
	return when(set, future)
}

func channelOf(r modelRow) contract.Channel {
	if r.sms {
		return contract.SMS
	}
	return contract.Email
}

func diffRows(t *testing.T, s *Store) map[uuid.UUID]Row {
	t.Helper()
	rows, err := s.rows(t.Context(), `SELECT `+columns+` FROM notifications n`)
	require.NoError(t, err)
	out := make(map[uuid.UUID]Row, len(rows))
	for _, r := range rows {
		out[r.ID] = r
	}
	return out
}

// abstract reads a row as the model sees it. The clock is the row's own
// changed_at: the facts as they were for the statement.
func abstract(r Row, was modelRow) modelRow {
	passed := func(at *time.Time) bool { return at != nil && !at.After(r.ChangedAt) }
	out := modelRow{
		attempts: uint8(r.Attempts), limit: uint8(r.AttemptLimit), token: uint8(r.Token), unsettled: uint8(r.Unsettled),
		cancel: r.CancelAsked, late: r.LateAccepted, stamped: r.DLQPublishedAt != nil, old: passed(r.ExpiresAt),
		over: passed(r.LockedUntil), sms: was.sms, stopped: was.stopped,
	}
	for m, s := range modelStatusNames {
		if s == r.Status {
			out.status = m
		}
	}
	if r.Status.Waiting() {
		out.due = r.NextAttemptAt == nil || passed(r.NextAttemptAt)
	}
	return out
}

// raw runs a statement that returns the changed rows.
func raw(sql string, args func(s *Store, r Row) []any) func(context.Context, *Store, Row) (bool, error) {
	return func(ctx context.Context, s *Store, r Row) (bool, error) {
		rows, err := s.rows(ctx, sql, args(s, r)...)
		return len(rows) == 1, err
	}
}

func applied(out Outcome, err error) (bool, error) { return out.Applied || out.Flagged, err }

func diffEvents() []diffEvent {
	events := []diffEvent{
		{name: "insert", run: func(ctx context.Context, s *Store, r Row) (bool, error) {
			in := ticket("x")
			in.DedupeKey, in.EventID = r.DedupeKey, *r.EventID+" again"
			out, err := s.Insert(ctx, []NewRow{in})
			return err == nil && out[0].New, err
		}, model: model.insert},
		{name: "claim", run: func(ctx context.Context, s *Store, r Row) (bool, error) {
			_, err := s.one(ctx, sqlClaim, r.ID, s.cfg.Lease, s.resendable)
			if errors.Is(err, ErrNoRow) {
				return false, nil
			}
			return err == nil, err
		}, model: model.claim},
		{name: "lease_over", run: raw(sqlLeaseOver, func(s *Store, r Row) []any { return []any{r.ID, s.cfg.Lease, s.resendable} }), model: model.leaseOver},
		{name: "cancel_campaign", run: raw(sqlCancelCampaign, func(s *Store, r Row) []any { return []any{r.ID, s.cfg.Lease} }), model: model.cancelCampaign},
		{name: "expire", run: raw(sqlExpire, func(_ *Store, r Row) []any { return []any{r.ID} }), model: model.expire},
		{name: "park", run: func(ctx context.Context, s *Store, r Row) (bool, error) {
			return applied(s.Park(ctx, r.ID, "no sender"))
		}, model: model.park},
		{name: "replay", run: func(ctx context.Context, s *Store, r Row) (bool, error) {
			return applied(s.Replay(ctx, r.ID, 2))
		}, model: func(m model, r modelRow) (modelRow, bool) { return m.replay(r, 2) }},
		{name: "found", run: func(ctx context.Context, s *Store, r Row) (bool, error) {
			return applied(s.Found(ctx, r.ID, "found"))
		}, model: model.found},
		{name: "stamp_dlq", run: func(ctx context.Context, s *Store, r Row) (bool, error) {
			err := s.StampDLQ(ctx, []Row{r})
			return r.Status == Dead && r.DLQPublishedAt == nil, err
		}, model: func(m model, r modelRow) (modelRow, bool) { return m.stampDLQ(r, r.deaths) }},
		{name: "stamp_dlq of an earlier death", run: func(ctx context.Context, s *Store, r Row) (bool, error) {
			r.Version -= 2
			return false, s.StampDLQ(ctx, []Row{r})
		}, model: func(m model, r modelRow) (modelRow, bool) { return m.stampDLQ(r, r.deaths+1) }},
		{name: "claim and what it brings to an end", run: claimCall, model: claimModel},
	}
	events = append(events, batchEvents()...)
	for _, token := range []uint8{diffToken - 1, diffToken} {
		events = append(events, settleEvents(token)...)
	}
	return append(events, cancelEvents()...)
}

func batchEvents() []diffEvent {
	return []diffEvent{
		{name: "claim_batch", batch: func(ctx context.Context, s *Store, limit int) ([]Row, error) {
			claims, err := s.ClaimBatch(ctx, contract.TicketConfirmation, limit)
			rows := make([]Row, len(claims))
			for i, c := range claims {
				rows[i] = *c.Row
			}
			return rows, err
		}, model: model.claim},
		{name: "claim_group", batch: func(ctx context.Context, s *Store, _ int) ([]Row, error) {
			return grouped(ctx, s, sqlClaimGroup, scanWithMail, s.cfg.Lease, s.resendable)
		}, model: model.claim},
		{name: "cancel_campaign_group", batch: func(ctx context.Context, s *Store, _ int) ([]Row, error) {
			return grouped(ctx, s, s.statement(sqlCancelCampaignGroup), scanRow)
		}, model: func(m model, r modelRow) (modelRow, bool) {
			if !r.status.waiting() { // a lease that is over is left to the single statement
				return r, false
			}
			return m.cancelCampaign(r)
		}},
		{name: "expire_group", batch: func(ctx context.Context, s *Store, _ int) ([]Row, error) {
			return grouped(ctx, s, s.statement(sqlExpireGroup), scanRow)
		}, model: model.expire},
		{name: "claims of a group, and what they bring to an end", group: func(ctx context.Context, g *Group, r Row) (bool, error) {
			return claimRow(ctx, g.Store, g.Claim, r)
		}, model: claimModel},
		{name: "lease_over_batch", batch: func(ctx context.Context, s *Store, limit int) ([]Row, error) {
			return s.LeaseOver(ctx, limit)
		}, model: model.leaseOver},
		{name: "expire_batch", batch: func(ctx context.Context, s *Store, limit int) ([]Row, error) {
			return s.Expire(ctx, limit)
		}, model: model.expire},
	}
}

// grouped gives a statement the ids of all rows, as a group would of some.
func grouped(ctx context.Context, s *Store, sql string, scan pgx.RowToFunc[Row], args ...any) ([]Row, error) {
	all, err := s.rows(ctx, `SELECT `+columns+` FROM notifications n`)
	if err != nil {
		return nil, err
	}
	return s.group(ctx, scan, sql, append([]any{ids(all)}, args...)...)
}

func settleEvents(token uint8) []diffEvent {
	named := func(name string) string { return fmt.Sprintf("%s with token %d of %d", name, token, diffToken) }
	transient := func(free bool) diffEvent {
		return diffEvent{name: named(fmt.Sprintf("transient (free %t)", free)), run: func(ctx context.Context, s *Store, r Row) (bool, error) {
			return applied(s.Transient(ctx, r.ID, int64(token), Refusal{Err: "451", Free: free}))
		}, model: func(m model, r modelRow) (modelRow, bool) { return m.transient(r, token, free) }}
	}
	return []diffEvent{
		transient(false),
		transient(true),
		{name: named("accepted"), run: func(ctx context.Context, s *Store, r Row) (bool, error) {
			return applied(s.Accepted(ctx, r.ID, int64(token), "250"))
		}, model: func(m model, r modelRow) (modelRow, bool) {
			if to, ok := m.accepted(r, token); ok {
				return to, true
			}
			return m.acceptedLate(r, token)
		}},
		{name: named("accepted_group"), batch: func(ctx context.Context, s *Store, _ int) ([]Row, error) {
			all, err := s.rows(ctx, `SELECT `+columns+` FROM notifications n`)
			if err != nil {
				return nil, err
			}
			asked := make([]accepting, len(all))
			for i, r := range all {
				asked[i] = accepting{id: r.ID, token: int64(token), providerID: "250"}
			}
			answers, err := s.acceptedGroup(ctx, asked)
			var moved []Row
			for _, a := range answers {
				if a != nil {
					moved = append(moved, a.Row)
				}
			}
			return moved, err
		}, model: func(m model, r modelRow) (modelRow, bool) { return m.accepted(r, token) }},
		{name: named("accepted in a group"), group: func(ctx context.Context, g *Group, r Row) (bool, error) {
			return applied(g.Accepted(ctx, r.ID, int64(token), "250"))
		}, model: func(m model, r modelRow) (modelRow, bool) {
			if to, ok := m.accepted(r, token); ok {
				return to, true
			}
			return m.acceptedLate(r, token)
		}},
		{name: named("permanent"), run: func(ctx context.Context, s *Store, r Row) (bool, error) {
			return applied(s.Permanent(ctx, r.ID, int64(token), Refusal{Err: "550"}))
		}, model: func(m model, r modelRow) (modelRow, bool) { return m.permanent(r, token) }},
		{name: named("ambiguous"), run: func(ctx context.Context, s *Store, r Row) (bool, error) {
			return applied(s.Ambiguous(ctx, r.ID, int64(token), "no reply"))
		}, model: func(m model, r modelRow) (modelRow, bool) { return m.ambiguous(r, token) }},
		{name: named("proven_absent"), run: func(ctx context.Context, s *Store, r Row) (bool, error) {
			return applied(s.ProvenAbsent(ctx, r.ID, int64(token)))
		}, model: func(m model, r modelRow) (modelRow, bool) { return m.provenAbsent(r, token) }},
		{name: named("ask_again"), run: func(ctx context.Context, s *Store, r Row) (bool, error) {
			return applied(s.AskAgain(ctx, r.ID, int64(token), time.Hour))
		}, model: func(m model, r modelRow) (modelRow, bool) { return m.askAgain(r, token) }},
	}
}

func cancelEvents() []diffEvent {
	cancel := func(name, otherKey string, generation int, model func(model, modelRow) (modelRow, bool)) diffEvent {
		return diffEvent{name: name, run: func(ctx context.Context, s *Store, r Row) (bool, error) {
			out, err := s.Cancel(ctx, CancelRequest{
				BookingID: r.BookingID, DedupeKey: r.DedupeKey + otherKey, Generation: generation,
			})
			if otherKey != "" {
				return len(out.Others) == 1, err
			}
			return out.Changed, err
		}, model: model}
	}
	return []diffEvent{
		cancel("cancel", "", diffGeneration, model.cancel),
		cancel("cancel of a newer generation", "", diffGeneration+1, model.cancel),
		cancel("cancel of an older generation", "", diffGeneration-1, model.cancelOld),
		cancel("cancel_booking", " of another mail", diffGeneration, model.cancelRow),
		cancel("cancel_booking of an older generation", " of another mail", diffGeneration-1, model.cancelOld),
	}
}

// claimCall is the whole of Store.Claim. Applied means here: the row changed.
func claimCall(ctx context.Context, s *Store, r Row) (bool, error) {
	return claimRow(ctx, s, s.Claim, r)
}

func claimRow(ctx context.Context, s *Store, claim func(context.Context, uuid.UUID) (Claim, error), r Row) (bool, error) {
	c, err := claim(ctx, r.ID)
	if err != nil {
		return false, err
	}
	switch {
	case c.Row != nil && (c.Status != Sending || c.Row.Token != r.Token+1 || c.LeaseLeft != s.cfg.Lease):
		return false, fmt.Errorf("won claim is %+v", c)
	case c.Row == nil && c.Status.Settled() != (c.Wait == 0):
		return false, fmt.Errorf("refused claim is %+v", c)
	case c.Row != nil:
		return true, nil
	}
	now, err := s.Get(ctx, r.ID)
	return now.Version != r.Version, err
}

func claimModel(m model, r modelRow) (modelRow, bool) {
	changed := false
	for {
		if to, ok := m.claim(r); ok {
			return to, true
		}
		to, ok := m.cancelCampaign(r)
		if !ok {
			to, ok = m.expire(r)
		}
		if !ok && r.sms {
			to, ok = m.park(r)
		}
		if !ok {
			to, ok = m.leaseOver(r)
		}
		if !ok {
			return r, changed
		}
		r, changed = to, true
	}
}
