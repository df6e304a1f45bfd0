package mail

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// DefaultResendIdleLimit is shorter than what servers and proxies in front of
// them usually allow.
const DefaultResendIdleLimit = 20 * time.Second

// ResendConfig of one API key and one lane.
type ResendConfig struct {
	// URL of the API without /emails: https://api.resend.com. Plain http is
	// taken for a loopback address only, since the key would travel in the clear.
	URL    string
	APIKey string
	// UserAgent names process and worker. Resend refuses a request without one.
	UserAgent string
	TLSConfig *tls.Config // nil: the host of URL is verified

	// Connections is the size of the pool, default 10.
	Connections int
	// IdleLimit, default 20 s, is how long a connection is kept for the next
	// mail; negative keeps none.
	IdleLimit time.Duration
	// ConnectTimeout (default 5 s) bounds the TCP connect.
	ConnectTimeout time.Duration
	// SendTimeout is the hard limit of one Send, default 30 s (OB-02).
	SendTimeout time.Duration
}

func (c ResendConfig) withDefaults() ResendConfig {
	c.Connections = cmp.Or(c.Connections, DefaultConnections)
	c.IdleLimit = cmp.Or(c.IdleLimit, DefaultResendIdleLimit)
	c.ConnectTimeout = cmp.Or(c.ConnectTimeout, DefaultConnectTimeout)
	c.SendTimeout = cmp.Or(c.SendTimeout, DefaultSendTimeout)
	return c
}

// headerText is what may stand in a header of the request.
func headerText(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' })
}

// parseResendURL checks the address of the API.
func parseResendURL(s string) (*url.URL, error) {
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return nil, errors.New("the Resend URL cannot be read") // url's error quotes it
	case u.Scheme != "https" && u.Scheme != "http", u.Hostname() == "":
		return nil, errors.New("the Resend URL must be https://host")
	case u.User != nil, u.RawQuery != "", u.Fragment != "":
		return nil, errors.New("the Resend URL must hold no user, query or fragment")
	case u.Scheme == "http" && !isLoopback(u.Hostname()):
		return nil, fmt.Errorf("the Resend URL to %s: the API key would travel in the clear; use https", u.Hostname())
	}
	return u, nil
}

func (c ResendConfig) validate() error {
	switch {
	case !headerText(c.APIKey) || strings.Contains(c.APIKey, " "):
		return errors.New("the API key of Resend: need printable ASCII without spaces")
	case !headerText(c.UserAgent):
		return errors.New("the User-Agent for Resend: need printable ASCII; requests without one are refused")
	case c.Connections < 0:
		return errors.New("pool of Resend connections: its size must not be negative")
	case c.ConnectTimeout < 0 || c.SendTimeout < 0:
		return errors.New("timeouts of Resend must not be negative")
	}
	return nil
}

// ResendSender sends over Resend's HTTP API: POST /emails, one mail per request
// (no batches: a key covers a batch as a whole), HTTP/1.1.
//
// Message.Bytes is the JSON body of the request, as [Renderer.RenderResend] made
// it. It goes out byte for byte, so that a repetition under the same key can
// never be taken for another mail (409 invalid_idempotent_request).
//
// It writes the request itself. net/http's transport joins head and body in one
// write, so that nothing could be asked in between, and repeats a POST that has
// an Idempotency-Key on a connection that it finds dead: one call, two requests.
// Here a call makes one request at most whose last byte leaves this process.
type ResendSender struct {
	cfg   ResendConfig
	addr  string
	url   *url.URL
	path  string
	slots chan struct{}

	mu     sync.Mutex
	idle   []*httpConn // the latest last
	closed bool
}

var _ EmailSender = (*ResendSender)(nil)

// NewResendSender makes a sender; it connects with the first mail.
func NewResendSender(cfg ResendConfig) (*ResendSender, error) {
	cfg = cfg.withDefaults()
	u, err := parseResendURL(cfg.URL)
	if err == nil {
		err = cfg.validate()
	}
	if err != nil {
		return nil, err
	}
	port := cmp.Or(u.Port(), map[string]string{"http": "80", "https": "443"}[u.Scheme])
	return &ResendSender{
		cfg: cfg, url: u, addr: net.JoinHostPort(u.Hostname(), port),
		path:  strings.TrimSuffix(u.EscapedPath(), "/") + "/emails",
		slots: make(chan struct{}, cfg.Connections),
	}, nil
}

// Send tries once. See [EmailSender] for the outcomes, and [ClassifyResend] for
// the meaning of answers. A kept connection that turns out to be dead before the
// last byte of the request is replaced within the same try.
func (s *ResendSender) Send(ctx context.Context, m Message, beforeCommit func() error) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.SendTimeout)
	defer cancel()
	request, err := s.request(m)
	if err != nil {
		return "", &PermanentError{Failure{Stage: StageRender, Err: err}}
	}
	kept, err := s.acquire(ctx)
	if err != nil {
		// The mail was not tried: free of charge.
		return "", &TransientError{Failure{Stage: StageConnect, Err: err, Free: true}}
	}
	defer func() { <-s.slots }()
	if kept != nil {
		id, err := s.sendOver(ctx, kept, request, beforeCommit)
		if !errors.Is(err, errFoundDead) {
			return id, err
		}
	}
	fresh, err := s.connect(ctx)
	if err != nil {
		return "", &TransientError{Failure{Stage: StageConnect, Err: err}}
	}
	return s.sendOver(ctx, fresh, request, beforeCommit)
}

// request is the whole request but for its last byte's timing: it is cut before
// the last byte of the body.
func (s *ResendSender) request(m Message) ([]byte, error) {
	if _, err := ParseAddress(m.To); err != nil {
		return nil, fmt.Errorf("recipient: %w", err)
	}
	if err := checkKey(m.IdempotencyKey); err != nil {
		return nil, err
	}
	if len(m.Bytes) < 2 || m.Bytes[0] != '{' {
		return nil, errors.New("the stored mail is no request of the Resend API: it was rendered for another transport")
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "POST %s HTTP/1.1\r\nHost: %s\r\n", s.path, s.url.Host)
	fmt.Fprintf(&b, "User-Agent: %s\r\nAuthorization: Bearer %s\r\n", s.cfg.UserAgent, s.cfg.APIKey)
	fmt.Fprintf(&b, "Idempotency-Key: %s\r\nContent-Type: application/json\r\nAccept: application/json\r\n", m.IdempotencyKey)
	fmt.Fprintf(&b, "Content-Length: %d\r\n\r\n", len(m.Bytes))
	b.Write(m.Bytes)
	return b.Bytes(), nil
}

// sendOver sends over one connection and keeps or closes it afterwards.
func (s *ResendSender) sendOver(ctx context.Context, c *httpConn, request []byte, beforeCommit func() error) (string, error) {
	release := c.bind(ctx)
	id, err := c.send(ctx, request, beforeCommit)
	interrupted := release()
	if c.broken || interrupted {
		c.close()
		return id, err
	}
	s.keep(c)
	return id, err
}

// acquire waits for a place in the pool and returns the connection kept latest
// that is still alive, if there is one.
func (s *ResendSender) acquire(ctx context.Context) (*httpConn, error) {
	select {
	case s.slots <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("no free connection to %s: %w", s.addr, ctx.Err())
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
	for len(s.idle) > 0 {
		n := len(s.idle) - 1
		c := s.idle[n]
		s.idle = s.idle[:n]
		if time.Since(c.kept) < s.cfg.IdleLimit && c.peek() == peerSilent {
			c.used = true
			return c, nil
		}
		c.close()
	}
	return nil, nil
}

func (s *ResendSender) keep(c *httpConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.cfg.IdleLimit < 0 {
		c.close()
		return
	}
	c.kept = time.Now()
	s.idle = append(s.idle, c)
}

// Close ends kept connections and refuses further mails. A Send that is under
// way is finished.
func (s *ResendSender) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.idle {
		c.close()
	}
	s.idle, s.closed = nil, true
	return nil
}

func (s *ResendSender) connect(ctx context.Context) (*httpConn, error) {
	dialer := net.Dialer{Timeout: s.cfg.ConnectTimeout}
	sock, err := dialer.DialContext(ctx, "tcp", s.addr)
	if err != nil {
		return nil, err
	}
	c := &httpConn{sock: sock, conn: sock}
	if s.url.Scheme == "https" {
		cfg := s.cfg.TLSConfig.Clone()
		if cfg == nil {
			cfg = &tls.Config{MinVersion: tls.VersionTLS12}
		}
		cfg.ServerName = cmp.Or(cfg.ServerName, s.url.Hostname())
		cfg.NextProtos = []string{"http/1.1"}
		over := tls.Client(sock, cfg)
		if err := over.HandshakeContext(ctx); err != nil {
			c.close()
			return nil, fmt.Errorf("TLS: %w", err)
		}
		c.conn = over
	}
	c.r = bufio.NewReader(c.conn)
	return c, nil
}

// httpConn is one connection to the API.
type httpConn struct {
	sock net.Conn // TCP: deadlines are set here, below TLS
	conn net.Conn // sock, or TLS over it
	r    *bufio.Reader
	kept time.Time // since when it waits for the next mail
	used bool      // it has carried a request before
	// broken: the connection is gone or its state is not known; it is closed.
	broken bool
}

func (c *httpConn) close() { _ = c.sock.Close() } // nothing that matters is left to be told

// bind lets ctx interrupt whatever the connection does, its deadline included.
func (c *httpConn) bind(ctx context.Context) (release func() (interrupted bool)) {
	stop := context.AfterFunc(ctx, func() { _ = c.sock.SetDeadline(time.Unix(1, 0)) })
	return func() bool { return !stop() }
}

// errFoundDead: a kept connection had died before the server had the request.
var errFoundDead = errors.New("the kept connection was dead")

// send hands over one request. What fails before the last byte was written is
// no doubt: no server acts on half a JSON document.
func (c *httpConn) send(ctx context.Context, request []byte, beforeCommit func() error) (string, error) {
	c.broken = true // until a whole answer has been read
	last := len(request) - 1
	if _, err := c.conn.Write(request[:last]); err != nil {
		return c.early(ctx, fmt.Errorf("the server does not take the request: %w", err))
	}
	// One look at the socket: a server that has closed it, or has answered
	// already, does not get the last byte.
	switch c.peek() {
	case peerGone:
		return c.early(ctx, errors.New("the server closed the connection before it had the request"))
	case peerSpoke:
		return c.early(ctx, errors.New("the server spoke before it had the request"))
	case peerSilent:
	}
	if beforeCommit != nil {
		if err := beforeCommit(); err != nil {
			return "", &TransientError{Failure{Stage: StageBody, Err: err}}
		}
	}
	if err := stillTime(ctx); err != nil {
		return "", &TransientError{Failure{Stage: StageBody, Err: err}}
	}
	if _, err := c.conn.Write(request[last:]); err != nil {
		return "", &AmbiguousError{Failure{Stage: StageRequest, Err: err}}
	}
	a, err := c.answer()
	if err != nil {
		return "", &AmbiguousError{Failure{Stage: StageResponse, Code: a.status, Err: err}}
	}
	return ClassifyResend(a.status, a.header, a.body, true)
}

// stillTime looks at the clock itself: a process that was stopped and woke up
// must not go on because a timer has not fired yet.
func stillTime(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("send ended: %w", err)
	}
	if at, ok := ctx.Deadline(); ok && !time.Now().Before(at) {
		return fmt.Errorf("send ended: %w", context.DeadlineExceeded)
	}
	return nil
}

// early is the outcome of a request that was not sent whole: what the server
// said meanwhile, if it said something.
func (c *httpConn) early(ctx context.Context, why error) (string, error) {
	if ctx.Err() == nil && !isTimeout(why) {
		// An answer that is on its way is here within a moment or not at all: the
		// server does not wait for anything but the rest of the request.
		_ = c.sock.SetReadDeadline(time.Now().Add(earlyAnswer))
		if a, err := c.answer(); err == nil {
			c.broken = true // the server still waits for the rest
			return ClassifyResend(a.status, a.header, a.body, false)
		}
	}
	if c.used && !isTimeout(why) && ctx.Err() == nil {
		return "", fmt.Errorf("%w: %w", errFoundDead, why)
	}
	return "", &TransientError{Failure{Stage: StageBody, Err: why}}
}

// earlyAnswer bounds the wait for an answer to half a request.
const earlyAnswer = 200 * time.Millisecond

// maxAnswer bounds an answer's body; Resend's are some hundred bytes.
const maxAnswer = 64 << 10

type httpAnswer struct {
	status int
	header http.Header
	body   []byte
}

// answer reads one whole answer. Half an answer is an error: the rest might have
// said something else.
func (c *httpConn) answer() (httpAnswer, error) {
	for {
		resp, err := http.ReadResponse(c.r, &http.Request{Method: http.MethodPost})
		if err != nil {
			return httpAnswer{}, fmt.Errorf("no whole answer: %w", err)
		}
		if resp.StatusCode/100 == 1 { // RFC 9110 15.2: the answer is still to come
			continue
		}
		a := httpAnswer{status: resp.StatusCode, header: resp.Header}
		a.body, err = io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
		_ = resp.Body.Close()
		switch {
		case err != nil:
			return a, fmt.Errorf("no whole answer: %w", err)
		case len(a.body) > maxAnswer:
			return a, errors.New("the answer is longer than any of the API's")
		}
		// An answer that ends with the connection cannot be told from half of one.
		delimited := resp.ContentLength >= 0 || len(resp.TransferEncoding) > 0
		if !delimited && len(a.body) == 0 && a.status/100 == 2 {
			return a, errors.New("the answer is empty and ends with the connection")
		}
		c.broken = resp.Close || !delimited || c.r.Buffered() > 0
		return a, nil
	}
}

type peer int

const (
	peerSilent peer = iota
	peerSpoke
	peerGone
)

// peek looks, without waiting and without taking anything, whether the peer has
// closed the connection or spoken. Below TLS bytes may be the protocol's own
// (session tickets), so there only an end is news.
func (c *httpConn) peek() peer {
	if c.r.Buffered() > 0 {
		return peerSpoke
	}
	sc, ok := c.sock.(syscall.Conn)
	if !ok {
		return peerSilent
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return peerGone
	}
	found := peerSilent
	err = raw.Control(func(fd uintptr) {
		var one [1]byte
		n, _, err := syscall.Recvfrom(int(fd), one[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		switch {
		case n > 0 && c.conn == c.sock:
			found = peerSpoke
		case n > 0, errors.Is(err, syscall.EAGAIN), errors.Is(err, syscall.EINTR):
		default:
			found = peerGone
		}
	})
	if err != nil {
		return peerGone
	}
	return found
}

// resendError is the body of a refusal.
type resendError struct {
	Name    string `json:"name"`
	Message string `json:"message"`
}

// ClassifyResend says what an answer of POST /emails means for the mail; whole
// tells whether the server has had the whole request.
//
//	2xx with an id              accepted
//	2xx without one             ambiguous: something was done, nobody knows what
//	301 302 307 308 404 405     lane: this is not the API
//	401 403                     lane: key, permission, domain
//	408 425 429 503             transient; 429 free, with its Retry-After
//	429 *_quota_exceeded        lane: no mail gets through before it is over
//	409 concurrent, locked      transient: the other request decides
//	409 invalid_idempotent      ambiguous, see below
//	other 4xx                   permanent
//	500 502 504, all other      ambiguous; transient when the request was not whole
//
// 409 invalid_idempotent_request says that the key came with another body
// before. Bytes are stored before the first try and never change, so that was
// not this system, or not this row: a mail of this intent may be with the
// recipient. It is neither sent (it may have been another mail) nor dead (that
// word promises that no copy exists): it is not known, and a person looks.
func ClassifyResend(status int, h http.Header, body []byte, whole bool) (string, error) {
	var said resendError
	_ = json.Unmarshal(body, &said) // a proxy's page has no name: the status decides
	text := strings.TrimSpace(said.Name + ": " + oneLine(said.Message))
	if said.Name == "" {
		text = cmp.Or(http.StatusText(status), "no name")
	}
	f := Failure{Stage: StageResponse, Code: status, Err: errors.New(text), RetryAfter: retryAfter(h)}
	switch {
	case status/100 == 2 && whole:
		return resendAccepted(f, body)
	case status == 429:
		if strings.HasSuffix(said.Name, "_quota_exceeded") {
			return "", &LaneError{f}
		}
		f.Free = true
		return "", &TransientError{f}
	case status == 503, status == 408, status == 425:
		return "", &TransientError{f}
	case isLane(status):
		return "", &LaneError{f}
	case status == 409 && said.Name == "invalid_idempotent_request":
		return "", &AmbiguousError{f}
	case status == 409:
		return "", &TransientError{f}
	case status/100 == 4:
		return "", &PermanentError{f}
	case !whole:
		return "", &TransientError{f}
	default:
		return "", &AmbiguousError{f}
	}
}

func isLane(status int) bool {
	switch status {
	case 301, 302, 307, 308, 401, 403, 404, 405:
		return true
	default:
		return false
	}
}

func resendAccepted(f Failure, body []byte) (string, error) {
	var got struct {
		ID string `json:"id"`
	}
	if err := json.Unmarshal(body, &got); err != nil {
		f.Err = fmt.Errorf("the answer is no JSON: %w", err)
		return "", &AmbiguousError{f}
	}
	if strings.TrimSpace(got.ID) == "" {
		f.Err = errors.New("the answer holds no id")
		return "", &AmbiguousError{f}
	}
	return got.ID, nil
}

// retryAfter reads Retry-After in seconds (RFC 9110 10.2.3); a date is not what
// the API sends. It is bounded: a mail must not sleep for ever.
func retryAfter(h http.Header) time.Duration {
	n, err := strconv.Atoi(h.Get("Retry-After"))
	if err != nil || n < 0 {
		return 0
	}
	return min(time.Duration(n)*time.Second, 24*time.Hour)
}
