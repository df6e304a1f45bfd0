package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strings"
	"time"

	"mailproof/system/envconfig"
)

// prefix starts the name of each variable.
const prefix = "BOOKINGD_"

// config of one bookingd process, from the environment alone. Durations are
// written as Go writes them: 200ms, 10s, 1m.
type config struct {
	DatabaseURL      string        `env:"DATABASE_URL,required,notEmpty" secret:"url" doc:"Postgres with the bookings and the outbox"`
	Pool             int32         `env:"POOL" envDefault:"16" doc:"database connections at most, besides the relay's"`
	StatementTimeout time.Duration `env:"STATEMENT_TIMEOUT" envDefault:"5s" doc:"limit of one database statement"`
	RequestTimeout   time.Duration `env:"REQUEST_TIMEOUT" envDefault:"10s" doc:"limit of one operation, whatever the client does"`

	HTTPAddr string        `env:"HTTP_ADDR" envDefault:"127.0.0.1:0" doc:"bookings, health and metrics"`
	Instance string        `env:"INSTANCE" envDefault:"1" doc:"name of this process in logs, Postgres and Kafka"`
	Drain    time.Duration `env:"DRAIN" envDefault:"10s" doc:"after SIGTERM, time for requests and, after them, for the relay's last batch"`
	LogLevel slog.Level    `env:"LOG_LEVEL" envDefault:"INFO" doc:"DEBUG, INFO, WARN or ERROR"`

	KafkaTopic    string        `env:"KAFKA_TOPIC" envDefault:"booking.events" doc:"topic of the events"`
	DoorbellEvery time.Duration `env:"DOORBELL_EVERY" envDefault:"10ms" doc:"the relay is rung at most this often, outside every transaction"`

	Relay                string        `env:"RELAY" envDefault:"on" doc:"on or off; of all processes of a database that say on, one publishes and the others stand by"`
	KafkaBrokers         []string      `env:"KAFKA_BROKERS" doc:"seed brokers, separated by commas; needed where the relay is on"`
	RelayDatabaseURL     string        `env:"RELAY_DATABASE_URL" secret:"url" doc:"direct database URL for the relay where DATABASE_URL is a pooler's (TRAP-2-9); default DATABASE_URL"`
	RelayBatch           int           `env:"RELAY_BATCH" envDefault:"500" doc:"events read, produced and marked together"`
	RelayPoll            time.Duration `env:"RELAY_POLL" envDefault:"500ms" doc:"how often an idle relay looks without being rung"`
	RelayStandby         time.Duration `env:"RELAY_STANDBY" envDefault:"1s" doc:"how often a standing-by relay tries to lead"`
	RelaySessionTimeout  time.Duration `env:"RELAY_SESSION_TIMEOUT" envDefault:"10s" doc:"a stopped or cut-off relay loses its lock after this"`
	RelayDeliveryTimeout time.Duration `env:"RELAY_DELIVERY_TIMEOUT" envDefault:"30s" doc:"an event that is not acknowledged within this is tried anew; above RELAY_PRODUCE_TIMEOUT"`
	RelayProduceTimeout  time.Duration `env:"RELAY_PRODUCE_TIMEOUT" envDefault:"10s" doc:"time that the broker has for one request; well above its p99 (TRAP-2-10)"`
	RelayMaxRejections   int           `env:"RELAY_MAX_REJECTIONS" envDefault:"10" doc:"an event refused this often for its own sake is dead: skipped and alerted; an unreachable broker never counts"`
	MailEventsTopic      string        `env:"MAIL_EVENTS_TOPIC" envDefault:"mail.events" doc:"topic on which the mail service tells what became of each mail; off: nobody listens, and mails stay pending"`
	MailEventsGroup      string        `env:"MAIL_EVENTS_GROUP" envDefault:"booking" doc:"consumer group for it"`
	MailEventsSession    time.Duration `env:"MAIL_EVENTS_SESSION_TIMEOUT" envDefault:"45s" doc:"a process that is silent for longer loses its partitions of it"`

	OutboxRetention time.Duration `env:"OUTBOX_RETENTION" envDefault:"168h" doc:"published events are kept this long"`
}

// load reads the environment, or vars if not nil. The error names every
// variable that is missing, wrong or unknown.
func load(vars map[string]string) (config, error) {
	c, problems := envconfig.Read[config](prefix, vars)
	for _, name := range envconfig.Unknown[config](prefix, vars) {
		problems = append(problems, fmt.Errorf("%s: no such variable", name))
	}
	problems = append(problems, c.problems(problems)...)
	if len(problems) > 0 {
		return c, wrong(problems)
	}
	if c.RelayDatabaseURL == "" {
		c.RelayDatabaseURL = c.DatabaseURL
	}
	return c, nil
}

// loadDatabaseURL is all that migrating needs.
func loadDatabaseURL(vars map[string]string) (string, error) {
	c, problems := envconfig.Read[struct {
		URL string `env:"DATABASE_URL,required,notEmpty"`
	}](prefix, vars)
	if len(problems) > 0 {
		return "", wrong(problems)
	}
	return c.URL, nil
}

func wrong(problems []error) error {
	return fmt.Errorf("configuration (\"bookingd config\" explains every variable): %w", errors.Join(problems...))
}

// problems checks values and their relations, but not those that could not be
// read, which are told already.
func (c config) problems(told []error) []error {
	var out []error
	bad := func(name, format string, args ...any) {
		for _, t := range told {
			if strings.HasPrefix(t.Error(), prefix+name+":") {
				return
			}
		}
		out = append(out, fmt.Errorf(prefix+name+": "+format, args...))
	}
	for _, v := range []struct{ name, url string }{{"DATABASE_URL", c.DatabaseURL}, {"RELAY_DATABASE_URL", c.RelayDatabaseURL}} {
		if v.url == "" {
			continue
		}
		if u, err := url.Parse(v.url); err != nil || !strings.HasPrefix(u.Scheme, "postgres") {
			bad(v.name, "must be postgres://…") // not quoted: it holds a password
		}
	}
	if _, _, err := net.SplitHostPort(c.HTTPAddr); err != nil {
		bad("HTTP_ADDR", "%q is not host:port", c.HTTPAddr)
	}
	if c.KafkaTopic == "" {
		bad("KAFKA_TOPIC", "must not be empty")
	}
	switch {
	case c.Relay != "on" && c.Relay != "off":
		bad("RELAY", "is %q, must be on or off", c.Relay)
	case c.Relay == "on" && len(c.KafkaBrokers) == 0:
		bad("KAFKA_BROKERS", "must be set where the relay is on")
	}
	if c.MailEventsTopic == "" || c.MailEventsTopic == c.KafkaTopic {
		bad("MAIL_EVENTS_TOPIC", "is %q, must be another topic than KAFKA_TOPIC, or off", c.MailEventsTopic)
	}
	if c.listens() && len(c.KafkaBrokers) == 0 && c.Relay == "off" {
		bad("MAIL_EVENTS_TOPIC", "is %q: without KAFKA_BROKERS it must be off", c.MailEventsTopic)
	}
	if c.MailEventsGroup == "" {
		bad("MAIL_EVENTS_GROUP", "must not be empty")
	}
	if c.Pool < 1 {
		bad("POOL", "is %d, must be at least 1", c.Pool)
	}
	for _, v := range []struct {
		name string
		d    time.Duration
	}{
		{"STATEMENT_TIMEOUT", c.StatementTimeout},
		{"REQUEST_TIMEOUT", c.RequestTimeout},
		{"DRAIN", c.Drain},
		{"DOORBELL_EVERY", c.DoorbellEvery},
		{"RELAY_POLL", c.RelayPoll},
		{"RELAY_STANDBY", c.RelayStandby},
		{"RELAY_SESSION_TIMEOUT", c.RelaySessionTimeout},
		{"RELAY_DELIVERY_TIMEOUT", c.RelayDeliveryTimeout},
		{"RELAY_PRODUCE_TIMEOUT", c.RelayProduceTimeout},
		{"OUTBOX_RETENTION", c.OutboxRetention},
	} {
		if v.d <= 0 {
			bad(v.name, "is %v, must be above 0", v.d)
		}
	}
	return out
}

// listens reports whether mail events are consumed.
func (c config) listens() bool { return c.MailEventsTopic != "off" }
