package processes

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sync/errgroup"

	"mailproof/infra/guardian"
	"mailproof/infra/ports"
	cluster "mailproof/infra/rabbitmq"
)

// rabbitmq is a cluster of processes that share a port mapper of their own.
type rabbitmq struct {
	*cluster.Cluster
	guardian *guardian.Guardian
	nodes    []*node // in the order of the members
	bin      string
	scratch  string // for the output of rabbitmqctl
	owner    *guardian.User
	env      []string // of rabbitmqctl
}

func startRabbitMQ(ctx context.Context, e *environment, choose *ports.Chooser, size int) (_ *rabbitmq, err error) {
	owner, err := userFor("rabbitmq")
	if err != nil {
		return nil, err
	}
	epmd, err := choose.Next()
	if err != nil {
		return nil, err
	}
	r := &rabbitmq{
		Cluster:  &cluster.Cluster{Password: secret()},
		guardian: e.guardian,
		bin:      e.paths.RabbitMQBin,
		scratch:  e.base,
		owner:    owner,
	}
	r.Ctl = r.ctl
	folder := "rmq-" + strconv.Itoa(epmd)
	cookie := secret()
	home, err := r.home(e, filepath.Join(folder, "ctl"), cookie)
	if err != nil {
		return nil, err
	}
	erlang := []string{
		// The address too: whoever starts a port mapper, it must not listen on
		// every interface.
		"ERL_EPMD_PORT=" + strconv.Itoa(epmd),
		"ERL_EPMD_ADDRESS=127.0.0.1",
	}
	r.env = plainEnv(home, append(erlang,
		"RABBITMQ_CONF_ENV_FILE="+os.DevNull,
		"RABBITMQ_CTL_ERL_ARGS="+distributionOnLoopback,
		// Any free port: the default is eleven fixed ones for the whole machine.
		"RABBITMQ_CTL_DIST_PORT_MIN=0", "RABBITMQ_CTL_DIST_PORT_MAX=0")...)
	mapper, err := startEpmd(ctx, e, epmd, owner)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.killAll(ctx, mapper))
		}
	}()
	for i := range size {
		if err := r.add(e, choose, folder, cookie, i+1, erlang); err != nil {
			return nil, err
		}
	}
	for i := range r.nodes {
		if err := r.configure(i, filepath.Join(e.base, folder, strconv.Itoa(i+1))); err != nil {
			return nil, err
		}
	}
	if err := r.launchAll(ctx); err != nil {
		return nil, err
	}
	return r, r.AwaitFormed(ctx)
}

// launchAll starts the first node, and when it serves, the others beside each
// other; see [cluster.Cluster.Formation].
func (r *rabbitmq) launchAll(ctx context.Context) error {
	if err := r.nodes[0].launch(ctx); err != nil {
		return err
	}
	joining, ctx := errgroup.WithContext(ctx)
	for _, n := range r.nodes[1:] {
		joining.Go(func() error { return n.launch(ctx) })
	}
	return joining.Wait()
}

// distributionOnLoopback keeps Erlang's own protocol off other interfaces. No
// spaces within a value: the scripts split it into words.
const distributionOnLoopback = "-kernel inet_dist_use_interface {127,0,0,1}"

// home makes a home directory with the cluster's cookie in it.
func (r *rabbitmq) home(e *environment, name, cookie string) (string, error) {
	home, err := e.dir(name, nil)
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(home, ".erlang.cookie"), []byte(cookie), 0o400); err != nil {
		return "", err
	}
	if err := os.Chmod(filepath.Dir(home), 0o711); err != nil {
		return "", err
	}
	return home, own(home, r.owner)
}

// startEpmd starts Erlang's port mapper in the foreground before any node or
// tool would start one that detaches itself.
func startEpmd(ctx context.Context, e *environment, port int, owner *guardian.User) (*node, error) {
	log := e.log("epmd")
	n := &node{
		name:     "epmd",
		guardian: e.guardian,
		command: guardian.Command{
			Path:   e.paths.Epmd,
			Args:   []string{"-port", strconv.Itoa(port), "-address", "127.0.0.1"},
			Env:    plainEnv(e.base),
			Dir:    e.base,
			Stdout: log,
			Stderr: log,
			User:   owner,
		},
		stop: syscall.SIGTERM,
		probe: func(ctx context.Context) error {
			var d net.Dialer
			conn, err := d.DialContext(ctx, "tcp4", loopback(port))
			if err != nil {
				return err
			}
			return conn.Close()
		},
	}
	return n, n.launch(ctx)
}

// add prepares node i, without its configuration, which names others.
func (r *rabbitmq) add(e *environment, choose *ports.Chooser, folder, cookie string, i int, erlang []string) error {
	port, err := choose.Next()
	if err != nil {
		return err
	}
	distribution, err := choose.Next()
	if err != nil {
		return err
	}
	home, err := r.home(e, filepath.Join(folder, strconv.Itoa(i)), cookie)
	if err != nil {
		return err
	}
	m := &cluster.Member{Erlang: fmt.Sprintf("r%d@localhost", i), Address: loopback(port)}
	name := fmt.Sprintf("rabbitmq-%d", i)
	log := e.log(name)
	n := &node{
		name:     name,
		guardian: e.guardian,
		command: guardian.Command{
			Path: filepath.Join(r.bin, "rabbitmq-server"),
			Env: plainEnv(home, append(erlang,
				"RABBITMQ_NODENAME="+m.Erlang,
				"RABBITMQ_NODE_PORT="+strconv.Itoa(port),
				"RABBITMQ_DIST_PORT="+strconv.Itoa(distribution),
				"RABBITMQ_MNESIA_BASE="+home+"/mnesia",
				"RABBITMQ_LOG_BASE="+home+"/log",
				"RABBITMQ_CONFIG_FILE="+home+"/rabbitmq",
				"RABBITMQ_CONFIG_FILES="+home+"/conf.d",
				"RABBITMQ_ADVANCED_CONFIG_FILE="+home+"/advanced.config",
				"RABBITMQ_ENABLED_PLUGINS_FILE="+home+"/enabled_plugins",
				"RABBITMQ_GENERATED_CONFIG_DIR="+home+"/config",
				"RABBITMQ_PID_FILE="+home+"/pid",
				"RABBITMQ_CONF_ENV_FILE="+os.DevNull,
				"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS="+distributionOnLoopback,
				// The script then becomes the Erlang VM instead of waiting for it as
				// a shell that traps signals: the process that is known is the one
				// that must be signalled.
				"RUNNING_UNDER_SYSTEMD=true",
			)...),
			Dir:    home,
			Stdout: log,
			Stderr: log,
			User:   r.owner,
		},
		stop:  syscall.SIGTERM,
		probe: func(ctx context.Context) error { return r.Ask(ctx, m) },
	}
	m.Server = n
	r.nodes = append(r.nodes, n)
	r.Members = append(r.Members, m)
	return nil
}

func (r *rabbitmq) configure(i int, home string) error {
	config := append([]string{"listeners.tcp.1 = " + r.Members[i].Address}, r.Config()...)
	config = append(config, r.Formation(i)...)
	files := map[string]string{
		"rabbitmq.conf":   strings.Join(config, "\n") + "\n",
		"enabled_plugins": "[].\n",
		"advanced.config": "[].\n",
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(home, name), []byte(text), 0o600); err != nil {
			return err
		}
	}
	return own(home, r.owner)
}

// killAll undoes a start that failed, so that it can be tried on other ports.
func (r *rabbitmq) killAll(ctx context.Context, mapper *node) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	errs := []error{mapper.Kill(ctx)}
	for _, n := range r.nodes {
		errs = append(errs, n.Kill(ctx))
	}
	return errors.Join(errs...)
}

// ctl runs rabbitmqctl against a node.
func (r *rabbitmq) ctl(ctx context.Context, m *cluster.Member, args ...string) ([]byte, error) {
	return r.guardian.Run(ctx, r.scratch, guardian.Command{
		Path: filepath.Join(r.bin, "rabbitmqctl"),
		Args: append([]string{"--quiet", "-n", m.Erlang}, args...),
		Env:  r.env,
		User: r.owner,
	})
}
