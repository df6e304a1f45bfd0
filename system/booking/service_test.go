package booking

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"mailproof/system/contract"
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

type fixture struct {
	url     string
	pool    *pgxpool.Pool
	service *Service
	events  atomic.Int64 // doorbell presses
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{url: pg.NewDatabase(t)}
	require.NoError(t, Migrate(t.Context(), f.url))
	pool, err := pgxpool.New(t.Context(), f.url)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	f.pool = pool
	f.service = NewService(pool, ServiceConfig{OnEvent: func() { f.events.Add(1) }})
	return f
}

// outbox reads the bodies of all events in order.
func (f *fixture) outbox(t *testing.T) []contract.Event {
	t.Helper()
	rows, err := f.pool.Query(t.Context(), `SELECT payload::text FROM outbox ORDER BY id`)
	require.NoError(t, err)
	bodies, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	var out []contract.Event
	for _, b := range bodies {
		e, err := contract.DecodeEvent([]byte(b))
		require.NoError(t, err)
		out = append(out, e)
	}
	return out
}

func request(id string) Request {
	return Request{ID: id, Recipient: "ann@example.test", Name: "Ann", Locale: "en", Event: "Finale", Seats: []string{"A1", "A2"}, Amount: "90.00", Currency: "EUR"}
}

// The life of one booking and the events that it leaves behind, each of which
// the consumer's own decoder accepts.
func TestLifeOfABooking(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	b, created, err := f.service.Create(ctx, request("b1"))
	require.NoError(t, err)
	require.True(t, created)
	require.Equal(t, New, b.Status)
	require.Empty(t, f.outbox(t), "a booking that is not confirmed asks for no mail")

	for _, s := range []struct {
		op         Op
		status     Status
		generation int
	}{{Confirm, Confirmed, 1}, {Cancel, Cancelled, 1}, {Reopen, Confirmed, 2}, {Cancel, Cancelled, 2}} {
		for repeat := range 3 {
			b, changed, err := f.service.Do(ctx, s.op, "b1", 0)
			require.NoError(t, err)
			require.Equal(t, repeat == 0, changed, "%s, repeat %d", s.op, repeat)
			require.Equal(t, s.status, b.Status)
			require.Equal(t, s.generation, b.Generation)
		}
	}
	events := f.outbox(t)
	require.Len(t, events, 4)
	require.EqualValues(t, 4, f.events.Load(), "the doorbell is pressed once per event")
	ids := map[string]bool{}
	for i, want := range []struct {
		kind contract.EventType
		key  string
	}{
		{contract.BookingConfirmed, "ticket:b1"},
		{contract.BookingCancelled, "ticket:b1"},
		{contract.BookingReopened, "ticket:b1:v2"},
		{contract.BookingCancelled, "ticket:b1:v2"},
	} {
		e := events[i]
		require.Equal(t, want.kind, e.EventType)
		require.Equal(t, want.key, e.DedupeKey)
		require.WithinDuration(t, time.Now(), e.OccurredAt, time.Minute)
		require.Equal(t, contract.EventData{
			Recipient: "ann@example.test", Name: "Ann", Locale: "en", Event: "Finale", Seats: []string{"A1", "A2"}, Amount: "90.00", Currency: "EUR",
		}, e.Data)
		ids[e.EventID] = true
	}
	require.Len(t, ids, 4)
}

func TestCreateIsRepeatable(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	first, created, err := f.service.Create(t.Context(), request("b1"))
	require.NoError(t, err)
	require.True(t, created)
	again, created, err := f.service.Create(t.Context(), request("b1"))
	require.NoError(t, err)
	require.False(t, created)
	require.Equal(t, first, again)
	other := request("b1")
	other.Recipient = "bob@example.test"
	_, _, err = f.service.Create(t.Context(), other)
	var conflict *ConflictError
	require.ErrorAs(t, err, &conflict)
	require.Zero(t, conflict.Booking, "another client's booking is not shown")

	anonymous, created, err := f.service.Create(t.Context(), request(""))
	require.NoError(t, err)
	require.True(t, created)
	require.NotEmpty(t, anonymous.ID)
}

// Many clients confirm the same booking at once: one event.
func TestConcurrentConfirms(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	_, _, err := f.service.Create(t.Context(), request("b1"))
	require.NoError(t, err)
	var wg sync.WaitGroup
	var changes atomic.Int64
	for range 20 {
		wg.Go(func() {
			_, changed, err := f.service.Do(t.Context(), Confirm, "b1", 0)
			if err != nil {
				t.Error(err)
			}
			if changed {
				changes.Add(1)
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 1, changes.Load())
	require.Len(t, f.outbox(t), 1)
}

// LAB-ATOM: when the event cannot be written the booking is not confirmed.
func TestNoEventNoConfirmation(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	_, _, err := f.service.Create(t.Context(), request("b1"))
	require.NoError(t, err)
	_, err = f.pool.Exec(t.Context(), `ALTER TABLE outbox ADD CONSTRAINT broken CHECK (event_type <> 'BookingConfirmed')`)
	require.NoError(t, err)
	_, _, err = f.service.Do(t.Context(), Confirm, "b1", 0)
	require.Error(t, err)
	require.NotErrorIs(t, err, ErrOutcomeUnknown)
	b, err := f.service.Get(t.Context(), "b1")
	require.NoError(t, err)
	require.Equal(t, New, b.Status)
	require.Empty(t, f.outbox(t))
	require.Zero(t, f.events.Load())
}

// cutter breaks a connection at its COMMIT: after the server got it, or before.
type cutter struct {
	net.Conn
	armed   *atomic.Bool
	forward bool
	cut     atomic.Bool
}

func (c *cutter) Write(p []byte) (int, error) {
	if !bytes.Contains(bytes.ToLower(p), []byte("commit")) || !c.armed.CompareAndSwap(true, false) {
		return c.Conn.Write(p)
	}
	c.cut.Store(true)
	if c.forward {
		return c.Conn.Write(p)
	}
	return len(p), c.Conn.Close()
}

func (c *cutter) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.cut.Load() { // the answer came, and is lost
		return 0, errors.Join(io.ErrUnexpectedEOF, c.Conn.Close(), err)
	}
	return n, err
}

// When the answer to COMMIT is lost nobody knows, and the API says so; the
// repeat settles it, and there is one event either way.
func TestLostAnswerToCommit(t *testing.T) {
	t.Parallel()
	for name, forward := range map[string]bool{"committed": true, "not committed": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			_, _, err := f.service.Create(t.Context(), request("b1"))
			require.NoError(t, err)
			var armed atomic.Bool
			pc, err := pgxpool.ParseConfig(f.url)
			require.NoError(t, err)
			pc.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
				c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
				return &cutter{Conn: c, armed: &armed, forward: forward}, err
			}
			pool, err := pgxpool.NewWithConfig(t.Context(), pc)
			require.NoError(t, err)
			t.Cleanup(pool.Close)
			api := newAPI(t, NewService(pool, ServiceConfig{}))

			armed.Store(true)
			status, body := api.post(t, "/bookings/b1/confirm", "")
			require.Equal(t, http.StatusServiceUnavailable, status, body)
			require.Equal(t, "unknown", code(t, body))
			require.Contains(t, body, "repeat")
			require.False(t, armed.Load(), "the fault struck")

			status, body = api.post(t, "/bookings/b1/confirm", "")
			require.Equal(t, http.StatusOK, status, body)
			require.Contains(t, body, fmt.Sprintf(`"changed":%v`, !forward))
			require.Len(t, f.outbox(t), 1)
		})
	}
}

type api struct{ url string }

func newAPI(t *testing.T, s *Service) api {
	t.Helper()
	mux := http.NewServeMux()
	NewAPI(s, prometheus.NewRegistry(), slog.New(slog.DiscardHandler)).Register(mux)
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return api{server.URL}
}

func (a api) post(t *testing.T, path, body string) (int, string) {
	t.Helper()
	resp, err := http.Post(a.url+path, "application/json", strings.NewReader(body))
	require.NoError(t, err)
	return read(t, resp)
}

func read(t *testing.T, resp *http.Response) (int, string) {
	t.Helper()
	defer func() { require.NoError(t, resp.Body.Close()) }()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, "application/json", resp.Header.Get("Content-Type"))
	return resp.StatusCode, string(b)
}

func code(t *testing.T, body string) string {
	t.Helper()
	var e struct {
		Error struct{ Code, Message string }
	}
	require.NoError(t, json.Unmarshal([]byte(body), &e), body)
	require.NotEmpty(t, e.Error.Message)
	return e.Error.Code
}

func TestHTTP(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	a := newAPI(t, f.service)
	for _, c := range []struct {
		name, path, body string
		status           int
		code             string
	}{
		{"create", "/bookings", `{"id":"b1","recipient":"ann@example.test","newer_field":{"x":1}}`, 201, ""},
		{"the same again", "/bookings", `{"id":"b1","recipient":"ann@example.test"}`, 200, ""},
		{"the same id, other contents", "/bookings", `{"id":"b1","recipient":"bob@example.test"}`, 409, "conflict"},
		{"no recipient", "/bookings", `{"id":"b2"}`, 400, "invalid"},
		{"malformed address", "/bookings", `{"id":"b3","recipient":"not an address"}`, 201, ""},
		{"no body", "/bookings", ``, 400, "invalid"},
		{"malformed JSON", "/bookings", `{"id":`, 400, "invalid"},
		{"a type that does not fit", "/bookings", `{"id":"b4","recipient":7}`, 400, "invalid"},
		{"two values", "/bookings", `{"id":"b5","recipient":"a@b"}{}`, 400, "invalid"},
		{"too large", "/bookings", `{"name":"` + strings.Repeat("x", 70_000) + `"}`, 413, "too_large"},
		{"NUL", "/bookings", `{"id":"b6","recipient":"a@b","name":"\u0000"}`, 400, "invalid"},
		{"confirm nothing", "/bookings/nothing/confirm", ``, 404, "not_found"},
		{"confirm an impossible id", "/bookings/a%00b/confirm", ``, 404, "not_found"},
		{"reopen too early", "/bookings/b1/reopen", ``, 409, "conflict"},
		{"confirm", "/bookings/b1/confirm", ``, 200, ""},
		{"confirm with an empty object", "/bookings/b1/confirm", `{}`, 200, ""},
		{"confirm with rubbish", "/bookings/b1/confirm", `[`, 400, "invalid"},
		{"a negative generation", "/bookings/b1/cancel", `{"generation":-1}`, 400, "invalid"},
		{"a generation to come", "/bookings/b1/cancel", `{"generation":2}`, 409, "conflict"},
		{"cancel", "/bookings/b1/cancel", `{"generation":1}`, 200, ""},
		{"confirm a cancelled one", "/bookings/b1/confirm", ``, 409, "conflict"},
		{"reopen", "/bookings/b1/reopen", `{"generation":1}`, 200, ""},
		{"the cancel again, late", "/bookings/b1/cancel", `{"generation":1}`, 200, ""},
	} {
		status, body := a.post(t, c.path, c.body)
		require.Equal(t, c.status, status, "%s: %s", c.name, body)
		if c.code != "" {
			require.Equal(t, c.code, code(t, body), c.name)
		}
	}
	resp, err := http.Get(a.url + "/bookings/b1")
	require.NoError(t, err)
	status, body := read(t, resp)
	require.Equal(t, 200, status)
	var b Booking
	require.NoError(t, json.Unmarshal([]byte(body), &b))
	require.Equal(t, Confirmed, b.Status, "the late cancel of generation 1 did not touch generation 2")
	require.Equal(t, 2, b.Generation)
}

// A database that is away is "unavailable": it did not happen, and the answer
// does not show what the driver said.
func TestUnavailable(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), "postgres://nobody:hush@127.0.0.1:1/none?connect_timeout=1")
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	a := newAPI(t, NewService(pool, ServiceConfig{Timeout: 2 * time.Second}))
	for _, path := range []string{"/bookings", "/bookings/b1/confirm"} {
		status, body := a.post(t, path, `{"recipient":"a@b"}`)
		require.Equal(t, 503, status)
		require.Equal(t, "unavailable", code(t, body))
		require.NotContains(t, body, "127.0.0.1")
	}
}
