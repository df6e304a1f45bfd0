package amqp

import (
	"context"
	"fmt"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"
)

// The publisher beside the same loop over the bare client: publish a batch with
// deferred confirms, wait for all of them, next batch. What the layer adds
// (returns, window, unknown outcomes) should cost next to nothing. The two take
// turns batch by batch, so that their ratio survives a busy machine.
//
//	go test ./system/amqp -run '^$' -bench Publish
func BenchmarkPublish(b *testing.B) {
	u := rabbit(b).URLs("")[0]
	for _, batch := range []int{1, 100, 500} {
		b.Run(fmt.Sprint("batch=", batch), func(b *testing.B) {
			bare, session := bareBatch(b, u, batch), sessionBatch(b, u, batch)
			var spent [2]time.Duration
			for b.Loop() {
				for i, publish := range []func(){bare, session} {
					began := time.Now()
					publish()
					spent[i] += time.Since(began)
				}
			}
			n := float64(b.N * batch)
			b.ReportMetric(n/spent[0].Seconds(), "bare-msg/s")
			b.ReportMetric(n/spent[1].Seconds(), "msg/s")
			b.ReportMetric(spent[0].Seconds()/spent[1].Seconds(), "of-bare")
		})
	}
}

func benchQueue(b *testing.B, u string) (q string, ch *amqp091.Channel) {
	b.Helper()
	conn, err := amqp091.Dial(u)
	require.NoError(b, err)
	ch, err = conn.Channel()
	require.NoError(b, err)
	q = name("bench.q")
	_, err = ch.QueueDeclare(q, true, false, false, false, amqp091.Table{"x-queue-type": "quorum"})
	require.NoError(b, err)
	b.Cleanup(func() {
		_, err := ch.QueueDelete(q, false, false, false)
		require.NoError(b, err)
		require.NoError(b, conn.Close())
	})
	return q, ch
}

var benchBody = make([]byte, 512)

func bareBatch(b *testing.B, u string, batch int) func() {
	q, ch := benchQueue(b, u)
	require.NoError(b, ch.Confirm(false))
	return func() {
		confirms := make([]*amqp091.DeferredConfirmation, batch)
		for i := range confirms {
			var err error
			confirms[i], err = ch.PublishWithDeferredConfirm("", q, false, false, amqp091.Publishing{
				MessageId: fmt.Sprint(i), Body: benchBody, DeliveryMode: amqp091.Persistent,
			})
			require.NoError(b, err)
		}
		for _, c := range confirms {
			require.True(b, c.Wait())
		}
	}
}

func sessionBatch(b *testing.B, u string, batch int) func() {
	q, _ := benchQueue(b, u)
	ctx, cancel := context.WithCancel(context.Background())
	p := NewPublisher(Config{URLs: []string{u}, Name: b.Name()})
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	b.Cleanup(func() { cancel(); require.NoError(b, <-done) })
	require.NoError(b, p.Publish(ctx, []Message{{RoutingKey: q}})[0])
	return func() {
		msgs := make([]Message, batch)
		for i := range msgs {
			msgs[i] = Message{RoutingKey: q, ID: fmt.Sprint(i), Body: benchBody}
		}
		for _, err := range p.Publish(ctx, msgs) {
			require.NoError(b, err)
		}
	}
}
