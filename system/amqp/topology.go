package amqp

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"mailproof/system/contract"
)

// Defaults of [Topology].
const (
	DefaultDeliveryLimit  = 200
	DefaultRetryMaxLength = 1_000_000
)

// withoutLimit is the delivery limit of a queue that should have none. RabbitMQ
// 4 sets 20 where the argument is missing, and 3.x refuses its -1 for "none";
// this number both accept, and it stays the same when the broker is upgraded (a
// queue declared again with other arguments is refused).
const withoutLimit = 2_000_000_000

// Topology declares the exchanges and queues of the notification system (M6-02
// to M6-04, AC2, M6-14). All of them are durable, all queues are quorum queues
// (TRAP-M6-5).
//
//	notify.x ──notify.ticket.*────▶ q.notify.ticket ──────┐ over the
//	         ──notify.marketing.*─▶ q.notify.marketing ───┤ delivery limit
//	                                                      ▼
//	                                          notify.dlx ─#─▶ q.notify.dlq
//
//	notify.retry.<lane>.<delay> ─#─▶ q.notify.retry… ──TTL──▶ notify.x
//
// A main queue's dead letters go to the DLQ and never to a retry queue: the
// broker drops a message that would go round in a circle without a reject.
// Delay never comes from a requeue (M6-15): a worker publishes the message to a
// tier's exchange, its queue holds it for the TTL, and it returns to notify.x
// under the routing key that it had all along. Hence one topic exchange per
// tier, bound with "#": through the default exchange its key would be the name
// of the retry queue, notify.x would have no route for it, and at-least-once
// dead-lettering would keep it for good, with all that is behind it.
//
// Dead-lettering is at-least-once. A message on that way is in "messages", but
// neither ready nor unacked.
type Topology struct {
	// TicketDelays and MarketingDelays are the tiers of each lane, in whole
	// milliseconds; naming one twice is harmless. Each lane has queues of its own, since messages leave a
	// queue in order and a ticket would wait behind 50,000 of the other kind.
	TicketDelays    []time.Duration
	MarketingDelays []time.Duration
	// DeliveryLimit of the main queues, default 200: a net against a message
	// that kills its worker, far above what a few crashes with a full prefetch
	// window cost (20 was passed by messages that no worker had ever seen).
	DeliveryLimit int
	// RetryMaxLength bounds each tier, default 1,000,000: beyond it a publish
	// is refused, since at-least-once dead-lettering forbids to drop the head.
	RetryMaxLength int
}

// Declare makes everything that is missing. It is safe to call again and from
// several sessions; a queue that exists with other arguments is an error that
// names it.
func (t Topology) Declare(ctx context.Context, ch Declarer) error {
	if err := t.validate(); err != nil {
		return err
	}
	d := declarations{ctx: ctx, ch: ch}
	d.exchange(contract.Exchange)
	d.exchange(contract.ExchangeDLQ)
	d.queue(contract.QueueDLQ, contract.ExchangeDLQ, "#", amqp091.Table{
		"x-delivery-limit": int64(withoutLimit),
	})
	t.lane(&d, contract.TicketConfirmation, t.TicketDelays)
	t.lane(&d, contract.Marketing, t.MarketingDelays)
	return d.err
}

func (t Topology) lane(d *declarations, mt contract.MailType, delays []time.Duration) {
	d.queue(mt.Queue(), contract.Exchange, "notify."+mt.Lane()+".*", amqp091.Table{
		"x-delivery-limit":       int64(cmp.Or(t.DeliveryLimit, DefaultDeliveryLimit)),
		"x-dead-letter-exchange": contract.ExchangeDLQ,
		"x-dead-letter-strategy": "at-least-once",
		"x-overflow":             "reject-publish", // at-least-once falls back silently without it
	})
	for _, delay := range delays {
		exchange := contract.RetryExchange(mt, delay)
		d.exchange(exchange)
		d.queue(contract.RetryQueue(mt, delay), exchange, "#", amqp091.Table{
			"x-message-ttl":          delay.Milliseconds(),
			"x-dead-letter-exchange": contract.Exchange, // and no routing key: the message keeps its own
			"x-dead-letter-strategy": "at-least-once",
			"x-overflow":             "reject-publish",
			"x-max-length":           int64(cmp.Or(t.RetryMaxLength, DefaultRetryMaxLength)),
		})
	}
}

func (t Topology) validate() error {
	if t.DeliveryLimit < 0 || t.RetryMaxLength < 0 {
		return fmt.Errorf("topology: delivery limit %d and maximum length %d must not be negative", t.DeliveryLimit, t.RetryMaxLength)
	}
	for lane, delays := range map[string][]time.Duration{"ticket": t.TicketDelays, "marketing": t.MarketingDelays} {
		for _, d := range delays {
			// The broker takes a TTL of up to 2^32−1 ms.
			if d < time.Millisecond || d%time.Millisecond != 0 || d.Milliseconds() > math.MaxUint32 {
				return fmt.Errorf("topology: %s delay %v is not a whole number of milliseconds from 1 ms to 49 days", lane, d)
			}
		}
	}
	return nil
}

// declarations keeps the first error.
type declarations struct {
	ctx context.Context
	ch  Declarer
	err error
}

func (d *declarations) do(what, name string, f func() error) {
	if d.err == nil {
		d.err = d.ctx.Err()
	}
	if d.err != nil {
		return
	}
	if err := f(); err != nil {
		d.err = fmt.Errorf("declare %s %s: %w", what, name, err)
	}
}

func (d *declarations) exchange(name string) {
	d.do("exchange", name, func() error {
		return d.ch.ExchangeDeclare(name, amqp091.ExchangeTopic, true, false, false, false, nil)
	})
}

func (d *declarations) queue(name, exchange, key string, args amqp091.Table) {
	args["x-queue-type"] = "quorum"
	d.do("queue", name, func() error {
		_, err := d.ch.QueueDeclare(name, true, false, false, false, args)
		return err
	})
	d.do("binding of queue", name, func() error {
		return d.ch.QueueBind(name, key, exchange, false, nil)
	})
}
