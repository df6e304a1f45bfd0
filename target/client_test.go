package target

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/history"
)

// listeningAt is a program that seems to run and to listen at addr.
func listeningAt(addr string) *program {
	l := &life{exited: make(chan struct{}), tail: newTail()}
	l.tail.addr = addr
	return &program{name: "bookingd-1", life: l}
}

// What a client may say of its own operation, for every way an answer can come
// or not come: "fail" only where nothing can have happened.
func TestOutcomesAreTruthful(t *testing.T) {
	t.Parallel()
	const unavailable = `{"error":{"code":"unavailable","message":"m"}}`
	reply := func(status int, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			_, _ = io.WriteString(w, body) // the client may be gone
		}
	}
	hijack := func(raw string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			c, _, err := http.NewResponseController(w).Hijack()
			if err == nil {
				_, _ = io.WriteString(c, raw)
				_ = c.Close()
			}
		}
	}
	for _, c := range []struct {
		name    string
		handler http.HandlerFunc
		want    history.OpOutcome
	}{
		{"done", reply(200, `{}`), history.OpOK},
		{"done, body lost", hijack("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"), history.OpOK},
		{"refused", reply(409, `{"error":{"code":"conflict","message":"m"}}`), history.OpFail},
		{"not carried out", reply(503, unavailable), history.OpFail},
		{"the service does not know", reply(503, `{"error":{"code":"unknown","message":"m"}}`), history.OpUnknown},
		{"somebody else's 502", reply(502, "bad gateway"), history.OpUnknown},
		{"an error without a code", reply(500, `{}`), history.OpUnknown},
		{"error body cut off", hijack("HTTP/1.1 503 Service Unavailable\r\nContent-Length: 500\r\n\r\n" + unavailable), history.OpUnknown},
		{"no answer", hijack(""), history.OpUnknown},
		{"half an answer", hijack("HTTP/1.1 20"), history.OpUnknown},
		{"too slow", func(_ http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			<-r.Context().Done()
		}, history.OpUnknown},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			server := httptest.NewServer(c.handler)
			defer server.Close()
			cl := newClient([]*program{listeningAt(strings.TrimPrefix(server.URL, "http://"))})
			defer cl.http.CloseIdleConnections()
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			got := cl.post(ctx, "/bookings/b/confirm", map[string]any{})
			require.Equal(t, c.want, got.outcome, "%v", got.err)
			require.Equal(t, c.want == history.OpOK, got.err == nil)
		})
	}
}

func TestNobodyListensIsAFailure(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := l.Addr().String()
	require.NoError(t, l.Close())
	for _, programs := range [][]*program{{listeningAt(addr)}, {{name: "never started"}}} {
		got := newClient(programs).post(t.Context(), "/bookings", nil)
		require.Equal(t, history.OpFail, got.outcome)
		require.Error(t, got.err)
	}
}

// A confirmation whose booking could not even be made never happened, however
// the making ended.
func TestConfirmWithoutABookingIsAFailure(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusBadGateway)
	}))
	defer server.Close()
	p := &Pipeline{bookings: newClient([]*program{listeningAt(strings.TrimPrefix(server.URL, "http://"))})}
	outcome, err := p.ConfirmWhy(t.Context(), "b", "a@example.test")
	require.Equal(t, history.OpFail, outcome)
	require.ErrorContains(t, err, "502")
}

func TestParseCounters(t *testing.T) {
	t.Parallel()
	got, err := parseCounters(strings.NewReader(`# HELP notifyd_sends_total tries by outcome
# TYPE notifyd_sends_total counter
notifyd_sends_total{lane="ticket",outcome="accepted"} 20
notifyd_send_seconds_bucket{lane="ticket",le="0.5"} 20
notifyd_acks_total{result="ok"} 1.5e+03
go_memstats_alloc_bytes_total 7
process_cpu_seconds_total 3
outbox_unpublished 4
`))
	require.NoError(t, err)
	require.Equal(t, map[string]float64{
		`notifyd_sends_total{lane="ticket",outcome="accepted"}`: 20, `notifyd_acks_total{result="ok"}`: 1500,
	}, got)
	_, err = parseCounters(strings.NewReader("x_total many\n"))
	require.Error(t, err)
}

// Counters of a life that ended stay in the sum.
func TestCountersSurviveARestart(t *testing.T) {
	t.Parallel()
	n := "5"
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "x_total "+n+"\n")
	}))
	defer server.Close()
	c := newCounters()
	defer c.http.CloseIdleConnections()
	p := listeningAt(strings.TrimPrefix(server.URL, "http://"))
	require.NoError(t, c.scrape(t.Context(), p))
	close(p.life.exited)
	require.NoError(t, c.scrape(t.Context(), p), "the dead have nothing to say")
	p.life = listeningAt(strings.TrimPrefix(server.URL, "http://")).life
	n = "3"
	require.NoError(t, c.scrape(t.Context(), p))
	require.NoError(t, c.scrape(t.Context(), p))
	require.Equal(t, map[string]float64{"x_total": 8}, c.sum())
}
