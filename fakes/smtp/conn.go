package smtp

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	gosmtp "github.com/emersion/go-smtp"

	"mailproof/fakes/ledger"
	"mailproof/fakes/script"
	"mailproof/fakes/socket"
)

// maxLine bounds a command line: 512 octets by RFC 5321 4.5.3.1.4, which
// extensions raise; AUTH by RFC 4954 4 to 12288.
const (
	maxLine     = 2000
	maxAuthLine = 12288
)

// mode says what the bytes from the client are.
type mode uint8

const (
	modeCommand mode = iota
	modeData         // a body up to <CRLF>.<CRLF>
	modeChunk        // the bytes of a BDAT
)

// conn stands between go-smtp and the socket. go-smtp's goroutine reads and
// writes it; during BDAT a second one runs the session's Data, while the first
// waits.
type conn struct {
	srv     *Server
	tcp     net.Conn // the socket
	rw      net.Conn // the socket, or TLS over it
	id      int64
	crowded bool // one connection too many

	br      *bufio.Reader
	lineBuf []byte // the rest of the command line that go-smtp has not read yet
	mode    mode
	eod     eodScanner
	chunk   int64 // bytes left of a BDAT chunk
	read    int64 // bytes of the running body
	began   time.Time

	bodyStrikes []script.Strike // of stage body, not yet due
	bodyAt      int64           // due once so many bytes were read
	tarpit      time.Duration
	lastChunk   bool

	verb      string // the command that is being answered; "" is the greeting
	greeted   bool
	client    string // EHLO name
	secured   bool
	needHello bool // after STARTTLS
	inAuth    bool // the next line answers a 334
	mails     int  // MAIL commands so far
	errs      int

	readDeadline, writeDeadline time.Time
	waited                      bool // since the last answer: the client may be gone

	out        []byte // whole answers that wait for the next one
	reply      []byte // lines of the answer collected so far
	mods       []script.Action
	peerClosed bool // the client ended the session
	closeAfter bool // close once the answer is written

	mu      sync.Mutex
	session *session
	pending []*rowEnd // rows that the next answer ends
	strikes []strike  // at stages that belong to no mail
	dead    bool      // the socket is closed
	since   int64
}

type strike struct{ name, rule string }

// readers are the read buffers of connections.
var readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, 4096) }}

func newConn(s *Server, nc net.Conn) *conn {
	br := readers.Get().(*bufio.Reader)
	br.Reset(nc)
	return &conn{srv: s, tcp: nc, rw: nc, br: br, since: s.opt.Clock()}
}

func (c *conn) LocalAddr() net.Addr  { return c.tcp.LocalAddr() }
func (c *conn) RemoteAddr() net.Addr { return c.tcp.RemoteAddr() }

// go-smtp's own deadlines are not used: the ones here are finer.
func (c *conn) SetDeadline(time.Time) error      { return nil }
func (c *conn) SetReadDeadline(time.Time) error  { return nil }
func (c *conn) SetWriteDeadline(time.Time) error { return nil }

// Read gives go-smtp one command line at a time, or bytes of a body.
func (c *conn) Read(p []byte) (int, error) {
	if err := c.goneErr(); err != nil {
		return 0, err
	}
	if len(c.lineBuf) > 0 {
		return c.readRest(p), nil
	}
	switch c.mode {
	case modeData:
		return c.readData(p)
	case modeChunk:
		return c.readChunk(p)
	}
	line, err := c.nextCommand()
	if err != nil {
		c.peerClosed = errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)
		return 0, err
	}
	if c.mode == modeChunk && c.chunk == 0 {
		c.mode = modeCommand
	}
	c.lineBuf = line
	return c.readRest(p), nil
}

func (c *conn) readRest(p []byte) int {
	n := copy(p, c.lineBuf)
	c.lineBuf = c.lineBuf[n:]
	return n
}

// nextCommand reads commands until there is one that go-smtp is to answer.
func (c *conn) nextCommand() ([]byte, error) {
	for {
		line, err := c.readLine()
		if err != nil {
			return nil, err
		}
		if line == nil {
			continue
		}
		if c.inAuth {
			c.inAuth = false
			return line, nil
		}
		pass, err := c.command(line)
		if err != nil {
			return nil, err
		}
		if pass {
			return line, nil
		}
	}
}

// readLine reads one line with its end. It answers too long ones itself and
// returns nil for them.
func (c *conn) readLine() ([]byte, error) {
	var long []byte
	if !c.moreCommands() {
		if err := c.flush(); err != nil {
			return nil, err
		}
	}
	c.patience()
	for {
		part, err := c.br.ReadSlice('\n')
		if err == nil && long == nil {
			return part, nil
		}
		long = append(long, part...)
		switch {
		case err == nil:
			return long, nil
		case !errors.Is(err, bufio.ErrBufferFull):
			return nil, err
		case len(long) > maxAuthLine:
			return nil, c.skipLine()
		}
	}
}

// skipLine drops the rest of a line that is too long and answers it. A line
// without end is bounded by its size: then the connection ends.
func (c *conn) skipLine() error {
	const endless = 1 << 20
	dropped := 0
	for {
		part, err := c.br.ReadSlice('\n')
		dropped += len(part)
		if err == nil {
			break
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return err
		}
		if dropped > endless {
			c.farewell(reply{500, "5.5.2", "Line too long, closing"})
			return net.ErrClosed
		}
	}
	return c.tooLong()
}

func (c *conn) tooLong() error {
	_ = c.answer(reply{500, "5.5.2", "Line too long"})
	return c.countError()
}

// farewell sends a last answer and closes.
func (c *conn) farewell(r reply) {
	c.closeAfter = true
	_ = c.answer(r)
	c.kill(false)
}

// maxErrors of a session, as go-smtp counts them too.
const maxErrors = 10

func (c *conn) countError() error {
	if c.errs++; c.errs <= maxErrors {
		return nil
	}
	c.farewell(reply{421, "4.7.0", "Too many errors"})
	return net.ErrClosed
}

// patience sets the deadline for the next bytes.
func (c *conn) patience() {
	if c.br.Buffered() == 0 {
		c.readBy(time.Now().Add(c.srv.opt.IdleTimeout))
	}
}

// readBy sets the read deadline, unless the one that stands is as good: moving
// it costs more than reading a command. It may then come early by a sixteenth
// of the idle timeout.
func (c *conn) readBy(t time.Time) {
	if d := t.Sub(c.readDeadline); d < 0 || d > c.srv.opt.IdleTimeout/16 {
		_ = c.tcp.SetReadDeadline(t)
		c.readDeadline = t
	}
}

func (c *conn) readData(p []byte) (int, error) {
	b, err := c.peekBody(len(p))
	if err != nil {
		return 0, err
	}
	n, end := c.eod.scan(b)
	if end {
		if err := c.strikeBody(true); err != nil {
			return 0, err
		}
		c.mode = modeCommand
	}
	return c.take(p, b[:n]), nil
}

// dataBody reads the body of a DATA command past go-smtp, which would look at
// each byte twice. What is left for go-smtp is an empty body's end.
type dataBody struct {
	c    *conn
	left int64 // of Options.MaxMessageBytes
}

func (d *dataBody) Read(p []byte) (int, error) {
	c := d.c
	for {
		b, err := c.peekBody(len(p) - 1)
		if err != nil {
			return 0, unexpected(err)
		}
		out, in, end := c.eod.unstuff(p, b)
		if end {
			if err := c.strikeBody(true); err != nil {
				return 0, err
			}
			c.mode, c.lineBuf = modeCommand, endOfData
		}
		_, _ = c.br.Discard(in)
		c.read += int64(in)
		d.left -= int64(out)
		switch {
		case d.left < 0 && end:
			return 0, gosmtp.ErrDataTooLarge
		case d.left < 0:
			continue // the rest is read, and kept by nobody
		case end:
			return out, io.EOF
		case out > 0:
			return out, nil
		}
	}
}

var endOfData = []byte(".\r\n")

func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

func (c *conn) readChunk(p []byte) (int, error) {
	b, err := c.peekBody(int(min(int64(len(p)), c.chunk)))
	if err != nil {
		return 0, err
	}
	if c.chunk -= int64(len(b)); c.chunk == 0 {
		if err := c.strikeBody(c.lastChunk); err != nil {
			return 0, err
		}
		c.mode = modeCommand
	}
	return c.take(p, b), nil
}

func (c *conn) take(p, b []byte) int {
	n := copy(p, b)
	_, _ = c.br.Discard(n)
	c.read += int64(n)
	return n
}

// errEndless ends a body that does not end.
var errEndless = errors.New("body exceeds every bound")

// peekBody returns at most limit buffered bytes of a body, at least one. The
// rules of stage body strike here.
func (c *conn) peekBody(limit int) ([]byte, error) {
	if c.read > 2*c.srv.opt.MaxMessageBytes+1<<20 {
		c.farewell(reply{552, "5.3.4", "Message exceeds every bound, closing"})
		return nil, errEndless
	}
	if c.tarpit > 0 && c.read > 0 && !c.wait(c.tarpit) {
		c.kill(false)
		return nil, net.ErrClosed
	}
	if err := c.awaitBody(); err != nil {
		return nil, err
	}
	if c.read == 0 {
		c.beginBody()
	}
	if err := c.strikeBody(false); err != nil {
		return nil, err
	}
	if c.tarpit > 0 {
		limit = min(limit, tarpitChunk)
	}
	if c.bodyStrikes != nil {
		limit = int(min(int64(limit), c.bodyAt-c.read))
	}
	return c.br.Peek(min(limit, c.br.Buffered()))
}

// tarpitChunk is how much a tarpit reads between two waits.
const tarpitChunk = 128

// awaitBody waits for at least one byte of a body.
func (c *conn) awaitBody() error {
	if c.br.Buffered() > 0 {
		return nil
	}
	if err := c.flush(); err != nil {
		return err
	}
	deadline := time.Now().Add(c.srv.opt.IdleTimeout)
	if whole := c.began.Add(c.srv.opt.MailTimeout); whole.Before(deadline) {
		deadline = whole
	}
	c.readBy(deadline)
	_, err := c.br.Peek(1)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		// What would follow is the rest of the body: it must not be read as
		// commands.
		if tx := c.tx(); tx != nil {
			c.endRows(tx)
		}
		c.farewell(reply{421, "4.4.2", "Timeout inside the mail, closing"})
		return net.ErrClosed
	}
	if err != nil {
		c.mode = modeCommand
	}
	return err
}

// beginBody asks the rules of the body, once for each mail; they strike when
// their number of bytes has been read.
func (c *conn) beginBody() {
	tx := c.tx()
	c.bodyStrikes, c.bodyAt, c.tarpit = nil, 0, 0
	if tx == nil {
		return
	}
	tx.update(func(a *Attempt) { a.Stage = string(StageBody) })
	if c.srv.engine.Quiet(tx.rcpts...) {
		return
	}
	c.bodyStrikes = c.srv.engine.Decide(c.txEvent(tx, StageBody))
	for _, st := range c.bodyStrikes {
		c.bodyAt = max(c.bodyAt, st.Action.Bytes)
	}
}

// strikeBody lets the rules of the body strike once enough of it was read, or
// all of it.
func (c *conn) strikeBody(end bool) error {
	if c.bodyStrikes == nil || (c.read < c.bodyAt && !end) {
		return nil
	}
	strikes := c.bodyStrikes
	c.bodyStrikes = nil
	if tx := c.tx(); tx != nil && c.strikeAll(c.txEvent(tx, StageBody), strikes).gone {
		return net.ErrClosed
	}
	return nil
}

// command looks at one command before go-smtp does. pass is false when it was
// answered here.
func (c *conn) command(line []byte) (pass bool, err error) {
	verb, arg := split(line)
	c.verb = verb
	if len(line) > maxLine && verb != "AUTH" {
		return false, c.tooLong()
	}
	if c.needHello && verb != "EHLO" && verb != "HELO" && verb != "QUIT" && verb != "NOOP" && verb != "RSET" {
		_ = c.answer(reply{503, "5.5.1", "EHLO again after STARTTLS"})
		return false, c.countError()
	}
	switch verb {
	case "EHLO", "HELO":
		c.client, c.needHello = strings.TrimSpace(string(arg)), false
		return c.ask(StageEHLO)
	case "STARTTLS":
		return false, c.startTLS()
	case "AUTH":
		return c.ask(StageAuth)
	case "DATA":
		return c.askData()
	case "BDAT":
		return c.bdat(string(arg))
	case "RSET":
		return c.ask(StageRset)
	case "NOOP", "VRFY":
		return c.ask(StageNoop)
	case "QUIT":
		return c.ask(StageQuit)
	}
	return true, nil
}

func split(line []byte) (verb string, arg []byte) {
	v, a, _ := bytes.Cut(bytes.TrimRight(line, "\r\n"), []byte(" "))
	for _, known := range verbs {
		if len(v) == len(known) && strings.EqualFold(string(v), known) {
			return known, a
		}
	}
	return strings.ToUpper(string(v[:min(len(v), 16)])), a
}

// verbs that are looked at here, so that none needs a copy.
var verbs = []string{"MAIL", "RCPT", "DATA", "QUIT", "RSET", "EHLO", "HELO", "BDAT", "NOOP", "VRFY", "AUTH", "STARTTLS"}

// ask asks the rules about a command that belongs to no recipient.
func (c *conn) ask(stage Stage) (pass bool, err error) {
	if c.srv.engine.Quiet() {
		return true, nil
	}
	out := c.at(c.event(stage))
	switch {
	case out.gone:
		return false, net.ErrClosed
	case out.answer != nil:
		_ = c.answer(*out.answer)
		return false, c.goneErr()
	}
	return true, nil
}

// askData asks about DATA; a refusal ends the tries of the mail.
func (c *conn) askData() (bool, error) {
	tx := c.tx()
	if tx == nil {
		return true, nil // go-smtp says what is missing
	}
	tx.again()
	out := c.atTx(tx, StageData)
	switch {
	case out.gone:
		return false, net.ErrClosed
	case out.answer != nil:
		c.endRows(tx)
		_ = c.answer(*out.answer)
		return false, c.goneErr()
	}
	c.read, c.began, c.eod = 0, time.Now(), eodScanner{}
	return true, nil
}

// bdat prepares for the bytes that follow a BDAT command, whatever becomes of
// it.
func (c *conn) bdat(arg string) (bool, error) {
	size, rest, _ := strings.Cut(strings.TrimSpace(arg), " ")
	n, err := strconv.ParseUint(size, 10, 32)
	if err != nil {
		return true, nil // go-smtp refuses it and reads no bytes
	}
	first := c.began.IsZero()
	if first {
		c.read, c.began = 0, time.Now()
	}
	tx := c.tx()
	if first && tx != nil {
		tx.again()
		out := c.atTx(tx, StageData)
		if out.gone {
			return false, net.ErrClosed
		}
		if out.answer != nil {
			c.began = time.Time{}
			if err := c.flush(); err != nil {
				return false, err
			}
			if _, err := io.CopyN(io.Discard, c.br, int64(n)); err != nil {
				return false, err
			}
			c.endRows(tx)
			_ = c.answer(*out.answer)
			return false, c.goneErr()
		}
	}
	c.mode, c.chunk, c.lastChunk = modeChunk, int64(n), strings.EqualFold(strings.TrimSpace(rest), "LAST")
	return true, nil
}

// startTLS takes the connection into TLS without go-smtp's knowledge.
func (c *conn) startTLS() error {
	if c.srv.opt.TLS == nil || c.secured {
		_ = c.answer(reply{502, "5.5.1", "TLS is not available"})
		return c.countError()
	}
	out := c.at(c.event(StageSTARTTLS))
	switch {
	case out.gone:
		return net.ErrClosed
	case out.answer != nil:
		_ = c.answer(*out.answer)
		return c.goneErr()
	}
	if err := errors.Join(c.answer(reply{220, "2.0.0", "Ready to start TLS"}), c.flush()); err != nil {
		return err
	}
	if out.breakTLS {
		// A client has sent its hello by now, or will: it gets no answer.
		_, _ = c.br.ReadByte()
		c.kill(false)
		return net.ErrClosed
	}
	// What was sent in clear behind STARTTLS must not count as said in TLS
	// (CVE-2011-0411): it is dropped.
	secure := tls.Server(c.tcp, c.srv.opt.TLS)
	_ = c.tcp.SetDeadline(time.Now().Add(c.srv.opt.IdleTimeout))
	if err := secure.Handshake(); err != nil {
		c.kill(false)
		return fmt.Errorf("TLS handshake: %w", err)
	}
	_ = c.tcp.SetDeadline(time.Time{})
	c.readDeadline, c.writeDeadline = time.Time{}, time.Time{}
	c.rw, c.secured, c.needHello = secure, true, true
	c.br.Reset(secure)
	return nil
}

func (c *conn) tx() *tx {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.session == nil {
		return nil
	}
	return c.session.tx
}

func (c *conn) event(stage Stage) script.Event {
	return script.Event{
		Stage: stage, Connection: c.id, Message: c.mails, Client: c.client, ClientIP: c.clientIP(),
		Subject: "connection " + strconv.FormatInt(c.id, 10), Nth: 1,
	}
}

func (c *conn) clientIP() string {
	if a, ok := c.tcp.RemoteAddr().(*net.TCPAddr); ok {
		return a.IP.String()
	}
	return c.tcp.RemoteAddr().String()
}

func (c *conn) txEvent(tx *tx, stage Stage) script.Event {
	ev := c.event(stage)
	ev.Sender, ev.Recipients = tx.sender, tx.recipients()
	ev.Subject, ev.Nth = tx.subject, tx.nth
	switch stage {
	case StageDot, StageStored, StageReplied:
		// Before the dot another goroutine may still write these (BDAT).
		ev.Key, ev.MessageID, ev.Header = tx.key, tx.messageID, tx.header
	}
	return ev
}

// outcome says how a session goes on after the rules of a stage.
type outcome struct {
	answer   *reply // instead of the regular one
	gone     bool   // the connection is closed
	breakTLS bool
}

// at asks the rules and does what can be done at once. What changes the answer
// is kept for it.
func (c *conn) at(ev script.Event) outcome { return c.strikeAll(ev, c.srv.engine.Decide(ev)) }

// atTx is at for a stage of a mail; it describes the event only if something
// could strike it.
func (c *conn) atTx(t *tx, stage Stage) outcome {
	if c.srv.engine.Quiet(t.rcpts...) {
		return outcome{}
	}
	return c.at(c.txEvent(t, stage))
}

func (c *conn) strikeAll(ev script.Event, strikes []script.Strike) outcome {
	var out outcome
	if len(strikes) > 0 && c.flush() != nil {
		c.kill(false)
		return outcome{gone: true}
	}
	for _, s := range strikes {
		c.note(ev, s)
		a := s.Action
		switch a.Kind {
		case script.HoldUntilReleased:
			if !c.hold(ev, s) {
				return outcome{gone: true}
			}
		case script.Delay:
			if !c.wait(a.For.D()) {
				return outcome{gone: true}
			}
		case script.Drop, script.Reset:
			c.kill(a.Kind == script.Reset)
			return outcome{gone: true}
		case script.Hang:
			c.hang(a.For.Or(c.srv.opt.HangTimeout))
			return outcome{gone: true}
		case script.Reply, script.Greylist, script.Rate:
			r := scripted(a)
			out.answer = &r
			c.closeAfter = c.closeAfter || r.code == 421
		case BreakTLS:
			out.breakTLS = true
		case Tarpit:
			c.tarpit = a.For.D()
		default:
			c.mods = append(c.mods, a)
		}
	}
	return out
}

// note writes a strike into the rows it concerns: the mail's, or only the one
// recipient's; before there is a mail, into the session.
func (c *conn) note(ev script.Event, s script.Strike) {
	st := strike{s.Action.Name(), s.Rule}
	tx := c.tx()
	c.mu.Lock()
	defer c.mu.Unlock()
	if tx == nil || ev.Stage == StageQuit || ev.Stage == StageRset {
		c.strikes = append(c.strikes, st)
		return
	}
	tx.note(ev, st)
}

// hold waits for release and reports whether the session goes on.
func (c *conn) hold(ev script.Event, s script.Strike) bool {
	h := script.Hold{
		Rule: s.Rule, Stage: ev.Stage, Session: c.id, Client: c.client,
		Key: ev.Key, MessageID: ev.MessageID, Since: c.srv.opt.Clock(),
	}
	if len(ev.Recipients) > 0 {
		h.Recipient = ev.Recipients[0]
	}
	tx := c.tx()
	if tx != nil {
		h.Attempt = tx.firstRow()
	}
	watch := func(ctx context.Context) bool { return socket.WatchPeer(ctx, c.tcp) }
	c.waited, c.readDeadline = true, time.Time{} // the watch takes the deadline away
	h, err := c.srv.holds.Wait(h, s.Action.For.Or(c.srv.opt.HoldTimeout), watch)
	if errors.Is(err, script.ErrClosed) {
		c.kill(false)
		return false
	}
	if tx == nil {
		return true
	}
	if h.PeerGone || socket.PeerGone(c.tcp) {
		tx.update(func(a *Attempt) { a.PeerGone = true })
		if ev.Stage == StageDot && s.Action.OnRelease == script.DiscardOnRelease {
			c.kill(false)
			return false
		}
	}
	return true
}

// wait waits d, or until the server closes (false).
func (c *conn) wait(d time.Duration) bool {
	c.waited = true
	_, err := c.srv.pauses.Wait(script.Hold{}, d, nil)
	return !errors.Is(err, script.ErrClosed)
}

// hang reads and ignores until the client leaves or the bound is over, then
// closes.
func (c *conn) hang(bound time.Duration) {
	_ = c.tcp.SetReadDeadline(time.Now().Add(bound))
	_, _ = io.Copy(io.Discard, c.br)
	c.kill(false)
}

// kill closes the socket from this end: with a FIN, or with a reset. The rows
// that still run end here.
func (c *conn) kill(reset bool) {
	c.mu.Lock()
	if c.dead {
		c.mu.Unlock()
		return
	}
	c.dead = true
	c.mu.Unlock()
	// The rows end first: who sees the connection closed finds them ended.
	c.endSession(socket.PeerGone(c.tcp))
	if tc, ok := c.tcp.(*net.TCPConn); ok && reset {
		_ = tc.SetLinger(0)
	}
	_ = c.tcp.Close()
}

// Close is called by go-smtp when the session is over.
func (c *conn) Close() error {
	if c.goneErr() == nil {
		_ = c.flush() // the answer to QUIT, when more was sent behind it
	}
	c.kill(false)
	if c.srv.leave(c) {
		c.srv.ledger.AddSession(c.record())
		// Nobody reads any more: Read and Write look first whether the socket is
		// closed, and go-smtp calls Close from the goroutine that reads.
		c.br.Reset(nil)
		readers.Put(c.br)
		c.br = nil
	}
	return nil
}

// record is the session as the ledger keeps it.
func (c *conn) record() ledger.Session {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := ledger.Session{
		ID: c.id, Client: c.client, From: c.since, To: c.srv.opt.Clock(),
		Last: c.verb, Mails: c.mails, TLS: c.secured, PeerClosed: c.peerClosed,
	}
	for _, st := range c.strikes {
		s.Fault = strings.TrimPrefix(s.Fault+","+st.name, ",")
		s.Rules = append(s.Rules, st.rule)
	}
	return s
}

func (c *conn) goneErr() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dead {
		return net.ErrClosed
	}
	return nil
}

// endSession ends the rows that still run.
func (c *conn) endSession(gone bool) {
	ends := c.takePending()
	for _, e := range ends { // decided, and never answered
		e.row.Finish(c.srv.opt.Clock(), func(a *Attempt) { a.PeerGone = a.PeerGone || gone })
	}
	if tx := c.tx(); tx != nil {
		tx.finish(c.srv.opt.Clock(), func(a *Attempt) { a.PeerGone = a.PeerGone || gone })
	}
}
