// Package rabbitmq operates a RabbitMQ cluster whose nodes somebody else has
// started, as processes or in containers: virtual hosts, queues and their
// leaders, and the faults that the broker itself can be asked for. All of it goes
// through rabbitmqctl, and none of it needs a right on the machine.
//
// It knows nothing of how nodes are started, killed or reached, and must import
// neither system/ nor target/.
package rabbitmq

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"golang.org/x/sync/errgroup"

	"mailproof/infra"
)

// User of every cluster: the one in URLs.
const User = "mailproof"

// MemoryLimit of a node, as its configuration must set it: shares of the machine
// would differ from one machine to the next, and three nodes share it.
const MemoryLimit = "1024MB"

const (
	// ctlTimeout bounds one call of rabbitmqctl. A call costs half a second; one
	// that asks a stopped node would wait for ever.
	ctlTimeout = 15 * time.Second
	// askTimeout bounds one question to a node's listener.
	askTimeout = 3 * time.Second
	// askEvery is the pause between two questions of a wait.
	askEvery = 100 * time.Millisecond
	// settleBound is how long a node may take to step aside, or a leader to move.
	settleBound = 30 * time.Second
	// rejoinBound bounds a rejoin, with the recovery that it includes.
	rejoinBound = 2 * time.Minute
)

// Server is a node as whoever started it knows it.
type Server interface {
	infra.Node
	// Serving reports whether it runs and is not paused.
	Serving() bool
}

// Member is a node of a cluster.
type Member struct {
	Server
	// Erlang is the node's name among its peers: r1@localhost.
	Erlang string
	// Address is host:port of its listener, as clients reach it.
	Address string
}

// Cluster is a set of nodes that know each other.
type Cluster struct {
	Members []*Member
	// Password of [User].
	Password string
	// Ctl runs rabbitmqctl with args against a member and returns what it prints.
	Ctl func(ctx context.Context, m *Member, args ...string) ([]byte, error)

	version string
}

var _ infra.RabbitMQ = (*Cluster)(nil)

// Version is what the first node said of itself when the cluster had formed.
func (c *Cluster) Version() string { return c.version }

// Config is what every node's rabbitmq.conf holds, whatever else it needs.
func (c *Cluster) Config() []string {
	return []string{
		// A minority steps aside instead of going on with a history of its own.
		"cluster_partition_handling = pause_minority",
		"default_user = " + User,
		"default_pass = " + c.Password,
		"default_user_tags.administrator = true",
		"default_permissions.configure = .*",
		"default_permissions.read = .*",
		"default_permissions.write = .*",
		"log.console = true",
		"log.console.level = info",
		"log.file = false",
		"vm_memory_high_watermark.absolute = " + MemoryLimit,
		"disk_free_limit.absolute = 50MB",
		// The default of 512 MB per node is kept in memory, too.
		"raft.wal_max_size_bytes = 64000000",
	}
}

// Formation is what the i-th node's rabbitmq.conf says of its peers. The first
// node is told of nobody and forms the cluster; it must serve before the others
// start. Started all at once, a node can join while the first is still turning
// its feature flags on, finds tables of another form and gives up
// (schema_integrity_check_failed); and where each knows all, as the
// documentation has it, each waits for 5 s for another to form the cluster. On
// two cores the order costs nothing: booting is bound by them.
func (c *Cluster) Formation(i int) []string {
	lines := []string{"cluster_formation.peer_discovery_backend = classic_config"}
	if i == 0 {
		return lines
	}
	for j, peer := range []*Member{c.Members[0], c.Members[i]} { // a node that is not in its own list is refused
		lines = append(lines, fmt.Sprintf("cluster_formation.classic_config.nodes.%d = %s", j+1, peer.Erlang))
	}
	return lines
}

// Ask is the probe of one node. It opens its listener as the last step of
// booting, after it has joined.
func (c *Cluster) Ask(ctx context.Context, m *Member) error {
	conn, err := dial(ctx, c.url(m, ""))
	if err != nil {
		return err
	}
	return conn.Close()
}

func dial(ctx context.Context, url string) (*amqp.Connection, error) {
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(askTimeout)
	}
	return amqp.DialConfig(url, amqp.Config{
		Dial: amqp.DefaultDial(time.Until(deadline)), // also bounds the handshake
	})
}

// AwaitFormed waits until one node sees all of them run.
func (c *Cluster) AwaitFormed(ctx context.Context) error {
	for {
		running, err := c.runningNodes(ctx)
		if err == nil && len(running) == len(c.Members) {
			return c.readVersion(ctx)
		}
		if !pause(ctx) {
			return errors.Join(fmt.Errorf("the cluster has not formed, running: %v: %w", running, ctx.Err()), err)
		}
	}
}

// pause waits a moment and reports whether ctx is still alive.
func pause(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(askEvery):
		return true
	}
}

func (c *Cluster) runningNodes(ctx context.Context) ([]string, error) {
	out, err := c.ctl(ctx, c.Members[0], "cluster_status", "--formatter", "json")
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
func (c *Cluster) readVersion(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	conn, err := dial(ctx, c.url(c.Members[0], ""))
	if err != nil {
		return err
	}
	c.version, _ = conn.Properties["version"].(string)
	return conn.Close()
}

// Nodes of the cluster.
func (c *Cluster) Nodes() []infra.Node {
	nodes := make([]infra.Node, len(c.Members))
	for i, m := range c.Members {
		nodes[i] = m
	}
	return nodes
}

// URLs of a virtual host, in the order of Nodes.
func (c *Cluster) URLs(vhost string) []string {
	urls := make([]string, len(c.Members))
	for i, m := range c.Members {
		urls[i] = c.url(m, vhost)
	}
	return urls
}

func (c *Cluster) url(m *Member, vhost string) string {
	u := url.URL{Scheme: "amqp", User: url.UserPassword(User, c.Password), Host: m.Address, Path: "/"}
	if vhost != "" {
		u.Path += vhost
		u.RawPath = "/" + url.PathEscape(vhost)
	}
	return u.String()
}

// CreateVhost returns when each node serves it: the others start it when they
// hear of it, a moment later than the node that made it.
func (c *Cluster) CreateVhost(ctx context.Context, name string) error {
	if _, err := c.ctlAny(ctx, "add_vhost", name); err != nil {
		return fmt.Errorf("create virtual host %s: %w", name, err)
	}
	if _, err := c.ctlAny(ctx, "set_permissions", "-p", name, User, ".*", ".*", ".*"); err != nil {
		return fmt.Errorf("create virtual host %s: %w", name, err)
	}
	for _, m := range c.serving() {
		if err := c.awaitVhost(ctx, m, name); err != nil {
			return fmt.Errorf("virtual host %s on %s: %w", name, m.Name(), err)
		}
	}
	return nil
}

func (c *Cluster) awaitVhost(ctx context.Context, m *Member, vhost string) error {
	ctx, cancel := context.WithTimeout(ctx, ctlTimeout)
	defer cancel()
	for {
		conn, err := dial(ctx, c.url(m, vhost))
		if err == nil {
			return conn.Close()
		}
		if !pause(ctx) {
			return errors.Join(ctx.Err(), err)
		}
	}
}

var errNoneServes = errors.New("no node of the cluster is running")

// serving lists the nodes that run and are not paused.
func (c *Cluster) serving() []*Member {
	return slices.DeleteFunc(slices.Clone(c.Members), func(m *Member) bool { return !m.Serving() })
}

// ctlAny asks the nodes in turn until one answers: one that has stepped aside
// as a minority runs, and answers nothing.
func (c *Cluster) ctlAny(ctx context.Context, args ...string) ([]byte, error) {
	errs := []error{errNoneServes}
	for _, m := range c.serving() {
		out, err := c.ctl(ctx, m, args...)
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

func (c *Cluster) ctl(ctx context.Context, m *Member, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, ctlTimeout)
	defer cancel()
	return c.Ctl(ctx, m, args...)
}

// listQueues are the columns of [infra.Queue] that a node knows by itself; it
// asks the others whether they are "online".
var listQueues = []string{"name", "type", "leader", "members", "messages", "messages_ready", "messages_unacknowledged"}

// Queues of a virtual host. While a node is paused, the queues that it led are
// missing from the list until the cluster's tables name their next leader, and
// Online is empty; the tool of RabbitMQ 4 then waits for the paused node, which
// is an error after [ctlTimeout].
func (c *Cluster) Queues(ctx context.Context, vhost string) ([]infra.Queue, error) {
	if vhost == "" {
		vhost = "/"
	}
	list := []string{"list_queues", "-p", vhost, "--formatter", "json"}
	if c.anyPaused() {
		return c.queuesNodeByNode(ctx, append(append(list, "--local"), listQueues...))
	}
	list = append(append(list, listQueues...), "online")
	out, err := c.ctlAny(ctx, list...)
	if err != nil {
		return nil, fmt.Errorf("list the queues of virtual host %s: %w", vhost, err)
	}
	return parseQueues(out)
}

func (c *Cluster) anyPaused() bool {
	return slices.ContainsFunc(c.Members, func(m *Member) bool { return m.Running() && !m.Serving() })
}

// queuesNodeByNode asks each node for the queues that it leads. The common list
// asks all nodes, and waits for a paused one until the net tick time of 60 s is
// over.
func (c *Cluster) queuesNodeByNode(ctx context.Context, list []string) ([]infra.Queue, error) {
	members := c.serving()
	if len(members) == 0 {
		return nil, errNoneServes
	}
	found := make([][]infra.Queue, len(members))
	asking, ctx := errgroup.WithContext(ctx)
	for i, m := range members {
		asking.Go(func() error {
			out, err := c.ctl(ctx, m, list...)
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
// the node that it is on. The cluster's tables, and with them list_queues, learn of a leader's end by SIGSTOP only
// when the net tick time of 60 s is over; the members elect the next in 10 s.
func (c *Cluster) Leader(ctx context.Context, vhost, queue string) (infra.Node, error) {
	out, err := c.ctlAny(ctx, "eval", leaderExpression(vhost, queue))
	if err != nil {
		return nil, fmt.Errorf("leader of queue %s: %w", queue, err)
	}
	said := strings.Trim(strings.TrimSpace(string(out)), "'") // Erlang quotes a name with a hyphen
	for _, m := range c.Members {
		if m.Erlang == said {
			return m, nil
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

// lookup is Erlang that evaluates to {ok, Queue} or {error, not_found}.
func lookup(vhost, queue string) string {
	if vhost == "" {
		vhost = "/"
	}
	return fmt.Sprintf("rabbit_amqqueue:lookup(rabbit_misc:r(%s, queue, %s))", erlangBinary(vhost), erlangBinary(queue))
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
