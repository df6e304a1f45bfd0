// Package mail hands one rendered mail to a server and says exactly what became
// of it.
//
// The outcome of a try is one of five, told by the error's type:
//
//   - accepted: nil error and the server's id. A QUIT or RSET that fails after
//     the 250 is still accepted.
//   - [TransientError]: definitely not accepted, trying again makes sense.
//   - [PermanentError]: definitely not accepted, trying again does not.
//   - [AmbiguousError]: the final dot (the whole request body) may have been
//     read and no whole reply came back. Only the server knows.
//   - [LaneError]: the server refuses us, not the mail (greeting, EHLO,
//     STARTTLS, AUTH): the lane pauses, the mail is untouched.
//
// Package mail imports nothing of the system but contract.
package mail

import (
	"context"
	"fmt"
	"time"
)

// Message is a mail ready to be handed over. Bytes never change over the tries
// of one key.
type Message struct {
	From           string
	To             string
	IdempotencyKey string // the dedupe key, for a provider that knows keys
	Bytes          []byte // RFC 5322, CRLF, with a stable Message-ID
}

// EmailSender hands mails to one server (M6-09).
type EmailSender interface {
	// Send tries once. beforeCommit is called right before the byte that makes
	// the mail the server's (the final dot, the last body byte); when it
	// returns an error the connection is closed without sending that byte and
	// Send returns a [TransientError] wrapping it: nothing was sent. It may be
	// nil. The sender looks at its own deadline once more after it.
	Send(ctx context.Context, m Message, beforeCommit func() error) (providerID string, err error)
	// Close ends kept connections.
	Close() error
}

// Stage is how far a try got.
type Stage string

// The stages of an SMTP session, and of an HTTP request.
const (
	StageRender   Stage = "render" // before any server was asked
	StageConnect  Stage = "connect"
	StageGreeting Stage = "greeting"
	StageEHLO     Stage = "ehlo"
	StageSTARTTLS Stage = "starttls"
	StageAuth     Stage = "auth"
	StageMail     Stage = "mail"
	StageRcpt     Stage = "rcpt"
	StageData     Stage = "data"
	StageBody     Stage = "body"
	StageDot      Stage = "dot"
	StageRequest  Stage = "request"
	StageResponse Stage = "response"
)

// Failure is what every error of Send carries.
type Failure struct {
	Stage    Stage
	Code     int    // reply code, 0 when there was no reply
	Enhanced string // "4.7.1", or ""
	Err      error
	// RetryAfter as the server asked for, 0 if it did not. Free is set when
	// the try should cost no attempt (429).
	RetryAfter time.Duration
	Free       bool
}

func (f Failure) describe(class string) string {
	if f.Code != 0 {
		return fmt.Sprintf("%s at %s: %d %s: %v", class, f.Stage, f.Code, f.Enhanced, f.Err)
	}
	return fmt.Sprintf("%s at %s: %v", class, f.Stage, f.Err)
}

// TransientError: not accepted, try again later.
type TransientError struct{ Failure }

func (e *TransientError) Error() string { return e.describe("transient") }
func (e *TransientError) Unwrap() error { return e.Err }

// PermanentError: not accepted, and never will be.
type PermanentError struct{ Failure }

func (e *PermanentError) Error() string { return e.describe("permanent") }
func (e *PermanentError) Unwrap() error { return e.Err }

// AmbiguousError: accepted or not, nobody on this side knows.
type AmbiguousError struct{ Failure }

func (e *AmbiguousError) Error() string { return e.describe("ambiguous") }
func (e *AmbiguousError) Unwrap() error { return e.Err }

// LaneError: the server refuses this client, not this mail.
type LaneError struct{ Failure }

func (e *LaneError) Error() string { return e.describe("lane refused") }
func (e *LaneError) Unwrap() error { return e.Err }
