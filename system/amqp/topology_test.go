package amqp

import (
	"context"
	"fmt"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"mailproof/infra"
	"mailproof/system/contract"
)

// declared runs a publisher over a virtual host that has the topology.
func declared(t *testing.T, top Topology) (*broker, string, *Publisher) {
	t.Helper()
	vh, u := vhost(t)
	conn, err := amqp091.Dial(u)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	p, st := startPublisher(t, Config{URLs: []string{u}, Setup: top.Declare})
	st.await(t, StateConnected)
	return &broker{t: t, url: u, conn: conn}, vh, p
}

func queues(t *testing.T, vh string) map[string]infra.Queue {
	t.Helper()
	list, err := rabbit(t).Queues(t.Context(), vh)
	require.NoError(t, err)
	out := make(map[string]infra.Queue)
	for _, q := range list {
		out[q.Name] = q
	}
	return out
}

func mailTo(exchange string, mt contract.MailType, id string) []Message {
	return []Message{{
		Exchange: exchange, RoutingKey: contract.RoutingKey(mt), ID: id,
		Headers: map[string]any{contract.HeaderAttempt: int64(1)}, Body: []byte(`{}`),
	}}
}

// AC2, TRAP-M6-5.
func TestTopologyHasQuorumQueuesUnderTheContractsNames(t *testing.T) {
	t.Parallel()
	_, vh, _ := declared(t, Topology{
		TicketDelays:    []time.Duration{10 * time.Second, time.Minute, 5 * time.Minute, 5 * time.Minute},
		MarketingDelays: []time.Duration{time.Minute},
	})
	var got []string
	for name, q := range queues(t, vh) {
		require.Equal(t, "quorum", q.Type, name)
		got = append(got, name)
	}
	require.ElementsMatch(t, []string{
		"q.notify.ticket", "q.notify.marketing", "q.notify.dlq",
		"q.notify.retry.10s", "q.notify.retry.1m", "q.notify.retry.5m", "q.notify.retry.marketing.1m",
	}, got)
}

func TestTopologyRoutesEachLane(t *testing.T) {
	t.Parallel()
	b, _, p := declared(t, Topology{})
	for _, mt := range []contract.MailType{contract.TicketConfirmation, contract.Marketing} {
		require.NoError(t, p.Publish(t.Context(), mailTo(contract.Exchange, mt, "m"))[0])
		require.Len(t, b.take(mt.Queue()), 1)
	}
	require.ErrorIs(t, p.Publish(t.Context(), messages(contract.Exchange, "notify.sms", 1))[0], ErrUnroutable)
	require.NoError(t, p.Publish(t.Context(), mailTo(contract.ExchangeDLQ, contract.Marketing, "dead"))[0])
	require.Len(t, b.take(contract.QueueDLQ), 1)
}

// M6-04 and the trap beside it: an expired message is back in the queue of its
// lane under its own routing key, after the delay and not before, and nothing
// stays in between (messages − ready − unacked = 0). The broker's tool counts
// every 5 s, so the delay is well above that: the count must be seen to go up
// before it proves anything by going down.
func TestExpiredMessageReturnsToItsLane(t *testing.T) {
	t.Parallel()
	const delay, n = 12 * time.Second, 100 // more than the dead-letter worker's window of 32
	b, vh, p := declared(t, Topology{TicketDelays: []time.Duration{delay}, MarketingDelays: []time.Duration{delay}})
	lanes := []contract.MailType{contract.TicketConfirmation, contract.Marketing}
	began := time.Now()
	for _, mt := range lanes {
		var msgs []Message
		for i := range n {
			msgs = append(msgs, mailTo(contract.RetryExchange(mt, delay), mt, fmt.Sprint(i))...)
		}
		for _, err := range p.Publish(t.Context(), msgs) {
			require.NoError(t, err)
		}
	}
	inTiers := func(want int) func() bool {
		return func() bool {
			all := queues(t, vh)
			return all[contract.RetryQueue(lanes[0], delay)].Messages == want && all[contract.RetryQueue(lanes[1], delay)].Messages == want
		}
	}
	eventually(t, "the tool counts them", inTiers(n))
	for _, mt := range lanes {
		eventually(t, "all are back", func() bool { return b.ready(mt.Queue()) == n })
		require.GreaterOrEqual(t, time.Since(began), delay)
		for i, d := range b.take(mt.Queue()) {
			require.Equal(t, fmt.Sprint(i), d.MessageId, "in order")
			require.Equal(t, contract.RoutingKey(mt), d.RoutingKey)
			require.EqualValues(t, 1, d.Headers[contract.HeaderAttempt])
		}
	}
	eventually(t, "nothing is stuck in the tiers", inTiers(0))
	require.Zero(t, b.ready(contract.QueueDLQ))
}

// A worker publishes what it got again. The broker's notes on the dead letter
// must not make it see a circle.
func TestMessageGoesThroughItsTierManyTimes(t *testing.T) {
	t.Parallel()
	const delay = 50 * time.Millisecond
	b, _, p := declared(t, Topology{TicketDelays: []time.Duration{delay}})
	mt := contract.TicketConfirmation
	msg := mailTo(contract.Exchange, mt, "m")[0]
	for range 6 {
		require.NoError(t, p.Publish(t.Context(), []Message{msg})[0])
		var got []amqp091.Delivery
		eventually(t, "it is back", func() bool { got = b.take(mt.Queue()); return len(got) == 1 })
		msg.Exchange, msg.Headers = contract.RetryExchange(mt, delay), got[0].Headers
	}
	require.Zero(t, b.ready(contract.QueueDLQ))
}

// A message that kills its worker again and again ends in the DLQ, not in a
// retry queue and not nowhere.
func TestDeliveryLimitLeadsToTheDLQ(t *testing.T) {
	t.Parallel()
	const limit = 3
	b, _, p := declared(t, Topology{DeliveryLimit: limit, TicketDelays: []time.Duration{time.Minute}})
	mt := contract.TicketConfirmation
	require.NoError(t, p.Publish(t.Context(), mailTo(contract.Exchange, mt, "poison"))[0])

	px := newProxy(t, b.url)
	seen := make(chan int64, 10)
	r := startConsumer(t, ConsumerConfig{
		Config: Config{URLs: []string{px.url}}, Queue: mt.Queue(), Consumers: 1, Prefetch: 1,
		Handle: func(_ context.Context, d *Delivery) { seen <- d.DeliveryCount; px.cut() },
	}, time.Second)
	for count := range int64(limit + 1) {
		require.Equal(t, count, <-seen)
	}
	eventually(t, "it is in the DLQ", func() bool { return b.ready(contract.QueueDLQ) == 1 })
	r.stop()
	require.NoError(t, <-r.done)
	dead := b.take(contract.QueueDLQ)
	require.Equal(t, "poison", dead[0].MessageId)
	require.Equal(t, contract.RoutingKey(mt), dead[0].RoutingKey)
	require.Equal(t, "delivery_limit", dead[0].Headers["x-first-death-reason"])
	require.Zero(t, b.ready(mt.Queue()))
}

// Listing by get and requeue empties a quorum queue that has a delivery limit.
func TestListingTheDLQDoesNotEmptyIt(t *testing.T) {
	t.Parallel()
	b, _, p := declared(t, Topology{})
	require.NoError(t, p.Publish(t.Context(), mailTo(contract.ExchangeDLQ, contract.TicketConfirmation, "dead"))[0])
	ch := b.channel()
	for range 40 { // RabbitMQ 4 would drop it after 20
		var d amqp091.Delivery
		eventually(t, "still there", func() (ok bool) {
			var err error
			d, ok, err = ch.Get(contract.QueueDLQ, false)
			require.NoError(t, err)
			return ok
		})
		require.NoError(t, d.Nack(false, true))
	}
	eventually(t, "back again", func() bool { return b.ready(contract.QueueDLQ) == 1 })
}

func TestFullTierRefuses(t *testing.T) {
	t.Parallel()
	const delay = time.Minute
	_, _, p := declared(t, Topology{TicketDelays: []time.Duration{delay}, RetryMaxLength: 1})
	mt := contract.TicketConfirmation
	eventually(t, "refused", func() bool {
		err := p.Publish(t.Context(), mailTo(contract.RetryExchange(mt, delay), mt, "m"))[0]
		if err != nil {
			require.ErrorIs(t, err, ErrRefused)
		}
		return err != nil
	})
}

func TestTopologyConflictNamesTheQueue(t *testing.T) {
	t.Parallel()
	b, _, _ := declared(t, Topology{})
	err := Topology{DeliveryLimit: 7}.Declare(t.Context(), b.channel())
	require.ErrorContains(t, err, "declare queue q.notify.ticket")
	require.NoError(t, Topology{}.Declare(t.Context(), b.channel()), "the same again is fine")
}

func TestTopologyRefusesBadNumbers(t *testing.T) {
	t.Parallel()
	for what, top := range map[string]Topology{
		"ticket delay 0s":             {TicketDelays: []time.Duration{0}},
		"marketing delay 1.5µs":       {MarketingDelays: []time.Duration{1500}},
		"ticket delay 1200h0m0s":      {TicketDelays: []time.Duration{50 * 24 * time.Hour}},
		"delivery limit -1":           {DeliveryLimit: -1},
		"maximum length -2 must not ": {RetryMaxLength: -2},
	} {
		require.ErrorContains(t, top.Declare(t.Context(), nil), what)
	}
}
