package dlq

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"mailproof/system/contract"
)

// BrokerQueue is the dead-letter queue of a RabbitMQ broker. Each pass has a
// connection of its own: closing it is what gives letters back.
type BrokerQueue struct {
	URLs []string
	Name string // shown by the broker's tools
}

// answerLimit bounds each answer of the broker; a stopped one says nothing.
const answerLimit = 10 * time.Second

// Open begins a pass over as many letters as there are now: those that are
// given back, or published, meanwhile are left to the next one.
func (b BrokerQueue) Open(ctx context.Context) (Pass, error) {
	p, err := b.open(ctx)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", contract.QueueDLQ, err)
	}
	return p, nil
}

// Count asks how many letters wait.
func (b BrokerQueue) Count(ctx context.Context) (int, error) {
	p, err := b.open(ctx)
	if err != nil {
		return 0, fmt.Errorf("count %s: %w", contract.QueueDLQ, err)
	}
	return p.left, p.Close()
}

func (b BrokerQueue) open(ctx context.Context) (*brokerPass, error) {
	conn, err := b.dial(ctx)
	if err != nil {
		return nil, err
	}
	p := &brokerPass{conn: conn}
	err = p.within(ctx, func() error {
		if p.ch, err = conn.Channel(); err != nil {
			return err
		}
		q, err := p.ch.QueueDeclarePassive(contract.QueueDLQ, true, false, false, false, nil)
		p.left = q.Messages
		return err
	})
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

func (b BrokerQueue) dial(ctx context.Context) (*amqp091.Connection, error) {
	failed := errors.New("no broker is configured")
	first := rand.IntN(max(len(b.URLs), 1))
	for i := range b.URLs {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		props := amqp091.NewConnectionProperties()
		props.SetClientConnectionName(b.Name)
		conn, err := amqp091.DialConfig(b.URLs[(first+i)%len(b.URLs)], amqp091.Config{
			Dial: amqp091.DefaultDial(answerLimit), Heartbeat: answerLimit, Properties: props,
		})
		if err == nil {
			return conn, nil
		}
		failed = err
	}
	return nil, failed
}

type brokerPass struct {
	conn *amqp091.Connection
	ch   *amqp091.Channel
	left int
}

// Next gets the next letter. It is not acked: it stays with this connection.
func (p *brokerPass) Next(ctx context.Context) (Letter, bool, error) {
	if p.left == 0 {
		return Letter{}, false, nil
	}
	p.left--
	var d amqp091.Delivery
	var ok bool
	err := p.within(ctx, func() (err error) {
		d, ok, err = p.ch.Get(contract.QueueDLQ, false)
		return err
	})
	if err != nil {
		return Letter{}, false, fmt.Errorf("get from %s: %w", contract.QueueDLQ, err)
	}
	if !ok {
		p.left = 0
		return Letter{}, false, nil
	}
	return Letter{Body: d.Body, Death: death(d.Headers), Remove: func() error { return d.Ack(false) }}, true, nil
}

// Close gives back what was not removed. Acks were written before it and are
// handled before it.
func (p *brokerPass) Close() error {
	err := p.conn.CloseDeadline(time.Now().Add(answerLimit))
	if err != nil && !errors.Is(err, amqp091.ErrClosed) {
		return fmt.Errorf("close %s: %w", contract.QueueDLQ, err)
	}
	return nil
}

// within ends the connection, and with it the call, when ctx ends or the broker
// says nothing: amqp091-go's calls know no context.
func (p *brokerPass) within(ctx context.Context, f func() error) error {
	ctx, cancel := context.WithTimeout(ctx, answerLimit)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = p.conn.CloseDeadline(time.Now().Add(time.Second)) })
	defer stop()
	err := f()
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("%w (%w)", ctx.Err(), err)
	}
	return err
}

// death is the reason of the newest death that the broker itself noted: the
// first entry of x-death.
func death(h amqp091.Table) string {
	deaths, _ := h["x-death"].([]any)
	if len(deaths) == 0 {
		return ""
	}
	newest, _ := deaths[0].(amqp091.Table)
	reason, _ := newest["reason"].(string)
	return reason
}
