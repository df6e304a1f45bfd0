package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/goleak"

	"mailproof/system/booking"
	"mailproof/system/contract"
	"mailproof/system/envconfig"
	"mailproof/system/outbox/outboxtest"
)

var pg *outboxtest.Postgres

func TestMain(m *testing.M) { os.Exit(withPostgres(m)) }

func withPostgres(m *testing.M) int {
	var err error
	if pg, err = outboxtest.Start(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := m.Run()
	if err := pg.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

func TestConfigNamesEverythingAtOnce(t *testing.T) {
	t.Parallel()
	_, err := load(map[string]string{
		"BOOKINGD_RELAY_POLL": "soon", "BOOKINGD_KAFKA_BROKER": "127.0.0.1:9092", "BOOKINGD_HTTP_ADDR": "nowhere",
		"BOOKINGD_POOL": "0", "OTHER": "x",
	})
	require.Error(t, err)
	for _, want := range []string{
		`"bookingd config" explains`, "BOOKINGD_DATABASE_URL: must be set", "BOOKINGD_RELAY_POLL: ", "BOOKINGD_KAFKA_BROKER: no such variable",
		"BOOKINGD_KAFKA_BROKERS: must be set where the relay is on", "BOOKINGD_HTTP_ADDR", "BOOKINGD_POOL",
	} {
		require.ErrorContains(t, err, want)
	}
	require.NotContains(t, err.Error(), "OTHER")
	require.Equal(t, 1, strings.Count(err.Error(), "BOOKINGD_RELAY_POLL"), "told once")
}

func TestConfigDefaults(t *testing.T) {
	t.Parallel()
	c, err := load(map[string]string{"BOOKINGD_DATABASE_URL": "postgres://u:secret@db/b", "BOOKINGD_RELAY": "off", "BOOKINGD_MAIL_EVENTS_TOPIC": "off"})
	require.NoError(t, err)
	require.Equal(t, contract.TopicBookingEvents, c.KafkaTopic)
	require.Equal(t, c.DatabaseURL, c.RelayDatabaseURL)
	var out bytes.Buffer
	require.NoError(t, envconfig.Describe(&out, prefix, c))
	require.Contains(t, out.String(), "BOOKINGD_RELAY_SESSION_TIMEOUT")
	require.NotContains(t, out.String(), "secret")

	_, err = load(map[string]string{"BOOKINGD_DATABASE_URL": "mysql://u:secret@db/b", "BOOKINGD_RELAY": "off", "BOOKINGD_MAIL_EVENTS_TOPIC": "off"})
	require.ErrorContains(t, err, "BOOKINGD_DATABASE_URL")
	require.NotContains(t, err.Error(), "secret")
}

// The whole process: not ready without tables, ready after a migration, a
// confirmation on the topic, metrics, and an end that leaves nothing running.
func TestServe(t *testing.T) {
	kafka, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, contract.TopicBookingEvents, contract.TopicMailEvents))
	require.NoError(t, err)
	defer kafka.Close()
	before := goleak.IgnoreCurrent()
	url := pg.NewDatabase(t)
	cfg, err := load(map[string]string{
		"BOOKINGD_DATABASE_URL": url, "BOOKINGD_KAFKA_BROKERS": kafka.ListenAddrs()[0], "BOOKINGD_INSTANCE": "t",
	})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	pr, pw := io.Pipe()
	done := make(chan error, 1)
	go func() { done <- serve(ctx, cfg, logger(pw, cfg)); _ = pw.Close() }() // a pipe's close cannot fail
	lines := bufio.NewScanner(pr)
	await := func(msg string) map[string]any {
		for lines.Scan() {
			var line map[string]any
			require.NoError(t, json.Unmarshal(lines.Bytes(), &line))
			require.Equal(t, "t", line["instance"])
			if line["msg"] == msg {
				return line
			}
		}
		t.Fatalf("the log ended before %q", msg)
		return nil
	}
	base := "http://" + await("listening")["addr"].(string)
	require.Contains(t, await("not ready")["err"], "bookingd migrate")
	status, body := get(t, base+"/readyz")
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.Contains(t, body, "migrate")
	status, _ = get(t, base+"/healthz")
	require.Equal(t, http.StatusOK, status)

	require.NoError(t, booking.Migrate(ctx, url))
	await("ready")
	go func() { _, _ = io.Copy(io.Discard, pr) }() // drained until the end

	for _, path := range []string{"/bookings", "/bookings/b1/confirm"} {
		resp, err := http.Post(base+path, "application/json", strings.NewReader(`{"id":"b1","recipient":"a@example.test"}`))
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Less(t, resp.StatusCode, 300)
	}
	e := consumeOne(t, kafka.ListenAddrs()[0])
	require.Equal(t, contract.BookingConfirmed, e.EventType)
	require.Equal(t, "ticket:b1", e.DedupeKey)

	require.Eventually(t, func() bool {
		_, metrics := get(t, base+"/metrics")
		return strings.Contains(metrics, "outbox_unpublished 0") &&
			strings.Contains(metrics, "outbox_relay_leading 1") &&
			strings.Contains(metrics, `outbox_relay_records_total{result="published"} 1`) &&
			strings.Contains(metrics, `booking_requests_total{op="confirm",result="ok"} 1`)
	}, 10*time.Second, 20*time.Millisecond)

	stop()
	require.NoError(t, <-done)
	http.DefaultClient.CloseIdleConnections()
	goleak.VerifyNone(t, before, goleak.IgnoreTopFunction("github.com/twmb/franz-go/pkg/kfake.(*clientConn).read"))
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	resp, err := http.Get(url)
	require.NoError(t, err)
	defer func() { require.NoError(t, resp.Body.Close()) }()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, string(b)
}

func consumeOne(t *testing.T, broker string) contract.Event {
	t.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(broker), kgo.ConsumeTopics(contract.TopicBookingEvents))
	require.NoError(t, err)
	defer cl.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	recs := cl.PollFetches(ctx).Records()
	require.Len(t, recs, 1)
	e, err := contract.DecodeEvent(recs[0].Value)
	require.NoError(t, err)
	return e
}

// A wrong environment ends the process before it does anything.
func TestServeRefusesATakenAddress(t *testing.T) {
	t.Parallel()
	cfg, err := load(map[string]string{
		"BOOKINGD_DATABASE_URL": pg.URL("postgres"), "BOOKINGD_RELAY": "off", "BOOKINGD_MAIL_EVENTS_TOPIC": "off", "BOOKINGD_HTTP_ADDR": "192.0.2.1:1",
	})
	require.NoError(t, err)
	err = serve(t.Context(), cfg, slog.New(slog.DiscardHandler))
	require.ErrorContains(t, err, "BOOKINGD_HTTP_ADDR")
}
