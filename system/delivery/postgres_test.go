package delivery

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// server is the private Postgres that all tests of this package share; each
// test has a database of its own.
var server *testServer

func TestMain(m *testing.M) {
	// The postmaster dies with the thread that started it (Pdeathsig), so that
	// a killed test binary leaves nothing behind.
	runtime.LockOSThread()
	code, err := runWithServer(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "delivery tests:", err)
		code = 1
	}
	os.Exit(code)
}

func runWithServer(m *testing.M) (code int, err error) {
	server, err = startServer(context.Background())
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, server.stop()) }()
	return m.Run(), nil
}

type testServer struct {
	dir      string
	postgres *exec.Cmd
	log      bytes.Buffer
	started  time.Time
	created  atomic.Int64
}

// startServer runs a Postgres that listens on a socket in its own folder only.
// It refuses to run as root, so root starts it as the user postgres.
func startServer(ctx context.Context) (*testServer, error) {
	bin, err := postgresBin()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "dlv")
	if err != nil {
		return nil, err
	}
	s := &testServer{dir: dir}
	attr := &syscall.SysProcAttr{Pdeathsig: syscall.SIGQUIT}
	if os.Getuid() == 0 {
		if attr.Credential, err = ownBy("postgres", dir); err != nil {
			return nil, errors.Join(err, os.RemoveAll(dir))
		}
	}
	initdb := exec.CommandContext(ctx, filepath.Join(bin, "initdb"), "-D", filepath.Join(dir, "data"),
		"-U", "postgres", "-A", "trust", "--no-sync", "--no-locale", "-E", "UTF8")
	initdb.Dir, initdb.SysProcAttr = dir, attr
	if out, err := initdb.CombinedOutput(); err != nil {
		return nil, errors.Join(fmt.Errorf("initdb: %w\n%s", err, out), os.RemoveAll(dir))
	}
	// Durability is not what these tests are about; a test of commits across a
	// crash belongs to the scenarios.
	s.postgres = exec.CommandContext(ctx, filepath.Join(bin, "postgres"), "-D", filepath.Join(dir, "data"),
		"-k", dir, "-c", "listen_addresses=", "-c", "fsync=off", "-c", "max_connections=200",
		"-c", "wal_level=logical", "-c", "autovacuum=off", "-c", "shared_buffers=64MB")
	s.postgres.Dir, s.postgres.SysProcAttr = dir, attr
	s.postgres.Stdout, s.postgres.Stderr = io.Discard, &s.log
	s.started = time.Now()
	if err := s.postgres.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("start postgres: %w", err), os.RemoveAll(dir))
	}
	if err := s.prepare(ctx); err != nil {
		return nil, errors.Join(err, s.stop())
	}
	return s, nil
}

func postgresBin() (string, error) {
	if path, err := exec.LookPath("postgres"); err == nil {
		return filepath.Dir(path), nil
	}
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin/postgres")
	if err != nil || len(found) == 0 {
		return "", errors.New("no postgres binary in PATH or /usr/lib/postgresql: install postgresql")
	}
	version := func(p string) int {
		n, _ := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(p))))
		return n
	}
	slices.SortFunc(found, func(a, b string) int { return version(a) - version(b) })
	return filepath.Dir(found[len(found)-1]), nil
}

func ownBy(name, dir string) (*syscall.Credential, error) {
	u, err := user.Lookup(name)
	if err != nil {
		return nil, err
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return nil, err
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return nil, err
	}
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, os.Chown(dir, int(uid), int(gid))
}

// prepare waits until the server answers and makes the migrated database that
// each test's own is copied from.
func (s *testServer) prepare(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		conn, err := pgx.Connect(ctx, s.url("postgres"))
		if err == nil {
			_, err = conn.Exec(ctx, `CREATE DATABASE template_delivery`)
			err = errors.Join(err, conn.Close(ctx))
			if err != nil {
				return err
			}
			break
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("postgres does not answer: %w\n%s", err, s.log.String())
		case <-time.After(20 * time.Millisecond):
		}
	}
	pool, err := pgxpool.New(ctx, s.url("template_delivery"))
	if err != nil {
		return err
	}
	defer pool.Close()
	return Migrate(ctx, pool)
}

func (s *testServer) url(database string) string {
	return "host=" + s.dir + " user=postgres dbname=" + database
}

func (s *testServer) stop() error {
	var err error
	if s.postgres != nil && s.postgres.Process != nil {
		err = s.postgres.Process.Signal(syscall.SIGQUIT)
		_ = s.postgres.Wait() // its exit code after SIGQUIT says nothing
	}
	return errors.Join(err, os.RemoveAll(s.dir))
}

// newDatabase is an empty, migrated database that is gone after the test.
func newDatabase(t *testing.T) *pgxpool.Pool {
	t.Helper()
	return newDatabaseFrom(t, "template_delivery")
}

func newDatabaseFrom(t *testing.T, template string) *pgxpool.Pool {
	t.Helper()
	name := fmt.Sprintf("t%d", server.created.Add(1))
	adminExec(t, fmt.Sprintf("CREATE DATABASE %s TEMPLATE %s", name, template))
	pool, err := pgxpool.New(t.Context(), server.url(name)+" pool_max_conns=16")
	require.NoError(t, err)
	t.Cleanup(func() {
		pool.Close()
		adminExec(t, "DROP DATABASE "+name+" WITH (FORCE)")
	})
	return pool
}

func adminExec(t *testing.T, sql string) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	conn, err := pgx.Connect(ctx, server.url("postgres"))
	require.NoError(t, err)
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, sql)
	require.NoError(t, err, strings.SplitN(sql, "\n", 2)[0])
}
