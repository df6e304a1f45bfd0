package infratest

import (
	"context"
	"fmt"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"mailproof/infra"
)

// another is a node that is not n.
func (s *suite) another(n infra.Node) infra.Node {
	for _, other := range s.stack.RabbitMQ().Nodes() {
		if other.Name() != n.Name() {
			return other
		}
	}
	return nil
}

// unsupported reports, and checks, that the provider refuses what acts on nodes.
func (s *suite) unsupported(t *testing.T) bool {
	if s.features.Signals {
		return false
	}
	r := s.stack.RabbitMQ()
	n := r.Nodes()[0]
	require.ErrorIs(t, r.MoveLeader(t.Context(), s.vhost, queueName, n), infra.ErrUnsupported)
	require.ErrorIs(t, r.CutOff(t.Context(), n), infra.ErrUnsupported)
	require.ErrorIs(t, r.Rejoin(t.Context(), n), infra.ErrUnsupported)
	require.ErrorIs(t, r.Alarm(t.Context(), n, true), infra.ErrUnsupported)
	_, err := r.CancelConsumers(t.Context(), s.vhost, queueName)
	require.ErrorIs(t, err, infra.ErrUnsupported)
	return true
}

func (s *suite) leaderMoved(t *testing.T) {
	if s.unsupported(t) {
		return
	}
	leader := s.leader(t)
	next := s.another(leader)
	require.NoError(t, publish(t.Context(), s.otherURL(leader), "before the move"))
	ctx, cancel := context.WithTimeout(t.Context(), actBound)
	defer cancel()
	require.NoError(t, s.stack.RabbitMQ().MoveLeader(ctx, s.vhost, queueName, next))
	require.Equal(t, next.Name(), s.leader(t).Name())
	require.NoError(t, s.stack.RabbitMQ().MoveLeader(ctx, s.vhost, queueName, next), "it leads already")
	require.NoError(t, publish(t.Context(), s.otherURL(leader), "after the move"))
	bodies, err := take(s.otherURL(leader))
	require.NoError(t, err)
	require.Contains(t, bodies, "before the move")
	require.Contains(t, bodies, "after the move")
}

func (s *suite) consumersCancelled(t *testing.T) {
	if !s.features.Signals {
		return // leaderMoved has seen the refusal
	}
	leader := s.leader(t)
	conn, err := amqp.DialConfig(s.otherURL(leader), amqp.Config{Dial: amqp.DefaultDial(5 * time.Second)})
	require.NoError(t, err)
	defer conn.CloseDeadline(time.Now().Add(time.Second))
	ch, err := conn.Channel()
	require.NoError(t, err)
	cancelled := ch.NotifyCancel(make(chan string, 1))
	_, err = ch.Consume(queueName, "watched", false, false, false, false, nil)
	require.NoError(t, err)

	ctx, cancel := context.WithTimeout(t.Context(), askBound)
	defer cancel()
	n, err := s.stack.RabbitMQ().CancelConsumers(ctx, s.vhost, queueName)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	select {
	case tag := <-cancelled:
		require.Equal(t, "watched", tag)
	case <-ctx.Done():
		require.Fail(t, "the consumer was not told")
	}
	require.NoError(t, ch.Close())
	require.NoError(t, publish(t.Context(), s.otherURL(leader), "to a queue that is still there"))
	eventually(t, "a message of a queue whose consumers were cancelled", func(context.Context) error {
		bodies, err := take(s.otherURL(leader))
		if err == nil && len(bodies) != 1 {
			err = fmt.Errorf("took %q", bodies)
		}
		return err
	})
}

func (s *suite) alarmed(t *testing.T) {
	if !s.features.Signals {
		return
	}
	nodes := s.stack.RabbitMQ().Nodes()
	p, err := openPublisher(s.stack.RabbitMQ().URLs(s.vhost)[1])
	require.NoError(t, err)
	defer p.close()
	blocked := p.conn.NotifyBlocked(make(chan amqp.Blocking, 2))
	ctx, cancel := context.WithTimeout(t.Context(), askBound)
	defer cancel()
	require.NoError(t, p.publish(ctx, "before the alarm"))

	require.NoError(t, s.stack.RabbitMQ().Alarm(ctx, nodes[0], true))
	confirm, err := p.channel.PublishWithDeferredConfirm("", queueName, true, false,
		amqp.Publishing{DeliveryMode: amqp.Persistent, Body: []byte("under the alarm")})
	require.NoError(t, err)
	requireBlocking(ctx, t, blocked, true)
	select {
	case <-confirm.Done():
		require.Fail(t, "a publisher of another node must be blocked, too")
	case <-time.After(300 * time.Millisecond): // an absence has no event to wait for
	}
	require.NoError(t, s.stack.RabbitMQ().Alarm(ctx, nodes[0], false))
	requireBlocking(ctx, t, blocked, false)
	acked, err := confirm.WaitContext(ctx)
	require.NoError(t, err)
	require.True(t, acked)
	bodies, err := take(s.stack.RabbitMQ().URLs(s.vhost)[1])
	require.NoError(t, err)
	require.Contains(t, bodies, "under the alarm")
}

func requireBlocking(ctx context.Context, t *testing.T, told <-chan amqp.Blocking, active bool) {
	t.Helper()
	select {
	case b := <-told:
		require.Equal(t, active, b.Active)
	case <-ctx.Done():
		require.Fail(t, "the publisher was not told", "blocked: %t", active)
	}
}

func (s *suite) leaderCutOff(t *testing.T) {
	if !s.features.Signals {
		return
	}
	leader := s.leader(t)
	other := s.otherURL(leader)
	require.NoError(t, publish(t.Context(), other, "confirmed before"))
	ctx, cancel := context.WithTimeout(t.Context(), actBound)
	defer cancel()

	began := time.Now()
	require.NoError(t, s.stack.RabbitMQ().CutOff(ctx, leader))
	require.True(t, leader.Running(), "its process goes on")
	t.Logf("%s was out after %.1f s", leader.Name(), time.Since(began).Seconds())
	eventually(t, "a publish to the majority", func(ctx context.Context) error {
		return publish(ctx, other, "confirmed meanwhile")
	})
	next := s.nextLeader(t, leader)

	began = time.Now()
	require.NoError(t, s.stack.RabbitMQ().Rejoin(ctx, leader))
	t.Logf("healed within %.1f s", time.Since(began).Seconds())
	require.NoError(t, s.stack.RabbitMQ().Rejoin(ctx, leader), "healing what is whole")
	s.awaitOnline(t)
	bodies, err := take(s.otherURL(next))
	require.NoError(t, err)
	require.Contains(t, bodies, "confirmed before")
	require.Contains(t, bodies, "confirmed meanwhile")
}
