package notify

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"mailproof/system/contract"
	"mailproof/system/delivery"
	"mailproof/system/mail"
	"mailproof/system/notify/alerts"
	"mailproof/system/notify/config"
	"mailproof/system/notify/dlq"
	"mailproof/system/notify/patience"
	"mailproof/system/notify/reconciler"
	"mailproof/system/notify/trace"
	"mailproof/system/notify/webhook"
)

// keyLifetime bounds repetitions where the receiver deduplicates.
func (s *service) keyLifetime(t contract.MailType) time.Duration {
	if !s.cfg.Delivery().SameKey(t) {
		return 0
	}
	return s.cfg.KeyLifetime
}

// newReconciler makes the reconciler; done ends what it keeps open.
func (s *service) newReconciler() (r *reconciler.Reconciler, done func(), err error) {
	cfg := reconciler.Config{
		Store: s.store, Ring: s.ring, Count: s.metrics, Log: s.log,
		Bounds: reconciler.Bounds{
			Lease: s.cfg.Lease, Session: s.cfg.ServerSession, Processing: s.cfg.ProviderProcessing,
		},
		SameKey: s.cfg.Delivery().SameKey, KeyLifetime: s.cfg.KeyLifetime, Grace: s.cfg.ReconcilerInterval,
		Batch: 100, Timeout: s.cfg.StatementTimeout,
	}
	if s.cfg.ProviderLogURL == "" {
		if s.cfg.Transport != "resend" || s.cfg.ResendList != "on" {
			return reconciler.New(cfg), func() {}, nil
		}
		list := reconciler.NewResendList(reconciler.ResendListConfig{
			URL: s.cfg.ResendURL, APIKey: s.cfg.ResendAPIKey, UserAgent: "notifyd-" + s.cfg.Instance + ".reconciler",
			Tag: mail.ResendTagKey, ValueOf: mail.ResendTag,
		})
		cfg.Provider = list
		return reconciler.New(cfg), list.Close, nil
	}
	// An HTTP API logs a request that came in half, too: there a try may leave
	// more than one line.
	log, err := reconciler.NewHTTPLog(s.cfg.ProviderLogURL, s.cfg.Transport == "smtp")
	if err != nil {
		return nil, nil, errors.New(config.Prefix + "PROVIDER_LOG_URL: " + err.Error())
	}
	cfg.Provider = log
	return reconciler.New(cfg), log.Close, nil
}

// reconcile looks into UNKNOWN mails until ctx ends.
func (s *service) reconcile(ctx context.Context) error {
	r, done, err := s.newReconciler()
	if err != nil {
		return err
	}
	defer done()
	for patience.Sleep(ctx, s.cfg.ReconcilerInterval) == nil {
		if _, err := s.reconcileOnce(ctx, r, nil); err != nil && ctx.Err() == nil {
			s.log.Warn("unknown mails not all looked at, the next round goes on", "error", err)
		}
	}
	return nil
}

// reconcileOnce makes one round, and ends the alerts whose mail is not UNKNOWN
// any more, whoever moved it.
func (s *service) reconcileOnce(ctx context.Context, r *reconciler.Reconciler, choose func(delivery.Row) bool) (reconciler.Tally, error) {
	tally, failed := r.Round(ctx, choose)
	ctx, cancel := context.WithTimeout(ctx, s.cfg.StatementTimeout)
	defer cancel()
	n, err := s.store.ResolveUnknown(ctx, string(alerts.MailUnknown))
	if n > 0 {
		s.log.Info("alerts resolved", "kind", string(alerts.MailUnknown), "count", n)
	}
	return tally, errors.Join(failed, err)
}

// Unknown is what people can do about mails that are UNKNOWN.
type Unknown struct {
	s *service
	r *reconciler.Reconciler
}

// List returns UNKNOWN mails, the longest unknown first.
func (u Unknown) List(ctx context.Context, limit int) ([]delivery.Row, error) {
	return u.s.store.UnknownRows(ctx, delivery.After{}, limit)
}

// Reconcile looks into the mail of a key, or into all with "".
func (u Unknown) Reconcile(ctx context.Context, key string) (reconciler.Tally, error) {
	return u.s.reconcileOnce(ctx, u.r, func(r delivery.Row) bool { return key == "" || r.DedupeKey == key })
}

// OperateUnknown runs do for a command: without bridge, workers and HTTP, but
// with a publisher. Mail events are written (the service's relay publishes them).
func OperateUnknown(ctx context.Context, cfg config.Config, log *slog.Logger, do func(context.Context, Unknown) error) error {
	s, err := build(ctx, cfg, log)
	if err != nil {
		return err
	}
	defer s.pool.Close()
	r, done, err := s.newReconciler()
	if err != nil {
		return err
	}
	defer done()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	published := make(chan error, 1)
	go func() { published <- s.publisher.Run(ctx) }()
	err = do(ctx, Unknown{s, r})
	stop()
	return errors.Join(err, <-published)
}

// Offline is what a command can ask without any part of the service running.
type Offline struct{ s *service }

// Trace tells the story of a dedupe key, or of a booking.
func (o Offline) Trace(ctx context.Context, asked string) (trace.Story, error) {
	t := trace.Tracer{Store: o.s.store, Audit: dlq.Audit{DB: o.s.pool}, Reports: webhook.Reports{DB: o.s.pool}}
	if o.s.cfg.ProviderLogURL != "" {
		log, err := reconciler.NewHTTPLog(o.s.cfg.ProviderLogURL, o.s.cfg.Transport == "smtp")
		if err != nil {
			return trace.Story{}, err
		}
		defer log.Close()
		t.Log = log
	}
	ctx, cancel := context.WithTimeout(ctx, 2*o.s.cfg.StatementTimeout)
	defer cancel()
	return t.Of(ctx, asked)
}

// AskOffline runs do for a command that only reads the database: it connects to
// nothing else.
func AskOffline(ctx context.Context, cfg config.Config, log *slog.Logger, do func(context.Context, Offline) error) error {
	s, err := build(ctx, cfg, log)
	if err != nil {
		return err
	}
	defer s.close()
	return do(ctx, Offline{s})
}
