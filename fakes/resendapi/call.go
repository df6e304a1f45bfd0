package resendapi

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"mailproof/fakes/ledger"
	"mailproof/fakes/script"
)

// call is one request on its way through the stages.
type call struct {
	s       *Server
	w       http.ResponseWriter
	r       *http.Request
	conn    *conn
	number  int // of its connection
	client  string
	batch   bool
	other   bool   // it sends nothing
	key     string // Idempotency-Key as it was sent
	named   string // the key as the ledger has it
	subject string
	nth     int

	sender      string
	recipients  []string
	mails       []*mail
	rows        []*ledger.Row          // one per recipient; the first is there from the start
	mods        []Action               // changes of the answer
	refused     map[*ledger.Row]string // rows that a permissive batch refuses
	breach      bool
	scoped      *digest // see scope
	expireLater bool    // the key's lifetime ends as soon as it is settled
	inFlight    *digest // the key that this request holds; nil for none
	over        bool    // answered, or the connection is gone
}

// answer is what is written in reply.
type answer struct {
	status int
	body   []byte
	html   bool
	retry  time.Duration // Retry-After; 0 for none
}

func refusal(e *APIError) answer { return answer{status: e.Status, body: e.body()} }

// outcome says how a request goes on after the rules of a stage.
type outcome struct {
	answer *answer // instead of the regular one
	status int     // of the regular one; 0 for its own
	gone   bool    // the connection is closed
	left   bool    // the client went while it was held, and the rule says discard
}

// at asks the rules of a stage and does what can be done at once. What changes
// the answer is kept for it.
func (c *call) at(stage Stage) outcome {
	if c.s.engine.Quiet(c.recipients...) {
		return outcome{}
	}
	return c.strike(stage, c.s.engine.Decide(c.event(stage)))
}

func (c *call) event(stage Stage) script.Event {
	ev := script.Event{
		Stage: stage, Connection: c.conn.id, Message: c.number, Client: c.client,
		Sender: c.sender, Recipients: c.recipients, Key: c.named, Subject: c.subject, Nth: c.nth,
	}
	ev.ClientIP, _, _ = net.SplitHostPort(c.conn.RemoteAddr().String())
	if ev.Subject == "" {
		ev.Subject, ev.Nth = "connection "+strconv.FormatInt(c.conn.id, 10), 1
	}
	if c.r != nil {
		ev.Header = c.header
	}
	return ev
}

// header finds a header of the request, or of the mails in it.
func (c *call) header(name string) []string {
	switch strings.ToLower(name) {
	case ":path":
		return []string{c.r.URL.Path}
	case ":method":
		return []string{c.r.Method}
	}
	out := c.r.Header.Values(name)
	for _, m := range c.mails {
		out = append(out[:len(out):len(out)], m.header(name)...)
	}
	return out
}

func (c *call) strike(stage Stage, strikes []script.Strike) outcome {
	var out outcome
	for _, st := range strikes {
		c.note(st)
		a := st.Action
		switch a.Kind {
		case script.HoldUntilReleased:
			if out.left = c.hold(stage, st); c.over {
				return outcome{gone: true}
			}
		case script.Delay:
			if !c.wait(a.For.D()) {
				c.kill(false)
				return outcome{gone: true}
			}
		case script.Drop, script.Reset:
			c.kill(a.Kind == script.Reset)
			return outcome{gone: true}
		case script.Hang:
			c.hang(a.For.Or(c.s.opt.HangTimeout))
			return outcome{gone: true}
		case script.Reply:
			c.reply(a, &out)
		case script.Rate:
			x := refusal(must(429, "rate_limit_exceeded"))
			x.retry = max(time.Second, a.For.D()) // by then the window is empty
			out.answer = &x
			if stage == StageConnect {
				c.kill(false) // there is no request to answer yet
				return outcome{gone: true}
			}
		case ExpireKey:
			c.expireLater = stage == StageReserved // in flight it cannot expire
			c.expireKey()
		default:
			c.mods = append(c.mods, a)
		}
	}
	return out
}

// reply turns an action into an answer: an error of the table, the page of a
// proxy, or the regular body under another status.
func (c *call) reply(a Action, out *outcome) {
	x := answer{status: a.Code, retry: a.For.D()}
	switch {
	case a.Error != "":
		e, _ := errorNamed(a.Code, a.Error)
		if a.Text != "" {
			e = e.saying("%s", a.Text)
		}
		x.status, x.body = e.Status, e.body()
	case a.Code < 300 && a.Text == "":
		out.status = a.Code
		return
	case a.Code == http.StatusBadGateway || a.Code == http.StatusGatewayTimeout:
		text := http.StatusText(a.Code)
		x.html = true
		x.body = []byte("<html><head><title>" + strconv.Itoa(a.Code) + " " + text + "</title></head><body><h1>" + text + "</h1></body></html>\n")
	case a.Text != "" && a.Code < 300:
		x.body = []byte(a.Text)
	default:
		e := usual(a.Code)
		if a.Text != "" {
			e = e.saying("%s", a.Text)
		}
		x.body = e.body()
	}
	if x.status == http.StatusTooManyRequests && x.retry == 0 {
		x.retry = time.Second
	}
	out.answer = &x
}

// note writes a strike into the rows of the request, or into its connection.
func (c *call) note(st script.Strike) {
	if len(c.rows) == 0 {
		c.conn.note(st)
		return
	}
	for _, r := range c.rows {
		r.Update(func(a *Attempt) {
			a.Fault = joined(a.Fault, st.Action.Name())
			a.Rules = append(a.Rules[:len(a.Rules):len(a.Rules)], st.Rule)
		})
	}
}

func (c *call) update(f func(*Attempt)) {
	for _, r := range c.rows {
		r.Update(f)
	}
}

// hold waits for release. It reports whether the client is gone and the mail
// is to be discarded.
func (c *call) hold(stage Stage, st script.Strike) (discard bool) {
	h := Hold{
		Rule: st.Rule, Stage: stage, Session: c.conn.id, Client: c.client,
		Key: c.named, Since: c.s.opt.Clock(),
	}
	if len(c.recipients) > 0 {
		h.Recipient = c.recipients[0]
	}
	if len(c.rows) > 0 {
		h.Attempt = c.rows[0].ID()
	}
	h, err := c.s.holds.Wait(h, st.Action.For.Or(c.s.opt.HoldTimeout), c.watch)
	if errors.Is(err, script.ErrClosed) {
		c.kill(false)
		return false
	}
	if !h.PeerGone && !c.peerGone() {
		return false
	}
	c.update(func(a *Attempt) { a.PeerGone = true })
	return st.Action.OnRelease == script.DiscardOnRelease
}

// watch returns true once the client is gone. net/http knows it when it has
// read the whole body.
func (c *call) watch(ctx context.Context) bool {
	if c.r == nil {
		<-ctx.Done()
		return false
	}
	select {
	case <-c.r.Context().Done():
		return true
	case <-ctx.Done():
		return false
	}
}

func (c *call) peerGone() bool { return c.r != nil && c.r.Context().Err() != nil }

// wait waits d, or until the server closes (false).
func (c *call) wait(d time.Duration) bool {
	_, err := c.s.pauses.Wait(Hold{}, d, nil)
	return !errors.Is(err, script.ErrClosed)
}

// hang reads and ignores until the client leaves or the bound is over, then
// closes.
func (c *call) hang(bound time.Duration) {
	timer := time.NewTimer(bound)
	defer timer.Stop()
	var left <-chan struct{}
	if c.r != nil {
		_, _ = io.Copy(io.Discard, c.r.Body) // the body's deadline bounds it
		left = c.r.Context().Done()
	}
	select {
	case <-left:
		c.update(func(a *Attempt) { a.PeerGone = true })
	case <-timer.C:
	case <-c.s.done:
	}
	c.kill(false)
}

// kill ends the request by closing its connection. The rows end first: who
// sees the connection closed finds them ended.
func (c *call) kill(reset bool) {
	c.over = true
	c.free()
	gone := c.peerGone()
	c.finish(func(a *Attempt) {
		a.PeerGone = a.PeerGone || gone
		a.Breach = a.Breach || c.breach
	})
	if h, ok := c.w.(http.Hijacker); ok {
		if _, _, err := h.Hijack(); err != nil {
			_ = c.conn.Close()
			return
		}
	}
	c.conn.kill(reset)
}

func (c *call) finish(f func(*Attempt)) {
	now := c.s.opt.Clock()
	for _, r := range c.rows {
		r.Finish(now, f)
	}
}

// stop ends a request for what a stage said; false when it goes on.
func (c *call) stop(out outcome) bool {
	switch {
	case out.gone:
	case out.answer != nil:
		c.answer(*out.answer)
	case out.left:
		c.kill(false)
	default:
		return false
	}
	return true
}

// answer writes the request's answer, as the rules changed it, and ends its
// rows.
func (c *call) answer(x answer) {
	c.over = true
	c.free()
	c.changeBody(&x)
	whole, gone := c.willBeWhole(), c.peerGone()
	line := strconv.Itoa(x.status) + " " + string(x.body[:min(len(x.body), 200)])
	stay := c.retryAfter(x)
	for _, r := range c.rows {
		mine, code := line, x.status
		if refused, ok := c.refused[r]; ok && code < 300 {
			mine, code = refused, http.StatusUnprocessableEntity
		}
		r.Update(func(a *Attempt) {
			a.Reply, a.Code = mine, code
			a.RetryAfter = int64(stay)
			a.ReplyWritten = whole
			a.PeerGone = a.PeerGone || gone
			a.Breach = c.breach || broken(*a)
		})
	}
	written := c.write(x) && whole
	// That a whole answer was announced before, so that a client that reads it
	// finds it in the ledger, is taken back if it failed.
	c.update(func(a *Attempt) {
		a.ReplyWritten = written
		if written {
			a.Stage = string(StageReplied)
		}
	})
	if len(c.rows) > 0 && c.at(StageReplied).gone {
		return
	}
	c.finish(nil)
}

// retryAfterHeader is spelt as the live service spells it.
var retryAfterHeader = "retry-after"

// retryAfter writes the header where the answer asks the client to stay away,
// and says for how long it does, or the limit that it comes from: whole seconds.
func (c *call) retryAfter(x answer) time.Duration {
	h := c.w.Header()
	if x.retry > 0 {
		h[retryAfterHeader] = []string{strconv.Itoa(int((x.retry + time.Second - 1) / time.Second))}
	}
	if len(h[retryAfterHeader]) == 0 {
		return 0
	}
	n, err := strconv.Atoi(h[retryAfterHeader][0])
	if err != nil {
		return 0 // nobody writes such a one
	}
	return time.Duration(n) * time.Second
}

// broken reports whether the answer breaks what it promises: a success of which
// nothing was kept, or a plain refusal of something that was. 500, 502 and 504
// promise nothing (RFC 9110 15.6).
func broken(a Attempt) bool {
	kept := a.Stored || a.Deduplicated
	switch {
	case a.Code < 300:
		return !kept
	case a.Code == 500, a.Code == 502, a.Code == 504:
		return false
	}
	return kept
}

func (c *call) changeBody(x *answer) {
	for _, a := range c.mods {
		switch a.Kind {
		case Empty:
			x.body = nil
		case NoID:
			x.body = []byte("{}")
		case Truncate:
			x.body = x.body[:len(x.body)/2]
		}
	}
}

func (c *call) mod(kinds ...script.Kind) (Action, bool) {
	for _, a := range c.mods {
		for _, k := range kinds {
			if a.Kind == k {
				return a, true
			}
		}
	}
	return Action{}, false
}

func (c *call) willBeWhole() bool {
	_, torn := c.mod(script.Cut, script.Garbage)
	return !torn
}

// writeTimeout bounds the writing of one answer.
const writeTimeout = 30 * time.Second

// smallAnswer is a size that the kernel takes at once from all but a client
// that never reads; that one holds its own connection only.
const smallAnswer = 2048

var jsonType = []string{"application/json; charset=utf-8"}

// write hands the answer to the socket and reports whether the kernel took all
// of it.
func (c *call) write(x answer) bool {
	h := c.w.Header()
	h["Content-Type"] = jsonType
	if x.html {
		h.Set("Content-Type", "text/html")
	}
	h["Content-Length"] = []string{strconv.Itoa(len(x.body))}
	if len(c.mods) > 0 {
		if a, ok := c.mod(script.Drip, script.Cut, script.Garbage, SlowHeaders); ok {
			return c.writeRaw(a, x)
		}
	}
	if len(x.body) > smallAnswer {
		_ = c.conn.SetWriteDeadline(time.Now().Add(writeTimeout))
		defer func() { _ = c.conn.SetWriteDeadline(time.Time{}) }()
	}
	c.w.WriteHeader(x.status)
	if _, err := c.w.Write(x.body); err != nil {
		return false
	}
	f, ok := c.w.(interface{ FlushError() error })
	return ok && f.FlushError() == nil
}

// writeRaw writes an answer by hand, in the way that a rule asks for, and
// closes the connection.
func (c *call) writeRaw(a Action, x answer) bool {
	h, ok := c.w.(http.Hijacker)
	if !ok {
		return false
	}
	if _, _, err := h.Hijack(); err != nil {
		return false
	}
	defer func() { _ = c.conn.Close() }()
	_ = c.conn.SetReadDeadline(time.Time{})
	head, raw := c.raw(x)
	switch a.Kind {
	case script.Garbage:
		_, _ = io.WriteString(c.conn, "\x16\x03\x01 no HTTP \x00\xff\r\n\r\n")
		return false
	case script.Cut:
		n := int64(head + len(x.body)/2)
		if a.Bytes > 0 {
			n = min(a.Bytes, int64(len(raw)))
		}
		_, _ = c.conn.Write(raw[:n])
		return false
	case SlowHeaders:
		return c.drip(raw[:head], a.For.Or(100*time.Millisecond)) && c.writeAll(raw[head:])
	}
	return c.drip(raw, a.For.Or(100*time.Millisecond))
}

func (c *call) drip(b []byte, step time.Duration) bool {
	for i := range b {
		if i > 0 && !c.wait(step) {
			return false
		}
		if !c.writeAll(b[i : i+1]) {
			return false
		}
	}
	return true
}

func (c *call) writeAll(b []byte) bool {
	_ = c.conn.SetWriteDeadline(time.Now().Add(writeTimeout))
	_, err := c.conn.Write(b)
	return err == nil
}

// raw is the answer's bytes and where its body begins.
func (c *call) raw(x answer) (head int, b []byte) {
	var buf bytes.Buffer
	buf.WriteString("HTTP/1.1 " + strconv.Itoa(x.status) + " " + http.StatusText(x.status) + "\r\n")
	h := c.w.Header().Clone()
	h.Set("Date", time.Now().UTC().Format(http.TimeFormat))
	h.Set("Connection", "close")
	_ = h.Write(&buf) // a buffer takes everything
	buf.WriteString("\r\n")
	head = buf.Len()
	buf.Write(x.body)
	return head, buf.Bytes()
}

var errTooLarge = errors.New("the body is too large")

// readBody reads the whole body within its bounds; the rules of stage body
// strike inside it.
func (c *call) readBody() ([]byte, error) {
	if !c.s.engine.Quiet() { // the head may have been held
		_ = c.conn.SetReadDeadline(time.Now().Add(c.s.opt.BodyTimeout))
	}
	body, err := c.readAll()
	if err == nil {
		// From here on net/http reads ahead, only to see the client leave.
		_ = c.conn.SetReadDeadline(time.Time{})
	}
	return body, err
}

func (c *call) readAll() ([]byte, error) {
	if c.r.ContentLength > c.s.opt.MaxBody {
		return nil, errTooLarge
	}
	in := io.LimitReader(c.r.Body, c.s.opt.MaxBody+1)
	var b bytes.Buffer
	if n := c.r.ContentLength; n > 0 && n <= largeBody {
		b.Grow(int(n) + bytes.MinRead)
	}
	if err := c.strikeBody(&b, in); err != nil {
		return nil, err
	}
	if _, err := b.ReadFrom(io.LimitReader(in, int64(largeBody-b.Len())+1)); err != nil {
		return nil, err
	}
	if b.Len() <= largeBody {
		return b.Bytes(), nil
	}
	select {
	case c.s.large <- struct{}{}:
		defer func() { <-c.s.large }()
	case <-c.s.done:
		return nil, net.ErrClosed
	}
	if _, err := b.ReadFrom(in); err != nil {
		return nil, err
	}
	if int64(b.Len()) > c.s.opt.MaxBody {
		return nil, errTooLarge
	}
	return b.Bytes(), nil
}

// errStruck ends a body that a rule struck.
var errStruck = errors.New("struck inside the body")

func (c *call) strikeBody(b *bytes.Buffer, in io.Reader) error {
	if c.s.engine.Quiet() {
		return nil
	}
	strikes := c.s.engine.Decide(c.event(StageBody))
	if len(strikes) == 0 {
		return nil
	}
	var after int64
	for _, st := range strikes {
		after = max(after, st.Action.Bytes)
	}
	if _, err := b.ReadFrom(io.LimitReader(in, min(after, largeBody))); err != nil {
		return err
	}
	if c.strike(StageBody, strikes).gone {
		return errStruck
	}
	return nil
}

func hashOf(b []byte) (digest, string) {
	sum := sha256.Sum256(b)
	return digest(sum[:16]), hex.EncodeToString(sum[:])
}
