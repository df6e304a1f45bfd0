package outbox

import (
	"context"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// channel that the relay listens on.
const channel = "outbox_doorbell"

// ringSQL is run outside every business transaction: a NOTIFY inside one takes
// a lock over the whole database at its commit, which ends group commit.
const ringSQL = `NOTIFY ` + channel

// Execer is the part of a pool that ringing needs.
type Execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// Doorbell tells the relay, in whichever process it runs, that there is
// something to publish. It is a hint: a lost ring costs one poll interval.
type Doorbell struct {
	pool   Execer
	every  time.Duration
	log    *slog.Logger
	wanted chan struct{}
}

// ringTimeout bounds one NOTIFY.
const ringTimeout = 2 * time.Second

// NewDoorbell makes a doorbell that rings at most once per every, however often
// it is pressed; [Doorbell.Run] does the ringing.
func NewDoorbell(pool Execer, every time.Duration, log *slog.Logger) *Doorbell {
	return &Doorbell{pool: pool, every: every, log: log, wanted: make(chan struct{}, 1)}
}

// Press asks for a ring and returns at once. Call it after the commit.
func (d *Doorbell) Press() {
	select {
	case d.wanted <- struct{}{}:
	default: // one is asked for already, and it comes after this commit
	}
}

// Run rings until ctx ends. A ring that fails is only logged: polling is the
// floor.
func (d *Doorbell) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-d.wanted:
		}
		if err := d.ring(ctx); err != nil && ctx.Err() == nil {
			d.log.Warn("outbox doorbell not rung, the relay will poll", "err", err)
		}
		if !sleep(ctx, d.every) {
			return
		}
	}
}

func (d *Doorbell) ring(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, ringTimeout)
	defer cancel()
	_, err := d.pool.Exec(ctx, ringSQL)
	return err
}

// sleep waits for d and reports whether ctx is still alive.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
