package delivery

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"mailproof/infra"
	"mailproof/infra/guardian"
	"mailproof/infra/provider"
)

// server is the private Postgres that all tests of this package share; each
// test has a database of its own.
var server testServer

type testServer struct {
	infra.Postgres
	created atomic.Int64
}

// template is the migrated database that each test's own is copied from.
const template = "template_delivery"

func TestMain(m *testing.M) {
	guardian.MaybeRun()
	code, err := runWithServer(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "delivery tests:", err)
		code = 1
	}
	os.Exit(code)
}

func runWithServer(m *testing.M) (code int, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	logs, err := os.MkdirTemp("", "delivery")
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(logs)) }()
	parts, err := provider.Select(provider.Auto)
	if err != nil {
		return 1, err
	}
	stack, err := parts.Start(ctx, infra.Spec{LogDir: logs, Postgres: true})
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, stack.Stop(context.Background())) }()
	server.Postgres = stack.Postgres()
	if err := server.prepare(ctx); err != nil {
		return 1, err
	}
	return m.Run(), nil
}

func (s *testServer) prepare(ctx context.Context) error {
	// What a crash of the server leaves behind is not tested here.
	if err := s.exec(ctx, `ALTER SYSTEM SET fsync = off`, `SELECT pg_reload_conf()`); err != nil {
		return err
	}
	if err := s.CreateDatabase(ctx, template); err != nil {
		return err
	}
	pool, err := pgxpool.New(ctx, s.URL(template))
	if err != nil {
		return err
	}
	defer pool.Close()
	return Migrate(ctx, pool)
}

func (s *testServer) exec(ctx context.Context, sql ...string) error {
	conn, err := pgx.Connect(ctx, s.URL("postgres"))
	if err != nil {
		return err
	}
	for _, q := range sql {
		if _, err = conn.Exec(ctx, q); err != nil {
			err = fmt.Errorf("%s: %w", strings.SplitN(q, "\n", 2)[0], err)
			break
		}
	}
	return errors.Join(err, conn.Close(ctx))
}

// newDatabase is an empty, migrated database that is gone after the test.
func newDatabase(t *testing.T) *pgxpool.Pool {
	t.Helper()
	return newDatabaseFrom(t, template)
}

func newDatabaseFrom(t *testing.T, from string) *pgxpool.Pool {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	name := fmt.Sprintf("t%d", server.created.Add(1))
	require.NoError(t, server.exec(ctx, fmt.Sprintf("CREATE DATABASE %s TEMPLATE %s", name, from)))
	cfg, err := pgxpool.ParseConfig(server.URL(name))
	require.NoError(t, err)
	cfg.MaxConns = 16
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		pool.Close()
		require.NoError(t, server.exec(ctx, "DROP DATABASE "+name+" WITH (FORCE)"))
	})
	return pool
}
