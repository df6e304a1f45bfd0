// Package admin is notifyd's HTTP side: health, readiness, metrics, campaigns,
// and what people ask and decide about mails that did not go.
//
// It guarantees that /healthz says only that the process lives (a restart does
// not repair a broker that is away) and that /readyz is red, with the reasons,
// while a part of the path is missing. Recipients are masked.
//
// It changes nothing by itself: what people decide is the [Operator]'s and the
// [Campaigns]', and it
// has no users and no passwords: it belongs on a loopback or internal address.
package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Check is one condition of readiness; nil means good.
type Check struct {
	Name string
	Ask  func(ctx context.Context) error
}

// Config of the server.
type Config struct {
	Addr      string
	Registry  *prometheus.Registry
	Checks    []Check
	Operator  Operator
	Campaigns Campaigns
	// Webhooks hears what the mail provider tells; nil: nothing is heard.
	Webhooks http.Handler
	// ReplayAttempts is how many more tries a replay gives that names no number.
	ReplayAttempts int
	Log            *slog.Logger
	// CheckTimeout bounds all checks of one question.
	CheckTimeout time.Duration
}

// Server answers.
type Server struct {
	cfg      Config
	listener net.Listener
}

// Listen binds the address.
func Listen(ctx context.Context, cfg Config) (*Server, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", cfg.Addr)
	if err != nil {
		return nil, fmt.Errorf("http: %w", err)
	}
	return &Server{cfg: cfg, listener: l}, nil
}

// Addr is the bound address.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// Run serves until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	srv := &http.Server{Handler: s.handler(), ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute}
	stop := context.AfterFunc(ctx, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		if err := srv.Shutdown(ctx); err != nil {
			_ = srv.Close() // somebody holds a request: it ends now
		}
	})
	defer stop()
	if err := srv.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("http: %w", err)
	}
	return nil
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", s.ready)
	// A database that is away must not hide what else there is to scrape.
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.cfg.Registry, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}))
	s.dlqRoutes(mux)
	s.campaignRoutes(mux)
	if s.cfg.Webhooks != nil {
		mux.Handle("POST /webhooks/resend", s.cfg.Webhooks)
	}
	return mux
}

func (s *Server) ready(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), s.cfg.CheckTimeout)
	defer cancel()
	status, parts := http.StatusOK, map[string]string{}
	for _, c := range s.cfg.Checks {
		parts[c.Name] = "ok"
		if err := c.Ask(ctx); err != nil {
			status, parts[c.Name] = http.StatusServiceUnavailable, err.Error()
		}
	}
	s.answer(w, status, parts)
}

func limitOf(r *http.Request) (int, error) {
	const byDefault, most = 100, 1000
	text := r.URL.Query().Get("limit")
	if text == "" {
		return byDefault, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > most {
		return 0, fmt.Errorf("limit %q is not a number from 1 to %d", text, most)
	}
	return n, nil
}

func (s *Server) answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(body); err != nil {
		s.cfg.Log.Debug("answer not written", "error", err)
	}
}
