// Package notify is the mail service: it puts the parts of notifyd together and
// starts and stops them.
//
//	Kafka ─▶ bridge ─▶ row store + RabbitMQ ─▶ workers ─▶ mail server
//	                        ▲                     │
//	                        └──── sweeper ◀───────┘
//
// It guarantees an order of start and stop: a part starts only when what it
// needs has been reached (the log says what is waited for), and on SIGTERM the
// consumers stop taking messages first, mails at work are finished within the
// drain time, and the publisher goes last.
//
// It must not hold rules about mails: those are the parts'.
package notify

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"mailproof/system/amqp"
	"mailproof/system/contract"
	"mailproof/system/delivery"
	"mailproof/system/mail"
	"mailproof/system/notify/admin"
	"mailproof/system/notify/alerts"
	"mailproof/system/notify/bridge"
	"mailproof/system/notify/campaign"
	"mailproof/system/notify/config"
	"mailproof/system/notify/dlq"
	"mailproof/system/notify/doorbell"
	"mailproof/system/notify/metrics"
	"mailproof/system/notify/migrations"
	"mailproof/system/notify/patience"
	"mailproof/system/notify/sweeper"
	"mailproof/system/notify/webhook"
	"mailproof/system/notify/worker"
	"mailproof/system/observe"
	"mailproof/system/outbox"
	"mailproof/system/plans"
)

// Pool opens a pool whose every statement is bounded on both sides of the wire.
// It does not connect yet.
func Pool(ctx context.Context, cfg config.Config) (*pgxpool.Pool, error) {
	return poolOf(ctx, cfg, "", cfg.Pool)
}

// poolOf is a pool of so many connections at most, which Postgres shows under a
// name of their own.
func poolOf(ctx context.Context, cfg config.Config, suffix string, most int32) (*pgxpool.Pool, error) {
	c, err := pgxpool.ParseConfig(cfg.DatabaseURL)
	if err != nil {
		// pgx's error quotes the URL with its password.
		return nil, errors.New(config.Prefix + "DATABASE_URL: cannot be read")
	}
	c.MaxConns = most
	c.ConnConfig.ConnectTimeout = 5 * time.Second
	c.PingTimeout = 2 * time.Second
	ms := fmt.Sprint(cfg.StatementTimeout.Milliseconds())
	c.ConnConfig.RuntimeParams["application_name"] = "notifyd-" + cfg.Instance + suffix
	c.ConnConfig.RuntimeParams["statement_timeout"] = ms
	// The net of A1-08: nothing here holds a transaction open.
	c.ConnConfig.RuntimeParams["idle_in_transaction_session_timeout"] = ms
	plans.Steady(c.ConnConfig.RuntimeParams)
	pool, err := pgxpool.NewWithConfig(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("database pool: %w", err)
	}
	return pool, nil
}

// Migrate brings the database to the newest version; it waits for the database.
func Migrate(ctx context.Context, cfg config.Config, log *slog.Logger) error {
	// Migrations take locks and may be long: no statement timeout for them.
	cfg.StatementTimeout = 0
	pool, err := Pool(ctx, cfg)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := waitForDatabase(ctx, pool, patienceOf(log, metrics.New(), 5*time.Second)); err != nil {
		return err
	}
	if err := delivery.Migrate(ctx, pool); err != nil {
		return err
	}
	if err := outbox.Migrate(ctx, cfg.DatabaseURL); err != nil {
		return err
	}
	return migrations.Up(ctx, pool)
}

func patienceOf(log *slog.Logger, m *metrics.Set, timeout time.Duration) patience.Retrier {
	return patience.Retrier{Backoff: patience.Default(), Timeout: timeout, Log: log, Count: m}
}

func waitForDatabase(ctx context.Context, pool *pgxpool.Pool, r patience.Retrier) error {
	return r.Do(ctx, "connect to Postgres", nil, pool.Ping)
}

// errNoSchema is waited out: somebody may be migrating right now.
var errNoSchema = errors.New("the tables are not there, run: notifyd migrate")

func waitForSchema(ctx context.Context, pool *pgxpool.Pool, r patience.Retrier) error {
	return r.Do(ctx, "wait for the tables", nil, func(ctx context.Context) error {
		var ok bool
		err := pool.QueryRow(ctx, `SELECT to_regclass('notifications') IS NOT NULL AND to_regclass('alerts') IS NOT NULL
			AND to_regclass('parked_events') IS NOT NULL AND to_regclass('cancelled_bookings') IS NOT NULL
			AND to_regclass('dlq_audit') IS NOT NULL AND to_regclass('provider_reports') IS NOT NULL
			AND to_regclass('outbox') IS NOT NULL`).Scan(&ok)
		if err == nil && !ok {
			err = errNoSchema
		}
		return err
	})
}

// hopeless: the data of a statement is at fault (class 22, data exception; 23,
// integrity), and no repetition repairs it.
func hopeless(err error) bool {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || len(pg.Code) != 5 {
		return false
	}
	return pg.Code[:2] == "22" || pg.Code[:2] == "23"
}

// service is one running notifyd.
type service struct {
	cfg     config.Config
	log     *slog.Logger
	metrics *metrics.Set
	pool    *pgxpool.Pool
	store   *delivery.Store
	// bulkPool and bulkStore are the marketing lane's: a campaign waits for its
	// own connections and never for, or before, a ticket's.
	bulkPool  *pgxpool.Pool
	bulkStore *delivery.Store

	retry      patience.Retrier
	ring       doorbell.Ringer
	bulkRing   doorbell.Ringer
	alerts     *alerts.Raiser
	bulkAlerts *alerts.Raiser
	dead       dlq.Finisher
	depth      *sweeper.BrokerDepth
	relay      *outbox.Relay // nil where no mail events are told

	sampler   *sampler
	publisher *amqp.Publisher
	// bulk is the marketing lane's own publisher: a campaign of 50,000 messages
	// fills its connection and its window, not those that tickets are published
	// through.
	bulk    *amqp.Publisher
	bridge  *bridge.Consumer
	lanes   []*lane
	started atomic.Bool
}

// lane is the workers of one mail type.
type lane struct {
	mailType contract.MailType
	consumer *amqp.Consumer
	sender   mail.EmailSender
}

// Run runs the service until ctx ends, then drains.
func Run(ctx context.Context, cfg config.Config, log *slog.Logger) error {
	s, err := build(ctx, cfg, log)
	if err != nil {
		return err
	}
	defer s.close()
	defer s.depth.Close()
	defer s.sampler.close()
	hooks, err := s.webhooks()
	if err != nil {
		return err
	}
	side, err := admin.Listen(ctx, admin.Config{
		Addr: cfg.HTTPAddr, Registry: s.metrics.Registry, Checks: s.checks(), Operator: s.operator(),
		Campaigns: s.campaigns(), Webhooks: hooks, ReplayAttempts: cfg.MaxAttempts, Log: log, CheckTimeout: 3 * time.Second,
	})
	if err != nil {
		return err
	}
	log.Info("listening", "addr", side.Addr())

	// The publisher and the HTTP side outlive the consumers: a mail at work
	// needs its successor published, and an operator watches the drain.
	last, stopLast := context.WithCancel(context.WithoutCancel(ctx))
	defer stopLast()
	outer, outerCtx := errgroup.WithContext(last)
	outer.Go(func() error { return side.Run(outerCtx) })
	outer.Go(func() error { return s.publisher.Run(outerCtx) })
	outer.Go(func() error { return s.bulk.Run(outerCtx) })
	outer.Go(func() error { return s.alerts.Run(outerCtx) })
	outer.Go(func() error { s.sampler.run(outerCtx); return nil })
	outer.Go(func() error { return s.bulkAlerts.Run(outerCtx) })

	inner, stopInner := context.WithCancel(ctx)
	defer stopInner()
	context.AfterFunc(outerCtx, stopInner) // a part that failed ends all
	context.AfterFunc(ctx, func() { log.Info("draining", "at_most", cfg.DrainTimeout.String()) })
	err = s.path(inner)
	stopLast()
	if lastErr := outer.Wait(); err == nil {
		err = lastErr
	}
	log.Info("stopped")
	return err
}

// path runs what carries mails, until ctx ends and everything is drained.
func (s *service) path(ctx context.Context) error {
	if err := waitForDatabase(ctx, s.pool, s.retry); err != nil {
		return stopped(ctx, err)
	}
	if err := waitForSchema(ctx, s.pool, s.retry); err != nil {
		return stopped(ctx, err)
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.bridge.Run(ctx) })
	for _, l := range s.lanes {
		g.Go(func() error { return l.run(ctx, s.cfg.DrainTimeout) })
	}
	if s.cfg.Sweeper == "on" {
		sw := s.sweeper()
		g.Go(func() error { return sw.Run(ctx) })
		g.Go(func() error { s.watchLetters(ctx); return nil })
	}
	if s.cfg.Reconciler == "on" {
		g.Go(func() error { return s.reconcile(ctx) })
	}
	if s.relay != nil {
		g.Go(func() error { return s.relay.Run(ctx) })
	}
	g.Go(func() error { s.announce(ctx); return nil })
	return stopped(ctx, g.Wait())
}

// stopped: an end that was asked for is no error.
func stopped(ctx context.Context, err error) error {
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

func (l *lane) run(ctx context.Context, drain time.Duration) error {
	err := l.consumer.Run(ctx, drain)
	if closeErr := l.sender.Close(); err == nil && closeErr != nil && ctx.Err() == nil {
		err = closeErr
	}
	return err
}

// announce says once that the whole path is up.
func (s *service) announce(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-s.bridge.Ready():
	}
	for !s.lanesUp() {
		if patience.Sleep(ctx, 20*time.Millisecond) != nil {
			return
		}
	}
	s.started.Store(true)
	s.log.Info("ready", "sweeper", s.cfg.Sweeper)
}

func (s *service) lanesUp() bool {
	for _, l := range s.lanes {
		if !l.consumer.Connected() {
			return false
		}
	}
	return true
}

func (s *service) checks() []admin.Check {
	checks := []admin.Check{
		{Name: "database", Ask: func(ctx context.Context) error { return s.pool.Ping(ctx) }},
		{Name: "publisher", Ask: func(context.Context) error { return red(s.publisher.Connected(), "not connected to RabbitMQ") }},
		{Name: "bulk publisher", Ask: func(context.Context) error { return red(s.bulk.Connected(), "not connected to RabbitMQ") }},
		{Name: "bridge", Ask: func(context.Context) error { return red(s.bridge.Joined(), "not a member of the Kafka group") }},
	}
	for _, l := range s.lanes {
		checks = append(checks, admin.Check{Name: "lane " + l.mailType.Lane(), Ask: func(context.Context) error {
			return red(l.consumer.Connected(), "consumers are gone")
		}})
	}
	return checks
}

func red(ok bool, why string) error {
	if ok {
		return nil
	}
	return errors.New(why)
}

func build(ctx context.Context, cfg config.Config, log *slog.Logger) (*service, error) {
	pool, err := Pool(ctx, cfg)
	if err != nil {
		return nil, err
	}
	bulk, err := poolOf(ctx, cfg, " marketing", cfg.MarketingPool)
	if err != nil {
		pool.Close()
		return nil, err
	}
	s := &service{
		cfg: cfg, log: log, metrics: metrics.New(), pool: pool, store: delivery.New(pool, cfg.Delivery()),
		bulkPool: bulk, bulkStore: delivery.New(bulk, cfg.Delivery()),
	}
	s.retry = patienceOf(log, s.metrics, cfg.StatementTimeout)
	s.metrics.StartCounters(sweeper.Causes(), alerts.Kinds())
	s.metrics.StartWebhooks([]string{contract.TicketConfirmation.Lane(), contract.Marketing.Lane()}, webhook.Results(), webhook.Events())
	s.metrics.Limit("lease", cfg.Lease.Seconds())
	s.metrics.Limit("send_deadline", cfg.SendDeadline.Seconds())
	s.metrics.Registry.MustRegister(observe.Pool("notifyd_", "main", pool.Stat), observe.Pool("notifyd_", "marketing", bulk.Stat))
	s.publisher = amqp.NewPublisher(s.amqp("publisher"))
	s.bulk = amqp.NewPublisher(s.amqp("bulk publisher"))
	s.ring = doorbell.Ringer{Publisher: s.publisher, Backoff: patience.Default(), Log: log, Count: s.metrics}
	s.bulkRing = s.ring
	s.bulkRing.Publisher = s.bulk
	s.alerts = alerts.New(s.store, log, s.metrics, cfg.AlertWebhook)
	s.bulkAlerts = alerts.New(s.bulkStore, log, s.metrics, cfg.AlertWebhook)
	s.dead = dlq.Finisher{Store: s.store, Ring: s.ring, Alerts: s.alerts, Retry: s.retry, Count: s.metrics}
	s.depth = &sweeper.BrokerDepth{URLs: cfg.AMQPURLs}
	s.sampler = newSampler(s)
	s.bridge = s.newBridge()
	if cfg.TellsMailEvents() {
		if s.relay, err = s.newRelay(); err != nil {
			s.close()
			return nil, err
		}
		prometheus.WrapRegistererWithPrefix("notifyd_", s.metrics.Registry).MustRegister(outbox.NewCollector(pool, s.relay))
	}
	if err := s.addLanes(); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// close ends the database connections.
func (s *service) close() {
	s.pool.Close()
	s.bulkPool.Close()
}

func (s *service) amqp(duty string) amqp.Config {
	topology := amqp.Topology{
		TicketDelays: s.cfg.RetryDelays, MarketingDelays: s.cfg.RetryDelays, DeliveryLimit: s.cfg.DeliveryLimit,
	}
	s.metrics.StartLink(duty, string(amqp.StateWaiting), string(amqp.StateConnected), string(amqp.StateLost),
		string(amqp.StateBlocked), string(amqp.StateUnblocked))
	return amqp.Config{
		URLs: s.cfg.AMQPURLs, Name: "notifyd-" + s.cfg.Instance + " " + duty,
		ConfirmTimeout: s.cfg.ConfirmTimeout, Setup: topology.Declare, Log: s.log,
		OnState: func(st amqp.State, _ error) { s.metrics.AMQP(duty, string(st)) },
	}
}

func (s *service) newBridge() *bridge.Consumer {
	b := bridge.New(bridge.Config{
		Store: s.store, Parker: bridge.TableParker{Pool: s.pool}, Alerts: s.alerts, Ring: s.ring, Retry: s.retry,
		Metrics: s.metrics, Log: s.log, StaleAfter: s.cfg.StaleAfter, Hopeless: hopeless,
	})
	return bridge.NewConsumer(bridge.KafkaConfig{
		Brokers: s.cfg.KafkaBrokers, Topic: s.cfg.KafkaTopic, Group: s.cfg.KafkaGroup,
		Instance: s.cfg.Instance, SessionTimeout: s.cfg.KafkaSessionTimeout, Log: s.log,
		Retry: patienceOf(s.log, s.metrics, 5*time.Second),
	}, b)
}

func (s *service) addLanes() error {
	tickets := laneSpec{
		mailType: contract.TicketConfirmation, consumers: s.cfg.TicketConsumers, prefetch: s.cfg.TicketPrefetch, parallel: 1,
		store: s.store, ring: s.ring, dead: s.dead, alerts: s.alerts,
	}
	if err := s.addLane(tickets); err != nil {
		return err
	}
	if s.cfg.MarketingConsumers == 0 {
		return nil
	}
	// All that is the lane's own, see docs/adr/0007-lanes.md.
	marketing := laneSpec{
		mailType: contract.Marketing, consumers: s.cfg.MarketingConsumers, prefetch: s.cfg.MarketingPrefetch,
		parallel: s.cfg.MarketingParallel, ackWithin: marketingAckWithin, ring: s.bulkRing, dead: s.dead, alerts: s.bulkAlerts,
	}
	marketing.store = delivery.NewGroup(s.bulkStore, s.cfg.StatementTimeout, marketing.workers())
	marketing.dead.Ring, marketing.dead.Store, marketing.dead.Alerts = s.bulkRing, s.bulkStore, s.bulkAlerts
	if s.cfg.MarketingRate > 0 {
		marketing.limit = worker.NewBucket(s.cfg.MarketingRate, marketing.workers())
	}
	return s.addLane(marketing)
}

// marketingAckWithin is how long acks of marketing mails are collected: long
// enough for a dozen of them at a few hundred mails a second, short beside
// everything that waits for the queue to run empty. Tickets come one by one, and
// are acked so.
const marketingAckWithin = 50 * time.Millisecond

// laneSpec is what the lanes differ in.
type laneSpec struct {
	mailType                      contract.MailType
	consumers, prefetch, parallel int
	ackWithin                     time.Duration
	store                         worker.Store
	ring                          doorbell.Ringer
	dead                          dlq.Finisher
	alerts                        *alerts.Raiser
	limit                         worker.Limiter // nil: none
}

// workers are the mails at work side by side.
func (l laneSpec) workers() int { return l.consumers * l.parallel }

func (s *service) addLane(l laneSpec) error {
	t := l.mailType
	// A pool of its own for each lane: marketing cannot take the tickets'
	// connections (M6-17, TRAP-M6-6).
	sender, err := newSender(s.cfg, t, l.workers())
	if err != nil {
		return fmt.Errorf("sender of lane %s: %w", t.Lane(), err)
	}
	render, err := renderer(s.cfg)
	if err != nil {
		return fmt.Errorf("lane %s: %w", t.Lane(), err)
	}
	w := worker.New(worker.Config{
		Type: t, Tiers: s.cfg.RetryDelays, SendDeadline: s.cfg.SendDeadline, From: s.cfg.MailFrom,
		Store: l.store, Sender: sender, Render: render, Ring: l.ring, Dead: l.dead, Alerts: l.alerts,
		Retry: s.retry, Limit: l.limit, KeyLifetime: s.keyLifetime(t), Metrics: s.metrics, Log: s.log.With("lane", t.Lane()),
		Pause: patience.Backoff{First: time.Second, Max: time.Minute},
	})
	tiers := make([]string, len(s.cfg.RetryDelays))
	for i, d := range s.cfg.RetryDelays {
		tiers[i] = contract.RetryQueue(t, d)
	}
	s.metrics.Start(t.Lane(), tiers)
	s.lanes = append(s.lanes, &lane{mailType: t, sender: sender, consumer: amqp.NewConsumer(amqp.ConsumerConfig{
		Config: s.amqp("lane " + t.Lane()), Queue: t.Queue(), Consumers: l.consumers, Prefetch: l.prefetch, Parallel: l.parallel,
		AckWithin: l.ackWithin, Handle: w.Handle,
	})})
	return nil
}

// netStore is the store as the sweeper needs it.
type netStore struct {
	*delivery.Store
	pool   *pgxpool.Pool
	alerts *alerts.Raiser
}

// Expire ends rows and raises their alerts, both or neither.
func (n netStore) Expire(ctx context.Context, limit int) (rows []delivery.Row, err error) {
	var tell func()
	err = pgx.BeginFunc(ctx, n.pool, func(tx pgx.Tx) error {
		inside := n.Store.On(tx)
		if rows, err = inside.Expire(ctx, limit); err != nil {
			return err
		}
		tell, err = n.alerts.RaiseIn(ctx, inside, sweeper.AlertsOf(rows)...)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("expire: %w", err)
	}
	tell()
	return rows, nil
}

func (s *service) sweeper() *sweeper.Sweeper {
	lanes := []sweeper.Lane{
		{Type: contract.TicketConfirmation, Prefetch: s.cfg.TicketPrefetch},
		{Type: contract.Marketing, Prefetch: s.cfg.MarketingPrefetch},
	}
	return sweeper.New(sweeper.Config{
		Store: netStore{Store: s.store, pool: s.pool, alerts: s.alerts}, Ring: s.ring, Dead: s.dead, Alerts: s.alerts, Depth: s.depth, Metrics: s.metrics, Log: s.log,
		Interval: s.cfg.SweeperInterval, Grace: s.cfg.SweeperGrace, Batch: s.cfg.SweeperBatch, Rate: s.cfg.SweeperRate,
		Retention: s.cfg.Retention, Lanes: lanes, Timeout: s.cfg.StatementTimeout,
		// Twice the confirm: a publish that is repeated once still counts.
		RingTimeout: 2 * s.cfg.ConfirmTimeout,
	})
}

// newRelay publishes the mail events with the same code as the booking service
// does its own. Nobody waits for them: polling is enough.
func (s *service) newRelay() (*outbox.Relay, error) {
	return outbox.NewRelay(outbox.Config{
		DatabaseURL: s.cfg.DatabaseURL, Brokers: s.cfg.KafkaBrokers, Instance: "notifyd-" + s.cfg.Instance, Log: s.log,
		OnDead: func(ctx context.Context, d outbox.Dead) error {
			return s.alerts.Raise(ctx, alerts.Alert{
				Kind: alerts.EventDead, Subject: d.Key, Occurrence: d.EventID.String(), EventID: d.EventID.String(), Detail: d.Err,
			})
		},
	})
}

// webhooks is the handler of the provider's requests, nil where none are heard.
func (s *service) webhooks() (http.Handler, error) {
	if s.cfg.ResendWebhookSecret == "" {
		return nil, nil
	}
	h, err := webhook.New(webhook.Config{
		Secret: s.cfg.ResendWebhookSecret, Store: s.store, Reports: webhook.Reports{DB: s.pool}, Tag: mail.ResendTagKey, KeyOf: mail.ResendTagged,
		Count: s.metrics, Log: s.log, Timeout: s.cfg.StatementTimeout,
	})
	if err != nil {
		return nil, errors.New(config.Prefix + "RESEND_WEBHOOK_SECRET: " + err.Error())
	}
	return h, nil
}

func (s *service) operator() dlq.Operator {
	audit := dlq.Audit{DB: s.pool}
	return dlq.Operator{
		Store: s.store, DB: s.pool, Ring: s.ring, Audit: audit, Log: s.log,
		Limits: dlq.Limits{Statement: s.cfg.StatementTimeout}, Cleaner: s.cleaner(audit),
	}
}

// campaigns takes mails in whether or not this process has marketing workers.
func (s *service) campaigns() *campaign.Service {
	return campaign.New(campaign.Config{
		Store: s.bulkStore, Reports: webhook.Reports{DB: s.bulkPool}, Ring: s.bulkRing, Retry: s.retry, Metrics: s.metrics, Log: s.log, Hopeless: hopeless,
		Tiers: s.cfg.RetryDelays,
		// A publish that is repeated once still counts.
		Step: 2 * s.cfg.ConfirmTimeout,
	})
}

func (s *service) cleaner(audit dlq.Audit) dlq.Cleaner {
	return dlq.Cleaner{
		Queue: dlq.BrokerQueue{URLs: s.cfg.AMQPURLs, Name: "notifyd-" + s.cfg.Instance + " dead letters"},
		Rows:  s.store, Discards: audit, Ring: s.ring, Count: s.metrics, Log: s.log,
	}
}

// watchLetters keeps the dead-letter queue true to the table.
func (s *service) watchLetters(ctx context.Context) {
	cleaner, seen := s.cleaner(dlq.Audit{DB: s.pool}), dlq.Unseen()
	for patience.Sleep(ctx, s.cfg.DLQInterval) == nil {
		var err error
		if seen, err = cleaner.Watch(ctx, seen); err != nil && ctx.Err() == nil {
			s.log.Warn("dead letters not looked through, the next round goes on", "error", err)
		}
	}
}

// Operate runs do with what people decide about dead mails by, for a command:
// without bridge, workers and HTTP, but with a publisher.
func Operate(ctx context.Context, cfg config.Config, log *slog.Logger, do func(context.Context, dlq.Operator) error) error {
	return alone(ctx, cfg, log, func(ctx context.Context, s *service) error {
		return s.publishing(ctx, s.publisher, func(ctx context.Context) error { return do(ctx, s.operator()) })
	})
}

// Campaigns runs do with the marketing lane's intake, in the same way.
func Campaigns(ctx context.Context, cfg config.Config, log *slog.Logger, do func(context.Context, *campaign.Service) error) error {
	return alone(ctx, cfg, log, func(ctx context.Context, s *service) error {
		return s.publishing(ctx, s.bulk, func(ctx context.Context) error { return do(ctx, s.campaigns()) })
	})
}

// alone builds the service for a command.
func alone(ctx context.Context, cfg config.Config, log *slog.Logger, do func(context.Context, *service) error) error {
	cfg.MailEventsTopic = "off" // no command ends a mail's life
	s, err := build(ctx, cfg, log)
	if err != nil {
		return err
	}
	defer s.close()
	return do(ctx, s)
}

// publishing runs do beside a publisher.
func (s *service) publishing(ctx context.Context, p *amqp.Publisher, do func(context.Context) error) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	err := do(ctx)
	stop()
	return errors.Join(err, <-done)
}
