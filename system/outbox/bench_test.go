package outbox

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"mailproof/system/outbox/outboxtest"
)

// benchBroker is a broker to measure against; without it kfake is used.
const benchBroker = "OUTBOX_BENCH_BROKER"

func benchTopic(b *testing.B) (broker, topic string) {
	b.Helper()
	broker = os.Getenv(benchBroker)
	if broker == "" {
		c, err := kfake.NewCluster(kfake.NumBrokers(1))
		require.NoError(b, err)
		b.Cleanup(c.Close)
		broker = c.ListenAddrs()[0]
	}
	cl, err := kgo.NewClient(kgo.SeedBrokers(broker))
	require.NoError(b, err)
	defer cl.Close()
	topic = "bench-" + uuid.NewString()
	_, err = kadm.NewClient(cl).CreateTopic(b.Context(), 6, 1, nil, topic)
	require.NoError(b, err)
	return broker, topic
}

const benchBody = `{"event_id": "01a22cc8-c0b8-7649-b8ab-bad26dbdbfca", "event_type": "BookingConfirmed", "version": 1, "occurred_at": "2026-01-02T03:04:05.678Z", "booking_id": "b-123456", "generation": 1, "dedupe_key": "ticket:b-123456", "data": {"recipient": "guest123456@example.test", "name": "Guest", "event": "Final", "seats": ["A-1"], "amount": "90.00", "currency": "EUR", "locale": "en"}}`

// BenchmarkRawProduce is the ceiling: the same records by the same producer
// without a database, all handed over before the first is waited for.
func BenchmarkRawProduce(b *testing.B) {
	broker, topic := benchTopic(b)
	cfg := Config{DatabaseURL: "-", Brokers: []string{broker}}.withDefaults()
	cl, err := kgo.NewClient(producerOpts(&cfg)...)
	require.NoError(b, err)
	defer cl.Close()
	recs := make([]*kgo.Record, b.N)
	for i := range recs {
		r := row{eventID: uuid.New(), topic: topic, key: fmt.Sprint("b-", i), eventType: "BookingConfirmed", payload: []byte(benchBody)}
		recs[i] = r.record()
	}
	b.ResetTimer()
	require.NoError(b, cl.ProduceSync(context.Background(), recs...).FirstErr())
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
}

// BenchmarkRelay drains an outbox of b.N events.
func BenchmarkRelay(b *testing.B) {
	broker, topic := benchTopic(b)
	server, err := outboxtest.Start()
	require.NoError(b, err)
	defer func() { require.NoError(b, server.Stop()) }()
	url := server.NewDatabase(b)
	require.NoError(b, Migrate(b.Context(), url))
	pool, err := pgxpool.New(b.Context(), url)
	require.NoError(b, err)
	defer pool.Close()
	_, err = pool.Exec(b.Context(), `
INSERT INTO outbox (event_id, topic, key, event_type, payload)
SELECT gen_random_uuid(), $1, 'b-' || i, 'BookingConfirmed', $2 FROM generate_series(1, $3) i`,
		topic, strings.TrimSpace(benchBody), b.N)
	require.NoError(b, err)
	_, err = pool.Exec(b.Context(), `ANALYZE outbox`)
	require.NoError(b, err)
	r, err := NewRelay(Config{DatabaseURL: url, Brokers: []string{broker}})
	require.NoError(b, err)
	ctx, cancel := context.WithCancel(b.Context())
	done := make(chan error, 1)
	b.ResetTimer()
	go func() { done <- r.Run(ctx) }()
	for {
		backlog, err := ReadBacklog(b.Context(), pool)
		require.NoError(b, err)
		if backlog.Unpublished == 0 {
			break
		}
		time.Sleep(time.Millisecond) // the end is not announced
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
	b.StopTimer()
	cancel()
	require.NoError(b, <-done)
}
