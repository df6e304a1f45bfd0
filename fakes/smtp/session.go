package smtp

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"mime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/emersion/go-sasl"
	gosmtp "github.com/emersion/go-smtp"

	"mailproof/fakes/ledger"
	"mailproof/fakes/script"
)

// session is what go-smtp calls for one connection.
type session struct {
	c  *conn
	tx *tx // guarded by c.mu
}

func (s *Server) newSession(gc *gosmtp.Conn) (gosmtp.Session, error) {
	c, ok := gc.Conn().(*conn)
	if !ok {
		return nil, errors.New("connection did not come through the gate")
	}
	sess := &session{c: c}
	c.mu.Lock()
	c.session = sess
	c.mu.Unlock()
	return sess, nil
}

// tx is one mail transaction, from MAIL on.
type tx struct {
	c       *conn
	sender  string
	from    int64
	rcpts   []string // accepted ones
	rows    []*row   // accepted ones; rows[0] may still be without a recipient
	nRcpt   int      // RCPT commands so far
	nth     int
	subject string // what tries are counted by

	dotAt     int64
	spool     *spool
	head      []byte // the kept beginning of the mail
	key       string
	messageID string
	title     string // subject header

	mu sync.Mutex // guards rows' list against the closing of the server
}

type row struct {
	*ledger.Row
	recipient string
}

// rowEnd is a row that the next answer ends.
type rowEnd struct {
	tx    *tx
	row   *row
	final bool // the answer to the dot
}

func (e *rowEnd) before(line string, whole, gone bool) {
	e.row.Update(func(a *Attempt) {
		a.Reply, a.Code = line, codeOf(line)
		a.ReplyWritten = whole
		a.PeerGone = a.PeerGone || gone
		a.Breach = e.final && broken(*a)
	})
}

// broken reports whether the final answer and what was done contradict each
// other (RFC 5321 4.2.5).
func broken(a Attempt) bool {
	kept := a.Stored || a.Deduplicated
	return (a.Code < 300) != kept
}

// after ends the row. That a whole answer was announced in before, so that a
// client that reads it finds it in the ledger, is taken back if it failed.
func (e *rowEnd) after(now int64, written bool) {
	e.row.Finish(now, func(a *Attempt) {
		a.ReplyWritten = written
		if written && e.final {
			a.Stage = string(StageReplied)
		}
	})
}

func codeOf(line string) int {
	if len(line) < 3 {
		return 0
	}
	n, err := strconv.Atoi(line[:3])
	if err != nil {
		return 0
	}
	return n
}

func (t *tx) recipients() []string { return t.rcpts }

func (t *tx) list() []*row {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]*row(nil), t.rows...)
}

func (t *tx) firstRow() int64 {
	rows := t.list()
	if len(rows) == 0 {
		return 0
	}
	return rows[0].ID()
}

func (t *tx) update(f func(*Attempt)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, r := range t.rows {
		r.Update(f)
	}
}

func (t *tx) finish(now int64, f func(*Attempt)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, r := range t.rows {
		r.Finish(now, f)
	}
}

// note writes a strike into the rows that it concerns.
func (t *tx) note(ev script.Event, st strike) {
	for _, r := range t.list() {
		if ev.Stage == StageRcpt && r.recipient != ev.Recipients[0] {
			continue
		}
		r.Update(func(a *Attempt) {
			if a.Fault != "" {
				a.Fault += ","
			}
			a.Fault += st.name
			a.Rules = append(a.Rules[:len(a.Rules):len(a.Rules)], st.rule)
		})
	}
}

// newRow opens a row for a recipient, or gives the mail's first row its name.
func (t *tx) newRow(recipient string) *row {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.rows) == 1 && t.rows[0].recipient == "" {
		r := t.rows[0]
		r.recipient = recipient
		r.Update(func(a *Attempt) { a.Recipient, a.Stage = recipient, string(StageRcpt) })
		return r
	}
	stage := StageRcpt
	if recipient == "" {
		stage = StageMail
	}
	r := &row{recipient: recipient, Row: t.c.srv.ledger.Begin(Attempt{
		Transport: "smtp", Session: t.c.id, Client: t.c.client, Sender: t.sender,
		Recipient: recipient, From: t.from, Stage: string(stage),
	})}
	t.rows = append(t.rows, r)
	return r
}

// drop takes a refused recipient's row out of the mail.
func (t *tx) drop(r *row) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, x := range t.rows {
		if x == r {
			t.rows = append(t.rows[:i:i], t.rows[i+1:]...)
			return
		}
	}
}

// endRows lets the next answer end all rows of the mail.
func (c *conn) endRows(t *tx) {
	rows := t.list()
	c.mu.Lock()
	for _, x := range rows {
		c.pending = append(c.pending, &rowEnd{tx: t, row: x})
	}
	c.mu.Unlock()
	t.mu.Lock()
	t.rows = nil
	t.mu.Unlock()
}

// again opens rows for a mail whose DATA was refused and is tried again within
// the same transaction.
func (t *tx) again() {
	if len(t.list()) > 0 {
		return
	}
	t.from = t.c.srv.opt.Clock()
	for _, to := range t.rcpts {
		t.newRow(to)
	}
}

// Mail begins a transaction: from here on the ledger has a row.
func (s *session) Mail(from string, _ *gosmtp.MailOptions) error {
	c := s.c
	c.mails++
	t := &tx{c: c, sender: from, from: c.srv.opt.Clock()}
	t.newRow("")
	c.mu.Lock()
	old := s.tx
	s.tx = t
	c.mu.Unlock()
	if old != nil {
		old.finish(t.from, nil)
	}
	if c.srv.engine.Quiet() {
		return nil
	}
	ev := c.event(StageMail)
	ev.Sender = from
	return s.refuse(t, t.list(), c.at(ev))
}

// refuse turns an outcome into go-smtp's error; the answer ends the rows.
func (s *session) refuse(t *tx, rows []*row, out outcome) error {
	switch {
	case out.gone:
		return &gosmtp.SMTPError{Code: 421, EnhancedCode: gosmtp.EnhancedCode{4, 3, 2}, Message: "closing"}
	case out.answer == nil:
		return nil
	}
	s.c.mu.Lock()
	for _, r := range rows {
		s.c.pending = append(s.c.pending, &rowEnd{tx: t, row: r})
	}
	s.c.mu.Unlock()
	for _, r := range rows {
		t.drop(r)
	}
	return out.answer.smtpError()
}

// Rcpt adds a recipient, or refuses it.
func (s *session) Rcpt(to string, _ *gosmtp.RcptOptions) error {
	c := s.c
	t := c.tx()
	if t == nil {
		return &gosmtp.SMTPError{Code: 503, EnhancedCode: gosmtp.EnhancedCode{5, 5, 1}, Message: "MAIL first"}
	}
	t.nRcpt++
	r := t.newRow(to)
	nth := c.srv.engine.Try("rcpt:" + to)
	if t.nth == 0 {
		t.subject, t.nth = to, nth
	}
	if c.srv.engine.Quiet(to) {
		t.rcpts = append(t.rcpts, to)
		return nil
	}
	ev := c.event(StageRcpt)
	ev.Sender, ev.Recipients, ev.RecipientNo, ev.Subject, ev.Nth = t.sender, []string{to}, t.nRcpt, to, nth
	if err := s.refuse(t, []*row{r}, c.at(ev)); err != nil {
		return err
	}
	t.rcpts = append(t.rcpts, to)
	return nil
}

// Data reads a mail up to its end and decides what becomes of it.
func (s *session) Data(r io.Reader) error {
	t := s.c.tx()
	if t == nil {
		return &gosmtp.SMTPError{Code: 503, EnhancedCode: gosmtp.EnhancedCode{5, 5, 1}, Message: "MAIL first"}
	}
	t.spool = s.c.srv.mails.spool()
	defer func() { s.c.srv.disk.Failed(t.spool.close()) }()
	if _, chunked := r.(*io.PipeReader); !chunked { // BDAT runs beside the connection
		r = &dataBody{s.c, s.c.srv.opt.MaxMessageBytes}
	}
	hash, size, err := s.body(t, r)
	if err != nil {
		return s.bodyFailed(t, err)
	}
	now := s.c.srv.opt.Clock()
	t.dotAt = now
	t.update(func(a *Attempt) {
		a.Stage, a.DotAt = string(StageDot), now
		a.Key, a.MessageID, a.Subject = t.key, t.messageID, t.title
		a.BodyHash, a.Size = hash, size
	})
	return s.settle(t)
}

var errGone = &gosmtp.SMTPError{Code: 421, EnhancedCode: gosmtp.EnhancedCode{4, 3, 2}, Message: "closing"}

// settle runs the stages after the dot: before the store, after it.
func (s *session) settle(t *tx) error {
	c := s.c
	t.subject, t.nth = t.identity(), c.srv.engine.Try("mail:"+t.identity())
	out := c.atTx(t, StageDot)
	if out.gone {
		return errGone
	}
	if out.answer != nil {
		return s.final(t, *out.answer)
	}
	answer := s.store(t)
	out = c.atTx(t, StageStored)
	if out.gone {
		return errGone
	}
	if out.answer != nil {
		answer = *out.answer
	}
	return s.final(t, answer)
}

// store keeps the mail for each recipient.
func (s *session) store(t *tx) reply {
	c := s.c
	dedup := ""
	switch c.srv.opt.Mode {
	case DedupByKey:
		dedup = t.key
	case DedupByMessageID:
		dedup = t.messageID
	}
	now := t.dotAt
	if c.waited {
		now = c.srv.opt.Clock()
	}
	kept := t.head
	if len(kept) > c.srv.opt.KeepBody {
		kept = bytes.Clone(kept[:c.srv.opt.KeepBody])
	}
	first := int64(0)
	for _, r := range t.list() {
		stored, _ := r.Store(dedup, now)
		if !stored {
			continue
		}
		c.srv.mails.put(r.ID(), kept)
		t.spool.keep(r.ID())
		if first == 0 {
			first = r.ID()
		}
	}
	t.update(func(a *Attempt) { a.Stage = string(StageStored) })
	if first == 0 {
		return reply{250, "2.0.0", "Ok: duplicate of an earlier mail"}
	}
	return reply{250, "2.0.0", "Ok: queued as " + strconv.FormatInt(first, 10)}
}

// final hands the answer to the dot to go-smtp; sending it ends the rows.
func (s *session) final(t *tx, r reply) error {
	rows := t.list()
	s.c.mu.Lock()
	for _, x := range rows {
		s.c.pending = append(s.c.pending, &rowEnd{tx: t, row: x, final: true})
	}
	s.c.mu.Unlock()
	return r.smtpError()
}

// bodyFailed answers a body that could not be read whole.
func (s *session) bodyFailed(t *tx, err error) error {
	var se *gosmtp.SMTPError
	if errors.As(err, &se) {
		return s.final(t, reply{se.Code, fmt.Sprintf("%d.%d.%d", se.EnhancedCode[0], se.EnhancedCode[1], se.EnhancedCode[2]), se.Message})
	}
	if errors.Is(err, gosmtp.ErrDataReset) {
		return err // RSET or a lost connection inside BDAT: nobody waits for an answer
	}
	return s.final(t, reply{451, "4.4.2", "Connection lost before the end of the mail"})
}

// headLimit is how much of a mail is searched for headers.
const headLimit = 64 << 10

// body reads the mail: hash and size of all of it, the kept beginning.
func (s *session) body(t *tx, r io.Reader) (sum string, size int64, err error) {
	h := sha256.New()
	b := bodies.Get().(*[]byte)
	defer bodies.Put(b)
	for {
		n, err := r.Read(*b)
		h.Write((*b)[:n])
		t.spool.write((*b)[:n])
		size += int64(n)
		if room := max(s.c.srv.opt.KeepBody, headLimit) - len(t.head); room > 0 {
			t.head = append(t.head, (*b)[:min(room, n)]...)
		}
		if err == io.EOF {
			t.readHeaders(s.c.srv.opt.KeyHeader)
			return hex.EncodeToString(h.Sum(nil)), size, nil
		}
		if err != nil {
			return "", size, err
		}
	}
}

// Reset ends the transaction: RSET, EHLO, a new MAIL, or the regular end.
func (s *session) Reset() {
	s.c.mu.Lock()
	t := s.tx
	s.tx = nil
	s.c.mu.Unlock()
	s.c.began = time.Time{}
	if t != nil {
		t.finish(s.c.srv.opt.Clock(), nil)
	}
}

// Logout does nothing: the connection ends the rows itself.
func (s *session) Logout() error { return nil }

// AuthMechanisms offered.
func (s *session) AuthMechanisms() []string { return []string{sasl.Plain, sasl.Login} }

// Auth checks against Options.Users.
func (s *session) Auth(mech string) (sasl.Server, error) {
	switch mech {
	case sasl.Plain:
		return sasl.NewPlainServer(func(_, user, pass string) error { return s.authenticate(user, pass) }), nil
	case sasl.Login:
		return &loginServer{check: s.authenticate}, nil
	}
	return nil, gosmtp.ErrAuthUnknownMechanism
}

func (s *session) authenticate(user, pass string) error {
	users := s.c.srv.opt.Users
	if want, ok := users[user]; users == nil || (ok && want == pass) {
		return nil
	}
	return usual[535].smtpError()
}

// loginServer is the server's side of AUTH LOGIN.
type loginServer struct {
	check func(user, pass string) error
	user  *string
	asked bool
}

func (l *loginServer) Next(response []byte) ([]byte, bool, error) {
	if response == nil && !l.asked {
		l.asked = true
		return []byte("Username:"), false, nil
	}
	if l.user == nil {
		user := string(response)
		l.user = &user
		return []byte("Password:"), false, nil
	}
	return nil, true, l.check(*l.user, string(response))
}

// identity is what tries of a mail are counted by.
func (t *tx) identity() string {
	switch {
	case t.key != "":
		return t.key
	case t.messageID != "":
		return t.messageID
	}
	return strings.Join(t.rcpts, ",")
}

func (t *tx) readHeaders(keyHeader string) {
	first := []string{keyHeader, "Message-ID", "Subject"}
	found := headers(t.head, first...)
	t.key, t.messageID, t.title = clip(found[0].first()), clip(found[1].first()), clip(found[2].first())
}

// maxValue bounds what one header may add to a ledger row: a line's length by
// RFC 5322 2.1.1.
const maxValue = 998

// clip shortens a value that is too long; what is cut off still tells two
// values apart.
func clip(s string) string {
	if len(s) <= maxValue {
		return s
	}
	sum := sha256.Sum256([]byte(s))
	return s[:maxValue-20] + "…" + hex.EncodeToString(sum[:8])
}

func (t *tx) header(name string) []string { return headers(t.head, name)[0] }

// values of one header field, in their order.
type values []string

func (v values) first() string {
	if len(v) == 0 {
		return ""
	}
	return v[0]
}

// headers returns the values of all header fields of each name, unfolded and
// decoded (RFC 2047 where it applies), in one pass.
func headers(head []byte, names ...string) []values {
	out := make([]values, len(names))
	for len(head) > 0 {
		field, rest := cutField(head)
		if field == nil {
			break
		}
		head = rest
		name, value, ok := bytes.Cut(field, colon)
		if !ok || blank(field[0]) {
			continue // no field, or the continuation of none
		}
		name = bytes.TrimSpace(name)
		for i, want := range names {
			if len(name) == len(want) && strings.EqualFold(string(name), want) {
				out[i] = append(out[i], unfold(value))
			}
		}
	}
	for _, v := range out {
		v.decode()
	}
	return out
}

// cutField cuts the first field with the lines that continue it; nil is the end
// of the header section.
func cutField(head []byte) (field, rest []byte) {
	end := 0
	for {
		line, _, ended := bytes.Cut(head[end:], newline)
		if end == 0 && len(bytes.TrimRight(line, "\r")) == 0 {
			return nil, nil
		}
		end += len(line)
		if ended {
			end++
		}
		if end == len(head) || !blank(head[end]) {
			return head[:end], head[end:]
		}
	}
}

func blank(c byte) bool { return c == ' ' || c == '\t' }

// unfold takes out the line ends and keeps the white space after them (RFC 5322
// 2.2.3), and then trims: a value may begin with a fold, as go-mail and Python
// write a long first word, and the white space around a value is no part of it.
func unfold(value []byte) string {
	var b strings.Builder
	for line := range bytes.SplitSeq(value, newline) {
		b.Write(bytes.TrimRight(line, "\r"))
	}
	return strings.TrimSpace(b.String())
}

var newline, colon = []byte{'\n'}, []byte{':'}

func (v values) decode() {
	for i, s := range v {
		if strings.Contains(s, "=?") {
			if d, err := new(mime.WordDecoder).DecodeHeader(s); err == nil {
				v[i] = d
			}
		}
	}
}

// bodies are read buffers: one per body in transfer.
var bodies = sync.Pool{New: func() any { b := make([]byte, 16<<10); return &b }}
