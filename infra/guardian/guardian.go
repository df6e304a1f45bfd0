// Package guardian makes sure that nothing which was started for a run outlives
// it, whatever happens to the process that started it.
//
// A guardian is a second process of the same binary. It starts every server on
// behalf of its owner (the harness), so all of them are its own descendants,
// and it is their subreaper (PR_SET_CHILD_SUBREAPER), so a daemon that detaches
// itself, such as epmd, becomes its child instead of leaving. The owner holds
// the writing end of a pipe. When the pipe ends, because the owner called
// [Guardian.Stop], returned, panicked or was killed with SIGKILL, the guardian
//
//  1. asks those processes to stop that named a StopSignal: Postgres gives its
//     System V shared memory back only when it stops by itself,
//  2. kills all others that it started, and the processes that were handed over
//     with [Guardian.Guard], with their descendants, each recognised by pid and
//     start time,
//  3. waits up to two seconds for those of 1, and kills every descendant it has,
//     until there is none,
//  4. removes the directories that it made, and exits.
//
// There is no instant at which a process exists and is not covered: it is forked
// by the guardian itself. Should the guardian be killed, its direct children die
// with it (PR_SET_PDEATHSIG). The one gap is between the moment when an owner
// forks a process of its own and the call of Guard.
//
// The guardian lives in a session of its own and lets SIGINT, SIGTERM, SIGHUP
// and SIGQUIT pass, so Ctrl-C in a terminal reaches the owner alone.
//
// A binary that uses this package calls [MaybeRun] first thing in main, or in
// TestMain. Linux only. The package must not import anything of mailproof.
package guardian

import (
	"errors"
	"os"
	"syscall"
	"time"
)

// marker tells a process that it was started to be a guardian.
const marker = "MAILPROOF_GUARDIAN"

// File descriptors of the guardian's ends of the two pipes.
const (
	requestFD = 3
	replyFD   = 4
)

const (
	// graceful is how long a process with a StopSignal may take to end.
	graceful = 2 * time.Second
	// bound is after how long the guardian gives up on processes that do not
	// die of SIGKILL (in the kernel's uninterruptible sleep).
	bound = 10 * time.Second
	// poll is the pause between two looks at /proc; the kernel offers no event
	// for "this process of somebody else is gone" that covers grandchildren.
	poll = 5 * time.Millisecond
)

// ErrGone is returned once the guardian has ended.
var ErrGone = errors.New("the guardian process has ended")

// MaybeRun turns this process into a guardian, and never returns, if it was
// started as one. It must be called before anything else in main or TestMain:
// what runs before it runs in the guardian too.
func MaybeRun() {
	if os.Getenv(marker) == "" {
		return
	}
	os.Exit(serve())
}

// Command is a process to start. Nothing is inherited: the environment is Env
// and nothing else, standard input is empty.
type Command struct {
	Path string   `json:"path"`           // absolute
	Args []string `json:"args,omitempty"` // without the name of the program
	Env  []string `json:"env,omitempty"`
	Dir  string   `json:"dir,omitempty"` // "" is /
	// Stdout and Stderr are files that are appended to, made when missing; ""
	// discards. When they are equal both go to the same open file.
	Stdout string `json:"stdout,omitempty"`
	Stderr string `json:"stderr,omitempty"`
	// User to run as; nil is the user of the owner. Needs root.
	User *User `json:"user,omitempty"`
	// StopSignal asks the process to end by itself at the end of the run; 0
	// means that SIGKILL will do.
	StopSignal syscall.Signal `json:"stop_signal,omitempty"`
}

// User is a user and its primary group.
type User struct {
	UID uint32 `json:"uid"`
	GID uint32 `json:"gid"`
}

// The protocol: JSON values over two pipes. Every request gets one reply with
// its id, not necessarily in order; a process that ends is announced with the
// id of the request that started it.

type op string

const (
	opHello   op = "hello"
	opTempDir op = "tempdir"
	opLaunch  op = "launch"
	opSignal  op = "signal"
	opGuard   op = "guard"
	opStop    op = "stop"
)

type request struct {
	ID      uint64         `json:"id"`
	Op      op             `json:"op"`
	Command *Command       `json:"command,omitempty"` // launch
	Pattern string         `json:"pattern,omitempty"` // tempdir
	Process uint64         `json:"process,omitempty"` // signal: id of the launch
	Signal  syscall.Signal `json:"signal,omitempty"`  // signal
	Tree    bool           `json:"tree,omitempty"`    // signal: descendants too
	PID     int            `json:"pid,omitempty"`     // guard
}

type reply struct {
	ID    uint64 `json:"id"`
	Error string `json:"error,omitempty"`
	PID   int    `json:"pid,omitempty"`  // launch
	Path  string `json:"path,omitempty"` // tempdir
	// Exited announces the end of the process that request ID launched.
	Exited bool `json:"exited,omitempty"`
	Status int  `json:"status,omitempty"` // as of wait(2)
}
