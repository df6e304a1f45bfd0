package pgproxy_test

import (
	"context"
	"errors"
	"net/url"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"mailproof/faults/pgproxy"
	"mailproof/infra"
	"mailproof/infra/guardian"
	"mailproof/infra/processes"
	"mailproof/internal/setup"
)

var server infra.Postgres

func TestMain(m *testing.M) {
	guardian.MaybeRun()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	logs, err := os.MkdirTemp("", "pgproxy-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(logs)
	stack, err := processes.New(setup.Locate()).Start(context.Background(), infra.Spec{LogDir: logs, Postgres: true})
	if err != nil {
		panic(err)
	}
	server = stack.Postgres()
	code := m.Run()
	if err := stack.Stop(context.Background()); err != nil {
		panic(err)
	}
	if err := goleak.Find(); err != nil {
		panic(err)
	}
	return code
}

// start makes a proxy, a table of its own, and returns the URL through the
// proxy and the one past it.
func start(t *testing.T) (p *pgproxy.Proxy, through, past string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	u, err := url.Parse(server.URL("postgres"))
	require.NoError(t, err)
	p, err = pgproxy.Start(u.Host)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	past = u.String()
	conn, err := pgx.Connect(ctx, past)
	require.NoError(t, err)
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, "DROP TABLE IF EXISTS kept; CREATE TABLE kept (n int PRIMARY KEY)")
	require.NoError(t, err)
	u.Host = p.Addr()
	return p, u.String(), past
}

func count(t *testing.T, url string) (n int) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	defer conn.Close(context.Background())
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM kept").Scan(&n))
	return n
}

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = conn.Close(ctx) // the proxy may have cut it
	})
	return conn
}

// The commit is in the table, its answer never came: what every client must
// call unknown. pgx even says that it is safe to try again.
func TestAnswerOfACommitIsLost(t *testing.T) {
	p, through, past := start(t)
	loss := p.LoseAnswers(pgproxy.Order{Statement: "COMMIT", After: "INTO kept"})
	conn := connect(t, through)
	other, err := conn.Begin(t.Context())
	require.NoError(t, err)
	_, err = other.Exec(t.Context(), "SELECT 1")
	require.NoError(t, err)
	require.NoError(t, other.Commit(t.Context()), "another transaction's commit is answered")

	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "INSERT INTO kept VALUES ($1)", 1)
	require.NoError(t, err)
	err = tx.Commit(t.Context())
	require.Error(t, err)
	var pg *pgconn.PgError
	require.False(t, errors.As(err, &pg), "no word of the server's: %v", err)
	require.NoError(t, loss.Await(t.Context()))
	require.Equal(t, 1, count(t, past))
	n, tags := loss.Lost()
	require.Equal(t, 1, n)
	require.Equal(t, map[string]int{"COMMIT": 1}, tags)

	again := connect(t, through)
	_, err = again.Exec(t.Context(), "INSERT INTO kept VALUES (2)")
	require.NoError(t, err, "the order is carried out; all else passes")
}

// A transaction that failed answers ROLLBACK to COMMIT: nothing was committed,
// and the answer is passed on.
func TestARollbackIsNoLoss(t *testing.T) {
	p, through, past := start(t)
	loss := p.LoseAnswers(pgproxy.Order{Statement: "COMMIT"})
	conn := connect(t, through)
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "INSERT INTO nowhere VALUES (1)")
	require.Error(t, err)
	require.ErrorIs(t, tx.Commit(t.Context()), pgx.ErrTxCommitRollback)
	n, _ := loss.Lost()
	require.Zero(t, n)
	require.Zero(t, count(t, past))
}

// Statements without a transaction block, in each way that pgx sends them.
func TestAnswerOfAStatementIsLost(t *testing.T) {
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			p, through, past := start(t)
			loss := p.LoseAnswers(pgproxy.Order{Statement: "-- keep", Count: 2, Every: 2})
			const insert = "-- keep\nINSERT INTO kept VALUES ($1) RETURNING n"
			failed := 0
			for i := range 6 {
				conn := connect(t, through)
				var n int
				if err := conn.QueryRow(t.Context(), insert, mode, i).Scan(&n); err != nil {
					failed++
				} else {
					require.Equal(t, i, n)
				}
			}
			require.Equal(t, 2, failed, "every second one, twice")
			require.Equal(t, 6, count(t, past), "all were executed")
			n, tags := loss.Lost()
			require.Equal(t, 2, n)
			require.Equal(t, map[string]int{"INSERT 0 1": 2}, tags)
		})
	}
}

// A statement that the server refused is answered: there is nothing to lose. One
// that is undone with a later one of its batch neither.
func TestAnErrorIsNoLoss(t *testing.T) {
	p, through, past := start(t)
	loss := p.LoseAnswers(pgproxy.Order{Statement: "-- keep"})
	conn := connect(t, through)
	var pg *pgconn.PgError
	_, err := conn.Exec(t.Context(), "-- keep\nINSERT INTO kept VALUES ($1::text::int)", "word")
	require.ErrorAs(t, err, &pg)
	var batch pgx.Batch
	batch.Queue("-- keep\nINSERT INTO kept VALUES (1)")
	batch.Queue("-- keep\nINSERT INTO kept VALUES ($1::text::int)", "word")
	require.ErrorAs(t, conn.SendBatch(t.Context(), &batch).Close(), &pg)
	n, _ := loss.Lost()
	require.Zero(t, n)
	require.Zero(t, count(t, past))

	batch = pgx.Batch{}
	batch.Queue("-- keep\nINSERT INTO kept VALUES (2)")
	batch.Queue("SELECT 1")
	require.Error(t, conn.SendBatch(t.Context(), &batch).Close())
	require.NoError(t, loss.Await(t.Context()))
	require.Equal(t, 1, count(t, past))
}

// Inside a transaction block a statement is not committed by its own answer.
func TestNothingIsLostBeforeTheCommit(t *testing.T) {
	p, through, past := start(t)
	loss := p.LoseAnswers(pgproxy.Order{Statement: "-- keep"})
	conn := connect(t, through)
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "-- keep\nINSERT INTO kept VALUES (1)")
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	n, _ := loss.Lost()
	require.Zero(t, n)
	require.Equal(t, 1, count(t, past))
}

// Only an answer with the tag that was ordered.
func TestTag(t *testing.T) {
	p, through, past := start(t)
	loss := p.LoseAnswers(pgproxy.Order{Statement: "-- keep", Tag: "UPDATE 1"})
	conn := connect(t, through)
	_, err := conn.Exec(t.Context(), "INSERT INTO kept VALUES (1)")
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), "-- keep\nUPDATE kept SET n = 3 WHERE n = 2")
	require.NoError(t, err, "UPDATE 0 is passed on")
	_, err = conn.Exec(t.Context(), "-- keep\nUPDATE kept SET n = 2 WHERE n = 1")
	require.Error(t, err)
	require.NoError(t, loss.Await(t.Context()))
	require.Equal(t, 1, count(t, past))
}

func TestCancelledOrder(t *testing.T) {
	p, through, _ := start(t)
	loss := p.LoseAnswers(pgproxy.Order{Statement: "INSERT"})
	p.Cancel(loss)
	_, err := connect(t, through).Exec(t.Context(), "INSERT INTO kept VALUES (1)")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorContains(t, loss.Await(ctx), "0 of 1 answers")
}

func TestRefuseAndReset(t *testing.T) {
	p, through, _ := start(t)
	conn := connect(t, through)
	p.Refuse(true)
	_, err := pgx.Connect(t.Context(), through)
	require.Error(t, err)
	require.Positive(t, p.Refused())
	require.NoError(t, conn.Ping(t.Context()), "an open connection goes on")
	p.Refuse(false)
	connect(t, through)
	require.Equal(t, 2, p.Reset())
	require.Error(t, conn.Ping(t.Context()))
}

func TestStall(t *testing.T) {
	p, through, _ := start(t)
	conn := connect(t, through)
	p.Stall(true)
	p.Stall(true)
	answered := make(chan error, 1)
	go func() { answered <- conn.Ping(t.Context()) }()
	select {
	case err := <-answered:
		require.Fail(t, "an answer came through", "%v", err)
	case <-time.After(200 * time.Millisecond): // an absence has no event to wait for
	}
	require.Equal(t, 1, p.Stalled())
	p.Stall(false)
	p.Stall(false)
	require.NoError(t, <-answered)
}

func TestDelay(t *testing.T) {
	p, through, _ := start(t)
	conn := connect(t, through)
	const d = 100 * time.Millisecond
	p.Delay(d)
	began := time.Now()
	require.NoError(t, conn.Ping(t.Context()))
	require.GreaterOrEqual(t, time.Since(began), d)
	p.Delay(0)
}

// A query that a client gives up is cancelled through a connection of its own.
func TestCancelRequestGetsThrough(t *testing.T) {
	_, through, _ := start(t)
	conn := connect(t, through)
	done := make(chan error, 1)
	go func() {
		_, err := conn.Exec(t.Context(), "SELECT pg_sleep(60)")
		done <- err
	}()
	require.Eventually(t, func() bool {
		return conn.PgConn().CancelRequest(t.Context()) == nil && len(done) > 0
	}, 10*time.Second, 20*time.Millisecond)
	var pg *pgconn.PgError
	require.ErrorAs(t, <-done, &pg)
	require.Equal(t, "57014", pg.Code)
}

// TLS is declined, and a client that prefers it goes on without.
func TestNoTLS(t *testing.T) {
	_, through, _ := start(t)
	u, err := url.Parse(through)
	require.NoError(t, err)
	u.RawQuery = "sslmode=prefer"
	require.NoError(t, connect(t, u.String()).Ping(t.Context()))
}

func TestServerAway(t *testing.T) {
	p, err := pgproxy.Start("127.0.0.1:1")
	require.NoError(t, err)
	defer func() { require.NoError(t, p.Close()) }()
	_, err = pgx.Connect(t.Context(), "postgres://u@"+p.Addr()+"/d?sslmode=disable")
	require.Error(t, err)
}

// Many sessions at once, cut now and then: nothing hangs, and what was answered
// is there.
func TestManySessions(t *testing.T) {
	p, through, past := start(t)
	cfg, err := pgxpool.ParseConfig(through)
	require.NoError(t, err)
	cfg.MaxConns = 8
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	defer pool.Close()
	loss := p.LoseAnswers(pgproxy.Order{Statement: "-- keep", Count: 20, Every: 7})
	var all sync.WaitGroup
	var mu sync.Mutex
	answered := 0
	for i := range 400 {
		all.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			if i%100 == 50 {
				p.Reset()
			}
			if _, err := pool.Exec(ctx, "-- keep\nINSERT INTO kept VALUES ($1)", i); err == nil {
				mu.Lock()
				answered++
				mu.Unlock()
			}
		})
	}
	all.Wait()
	n, _ := loss.Lost()
	require.Equal(t, 20, n)
	require.GreaterOrEqual(t, count(t, past), answered+n)
}
