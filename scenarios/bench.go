package scenarios

import (
	"context"
	"math/rand/v2"

	"mailproof/faults"
	"mailproof/faults/pgproxy"
	"mailproof/history"
	"mailproof/infra"
	"mailproof/target"
	"mailproof/verify"
)

// Lab makes the parts of one cell: databases, a virtual host, a topic, a fake
// mail server and a running system under test, all of the cell's own.
type Lab interface {
	// Open starts the parts. Whatever happens in the cell (processes, attempts)
	// is told to record from then on. On an error nothing is left running.
	Open(ctx context.Context, o Order) (*Bench, error)
	Versions() infra.Versions
}

// Order is what a cell asks of a [Lab].
type Order struct {
	Scenario string
	Cell     Cell
	System   System
	Seed     uint64
	Plan     Plan
	Dir      string // the cell's folder: logs go here
	Record   func(history.Record)
}

// Bench is one cell's parts, as phases and faults see them.
type Bench struct {
	Order
	Target target.Target
	Parts  Parts // what faults act on

	// Unrest says what beside the target's own pending mails is still moving
	// or waiting: records not yet read, messages in queues. May be nil.
	Unrest func(ctx context.Context) (map[string]string, error)
	// Attempts is how many tries the far side has seen, a sign of life.
	Attempts func() int
	// Stored is how many mails the far side has kept so far. May be nil.
	Stored func() int
	// Find adds what a fault found that no history shows, by verdict, invariant,
	// key and text. Not safe for concurrent use.
	Find func(v verify.Verdict, invariant, key, text string)
	// Evidence ends the collectors and returns what they hold that has not
	// been recorded yet: the far side's ledger, the write-ahead log.
	Evidence func(ctx context.Context) ([]history.Record, error)
	// Counted is how much the collectors themselves say that they took, once
	// Evidence has ended them: [history.Final.Counted]. May be nil.
	Counted func() map[string]int64
	// Mend makes the shared parts whole again, whatever was done to them. May be
	// nil.
	Mend func(ctx context.Context) error
	// Unready says which processes of the target are not ready, and why. May be
	// nil.
	Unready func() map[string]string
	// Close stops everything that Open started.
	Close func(ctx context.Context) error
}

// Rand is the stream of random numbers for one purpose of this cell.
func (b *Bench) Rand(purpose string) *rand.Rand { return rng(b.Seed, b.Scenario, purpose) }

// Parts are what faults act on beside the target's processes.
type Parts struct {
	Mail    faults.WatchedMailServer
	Brokers []string // Kafka
	Topic   string   // the event topic
	Group   string   // of the bridge that reads it
	Stack   infra.Stack
	Vhost   string // of the cell's queues
	// Database is the proxy between the system and Postgres; nil if there is none.
	Database *pgproxy.Proxy
}

// Process is the target's process of that name; nil when it has none.
func (b *Bench) Process(name string) target.Process {
	for _, p := range b.Target.Processes() {
		if p.Name() == name {
			return p
		}
	}
	return nil
}
