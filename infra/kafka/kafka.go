// Package kafka is an Apache Kafka broker in KRaft mode, its own controller, that
// somebody else has started, as a process or in a container: how it must be
// configured, and what is asked of it.
//
// It must import neither system/ nor target/.
package kafka

import (
	"context"
	_ "embed"
	"encoding/base64"
	"fmt"
	"os"
	"regexp"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"mailproof/infra"
)

// Logging is a log4j2 configuration that sends everything to standard output,
// which is the node's log.
//
//go:embed log4j2.xml
var Logging []byte

// JVM makes a broker for one test run start fast and stay small: the C1 compiler
// alone and the serial collector. With C2 two busy cores spend the first minute
// compiling.
func JVM() []string {
	return []string{"-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Djava.awt.headless=true"}
}

// Broker is one running broker.
type Broker struct {
	infra.Node
	Address string // host:port as clients reach it

	version string
}

var _ infra.Kafka = (*Broker)(nil)

// Version is what [Broker.ReadVersion] found.
func (b *Broker) Version() string { return b.version }

// Brokers are the seeds of a client.
func (b *Broker) Brokers() []string { return []string{b.Address} }

// Kind is "apache".
func (*Broker) Kind() string { return "apache" }

// CreateTopic makes a topic.
func (b *Broker) CreateTopic(ctx context.Context, name string, partitions int) error {
	return CreateTopic(ctx, b.Brokers(), name, partitions)
}

// Listeners are where a broker binds, each host:port.
type Listeners struct {
	Clients, Controller string
	// Advertised is the address that clients are told to use.
	Advertised string
}

// Properties is the configuration of a broker that is its own controller and
// keeps its data in the directory data. Every internal topic has one replica
// since there is one broker.
func Properties(l Listeners, data string) []string {
	return []string{
		"node.id=1",
		"process.roles=broker,controller",
		"listeners=PLAINTEXT://" + l.Clients + ",CONTROLLER://" + l.Controller,
		"advertised.listeners=PLAINTEXT://" + l.Advertised,
		"controller.listener.names=CONTROLLER",
		"controller.quorum.bootstrap.servers=" + l.Controller,
		"inter.broker.listener.name=PLAINTEXT",
		"listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
		"log.dirs=" + data,
		"offsets.topic.replication.factor=1",
		"offsets.topic.num.partitions=4",
		"transaction.state.log.replication.factor=1",
		"transaction.state.log.min.isr=1",
		"transaction.state.log.num.partitions=4",
		"share.coordinator.state.topic.replication.factor=1",
		"share.coordinator.state.topic.min.isr=1",
		// A topic that a client misspells must be an error.
		"auto.create.topics.enable=false",
		// A killed consumer holds its partitions for a session; tests wait that long.
		"group.min.session.timeout.ms=1000",
		// A broker that comes back after SIGKILL is refused until the controller has
		// given up its former self. Longer than a stall of a busy machine.
		"broker.session.timeout.ms=4000",
		"broker.heartbeat.interval.ms=500",
		"group.initial.rebalance.delay.ms=0",
	}
}

// Java is the arguments of java that run a main class of Kafka's, from the jars
// of a directory; home gets what Kafka itself writes beside its data.
func Java(lib, logging, home, main string, args ...string) []string {
	all := append(JVM(), "-Dlog4j2.configurationFile="+logging, "-Dkafka.logs.dir="+home, "-cp", lib+"/*", main)
	return append(all, args...)
}

// The main classes.
const (
	StorageTool = "kafka.tools.StorageTool"
	Main        = "kafka.Kafka"
)

// ClusterID is a UUID in Kafka's own notation. One that begins with "-" is drawn
// again, as Kafka does: StorageTool would take it for an option.
func ClusterID(draw func() uuid.UUID) string {
	for {
		id := draw()
		if text := base64.RawURLEncoding.EncodeToString(id[:]); text[0] != '-' {
			return text
		}
	}
}

// FormatArgs are the arguments of [StorageTool] that prepare the data directory
// of a configuration.
func FormatArgs(properties string) []string {
	return []string{"format", "--standalone", "-t", ClusterID(uuid.New), "-c", properties}
}

var said = regexp.MustCompile(`Kafka version: (\S+)`)

// ReadVersion finds what the broker said of itself in its log at its start; the
// protocol has no request for it.
func (b *Broker) ReadVersion() {
	log, err := os.ReadFile(b.Log())
	if err != nil {
		return
	}
	if m := said.FindSubmatch(log); m != nil {
		b.version = string(m[1])
	}
}

// Ask is the probe: the broker must name itself and a controller.
func (b *Broker) Ask(ctx context.Context) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(b.Address))
	if err != nil {
		return err
	}
	defer client.Close()
	m, err := kadm.NewClient(client).BrokerMetadata(ctx)
	if err != nil {
		return err
	}
	if len(m.Brokers) != 1 || m.Controller < 0 {
		return fmt.Errorf("the broker knows of %d brokers and controller %d", len(m.Brokers), m.Controller)
	}
	return nil
}

// CreateTopic makes a topic of one replica.
func CreateTopic(ctx context.Context, brokers []string, name string, partitions int) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...))
	if err != nil {
		return fmt.Errorf("create topic %s: %w", name, err)
	}
	defer client.Close()
	const replicas = 1
	r, err := kadm.NewClient(client).CreateTopic(ctx, int32(partitions), replicas, nil, name)
	if err != nil {
		return fmt.Errorf("create topic %s: %w", name, err)
	}
	if r.Err != nil {
		return fmt.Errorf("create topic %s: %w", name, r.Err)
	}
	return nil
}
