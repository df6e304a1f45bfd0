package admin

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type deadMails struct{ err error }

func (d deadMails) Dead(_ context.Context, limit int) ([]DeadMail, error) {
	return make([]DeadMail, min(limit, 3)), d.err
}

func serve(t *testing.T, cfg Config) func(path string) (int, string) {
	t.Helper()
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
	return func(path string) (int, string) {
		resp, err := client.Get("http://" + s.Addr() + path)
		require.NoError(t, err)
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return resp.StatusCode, string(body)
	}
}

func TestReadinessNamesWhatIsMissing(t *testing.T) {
	var broken error
	get := serve(t, Config{Dead: deadMails{}, Checks: []Check{
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
	get := serve(t, Config{Dead: deadMails{}, Checks: []Check{
		{Name: "database", Ask: func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }},
	}})
	status, _ := get("/readyz")
	require.Equal(t, http.StatusServiceUnavailable, status)
}

func TestDeadMails(t *testing.T) {
	get := serve(t, Config{Dead: deadMails{}})
	status, body := get("/admin/dlq?limit=2")
	require.Equal(t, http.StatusOK, status)
	var list []DeadMail
	require.NoError(t, json.Unmarshal([]byte(body), &list))
	require.Len(t, list, 2)
	for _, bad := range []string{"0", "-1", "x", "1001"} {
		status, body = get("/admin/dlq?limit=" + bad)
		require.Equal(t, http.StatusBadRequest, status)
		require.Contains(t, body, bad)
	}
	get = serve(t, Config{Dead: deadMails{err: errors.New("password=secret")}})
	status, body = get("/admin/dlq")
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.NotContains(t, body, "secret")
}
