// Package admin is notifyd's HTTP side: health, readiness, metrics, and what
// people ask about mails that did not go.
//
// It guarantees that /healthz says only that the process lives (a restart does
// not repair a broker that is away) and that /readyz is red, with the reasons,
// while a part of the path is missing. Recipients are masked.
//
// It must not change rows.
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

// DeadLister lists dead mails, the oldest first, at most limit.
type DeadLister interface {
	Dead(ctx context.Context, limit int) ([]DeadMail, error)
}

// DeadMail is one line of the list.
type DeadMail struct {
	ID        string    `json:"id"`
	DedupeKey string    `json:"dedupe_key"`
	EventID   string    `json:"event_id,omitempty"`
	Lane      string    `json:"lane"`
	Recipient string    `json:"recipient"` // masked
	Attempts  int       `json:"attempts"`
	Error     string    `json:"error"`
	Stamped   bool      `json:"dead_letter_confirmed"`
	Created   time.Time `json:"created_at"`
}

// Config of the server.
type Config struct {
	Addr     string
	Registry *prometheus.Registry
	Checks   []Check
	Dead     DeadLister
	Log      *slog.Logger
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
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.cfg.Registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /admin/dlq", s.dead)
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

func (s *Server) dead(w http.ResponseWriter, r *http.Request) {
	limit, err := limitOf(r)
	if err != nil {
		s.answer(w, http.StatusBadRequest, map[string]string{"error": err.Error()})
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), s.cfg.CheckTimeout)
	defer cancel()
	list, err := s.cfg.Dead.Dead(ctx, limit)
	if err != nil {
		s.cfg.Log.Warn("dead mails not listed", "error", err)
		s.answer(w, http.StatusServiceUnavailable, map[string]string{"error": "the database did not answer"})
		return
	}
	s.answer(w, http.StatusOK, list)
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
