package delivery

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"mailproof/system/contract"
)

// explainedRows is large enough that a plan that reads the whole table is
// never the cheap one for a question about a few rows.
const explainedRows = 50_000

// No statement reads the whole table: neither with the plan for the values at
// hand, nor with the generic plan that a prepared statement may get.
func TestNoStatementScansTheTable(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	fillForExplain(t, b)
	tx := b.begin()
	e := &explainer{t: t, tx: tx, plans: map[string]bool{}}
	s := &Store{db: e, cfg: b.cfg, resendable: b.resendable}
	ctx := t.Context()

	var pending, sending uuid.UUID
	require.NoError(t, tx.QueryRow(ctx, `SELECT id FROM notifications WHERE status = 'PENDING' LIMIT 1`).Scan(&pending))
	require.NoError(t, tx.QueryRow(ctx, `SELECT id FROM notifications WHERE status = 'SENDING' AND locked_until > now() + interval '1 minute' LIMIT 1`).Scan(&sending))

	// Refused calls, so that the looks that follow a refusal are run too.
	must(s.Insert(ctx, []NewRow{ticket("new"), ticket("1"), ticket("2")}))(t)
	require.NoError(t, s.StampPublished(ctx, []uuid.UUID{pending}))
	must(s.Claim(ctx, sending))(t)
	must(s.ClaimBatch(ctx, contract.TicketConfirmation, 10))(t)
	_, err := s.StoreRendered(ctx, pending, 77, []byte("mail"))
	require.ErrorIs(t, err, ErrNotHeld)
	must(s.Accepted(ctx, sending, 77, "p"))(t)
	must(s.Transient(ctx, sending, 77, Refusal{Err: "451"}))(t)
	must(s.Permanent(ctx, sending, 77, Refusal{Err: "550"}))(t)
	must(s.Ambiguous(ctx, sending, 77, "no reply"))(t)
	must(s.LeaseOver(ctx, 10))(t)
	must(s.Cancel(ctx, cancelOf("3", 1)))(t)
	must(s.Expire(ctx, 10))(t)
	must(s.Replay(ctx, sending, 1))(t)
	must(s.Found(ctx, sending, "p"))(t)
	must(s.ProvenAbsent(ctx, sending, 77))(t)
	must(s.AskAgain(ctx, sending, 77, time.Hour))(t)
	must(s.Park(ctx, sending, "no sender"))(t)
	must(s.OverdueIn(ctx, contract.TicketConfirmation, time.Minute, 10_000))(t) // more than there are, so that leases are asked for too
	must(s.CountDue(ctx, contract.TicketConfirmation))(t)
	must(s.Unstamped(ctx, time.Second, 10))(t)
	require.NoError(t, s.StampDLQ(ctx, []Row{{ID: sending, Version: 1}}))
	must(s.DeadRows(ctx, After{}, 10))(t)
	must(s.DeadWhere(ctx, DeadFilter{Reason: "451"}, After{}, 10))(t)
	must(s.ByIDs(ctx, []uuid.UUID{pending, sending}))(t)
	must(s.UnknownRows(ctx, After{}, 10))(t)
	must(s.DeleteAtRest(ctx, time.Hour, 10))(t)
	must(s.RaiseAlert(ctx, "dead", "ticket:1", "why"))(t)
	must(s.ByKey(ctx, "ticket:1"))(t)
	require.NoError(t, s.StopCampaign(ctx, "spring"))
	// The ends that a refused claim brings about.
	must(s.rows(ctx, sqlCancelCampaign, sending, s.cfg.Lease))(t)
	must(s.rows(ctx, sqlExpire, sending))(t)
	must(s.rows(ctx, sqlLeaseOver, sending, s.cfg.Lease, s.resendable))(t)

	for _, name := range statementNames(t) {
		require.True(t, e.plans[name], "statement %q was not explained", name)
	}
}

// statementNames are the first lines of the statements in sql.go.
func statementNames(t *testing.T) []string {
	t.Helper()
	src, err := os.ReadFile("sql.go")
	require.NoError(t, err)
	var names []string
	for _, m := range regexp.MustCompile("`-- (\\w+)\n").FindAllStringSubmatch(string(src), -1) {
		names = append(names, m[1])
	}
	require.Greater(t, len(names), 30)
	return names
}

// fillForExplain makes a table as it looks after a while: most rows at rest,
// some thousands waiting, and something in every state.
func fillForExplain(t *testing.T, b bench) {
	t.Helper()
	b.exec(`
INSERT INTO notifications (id, dedupe_key, booking_id, event_id, type, channel, recipient, payload, status, generation,
  attempts, attempt_limit, token, unsettled, locked_until, next_attempt_at, expires_at, sent_at, dlq_published_at,
  created_at, changed_at)
SELECT gen_random_uuid(), 'ticket:' || i, i::text, 'event-' || i,
  CASE WHEN i % 3 = 0 THEN 'MARKETING' ELSE 'TICKET_CONFIRMATION' END, 'EMAIL', 'a@example.com', '{}', s.status, 1,
  1, 3, 1, 1,
  CASE WHEN s.status = 'SENDING' THEN now() + interval '1 hour' * (i / 100 % 5 - 1) END,
  CASE WHEN s.status IN ('PENDING', 'FAILED') THEN now() + interval '1 minute' * (i / 100 % 60 - 30) END,
  CASE WHEN i / 100 % 10 = 0 THEN now() + interval '1 minute' * (i % 60 - 10) END,
  CASE WHEN s.status = 'SENT' THEN now() END,
  CASE WHEN s.status = 'DEAD' AND i / 100 % 2 = 0 THEN now() END,
  now() - interval '1 second' * i, now() - interval '1 second' * i
FROM generate_series(1, $1) AS i, LATERAL (SELECT CASE
  WHEN i % 100 < 84 THEN 'SENT' WHEN i % 100 < 92 THEN 'PENDING' WHEN i % 100 < 95 THEN 'FAILED'
  WHEN i % 100 < 96 THEN 'SENDING' WHEN i % 100 < 97 THEN 'UNKNOWN' WHEN i % 100 < 98 THEN 'DEAD'
  WHEN i % 100 < 99 THEN 'CANCELLED' ELSE 'EXPIRED' END AS status) AS s`, explainedRows)
	b.exec(`INSERT INTO notification_mails (notification_id, mail) SELECT id, 'mail' FROM notifications`)
	b.exec(`VACUUM ANALYZE notifications`)
	b.exec(`VACUUM ANALYZE notification_mails`)
}

// explainer is a DB that looks at the plans of each statement before it runs
// it.
type explainer struct {
	t     *testing.T
	tx    pgx.Tx
	plans map[string]bool
}

func (e *explainer) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	e.explain(ctx, sql, args)
	return e.tx.Query(ctx, sql, args...)
}

func (e *explainer) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	e.explain(ctx, sql, args)
	return e.tx.Exec(ctx, sql, args...)
}

func (e *explainer) explain(ctx context.Context, sql string, args []any) {
	name := strings.TrimPrefix(strings.SplitN(sql, "\n", 2)[0], "-- ")
	if e.plans[name] {
		return
	}
	e.plans[name] = true
	e.check(name, e.plan(ctx, "EXPLAIN (FORMAT JSON) "+sql, args...))

	_, err := e.tx.Exec(ctx, "SET LOCAL plan_cache_mode = force_generic_plan")
	require.NoError(e.t, err)
	_, err = e.tx.Exec(ctx, "PREPARE explained AS "+sql)
	require.NoError(e.t, err, name)
	nulls := strings.TrimSuffix(strings.Repeat("NULL,", len(args)), ",")
	e.check(name+" (generic)", e.plan(ctx, fmt.Sprintf("EXPLAIN (FORMAT JSON) EXECUTE explained(%s)", nulls)))
	_, err = e.tx.Exec(ctx, "DEALLOCATE explained")
	require.NoError(e.t, err)
}

func (e *explainer) plan(ctx context.Context, sql string, args ...any) (plan any) {
	var text []byte
	require.NoError(e.t, e.tx.QueryRow(ctx, sql, args...).Scan(&text), sql)
	require.NoError(e.t, json.Unmarshal(text, &plan))
	return plan
}

func (e *explainer) check(name string, plan any) {
	for _, scan := range scans(plan) {
		require.False(e.t, strings.HasPrefix(scan, "Seq Scan on notification"), "%s: %s", name, scan)
	}
}

// scans lists a plan's reads of tables, as "node on relation (rows)".
func scans(plan any) []string {
	var out []string
	switch p := plan.(type) {
	case []any:
		for _, q := range p {
			out = append(out, scans(q)...)
		}
	case map[string]any:
		if relation, ok := p["Relation Name"].(string); ok {
			rows, _ := p["Plan Rows"].(float64)
			out = append(out, fmt.Sprintf("%s on %s (%s rows)", p["Node Type"], relation, strconv.Itoa(int(rows))))
		}
		for _, q := range p {
			out = append(out, scans(q)...)
		}
	}
	return out
}
