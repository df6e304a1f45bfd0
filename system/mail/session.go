package mail

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/emersion/go-sasl"
)

// quitTimeout bounds the farewell. The mails of the session are settled.
const quitTimeout = time.Second

// session is one SMTP connection.
type session struct {
	cfg   SMTPConfig
	sock  net.Conn // TCP: deadlines are set here, below TLS
	conn  net.Conn // sock, or TLS over it
	r     *bufio.Reader
	ext   map[string]string // of EHLO: keyword in capitals → parameters
	mails int               // handed over so far

	// broken: the connection is gone or its state is not known; it is closed.
	// reset: a transaction was begun and refused; RSET comes before the next.
	broken bool
	reset  bool
	expiry *time.Timer // while kept

	mu      sync.Mutex
	ctx     context.Context // of the Send under way
	aborted bool            // ctx ended: no deadline may be set any more
}

func newSession(conn net.Conn, cfg SMTPConfig) *session {
	return &session{cfg: cfg, sock: conn, conn: conn, r: bufio.NewReaderSize(conn, maxLine)}
}

// bind lets ctx interrupt whatever the session does. The returned function
// unbinds, and reports whether ctx has interrupted it.
func (c *session) bind(ctx context.Context) (release func() (interrupted bool)) {
	c.mu.Lock()
	c.ctx, c.aborted = ctx, false
	c.mu.Unlock()
	stop := context.AfterFunc(ctx, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.aborted = true
		_ = c.sock.SetDeadline(time.Unix(1, 0)) // long past: reads and writes end now
	})
	return func() bool { return !stop() }
}

// arm sets the deadline of the next reads and writes: d from now, at most the
// deadline of the Send. It fails when that has passed, whatever the socket
// would still take: a process that was stopped and woke up must not go on.
func (c *session) arm(d time.Duration) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.aborted || c.ctx.Err() != nil {
		return fmt.Errorf("send ended: %w", c.ctx.Err())
	}
	at := time.Now().Add(d)
	if hard, ok := c.ctx.Deadline(); ok && hard.Before(at) {
		at = hard
	}
	if !time.Now().Before(at) {
		return fmt.Errorf("send ended: %w", context.DeadlineExceeded)
	}
	return c.sock.SetDeadline(at)
}

// cmd writes one line and reads its reply. A reply whose first digit is not
// want is a *replyError; want 3 for DATA.
func (c *session) cmd(want int, line string) (reply, error) {
	if c.r.Buffered() > 0 {
		return reply{}, fmt.Errorf("%w: the server spoke out of turn", errProtocol)
	}
	if err := c.arm(c.cfg.CommandTimeout); err != nil {
		return reply{}, err
	}
	if _, err := io.WriteString(c.conn, line+"\r\n"); err != nil {
		return reply{}, c.noticeOr(err)
	}
	return c.expect(want)
}

// noticeOr returns the 421 that a server left behind before it closed, else err.
func (c *session) noticeOr(err error) error {
	if isTimeout(err) {
		return err
	}
	if r, rerr := readReply(c.r); rerr == nil {
		return &replyError{r}
	}
	return err
}

func (c *session) expect(want int) (reply, error) {
	r, err := readReply(c.r)
	if err != nil {
		return reply{}, err
	}
	if r.class() != want {
		return r, &replyError{r}
	}
	return r, nil
}

// open goes from the greeting to the point where MAIL may be said. Whatever is
// refused here is refused to us and not to a mail.
func (c *session) open() error {
	if c.cfg.TLS == TLSImplicit {
		if err := c.handshake(StageConnect); err != nil {
			return err
		}
	}
	if err := c.arm(c.cfg.CommandTimeout); err != nil {
		return c.fail(StageGreeting, err)
	}
	if _, err := c.expect(2); err != nil {
		return c.fail(StageGreeting, err)
	}
	if err := c.hello(); err != nil {
		return c.fail(StageEHLO, err)
	}
	if c.cfg.TLS == TLSStartTLS {
		if err := c.startTLS(); err != nil {
			return err
		}
		if err := c.hello(); err != nil {
			return c.fail(StageEHLO, err)
		}
	}
	if c.cfg.Username == "" {
		return nil
	}
	if err := c.auth(); err != nil {
		return c.fail(StageAuth, err)
	}
	return nil
}

// hello says EHLO, or HELO to a server that does not know it (RFC 5321 3.2).
func (c *session) hello() error {
	r, err := c.cmd(2, "EHLO "+c.cfg.Name)
	if re, ok := errors.AsType[*replyError](err); ok && (re.reply.code == 500 || re.reply.code == 502) {
		c.ext = nil
		_, err = c.cmd(2, "HELO "+c.cfg.Name)
		return err
	}
	if err != nil {
		return err
	}
	c.ext = make(map[string]string)
	for _, line := range r.lines[1:] {
		key, args, _ := strings.Cut(line, " ")
		c.ext[strings.ToUpper(key)] = args
	}
	return nil
}

// errPolicy marks what we refuse: the server lacks what the configuration asks
// for. No retry of this mail or the next changes that.
var errPolicy = errors.New("the server does not offer what is configured")

func (c *session) startTLS() error {
	if _, ok := c.ext["STARTTLS"]; !ok {
		return c.fail(StageSTARTTLS, fmt.Errorf("%w: STARTTLS", errPolicy))
	}
	if _, err := c.cmd(2, "STARTTLS"); err != nil {
		return c.fail(StageSTARTTLS, err)
	}
	if c.r.Buffered() > 0 { // would be read as if it had come encrypted
		return c.fail(StageSTARTTLS, fmt.Errorf("%w: plain text after the reply to STARTTLS", errProtocol))
	}
	return c.handshake(StageSTARTTLS)
}

func (c *session) handshake(stage Stage) error {
	cfg := c.cfg.TLSConfig.Clone()
	if cfg == nil {
		cfg = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	if cfg.ServerName == "" {
		cfg.ServerName, _, _ = net.SplitHostPort(c.cfg.Addr)
	}
	if err := c.arm(c.cfg.CommandTimeout); err != nil {
		return c.fail(stage, err)
	}
	conn := tls.Client(c.sock, cfg)
	if err := conn.Handshake(); err != nil {
		return c.fail(stage, err)
	}
	c.conn, c.r = conn, bufio.NewReaderSize(conn, maxLine)
	return nil
}

// auth proves who we are (RFC 4954). The password is in no error.
func (c *session) auth() error {
	mechs := strings.Fields(strings.ToUpper(c.ext["AUTH"]))
	var client sasl.Client
	for _, m := range mechs {
		switch m {
		case sasl.Plain:
			client = sasl.NewPlainClient("", c.cfg.Username, c.cfg.Password)
		case sasl.Login:
			if client == nil {
				client = sasl.NewLoginClient(c.cfg.Username, c.cfg.Password)
			}
		}
	}
	if client == nil {
		return fmt.Errorf("%w: AUTH PLAIN or LOGIN", errPolicy)
	}
	mech, initial, err := client.Start()
	if err != nil {
		return fmt.Errorf("%w: %w", errPolicy, err)
	}
	line := "AUTH " + mech
	if initial != nil {
		line += " " + base64.StdEncoding.EncodeToString(initial)
	}
	for {
		r, err := c.cmd(2, line)
		if err == nil {
			return nil
		}
		if r.code != 334 {
			return err
		}
		challenge, err := base64.StdEncoding.DecodeString(strings.Join(r.lines, ""))
		if err != nil {
			return fmt.Errorf("%w: challenge: %w", errProtocol, err)
		}
		answer, err := client.Next(challenge)
		if err != nil {
			return fmt.Errorf("%w: %w", errProtocol, err)
		}
		line = base64.StdEncoding.EncodeToString(answer)
	}
}

// send is one mail transaction. Until the dot is written every failure is a
// definite one.
func (c *session) send(e envelope, beforeCommit func() error) (string, error) {
	if c.reset {
		if _, err := c.cmd(2, "RSET"); err != nil {
			// Whatever the server said, it said it about the session.
			c.broken = true
			return "", &TransientError{Failure{Stage: StageMail, Err: fmt.Errorf("RSET: %w", err)}}
		}
		c.reset = false
	}
	params, err := c.mailParams(e)
	if err != nil {
		return "", &PermanentError{Failure{Stage: StageMail, Err: err}}
	}
	for _, step := range []struct {
		stage Stage
		want  int
		line  string
	}{
		{StageMail, 2, "MAIL FROM:<" + e.from + ">" + params},
		{StageRcpt, 2, "RCPT TO:<" + e.to + ">"},
		{StageData, 3, "DATA"},
	} {
		if _, err := c.cmd(step.want, step.line); err != nil {
			c.reset = true
			return "", c.fail(step.stage, err)
		}
	}
	if err := c.body(e, beforeCommit); err != nil {
		// Not a byte more: closing in order would send the dot in some clients,
		// and the server would store half a mail.
		c.broken = true
		return "", &TransientError{Failure{Stage: StageBody, Err: err}}
	}
	return c.dot()
}

// mailParams are the parameters of MAIL that the server knows.
func (c *session) mailParams(e envelope) (string, error) {
	var params string
	if _, ok := c.ext["SIZE"]; ok {
		params += " SIZE=" + strconv.Itoa(e.size)
	}
	if _, ok := c.ext["8BITMIME"]; ok && e.eightBit {
		params += " BODY=8BITMIME"
	}
	if !e.utf8 {
		return params, nil
	}
	if _, ok := c.ext["SMTPUTF8"]; !ok {
		return "", fmt.Errorf("%w: it needs SMTPUTF8, which the server does not offer", ErrAddress)
	}
	return params + " SMTPUTF8", nil
}

// body writes everything but the dot, then asks whether the mail may still go.
// The bytes are out of this process when it asks: what is left to be written
// afterwards is three bytes.
func (c *session) body(e envelope, beforeCommit func() error) error {
	if c.r.Buffered() > 0 {
		return fmt.Errorf("%w: the server spoke out of turn", errProtocol)
	}
	if err := c.arm(c.cfg.SendTimeout); err != nil {
		return err
	}
	if _, err := c.conn.Write(e.body); err != nil {
		return err
	}
	if beforeCommit != nil {
		if err := beforeCommit(); err != nil {
			return err
		}
	}
	return c.arm(c.cfg.DotTimeout)
}

// dot makes the mail the server's. From here on only a whole reply says
// anything; an error of the write itself does not (RFC 5321 4.2.5, RFC 1047).
func (c *session) dot() (string, error) {
	r, err := c.commit()
	if err != nil {
		c.broken = true
		return "", &AmbiguousError{Failure{Stage: StageDot, Err: err}}
	}
	c.mails++
	switch r.class() {
	case 2:
		return providerID(r), nil
	case 4, 5:
		return "", c.fail(StageDot, &replyError{r})
	default:
		c.broken = true
		return "", &AmbiguousError{failure(StageDot, &replyError{r})}
	}
}

func (c *session) commit() (reply, error) {
	if _, err := io.WriteString(c.conn, ".\r\n"); err != nil {
		return reply{}, fmt.Errorf("write the final dot: %w", err)
	}
	return readReply(c.r)
}

// fail turns an error before or in answer to the dot into its outcome, and
// remembers whether the session can go on.
func (c *session) fail(stage Stage, err error) error {
	f := failure(stage, err)
	switch f.Code {
	case 0, 421, 503: // no reply; the last one (RFC 5321 3.8); we disagree about the state
		c.broken = true
	}
	switch classify(f) {
	case lane:
		return &LaneError{f}
	case permanent:
		return &PermanentError{f}
	default:
		return &TransientError{f}
	}
}

func failure(stage Stage, err error) Failure {
	f := Failure{Stage: stage, Err: err}
	if re, ok := errors.AsType[*replyError](err); ok {
		f.Code, f.Enhanced = re.reply.code, re.reply.enhanced
	}
	return f
}

type class int

const (
	transient class = iota
	permanent
	lane
)

// classify reads a definite refusal. The first digit of the basic code decides,
// also against the enhanced one (RFC 5321 4.3.2).
func classify(f Failure) class {
	ours := f.Stage == StageConnect || f.Stage == StageGreeting || f.Stage == StageEHLO || f.Stage == StageSTARTTLS || f.Stage == StageAuth
	switch {
	case f.Code == 0 && ours && refusedByPolicy(f.Err):
		return lane
	case f.Code/100 != 5:
		// No reply: nothing was accepted before the dot. A 2yz or 3yz that does
		// not fit is a server in disorder.
		return transient
	case ours:
		return lane
	case f.Stage == StageMail && oursByCode(f.Code):
		return lane
	case f.Stage == StageRcpt && f.Code == 552 && f.Enhanced == "5.5.3":
		return transient // too many recipients (RFC 5321 4.5.3.1.10)
	default:
		return permanent
	}
}

// oursByCode: refusals at MAIL that are about the client: authentication is
// required, too weak or needs encryption (RFC 4954 6), or the host takes no mail
// at all (RFC 7504). 50,000 dead mails would be the wrong answer.
func oursByCode(code int) bool {
	switch code {
	case 521, 530, 534, 535, 538:
		return true
	default:
		return false
	}
}

// refusedByPolicy tells a refusal (a certificate that does not hold, a TLS
// alert, a missing extension) from a connection that broke.
func refusedByPolicy(err error) bool {
	if errors.Is(err, errPolicy) {
		return true
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return true
	}
	if _, ok := errors.AsType[x509.HostnameError](err); ok {
		return true
	}
	alert, ok := errors.AsType[*net.OpError](err) // how crypto/tls reports the peer's alert
	return ok && alert.Op == "remote error"
}

// closeHard closes so that the server sees a reset where it can: what it has not
// read is thrown away.
func (c *session) closeHard() {
	if tcp, ok := c.sock.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = c.sock.Close()
}

// quit takes leave. Its failure means nothing: each mail has had its reply.
func (c *session) quit() {
	release := c.bind(context.Background())
	defer release()
	defer c.sock.Close()
	if err := c.arm(quitTimeout); err != nil {
		return
	}
	if _, err := io.WriteString(c.conn, "QUIT\r\n"); err == nil {
		_, _ = readReply(c.r)
	}
}
