package processes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"golang.org/x/sync/errgroup"

	"mailproof/infra"
	"mailproof/infra/guardian"
)

const (
	// ctlTimeout bounds one call of rabbitmqctl. A call costs half a second; one
	// that asks a stopped node would wait for ever.
	ctlTimeout = 15 * time.Second
	rabbitUser = "mailproof"
)

// rabbitmq is a cluster of nodes that share a port mapper of their own.
type rabbitmq struct {
	guardian *guardian.Guardian
	nodes    []*rabbitNode
	bin      string
	scratch  string // for the output of rabbitmqctl
	owner    *guardian.User
	env      []string // of rabbitmqctl
	password string
	version  string
}

var _ infra.RabbitMQ = (*rabbitmq)(nil)

type rabbitNode struct {
	*node
	erlang string // r1@localhost
	port   int
}

func startRabbitMQ(ctx context.Context, e *environment, ports *ports, size int) (_ *rabbitmq, err error) {
	owner, err := userFor("rabbitmq")
	if err != nil {
		return nil, err
	}
	epmd, err := ports.next()
	if err != nil {
		return nil, err
	}
	r := &rabbitmq{
		guardian: e.guardian,
		bin:      e.paths.RabbitMQBin,
		scratch:  e.base,
		owner:    owner,
		password: secret(),
	}
	cluster := "rmq-" + strconv.Itoa(epmd)
	cookie := secret()
	home, err := r.home(e, filepath.Join(cluster, "ctl"), cookie)
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
		n, err := r.node(e, ports, cluster, cookie, i+1, erlang)
		if err != nil {
			return nil, err
		}
		r.nodes = append(r.nodes, n)
	}
	for i, n := range r.nodes {
		if err := r.configure(n, filepath.Join(e.base, cluster, strconv.Itoa(i+1))); err != nil {
			return nil, err
		}
	}
	if err := r.launchAll(ctx); err != nil {
		return nil, err
	}
	return r, r.awaitCluster(ctx)
}

// launchAll starts the first node, and when it serves, the others beside each
// other. Started all at once, a node can join while the first is still turning
// its feature flags on, finds tables of another form and gives up
// (schema_integrity_check_failed); and where each knows all, as the
// documentation has it, each waits for 5 s for another to form the cluster. On
// two cores the order costs nothing: booting is bound by them.
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

// node prepares node i, without its configuration, which names all nodes.
func (r *rabbitmq) node(e *environment, ports *ports, cluster, cookie string, i int, erlang []string) (*rabbitNode, error) {
	port, err := ports.next()
	if err != nil {
		return nil, err
	}
	distribution, err := ports.next()
	if err != nil {
		return nil, err
	}
	home, err := r.home(e, filepath.Join(cluster, strconv.Itoa(i)), cookie)
	if err != nil {
		return nil, err
	}
	n := &rabbitNode{erlang: fmt.Sprintf("r%d@localhost", i), port: port}
	name := fmt.Sprintf("rabbitmq-%d", i)
	log := e.log(name)
	n.node = &node{
		name:     name,
		guardian: e.guardian,
		command: guardian.Command{
			Path: filepath.Join(r.bin, "rabbitmq-server"),
			Env: plainEnv(home, append(erlang,
				"RABBITMQ_NODENAME="+n.erlang,
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
		probe: func(ctx context.Context) error { return r.askNode(ctx, n) },
	}
	return n, nil
}

func (r *rabbitmq) configure(n *rabbitNode, home string) error {
	files := map[string]string{
		"rabbitmq.conf":   r.config(n),
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

func (r *rabbitmq) config(n *rabbitNode) string {
	lines := []string{
		"listeners.tcp.1 = " + loopback(n.port),
		"cluster_formation.peer_discovery_backend = classic_config",
		// A minority steps aside instead of going on with a history of its own.
		"cluster_partition_handling = pause_minority",
		"default_user = " + rabbitUser,
		"default_pass = " + r.password,
		"default_user_tags.administrator = true",
		"default_permissions.configure = .*",
		"default_permissions.read = .*",
		"default_permissions.write = .*",
		"log.console = true",
		"log.console.level = info",
		"log.file = false",
		"vm_memory_high_watermark.absolute = " + memoryLimit,
		"disk_free_limit.absolute = 50MB",
		// The default of 512 MB per node is kept in memory, too.
		"raft.wal_max_size_bytes = 64000000",
	}
	// The first node is told of nobody and forms the cluster; see launchAll.
	if n != r.nodes[0] {
		for i, peer := range []*rabbitNode{r.nodes[0], n} { // a node that is not in its own list is refused
			lines = append(lines, fmt.Sprintf("cluster_formation.classic_config.nodes.%d = %s", i+1, peer.erlang))
		}
	}
	return strings.Join(lines, "\n") + "\n"
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

// askNode is the probe of one node. It opens its listener as the last step of
// booting, after it has joined.
func (r *rabbitmq) askNode(ctx context.Context, n *rabbitNode) error {
	conn, err := dial(ctx, r.url(n, ""))
	if err != nil {
		return err
	}
	return conn.Close()
}

func dial(ctx context.Context, url string) (*amqp.Connection, error) {
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(probeTimeout)
	}
	return amqp.DialConfig(url, amqp.Config{
		Dial: amqp.DefaultDial(time.Until(deadline)), // also bounds the handshake
	})
}

// awaitCluster waits until one node sees all of them run.
func (r *rabbitmq) awaitCluster(ctx context.Context) error {
	for {
		running, err := r.runningNodes(ctx)
		if err == nil && len(running) == len(r.nodes) {
			return r.readVersion(ctx)
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("the cluster has not formed, running: %v: %w", running, ctx.Err()), err)
		case <-time.After(probeEvery):
		}
	}
}

func (r *rabbitmq) runningNodes(ctx context.Context) ([]string, error) {
	out, err := r.ctl(ctx, r.nodes[0], "cluster_status", "--formatter", "json")
	if err != nil {
		return nil, err
	}
	var status struct {
		Running []string `json:"running_nodes"`
	}
	if err := json.Unmarshal(out, &status); err != nil {
		return nil, fmt.Errorf("cluster_status: %w", err)
	}
	return status.Running, nil
}

// readVersion takes the version out of the greeting.
func (r *rabbitmq) readVersion(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	conn, err := dial(ctx, r.url(r.nodes[0], ""))
	if err != nil {
		return err
	}
	r.version, _ = conn.Properties["version"].(string)
	return conn.Close()
}

// Nodes of the cluster.
func (r *rabbitmq) Nodes() []infra.Node {
	nodes := make([]infra.Node, len(r.nodes))
	for i, n := range r.nodes {
		nodes[i] = n
	}
	return nodes
}

// URLs of a virtual host, in the order of Nodes.
func (r *rabbitmq) URLs(vhost string) []string {
	urls := make([]string, len(r.nodes))
	for i, n := range r.nodes {
		urls[i] = r.url(n, vhost)
	}
	return urls
}

func (r *rabbitmq) url(n *rabbitNode, vhost string) string {
	u := url.URL{Scheme: "amqp", User: url.UserPassword(rabbitUser, r.password), Host: loopback(n.port), Path: "/"}
	if vhost != "" {
		u.Path += vhost
		u.RawPath = "/" + url.PathEscape(vhost)
	}
	return u.String()
}

// CreateVhost returns when each node serves it: the others start it when they
// hear of it, a moment later than the node that made it.
func (r *rabbitmq) CreateVhost(ctx context.Context, name string) error {
	if _, err := r.ctlAny(ctx, "add_vhost", name); err != nil {
		return fmt.Errorf("create virtual host %s: %w", name, err)
	}
	if _, err := r.ctlAny(ctx, "set_permissions", "-p", name, rabbitUser, ".*", ".*", ".*"); err != nil {
		return fmt.Errorf("create virtual host %s: %w", name, err)
	}
	for _, n := range r.serving() {
		if err := r.awaitVhost(ctx, n, name); err != nil {
			return fmt.Errorf("virtual host %s on %s: %w", name, n.name, err)
		}
	}
	return nil
}

func (r *rabbitmq) awaitVhost(ctx context.Context, n *rabbitNode, vhost string) error {
	ctx, cancel := context.WithTimeout(ctx, ctlTimeout)
	defer cancel()
	for {
		conn, err := dial(ctx, r.url(n, vhost))
		if err == nil {
			return conn.Close()
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(probeEvery):
		}
	}
}

var errNoneServes = errors.New("no node of the cluster is running")

// serving lists the nodes that run and are not paused.
func (r *rabbitmq) serving() []*rabbitNode {
	var nodes []*rabbitNode
	for _, n := range r.nodes {
		if n.serving() {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

// ctlAny asks the nodes in turn until one answers: one that has stepped aside
// as a minority runs, and answers nothing.
func (r *rabbitmq) ctlAny(ctx context.Context, args ...string) ([]byte, error) {
	errs := []error{errNoneServes}
	for _, n := range r.serving() {
		out, err := r.ctl(ctx, n, args...)
		if err == nil {
			return out, nil
		}
		if ctx.Err() != nil {
			return nil, err
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// ctl runs rabbitmqctl against a node.
func (r *rabbitmq) ctl(ctx context.Context, n *rabbitNode, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, ctlTimeout)
	defer cancel()
	return r.guardian.Run(ctx, r.scratch, guardian.Command{
		Path: filepath.Join(r.bin, "rabbitmqctl"),
		Args: append([]string{"--quiet", "-n", n.erlang}, args...),
		Env:  r.env,
		User: r.owner,
	})
}

// listQueues are the columns of [infra.Queue] that a node knows by itself; it
// asks the others whether they are "online".
var listQueues = []string{"name", "type", "leader", "members", "messages", "messages_ready", "messages_unacknowledged"}

// Queues of a virtual host. While a node is paused, the queues that it led are
// missing from the list until the cluster's tables name their next leader, and
// Online is empty; the tool of RabbitMQ 4 then waits for the paused node, which
// is an error after [ctlTimeout].
func (r *rabbitmq) Queues(ctx context.Context, vhost string) ([]infra.Queue, error) {
	if vhost == "" {
		vhost = "/"
	}
	list := []string{"list_queues", "-p", vhost, "--formatter", "json"}
	if r.anyPaused() {
		return r.queuesNodeByNode(ctx, append(append(list, "--local"), listQueues...))
	}
	list = append(append(list, listQueues...), "online")
	out, err := r.ctlAny(ctx, list...)
	if err != nil {
		return nil, fmt.Errorf("list the queues of virtual host %s: %w", vhost, err)
	}
	return parseQueues(out)
}

func (r *rabbitmq) anyPaused() bool {
	for _, n := range r.nodes {
		if _, paused := n.current(); paused {
			return true
		}
	}
	return false
}

// queuesNodeByNode asks each node for the queues that it leads. The common list
// asks all nodes, and waits for a paused one until the net tick time of 60 s is
// over.
func (r *rabbitmq) queuesNodeByNode(ctx context.Context, list []string) ([]infra.Queue, error) {
	nodes := r.serving()
	if len(nodes) == 0 {
		return nil, errNoneServes
	}
	found := make([][]infra.Queue, len(nodes))
	asking, ctx := errgroup.WithContext(ctx)
	for i, n := range nodes {
		asking.Go(func() error {
			out, err := r.ctl(ctx, n, list...)
			if err != nil {
				return err
			}
			found[i], err = parseQueues(out)
			return err
		})
	}
	if err := asking.Wait(); err != nil {
		return nil, err
	}
	return slices.Concat(found...), nil
}

// Leader of a quorum queue, as the members themselves know it; of a classic queue
// the node that it is on. The cluster's
// tables, and with them list_queues, learn of a leader's end by SIGSTOP only
// when the net tick time of 60 s is over; the members elect the next in 10 s.
func (r *rabbitmq) Leader(ctx context.Context, vhost, queue string) (infra.Node, error) {
	out, err := r.ctlAny(ctx, "eval", leaderExpression(vhost, queue))
	if err != nil {
		return nil, fmt.Errorf("leader of queue %s: %w", queue, err)
	}
	said := strings.TrimSpace(string(out))
	for _, n := range r.nodes {
		if n.erlang == said {
			return n, nil
		}
	}
	return nil, fmt.Errorf("leader of queue %s in virtual host %s: the broker says %q", queue, vhost, said)
}

// leaderExpression is Erlang that evaluates to the name of a node, or to why
// there is none: not_found, unknown.
func leaderExpression(vhost, queue string) string {
	return fmt.Sprintf(`case %s of
		{ok, Q} ->
			case amqqueue:get_pid(Q) of
				{Name, _} -> case ra_leaderboard:lookup_leader(Name) of {_, Leader} -> Leader; _ -> unknown end;
				Classic -> node(Classic)
			end;
		{error, Why} -> Why
	end.`, lookup(vhost, queue))
}

// erlangBinary writes a binary as its bytes, in which nothing can be quoted
// wrongly: <<97,98>>.
func erlangBinary(s string) string {
	bytes := make([]string, len(s))
	for i := range len(s) {
		bytes[i] = strconv.Itoa(int(s[i]))
	}
	return "<<" + strings.Join(bytes, ",") + ">>"
}

// parseQueues reads the JSON of list_queues, in which a value that a queue does
// not have is an empty string, whatever its type.
func parseQueues(out []byte) ([]infra.Queue, error) {
	var rows []map[string]json.RawMessage
	if err := json.Unmarshal(out, &rows); err != nil {
		return nil, fmt.Errorf("list_queues: %w", err)
	}
	queues := make([]infra.Queue, 0, len(rows))
	for _, row := range rows {
		for field, value := range row {
			if string(value) == `""` {
				delete(row, field)
			}
		}
		whole, err := json.Marshal(row)
		if err != nil {
			return nil, fmt.Errorf("list_queues: %w", err)
		}
		var q infra.Queue
		if err := json.Unmarshal(whole, &q); err != nil {
			return nil, fmt.Errorf("list_queues: %s: %w", whole, err)
		}
		queues = append(queues, q)
	}
	return queues, nil
}
