package processes

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sys/unix"

	"mailproof/infra"
	"mailproof/infra/guardian"
)

// postgresUser is the superuser of the cluster.
const postgresUser = "mailproof"

type postgres struct {
	*node
	data     string
	port     int
	password string
	version  string
}

var _ infra.Postgres = (*postgres)(nil)

func startPostgres(ctx context.Context, e *environment, ports *ports) (*postgres, error) {
	owner, err := userFor("postgres") // initdb and postgres refuse root
	if err != nil {
		return nil, err
	}
	port, err := ports.next()
	if err != nil {
		return nil, err
	}
	home, err := e.dir("pg-"+strconv.Itoa(port), owner)
	if err != nil {
		return nil, err
	}
	pg := &postgres{port: port, password: secret()}
	data, err := pg.initialise(ctx, e, home, owner)
	if err != nil {
		return nil, err
	}
	pg.data = data
	log := e.log("postgres")
	pg.node = &node{
		name:     "postgres",
		guardian: e.guardian,
		command: guardian.Command{
			Path:   filepath.Join(e.paths.PostgresBin, "postgres"),
			Args:   []string{"-D", data},
			Env:    plainEnv(home),
			Dir:    data,
			Stdout: log,
			Stderr: log,
			User:   owner,
			// Killed, it would leave a System V shared memory segment behind.
			StopSignal: syscall.SIGQUIT,
		},
		stop:  syscall.SIGINT, // fast shutdown
		probe: pg.askVersion,
	}
	return pg, pg.launch(ctx)
}

// initialise makes the cluster's data directory below home.
func (pg *postgres) initialise(ctx context.Context, e *environment, home string, owner *guardian.User) (data string, err error) {
	data = filepath.Join(home, "data")
	password := filepath.Join(home, "password")
	if err := os.WriteFile(password, []byte(pg.password+"\n"), 0o600); err != nil {
		return "", err
	}
	defer os.Remove(password)
	if err := own(home, owner); err != nil {
		return "", err
	}
	_, err = e.guardian.Run(ctx, e.base, guardian.Command{
		Path: filepath.Join(e.paths.PostgresBin, "initdb"),
		Args: []string{
			"-D", data, "-U", postgresUser, "--pwfile", password,
			"--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C.UTF-8",
			"--no-sync", // of the empty cluster only; the server itself runs with fsync on
		},
		Env:  plainEnv(home),
		Dir:  home,
		User: owner,
	})
	if err != nil {
		return "", err
	}
	conf := filepath.Join(data, "postgresql.conf")
	if err := os.WriteFile(conf, []byte(pg.config(home)), 0o600); err != nil {
		return "", err
	}
	return data, own(conf, owner)
}

// config replaces initdb's own, so that everything that differs from Postgres'
// defaults is here.
func (pg *postgres) config(socketDir string) string {
	return strings.Join([]string{
		"listen_addresses = '127.0.0.1'",
		"port = " + strconv.Itoa(pg.port),
		"unix_socket_directories = '" + socketDir + "'",
		// A system under test has a pool per process, and several processes.
		"max_connections = 300",
		// The run's evidence is read from the write-ahead log through logical slots.
		"wal_level = logical",
		"max_replication_slots = 32",
		"max_wal_senders = 32",
		"fsync = on",
		"shared_buffers = '128MB'",
		// In the data directory, and not in /dev/shm, where a killed server leaves it.
		"dynamic_shared_memory_type = mmap",
		"timezone = 'UTC'",
		"log_timezone = 'UTC'",
		"log_line_prefix = '%m [%p] %q%u@%d '",
		"lc_messages = 'C'",
		"password_encryption = 'scram-sha-256'",
	}, "\n") + "\n"
}

// URL of a database, for the superuser.
func (pg *postgres) URL(database string) string {
	u := url.URL{
		Scheme:   "postgres",
		User:     url.UserPassword(postgresUser, pg.password),
		Host:     "127.0.0.1:" + strconv.Itoa(pg.port),
		Path:     "/" + database,
		RawQuery: "sslmode=disable",
	}
	return u.String()
}

// CreateDatabase makes an empty database.
func (pg *postgres) CreateDatabase(ctx context.Context, name string) (err error) {
	conn, err := pgx.Connect(ctx, pg.URL("postgres"))
	if err != nil {
		return fmt.Errorf("create database %s: %w", name, err)
	}
	defer closeConn(ctx, conn, &err)
	if _, err := conn.Exec(ctx, "CREATE DATABASE "+pgx.Identifier{name}.Sanitize()); err != nil {
		return fmt.Errorf("create database %s: %w", name, err)
	}
	return nil
}

// askVersion is the probe: a query that the server can answer only when it has
// recovered.
func (pg *postgres) askVersion(ctx context.Context) (err error) {
	conn, err := pgx.Connect(ctx, pg.URL("postgres"))
	if err != nil {
		return err
	}
	defer closeConn(ctx, conn, &err)
	return conn.QueryRow(ctx, "SELECT current_setting('server_version')").Scan(&pg.version)
}

func closeConn(ctx context.Context, conn *pgx.Conn, err *error) {
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	*err = errors.Join(*err, conn.Close(closing))
}

// removeSegment frees the System V shared memory of a server that was killed and
// not started again, which would have freed it. Line 7 of postmaster.pid holds
// its key and id.
func (pg *postgres) removeSegment() error {
	if pg.Running() {
		return nil // it is going to be asked to stop
	}
	b, err := os.ReadFile(filepath.Join(pg.data, "postmaster.pid"))
	if errors.Is(err, os.ErrNotExist) {
		return nil // it ended by itself
	}
	if err != nil {
		return err
	}
	const line = 6
	lines := strings.Split(string(b), "\n")
	if len(lines) <= line {
		return nil // killed before it had any
	}
	var key, id int
	if _, err := fmt.Sscan(lines[line], &key, &id); err != nil {
		return nil // likewise
	}
	if _, err := unix.SysvShmCtl(id, unix.IPC_RMID, nil); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EIDRM) {
		return fmt.Errorf("free the shared memory of the killed Postgres: %w", err)
	}
	return nil
}
