package target

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"mailproof/history"
	"mailproof/infra"
	"mailproof/system/contract"
)

// StaleAfter is the age from which the pipeline's bridge takes an event for too
// old, notifyd's own default: far longer than any run, so that one that puts a
// mail aside for its age has lost it.
const StaleAfter = 24 * time.Hour

// PipelineConfig says how mailproof's own system is run: outbox → Kafka →
// RabbitMQ → workers → SMTP. Zero values leave the services' own defaults.
type PipelineConfig struct {
	// Stack of real parts that the pipeline uses. Required.
	Stack infra.Stack
	// Name of the run, a word of lower-case letters, digits and "_" that no
	// other pipeline on the stack has. Its databases, virtual host and topic
	// carry it. Required.
	Name string
	// SMTPAddr of the mail server, or ResendURL of a mail API over HTTP, which
	// takes any API key. One of them is required.
	SMTPAddr, ResendURL string
	// ResendWebhookSecret lets notifyd hear the API's webhooks.
	ResendWebhookSecret string
	// LogDir receives one log per process. Required.
	LogDir string

	// Binaries to run; when empty they are those beside this program, or are
	// built into BinDir if there are none or if Overlay, Race or Tags are given.
	Binaries Binaries
	BinDir   string
	Overlay  string
	Race     bool
	Tags     []string

	// Policy for ambiguous outcomes of ticket mails: same-key, resend, hold.
	Policy      string
	RetryDelays []time.Duration
	MaxAttempts int
	// SendDeadline + LeaseMargin must be below Lease; the margin is a fifth of
	// the difference unless it is given.
	SendDeadline, LeaseMargin, Lease time.Duration
	// SweeperOff removes the net, for mutants.
	SweeperOff bool
	// SweepEvery and SweepGrace: how often the sweeper looks, and for how long
	// a row must have been due before its doorbell counts as lost.
	SweepEvery, SweepGrace time.Duration
	// LettersEvery is how often dead letters are compared with the rows they
	// point to, default the system's own.
	LettersEvery time.Duration
	// ProviderLog is the URL of the mail server's delivery log, "" if there is
	// none. ReconcileEvery is how often mails that are UNKNOWN are looked up
	// there, default the system's own; where it is set, they count as pending.
	ProviderLog    string
	ReconcileEvery time.Duration
	// KafkaSessionTimeout: a bridge that is silent for longer loses its
	// partitions. Default 6 s, the shortest that brokers allow by default.
	KafkaSessionTimeout time.Duration
	// RelaySessionTimeout: a relay that is stopped for longer loses its lock.
	RelaySessionTimeout time.Duration
	// CrashPoints makes a control file and a pipe of hits for each process:
	// [Pipeline.CrashPoints]. The binaries must be built with the tag
	// "failpoint".
	CrashPoints bool
	// Partitions of the topic, default 6.
	Partitions int
	// Processes of each kind, default 1 of each.
	BookingdCount, NotifydCount int

	// Env overrides any variable, full names: NOTIFYD_LOG_LEVEL, FAILPOINTS.
	// A name that begins with NOTIFYD_ or BOOKINGD_ goes to that service alone.
	Env map[string]string
	// EnvOf overrides variables of single processes, by their name.
	EnvOf map[string]map[string]string

	// ReadyTimeout of one process's start, default 60 s: three quorum queues on
	// busy cores take their time.
	ReadyTimeout time.Duration
	// StopTimeout between SIGTERM and SIGKILL, default 15 s.
	StopTimeout time.Duration
	// Record hears of every process that starts, is ready, killed, paused,
	// resumed, or exits. It must be safe for concurrent use. May be nil.
	Record func(history.Record)
	// WatchReadiness polls each process's readiness and tells Record of every
	// change, as process events "ready" and "unready" with the reason.
	WatchReadiness bool
	// PostgresAddr is the host and port at which the services find Postgres,
	// when that is not the server's own: a proxy. The harness itself goes to the
	// server.
	PostgresAddr string
	// Keep leaves databases and queues behind at Stop.
	Keep bool
}

// Pipeline is mailproof's own system as a [Target].
type Pipeline struct {
	cfg      PipelineConfig
	topic    string
	vhost    string
	dbs      map[string]string // service → URL
	spawn    *spawner
	programs []*program // bookingd first
	bookings *client
	counters *counters
	// readiness is nil unless it is watched.
	readiness *readiness
	crash     map[string]*CrashPoints // by process

	stopScraping func()
	stopOnce     sync.Once
	stopErr      error

	mu   sync.Mutex
	seen map[string]bool // keys that the mail service is known to have
}

var _ Target = (*Pipeline)(nil)

// Names of the two databases as evidence calls them.
const (
	bookingDB = "booking"
	notifyDB  = "notify"
)

var namePattern = regexp.MustCompile(`^[a-z0-9_]{1,40}$`)

func (c PipelineConfig) withDefaults() PipelineConfig {
	setDefault(&c.KafkaSessionTimeout, 6*time.Second)
	setDefault(&c.Partitions, 6)
	setDefault(&c.BookingdCount, 1)
	setDefault(&c.NotifydCount, 1)
	setDefault(&c.ReadyTimeout, time.Minute)
	setDefault(&c.StopTimeout, 15*time.Second)
	if c.LeaseMargin == 0 && c.Lease > c.SendDeadline && c.SendDeadline > 0 {
		c.LeaseMargin = (c.Lease - c.SendDeadline) / 5
	}
	if c.Record == nil {
		c.Record = func(history.Record) {}
	}
	return c
}

func setDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

func (c PipelineConfig) validate() error {
	var errs []error
	switch {
	case c.Stack == nil:
		errs = append(errs, errors.New("no Stack"))
	case c.Stack.Postgres() == nil || c.Stack.RabbitMQ() == nil || c.Stack.Kafka() == nil:
		errs = append(errs, errors.New("the Stack must have Postgres, RabbitMQ and Kafka"))
	}
	if !namePattern.MatchString(c.Name) {
		errs = append(errs, fmt.Errorf("Name %q must match %v", c.Name, namePattern))
	}
	if (c.SMTPAddr == "") == (c.ResendURL == "") {
		errs = append(errs, errors.New("there must be one of SMTPAddr and ResendURL"))
	}
	if c.LogDir == "" {
		errs = append(errs, errors.New("LogDir is empty"))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("pipeline: %w", err)
	}
	return nil
}

// StartPipeline makes databases, a virtual host and a topic for the run, starts
// the processes and returns when all of them are ready. On an error nothing is
// left running.
func StartPipeline(ctx context.Context, cfg PipelineConfig) (_ *Pipeline, err error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if err := cfg.findBinaries(ctx); err != nil {
		return nil, err
	}
	p := &Pipeline{
		cfg: cfg, topic: contract.TopicBookingEvents + "." + cfg.Name, vhost: cfg.Name,
		spawn: newSpawner(), counters: newCounters(), seen: map[string]bool{},
		crash: map[string]*CrashPoints{}, stopScraping: func() {},
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Stop(context.WithoutCancel(ctx)))
		}
	}()
	if err := p.makeParts(ctx); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(cfg.LogDir, 0o755); err != nil {
		return nil, fmt.Errorf("pipeline: %w", err)
	}
	if err := p.makePrograms(); err != nil {
		return nil, err
	}
	if err := p.migrate(ctx); err != nil {
		return nil, err
	}
	if err := p.launchAll(ctx); err != nil {
		return nil, err
	}
	scraping, stop := context.WithCancel(context.WithoutCancel(ctx))
	var watching sync.WaitGroup
	watching.Go(func() { p.counters.run(scraping, p.programs) })
	if cfg.WatchReadiness {
		p.readiness = newReadiness(p.tell)
		watching.Go(func() { p.readiness.run(scraping, p.programs) })
	}
	p.stopScraping = func() { stop(); watching.Wait() }
	return p, nil
}

func (c *PipelineConfig) findBinaries(ctx context.Context) error {
	special := c.Overlay != "" || c.Race || len(c.Tags) > 0
	if c.Binaries.Bookingd != "" && c.Binaries.Notifyd != "" {
		return nil
	}
	if !special {
		if b, ok := Beside(); ok {
			c.Binaries = b
			return nil
		}
	}
	b, err := Build(ctx, BuildConfig{Dir: c.BinDir, Race: c.Race, Tags: c.Tags, Overlay: c.Overlay})
	c.Binaries = b
	return err
}

// makeParts makes what the run has for itself on the shared parts.
func (p *Pipeline) makeParts(ctx context.Context) error {
	pg := p.cfg.Stack.Postgres()
	p.dbs = map[string]string{}
	for _, service := range []string{bookingDB, notifyDB} {
		name := p.database(service)
		if err := pg.CreateDatabase(ctx, name); err != nil {
			return fmt.Errorf("pipeline: database %s: %w", name, err)
		}
		p.dbs[service] = pg.URL(name)
	}
	if err := p.cfg.Stack.RabbitMQ().CreateVhost(ctx, p.vhost); err != nil {
		return fmt.Errorf("pipeline: virtual host %s: %w", p.vhost, err)
	}
	if err := p.cfg.Stack.Kafka().CreateTopic(ctx, p.topic, p.cfg.Partitions); err != nil {
		return fmt.Errorf("pipeline: topic %s: %w", p.topic, err)
	}
	if err := p.cfg.Stack.Kafka().CreateTopic(ctx, p.mailTopic(), p.cfg.Partitions); err != nil {
		return fmt.Errorf("pipeline: topic %s: %w", p.mailTopic(), err)
	}
	return nil
}

// mailTopic is where the mail service tells the booking service of its mails.
func (p *Pipeline) mailTopic() string { return contract.TopicMailEvents + "." + p.cfg.Name }

func (p *Pipeline) database(service string) string { return service + "_" + p.cfg.Name }

func (p *Pipeline) makePrograms() error {
	var errs []error
	for i := range p.cfg.BookingdCount {
		errs = append(errs, p.add("bookingd", i+1, p.cfg.Binaries.Bookingd, []string{"serve"}, p.bookingdEnv()))
	}
	p.bookings = newClient(slices.Clone(p.programs))
	for i := range p.cfg.NotifydCount {
		errs = append(errs, p.add("notifyd", i+1, p.cfg.Binaries.Notifyd, []string{"run"}, p.notifydEnv()))
	}
	return errors.Join(errs...)
}

func (p *Pipeline) add(kind string, n int, path string, args []string, env map[string]string) error {
	name := kind + "-" + strconv.Itoa(n)
	prefix := strings.ToUpper(kind) + "_"
	env[prefix+"INSTANCE"] = strconv.Itoa(n)
	if p.cfg.CrashPoints {
		points, err := newCrashPoints(p.cfg.LogDir, name)
		if err != nil {
			return err
		}
		p.crash[name] = points
		env["FAILPOINTS"] = "@" + points.path
	}
	p.override(env, prefix, name)
	prog := &program{
		name: name, path: path, args: args, env: environ(env), log: filepath.Join(p.cfg.LogDir, name+".log"),
		ready: p.cfg.ReadyTimeout, guard: p.cfg.Stack.Guard, spawn: p.spawn,
	}
	prog.tell = p.tell
	p.programs = append(p.programs, prog)
	if points := p.crash[name]; points != nil {
		points.program = prog
	}
	return nil
}

func (p *Pipeline) tell(e history.Process) {
	p.cfg.Record(history.Record{T: history.Now(), Kind: history.KindProcess, Process: &e})
}

// serviceURL is a database's URL as the services get it.
func (p *Pipeline) serviceURL(service string) string {
	if p.cfg.PostgresAddr == "" {
		return p.dbs[service]
	}
	u, err := url.Parse(p.dbs[service])
	if err != nil {
		return p.dbs[service] // the service will say what is wrong with it
	}
	u.Host = p.cfg.PostgresAddr
	return u.String()
}

// override applies the caller's variables: those of all processes, then those
// of this one.
func (p *Pipeline) override(env map[string]string, prefix, name string) {
	for k, v := range p.cfg.Env {
		ours := strings.HasPrefix(k, prefix)
		if ours || !strings.HasPrefix(k, "NOTIFYD_") && !strings.HasPrefix(k, "BOOKINGD_") {
			env[k] = v
		}
	}
	maps.Copy(env, p.cfg.EnvOf[name])
}

func environ(env map[string]string) []string {
	out := make([]string, 0, len(env))
	for _, k := range slices.Sorted(maps.Keys(env)) {
		out = append(out, k+"="+env[k])
	}
	return out
}

func (p *Pipeline) bookingdEnv() map[string]string {
	env := map[string]string{
		"BOOKINGD_DATABASE_URL":  p.serviceURL(bookingDB),
		"BOOKINGD_KAFKA_BROKERS": strings.Join(p.cfg.Stack.Kafka().Brokers(), ","),
		"BOOKINGD_KAFKA_TOPIC":   p.topic,
		"BOOKINGD_HTTP_ADDR":     "127.0.0.1:0",

		"BOOKINGD_MAIL_EVENTS_TOPIC": p.mailTopic(),
		"BOOKINGD_MAIL_EVENTS_GROUP": "booking." + p.cfg.Name,
	}
	setDuration(env, "BOOKINGD_MAIL_EVENTS_SESSION_TIMEOUT", p.cfg.KafkaSessionTimeout)
	setDuration(env, "BOOKINGD_RELAY_SESSION_TIMEOUT", p.cfg.RelaySessionTimeout)
	return env
}

func (p *Pipeline) notifydEnv() map[string]string {
	c := p.cfg
	env := map[string]string{
		"NOTIFYD_DATABASE_URL":  p.serviceURL(notifyDB),
		"NOTIFYD_AMQP_URLS":     strings.Join(c.Stack.RabbitMQ().URLs(p.vhost), ","),
		"NOTIFYD_KAFKA_BROKERS": strings.Join(c.Stack.Kafka().Brokers(), ","),
		"NOTIFYD_KAFKA_TOPIC":   p.topic,
		"NOTIFYD_KAFKA_GROUP":   "notify." + c.Name,
		"NOTIFYD_SMTP_ADDR":     c.SMTPAddr,
		"NOTIFYD_HTTP_ADDR":     "127.0.0.1:0",

		"NOTIFYD_MAIL_EVENTS_TOPIC": p.mailTopic(),
	}
	if c.ResendURL != "" {
		env["NOTIFYD_TRANSPORT"] = "resend"
		env["NOTIFYD_RESEND_URL"] = c.ResendURL
		env["NOTIFYD_RESEND_API_KEY"] = "re_harness"
		if c.ResendWebhookSecret != "" {
			env["NOTIFYD_RESEND_WEBHOOK_SECRET"] = c.ResendWebhookSecret
		}
	}
	if c.Policy != "" {
		env["NOTIFYD_TICKET_POLICY"] = c.Policy
	}
	if c.MaxAttempts > 0 {
		env["NOTIFYD_MAX_ATTEMPTS"] = strconv.Itoa(c.MaxAttempts)
	}
	if len(c.RetryDelays) > 0 {
		names := make([]string, len(c.RetryDelays))
		for i, d := range c.RetryDelays {
			names[i] = contract.DelayName(d)
		}
		env["NOTIFYD_RETRY_DELAYS"] = strings.Join(names, ",")
	}
	if c.SweeperOff {
		env["NOTIFYD_SWEEPER"] = "off"
	}
	if c.ProviderLog != "" {
		env["NOTIFYD_PROVIDER_LOG_URL"] = c.ProviderLog
	}
	setDuration(env, "NOTIFYD_RECONCILER_INTERVAL", c.ReconcileEvery)
	setDuration(env, "NOTIFYD_SEND_DEADLINE", c.SendDeadline)
	setDuration(env, "NOTIFYD_STALE_AFTER", StaleAfter)
	setDuration(env, "NOTIFYD_LEASE", c.Lease)
	setDuration(env, "NOTIFYD_LEASE_MARGIN", c.LeaseMargin)
	setDuration(env, "NOTIFYD_SWEEPER_INTERVAL", c.SweepEvery)
	setDuration(env, "NOTIFYD_SWEEPER_GRACE", c.SweepGrace)
	setDuration(env, "NOTIFYD_DLQ_INTERVAL", c.LettersEvery)
	setDuration(env, "NOTIFYD_KAFKA_SESSION_TIMEOUT", c.KafkaSessionTimeout)
	return env
}

// setDuration sets a variable unless the service's own default shall stand.
func setDuration(env map[string]string, name string, d time.Duration) {
	if d != 0 {
		env[name] = d.String()
	}
}

// migrate brings both databases up to date with the services' own commands.
func (p *Pipeline) migrate(ctx context.Context) error {
	done := map[string]bool{}
	for _, prog := range p.programs {
		if done[prog.path] {
			continue
		}
		done[prog.path] = true
		cmd := exec.CommandContext(ctx, prog.path, "migrate")
		cmd.Env = slices.DeleteFunc(slices.Clone(prog.env), func(kv string) bool { return strings.HasPrefix(kv, "FAILPOINTS=") })
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("pipeline: %s migrate: %w\n%s", filepath.Base(prog.path), err, out)
		}
	}
	return nil
}

// launchAll starts the processes side by side.
func (p *Pipeline) launchAll(ctx context.Context) error {
	errs := make(chan error, len(p.programs))
	for _, prog := range p.programs {
		go func() { errs <- prog.launch(ctx) }()
	}
	var all []error
	for range p.programs {
		all = append(all, <-errs)
	}
	return errors.Join(all...)
}

// Name is "pipeline".
func (*Pipeline) Name() string { return "pipeline" }

// Processes are bookingd-1 … and notifyd-1 ….
func (p *Pipeline) Processes() []Process {
	out := make([]Process, len(p.programs))
	for i, prog := range p.programs {
		out[i] = prog
	}
	return out
}

// Topic of the events, for faults that act on it.
func (p *Pipeline) Topic() string { return p.topic }

// MailTopic is the topic of the mail events.
func (p *Pipeline) MailTopic() string { return p.mailTopic() }

// Group is the consumer group of the bridge.
func (p *Pipeline) Group() string { return "notify." + p.cfg.Name }

// Vhost is the virtual host of the run.
func (p *Pipeline) Vhost() string { return p.vhost }

// Addr is where a process listens for HTTP, "" while it does not run.
func (p *Pipeline) Addr(process string) string {
	for _, prog := range p.programs {
		if prog.name == process {
			return prog.addr()
		}
	}
	return ""
}

// Environment of a process, "NAME=value", for commands beside it.
func (p *Pipeline) Environment(process string) []string {
	for _, prog := range p.programs {
		if prog.name == process {
			return slices.Clone(prog.env)
		}
	}
	return nil
}

// Binaries are the programs that run, wherever they were found or built.
func (p *Pipeline) Binaries() Binaries { return p.cfg.Binaries }

// Key is the dedupe key of a booking's ticket mail.
func (*Pipeline) Key(booking string, generation int) string {
	return contract.TicketKey(booking, generation)
}

// Databases are those of bookingd and notifyd.
func (p *Pipeline) Databases() []Database {
	return []Database{
		{Name: bookingDB, URL: p.dbs[bookingDB], Tables: []string{"public.bookings", "public.outbox"}},
		{Name: notifyDB, URL: p.dbs[notifyDB], Tables: []string{"public.notifications", "public.alerts", "public.stopped_campaigns"}},
	}
}

// Confirm books and confirms. What was not even asked for, since the booking
// could not be made, has definitely not been confirmed.
func (p *Pipeline) Confirm(ctx context.Context, booking, recipient string) history.OpOutcome {
	outcome, _ := p.ConfirmWhy(ctx, booking, recipient)
	return outcome
}

// ConfirmWhy is Confirm, with the reason of an outcome other than ok.
func (p *Pipeline) ConfirmWhy(ctx context.Context, booking, recipient string) (history.OpOutcome, error) {
	if err := p.Book(ctx, booking, recipient); err != nil {
		return history.OpFail, err
	}
	return p.ConfirmBooked(ctx, booking)
}

// Book makes a booking that is not confirmed yet; no mail follows.
func (p *Pipeline) Book(ctx context.Context, booking, recipient string) error {
	created := p.bookings.post(ctx, "/bookings", map[string]any{
		"id": booking, "recipient": recipient, "name": "Guest of " + booking, "event": "Final of " + booking, // in the subject, so that each mail shows whose it is
		"seats": []string{"A-1"}, "amount": "90.00", "currency": "EUR", "locale": "en",
	})
	if created.err != nil {
		return fmt.Errorf("create %s: %w", booking, created.err)
	}
	return nil
}

// ConfirmBooked confirms a booking that was made: one request, for measurements
// that start with the confirmation. The error is the reason of an outcome other
// than ok.
func (p *Pipeline) ConfirmBooked(ctx context.Context, booking string) (history.OpOutcome, error) {
	return p.act(ctx, booking, "confirm", 0)
}

// Cancel cancels whatever generation the booking is at.
func (p *Pipeline) Cancel(ctx context.Context, booking string) history.OpOutcome {
	outcome, _ := p.act(ctx, booking, "cancel", 0)
	return outcome
}

// Reopen reopens a cancelled booking of this generation: the mail of the next
// one must follow.
func (p *Pipeline) Reopen(ctx context.Context, booking string, generation int) history.OpOutcome {
	outcome, _ := p.act(ctx, booking, "reopen", generation)
	return outcome
}

func (p *Pipeline) act(ctx context.Context, booking, op string, generation int) (history.OpOutcome, error) {
	body := map[string]any{}
	if generation > 0 {
		body["generation"] = generation
	}
	a := p.bookings.post(ctx, "/bookings/"+booking+"/"+op, body)
	if a.err != nil {
		return a.outcome, fmt.Errorf("%s %s: %w", op, booking, a.err)
	}
	return a.outcome, nil
}

// Stop ends the processes, bookingd first, then what was made for the run. Safe
// to call twice. The error names a process that did not end as it should.
func (p *Pipeline) Stop(ctx context.Context) error {
	p.stopOnce.Do(func() {
		p.stopScraping()
		var errs []error
		for _, prog := range p.programs {
			errs = append(errs, prog.terminate(ctx, p.cfg.StopTimeout))
		}
		p.spawn.close()
		if p.bookings != nil {
			p.bookings.http.CloseIdleConnections()
		}
		for _, points := range p.crash {
			errs = append(errs, points.close())
		}
		if !p.cfg.Keep {
			errs = append(errs, p.removeParts(ctx))
		}
		p.stopErr = errors.Join(errs...)
	})
	return p.stopErr
}
