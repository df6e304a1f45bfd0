package delivery

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"mailproof/system/contract"
	"mailproof/system/plantest"
)

// explainedRows is large enough that a plan that reads the whole table is
// never the cheap one for a question about a few rows. "make plans" runs the
// same with a million.
const explainedRows = 50_000

// No statement reads the whole table, and none examines more rows than its
// limit or the state that it asks about explains: neither with the plan for the
// values at hand, nor with the generic plan that a prepared statement may get,
// nor where it writes a mail event as well.
func TestNoStatementScansTheTable(t *testing.T) {
	t.Parallel()
	rows := plantest.Rows(t, explainedRows)
	b := tellingBench(t, Resend)
	fillForExplain(t, b, rows)
	tx := b.begin()
	e := plantest.New(t, tx, "delivery", rows)
	plain := &Store{db: e, cfg: testConfig(Resend), resendable: b.resendable}
	telling := New(b.pool, b.cfg)
	telling.db = e

	var r explained
	for status, id := range map[string]*uuid.UUID{"PENDING": &r.pending, "FAILED": &r.failed, "DEAD": &r.dead, "UNKNOWN": &r.unknown, "SENT": &r.sent} {
		require.NoError(t, tx.QueryRow(t.Context(), `SELECT id FROM notifications WHERE status = $1 LIMIT 1`, status).Scan(id))
	}
	require.NoError(t, tx.QueryRow(t.Context(),
		`SELECT id FROM notifications WHERE status = 'SENDING' AND locked_until > now() LIMIT 1`).Scan(&r.sending))
	require.NoError(t, tx.QueryRow(t.Context(),
		`SELECT id FROM notifications WHERE status = 'SENDING' AND locked_until < now() LIMIT 1`).Scan(&r.over))

	runEach(t, plain, r)
	for _, name := range statementNames(t) {
		require.True(t, e.Statements()[name], "statement %q was not explained", name)
	}
	e.Suffix(" + event")
	runEach(t, telling, r)

	var waiting, dead, leases, unknown int64
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT count(*) FILTER (WHERE status IN ('PENDING', 'FAILED')),
		count(*) FILTER (WHERE status = 'DEAD'), count(*) FILTER (WHERE status = 'SENDING'),
		count(*) FILTER (WHERE status = 'UNKNOWN') FROM notifications`).Scan(&waiting, &dead, &leases, &unknown))
	e.Check(func(statement string) int64 {
		switch statement {
		case "count_due":
			return waiting // it counts them
		case "counts":
			return 2*waiting + 2*dead + 2*leases + 2*unknown + 1
		case "list_dead_where":
			return dead // a filter on the error's text has no index
		case "count_dead":
			return dead // it counts them
		case "lease_over", "lease_over_batch", "overdue_lease":
			// Those that another policy or a grace leaves alone; and the planner may
			// find a single row by the index of all leases, which is as short.
			return 2*leases + 2*batch
		case "claim_batch":
			if rows < 500_000 { // the due rows of a small table are sorted
				return waiting + leases
			}
			return 8 * batch // due, over, picked, and their mails
		case "overdue":
			return waiting + 2*batch // as many as are wanted
		case "campaign_state":
			return int64(rows) / 10 // it counts them
		case "resolve_unknown":
			return 4 * openAlerts
		case "delete_at_rest":
			return 6 * batch // found, locked, deleted, and their mails
		default:
			return 5 * batch
		}
	})
}

// batch is the limit of each statement that has one; openAlerts are those of the
// kind that is asked for.
const (
	batch      = 10
	openAlerts = 100
)

// explained are rows of the filled table by their state.
type explained struct{ pending, failed, sending, over, dead, unknown, sent uuid.UUID }

// runEach runs each statement at least once so that it does its work, and once
// so that it is refused, for the looks that follow a refusal.
func runEach(t *testing.T, s *Store, r explained) {
	t.Helper()
	ctx := t.Context()
	must(s.Insert(ctx, []NewRow{ticket("new"), ticket("1"), ticket("2")}))(t)
	require.NoError(t, s.StampPublished(ctx, []uuid.UUID{r.pending}))
	must(s.Claim(ctx, r.sending))(t)
	must(s.Claim(ctx, r.over))(t)
	must(s.claimGroup(ctx, []uuid.UUID{r.sending, r.failed, r.sent}))(t)
	must(s.storeGroup(ctx, []storing{{id: r.sending, token: 1, mail: []byte("mail")}, {id: r.dead, token: 77, mail: []byte("mail")}}))(t)
	must(s.acceptedGroup(ctx, []accepting{{id: r.sending, token: 77}, {id: r.dead, token: 1}}))(t)
	must(s.ClaimBatch(ctx, contract.TicketConfirmation, batch))(t)
	must(s.ClaimBatch(ctx, contract.Marketing, batch))(t)
	_, err := s.StoreRendered(ctx, r.pending, 77, []byte("mail"))
	require.ErrorIs(t, err, ErrNotHeld)
	for _, token := range []int64{77, 1} {
		must(s.Transient(ctx, r.sending, token, Refusal{Err: "451"}))(t)
		must(s.Accepted(ctx, r.sending, token, "p"))(t)
	}
	must(s.Permanent(ctx, r.over, 77, Refusal{Err: "550"}))(t)
	must(s.Ambiguous(ctx, r.over, 77, "no reply"))(t)
	must(s.LeaseOver(ctx, batch))(t)
	must(s.Cancel(ctx, cancelOf("3", 1)))(t)
	must(s.Cancel(ctx, cancelOf("never-seen", 1)))(t)
	must(s.Expire(ctx, batch))(t)
	must(s.Replay(ctx, r.dead, 1))(t)
	explainOnly(t, s, sqlForgetMail, r.dead)
	must(s.Found(ctx, r.unknown, "p"))(t)
	must(s.ProvenAbsent(ctx, r.sending, 77))(t)
	must(s.AskAgain(ctx, r.sending, 77, time.Hour))(t)
	must(s.Park(ctx, r.failed, "no sender"))(t)
	must(s.OverdueIn(ctx, contract.TicketConfirmation, time.Minute, 1_000_000))(t) // more than there are, so that leases are asked for too
	must(s.OverdueIn(ctx, contract.Marketing, time.Minute, batch))(t)
	must(s.CountDue(ctx, contract.TicketConfirmation))(t)
	must(s.CountDue(ctx, contract.Marketing))(t)
	must(s.Count(ctx, contract.Marketing))(t)
	must(s.Count(ctx, contract.TicketConfirmation))(t)
	must(s.Unstamped(ctx, time.Second, batch))(t)
	require.NoError(t, s.StampDLQ(ctx, []Row{{ID: r.sending, Version: 1}}))
	must(s.DeadRows(ctx, After{}, batch))(t)
	must(s.DeadWhere(ctx, DeadFilter{Reason: "is not in any error"}, After{}, batch))(t)
	must(s.ByIDs(ctx, []uuid.UUID{r.pending, r.sending}))(t)
	must(s.CountDead(ctx))(t)
	must(s.UnknownRows(ctx, After{}, batch))(t)
	must(s.DeleteAtRest(ctx, time.Hour, batch))(t)
	must(s.ResolveUnknown(ctx, "mail-unknown"))(t)
	must(s.RaiseAlert(ctx, "dead", "ticket:1", "why"))(t)
	must(s.ByKey(ctx, "ticket:1"))(t)
	must(s.Now(ctx))(t)
	must(s.ByBooking(ctx, "1", 50))(t)
	must(s.CancelOf(ctx, "1"))(t)
	must(s.AlertsOf(ctx, []string{"mail-unknown", "mail-dead"}, "ticket:1"))(t)
	explainOnly(t, s, sqlToldOf, r.sent)
	require.NoError(t, s.StopCampaign(ctx, "spring"))
	must(s.CampaignStopped(ctx, "spring"))(t)
	must(s.Campaign(ctx, "spring-3"))(t)
	// The ends that a refused claim brings about.
	must(s.rows(ctx, sqlCancelCampaign, r.sending, s.cfg.Lease))(t)
	must(s.rows(ctx, sqlExpire, r.sending))(t)
	must(s.rows(ctx, sqlLeaseOver, r.sending, s.cfg.Lease, s.resendable))(t)
	// Asked inside a transaction of the service's own.
	key := "ticket:1"
	must(s.rows(ctx, sqlSendAgainLock, key))(t)
	explainOnly(t, s, sqlSendAgainCheck, key)
	explainOnly(t, s, sqlSendAgain, key, uuid.New(), 3)
}

// explainOnly looks at a statement whose answer is not a row of the store.
func explainOnly(t *testing.T, s *Store, sql string, args ...any) {
	t.Helper()
	rows, err := s.db.Query(t.Context(), sql, args...)
	require.NoError(t, err)
	rows.Close()
	require.NoError(t, rows.Err())
}

// TestThePlansAreDocumented: a statement that is new or has another name wants
// another "make plans".
func TestThePlansAreDocumented(t *testing.T) {
	t.Parallel()
	document, err := os.ReadFile(filepath.Join("..", "..", "docs", "statement-plans.md"))
	require.NoError(t, err)
	for _, name := range statementNames(t) {
		require.Regexp(t, `(?m)^\| `+name+`( \+ event)? \|`, string(document), "make plans was not run since %s is there", name)
	}
}

// statementNames are the first lines of the statements of the package.
func statementNames(t *testing.T) []string {
	t.Helper()
	var names []string
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		src, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, m := range regexp.MustCompile("`-- (\\w+)\n").FindAllStringSubmatch(string(src), -1) {
			names = append(names, m[1])
		}
	}
	require.Greater(t, len(names), 35)
	return names
}

// fillForExplain makes a table as it looks after a while: 92 of 100 rows SENT,
// five of a marketing campaign that is due and waits its turn (50,000 of a
// million), the rest in every other state. Each row has its mail, which is why
// the second table is the larger one.
func fillForExplain(t *testing.T, b bench, rows int) {
	t.Helper()
	b.exec(`
INSERT INTO notifications (id, dedupe_key, booking_id, campaign_id, event_id, type, channel, recipient, payload, status, generation,
  attempts, attempt_limit, token, unsettled, locked_until, next_attempt_at, expires_at, first_claimed_at, sent_at, dlq_published_at,
  published_at, last_error, created_at, changed_at)
SELECT gen_random_uuid(), CASE WHEN s.campaign IS NULL THEN 'ticket:' || i ELSE 'campaign:' || s.campaign || ':' || md5(i::text) END,
  CASE WHEN s.campaign IS NULL THEN i::text ELSE '' END, s.campaign, 'event-' || i,
  CASE WHEN s.campaign IS NULL THEN 'TICKET_CONFIRMATION' ELSE 'MARKETING' END, 'EMAIL', 'guest' || i || '@example.com',
  jsonb_build_object('bookingId', i, 'event', 'Final', 'seats', jsonb_build_array('A-1', 'A-2')), s.status, 1,
  CASE WHEN s.status = 'PENDING' THEN 0 ELSE 1 END, 3, CASE WHEN s.status = 'PENDING' THEN 0 ELSE 1 END,
  CASE WHEN s.status IN ('SENDING', 'UNKNOWN') THEN 1 ELSE 0 END,
  CASE WHEN s.status = 'SENDING' THEN now() + interval '1 hour' * (i / 1000 % 5 - 1) + interval '1 second' END,
  CASE WHEN s.status = 'FAILED' THEN now() + interval '1 minute' * (i / 1000 % 60 - 30) END,
  CASE WHEN s.campaign IS NOT NULL THEN now() + interval '1 second' * (i % 86400 - 60) END,
  CASE WHEN s.status <> 'PENDING' THEN now() - interval '1 second' * i END,
  CASE WHEN s.status = 'SENT' THEN now() - interval '1 second' * i END,
  CASE WHEN s.status = 'DEAD' AND i / 1000 % 50 > 0 THEN now() END,
  now(), CASE WHEN s.status IN ('FAILED', 'DEAD') THEN '451 4.3.2 try again later' END,
  now() - interval '1 second' * i, now() - interval '1 second' * i
FROM generate_series(1, $1) AS i, LATERAL (SELECT
  CASE WHEN i % 1000 < 920 THEN 'SENT' WHEN i % 1000 < 975 THEN 'PENDING' WHEN i % 1000 < 980 THEN 'FAILED'
    WHEN i % 1000 < 981 THEN 'SENDING' WHEN i % 1000 < 983 THEN 'UNKNOWN' WHEN i % 1000 < 988 THEN 'DEAD'
    WHEN i % 1000 < 994 THEN 'CANCELLED' ELSE 'EXPIRED' END AS status,
  CASE WHEN i % 1000 BETWEEN 920 AND 969 OR i % 4 = 0 AND i % 1000 < 920 THEN 'spring-' || i / ($1 / 10) END AS campaign) AS s`, rows)
	b.exec(`INSERT INTO notification_mails (notification_id, mail)
SELECT id, convert_to(repeat(md5(id::text), 20), 'UTF8') FROM notifications WHERE status <> 'PENDING'`)
	b.exec(`INSERT INTO alerts (kind, dedupe_key, incident, details, resolved_at)
SELECT 'mail-unknown', n.dedupe_key, 'version 1', 'no reply', CASE WHEN row_number() OVER (ORDER BY n.id) > $1 THEN now() END
FROM notifications n WHERE n.status IN ('UNKNOWN', 'DEAD', 'EXPIRED')`, openAlerts)
	b.exec(`INSERT INTO cancelled_bookings (booking_id, generation, cancelled_at)
SELECT booking_id, 1, changed_at FROM notifications WHERE status IN ('CANCELLED', 'EXPIRED') AND booking_id <> ''`)
	b.exec(`INSERT INTO stopped_campaigns (campaign_id) SELECT 'old-' || i FROM generate_series(1, 50) AS i`)
	b.exec(`INSERT INTO outbox (event_id, topic, key, event_type, payload, created_at, published_at)
SELECT gen_random_uuid(), 'mail.events', booking_id, 'EmailSent', payload, changed_at, changed_at
FROM notifications WHERE status = 'SENT' AND booking_id <> ''`)
	for _, table := range []string{"notifications", "notification_mails", "alerts", "cancelled_bookings", "stopped_campaigns", "outbox"} {
		b.exec(`VACUUM ANALYZE ` + table)
	}
}
