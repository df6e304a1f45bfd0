// Package infra starts, kills, pauses, cuts off, heals and stops the real parts
// that a notification system runs on: Postgres, a RabbitMQ cluster of three
// nodes, and Kafka.
//
// A [Provider] brings them up; what comes back is the same small set of
// interfaces whether they are plain processes, containers or addresses that the
// user gave. Every provider passes one conformance suite (package infratest).
//
// Package infra knows nothing of the system under test, of its queues or its
// tables, and must import neither system/ nor target/.
package infra

import "context"

// Provider brings up one set of real parts.
type Provider interface {
	// Name is "processes", "containers" or "external".
	Name() string
	// Start brings up every part of spec side by side and returns when each of
	// them answers. On an error nothing is left running.
	Start(ctx context.Context, spec Spec) (Stack, error)
}

// Spec says what to start and where to keep it.
type Spec struct {
	// LogDir receives one log per node and outlives the stack.
	LogDir string
	// Progress, when set, is told what is being waited for; it is called from
	// several goroutines.
	Progress func(part, state string)
	// Which parts; all false means all of them.
	Postgres, RabbitMQ, Kafka bool
	// RabbitNodes is the size of the cluster; 0 means 3.
	RabbitNodes int
}

// Stack is a running set of parts. A part that Spec left out is nil.
type Stack interface {
	Postgres() Postgres
	RabbitMQ() RabbitMQ
	Kafka() Kafka
	Versions() Versions
	// Guard hands a process that the caller started to the stack's guardian:
	// it dies with the stack even when the caller is killed with SIGKILL.
	Guard(pid int) error
	// Mend makes every part whole, whatever was done to it: it starts what was
	// killed, lets run what was paused, joins what was cut off, ends alarms. It
	// returns when each node answers. A provider that can do none of that has
	// nothing to mend.
	Mend(ctx context.Context) error
	// Stop ends every node, waits for it and removes the data. It is safe to
	// call twice.
	Stop(ctx context.Context) error
}

// Versions is what each part said of itself; empty when it was not started.
type Versions struct {
	Postgres  string `json:"postgres"`
	RabbitMQ  string `json:"rabbitmq"`
	Kafka     string `json:"kafka"`
	KafkaKind string `json:"kafka_kind"` // "apache" or "kfake"
	Provider  string `json:"provider"`
}

// Node is one server process that faults act on. What a provider cannot do
// returns [ErrUnsupported].
type Node interface {
	Name() string
	PID() int
	Log() string // path of the node's log
	// Kill ends it at once (SIGKILL) and returns when it is gone.
	Kill(ctx context.Context) error
	// Pause stops it from running (SIGSTOP) without closing a connection.
	Pause(ctx context.Context) error
	// Resume lets a paused node run again (SIGCONT).
	Resume(ctx context.Context) error
	// Restart starts a killed node, or stops a running one first, on the same
	// data and ports; it returns when the node answers.
	Restart(ctx context.Context) error
	// Running reports whether the process exists.
	Running() bool
}

// Postgres is a server with wal_level=logical.
type Postgres interface {
	Node
	// URL of a database, for a superuser.
	URL(database string) string
	// CreateDatabase makes an empty database.
	CreateDatabase(ctx context.Context, name string) error
}

// RabbitMQ is a cluster.
type RabbitMQ interface {
	Nodes() []Node
	// URLs of a virtual host, one per node; "" is the default virtual host.
	URLs(vhost string) []string
	// CreateVhost makes a virtual host that the user of URLs may use.
	CreateVhost(ctx context.Context, name string) error
	// Queues lists the queues of a virtual host as the broker's own tool does.
	Queues(ctx context.Context, vhost string) ([]Queue, error)
	// Leader is the node that leads a quorum queue.
	Leader(ctx context.Context, vhost, queue string) (Node, error)
	// MoveLeader makes the member on node to lead a quorum queue, and returns
	// when it does. Consumers and publishers stay where they are.
	MoveLeader(ctx context.Context, vhost, queue string, to Node) error

	// CutOff parts a node from all its peers at one instant, both ways; clients
	// reach all of them as before. It returns when the node has stepped aside as
	// the minority that it is. Only one node at a time can be cut off.
	CutOff(ctx context.Context, n Node) error
	// Rejoin undoes CutOff and returns when every node serves and sees every
	// other. A node that was not cut off is no error.
	Rejoin(ctx context.Context, n Node) error

	// Alarm raises (on) or ends a node's memory alarm, as if its memory were
	// used up: while it lasts the whole cluster takes no message from publishers
	// and tells them that they are blocked. Consumers are served.
	Alarm(ctx context.Context, n Node, on bool) error
	// CancelConsumers makes the broker cancel every consumer of a quorum queue
	// with a basic.cancel that the clients did not ask for, as it does when the
	// queue has ended; the queue itself stays. It returns how many channels were
	// told.
	CancelConsumers(ctx context.Context, vhost, queue string) (int, error)
}

// Queue is one line of "rabbitmqctl list_queues".
type Queue struct {
	Name     string   `json:"name"`
	Type     string   `json:"type"` // quorum, classic, stream
	Leader   string   `json:"leader"`
	Members  []string `json:"members"`
	Online   []string `json:"online"`
	Messages int      `json:"messages"`
	Ready    int      `json:"messages_ready"`
	Unacked  int      `json:"messages_unacknowledged"`
}

// Kafka is one broker that is its own controller, or the stand-in.
type Kafka interface {
	Node
	Brokers() []string
	// Kind is "apache" or "kfake".
	Kind() string
	// CreateTopic makes a topic; an existing one of the same name is an error.
	CreateTopic(ctx context.Context, name string, partitions int) error
}
