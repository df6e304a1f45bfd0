package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Config of a relay. Zero values take the default named at each field.
type Config struct {
	// DatabaseURL of the database with table outbox. The connection must be a
	// direct one, not through a transaction pooler: the lock lives in the
	// session (TRAP-2-9). Required.
	DatabaseURL string
	// Brokers are Kafka's bootstrap addresses. Required.
	Brokers []string
	// Instance names this process in Postgres, in Kafka and in logs.
	Instance string

	// LockID is the advisory lock that makes the relay the only one of its
	// database. Default 0x6f7574626f78 ("outbox").
	LockID int64
	// StandbyInterval is how often a relay without the lock tries to get it.
	// Default 1 s.
	StandbyInterval time.Duration
	// SessionTimeout is the silence after which the server ends the session
	// and frees the lock: a stopped relay stands in the way for this long.
	// Default 10 s, at least twice PingInterval.
	SessionTimeout time.Duration
	// PingInterval is how often the session speaks while it waits. Default 2 s.
	PingInterval time.Duration
	// QueryTimeout bounds each statement; after it the session counts as lost.
	// Default 5 s.
	QueryTimeout time.Duration

	// BatchSize is how many rows are read, produced and marked together.
	// Default 500.
	BatchSize int
	// PollInterval is how long an idle relay waits for the doorbell before it
	// looks by itself. Default 500 ms.
	PollInterval time.Duration
	// DeliveryTimeout is after how long an unacknowledged record is given up
	// and tried anew. It must exceed ProduceTimeout by far: given up too early,
	// a slow broker is made slower by republished events (TRAP-2-10).
	// Default 30 s.
	DeliveryTimeout time.Duration
	// ProduceTimeout is how long the broker may take over one request.
	// Default 10 s.
	ProduceTimeout time.Duration
	// MaxRejections is how often a record may fail by its own fault before it
	// is dead: skipped and alerted (A2-05). Default 10.
	MaxRejections int
	// BackoffUnit: after the n-th failure min(2^n, 60) units pass. Default 1 s.
	BackoffUnit time.Duration
	// Drain bounds the wait for acknowledgements of the last batch when the
	// relay is asked to stop. Default 10 s.
	Drain time.Duration
	// Retention is how long published rows are kept. Default 7 days, like the
	// broker's retention.
	Retention time.Duration

	// OnDead is told of each dead event, at least once; an error repeats the
	// call later. Default: an error line in the log.
	OnDead func(ctx context.Context, d Dead) error
	// Log, default slog.Default().
	Log *slog.Logger
	// KafkaOpts are added to the producer's options (TLS, SASL).
	KafkaOpts []kgo.Opt
}

// Dead is an event that the broker refused too often. It stays in the table.
type Dead struct {
	ID      int64
	EventID uuid.UUID
	Topic   string
	Key     string
	Type    string
	Err     string
}

// maxBackoff in units of [Config].BackoffUnit (A2-04).
const maxBackoff = 60

func (c Config) withDefaults() Config {
	setDefault(&c.LockID, 0x6f7574626f78)
	setDefault(&c.Instance, "relay")
	setDefault(&c.StandbyInterval, time.Second)
	setDefault(&c.SessionTimeout, 10*time.Second)
	setDefault(&c.PingInterval, 2*time.Second)
	setDefault(&c.QueryTimeout, 5*time.Second)
	setDefault(&c.BatchSize, 500)
	setDefault(&c.PollInterval, 500*time.Millisecond)
	setDefault(&c.DeliveryTimeout, 30*time.Second)
	setDefault(&c.ProduceTimeout, 10*time.Second)
	setDefault(&c.MaxRejections, 10)
	setDefault(&c.BackoffUnit, time.Second)
	setDefault(&c.Drain, 10*time.Second)
	setDefault(&c.Retention, 7*24*time.Hour)
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if c.OnDead == nil {
		c.OnDead = func(ctx context.Context, d Dead) error {
			c.Log.ErrorContext(ctx, "outbox event is dead", "alert", "dead_outbox", "event_id", d.EventID,
				"key", d.Key, "event_type", d.Type, "err", d.Err)
			return nil
		}
	}
	return c
}

func setDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

func (c Config) validate() error {
	var errs []error
	if c.DatabaseURL == "" {
		errs = append(errs, errors.New("DatabaseURL is empty"))
	}
	if len(c.Brokers) == 0 {
		errs = append(errs, errors.New("no Brokers"))
	}
	if c.SessionTimeout < 2*max(c.PingInterval, c.PollInterval, c.StandbyInterval) {
		errs = append(errs, fmt.Errorf("SessionTimeout %v must be at least twice PingInterval %v, PollInterval %v and StandbyInterval %v",
			c.SessionTimeout, c.PingInterval, c.PollInterval, c.StandbyInterval))
	}
	if c.DeliveryTimeout <= c.ProduceTimeout {
		errs = append(errs, fmt.Errorf("DeliveryTimeout %v must exceed ProduceTimeout %v",
			c.DeliveryTimeout, c.ProduceTimeout))
	}
	if c.BatchSize < 1 || c.BatchSize > maxBatch {
		errs = append(errs, fmt.Errorf("BatchSize %d is not within 1…%d", c.BatchSize, maxBatch))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("outbox relay: %w", err)
	}
	return nil
}

// maxBatch keeps a batch within the producer's buffer, so that producing never
// blocks.
const maxBatch = 5000
