// Package processes runs the real parts as plain processes of this machine:
// Postgres from its server binaries, a RabbitMQ cluster of three nodes from its
// scripts, Kafka in KRaft mode from a directory of jars. It needs no container
// engine and no rights; as root it starts each server as a user that the server
// accepts.
//
// It guarantees that every part listens on loopback alone, with passwords made
// up for the run, on ports and in directories that nobody else uses; that no
// service, cluster or configuration of the machine is touched; and, through
// package guardian, that nothing it started outlives the caller.
//
// When Java or Kafka's jars are missing an in-process stand-in (kfake) takes
// Kafka's place and says so; nothing stands in for Postgres or RabbitMQ.
//
// It must not import system or target. A binary that uses it calls
// guardian.MaybeRun first thing.
package processes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"mailproof/infra"
	"mailproof/infra/guardian"
	"mailproof/infra/ports"
	"mailproof/internal/setup"
)

const (
	// startTimeout bounds a whole start: three RabbitMQ nodes take 10 to 30 s on
	// two cores, and more while those are busy.
	startTimeout = 3 * time.Minute
	// stopTimeout bounds the clean-up after a failed start.
	stopTimeout = 20 * time.Second
	// startTries is how often a part is started again on other ports when one of
	// its ports was taken between being chosen and being used.
	startTries = 3
)

// Provider starts processes.
type Provider struct {
	paths setup.Paths
}

var _ infra.Provider = (*Provider)(nil)

// New makes a provider of the servers at paths, as [setup.Locate] finds them.
func New(paths setup.Paths) *Provider { return &Provider{paths: paths} }

// Name is "processes".
func (*Provider) Name() string { return "processes" }

// Start brings up the parts of spec side by side.
func (p *Provider) Start(ctx context.Context, spec infra.Spec) (infra.Stack, error) {
	spec = spec.WithDefaults()
	if err := p.check(spec); err != nil {
		return nil, err
	}
	if err := spec.MakeLogDir(); err != nil {
		return nil, err
	}
	g, err := guardian.Start(ctx, filepath.Join(spec.LogDir, "guardian.log"))
	if err != nil {
		return nil, err
	}
	s, err := p.start(ctx, g, spec)
	if err != nil {
		stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		return nil, errors.Join(err, g.Stop(stopping))
	}
	return s, nil
}

// check refuses before anything is started.
func (p *Provider) check(spec infra.Spec) error {
	var errs []error
	if spec.Postgres && p.paths.PostgresBin == "" {
		errs = append(errs, fmt.Errorf("no Postgres server (%d or newer) found: run \"mailproof setup\"", setup.MinPostgres))
	}
	if spec.RabbitMQ && (p.paths.RabbitMQBin == "" || p.paths.ErlangBin == "" || p.paths.Epmd == "") {
		errs = append(errs, errors.New("no RabbitMQ server found: run \"mailproof setup\""))
	}
	return errors.Join(errs...)
}

func (p *Provider) start(ctx context.Context, g *guardian.Guardian, spec infra.Spec) (*Stack, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	base, err := g.TempDir(ctx, "mp-")
	if err != nil {
		return nil, err
	}
	if err := checkEntry(base); err != nil {
		return nil, err
	}
	e := &environment{guardian: g, base: base, logs: spec.LogDir, paths: p.paths, progress: spec.Progress}
	s := &Stack{guardian: g}
	parts, ctx := errgroup.WithContext(ctx)
	if spec.Postgres {
		parts.Go(func() (err error) {
			s.postgres, err = withFreshPorts(ctx, e, "postgres", startPostgres)
			return err
		})
	}
	if spec.RabbitMQ {
		parts.Go(func() (err error) {
			s.rabbitmq, err = withFreshPorts(ctx, e, "rabbitmq", func(ctx context.Context, e *environment, choose *ports.Chooser) (*rabbitmq, error) {
				return startRabbitMQ(ctx, e, choose, spec.RabbitNodes)
			})
			return err
		})
	}
	if spec.Kafka {
		parts.Go(func() (err error) {
			s.kafka, err = p.startKafka(ctx, e)
			return err
		})
	}
	return s, parts.Wait()
}

func (p *Provider) startKafka(ctx context.Context, e *environment) (infra.Kafka, error) {
	if p.paths.Java == "" || p.paths.KafkaLib == "" {
		return startKfake(e)
	}
	return withFreshPorts(ctx, e, "kafka", startKafka)
}

// environment is what every part needs to start.
type environment struct {
	guardian *guardian.Guardian
	base     string // directory of the run, removed at its end
	logs     string
	paths    setup.Paths
	progress func(part, state string)
}

// dir makes the directory name below that of the run, for owner alone.
func (e *environment) dir(name string, owner *guardian.User) (string, error) {
	dir := filepath.Join(e.base, name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	return dir, own(dir, owner)
}

// log is the path of a node's log.
func (e *environment) log(node string) string { return filepath.Join(e.logs, node+".log") }

// withFreshPorts starts a part, and again on other ports when one of those it
// was given turned out to be taken: no reservation can bridge the moment between
// choosing a port and a server's bind.
func withFreshPorts[T any](ctx context.Context, e *environment, name string, start func(context.Context, *environment, *ports.Chooser) (T, error)) (T, error) {
	for try := 1; ; try++ {
		e.progress(name, "starting")
		began := time.Now()
		chosen := &ports.Chooser{}
		part, err := start(ctx, e, chosen)
		if err == nil {
			e.progress(name, fmt.Sprintf("ready after %.1f s", time.Since(began).Seconds()))
			return part, nil
		}
		if try == startTries || ctx.Err() != nil || !chosen.Taken() {
			return part, fmt.Errorf("start %s: %w", name, err)
		}
		e.progress(name, "a port was taken meanwhile, once more on others")
	}
}
