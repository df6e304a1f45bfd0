package containers

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/testcontainers/testcontainers-go"

	"mailproof/infra"
	"mailproof/infra/guardian"
	"mailproof/infra/kafka"
	"mailproof/infra/postgres"
	"mailproof/infra/rabbitmq"
)

// guardTimeout bounds one question to the guardian.
const guardTimeout = 3 * time.Second

// Stack is a running set of parts.
type Stack struct {
	guardian *guardian.Guardian
	engine   *testcontainers.DockerClient
	network  *testcontainers.DockerNetwork
	postgres *postgres.Server
	rabbitmq *rabbitmq.Cluster
	kafka    *kafka.Broker

	mu    sync.Mutex
	nodes []*node // in the order of their start; emptied by Stop
	over  bool
}

var _ infra.Stack = (*Stack)(nil)

// Postgres is nil when it was not asked for.
func (s *Stack) Postgres() infra.Postgres {
	if s.postgres == nil {
		return nil // not a nil pointer in an interface, which would not be nil
	}
	return s.postgres
}

// RabbitMQ is nil when it was not asked for.
func (s *Stack) RabbitMQ() infra.RabbitMQ {
	if s.rabbitmq == nil {
		return nil
	}
	return s.rabbitmq
}

// Kafka is nil when it was not asked for.
func (s *Stack) Kafka() infra.Kafka {
	if s.kafka == nil {
		return nil
	}
	return s.kafka
}

// Versions is what each part said of itself.
func (s *Stack) Versions() infra.Versions {
	v := infra.Versions{Provider: "containers"}
	if s.postgres != nil {
		v.Postgres = s.postgres.Version()
	}
	if s.rabbitmq != nil {
		v.RabbitMQ = s.rabbitmq.Version()
	}
	if s.kafka != nil {
		v.Kafka, v.KafkaKind = s.kafka.Version(), s.kafka.Kind()
	}
	return v
}

// Guard puts a process of the caller's under a guardian's care: it is killed when
// the stack stops, or the caller does.
func (s *Stack) Guard(pid int) error {
	ctx, cancel := context.WithTimeout(context.Background(), guardTimeout)
	defer cancel()
	return s.guardian.Guard(ctx, pid)
}

// Mend starts, resumes and joins what is not whole.
func (s *Stack) Mend(ctx context.Context) error {
	s.mu.Lock()
	nodes := make([]infra.Node, len(s.nodes))
	for i, n := range s.nodes {
		nodes[i] = n
	}
	s.mu.Unlock()
	return infra.Mend(ctx, s.RabbitMQ(), nodes...)
}

// Stop removes every container, its data and the network, and ends the guarded
// processes.
func (s *Stack) Stop(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over {
		return nil
	}
	var errs []error
	var left []*node
	for _, n := range s.nodes {
		if err := n.remove(ctx); err != nil {
			errs = append(errs, fmt.Errorf("remove %s: %w", n.name, err))
			left = append(left, n)
		}
	}
	s.nodes = left
	if s.network != nil && len(left) == 0 {
		errs = append(errs, s.network.Remove(ctx))
	}
	if s.guardian != nil {
		errs = append(errs, s.guardian.Stop(ctx))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("stop the stack: %w", err)
	}
	s.over = true
	if s.engine == nil {
		return nil
	}
	return s.engine.Close()
}
