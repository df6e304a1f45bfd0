package processes

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/base64"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"mailproof/infra"
	"mailproof/infra/guardian"
)

// kafkaLogging sends everything to standard output, which is the node's log.
//
//go:embed log4j2.xml
var kafkaLogging []byte

// jvm makes a broker for one test run start fast and stay small: the C1 compiler
// alone and the serial collector. With C2 two busy cores spend the first minute
// compiling.
var jvm = []string{"-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Djava.awt.headless=true"}

// kafka is one process that is broker and controller.
type kafka struct {
	*node
	address string
	version string
}

var _ infra.Kafka = (*kafka)(nil)

func startKafka(ctx context.Context, e *environment, ports *ports) (*kafka, error) {
	client, err := ports.next()
	if err != nil {
		return nil, err
	}
	controller, err := ports.next()
	if err != nil {
		return nil, err
	}
	home, err := e.dir("kafka-"+strconv.Itoa(client), nil)
	if err != nil {
		return nil, err
	}
	k := &kafka{address: loopback(client)}
	properties := filepath.Join(home, "server.properties")
	logging := filepath.Join(home, "log4j2.xml")
	if err := os.WriteFile(properties, []byte(k.properties(home, loopback(controller))), 0o600); err != nil {
		return nil, err
	}
	if err := os.WriteFile(logging, kafkaLogging, 0o600); err != nil {
		return nil, err
	}
	java := func(main string, args ...string) guardian.Command {
		all := append([]string{}, jvm...)
		all = append(all, "-Dlog4j2.configurationFile="+logging, "-Dkafka.logs.dir="+home,
			"-cp", filepath.Join(e.paths.KafkaLib, "*"), main)
		return guardian.Command{Path: e.paths.Java, Args: append(all, args...), Env: plainEnv(home), Dir: home}
	}
	format := java("kafka.tools.StorageTool", "format", "--standalone", "-t", clusterID(uuid.New), "-c", properties)
	if _, err := e.guardian.Run(ctx, e.base, format); err != nil {
		return nil, err
	}
	command := java("kafka.Kafka", properties)
	command.Stdout, command.Stderr = e.log("kafka"), e.log("kafka")
	k.node = &node{name: "kafka", guardian: e.guardian, command: command, stop: syscall.SIGTERM, probe: k.askMetadata}
	if err := k.launch(ctx); err != nil {
		return nil, err
	}
	k.version = loggedVersion(k.Log())
	return k, nil
}

// properties of a broker that is its own controller. Every internal topic has
// one replica since there is one broker.
func (k *kafka) properties(home, controller string) string {
	return strings.Join([]string{
		"node.id=1",
		"process.roles=broker,controller",
		"listeners=PLAINTEXT://" + k.address + ",CONTROLLER://" + controller,
		"advertised.listeners=PLAINTEXT://" + k.address,
		"controller.listener.names=CONTROLLER",
		"controller.quorum.bootstrap.servers=" + controller,
		"inter.broker.listener.name=PLAINTEXT",
		"listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
		"log.dirs=" + filepath.Join(home, "data"),
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
	}, "\n") + "\n"
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// clusterID is a UUID in Kafka's own notation. One that begins with "-" is drawn
// again, as Kafka does: StorageTool would take it for an option.
func clusterID(draw func() uuid.UUID) string {
	for {
		id := draw()
		if text := base64.RawURLEncoding.EncodeToString(id[:]); text[0] != '-' {
			return text
		}
	}
}

// loggedVersion finds what the broker says of itself at its start; the protocol
// has no request for it.
func loggedVersion(log string) string {
	b, err := os.ReadFile(log)
	if err != nil {
		return ""
	}
	_, after, ok := bytes.Cut(b, []byte("Kafka version: "))
	if !ok {
		return ""
	}
	fields := strings.Fields(string(after[:min(len(after), 40)]))
	if len(fields) == 0 {
		return ""
	}
	return fields[0]
}

func (k *kafka) Brokers() []string { return []string{k.address} }

func (*kafka) Kind() string { return "apache" }

func (k *kafka) CreateTopic(ctx context.Context, name string, partitions int) error {
	return createTopic(ctx, k.Brokers(), name, partitions)
}

// askMetadata is the probe: the broker must name itself and a controller.
func (k *kafka) askMetadata(ctx context.Context) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(k.address))
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

func createTopic(ctx context.Context, brokers []string, name string, partitions int) error {
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
