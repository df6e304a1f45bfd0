// Package smtp is an SMTP server that misbehaves on purpose: it stores a mail
// and loses the 250, refuses what it kept, keeps what it refused, hangs, drips,
// cuts, and waits at any point of a session until it is told to go on. Its
// ledger says what really happened, which no client can know.
//
//	srv, err := smtp.Start(smtp.Options{Seed: 1, Rules: []smtp.Rule{
//		smtp.On(smtp.StageStored, smtp.Drop).First(2).Rule(), // the first two tries of each mail lose their 250
//	}})
//	defer srv.Close()
//	… send to srv.Addr() …
//	srv.Verdict("ticket:42").Copies
//
// The protocol itself is spoken by go-smtp. In front of it stands a connection
// that reads one command at a time, so that it can answer in go-smtp's place
// (greeting, EHLO, DATA, QUIT …), sees each answer whole before it is sent, and
// takes STARTTLS itself, so that all of this works inside TLS too.
//
// Guarantees:
//
//   - A row of the ledger exists from MAIL on, one per recipient. Whoever has
//     read a final answer finds it in the ledger as written.
//   - A mail is stored at most once per try, before its answer, and never after
//     its session was declared closed without storing.
//   - A client that goes away is recorded at once, unless its session is held:
//     then on release.
//   - Nothing that a client sends makes the server grow without bound or keeps
//     other clients waiting.
//
// It imports nothing of this module but the other packages of fakes/.
package smtp

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"sync"
	"time"

	gosmtp "github.com/emersion/go-smtp"

	"mailproof/fakes/base"
	"mailproof/fakes/control"
	"mailproof/fakes/ledger"
	"mailproof/fakes/script"
	"mailproof/fakes/socket"
)

// The words of rules and ledger, under this package's name.
type (
	Rule      = script.Rule
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
	Swallow           = script.Swallow
	Drip              = script.Drip
	Cut               = script.Cut
	Garbage           = script.Garbage
	Greylist          = script.Greylist
	Rate              = script.Rate
)

// Mode says what the server does with a mail that it has already.
type Mode string

// The modes. Whatever is recognised counts per recipient, as mailbox servers
// do it.
const (
	// Plain keeps every copy.
	Plain Mode = "plain"
	// DedupByKey keeps one copy per key header; mails without one are kept.
	DedupByKey Mode = "dedup-key"
	// DedupByMessageID keeps one copy per Message-ID.
	DedupByMessageID Mode = "dedup-message-id"
)

// Options of a server. The zero value is a plain server on a free port of the
// loopback interface.
type Options struct {
	// Addr to listen on; default "127.0.0.1:0".
	Addr string
	// HTTPAddr of the control API and the page; "" means none.
	HTTPAddr string
	// Domain in the greeting; default "fake.mailproof.test".
	Domain string
	// Seed of every draw.
	Seed uint64
	Mode Mode
	// KeyHeader carries the dedupe key; default "X-Dedupe-Key".
	KeyHeader string
	Rules     []Rule
	// NoMagic switches off magic addresses (see script.ParseMagic).
	NoMagic bool
	// Clock gives monotonic nanoseconds for the ledger; default
	// CLOCK_MONOTONIC_RAW.
	Clock func() int64

	// TLS makes the server offer STARTTLS; nil offers none. See
	// [SelfSigned].
	TLS *tls.Config
	// Users that AUTH accepts (PLAIN and LOGIN), name → password. nil accepts
	// anybody.
	Users map[string]string

	// MaxMessageBytes above which a mail is refused with 552 5.3.4; default
	// 32 MiB.
	MaxMessageBytes int64
	// MaxRecipients of one mail (452 4.5.3 above it); default 100, the least
	// that RFC 5321 4.5.3.1.8 allows.
	MaxRecipients int
	// MaxConnections at once (421 4.7.0 above it); default 4096.
	MaxConnections int
	// IdleTimeout bounds the wait for the next bytes; default 5 minutes
	// (RFC 5321 4.5.3.2.7).
	IdleTimeout time.Duration
	// MailTimeout bounds the transfer of one whole body; default 15 minutes.
	MailTimeout time.Duration
	// WriteTimeout bounds the writing of one answer; default 30 seconds.
	WriteTimeout time.Duration
	// HoldTimeout bounds a hold whose rule names no bound; default 10 minutes.
	HoldTimeout time.Duration
	// HangTimeout likewise for a hang; default 10 minutes.
	HangTimeout time.Duration
	// KeepBody is how many bytes of each mail are kept for people to look at,
	// at most; default 64 KiB. KeepBodies bounds all of them together; default
	// 32 MiB. Hash and size are of the whole mail whatever is kept.
	KeepBody   int
	KeepBodies int64
	// BodyDir, if set, gets each stored mail whole, as ID.eml by its row's ID.
	// The files stay when the server closes.
	BodyDir string
	// KeepRows is how many finished ledger rows are held in memory; older ones
	// stand in a temporary file. Default 16,384.
	KeepRows int
}

func (o *Options) defaults() error {
	base.Default(&o.Addr, "127.0.0.1:0")
	base.Default(&o.Domain, "fake.mailproof.test")
	base.Default(&o.Mode, Plain)
	base.Default(&o.KeyHeader, "X-Dedupe-Key")
	base.Default(&o.MaxMessageBytes, 32<<20)
	base.Default(&o.MaxRecipients, 100)
	base.Default(&o.MaxConnections, 4096)
	base.Default(&o.IdleTimeout, 5*time.Minute)
	base.Default(&o.MailTimeout, 15*time.Minute)
	base.Default(&o.WriteTimeout, 30*time.Second)
	base.Default(&o.HoldTimeout, 10*time.Minute)
	base.Default(&o.HangTimeout, 10*time.Minute)
	base.Default(&o.KeepBody, 64<<10)
	base.Default(&o.KeepBodies, 32<<20)
	if o.Clock == nil {
		o.Clock = socket.Monotonic
	}
	switch o.Mode {
	case Plain, DedupByKey, DedupByMessageID:
		return nil
	}
	return fmt.Errorf("mode %q is not one of %s, %s, %s", o.Mode, Plain, DedupByKey, DedupByMessageID)
}

// Server is a running server.
type Server struct {
	// What every fake has: rules, holds, ledger, verdicts.
	*base.Fake

	opt    Options
	engine *script.Engine
	holds  *script.Holds
	pauses *script.Holds // delays: holds that nobody releases
	ledger *ledger.Ledger
	disk   *base.Disk
	mails  *mailStore
	gate   *socket.Gate
	smtp   *gosmtp.Server
	served chan error
	http   *control.Side // nil without a control API

	mu       sync.Mutex
	closing  bool
	nextConn int64
	conns    map[*conn]struct{}
}

// Start listens and serves until Close.
func Start(opt Options) (*Server, error) {
	if err := opt.defaults(); err != nil {
		return nil, fmt.Errorf("fake smtp: %w", err)
	}
	mails, err := newMailStore(opt.KeepBodies, opt.BodyDir)
	if err != nil {
		return nil, fmt.Errorf("fake smtp: %w", err)
	}
	s := &Server{
		opt:    opt,
		engine: script.NewEngine(opt.Seed, vocabulary, !opt.NoMagic),
		holds:  script.NewHolds(),
		pauses: script.NewHolds(),
		ledger: ledger.New(opt.KeepRows),
		disk:   &base.Disk{},
		mails:  mails,
		served: make(chan error, 1),
		conns:  map[*conn]struct{}{},
	}
	if _, err := s.engine.AddAll(opt.Rules); err != nil {
		return nil, fmt.Errorf("fake smtp: %w", err)
	}
	if err := s.listen(); err != nil {
		return nil, fmt.Errorf("fake smtp: %w", err)
	}
	if opt.HTTPAddr != "" {
		h, err := control.Serve(opt.HTTPAddr, s.Control())
		if err != nil {
			return nil, errors.Join(fmt.Errorf("fake smtp: control API: %w", err), s.Close())
		}
		s.http = h
	}
	return s, nil
}

func (s *Server) listen() error {
	g, err := socket.Open(s.opt.Addr)
	if err != nil {
		return err
	}
	s.gate = g
	s.Fake = base.New(s.opt.Clock, s.engine, s.holds, s.ledger, g, s.disk)
	srv := gosmtp.NewServer(gosmtp.BackendFunc(s.newSession))
	srv.Domain = s.opt.Domain
	srv.ErrorLog = log.New(io.Discard, "", 0)
	srv.AllowInsecureAuth = true
	srv.MaxMessageBytes = s.opt.MaxMessageBytes
	srv.MaxRecipients = s.opt.MaxRecipients
	// The connection in front bounds lines and times itself: go-smtp would
	// share one deadline over the whole body and refuse long lines inside it.
	srv.MaxLineLength = 0
	srv.EnableSMTPUTF8 = true
	srv.EnableDSN = true
	srv.EnableBINARYMIME = true
	s.smtp = srv
	go func() { s.served <- srv.Serve(acceptor{s}) }()
	return nil
}

// Mail returns the kept beginning of the mail of a ledger row, by the row's
// ID (all of it, from Options.BodyDir, once it has left memory); false when it
// was never stored or has been dropped to stay in bounds.
func (s *Server) Mail(id int64) ([]byte, bool) { return s.mails.get(id) }

// closeTimeout bounds the wait for sessions at Close; they have nothing left
// to wait for by then.
const closeTimeout = 10 * time.Second

// Close ends all sessions and returns when none is left. Held sessions end as
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

	httpErr := s.http.Close()
	for _, c := range open {
		c.kill(false)
	}
	s.holds.Close()
	s.pauses.Close()
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	err := s.smtp.Shutdown(ctx)
	return errors.Join(httpErr, err, s.gate.Close(), <-s.served, s.ledger.Close(), s.ledger.Err(), s.engine.Close(), s.disk.Err())
}

func (s *Server) enter(c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return false
	}
	s.nextConn++
	c.id = s.nextConn
	s.conns[c] = struct{}{}
	c.crowded = len(s.conns) > s.opt.MaxConnections
	return true
}

// leave reports whether the connection was still entered.
func (s *Server) leave(c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, was := s.conns[c]
	delete(s.conns, c)
	return was
}
