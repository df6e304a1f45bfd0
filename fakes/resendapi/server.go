// Package resendapi is a server that speaks the HTTP API of Resend and
// misbehaves on purpose: it does the work and loses the answer, answers 200
// without an id, says 500 after and 503 before the work, forgets an idempotency
// key, and waits at any point of a request until it is told to go on. Its
// ledger says what really happened, which no client can know.
//
//	srv := resendapi.NewServer(t, resendapi.On(resendapi.StageStored, resendapi.Drop).First(1))
//	client.BaseURL = srv.URL + "/" // any Resend SDK
//	… send …
//	srv.Verdict("ticket:42").Copies
//
// Guarantees:
//
//   - One row of the ledger per request and recipient: a request that the
//     client's own transport repeats is a row of its own.
//   - Two requests with one key, however close together, keep one mail as long
//     as the key lives, unless a rule expires it; then the rows say so.
//   - A mail is kept before its answer is written, at most once per request.
//     Whoever has read an answer finds it in the ledger as written.
//   - Nothing that a client sends makes the server grow without bound: keys,
//     entries and contents of mails stand in temporary files.
//   - Webhooks are sent to loopback addresses only, unless an option says
//     otherwise.
//
// It imports nothing of this module but the other packages of fakes/.
package resendapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"sync"
	"time"

	"mailproof/fakes/base"
	"mailproof/fakes/control"
	"mailproof/fakes/ledger"
	"mailproof/fakes/script"
	"mailproof/fakes/socket"
)

// The words of rules and ledger, under this package's name.
type (
	Rule      = script.Rule
	Builder   = script.Builder
	Match     = script.Match
	Action    = script.Action
	Range     = script.Range
	Stage     = script.Stage
	Hold      = script.Hold
	Decision  = script.Decision
	RuleState = script.State
	Attempt   = ledger.Attempt
	Verdict   = ledger.Verdict
)

// The actions of package script, under this package's name.
const (
	Accept            = script.Accept
	Reply             = script.Reply
	Drop              = script.Drop
	Reset             = script.Reset
	Hang              = script.Hang
	HoldUntilReleased = script.HoldUntilReleased
	Delay             = script.Delay
	Drip              = script.Drip
	Cut               = script.Cut
	Garbage           = script.Garbage
	Rate              = script.Rate
	Duplicate         = script.Duplicate
	Reorder           = script.Reorder
)

// Access is what an API key may do.
type Access string

// The kinds of API keys.
const (
	FullAccess    Access = "full"
	SendingAccess Access = "sending"   // only POST /emails and /emails/batch
	Inactive      Access = "inactive"  // 403 restricted_api_key
	Suspended     Access = "suspended" // 403 suspended_api_key
	NoScopes      Access = "no-scopes" // 403 invalid_permission
)

// Compare says when two requests with one key are the same.
type Compare string

// Resend does not document how it compares. A client that passes under
// CompareBytes passes under both.
const (
	CompareBytes     Compare = "bytes"
	CompareCanonical Compare = "canonical" // by the meaning of the JSON
)

// Scope says what an idempotency key is unique within.
type Scope string

// Resend's own words name the HTTP method and the endpoint.
const (
	ScopeEndpoint   Scope = "endpoint"
	ScopeCredential Scope = "credential" // and the API key
)

// Idempotency are the switches of what Resend does with idempotency keys and
// does not document, each with its default.
type Idempotency struct {
	// Lifetime of a key from its answer on; default 24 hours, as documented.
	// At exactly that age it is over.
	Lifetime time.Duration
	// Compare is CompareBytes by default.
	Compare Compare
	// Scope is ScopeEndpoint by default.
	Scope Scope
	// ValidationReservesKey makes a refused request (400, 422, 403) keep its
	// key, so that the same request gets the same refusal and a corrected one
	// 409. Default: a refusal leaves the key free.
	ValidationReservesKey bool
	// CompareFirst answers a differing payload with invalid_idempotent_request
	// even while the first request runs. Default: concurrent_idempotent_requests
	// whatever the payload.
	CompareFirst bool
}

// Options of a server. The zero value accepts any API key and any sender on a
// free port of the loopback interface, without rate limit and quota.
type Options struct {
	// Addr to listen on; default "127.0.0.1:0". The control API and the page
	// are below /_control/.
	Addr string
	// ControlAddr serves them on an address of their own too, which rules of
	// stage connect and a refused listener do not reach; "" means none.
	ControlAddr string
	// Seed of every draw, and of the ids.
	Seed  uint64
	Rules []Rule
	// NoMagic switches off magic addresses (see script.ParseMagic).
	NoMagic bool
	// Clock gives monotonic nanoseconds for the ledger; default
	// CLOCK_MONOTONIC_RAW.
	Clock func() int64

	// APIKeys that are known; nil accepts any.
	APIKeys map[string]Access
	// Domains that are verified; nil accepts any sender.
	Domains []string
	// TestingAddress is the only one that mails from resend.dev may go to,
	// test addresses aside; "" means any.
	TestingAddress string
	// AllowNoUserAgent lets requests without a User-Agent in; Resend refuses
	// them with 403.
	AllowNoUserAgent bool
	// AllowExampleDomains lets mails to example.com, test.com and their like
	// in; Resend refuses them with 422.
	AllowExampleDomains bool
	// RateLimit in requests per second and API key; 0 means none. Resend's own
	// default is 2 (newer pages: 5).
	RateLimit int
	// DailyQuota and MonthlyQuota in mails, each recipient counting; 0 means
	// none. Resend's free plan has 100 and 3,000.
	DailyQuota, MonthlyQuota int
	Idempotency              Idempotency
	// KeyHeader is a header of the mail whose value stands in the ledger as
	// the key when the request has no Idempotency-Key; default "X-Dedupe-Key".
	KeyHeader string

	// DeliverAfter is how long after it was sent a mail counts as delivered,
	// or meets whatever is its fate; default 0.
	DeliverAfter time.Duration
	// RemoteWebhooks lets webhooks leave this machine.
	RemoteWebhooks bool
	// WebhookTimeout bounds one delivery; default 15 seconds.
	WebhookTimeout time.Duration

	// MaxConnections at once, more are closed; default 4096.
	MaxConnections int
	// MaxBody of a request (413 above it); default 64 MiB.
	MaxBody int64
	// BodyTimeout bounds the transfer of one body; default 2 minutes.
	BodyTimeout time.Duration
	// IdleTimeout of a kept connection; default 2 minutes.
	IdleTimeout time.Duration
	// HoldTimeout bounds a hold whose rule names no bound; default 10 minutes.
	HoldTimeout time.Duration
	// HangTimeout likewise for a hang; default 10 minutes.
	HangTimeout time.Duration
	// KeepMails bounds the contents of mails kept on disk, in bytes, in steps
	// of 32 MiB; default 512 MiB. Beyond it the oldest are dropped: reading
	// them is answered with 500, never with 404.
	KeepMails int64
	// KeepRows is how many finished ledger rows are held in memory; older ones
	// stand in a temporary file. Default 16,384.
	KeepRows int
	// MaxKeys bounds the idempotency keys that are remembered; default 2²⁰.
	// Beyond it the oldest are forgotten.
	MaxKeys int
}

func (o *Options) defaults() error {
	base.Default(&o.Addr, "127.0.0.1:0")
	base.Default(&o.KeyHeader, "X-Dedupe-Key")
	base.Default(&o.Idempotency.Lifetime, 24*time.Hour)
	base.Default(&o.Idempotency.Compare, CompareBytes)
	base.Default(&o.Idempotency.Scope, ScopeEndpoint)
	base.Default(&o.WebhookTimeout, 15*time.Second)
	base.Default(&o.MaxConnections, 4096)
	base.Default(&o.MaxBody, 64<<20)
	base.Default(&o.BodyTimeout, 2*time.Minute)
	base.Default(&o.IdleTimeout, 2*time.Minute)
	base.Default(&o.HoldTimeout, 10*time.Minute)
	base.Default(&o.HangTimeout, 10*time.Minute)
	base.Default(&o.KeepMails, 512<<20)
	base.Default(&o.MaxKeys, 1<<20)
	if o.Clock == nil {
		o.Clock = socket.Monotonic
	}
	return o.check()
}

func (o *Options) check() error {
	switch o.Idempotency.Compare {
	case CompareBytes, CompareCanonical:
	default:
		return fmt.Errorf("payloads are compared by %s or %s, not by %q", CompareBytes, CompareCanonical, o.Idempotency.Compare)
	}
	switch o.Idempotency.Scope {
	case ScopeEndpoint, ScopeCredential:
	default:
		return fmt.Errorf("keys are scoped by %s or %s, not by %q", ScopeEndpoint, ScopeCredential, o.Idempotency.Scope)
	}
	for key, a := range o.APIKeys {
		switch a {
		case FullAccess, SendingAccess, Inactive, Suspended, NoScopes:
		default:
			return fmt.Errorf("API key %.6s…: access %q is not one of full, sending, inactive, suspended, no-scopes", key, a)
		}
	}
	return nil
}

// Server is a running server.
type Server struct {
	// URL of the API, without a slash at its end.
	URL string
	// What every fake has: rules, holds, ledger, verdicts.
	*base.Fake

	opt     Options
	started time.Time
	ids     ids
	engine  *script.Engine
	holds   *script.Holds
	pauses  *script.Holds // delays: holds that nobody releases
	ledger  *ledger.Ledger
	disk    *base.Disk
	mails   *mailStore
	keys    *keys
	memory  *memory
	limits  *limits
	hooks   *hooks
	large   chan struct{} // slots for large bodies
	gate    *socket.Gate
	http    *http.Server
	control *control.Side // nil without an address of its own
	done    chan struct{} // closed by Close
	served  chan error
	running sync.WaitGroup // requests and connections at stage connect

	mu       sync.Mutex
	closing  bool
	nextConn int64
	conns    map[*conn]struct{}
}

// largeBodies is how many bodies above largeBody bytes are read at once: with
// MaxBody they bound what bodies can take of memory.
const (
	largeBodies = 4
	largeBody   = 1 << 20
)

// Start listens and serves until Close.
func Start(opt Options) (*Server, error) {
	if err := opt.defaults(); err != nil {
		return nil, fmt.Errorf("fake resend: %w", err)
	}
	s := &Server{
		opt:     opt,
		started: time.Now(),
		ids:     ids{opt.Seed},
		engine:  script.NewEngine(opt.Seed, vocabulary, !opt.NoMagic),
		holds:   script.NewHolds(),
		pauses:  script.NewHolds(),
		ledger:  ledger.New(opt.KeepRows),
		disk:    &base.Disk{},
		limits:  newLimits(opt),
		large:   make(chan struct{}, largeBodies),
		done:    make(chan struct{}),
		served:  make(chan error, 2),
		conns:   map[*conn]struct{}{},
	}
	s.mails = newMailStore(opt.KeepMails, s.diskFailed)
	s.keys = newKeys(opt.Idempotency, opt.MaxKeys, s.diskFailed)
	s.memory = newMemory(s.diskFailed)
	s.hooks = newHooks(s)
	s.engine.OnAdvance = s.hooks.wake
	if _, err := s.engine.AddAll(opt.Rules); err != nil {
		return nil, fmt.Errorf("fake resend: %w", err)
	}
	g, err := socket.Open(opt.Addr)
	if err != nil {
		return nil, fmt.Errorf("fake resend: %w", err)
	}
	s.gate, s.URL = g, "http://"+g.Addr()
	s.Fake = base.New(opt.Clock, s.engine, s.holds, s.ledger, g, s.disk)
	s.serve()
	if opt.ControlAddr != "" {
		side, err := control.Serve(opt.ControlAddr, s.Control())
		if err != nil {
			return nil, errors.Join(fmt.Errorf("fake resend: control API: %w", err), s.Close())
		}
		s.control = side
	}
	return s, nil
}

func (s *Server) serve() {
	a := acceptor{s, make(chan *conn)}
	ctx, stop := context.WithCancel(context.Background())
	s.http = &http.Server{
		Handler:           s.handler(),
		ReadHeaderTimeout: 30 * time.Second,
		IdleTimeout:       s.opt.IdleTimeout,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          log.New(io.Discard, "", 0),
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, c)
		},
	}
	go func() { s.served <- a.run() }()
	go func() {
		defer stop()
		err := s.http.Serve(a)
		if errors.Is(err, net.ErrClosed) || errors.Is(err, http.ErrServerClosed) {
			err = nil
		}
		s.served <- err
	}()
}

// handler serves the API, and the control API below its prefix.
func (s *Server) handler() http.Handler {
	side := http.StripPrefix("/_control", s.Control())
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch p := r.URL.Path; {
		case len(p) > len("/_control") && p[:len("/_control/")] == "/_control/":
			side.ServeHTTP(w, r)
		case p == "/_control":
			http.Redirect(w, r, "/_control/", http.StatusMovedPermanently)
		default:
			if s.begin() {
				defer s.running.Done()
				s.route(w, r)
			}
		}
	})
}

// ControlURL of the control API and the page, without a slash at its end.
func (s *Server) ControlURL() string {
	if s.control != nil {
		return s.control.URL()
	}
	return s.URL + "/_control"
}

// wall is the date on the movable clock.
func (s *Server) wall() time.Time { return s.started.Add(s.engine.Now()) }

// diskFailed keeps the first error of a file; Close returns it.
func (s *Server) diskFailed(err error) {
	if !errors.Is(err, errDropped) {
		s.disk.Failed(err)
	}
}

// Close ends all requests and returns when none is left. Held requests end as
// if the server had crashed at that point.
func (s *Server) Close() error {
	s.mu.Lock()
	if s.closing {
		s.mu.Unlock()
		return nil
	}
	s.closing = true
	open := make([]*conn, 0, len(s.conns))
	for c := range s.conns {
		open = append(open, c)
	}
	s.mu.Unlock()

	close(s.done)
	s.holds.Close()
	s.pauses.Close()
	err := s.gate.Close()
	for _, c := range open {
		_ = c.Close()
	}
	err = errors.Join(err, s.http.Close(), s.control.Close(), <-s.served, <-s.served)
	s.running.Wait()
	s.hooks.close()
	return errors.Join(err, s.mails.close(), s.keys.close(), s.memory.close(), s.ledger.Close(), s.ledger.Err(), s.engine.Close(), s.disk.Err())
}

// begin counts something that Close must wait for; false when it is too late.
func (s *Server) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closing {
		s.running.Add(1)
	}
	return !s.closing
}

func (s *Server) enter(c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing || len(s.conns) >= s.opt.MaxConnections {
		return false
	}
	s.nextConn++
	c.id = s.nextConn
	s.conns[c] = struct{}{}
	return true
}

func (s *Server) leave(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}
