package sweeper

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"
)

// BrokerDepth asks the broker how long a queue is, over a connection of its own
// that it keeps: a question about a queue that is missing closes its channel,
// and must not close anybody else's.
type BrokerDepth struct {
	URLs []string

	mu   sync.Mutex
	conn *amqp091.Connection
}

// The limit covers the handshake: a broker that was stopped accepts a
// connection and says nothing.
const depthLimit = 5 * time.Second

// Depth counts the messages that wait for a consumer, and the consumers. What
// stands in the consumers' prefetch windows is not counted.
func (b *BrokerDepth) Depth(ctx context.Context, queue string) (ready, consumers int, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	conn, err := b.connect(ctx)
	if err != nil {
		return 0, 0, fmt.Errorf("depth of %s: %w", queue, err)
	}
	// A question that the broker never answers ends with the connection.
	stop := time.AfterFunc(depthLimit, func() { _ = conn.CloseDeadline(time.Now().Add(time.Second)) })
	defer stop.Stop()
	q, err := inspect(conn, queue)
	if err != nil {
		b.close()
		return 0, 0, fmt.Errorf("depth of %s: %w", queue, err)
	}
	return q.Messages, q.Consumers, nil
}

// Close ends the connection.
func (b *BrokerDepth) Close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.close()
}

func (b *BrokerDepth) close() {
	if b.conn == nil {
		return
	}
	_ = b.conn.CloseDeadline(time.Now().Add(time.Second)) // closed already, or gone
	b.conn = nil
}

func (b *BrokerDepth) connect(ctx context.Context) (*amqp091.Connection, error) {
	if b.conn != nil && !b.conn.IsClosed() {
		return b.conn, nil
	}
	failed := fmt.Errorf("no broker is configured")
	first := rand.IntN(max(len(b.URLs), 1))
	for i := range b.URLs {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		conn, err := amqp091.DialConfig(b.URLs[(first+i)%len(b.URLs)], amqp091.Config{
			Dial: amqp091.DefaultDial(depthLimit), Heartbeat: depthLimit,
		})
		if err == nil {
			b.conn = conn
			return conn, nil
		}
		failed = err
	}
	return nil, failed
}

func inspect(conn *amqp091.Connection, queue string) (amqp091.Queue, error) {
	ch, err := conn.Channel()
	if err != nil {
		return amqp091.Queue{}, err
	}
	defer func() { _ = ch.Close() }() // a passive declare that failed has closed it
	return ch.QueueDeclarePassive(queue, true, false, false, false, nil)
}
