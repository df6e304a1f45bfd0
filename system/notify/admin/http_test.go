package admin

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"mailproof/system/delivery"
	"mailproof/system/notify/dlq"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// operator remembers what it was asked for.
type operator struct {
	err     error
	replay  dlq.ReplayRequest
	discard dlq.DiscardRequest
	filter  delivery.DeadFilter
}

func (o *operator) List(_ context.Context, f delivery.DeadFilter, limit int) ([]delivery.Row, error) {
	o.filter = f
	return make([]delivery.Row, min(limit, 3)), o.err
}

func (o *operator) Inspect(_ context.Context, key string) (dlq.Dossier, error) {
	if key == "" {
		return dlq.Dossier{}, delivery.ErrNoRow
	}
	return dlq.Dossier{Row: delivery.Row{DedupeKey: key, Recipient: "anna@example.test"}}, o.err
}

func (o *operator) Replay(_ context.Context, r dlq.ReplayRequest) (dlq.Report, error) {
	o.replay = r
	return dlq.Report{Matched: 2, Replayed: 1}, o.err
}

func (o *operator) Discard(_ context.Context, r dlq.DiscardRequest) (dlq.Report, error) {
	o.discard = r
	return dlq.Report{}, o.err
}

func (o *operator) SendAgain(_ context.Context, key, _, _ string) (delivery.Row, error) {
	return delivery.Row{DedupeKey: key + ":resend:1"}, o.err
}

func serve(t *testing.T, cfg Config) func(path string) (int, string) {
	t.Helper()
	ask := asker(t, cfg)
	return func(path string) (int, string) { return ask(http.MethodGet, path, "", "") }
}

// asker sends a body of a content type.
func asker(t *testing.T, cfg Config) func(method, path, kind, body string) (int, string) {
	t.Helper()
	cfg.ReplayAttempts = 4
	cfg.Addr, cfg.Registry, cfg.Log, cfg.CheckTimeout = "127.0.0.1:0", prometheus.NewRegistry(), slog.New(slog.DiscardHandler), time.Second
	s, err := Listen(t.Context(), cfg)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	client := &http.Client{Transport: &http.Transport{}}
	t.Cleanup(func() {
		client.CloseIdleConnections()
		cancel()
		require.NoError(t, <-done)
	})
	return func(method, path, kind, content string) (int, string) {
		req, err := http.NewRequestWithContext(t.Context(), method, "http://"+s.Addr()+path, strings.NewReader(content))
		require.NoError(t, err)
		req.Header.Set("Content-Type", kind)
		resp, err := client.Do(req)
		require.NoError(t, err)
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return resp.StatusCode, string(body)
	}
}

func TestReadinessNamesWhatIsMissing(t *testing.T) {
	var broken error
	get := serve(t, Config{Operator: &operator{}, Checks: []Check{
		{Name: "database", Ask: func(context.Context) error { return nil }},
		{Name: "lane ticket", Ask: func(context.Context) error { return broken }},
	}})
	status, _ := get("/readyz")
	require.Equal(t, http.StatusOK, status)
	broken = errors.New("consumers are gone")
	status, body := get("/readyz")
	require.Equal(t, http.StatusServiceUnavailable, status)
	var parts map[string]string
	require.NoError(t, json.Unmarshal([]byte(body), &parts))
	require.Equal(t, map[string]string{"database": "ok", "lane ticket": "consumers are gone"}, parts)
	status, _ = get("/healthz")
	require.Equal(t, http.StatusOK, status, "a restart would not bring the broker back")
}

func TestReadinessDoesNotWaitForEver(t *testing.T) {
	get := serve(t, Config{Operator: &operator{}, Checks: []Check{
		{Name: "database", Ask: func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }},
	}})
	status, _ := get("/readyz")
	require.Equal(t, http.StatusServiceUnavailable, status)
}

func TestDeadMails(t *testing.T) {
	get := serve(t, Config{Operator: &operator{}})
	status, body := get("/admin/dlq?limit=2")
	require.Equal(t, http.StatusOK, status)
	var list []dlq.Mail
	require.NoError(t, json.Unmarshal([]byte(body), &list))
	require.Len(t, list, 2)
	for _, bad := range []string{"0", "-1", "x", "1001"} {
		status, body = get("/admin/dlq?limit=" + bad)
		require.Equal(t, http.StatusBadRequest, status)
		require.Contains(t, body, bad)
	}
	get = serve(t, Config{Operator: &operator{err: errors.New("password=secret")}})
	status, body = get("/admin/dlq")
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.NotContains(t, body, "secret")
}

const asJSON = "application/json"

func TestReplayOverHTTP(t *testing.T) {
	o := &operator{}
	ask := asker(t, Config{Operator: o})
	status, body := ask("POST", "/admin/dlq/replay", asJSON, `{"type":"ticket","reason":"451","older_than":"10m","rate":5,"actor":"anna","why":"relay is back"}`)
	require.Equal(t, http.StatusOK, status, body)
	require.Equal(t, dlq.ReplayRequest{
		Filter:   delivery.DeadFilter{Type: "TICKET_CONFIRMATION", Reason: "451", OlderThan: 10 * time.Minute},
		Attempts: 4, Rate: 5, Actor: "anna", Reason: "relay is back",
	}, o.replay)
	require.Contains(t, body, `"replayed":1`)
}

// What would change more than was meant is refused before anything is done.
func TestChangesAreRefused(t *testing.T) {
	for name, c := range map[string]struct{ path, kind, body, text string }{
		"no filter":        {"/admin/dlq/replay", asJSON, `{"actor":"a"}`, "nothing chooses"},
		"no filter at all": {"/admin/dlq/discard", asJSON, `{}`, "nothing chooses"},
		"a typing error":   {"/admin/dlq/replay", asJSON, `{"bookng":"b1","all":true}`, "bookng"},
		"a form":           {"/admin/dlq/replay", "text/plain", `{"all":true}`, "Content-Type"},
		"an unknown type":  {"/admin/dlq/replay", asJSON, `{"type":"fax"}`, "fax"},
		"a bad duration":   {"/admin/dlq/discard", asJSON, `{"older_than":"soon"}`, "soon"},
		"no JSON":          {"/admin/mail/send-again", asJSON, `{`, "body"},
	} {
		t.Run(name, func(t *testing.T) {
			o := &operator{}
			status, body := asker(t, Config{Operator: o})("POST", c.path, c.kind, c.body)
			require.Equal(t, http.StatusBadRequest, status, body)
			require.Contains(t, body, c.text)
			require.Zero(t, o.replay)
			require.Zero(t, o.discard)
		})
	}
}

func TestOneMailOverHTTP(t *testing.T) {
	o := &operator{}
	ask := asker(t, Config{Operator: o})
	status, body := ask("GET", "/admin/mail?key=ticket:1", "", "")
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, body, `"dedupe_key":"ticket:1"`)
	require.NotContains(t, body, "anna@")
	status, _ = ask("GET", "/admin/mail", "", "")
	require.Equal(t, http.StatusNotFound, status)
	status, body = ask("POST", "/admin/mail/send-again", asJSON, `{"key":"ticket:1","actor":"a","why":"lost"}`)
	require.Equal(t, http.StatusCreated, status)
	require.Contains(t, body, "ticket:1:resend:1")
	o.err = &delivery.SendAgainRefused{DedupeKey: "ticket:1", Reason: "the booking is cancelled"}
	status, body = ask("POST", "/admin/mail/send-again", asJSON, `{"key":"ticket:1","actor":"a","why":"lost"}`)
	require.Equal(t, http.StatusConflict, status)
	require.Contains(t, body, "cancelled")
}

// A replay that was cut off says what it had done.
func TestReplayThatFailsTellsWhatWasDone(t *testing.T) {
	ask := asker(t, Config{Operator: &operator{err: errors.New("password=secret")}})
	status, body := ask("POST", "/admin/dlq/replay", asJSON, `{"all":true,"actor":"a"}`)
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.Contains(t, body, `"replayed":1`)
	require.NotContains(t, body, "secret")
}
