package faults

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	amqp091 "github.com/rabbitmq/amqp091-go"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"mailproof/infra"
)

const (
	// nodeBound bounds one act on a server: a restart on busy cores.
	nodeBound = 2 * time.Minute
	// askBound bounds one question to a server that may be away, and askEvery is
	// the pause between two.
	askBound = 5 * time.Second
	askEvery = 100 * time.Millisecond
)

// ServerKilled is a server that gets SIGKILL, stays away for down, and is
// started again on its data. refused shows from a client's side that it is away.
func ServerKilled(title string, n infra.Node, down time.Duration, refused func(ctx context.Context) error) Act {
	return Act{
		Title: title, Part: n.Name(), Mend: n.Restart,
		Strike: func(ctx context.Context) (Witness, error) {
			pid := n.PID()
			if err := n.Kill(ctx); err != nil {
				return Witness{}, err
			}
			gone := refused(ctx)
			if gone == nil {
				return Witness{}, fmt.Errorf("%s got SIGKILL, and still serves", n.Name())
			}
			if !sleep(ctx, down) {
				return Witness{}, ctx.Err()
			}
			if err := n.Restart(ctx); err != nil {
				return Witness{}, err
			}
			return Witness{
				Text:  fmt.Sprintf("process %d got SIGKILL; a client was told %q; process %d serves since", pid, short(gone), n.PID()),
				Count: 1,
			}, nil
		},
	}
}

// short is an error's last word, without addresses of its own layers.
func short(err error) string {
	text := err.Error()
	if i := strings.LastIndex(text, ": "); i >= 0 {
		return text[i+2:]
	}
	return text
}

// PostgresRefuses connects, and returns why that was not possible.
func PostgresRefuses(pg infra.Postgres) func(context.Context) error {
	return func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, askBound)
		defer cancel()
		conn, err := pgx.Connect(ctx, pg.URL("postgres"))
		if err == nil {
			_ = conn.Close(ctx) // it serves: the caller's finding
		}
		return err
	}
}

// KafkaRefuses asks for the broker, and returns why there was no answer.
func KafkaRefuses(brokers []string) func(context.Context) error {
	return func(ctx context.Context) error {
		client, err := kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.RequestRetries(0))
		if err != nil {
			return err
		}
		defer client.Close()
		ctx, cancel := context.WithTimeout(ctx, askBound)
		defer cancel()
		return client.Ping(ctx)
	}
}

// Cluster is a RabbitMQ cluster and one quorum queue in it.
type Cluster struct {
	infra.RabbitMQ
	Vhost, Queue string
}

func (c Cluster) leader(ctx context.Context) (infra.Node, error) {
	return awaited(ctx, func(ctx context.Context) (infra.Node, error) { return c.Leader(ctx, c.Vhost, c.Queue) })
}

// follower is a node that does not lead the queue.
func (c Cluster) follower(ctx context.Context) (infra.Node, error) {
	leader, err := c.leader(ctx)
	if err != nil {
		return nil, err
	}
	return c.other(leader), nil
}

func (c Cluster) other(than infra.Node) infra.Node {
	for _, n := range c.Nodes() {
		if n.Name() != than.Name() {
			return n
		}
	}
	return nil
}

// awaited repeats ask until it succeeds, within nodeBound.
func awaited[T any](ctx context.Context, ask func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, nodeBound)
	defer cancel()
	for {
		got, err := ask(ctx)
		if err == nil || ctx.Err() != nil {
			return got, err
		}
		if !sleep(ctx, askEvery) {
			return got, errors.Join(err, ctx.Err())
		}
	}
}

// whole waits until each node serves and the queue has all its members online.
func (c Cluster) whole(ctx context.Context) error {
	_, err := awaited(ctx, func(ctx context.Context) (struct{}, error) {
		queues, err := c.Queues(ctx, c.Vhost)
		for _, q := range queues {
			if q.Name == c.Queue && len(q.Online) < len(q.Members) {
				err = errors.Join(err, fmt.Errorf("%s has %v of %v online", q.Name, q.Online, q.Members))
			}
		}
		return struct{}{}, err
	})
	return err
}

// LeaderKilled is SIGKILL of the node that leads the queue. It stays dead until
// meanwhile returns, and is started again.
func LeaderKilled(c Cluster, meanwhile func(ctx context.Context) error) Act {
	var leader infra.Node
	return Act{
		Title: "rabbitmq-leader-killed", Part: "RabbitMQ leader of " + c.Queue, Mend: c.mend,
		Ready: func(ctx context.Context) (err error) { leader, err = c.leader(ctx); return err },
		Strike: func(ctx context.Context) (Witness, error) {
			pid := leader.PID()
			if err := leader.Kill(ctx); err != nil {
				return Witness{}, err
			}
			gone := dialAMQP(ctx, c.url(leader))
			if gone == nil {
				return Witness{}, fmt.Errorf("%s got SIGKILL, and still serves", leader.Name())
			}
			if err := meanwhile(ctx); err != nil {
				return Witness{}, err
			}
			return Witness{
				Text:  fmt.Sprintf("%s led %s and got SIGKILL (process %d); a client of it was told %q; ", leader.Name(), c.Queue, pid, short(gone)),
				Count: 1,
			}, nil
		},
		Restore: func(ctx context.Context) (string, error) {
			err := errors.Join(leader.Restart(ctx), c.whole(ctx))
			next, asked := c.leader(ctx)
			if err = errors.Join(err, asked); err != nil {
				return "", err
			}
			return fmt.Sprintf("process %d serves since, and %s leads", leader.PID(), next.Name()), nil
		},
	}
}

// LeaderCutOff parts the node that leads the queue from its peers until
// meanwhile returns.
func LeaderCutOff(c Cluster, meanwhile func(ctx context.Context) error) Act {
	var leader infra.Node
	var pid int
	return Act{
		Title: "rabbitmq-leader-cut-off", Part: "RabbitMQ leader of " + c.Queue, Mend: c.mend,
		Ready: func(ctx context.Context) (err error) { leader, err = c.leader(ctx); return err },
		Strike: func(ctx context.Context) (Witness, error) {
			pid = leader.PID()
			if err := c.CutOff(ctx, leader); err != nil {
				return Witness{}, err
			}
			aside := dialAMQP(ctx, c.url(leader))
			if err := meanwhile(ctx); err != nil {
				return Witness{}, err
			}
			if aside == nil {
				return Witness{}, fmt.Errorf("%s was cut off, and still serves", leader.Name())
			}
			return Witness{
				Text:  fmt.Sprintf("%s led %s and was cut off; a client of it was told %q; ", leader.Name(), c.Queue, short(aside)),
				Count: 1,
			}, nil
		},
		Restore: func(ctx context.Context) (string, error) {
			err := errors.Join(c.Rejoin(ctx, leader), c.whole(ctx))
			next, asked := c.leader(ctx)
			if err = errors.Join(err, asked); err != nil {
				return "", err
			}
			if leader.PID() != pid {
				return "", fmt.Errorf("%s was process %d and is %d", leader.Name(), pid, leader.PID())
			}
			return fmt.Sprintf("the same process %d has joined again, and %s leads", pid, next.Name()), nil
		},
	}
}

// FollowerKilled is SIGKILL of a node that does not lead the queue.
func FollowerKilled(c Cluster, down time.Duration) Act {
	return Act{
		Title: "rabbitmq-follower-killed", Part: "RabbitMQ follower of " + c.Queue, Mend: c.mend,
		Strike: func(ctx context.Context) (Witness, error) {
			n, err := c.follower(ctx)
			if err != nil {
				return Witness{}, err
			}
			act := ServerKilled("", n, down, func(ctx context.Context) error { return dialAMQP(ctx, c.url(n)) })
			w, err := act.Strike(ctx)
			if err == nil {
				err = c.whole(ctx)
			}
			return w, err
		},
	}
}

// For is a meanwhile that lasts d.
func For(d time.Duration) func(ctx context.Context) error {
	return func(ctx context.Context) error {
		if !sleep(ctx, d) {
			return ctx.Err()
		}
		return nil
	}
}

// MajorityKilled kills all nodes but one until meanwhile returns: the last one
// steps aside, and no queue has a quorum.
func MajorityKilled(c Cluster, meanwhile func(ctx context.Context) error) Act {
	return Act{
		Title: "rabbitmq-majority-killed", Part: "RabbitMQ, two nodes of three", Mend: c.mend,
		Strike: func(ctx context.Context) (Witness, error) {
			nodes := c.Nodes()
			last, dead := nodes[0], nodes[1:]
			if err := each(dead, func(n infra.Node) error { return n.Kill(ctx) }); err != nil {
				return Witness{}, err
			}
			aside, err := awaited(ctx, func(ctx context.Context) (error, error) {
				if err := dialAMQP(ctx, c.url(last)); err != nil {
					return err, nil
				}
				return nil, fmt.Errorf("%s still serves", last.Name())
			})
			if err != nil {
				return Witness{}, err
			}
			if err := meanwhile(ctx); err != nil {
				return Witness{}, err
			}
			if err := each(dead, func(n infra.Node) error { return n.Restart(ctx) }); err != nil {
				return Witness{}, err
			}
			if _, err := awaited(ctx, func(ctx context.Context) (any, error) { return nil, dialAMQP(ctx, c.url(last)) }); err != nil {
				return Witness{}, fmt.Errorf("%s does not serve again: %w", last.Name(), err)
			}
			if err := c.whole(ctx); err != nil {
				return Witness{}, err
			}
			return Witness{
				Text: fmt.Sprintf("%s and %s got SIGKILL; a client of %s, which was left alone, was told %q; all three serve since",
					dead[0].Name(), dead[1].Name(), last.Name(), short(aside)),
				Count: len(dead),
			}, nil
		},
	}
}

func each(nodes []infra.Node, do func(infra.Node) error) error {
	var all errgroup.Group
	for _, n := range nodes {
		all.Go(func() error { return do(n) })
	}
	return all.Wait()
}

// PublishersBlocked is a memory alarm that lasts for a while: the cluster takes
// nothing from publishers.
func PublishersBlocked(c Cluster, lasts time.Duration) Act {
	n := c.Nodes()[0]
	end := func(ctx context.Context) error { return c.Alarm(ctx, n, false) }
	return Act{
		Title: "rabbitmq-publishers-blocked", Part: "RabbitMQ memory of " + n.Name(), Mend: end,
		Strike: func(ctx context.Context) (Witness, error) {
			conn, ch, err := openAMQP(ctx, c.url(c.other(n)))
			if err != nil {
				return Witness{}, err
			}
			defer func() { _ = conn.CloseDeadline(time.Now().Add(time.Second)) }() // a publisher of nothing
			told := conn.NotifyBlocked(make(chan amqp091.Blocking, 4))
			if err := c.Alarm(ctx, n, true); err != nil {
				return Witness{}, err
			}
			// The broker tells a connection once it publishes; the default exchange
			// drops what no queue is named for.
			if err := ch.PublishWithContext(ctx, "", "nobody", false, false, amqp091.Publishing{}); err != nil {
				return Witness{}, err
			}
			began := time.Now()
			reason, err := blocking(ctx, told, true)
			if err != nil {
				return Witness{}, err
			}
			if !sleep(ctx, lasts) {
				return Witness{}, ctx.Err()
			}
			if err := end(ctx); err != nil {
				return Witness{}, err
			}
			if _, err := blocking(ctx, told, false); err != nil {
				return Witness{}, err
			}
			return Witness{
				Text:  fmt.Sprintf("a publisher of %s was told blocked (%q), and unblocked after %.1f s", c.other(n).Name(), reason, time.Since(began).Seconds()),
				Count: 1,
			}, nil
		},
	}
}

func blocking(ctx context.Context, told <-chan amqp091.Blocking, active bool) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, nodeBound)
	defer cancel()
	for {
		select {
		case b, ok := <-told:
			if !ok {
				return "", errors.New("the connection of the publisher that was to be blocked has ended")
			}
			if b.Active == active {
				return b.Reason, nil
			}
		case <-ctx.Done():
			return "", fmt.Errorf("the publisher was not told blocked=%t: %w", active, ctx.Err())
		}
	}
}

// LeaderMoved hands the queue's leadership to another node that runs.
func LeaderMoved(c Cluster) Act {
	return Act{
		Title: "rabbitmq-leader-moved", Part: "RabbitMQ leader of " + c.Queue,
		Strike: func(ctx context.Context) (Witness, error) {
			from, err := c.leader(ctx)
			if err != nil {
				return Witness{}, err
			}
			to := c.other(from)
			if err := c.MoveLeader(ctx, c.Vhost, c.Queue, to); err != nil {
				return Witness{}, err
			}
			return Witness{Text: fmt.Sprintf("%s led %s, then %s did; both run", from.Name(), c.Queue, to.Name()), Count: 1}, nil
		},
	}
}

// ConsumersCancelled makes the broker cancel the queue's consumers.
func ConsumersCancelled(c Cluster) Act {
	return Act{
		Title: "rabbitmq-consumers-cancelled", Part: "RabbitMQ consumers of " + c.Queue,
		Strike: func(ctx context.Context) (Witness, error) {
			n, err := c.CancelConsumers(ctx, c.Vhost, c.Queue)
			if err != nil || n == 0 {
				return Witness{}, errors.Join(err, fmt.Errorf("%d channels consumed from %s", n, c.Queue))
			}
			return Witness{Text: fmt.Sprintf("the broker cancelled the consumers of %d channels of %s", n, c.Queue), Count: n}, nil
		},
	}
}

// mend starts what is dead, joins what is cut off.
func (c Cluster) mend(ctx context.Context) error {
	err := each(c.Nodes(), func(n infra.Node) error {
		if n.Running() {
			return nil
		}
		return n.Restart(ctx)
	})
	for _, n := range c.Nodes() {
		err = errors.Join(err, c.Rejoin(ctx, n))
	}
	return err
}

func (c Cluster) url(n infra.Node) string {
	for i, own := range c.Nodes() {
		if own.Name() == n.Name() {
			return c.URLs(c.Vhost)[i]
		}
	}
	return ""
}

// dialAMQP opens a connection as a client does, and returns why it could not.
func dialAMQP(ctx context.Context, address string) error {
	conn, _, err := openAMQP(ctx, address)
	if err == nil {
		err = conn.CloseDeadline(time.Now().Add(time.Second))
	}
	return err
}

func openAMQP(ctx context.Context, address string) (*amqp091.Connection, *amqp091.Channel, error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, nil, err
	}
	conn, err := amqp091.DialConfig(address, amqp091.Config{Dial: func(network, _ string) (net.Conn, error) {
		d := net.Dialer{Timeout: askBound}
		c, err := d.DialContext(ctx, network, u.Host)
		if err != nil {
			return nil, err
		}
		return c, c.SetDeadline(time.Now().Add(askBound)) // of the handshake; the client resets it
	}})
	if err != nil {
		return nil, nil, err
	}
	ch, err := conn.Channel()
	if err != nil {
		return nil, nil, errors.Join(err, conn.CloseDeadline(time.Now().Add(time.Second)))
	}
	return conn, ch, nil
}

// StrangerInGroup lets another consumer join a Kafka group for a while and leave
// again: partitions move to it and back. It reads, and commits nothing.
func StrangerInGroup(brokers []string, topic, group string, stays time.Duration) Act {
	return Act{
		Title: "kafka-rebalance", Part: "Kafka group " + group,
		Strike: func(ctx context.Context) (Witness, error) {
			got := make(chan int, 16)
			client, err := kgo.NewClient(
				kgo.SeedBrokers(brokers...), kgo.ConsumerGroup(group), kgo.ConsumeTopics(topic),
				kgo.ClientID("stranger"), kgo.DisableAutoCommit(), kgo.SessionTimeout(6*time.Second),
				kgo.OnPartitionsAssigned(func(_ context.Context, _ *kgo.Client, a map[string][]int32) {
					select {
					case got <- len(a[topic]):
					default: // only the first ones are waited for
					}
				}))
			if err != nil {
				return Witness{}, err
			}
			defer client.Close()
			reading, stop := context.WithCancel(ctx)
			defer stop()
			go func() {
				for reading.Err() == nil {
					client.PollFetches(reading)
				}
			}()
			partitions, err := assigned(ctx, got)
			if err != nil {
				return Witness{}, err
			}
			if !sleep(ctx, stays) {
				return Witness{}, ctx.Err()
			}
			stop()
			client.LeaveGroup()
			return Witness{
				Text:  fmt.Sprintf("a second member of %s was given %d partitions of %s, and left after %.1f s", group, partitions, topic, stays.Seconds()),
				Count: partitions,
			}, nil
		},
	}
}

// assigned waits until the member has at least one partition.
func assigned(ctx context.Context, got <-chan int) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, nodeBound)
	defer cancel()
	for {
		select {
		case n := <-got:
			if n > 0 {
				return n, nil
			}
		case <-ctx.Done():
			return 0, fmt.Errorf("the second member was given nothing: %w", ctx.Err())
		}
	}
}
