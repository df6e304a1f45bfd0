package target

import (
	"context"
	"errors"
	"fmt"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"mailproof/system/contract"
)

// Depths asks the broker how many messages wait in the main queues. It keeps a
// channel, so that it may be asked twice a second: the broker's own tool takes
// half a second of CPU for one answer, and that may be five seconds old.
type Depths struct {
	pipeline *Pipeline
	conn     *amqp091.Connection
	channel  *amqp091.Channel
}

// Depths makes a gauge of the run's main queues. It is for one goroutine.
func (p *Pipeline) Depths() *Depths { return &Depths{pipeline: p} }

// Read is the number of messages that wait for a consumer, by queue. An error
// says that the broker did not answer; the next Read dials again.
func (d *Depths) Read(ctx context.Context) (map[string]int, error) {
	if d.channel == nil {
		var err error
		if d.conn, d.channel, err = d.pipeline.channel(); err != nil {
			return nil, fmt.Errorf("depths of the queues: %w", err)
		}
	}
	depths := map[string]int{}
	for _, queue := range []string{contract.QueueTicket, contract.QueueMarketing} {
		// A passive declaration changes nothing and is answered by the leader.
		q, err := d.channel.QueueDeclarePassive(queue, true, false, false, false, nil)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("depth of %s: %w", queue, err), d.Close())
		}
		depths[queue] = q.Messages
	}
	return depths, ctx.Err()
}

// MarketingQueue is the queue that campaigns wait in.
func (*Pipeline) MarketingQueue() string { return contract.QueueMarketing }

// Close ends the connection; a Read after it opens another.
func (d *Depths) Close() error {
	conn := d.conn
	d.conn, d.channel = nil, nil
	if conn == nil {
		return nil
	}
	if err := conn.Close(); err != nil && !errors.Is(err, amqp091.ErrClosed) {
		return fmt.Errorf("depths of the queues: %w", err)
	}
	return nil
}
