package mail

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"regexp"
	"slices"
	"sync"
	"time"
)

// Defaults of [SMTPConfig].
const (
	DefaultConnections    = 10
	DefaultConnectTimeout = 5 * time.Second
	DefaultCommandTimeout = 10 * time.Second
	DefaultSendTimeout    = 30 * time.Second
	DefaultIdleLimit      = 30 * time.Second
)

// TLSMode says how a connection is encrypted.
type TLSMode string

// The modes. There is no "if offered": whoever stands between could take the
// offer away.
const (
	TLSNone     TLSMode = ""
	TLSStartTLS TLSMode = "starttls" // required; a server without it is refused
	TLSImplicit TLSMode = "implicit" // from the first byte (port 465)
)

// SMTPConfig of one server and one lane.
type SMTPConfig struct {
	// Addr is host:port.
	Addr string
	// Name is said in EHLO: process and worker, so that the server's log names
	// who held the session. Letters, digits, dots, hyphens, underscores.
	Name string

	TLS       TLSMode
	TLSConfig *tls.Config // nil: the host of Addr is verified
	// Username and Password for AUTH PLAIN or LOGIN; empty means no AUTH. Without
	// TLS they are only sent to a loopback address.
	Username, Password string

	// Connections is the size of the pool, default 10: the most connections
	// that this sender holds at a time. Each lane has a sender of its own, so
	// that one cannot take the other's (M6-17).
	Connections int
	// IdleLimit, default 30 s, is how long a connection is kept for the next
	// mail; negative keeps none. Servers close idle ones after a few minutes.
	IdleLimit time.Duration
	// MailsPerConnection closes a connection after so many mails; 0 is no bound.
	MailsPerConnection int

	// ConnectTimeout (default 5 s) bounds the TCP connect; CommandTimeout
	// (default 10 s) each command and its reply up to the 354.
	ConnectTimeout time.Duration
	CommandTimeout time.Duration
	// DotTimeout bounds the wait for the reply to the final dot; 0 leaves it
	// what SendTimeout leaves. RFC 5321 4.5.3.2.6 wants 10 minutes: whoever
	// gives up earlier turns accepted mails into ambiguous ones.
	DotTimeout time.Duration
	// SendTimeout is the hard limit of one Send, default 30 s, from waiting for
	// a connection to the reply (OB-02). The deadline is on the socket, and the
	// clock is looked at once more before the dot. It must be shorter than the
	// lease of the row.
	SendTimeout time.Duration
}

var ehloName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,253}[A-Za-z0-9])?$`)

func (c SMTPConfig) withDefaults() SMTPConfig {
	c.Connections = cmp.Or(c.Connections, DefaultConnections)
	c.ConnectTimeout = cmp.Or(c.ConnectTimeout, DefaultConnectTimeout)
	c.CommandTimeout = cmp.Or(c.CommandTimeout, DefaultCommandTimeout)
	c.SendTimeout = cmp.Or(c.SendTimeout, DefaultSendTimeout)
	c.DotTimeout = cmp.Or(c.DotTimeout, c.SendTimeout)
	c.IdleLimit = cmp.Or(c.IdleLimit, DefaultIdleLimit)
	return c
}

func (c SMTPConfig) validate() error {
	host, _, err := net.SplitHostPort(c.Addr)
	switch {
	case err != nil:
		return fmt.Errorf("SMTP address %q: %w", c.Addr, err)
	case !ehloName.MatchString(c.Name):
		return fmt.Errorf("SMTP EHLO name %q: need letters, digits, dots, hyphens, underscores", c.Name)
	case c.TLS != TLSNone && c.TLS != TLSStartTLS && c.TLS != TLSImplicit:
		return fmt.Errorf("SMTP TLS mode %q: need %q, %q or nothing", c.TLS, TLSStartTLS, TLSImplicit)
	case (c.Username == "") != (c.Password == ""):
		return errors.New("SMTP user and password: both or none")
	case c.Username != "" && c.TLS == TLSNone && !isLoopback(host):
		return fmt.Errorf("SMTP to %s: a password would travel in the clear; set TLS", host)
	case c.Connections < 0 || c.MailsPerConnection < 0:
		return errors.New("SMTP pool: sizes must not be negative")
	case c.ConnectTimeout < 0 || c.CommandTimeout < 0 || c.DotTimeout < 0 || c.SendTimeout < 0:
		return errors.New("SMTP timeouts must not be negative")
	}
	return nil
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || (ip != nil && ip.IsLoopback())
}

// SMTPSender sends over SMTP (RFC 5321), one recipient per mail.
//
// It speaks the dialogue itself. Client libraries join the last bytes of the
// body and the final dot in one write (net/textproto's DotWriter), so nothing
// can be checked in between; they say "localhost" in the EHLO before STARTTLS;
// and they take "25" followed by the end of the connection for a reply.
type SMTPSender struct {
	cfg   SMTPConfig
	slots chan struct{} // one token per connection in use

	mu     sync.Mutex
	idle   []*session // the latest last
	closed bool

	leaving sync.WaitGroup // sessions that say QUIT
}

var _ EmailSender = (*SMTPSender)(nil)

// NewSMTPSender makes a sender; it connects with the first mail.
func NewSMTPSender(cfg SMTPConfig) (*SMTPSender, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &SMTPSender{cfg: cfg, slots: make(chan struct{}, cfg.Connections)}, nil
}

// Send tries once. See [EmailSender] for the outcomes. A kept connection that
// turns out to be dead before the server took DATA is replaced within the same
// try, once: it says nothing about the mail, and costs no attempt.
func (s *SMTPSender) Send(ctx context.Context, m Message, beforeCommit func() error) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.SendTimeout)
	defer cancel()
	e, err := newEnvelope(m)
	if err != nil {
		return "", err
	}
	kept, err := s.acquire(ctx)
	if err != nil {
		// The mail was not tried: free of charge.
		return "", &TransientError{Failure{Stage: StageConnect, Err: err, Free: true}}
	}
	defer func() { <-s.slots }()
	if kept != nil {
		id, err := s.sendOver(ctx, kept, e, beforeCommit)
		if !foundDead(err) {
			return id, err
		}
	}
	fresh, err := s.connect(ctx)
	if err != nil {
		return "", err
	}
	return s.sendOver(ctx, fresh, e, beforeCommit)
}

// sendOver sends over one session and keeps or closes it afterwards.
func (s *SMTPSender) sendOver(ctx context.Context, c *session, e envelope, beforeCommit func() error) (string, error) {
	release := c.bind(ctx)
	id, err := c.send(e, beforeCommit)
	interrupted := release()
	if c.broken || interrupted {
		c.closeHard()
		return id, err
	}
	s.keep(c)
	return id, err
}

// foundDead reports an error that says that the connection had died while it
// was kept: closed, or its end announced by 421, before the 354. A server that
// hangs is not dead.
func foundDead(err error) bool {
	var f Failure
	if t, ok := errors.AsType[*TransientError](err); ok {
		f = t.Failure
	} else if p, ok := errors.AsType[*PermanentError](err); ok {
		f = p.Failure
	}
	switch f.Stage {
	case StageMail, StageRcpt, StageData:
	default:
		return false
	}
	switch f.Code {
	case 421, 503: // 503: the server has another idea of where the session stands
		return true
	case 0:
		return !isTimeout(f.Err) && !errors.Is(f.Err, ErrAddress)
	default:
		return false
	}
}

func isTimeout(err error) bool {
	ne, ok := errors.AsType[net.Error](err)
	return (ok && ne.Timeout()) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}

// errClosed is returned for a Send after Close.
var errClosed = errors.New("the sender is closed")

// acquire waits for a place in the pool and returns the connection kept latest,
// if there is one.
func (s *SMTPSender) acquire(ctx context.Context) (*session, error) {
	select {
	case s.slots <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("no free connection to %s: %w", s.cfg.Addr, ctx.Err())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		<-s.slots
		return nil, errClosed
	}
	if err := ctx.Err(); err != nil {
		<-s.slots
		return nil, err
	}
	n := len(s.idle)
	if n == 0 {
		return nil, nil
	}
	c := s.idle[n-1]
	s.idle = s.idle[:n-1]
	c.expiry.Stop()
	return c, nil
}

// keep puts a session back for the next mail.
func (s *SMTPSender) keep(c *session) {
	full := s.cfg.MailsPerConnection > 0 && c.mails >= s.cfg.MailsPerConnection
	s.mu.Lock()
	if s.closed || full || s.cfg.IdleLimit < 0 {
		s.mu.Unlock()
		s.leaving.Go(c.quit) // the mail's outcome does not wait for it
		return
	}
	defer s.mu.Unlock()
	s.idle = append(s.idle, c)
	c.expiry = time.AfterFunc(s.cfg.IdleLimit, func() { s.expire(c) })
}

func (s *SMTPSender) expire(c *session) {
	s.mu.Lock()
	i := slices.Index(s.idle, c)
	if i >= 0 {
		s.idle = slices.Delete(s.idle, i, i+1)
		s.leaving.Go(c.quit)
	}
	s.mu.Unlock()
}

// Close ends kept connections and refuses further mails. A Send that is under
// way is finished.
func (s *SMTPSender) Close() error {
	s.mu.Lock()
	idle := s.idle
	s.idle, s.closed = nil, true
	s.mu.Unlock()
	for _, c := range idle {
		c.expiry.Stop()
		s.leaving.Go(c.quit)
	}
	s.leaving.Wait()
	return nil
}

// connect opens a session that is ready for MAIL.
func (s *SMTPSender) connect(ctx context.Context) (*session, error) {
	dialer := net.Dialer{Timeout: s.cfg.ConnectTimeout}
	conn, err := dialer.DialContext(ctx, "tcp", s.cfg.Addr)
	if err != nil {
		return nil, &TransientError{Failure{Stage: StageConnect, Err: err}}
	}
	c := newSession(conn, s.cfg)
	release := c.bind(ctx)
	err = c.open()
	if interrupted := release(); err == nil && interrupted {
		err = &TransientError{Failure{Stage: StageEHLO, Err: context.Cause(ctx)}}
	}
	if err != nil {
		c.closeHard()
		return nil, err
	}
	return c, nil
}

// envelope is a mail as it goes over the wire.
type envelope struct {
	from, to string
	utf8     bool // an address needs SMTPUTF8
	eightBit bool
	size     int
	body     []byte // dot-stuffed, ends with CRLF, without the final dot
}

// newEnvelope checks what no server should be asked about. Its errors are
// permanent: the mail itself is unusable.
func newEnvelope(m Message) (envelope, error) {
	refuse := func(stage Stage, err error) (envelope, error) {
		return envelope{}, &PermanentError{Failure{Stage: stage, Err: err}}
	}
	if _, err := ParseAddress(m.From); err != nil {
		return refuse(StageMail, fmt.Errorf("sender: %w", err))
	}
	if _, err := ParseAddress(m.To); err != nil {
		return refuse(StageRcpt, fmt.Errorf("recipient: %w", err))
	}
	if err := checkLines(m.Bytes); err != nil {
		return refuse(StageBody, err)
	}
	if m.Bytes[0] == '{' { // no mail begins so, and each request of an HTTP API does
		return refuse(StageBody, errors.New("the stored mail is a request of an HTTP API: it was rendered for another transport"))
	}
	return envelope{
		from: m.From, to: m.To,
		utf8:     !isASCII([]byte(m.From)) || !isASCII([]byte(m.To)),
		eightBit: !isASCII(m.Bytes),
		size:     len(m.Bytes),
		body:     dotStuff(m.Bytes),
	}, nil
}

// checkLines refuses a CR or LF that stands alone. Servers disagree about what
// they end, and a body that relies on it can smuggle a second mail (RFC 5321
// 2.3.8).
func checkLines(b []byte) error {
	if len(b) == 0 {
		return errors.New("the mail is empty")
	}
	pairs := bytes.Count(b, []byte("\r\n"))
	if bytes.Count(b, []byte{'\n'}) == pairs && bytes.Count(b, []byte{'\r'}) == pairs && bytes.IndexByte(b, 0) < 0 {
		return nil
	}
	for i, c := range b { // say where
		switch {
		case c == '\n' && (i == 0 || b[i-1] != '\r'):
			return fmt.Errorf("bare LF at byte %d", i)
		case c == '\r' && (i == len(b)-1 || b[i+1] != '\n'):
			return fmt.Errorf("bare CR at byte %d", i)
		case c == 0:
			return fmt.Errorf("NUL at byte %d", i)
		}
	}
	return nil
}

// dotStuff doubles each dot at the start of a line (RFC 5321 4.5.2) and makes
// sure that the last line ends.
func dotStuff(b []byte) []byte {
	out := bytes.ReplaceAll(b, []byte("\r\n."), []byte("\r\n.."))
	if out[0] == '.' {
		out = append([]byte{'.'}, out...)
	}
	if !bytes.HasSuffix(out, []byte("\r\n")) {
		out = append(out, '\r', '\n')
	}
	return out
}

func isASCII(b []byte) bool {
	for _, c := range b {
		if c > 127 {
			return false
		}
	}
	return true
}
