// Package config is everything that notifyd can be told, from the environment
// alone (M6-08, M6-14): each variable with its default and meaning in one
// struct, from which [Load] reads it and [Describe] prints it.
//
// It guarantees that a wrong environment is told at once and whole: [Load]
// names every variable that is missing or wrong in one error, and refuses
// combinations that would break a promise of the system (a lease that a send
// outlives, a staleness bound beyond the retention of dedupe rows).
//
// It must not import any part that is configured, only their vocabulary.
package config

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/mail"
	"net/url"
	"regexp"
	"time"

	"mailproof/system/contract"
	"mailproof/system/delivery"
	"mailproof/system/envconfig"
)

// Prefix starts the name of each variable.
const Prefix = "NOTIFYD_"

// Config of one notifyd process. Durations are written as Go writes them: 200ms,
// 10s, 1m.
type Config struct {
	DatabaseURL string `env:"DATABASE_URL,required,notEmpty" secret:"url" doc:"Postgres with the notifications table"`
	Pool        int32  `env:"POOL" envDefault:"16" doc:"database connections at most, without those of marketing"`
	// MarketingPool bounds what a campaign can take of the database at once.
	MarketingPool int32 `env:"MARKETING_POOL" envDefault:"6" doc:"database connections of the marketing lane and of the intake of campaigns; they are its own, and it has no others"`
	// StatementTimeout bounds every statement, on both sides of the wire.
	StatementTimeout time.Duration `env:"STATEMENT_TIMEOUT" envDefault:"10s" doc:"limit of one database statement; a database that answers later counts as away"`

	AMQPURLs       []string      `env:"AMQP_URLS,required,notEmpty" secret:"url" doc:"RabbitMQ nodes, separated by commas"`
	ConfirmTimeout time.Duration `env:"CONFIRM_TIMEOUT" envDefault:"30s" doc:"wait for one publisher confirm; well above its p99 (TRAP-2-10)"`
	DeliveryLimit  int           `env:"DELIVERY_LIMIT" envDefault:"200" doc:"x-delivery-limit of the main queues: a net below poison, not the retry counter (M6-15)"`

	KafkaBrokers        []string      `env:"KAFKA_BROKERS,required,notEmpty" doc:"seed brokers, separated by commas"`
	KafkaTopic          string        `env:"KAFKA_TOPIC" envDefault:"booking.events" doc:"topic of the booking service's events"`
	KafkaGroup          string        `env:"KAFKA_GROUP" envDefault:"notify" doc:"consumer group of the bridge"`
	KafkaSessionTimeout time.Duration `env:"KAFKA_SESSION_TIMEOUT" envDefault:"45s" doc:"a member that is silent for longer loses its partitions"`

	Instance string `env:"INSTANCE" envDefault:"1" doc:"name of this process: static member of the Kafka group, EHLO name, logs; unique per process and the same after a restart"`

	Transport    string `env:"TRANSPORT" envDefault:"smtp" doc:"smtp, or resend for Resend's HTTP API; mails stored for one are not sent over the other: drain before changing it"`
	ResendURL    string `env:"RESEND_URL" envDefault:"https://api.resend.com" doc:"the API, without /emails"`
	ResendAPIKey string `env:"RESEND_API_KEY" secret:"all" doc:"key of the API, must be set when the transport is resend"`
	ResendList   string `env:"RESEND_LIST" envDefault:"on" doc:"with transport resend: on looks UNKNOWN mails up in the provider's list of mails; the key must be one that may read; off for one that may send only"`
	// ResendWebhookSecret opens POST /webhooks/resend.
	ResendWebhookSecret string `env:"RESEND_WEBHOOK_SECRET" secret:"all" doc:"signing key whsec_… of the webhook that Resend sends to /webhooks/resend; empty: there is no such endpoint"`
	// KeyLifetime and a lease end before the receiver forgets the key (OB-09).
	KeyLifetime time.Duration `env:"KEY_LIFETIME" envDefault:"23h" doc:"with policy same-key: this long after the first claim a mail whose outcome is open is not sent again; below the receiver's 24h by more than a lease"`

	SMTPAddr     string `env:"SMTP_ADDR" doc:"host:port of the mail server; must be set when the transport is smtp"`
	SMTPUser     string `env:"SMTP_USER" doc:"user for AUTH; empty means none"`
	SMTPPassword string `env:"SMTP_PASSWORD" secret:"all" doc:"password for AUTH"`
	SMTPStartTLS bool   `env:"SMTP_STARTTLS" envDefault:"false" doc:"upgrade the connection before AUTH, and refuse a server that cannot"`
	MailFrom     string `env:"MAIL_FROM" envDefault:"tickets@example.test" doc:"sender address; its domain is the one of the Message-IDs"`

	UnsubscribeURL string `env:"UNSUBSCRIBE_URL" doc:"where the receiver of a marketing mail unsubscribes, https (RFC 8058); ?key=<dedupe key> is added; empty: /unsubscribe at the domain of NOTIFYD_MAIL_FROM"`

	RetryDelays []time.Duration `env:"RETRY_DELAYS" envDefault:"10s,1m,5m" doc:"wait after the first, second, … failed try; each is a delay tier of its own (M6-04)"`
	MaxAttempts int             `env:"MAX_ATTEMPTS" envDefault:"0" doc:"tries before a mail is DEAD; 0 means one more than there are delays"`

	TicketConsumers    int `env:"TICKET_CONSUMERS" envDefault:"8" doc:"ticket mails at work side by side (M6-03)"`
	TicketPrefetch     int `env:"TICKET_PREFETCH" envDefault:"10" doc:"deliveries ahead per ticket consumer"`
	MarketingConsumers int `env:"MARKETING_CONSUMERS" envDefault:"2" doc:"consumers of the marketing queue; 0 switches the lane off in this process"`
	MarketingPrefetch  int `env:"MARKETING_PREFETCH" envDefault:"50" doc:"deliveries ahead per marketing consumer"`
	// What a crash leaves in doubt, and the connections that the mail server must
	// bear, are consumers × this.
	MarketingParallel int             `env:"MARKETING_PARALLEL" envDefault:"0" doc:"marketing mails at work side by side in each consumer, each over an SMTP connection of its own; 0 means so many that the lane has 32; at most the prefetch"`
	MarketingRate     float64         `env:"MARKETING_RATE" envDefault:"500" doc:"marketing mails per second from this process (token bucket, M6-17), so that tickets find a machine that is not full; 0 means no limit"`
	TicketPolicy      delivery.Policy `env:"TICKET_POLICY" envDefault:"resend" doc:"when the outcome of a try is not known: resend, hold or same-key (OB-07); a rare double ticket is better than none"`
	MarketingPolicy   delivery.Policy `env:"MARKETING_POLICY" envDefault:"hold" doc:"the same for marketing; an advertisement nobody misses must not come twice"`

	SendDeadline time.Duration `env:"SEND_DEADLINE" envDefault:"30s" doc:"hard limit of one try, connection included (OB-02)"`
	Lease        time.Duration `env:"LEASE" envDefault:"45s" doc:"how long a claim holds a row"`
	LeaseMargin  time.Duration `env:"LEASE_MARGIN" envDefault:"5s" doc:"send deadline + margin must be below the lease: room for claim, rendering and settling"`
	DrainTimeout time.Duration `env:"DRAIN_TIMEOUT" envDefault:"0s" doc:"after SIGTERM, time for mails at work; 0 means the send deadline + 5s"`

	Sweeper         string        `env:"SWEEPER" envDefault:"on" doc:"on or off; off only for tests that look for a defect beneath the net"`
	SweeperInterval time.Duration `env:"SWEEPER_INTERVAL" envDefault:"1m" doc:"time between two rounds"`
	SweeperGrace    time.Duration `env:"SWEEPER_GRACE" envDefault:"5m" doc:"how long a row may be due without a worker before its doorbell counts as lost; above prefetch × send deadline"`
	SweeperRate     float64       `env:"SWEEPER_RATE" envDefault:"100" doc:"doorbells per second that the sweeper rings again at most"`
	SweeperBatch    int           `env:"SWEEPER_BATCH" envDefault:"500" doc:"rows per round and cause at most"`

	DLQInterval time.Duration `env:"DLQ_INTERVAL" envDefault:"1m" doc:"how often the number of dead letters is looked at; when it changed, letters whose mail is alive or settled are cleared (not with SWEEPER=off)"`

	MailEventsTopic string `env:"MAIL_EVENTS_TOPIC" envDefault:"mail.events" doc:"topic that is told what became of each booking's mail; off: nobody is told"`

	Reconciler         string        `env:"RECONCILER" envDefault:"on" doc:"on or off: whether mails that are UNKNOWN are looked into"`
	ReconcilerInterval time.Duration `env:"RECONCILER_INTERVAL" envDefault:"1m" doc:"time between two rounds, and before the first try under the same key of a mail that is UNKNOWN"`
	ProviderLogURL     string        `env:"PROVIDER_LOG_URL" secret:"url" doc:"the provider's delivery log as JSON lines, asked with ?key=…; empty: there is none, and no absence is ever proven"`
	ServerSession      time.Duration `env:"SERVER_SESSION" envDefault:"10m" doc:"the mail server's own limit of a session: how long a session that its client left may still bring a copy"`
	ProviderProcessing time.Duration `env:"PROVIDER_PROCESSING" envDefault:"5m" doc:"how long after the end of a session its line may be missing in the delivery log"`

	StaleAfter time.Duration `env:"STALE_AFTER" envDefault:"24h" doc:"an older event that asks for a mail leaves an EXPIRED row and an alert (A2-13); cancels are never stale"`
	Retention  time.Duration `env:"RETENTION" envDefault:"192h" doc:"how long dedupe rows and tombstones are kept; above the retention of the topic"`

	HTTPAddr     string     `env:"HTTP_ADDR" envDefault:"127.0.0.1:0" doc:"health, metrics and admin"`
	AlertWebhook string     `env:"ALERT_WEBHOOK" secret:"url" doc:"each alert is posted there as JSON; empty means log and table only"`
	LogLevel     slog.Level `env:"LOG_LEVEL" envDefault:"INFO" doc:"DEBUG, INFO, WARN or ERROR"`
}

// Load reads the environment. The error names every variable that is missing,
// wrong, or at odds with another.
func Load() (Config, error) { return load(nil) }

// LoadFrom reads from a map instead of the process environment.
func LoadFrom(vars map[string]string) (Config, error) {
	if vars == nil {
		vars = map[string]string{}
	}
	return load(vars)
}

func load(vars map[string]string) (Config, error) {
	c, problems := envconfig.Read[Config](Prefix, vars)
	if len(problems) == 0 {
		c = c.withDefaults()
		problems = c.problems()
	}
	problems = append(problems, c.transportProblems()...)
	if len(problems) > 0 {
		return c, fmt.Errorf("configuration (\"notifyd config\" explains every variable): %w", errors.Join(problems...))
	}
	return c, nil
}

func (c Config) withDefaults() Config {
	if c.MaxAttempts == 0 {
		c.MaxAttempts = len(c.RetryDelays) + 1
	}
	if c.MarketingParallel == 0 {
		const workers = 32
		c.MarketingParallel = max(1, workers/max(1, c.MarketingConsumers))
	}
	c.MarketingParallel = min(c.MarketingParallel, c.MarketingPrefetch)
	if c.DrainTimeout == 0 {
		c.DrainTimeout = c.SendDeadline + 5*time.Second
	}
	return c
}

// problems checks values and their relations.
func (c Config) problems() []error {
	var out []error
	bad := func(name, format string, args ...any) {
		out = append(out, fmt.Errorf(Prefix+name+": "+format, args...))
	}
	c.checkAddresses(bad)
	c.checkNumbers(bad)
	c.checkRetry(bad)
	c.checkPromises(bad)
	return out
}

// transportProblems are what only one of the transports needs. They are looked
// for even when other variables are missing: the error names all.
func (c Config) transportProblems() []error {
	var out []error
	switch c.Transport {
	case "smtp":
		if c.SMTPAddr == "" {
			out = append(out, errors.New(Prefix+"SMTP_ADDR: must be set"))
		}
	case "resend":
		if c.ResendAPIKey == "" {
			out = append(out, errors.New(Prefix+"RESEND_API_KEY: must be set"))
		}
	default:
		out = append(out, fmt.Errorf(Prefix+"TRANSPORT: is %q, must be smtp or resend", c.Transport))
	}
	return out
}

var instance = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,60}[A-Za-z0-9])?$`)

type report func(name, format string, args ...any)

func (c Config) checkAddresses(bad report) {
	if _, err := url.Parse(c.DatabaseURL); err != nil {
		bad("DATABASE_URL", "is not a URL")
	}
	for _, u := range c.AMQPURLs {
		parsed, err := url.Parse(u)
		if err != nil || (parsed.Scheme != "amqp" && parsed.Scheme != "amqps") {
			bad("AMQP_URLS", "each must be amqp://… or amqps://…")
			break
		}
	}
	if u, err := url.Parse(c.ResendURL); err != nil || u.Host == "" ||
		(u.Scheme != "https" && !(u.Scheme == "http" && loopback(u.Hostname()))) {
		bad("RESEND_URL", "must be https://…; http is for loopback addresses only, the key would travel in the clear")
	}
	if u, err := url.Parse(c.ProviderLogURL); c.ProviderLogURL != "" &&
		(err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https")) {
		bad("PROVIDER_LOG_URL", "must be http://… or https://…")
	}
	if _, err := mail.ParseAddress(c.MailFrom); err != nil {
		bad("MAIL_FROM", "%q is not an address", c.MailFrom)
	}
	if u, err := url.Parse(c.UnsubscribeURL); c.UnsubscribeURL != "" && (err != nil || u.Host == "" || u.Scheme != "https") {
		bad("UNSUBSCRIBE_URL", "must be https://…")
	}
	if !instance.MatchString(c.Instance) {
		bad("INSTANCE", "%q must be letters, digits, dots, hyphens or underscores: it is part of the EHLO name", c.Instance)
	}
	if c.MailEventsTopic == c.KafkaTopic {
		bad("MAIL_EVENTS_TOPIC", "is %q, the topic that this service reads", c.MailEventsTopic)
	}
	if err := (delivery.Config{Events: c.MailEventsTopic}).ValidateEvents(); err != nil {
		bad("MAIL_EVENTS_TOPIC", "%q: %v", c.MailEventsTopic, err)
	}
	if c.SMTPUser != "" && c.SMTPPassword == "" {
		bad("SMTP_PASSWORD", "must be set when %sSMTP_USER is", Prefix)
	}
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || (ip != nil && ip.IsLoopback())
}

// ackWithin is how long a delivery may wait for its token: five minutes less than
// RabbitMQ's consumer_timeout as it comes (rabbitmq.com/docs/consumers), after
// which it closes the channel and gives every delivery of it out again.
const ackWithin = 25 * time.Minute

func (c Config) checkNumbers(bad report) {
	for name, n := range map[string]int{
		"POOL": int(c.Pool), "MARKETING_POOL": int(c.MarketingPool), "TICKET_CONSUMERS": c.TicketConsumers, "TICKET_PREFETCH": c.TicketPrefetch,
		"MARKETING_PREFETCH": c.MarketingPrefetch, "DELIVERY_LIMIT": c.DeliveryLimit, "SWEEPER_BATCH": c.SweeperBatch,
		"MAX_ATTEMPTS": c.MaxAttempts,
	} {
		if n < 1 {
			bad(name, "is %d, must be at least 1", n)
		}
	}
	if c.MarketingConsumers < 0 {
		bad("MARKETING_CONSUMERS", "is %d, must not be negative", c.MarketingConsumers)
	}
	if c.MarketingParallel < 0 {
		bad("MARKETING_PARALLEL", "is %d, must not be negative", c.MarketingParallel)
	}
	if !(c.SweeperRate > 0) { // NaN is neither above nor below
		bad("SWEEPER_RATE", "is %g, must be above zero", c.SweeperRate)
	}
	if !(c.MarketingRate >= 0) {
		bad("MARKETING_RATE", "is %g, must not be negative", c.MarketingRate)
	}
	if ahead := c.MarketingConsumers * c.MarketingPrefetch; c.MarketingRate > 0 && float64(ahead) > c.MarketingRate*ackWithin.Seconds() {
		bad("MARKETING_RATE", "is %g a second: %sMARKETING_CONSUMERS × %sMARKETING_PREFETCH = %d deliveries would wait for longer than %s, and RabbitMQ ends a channel that does not ack for 30 minutes; a smaller prefetch helps",
			c.MarketingRate, Prefix, Prefix, ahead, ackWithin)
	}
	for name, d := range map[string]time.Duration{
		"STATEMENT_TIMEOUT": c.StatementTimeout, "CONFIRM_TIMEOUT": c.ConfirmTimeout, "KAFKA_SESSION_TIMEOUT": c.KafkaSessionTimeout,
		"SEND_DEADLINE": c.SendDeadline, "LEASE": c.Lease, "SWEEPER_INTERVAL": c.SweeperInterval, "SWEEPER_GRACE": c.SweeperGrace,
		"DLQ_INTERVAL": c.DLQInterval, "STALE_AFTER": c.StaleAfter, "RETENTION": c.Retention, "DRAIN_TIMEOUT": c.DrainTimeout,
	} {
		if d <= 0 {
			bad(name, "is %s, must be above zero", d)
		}
	}
	for name, d := range map[string]time.Duration{
		"RECONCILER_INTERVAL": c.ReconcilerInterval, "KEY_LIFETIME": c.KeyLifetime,
		"SERVER_SESSION": c.ServerSession, "PROVIDER_PROCESSING": c.ProviderProcessing,
	} {
		if d <= 0 {
			bad(name, "is %s, must be above zero", d)
		}
	}
	if c.ResendList != "on" && c.ResendList != "off" {
		bad("RESEND_LIST", "is %q, must be on or off", c.ResendList)
	}
	if c.Reconciler != "on" && c.Reconciler != "off" {
		bad("RECONCILER", "is %q, must be on or off", c.Reconciler)
	}
	if c.LeaseMargin < 0 {
		bad("LEASE_MARGIN", "is %s, must not be negative", c.LeaseMargin)
	}
	if c.Sweeper != "on" && c.Sweeper != "off" {
		bad("SWEEPER", "is %q, must be on or off", c.Sweeper)
	}
}

func (c Config) checkRetry(bad report) {
	if len(c.RetryDelays) == 0 {
		bad("RETRY_DELAYS", "needs at least one delay")
	}
	for i, d := range c.RetryDelays {
		switch {
		case d < time.Millisecond || d%time.Millisecond != 0:
			bad("RETRY_DELAYS", "delay %s is not a whole number of milliseconds, the broker's resolution", d)
		case i > 0 && d < c.RetryDelays[i-1]:
			bad("RETRY_DELAYS", "delay %s is shorter than the one before it", d)
		}
	}
	for name, p := range map[string]delivery.Policy{"TICKET_POLICY": c.TicketPolicy, "MARKETING_POLICY": c.MarketingPolicy} {
		switch p {
		case delivery.Resend, delivery.Hold, delivery.SameKey:
		default:
			bad(name, "is %q, must be resend, hold or same-key", p)
		}
	}
}

// checkPromises refuses what would break a guarantee.
func (c Config) checkPromises(bad report) {
	if c.SendDeadline+c.LeaseMargin >= c.Lease {
		// TRAP-1-3: another worker would claim the row while this one sends.
		bad("LEASE", "is %s, must be above %sSEND_DEADLINE + %sLEASE_MARGIN = %s", c.Lease, Prefix, Prefix, c.SendDeadline+c.LeaseMargin)
	}
	if c.Transport == "resend" && c.KeyLifetime+c.Lease >= 24*time.Hour {
		// OB-09: Resend forgets a key after 24 h, and sends again.
		bad("KEY_LIFETIME", "is %s, with %sLEASE it must stay below the 24h that Resend keeps a key", c.KeyLifetime, Prefix)
	}
	if c.StaleAfter >= c.Retention {
		// TRAP-2-4: an event that is not stale could meet a purged dedupe row
		// and be sent again.
		bad("STALE_AFTER", "is %s, must be below %sRETENTION = %s", c.StaleAfter, Prefix, c.Retention)
	}
}

// Delivery is the row store's part.
func (c Config) Delivery() delivery.Config {
	return delivery.Config{
		Lease: c.Lease, RetryDelays: c.RetryDelays, MaxAttempts: c.MaxAttempts,
		Policies: map[contract.MailType]delivery.Policy{
			contract.TicketConfirmation: c.TicketPolicy,
			contract.Marketing:          c.MarketingPolicy,
		},
		Events: c.mailEvents(),
	}
}

// TellsMailEvents reports whether mail events are written and published.
func (c Config) TellsMailEvents() bool { return c.mailEvents() != "" }

func (c Config) mailEvents() string {
	if c.MailEventsTopic == "off" {
		return ""
	}
	return c.MailEventsTopic
}

// Describe prints one line per variable: name, value, default, meaning. Secrets
// are masked.
func Describe(w io.Writer, c Config) error { return envconfig.Describe(w, Prefix, c) }

// Unknown lists variables of the environment that start with [Prefix] and that
// nobody reads: most likely a typing error.
func Unknown() []string { return envconfig.Unknown[Config](Prefix, nil) }
