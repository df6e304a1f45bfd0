// Package outboxtest starts a throwaway Postgres for tests of packages that
// keep an outbox. It is for tests only.
package outboxtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// Postgres is one server on a free port of the loopback address.
type Postgres struct {
	dir  string
	port int
	cmd  *exec.Cmd
	next atomic.Int64
}

// startTimeout bounds initdb and the first answer.
const startTimeout = time.Minute

// Start makes a cluster in a short path below the temp folder and starts it.
// It does not sync to disk: a test's data need not outlive the machine.
func Start() (_ *Postgres, err error) {
	bin, err := binDir()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "pgt")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()
	cred, err := credential(dir)
	if err != nil {
		return nil, err
	}
	initdb := exec.Command(filepath.Join(bin, "initdb"), "-D", filepath.Join(dir, "data"), "-U", "postgres", "-A", "trust", "--no-sync")
	initdb.SysProcAttr = &syscall.SysProcAttr{Credential: cred}
	if out, err := initdb.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("initdb: %w: %s", err, out)
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	p := &Postgres{dir: dir, port: port}
	p.cmd = exec.Command(filepath.Join(bin, "postgres"), "-D", filepath.Join(dir, "data"), "-p", strconv.Itoa(port),
		"-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="+dir, "-c", "fsync=off", "-c", "max_connections=200")
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: cred, Pdeathsig: syscall.SIGQUIT}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("postgres: %w", err)
	}
	if err := p.awaitReady(); err != nil {
		return nil, errors.Join(err, p.Stop())
	}
	return p, nil
}

func binDir() (string, error) {
	dirs, err := filepath.Glob("/usr/lib/postgresql/*/bin")
	if err != nil || len(dirs) == 0 {
		path, err := exec.LookPath("initdb")
		if err != nil {
			return "", errors.New("no Postgres server found: install package postgresql")
		}
		return filepath.Dir(path), nil
	}
	slices.Sort(dirs)
	return dirs[len(dirs)-1], nil
}

// credential of user postgres when we are root, which Postgres refuses to run as.
func credential(dir string) (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		return nil, err
	}
	uid, err := strconv.Atoi(u.Uid)
	if err != nil {
		return nil, err
	}
	gid, err := strconv.Atoi(u.Gid)
	if err != nil {
		return nil, err
	}
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, os.Chown(dir, uid, gid)
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}

func (p *Postgres) awaitReady() error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	for {
		conn, err := pgx.Connect(ctx, p.URL("postgres"))
		if err == nil {
			return conn.Close(ctx)
		}
		if ctx.Err() != nil {
			return fmt.Errorf("postgres does not answer: %w", err)
		}
		time.Sleep(20 * time.Millisecond) // nothing tells when a server listens
	}
}

// URL of a database for the superuser.
func (p *Postgres) URL(database string) string {
	return fmt.Sprintf("postgres://postgres@127.0.0.1:%d/%s?sslmode=disable", p.port, database)
}

// NewDatabase makes an empty database and returns its URL.
func (p *Postgres) NewDatabase(tb testing.TB) string {
	tb.Helper()
	name := fmt.Sprintf("t%d", p.next.Add(1))
	conn, err := pgx.Connect(tb.Context(), p.URL("postgres"))
	if err != nil {
		tb.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(tb.Context())) }() // the test's verdict stands
	if _, err := conn.Exec(tb.Context(), "CREATE DATABASE "+name); err != nil {
		tb.Fatal(err)
	}
	return p.URL(name)
}

// Kill ends the server at once, as a crash would.
func (p *Postgres) Kill() error {
	if err := p.cmd.Process.Signal(syscall.SIGQUIT); err != nil {
		return err
	}
	_ = p.cmd.Wait() // it was killed: the exit status says only that
	return nil
}

// Stop ends the server and removes its data.
func (p *Postgres) Stop() error {
	return errors.Join(p.Kill(), os.RemoveAll(p.dir))
}
