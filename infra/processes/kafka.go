package processes

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"mailproof/infra/guardian"
	broker "mailproof/infra/kafka"
	"mailproof/infra/ports"
)

// kafka is one process that is broker and controller.
type kafka struct {
	*broker.Broker
}

func startKafka(ctx context.Context, e *environment, choose *ports.Chooser) (*kafka, error) {
	client, err := choose.Next()
	if err != nil {
		return nil, err
	}
	controller, err := choose.Next()
	if err != nil {
		return nil, err
	}
	home, err := e.dir("kafka-"+strconv.Itoa(client), nil)
	if err != nil {
		return nil, err
	}
	k := &kafka{Broker: &broker.Broker{Address: loopback(client)}}
	properties := filepath.Join(home, "server.properties")
	logging := filepath.Join(home, "log4j2.xml")
	config := broker.Properties(broker.Listeners{
		Clients: k.Address, Controller: loopback(controller), Advertised: k.Address,
	}, filepath.Join(home, "data"))
	if err := os.WriteFile(properties, []byte(strings.Join(config, "\n")+"\n"), 0o600); err != nil {
		return nil, err
	}
	if err := os.WriteFile(logging, broker.Logging, 0o600); err != nil {
		return nil, err
	}
	java := func(main string, args ...string) guardian.Command {
		return guardian.Command{
			Path: e.paths.Java,
			// Its compression libraries unpack themselves into files, which a killed
			// process leaves behind.
			Args: append([]string{"-Djava.io.tmpdir=" + home}, broker.Java(e.paths.KafkaLib, logging, home, main, args...)...),
			Env:  plainEnv(home), Dir: home,
		}
	}
	if _, err := e.guardian.Run(ctx, e.base, java(broker.StorageTool, broker.FormatArgs(properties)...)); err != nil {
		return nil, err
	}
	command := java(broker.Main, properties)
	command.Stdout, command.Stderr = e.log("kafka"), e.log("kafka")
	n := &node{name: "kafka", guardian: e.guardian, command: command, stop: syscall.SIGTERM, probe: k.Ask}
	k.Node = n
	if err := n.launch(ctx); err != nil {
		return nil, err
	}
	k.ReadVersion()
	return k, nil
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
