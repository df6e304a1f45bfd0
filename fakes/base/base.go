// Package base is what a fake server has whatever protocol it speaks: rules,
// held tries, the ledger, and a socket that refuses and listens again.
//
// It imports nothing of this module but the other packages of fakes/.
package base

import (
	"context"
	"sync"
	"time"

	"mailproof/fakes/ledger"
	"mailproof/fakes/script"
	"mailproof/fakes/socket"
)

// Fake is embedded in a fake server; its methods are safe for concurrent use.
type Fake struct {
	clock  func() int64
	engine *script.Engine
	holds  *script.Holds
	ledger *ledger.Ledger
	gate   *socket.Gate
	disk   *Disk
}

// New returns the common part of a server that listens. clock gives monotonic
// nanoseconds.
func New(clock func() int64, e *script.Engine, h *script.Holds, l *ledger.Ledger, g *socket.Gate, d *Disk) *Fake {
	return &Fake{clock, e, h, l, g, d}
}

// Addr is the host and port that clients connect to.
func (f *Fake) Addr() string { return f.gate.Addr() }

// Seed is the number that all draws come from.
func (f *Fake) Seed() uint64 { return f.engine.Seed() }

// Now is the server's clock, as the ledger's times have it.
func (f *Fake) Now() int64 { return f.clock() }

// AddRule adds a rule behind the ones that are there and returns its id. It
// strikes from the next event on, in tries that run too.
func (f *Fake) AddRule(r script.Rule) (string, error) { return f.engine.Add(r) }

// RemoveRule takes a rule out; false when there is none of that id. Tries that
// it holds stay held.
func (f *Fake) RemoveRule(id string) bool { return f.engine.Remove(id) }

// ClearRules takes all rules out. Held tries stay held.
func (f *Fake) ClearRules() { f.engine.Clear() }

// Rules lists the rules and how often each struck.
func (f *Fake) Rules() []script.State { return f.engine.Rules() }

// Decisions lists the latest decisions (10,000 at least) after the n-th.
func (f *Fake) Decisions(n int64) []script.Decision { return f.engine.Decisions(n) }

// Advance moves the clock of whatever takes time: the rules' time windows, and
// what the server itself measures by it. The ledger's times do not move.
func (f *Fake) Advance(d time.Duration) { f.engine.Advance(d) }

// Holds lists the tries that wait, oldest first.
func (f *Fake) Holds() []script.Hold { return f.holds.List() }

// AwaitHold returns the oldest held try that filter accepts (nil accepts all)
// as soon as there is one, or ctx's error.
func (f *Fake) AwaitHold(ctx context.Context, filter func(script.Hold) bool) (script.Hold, error) {
	return f.holds.Await(ctx, filter)
}

// Release lets one held try go on; false when none of that id waits.
func (f *Fake) Release(id int64) bool { return f.holds.Release(id) }

// ReleaseAll lets all held tries go on and returns how many that were.
func (f *Fake) ReleaseAll() int { return f.holds.ReleaseAll() }

// Ledger returns all rows in the order in which their tries began. Those that
// still run have Seq 0.
func (f *Fake) Ledger() []ledger.Attempt {
	rows, err := f.ledger.Snapshot()
	f.disk.Failed(err)
	return rows
}

// LedgerSince returns the finished rows after the one whose Seq is n, in the
// order in which they finished.
func (f *Fake) LedgerSince(n int64) []ledger.Attempt {
	rows, err := f.ledger.Since(n)
	f.disk.Failed(err)
	return rows
}

// Subscribe sends each row as it finishes, from now on, until ctx ends; then
// the channel is closed. A slow reader slows nobody and misses nothing.
func (f *Fake) Subscribe(ctx context.Context) <-chan ledger.Attempt { return f.ledger.Subscribe(ctx) }

// Verdict says what became of one key (or Message-ID, for mails without one).
func (f *Fake) Verdict(key string) ledger.Verdict {
	v, err := f.ledger.Verdict(key)
	f.disk.Failed(err)
	return v
}

// Verdicts says it of all keys whose mails were read whole at least once.
func (f *Fake) Verdicts() []ledger.Verdict {
	v, err := f.ledger.Verdicts()
	f.disk.Failed(err)
	return v
}

// Totals counts over the whole life of the server.
func (f *Fake) Totals() ledger.Totals { return f.ledger.Totals() }

// Sessions lists the latest connections that are over, also those that ended
// before any mail.
func (f *Fake) Sessions() []ledger.Session { return f.ledger.Sessions() }

// Refuse closes the listening socket: new connections are refused by the
// kernel. Those that exist go on.
func (f *Fake) Refuse() error { return f.gate.Shut() }

// Listen opens the listening socket again, on the same port.
func (f *Fake) Listen() error { return f.gate.Reopen() }

// Disk keeps the first error of a file, for the server's Close to return. A
// disk that forgets must not go unnoticed, and a test that reads a ledger should
// not have to ask each time. The zero value has none.
type Disk struct {
	mu  sync.Mutex
	err error
}

// Failed tells of an error; nil is none.
func (d *Disk) Failed(err error) {
	if err == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err == nil {
		d.err = err
	}
}

// Err is the first error, or nil.
func (d *Disk) Err() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.err
}

// Default sets what an option is when it was left out.
func Default[T comparable](option *T, value T) {
	var zero T
	if *option == zero {
		*option = value
	}
}

// TB is the part of *testing.T that a fake needs which starts for one test.
type TB interface {
	Helper()
	Cleanup(func())
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// ForTest closes a server that was just started when the test ends, or fails
// the test with what its start failed with.
func ForTest[S interface{ Close() error }](t TB, s S, err error) S {
	t.Helper()
	if err != nil {
		t.Fatalf("starting the fake: %v", err)
		return s
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("closing the fake: %v", err)
		}
	})
	return s
}
