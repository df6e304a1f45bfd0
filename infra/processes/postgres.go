package processes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"mailproof/infra/guardian"
	"mailproof/infra/ports"
	server "mailproof/infra/postgres"
)

type postgres struct {
	*server.Server
	data string
}

func startPostgres(ctx context.Context, e *environment, choose *ports.Chooser) (*postgres, error) {
	owner, err := userFor("postgres") // initdb and postgres refuse root
	if err != nil {
		return nil, err
	}
	port, err := choose.Next()
	if err != nil {
		return nil, err
	}
	home, err := e.dir("pg-"+strconv.Itoa(port), owner)
	if err != nil {
		return nil, err
	}
	pg := &postgres{Server: &server.Server{Address: loopback(port), Password: secret()}}
	data, err := pg.initialise(ctx, e, home, port, owner)
	if err != nil {
		return nil, err
	}
	pg.data = data
	log := e.log("postgres")
	n := &node{
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
		probe: pg.Ask,
	}
	pg.Node = n
	return pg, n.launch(ctx)
}

// initialise makes the cluster's data directory below home.
func (pg *postgres) initialise(ctx context.Context, e *environment, home string, port int, owner *guardian.User) (data string, err error) {
	data = filepath.Join(home, "data")
	password := filepath.Join(home, "password")
	if err := os.WriteFile(password, []byte(pg.Password+"\n"), 0o600); err != nil {
		return "", err
	}
	defer os.Remove(password)
	if err := own(home, owner); err != nil {
		return "", err
	}
	_, err = e.guardian.Run(ctx, e.base, guardian.Command{
		Path: filepath.Join(e.paths.PostgresBin, "initdb"),
		Args: server.InitArgs(data, password),
		Env:  plainEnv(home),
		Dir:  home,
		User: owner,
	})
	if err != nil {
		return "", err
	}
	conf := filepath.Join(data, "postgresql.conf")
	if err := os.WriteFile(conf, []byte(config(home, port)), 0o600); err != nil {
		return "", err
	}
	return data, own(conf, owner)
}

// config replaces initdb's own, so that everything that differs from Postgres'
// defaults is here.
func config(socketDir string, port int) string {
	lines := append([]string{
		"listen_addresses = '127.0.0.1'",
		"port = " + strconv.Itoa(port),
		"unix_socket_directories = '" + socketDir + "'",
	}, server.Config()...)
	return strings.Join(lines, "\n") + "\n"
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
