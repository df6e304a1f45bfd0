// Package postgres is a Postgres server that somebody else has started, as a
// process or in a container: how it must be configured, and what is asked of it.
//
// It must import neither system/ nor target/.
package postgres

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"time"

	"github.com/jackc/pgx/v5"

	"mailproof/infra"
)

// User is the superuser of every server.
const User = "mailproof"

// Server is one Postgres.
type Server struct {
	infra.Node
	// Address is host:port as clients reach it, Password the one of [User].
	Address, Password string

	version string
}

var _ infra.Postgres = (*Server)(nil)

// Version is what it said of itself when it was asked last.
func (s *Server) Version() string { return s.version }

// Config is what postgresql.conf must hold beside addresses and paths.
func Config() []string {
	return []string{
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
	}
}

// InitArgs are the arguments of initdb that makes the cluster in data, with the
// password of [User] in a file. It does not sync the empty cluster; the server
// itself runs with fsync on.
func InitArgs(data, passwordFile string) []string {
	return []string{
		"-D", data, "-U", User, "--pwfile", passwordFile,
		"--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C.UTF-8", "--no-sync",
	}
}

// URL of a database, for the superuser.
func (s *Server) URL(database string) string {
	u := url.URL{
		Scheme:   "postgres",
		User:     url.UserPassword(User, s.Password),
		Host:     s.Address,
		Path:     "/" + database,
		RawQuery: "sslmode=disable",
	}
	return u.String()
}

// CreateDatabase makes an empty database.
func (s *Server) CreateDatabase(ctx context.Context, name string) (err error) {
	conn, err := pgx.Connect(ctx, s.URL("postgres"))
	if err != nil {
		return fmt.Errorf("create database %s: %w", name, err)
	}
	defer closeConn(ctx, conn, &err)
	if _, err := conn.Exec(ctx, "CREATE DATABASE "+pgx.Identifier{name}.Sanitize()); err != nil {
		return fmt.Errorf("create database %s: %w", name, err)
	}
	return nil
}

// Ask is the probe: a query that the server can answer only when it has
// recovered.
func (s *Server) Ask(ctx context.Context) (err error) {
	conn, err := pgx.Connect(ctx, s.URL("postgres"))
	if err != nil {
		return err
	}
	defer closeConn(ctx, conn, &err)
	return conn.QueryRow(ctx, "SELECT current_setting('server_version')").Scan(&s.version)
}

func closeConn(ctx context.Context, conn *pgx.Conn, err *error) {
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	*err = errors.Join(*err, conn.Close(closing))
}
