package processes

import (
	"context"
	"errors"
	"fmt"

	"mailproof/infra"
	"mailproof/infra/guardian"
)

// Stack is a running set of parts.
type Stack struct {
	guardian *guardian.Guardian
	postgres *postgres
	rabbitmq *rabbitmq
	kafka    infra.Kafka
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
func (s *Stack) Kafka() infra.Kafka { return s.kafka }

// Versions is what each part said of itself.
func (s *Stack) Versions() infra.Versions {
	v := infra.Versions{Provider: "processes"}
	if s.postgres != nil {
		v.Postgres = s.postgres.Version()
	}
	if s.rabbitmq != nil {
		v.RabbitMQ = s.rabbitmq.Version()
	}
	switch k := s.kafka.(type) {
	case *kafka:
		v.Kafka, v.KafkaKind = k.Version(), k.Kind()
	case *kfakeCluster:
		v.Kafka, v.KafkaKind = k.version, k.Kind()
	}
	return v
}

// Guard puts a process of the caller's under the guardian's care. Between fork
// and this call a SIGKILL of the caller leaves it behind; Pdeathsig closes that
// gap for a child that was forked on a locked thread.
func (s *Stack) Guard(pid int) error {
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	return s.guardian.Guard(ctx, pid)
}

// Mend starts, resumes and joins what is not whole.
func (s *Stack) Mend(ctx context.Context) error {
	var nodes []infra.Node
	if s.postgres != nil {
		nodes = append(nodes, s.postgres)
	}
	if k, ok := s.kafka.(*kafka); ok {
		nodes = append(nodes, k)
	}
	if s.rabbitmq != nil {
		nodes = append(nodes, s.rabbitmq.Nodes()...)
	}
	return infra.Mend(ctx, s.RabbitMQ(), nodes...)
}

// Stop ends every node and every guarded process, and removes the data.
func (s *Stack) Stop(ctx context.Context) error {
	if k, ok := s.kafka.(*kfakeCluster); ok {
		k.cluster.Close()
	}
	var segment error
	if s.postgres != nil {
		segment = s.postgres.removeSegment()
	}
	if err := errors.Join(s.guardian.Stop(ctx), segment); err != nil {
		return fmt.Errorf("stop the stack: %w", err)
	}
	return nil
}
