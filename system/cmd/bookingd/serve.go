package main

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

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"

	"mailproof/system/booking"
	"mailproof/system/observe"
	"mailproof/system/outbox"
	"mailproof/system/plans"
)

const (
	// readinessCheck is how often the start asks whether it is ready, and
	// readinessSay how often it says why not.
	readinessCheck = 100 * time.Millisecond
	readinessSay   = 5 * time.Second
	// readHeaderTimeout ends clients that connect and say nothing.
	readHeaderTimeout = 10 * time.Second
)

// serve runs the service until ctx ends, then drains: first requests, then the
// relay, so that what the last requests committed is published if it can be.
func serve(ctx context.Context, cfg config, log *slog.Logger) error {
	pool, err := openPool(cfg)
	if err != nil {
		return err
	}
	defer pool.Close()

	var relay *outbox.Relay
	if cfg.Relay == "on" {
		if relay, err = newRelay(cfg, log); err != nil {
			return err
		}
	}
	bell := outbox.NewDoorbell(pool, cfg.DoorbellEvery, log)
	service := booking.NewService(pool, booking.ServiceConfig{
		Topic: cfg.KafkaTopic, Timeout: cfg.RequestTimeout, OnEvent: bell.Press, Log: log,
	})
	ready := readiness(pool)
	reg := registry(pool, relay)
	server := &http.Server{Handler: handler(service, reg, ready, log), ReadHeaderTimeout: readHeaderTimeout}
	listener, err := net.Listen("tcp", cfg.HTTPAddr)
	if err != nil {
		return fmt.Errorf("%sHTTP_ADDR: %w", prefix, err)
	}
	log.Info("listening", "addr", listener.Addr().String())

	// The background outlives ctx by the drain of the requests.
	background, stopBackground := context.WithCancel(context.WithoutCancel(ctx))
	defer stopBackground()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { bell.Run(background); return nil })
	if relay != nil {
		g.Go(func() error { return relay.Run(background) })
	}
	g.Go(func() error {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("http: %w", err)
		}
		return nil
	})
	if cfg.listens() {
		mails := booking.NewMailEvents(booking.MailEventsConfig{
			Brokers: cfg.KafkaBrokers, Topic: cfg.MailEventsTopic, Group: cfg.MailEventsGroup, Instance: cfg.Instance,
			Mails: booking.Mails{Pool: pool}, Log: log, Timeout: cfg.StatementTimeout, SessionTimeout: cfg.MailEventsSession,
		}, reg)
		g.Go(func() error { return mails.Run(ctx) })
		g.Go(func() error { mails.WatchLag(ctx); return nil })
	}
	g.Go(func() error { sayReady(ctx, ready, log); return nil })
	g.Go(func() error {
		<-ctx.Done()
		defer stopBackground()
		log.Info("draining")
		drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), cfg.Drain)
		defer cancel()
		if err := server.Shutdown(drain); err != nil {
			return fmt.Errorf("requests were cut off after %v: %w", cfg.Drain, err)
		}
		return nil
	})
	err = g.Wait()
	log.Info("stopped")
	return err
}

func openPool(cfg config) (*pgxpool.Pool, error) {
	pc, err := pgxpool.ParseConfig(cfg.DatabaseURL)
	if err != nil {
		return nil, fmt.Errorf("%sDATABASE_URL: %w", prefix, err)
	}
	pc.MaxConns = cfg.Pool
	pc.MinIdleConns = min(2, cfg.Pool)
	pc.PingTimeout = cfg.StatementTimeout
	pc.ConnConfig.ConnectTimeout = cfg.StatementTimeout
	timeout := strconv.FormatInt(cfg.StatementTimeout.Milliseconds(), 10)
	pc.ConnConfig.RuntimeParams["application_name"] = "bookingd " + cfg.Instance
	pc.ConnConfig.RuntimeParams["statement_timeout"] = timeout
	// Nothing waits for the network inside a transaction; if something ever
	// does, this ends it (A1-08).
	pc.ConnConfig.RuntimeParams["idle_in_transaction_session_timeout"] = timeout
	plans.Steady(pc.ConnConfig.RuntimeParams)
	pool, err := pgxpool.NewWithConfig(context.Background(), pc) // the pool ends by Close
	if err != nil {
		return nil, fmt.Errorf("database: %w", err)
	}
	return pool, nil
}

func newRelay(cfg config, log *slog.Logger) (*outbox.Relay, error) {
	return outbox.NewRelay(outbox.Config{
		DatabaseURL: cfg.RelayDatabaseURL, Brokers: cfg.KafkaBrokers, Instance: "bookingd-" + cfg.Instance,
		BatchSize: cfg.RelayBatch, PollInterval: cfg.RelayPoll, StandbyInterval: cfg.RelayStandby,
		SessionTimeout: cfg.RelaySessionTimeout, PingInterval: min(2*time.Second, cfg.RelaySessionTimeout/4),
		DeliveryTimeout: cfg.RelayDeliveryTimeout, ProduceTimeout: cfg.RelayProduceTimeout,
		MaxRejections: cfg.RelayMaxRejections, Drain: cfg.Drain, Retention: cfg.OutboxRetention, Log: log,
	})
}

func registry(pool *pgxpool.Pool, relay *outbox.Relay) *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		outbox.NewCollector(pool, relay),
		observe.Pool("booking_", "main", pool.Stat),
	)
	return reg
}

func handler(s *booking.Service, reg *prometheus.Registry, ready func(context.Context) error, log *slog.Logger) http.Handler {
	mux := http.NewServeMux()
	booking.NewAPI(s, reg, log).Register(mux)
	// A database that is away must not hide what else there is to scrape.
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { state(w, log, nil) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) { state(w, log, ready(r.Context())) })
	return mux
}

func state(w http.ResponseWriter, log *slog.Logger, err error) {
	body := map[string]string{"status": "ok"}
	w.Header().Set("Content-Type", "application/json")
	if err != nil {
		body = map[string]string{"status": "not ready", "reason": err.Error()}
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	if err := json.NewEncoder(w).Encode(body); err != nil {
		log.Debug("answer not written", "err", err)
	}
}

// readiness is whether bookings can be made: the database answers and has its
// tables. The broker does not matter for that: the outbox waits.
func readiness(pool *pgxpool.Pool) func(context.Context) error {
	return func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		var bookings, events, mails *string
		err := pool.QueryRow(ctx, `SELECT to_regclass('bookings')::text, to_regclass('outbox')::text, to_regclass('booking_mails')::text`).
			Scan(&bookings, &events, &mails)
		switch {
		case err != nil:
			return fmt.Errorf("the database does not answer: %w", err)
		case bookings == nil || events == nil || mails == nil:
			return errors.New("the database has no tables yet: run bookingd migrate")
		}
		return nil
	}
}

// sayReady logs once that the service is ready, and meanwhile why it is not.
func sayReady(ctx context.Context, ready func(context.Context) error, log *slog.Logger) {
	tick := time.NewTicker(readinessCheck)
	defer tick.Stop()
	var said time.Time
	for {
		err := ready(ctx)
		if err == nil {
			log.Info("ready")
			return
		}
		if time.Since(said) > readinessSay {
			log.Warn("not ready", "err", err)
			said = time.Now()
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
