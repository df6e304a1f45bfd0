package containers

import (
	"context"
	"fmt"
	"strings"

	"golang.org/x/sync/errgroup"

	"mailproof/infra/kafka"
	"mailproof/infra/ports"
	"mailproof/infra/postgres"
	"mailproof/infra/rabbitmq"
)

// Where files of the run's own lie in a container.
const folder = "/tmp/mailproof"

func startPostgres(ctx context.Context, e *environment) (*postgres.Server, error) {
	port, err := (&ports.Chooser{}).Next()
	if err != nil {
		return nil, err
	}
	const inside = 5432
	s := &postgres.Server{Address: loopback(port), Password: secret()}
	config := append([]string{
		"listen_addresses = '*'",
		fmt.Sprintf("port = %d", inside),
		"unix_socket_directories = ''",
	}, postgres.Config()...)
	const home = "/var/lib/postgresql/mailproof"
	const data = home + "/data"
	n, err := e.add(ctx, server{
		name: "postgres", image: e.images.Postgres, user: "postgres", port: inside, onHost: port,
		stopSignal: "SIGINT", // fast shutdown
		env:        map[string]string{"MAILPROOF_PASSWORD": s.Password},
		files:      map[string]string{folder + "/postgresql.conf": lines(config)},
		script: strings.Join([]string{
			"set -eu",
			// A killed container comes back with its data.
			"if [ ! -s " + data + "/PG_VERSION ]; then",
			"  mkdir -p " + home,
			"  (umask 077; printf '%s\\n' \"$MAILPROOF_PASSWORD\" > " + home + "/password)",
			"  initdb " + strings.Join(postgres.InitArgs(data, home+"/password"), " "),
			"  echo 'host all all all scram-sha-256' >> " + data + "/pg_hba.conf",
			"  echo 'host replication all all scram-sha-256' >> " + data + "/pg_hba.conf",
			"  cp " + folder + "/postgresql.conf " + data + "/postgresql.conf",
			"fi",
			"exec postgres -D " + data,
		}, "\n"),
	}, s.Ask)
	if err != nil {
		return nil, err
	}
	s.Node = n
	return s, n.launch(ctx)
}

func startRabbitMQ(ctx context.Context, e *environment, size int) (*rabbitmq.Cluster, error) {
	c := &rabbitmq.Cluster{Password: secret()}
	c.Ctl = func(ctx context.Context, m *rabbitmq.Member, args ...string) ([]byte, error) {
		return m.Server.(*node).run(ctx, append([]string{"rabbitmqctl", "--quiet", "-n", m.Erlang}, args...)...)
	}
	var choose ports.Chooser
	onHost := make([]int, size)
	for i := range size {
		var err error
		if onHost[i], err = choose.Next(); err != nil {
			return nil, err
		}
		c.Members = append(c.Members, &rabbitmq.Member{
			Erlang: fmt.Sprintf("rabbit@%s", rabbitName(i)), Address: loopback(onHost[i]),
		})
	}
	cookie := secret()
	for i, m := range c.Members {
		n, err := e.addRabbit(ctx, c, i, onHost[i], cookie)
		if err != nil {
			return nil, err
		}
		m.Server = n
	}
	if err := c.Members[0].Server.(*node).launch(ctx); err != nil {
		return nil, err
	}
	joining, joinCtx := errgroup.WithContext(ctx)
	for _, m := range c.Members[1:] {
		joining.Go(func() error { return m.Server.(*node).launch(joinCtx) })
	}
	if err := joining.Wait(); err != nil {
		return nil, err
	}
	return c, c.AwaitFormed(ctx)
}

func rabbitName(i int) string { return fmt.Sprintf("rabbitmq-%d", i+1) }

func (e *environment) addRabbit(ctx context.Context, c *rabbitmq.Cluster, i, onHost int, cookie string) (*node, error) {
	const inside = 5672
	const home = "/var/lib/rabbitmq"
	m := c.Members[i]
	config := append([]string{fmt.Sprintf("listeners.tcp.1 = 0.0.0.0:%d", inside)}, c.Config()...)
	config = append(config, c.Formation(i)...)
	return e.add(ctx, server{
		name: rabbitName(i), image: e.images.RabbitMQ, user: "rabbitmq", port: inside, onHost: onHost,
		stopSignal: "SIGTERM",
		env: map[string]string{
			"HOME":                          home,
			"MAILPROOF_COOKIE":              cookie,
			"RABBITMQ_NODENAME":             m.Erlang,
			"RABBITMQ_MNESIA_BASE":          home + "/mailproof",
			"RABBITMQ_LOG_BASE":             home + "/mailproof-log",
			"RABBITMQ_CONFIG_FILE":          folder + "/rabbitmq",
			"RABBITMQ_CONFIG_FILES":         folder + "/none",
			"RABBITMQ_ADVANCED_CONFIG_FILE": folder + "/advanced.config",
			"RABBITMQ_ENABLED_PLUGINS_FILE": folder + "/enabled_plugins",
			"RABBITMQ_GENERATED_CONFIG_DIR": home + "/mailproof-config",
			"RABBITMQ_PID_FILE":             home + "/mailproof.pid",
			"RABBITMQ_CONF_ENV_FILE":        "/dev/null",
			// The script then becomes the Erlang VM: the container's first process
			// is the one that must be signalled.
			"RUNNING_UNDER_SYSTEMD": "true",
		},
		files: map[string]string{
			folder + "/rabbitmq.conf":   lines(config),
			folder + "/advanced.config": "[].\n",
			folder + "/enabled_plugins": "[].\n",
		},
		script: strings.Join([]string{
			"set -eu",
			`rm -f "$HOME/.erlang.cookie"`,
			`(umask 377; printf %s "$MAILPROOF_COOKIE" > "$HOME/.erlang.cookie")`,
			"exec rabbitmq-server",
		}, "\n"),
	}, func(ctx context.Context) error { return c.Ask(ctx, m) })
}

func startKafka(ctx context.Context, e *environment) (*kafka.Broker, error) {
	port, err := (&ports.Chooser{}).Next()
	if err != nil {
		return nil, err
	}
	const inside = 9092
	const home = folder + "/home"
	const properties, logging = folder + "/server.properties", folder + "/log4j2.xml"
	b := &kafka.Broker{Address: loopback(port)}
	java := func(main string, args ...string) string {
		quoted := []string{"java"}
		for _, a := range kafka.Java(e.images.KafkaLib, logging, home, main, args...) {
			quoted = append(quoted, "'"+a+"'")
		}
		return strings.Join(quoted, " ")
	}
	n, err := e.add(ctx, server{
		name: "kafka", image: e.images.Kafka, user: "nobody", port: inside, onHost: port,
		stopSignal: "SIGTERM",
		files: map[string]string{
			properties: lines(kafka.Properties(kafka.Listeners{
				Clients: fmt.Sprintf("0.0.0.0:%d", inside), Controller: "127.0.0.1:9093", Advertised: b.Address,
			}, "/var/tmp/mailproof-kafka")),
			logging: string(kafka.Logging),
		},
		script: strings.Join([]string{
			"set -eu",
			"if [ ! -s /var/tmp/mailproof-kafka/meta.properties ]; then",
			"  " + java(kafka.StorageTool, kafka.FormatArgs(properties)...),
			"fi",
			"exec " + java(kafka.Main, properties),
		}, "\n"),
	}, b.Ask)
	if err != nil {
		return nil, err
	}
	b.Node = n
	if err := n.launch(ctx); err != nil {
		return nil, err
	}
	b.ReadVersion()
	return b, nil
}

func lines(of []string) string { return strings.Join(of, "\n") + "\n" }
