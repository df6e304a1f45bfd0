// Package containers runs the real parts in containers, by testcontainers-go:
// Postgres, a RabbitMQ cluster of three, and Apache Kafka in KRaft mode, on a
// network of the run's own. Clients reach each part on a port of loopback that
// stays the same when a container is killed and started again.
//
// It asks of an image only that the server's programs are on its PATH and that
// the server's user exists, not that it has a certain entry point: any image of
// these servers will do (see [Images]). Unless it is there already, an image is
// pulled.
//
// When the caller is killed, testcontainers' reaper removes the containers; with
// TESTCONTAINERS_RYUK_DISABLED=true only [Stack.Stop] does.
//
// It must not import system or target. A binary that uses it calls
// guardian.MaybeRun first thing.
package containers

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/network"
	"golang.org/x/sync/errgroup"

	"mailproof/infra"
	"mailproof/infra/guardian"
)

const (
	// startTimeout bounds a start, with the pulling of images.
	startTimeout = 10 * time.Minute
	// stopTimeout bounds the clean-up after a failed start.
	stopTimeout = time.Minute
)

// Images to run.
type Images struct {
	Postgres string
	RabbitMQ string
	Kafka    string
	// KafkaLib is the directory of Kafka's jars in its image.
	KafkaLib string
}

// The environment variables that choose other images.
const (
	PostgresImage = "MAILPROOF_POSTGRES_IMAGE"
	RabbitMQImage = "MAILPROOF_RABBITMQ_IMAGE"
	KafkaImage    = "MAILPROOF_KAFKA_IMAGE"
)

// DefaultImages are the ones that the specification names (M6-11), or those that
// the environment does.
func DefaultImages() Images {
	choose := func(variable, image string) string {
		if v := os.Getenv(variable); v != "" {
			return v
		}
		return image
	}
	return Images{
		Postgres: choose(PostgresImage, "postgres:16"),
		RabbitMQ: choose(RabbitMQImage, "rabbitmq:4.0"),
		Kafka:    choose(KafkaImage, "apache/kafka:4.1.0"),
		KafkaLib: "/opt/kafka/libs",
	}
}

// Provider starts containers.
type Provider struct {
	images Images
}

var _ infra.Provider = (*Provider)(nil)

// New makes a provider of the servers in images.
func New(images Images) *Provider { return &Provider{images: images} }

// Name is "containers".
func (*Provider) Name() string { return "containers" }

// Available reports why there are no containers to be had: no engine that
// answers. nil means there are.
func Available(ctx context.Context) error {
	engine, err := testcontainers.NewDockerClientWithOpts(ctx)
	if err != nil {
		return err
	}
	defer engine.Close()
	_, err = engine.Info(ctx, infoOptions)
	return err
}

// Start brings up the parts of spec side by side.
func (p *Provider) Start(ctx context.Context, spec infra.Spec) (_ infra.Stack, err error) {
	spec = spec.WithDefaults()
	if err := spec.MakeLogDir(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	s := &Stack{}
	defer func() {
		if err != nil {
			stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
			defer cancel()
			err = errors.Join(err, s.Stop(stopping))
		}
	}()
	if s.guardian, err = guardian.Start(ctx, filepath.Join(spec.LogDir, "guardian.log")); err != nil {
		return nil, err
	}
	if s.engine, err = testcontainers.NewDockerClientWithOpts(ctx); err != nil {
		return nil, fmt.Errorf("no container engine answers: %w", err)
	}
	if s.network, err = network.New(ctx); err != nil {
		return nil, fmt.Errorf("make a network for the containers: %w", err)
	}
	return s, s.start(ctx, p.images, spec)
}

func (s *Stack) start(ctx context.Context, images Images, spec infra.Spec) error {
	e := &environment{stack: s, images: images, logs: spec.LogDir}
	parts, ctx := errgroup.WithContext(ctx)
	part := func(wanted bool, name string, start func(context.Context) error) {
		if !wanted {
			return
		}
		parts.Go(func() error {
			began := time.Now()
			spec.Progress(name, "starting")
			if err := start(ctx); err != nil {
				return fmt.Errorf("start %s: %w", name, err)
			}
			spec.Progress(name, fmt.Sprintf("ready after %.1f s", time.Since(began).Seconds()))
			return nil
		})
	}
	part(spec.Postgres, "postgres", func(ctx context.Context) (err error) {
		s.postgres, err = startPostgres(ctx, e)
		return err
	})
	part(spec.RabbitMQ, "rabbitmq", func(ctx context.Context) (err error) {
		s.rabbitmq, err = startRabbitMQ(ctx, e, spec.RabbitNodes)
		return err
	})
	part(spec.Kafka, "kafka", func(ctx context.Context) (err error) {
		s.kafka, err = startKafka(ctx, e)
		return err
	})
	return parts.Wait()
}

// environment is what every part needs to start.
type environment struct {
	stack  *Stack
	images Images
	logs   string
}

// log is the path of a node's log.
func (e *environment) log(node string) string { return filepath.Join(e.logs, node+".log") }

// secret makes a password for the run: 128 bits and more, letters and digits.
func secret() string { return rand.Text() }
