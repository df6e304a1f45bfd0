// Package target is the system under test as the harness sees it: processes
// that can be killed, operations that clients make, and what can be read of the
// state they leave. [Pipeline] is mailproof's own system; another system, in
// any language, takes its place by implementing [Target].
//
// Only this package may import system/contract.
package target

import (
	"context"

	"mailproof/history"
)

// Target is a running system under test.
type Target interface {
	Name() string
	// Processes of the system, each of which can be killed and paused.
	Processes() []Process
	// Confirm books and confirms: one mail to recipient must follow. It is
	// repeated by the caller after an unknown outcome, with the same booking.
	Confirm(ctx context.Context, booking, recipient string) history.OpOutcome
	Cancel(ctx context.Context, booking string) history.OpOutcome
	// Key is the dedupe key that the mail of a booking's generation carries.
	Key(booking string, generation int) string
	// Pending says for each mail that is not settled yet what it waits for.
	Pending(ctx context.Context) (map[string]string, error)
	// Final reads all that was left. It may empty queues: the run is over.
	Final(ctx context.Context) (history.Final, error)
	// Databases whose write-ahead log is evidence: name → superuser URL, with
	// the tables to follow.
	Databases() []Database
	// Stop ends the processes and removes what Start made.
	Stop(ctx context.Context) error
}

// Database is one database of the system and the tables whose changes count.
type Database struct {
	Name   string
	URL    string
	Tables []string // schema-qualified
}

// Process is one process of the system under test.
type Process interface {
	Name() string
	PID() int
	Running() bool
	Kill(ctx context.Context) error   // SIGKILL, returns when it is gone
	Pause(ctx context.Context) error  // SIGSTOP
	Resume(ctx context.Context) error // SIGCONT
	// Restart starts it again with the same configuration and returns when it
	// says that it is ready.
	Restart(ctx context.Context) error
	Log() string
}
