package scenarios

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"mailproof/fakes/ledger"
	"mailproof/fakes/resendapi"
	"mailproof/fakes/script"
	"mailproof/fakes/smtp"
	"mailproof/faults"
	"mailproof/faults/pgproxy"
	"mailproof/history"
	"mailproof/history/wal"
	"mailproof/infra"
	"mailproof/infra/provider"
	"mailproof/internal/setup"
	"mailproof/target"
)

// LabConfig says how the real parts are run.
type LabConfig struct {
	// LogDir receives a log per node of the parts.
	LogDir string
	// Kafka is apache, kfake, or auto: the stand-in only where it must be.
	Kafka string
	// Provider of the parts, by its name in package provider; "" is auto.
	Provider string
	// Overlay is a "go build -overlay" file for the system under test.
	Overlay string
	// Env are variables of the system's processes, "NAME=value".
	Env []string
	// Progress is told what is being waited for; from several goroutines.
	Progress func(part, state string)
}

// RealLab runs cells on real parts that are started once.
type RealLab struct {
	stack    infra.Stack
	binaries target.Binaries
	tagged   target.Binaries // with crash points; built when first asked for
	overlay  string
	binDir   string // of binaries built for this run; "" when they lay beside the program
	env      map[string]string
	opened   atomic.Int64 // cells so far, for their names; they may be opened side by side
}

var _ Lab = (*RealLab)(nil)

// StartLab starts Postgres, three RabbitMQ nodes and Kafka, and builds the
// system where it has to be built. On an error nothing is left running.
func StartLab(ctx context.Context, cfg LabConfig) (*RealLab, error) {
	paths := setup.Locate()
	switch {
	case cfg.Kafka == "kfake":
		paths.Java, paths.KafkaLib = "", ""
	case cfg.Kafka == "apache" && (paths.Java == "" || paths.KafkaLib == ""):
		return nil, errors.New("--kafka apache: Java or Kafka's jars are missing; run \"mailproof setup\"")
	}
	parts, err := provider.SelectAt(cfg.Provider, paths)
	switch {
	case err != nil:
		return nil, err
	case cfg.Kafka == "kfake" && parts.Name() != provider.Processes:
		return nil, errors.New("--kafka kfake: the stand-in runs beside processes only")
	}
	lab := &RealLab{env: map[string]string{}, overlay: cfg.Overlay}
	for _, e := range cfg.Env {
		name, value, _ := strings.Cut(e, "=")
		lab.env[name] = value
	}
	both, bothCtx := errgroup.WithContext(ctx)
	both.Go(func() error { return lab.findBinaries(bothCtx, cfg) })
	both.Go(func() (err error) {
		lab.stack, err = parts.Start(bothCtx, infra.Spec{LogDir: cfg.LogDir, Progress: cfg.Progress})
		return err
	})
	if err := both.Wait(); err != nil {
		if ctx.Err() != nil {
			err = errors.Join(context.Cause(ctx), err)
		}
		return nil, errors.Join(err, lab.Stop(context.WithoutCancel(ctx)))
	}
	return lab, nil
}

func (l *RealLab) findBinaries(ctx context.Context, cfg LabConfig) error {
	if cfg.Overlay == "" {
		if b, ok := target.Beside(); ok {
			l.binaries = b
			return nil
		}
	}
	cfg.Progress("system", "building")
	began := time.Now()
	dir, err := l.folder()
	if err != nil {
		return err
	}
	l.binaries, err = target.Build(ctx, target.BuildConfig{Dir: dir, Overlay: cfg.Overlay})
	if err == nil {
		cfg.Progress("system", fmt.Sprintf("ready after %.1f s", time.Since(began).Seconds()))
	}
	return err
}

func (l *RealLab) folder() (string, error) {
	if l.binDir == "" {
		dir, err := os.MkdirTemp("", "mailproof-bin-")
		if err != nil {
			return "", fmt.Errorf("a folder for the system's binaries: %w", err)
		}
		l.binDir = dir
	}
	return l.binDir, nil
}

// binariesFor are the system's programs, with crash points where the order asks
// for them: the release build has none.
func (l *RealLab) binariesFor(ctx context.Context, o Order) (target.Binaries, error) {
	if !o.System.CrashPoints {
		return l.binaries, nil
	}
	if l.tagged.Notifyd == "" {
		dir, err := l.folder()
		if err != nil {
			return target.Binaries{}, err
		}
		l.tagged, err = target.Build(ctx, target.BuildConfig{
			Dir: filepath.Join(dir, "crash"), Tags: []string{"failpoint"}, Overlay: l.overlay,
		})
		if err != nil {
			return target.Binaries{}, err
		}
	}
	return l.tagged, nil
}

// Versions of the parts.
func (l *RealLab) Versions() infra.Versions { return l.stack.Versions() }

// Stop ends every part.
func (l *RealLab) Stop(ctx context.Context) error {
	var errs []error
	if l.stack != nil {
		errs = append(errs, l.stack.Stop(ctx))
	}
	if l.binDir != "" {
		errs = append(errs, os.RemoveAll(l.binDir))
	}
	return errors.Join(errs...)
}

// cellLab is what one cell has of a lab.
type cellLab struct {
	order    Order
	stack    infra.Stack
	server   mailServer
	proxy    *pgproxy.Proxy
	hook     hook // the system's webhook at the mail API
	pipeline *target.Pipeline
	logs     []*wal.Collector
	keys     map[string]string // recipient → key of its one mail
	counted  map[string]int64  // what the collectors took, once they have ended
}

// Open starts a mail server, the system under test and the readers of its
// databases' logs, all of the cell's own.
func (l *RealLab) Open(ctx context.Context, o Order) (_ *Bench, err error) {
	number := l.opened.Add(1)
	c := &cellLab{order: o, stack: l.stack, keys: map[string]string{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close(context.WithoutCancel(ctx)))
		}
	}()
	binaries, err := l.binariesFor(ctx, o)
	if err != nil {
		return nil, err
	}
	// The command line has the last word: a planted defect takes the net away.
	env := map[string]string{}
	maps.Copy(env, o.System.Env)
	maps.Copy(env, l.env)
	postgresAddr, err := c.startProxy()
	if err != nil {
		return nil, err
	}
	cfg := target.PipelineConfig{
		Stack: l.stack, Name: fmt.Sprintf("c%d", number), LogDir: o.Dir, Binaries: binaries,
		Policy: o.Cell.Policy, RetryDelays: o.System.RetryDelays, MaxAttempts: o.System.MaxAttempts,
		SendDeadline: o.System.SendDeadline, Lease: o.System.Lease,
		SweepEvery: o.System.SweepEvery, SweepGrace: o.System.SweepGrace, LettersEvery: o.System.LettersEvery,
		ReconcileEvery: o.System.ReconcileEvery,
		NotifydCount:   o.System.MailServices, BookingdCount: o.System.BookingServices,
		CrashPoints: o.System.CrashPoints, Env: env, Record: o.Record,
		WatchReadiness: o.System.WatchReadiness, PostgresAddr: postgresAddr,
	}
	if err := c.startServer(&cfg); err != nil {
		return nil, err
	}
	if c.pipeline, err = target.StartPipeline(ctx, cfg); err != nil {
		return nil, err
	}
	if c.hook.id != "" {
		if err := c.hook.aim("http://" + c.pipeline.Addr("notifyd-1") + "/webhooks/resend"); err != nil {
			return nil, err
		}
	}
	if err := c.followLogs(ctx); err != nil {
		return nil, err
	}
	for _, b := range append(o.Plan.Baseline[:len(o.Plan.Baseline):len(o.Plan.Baseline)], o.Plan.Faults...) {
		c.keys[b.Recipient] = c.pipeline.Key(b.ID, 1)
	}
	return &Bench{
		Order: o, Target: c.pipeline,
		Parts: Parts{
			Mail: c.server, Brokers: l.stack.Kafka().Brokers(), Topic: c.pipeline.Topic(), Group: c.pipeline.Group(),
			Stack: l.stack, Vhost: c.pipeline.Vhost(), Database: c.proxy,
		},
		Mend: l.stack.Mend, Unready: c.pipeline.Unready,
		Unrest:   c.unrest,
		Attempts: func() int { return int(c.server.Totals().Rows) },
		Stored:   func() int { return int(c.server.Totals().Stored) },
		Evidence: c.evidence, Counted: func() map[string]int64 { return c.counted }, Close: c.close,
	}, nil
}

// startProxy returns the address at which the system shall look for Postgres, ""
// for the server's own.
func (c *cellLab) startProxy() (addr string, err error) {
	if !c.order.System.PostgresProxy {
		return "", nil
	}
	server, err := url.Parse(c.stack.Postgres().URL("postgres"))
	if err != nil {
		return "", fmt.Errorf("address of Postgres: %w", err)
	}
	if c.proxy, err = pgproxy.Start(server.Host); err != nil {
		return "", err
	}
	return c.proxy.Addr(), nil
}

// serviceTime lets the mail server work on each mail: before it keeps it, as a
// provider scans, signs and queues first.
func serviceTime(s System) []smtp.Rule {
	if s.ServiceTime == 0 {
		return nil
	}
	return []smtp.Rule{{
		ID:     "service-time",
		Action: smtp.Action{Kind: smtp.Delay, Stage: smtp.StageDot, For: script.Duration(s.ServiceTime)},
	}}
}

// mailServer is the far side of a cell: a fake of SMTP or of an API over HTTP.
type mailServer interface {
	faults.WatchedMailServer
	Totals() ledger.Totals
	Close() error
}

// startServer starts the cell's mail server and tells the system of it. A hang
// must outlive the sender's deadline, and a hold the wait for it: both end with
// the cell.
func (c *cellLab) startServer(cfg *target.PipelineConfig) error {
	if c.order.Cell.HTTP {
		opt := resendapi.Options{Seed: c.order.Seed, Clock: history.Now}
		if c.order.System.ReconcileEvery > 0 {
			// Long enough that a mail whose answer was lost is UNKNOWN by then.
			opt.DeliverAfter = 700 * time.Millisecond
		}
		server, err := resendapi.Start(opt)
		if err != nil {
			return err
		}
		c.server, cfg.ResendURL = server, server.URL
		if c.order.System.ReconcileEvery > 0 {
			c.hook, err = newHook(server.URL)
			cfg.ResendWebhookSecret = c.hook.secret
		}
		return err
	}
	opt := smtp.Options{Seed: c.order.Seed, Mode: smtp.Plain, Clock: history.Now, MaxConnections: c.order.System.Connections, Rules: serviceTime(c.order.System)}
	if c.order.Cell.Deduplicating {
		opt.Mode = smtp.DedupByKey
	}
	if c.order.System.ReconcileEvery > 0 {
		opt.HTTPAddr = "127.0.0.1:0"
	}
	server, err := smtp.Start(opt)
	if err != nil {
		return err
	}
	c.server, cfg.SMTPAddr = server, server.Addr()
	if opt.HTTPAddr != "" {
		cfg.ProviderLog = server.URL() + "/log"
	}
	return nil
}

func (c *cellLab) followLogs(ctx context.Context) error {
	for _, db := range c.pipeline.Databases() {
		log, err := wal.Start(ctx, wal.Config{
			Database: db.Name, URL: db.URL, Tables: db.Tables, Drop: []string{"rendered"}, Identity: "id",
			Sink: func(ch history.Change) error {
				c.order.Record(history.Record{T: history.Now(), Kind: history.KindChange, Change: &ch})
				return nil
			},
		})
		if err != nil {
			return err
		}
		c.logs = append(c.logs, log)
	}
	return nil
}

// unrest is what is on its way between the parts: records that the bridge has
// not read, messages that a queue holds, dead letters without a dead mail and
// the other way round.
func (c *cellLab) unrest(ctx context.Context) (map[string]string, error) {
	moving := map[string]string{}
	lag, _, err := faults.GroupLag(ctx, c.stack.Kafka().Brokers(), c.pipeline.Topic())
	if err != nil {
		return nil, err
	}
	if lag > 0 {
		moving["topic "+c.pipeline.Topic()] = fmt.Sprintf("%d records not read", lag)
		return moving, nil
	}
	queues, err := c.stack.RabbitMQ().Queues(ctx, c.pipeline.Vhost())
	if err != nil {
		return nil, err
	}
	dead, err := c.pipeline.Dead(ctx)
	if err != nil {
		return nil, err
	}
	for _, q := range queues {
		switch {
		case strings.HasSuffix(q.Name, "dlq"):
			if q.Messages != dead {
				moving["queue "+q.Name] = fmt.Sprintf("%d letters, %d dead mails", q.Messages, dead)
			}
		case q.Messages > 0:
			moving["queue "+q.Name] = fmt.Sprintf("%d messages, %d ready, %d unacked", q.Messages, q.Ready, q.Unacked)
		}
	}
	return moving, nil
}

// evidence ends the readers of the logs, which record by themselves, and
// returns the mail server's ledger.
func (c *cellLab) evidence(ctx context.Context) ([]history.Record, error) {
	var errs []error
	c.counted = map[string]int64{}
	for _, log := range c.logs {
		errs = append(errs, log.Stop(ctx))
		c.counted[history.CountedChanges+log.Database()] = log.Stats().Changes
	}
	c.logs = nil
	totals := c.server.Totals() // first: a try that begins in between is none that was lost
	rows := c.server.Ledger()
	c.counted[history.CountedAttempts] = max(totals.Rows+totals.Open, int64(len(rows)))
	records := make([]history.Record, len(rows))
	for i, row := range rows {
		a := c.attempt(row)
		records[i] = history.Record{T: a.To, Kind: history.KindAttempt, Attempt: &a}
	}
	return records, errors.Join(errs...)
}

// attempt is a row of the ledger as evidence. A try that ended before its
// headers were read carries no key; where the schedule gives its recipient to
// one mail alone, it is that mail's.
func (c *cellLab) attempt(row ledger.Attempt) history.Attempt {
	a := history.Attempt{
		ID: row.ID, Transport: row.Transport, Session: row.Session, Client: row.Client, Key: row.Key,
		MessageID: row.MessageID, Recipient: row.Recipient, From: row.From, To: row.To, Stage: row.Stage,
		DotAt: row.DotAt, Stored: row.Stored, Deduplicated: row.Deduplicated, ReplyWritten: row.ReplyWritten,
		Reply: row.Reply, RetryAfter: time.Duration(row.RetryAfter), ClosedWithoutStoring: row.ClosedWithoutStoring, Fault: row.Fault, Breach: row.Breach,
		BodyHash: row.BodyHash, Subject: row.Subject,
	}
	if row.Open() {
		a.To = max(history.Now(), a.From)
	}
	if a.Key == "" && a.DotAt == 0 {
		a.Key = c.keys[a.Recipient]
	}
	return a
}

func (c *cellLab) close(ctx context.Context) error {
	var errs []error
	for _, log := range c.logs {
		errs = append(errs, log.Stop(ctx))
	}
	if c.pipeline != nil {
		errs = append(errs, c.pipeline.Stop(ctx))
	}
	if c.proxy != nil {
		errs = append(errs, c.proxy.Close())
	}
	if c.server != nil {
		errs = append(errs, c.server.Close())
	}
	return errors.Join(errs...)
}
