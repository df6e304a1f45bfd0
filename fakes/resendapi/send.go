package resendapi

import (
	"errors"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"mailproof/fakes/ledger"
)

// send is POST /emails and POST /emails/batch.
func (c *call) send() {
	c.begin()
	// It bounds what net/http itself reads of a body that nobody wants.
	_ = c.conn.SetReadDeadline(time.Now().Add(c.s.opt.BodyTimeout))
	if c.stop(c.at(StageHeaders)) {
		return
	}
	body, err := c.readBody()
	if err != nil {
		c.unread(err)
		return
	}
	mails, problem := parse(body, c.batch)
	sent := c.received(mails, body)
	if c.stop(c.at(StageRequest)) {
		return
	}
	if e := c.admit(); e != nil {
		c.answer(refusal(e))
		return
	}
	if e := c.checkKey(); e != nil {
		c.answer(refusal(e))
		return
	}
	good, failed, e := c.checkAll(problem)
	c.deliver(body, sent, good, failed, e)
}

// begin opens the request's first row.
func (c *call) begin() {
	c.named = c.key
	if c.key != "" {
		c.subject = "key:" + c.key
		c.nth = c.s.engine.Try(c.subject)
	}
	now := c.s.opt.Clock()
	c.rows = append(c.rows, c.s.ledger.Begin(Attempt{
		Transport: "resend", Session: c.conn.id, Client: c.client, Key: c.rowKey(0), From: now,
		Stage: string(StageHeaders),
	}))
}

// rowKey is the key under which the n-th mail of the request stands in the
// ledger: the mails of a batch share one, so each gets its place behind it.
func (c *call) rowKey(n int) string {
	if c.key != "" && c.batch {
		return c.key + "[" + strconv.Itoa(n) + "]"
	}
	return c.key
}

// unread ends a request whose body did not arrive whole.
func (c *call) unread(err error) {
	switch {
	case errors.Is(err, errStruck):
	case errors.Is(err, errTooLarge):
		c.w.Header().Set("Connection", "close")
		c.answer(refusal(&APIError{http.StatusRequestEntityTooLarge, "validation_error", "The request body is too large."}))
	default: // the client left, or was too slow
		c.update(func(a *Attempt) { a.PeerGone = true })
		c.kill(false)
	}
}

// received names the rows: the whole request is there.
func (c *call) received(mails []*mail, body []byte) digest {
	now := c.s.opt.Clock()
	sent, hash := hashOf(body)
	c.mails = mails
	first := c.rows[0]
	first.Update(func(a *Attempt) {
		a.Stage, a.DotAt, a.BodyHash, a.Size = string(StageRequest), now, hash, int64(len(body))
	})
	row := 0
	for i, m := range mails {
		key, sum := c.mailKey(i, m), hash
		if c.batch {
			_, sum = hashOf(m.raw)
		}
		for _, to := range m.recipients() {
			c.recipients = append(c.recipients, to)
			name := func(a *Attempt) {
				a.Key, a.Sender, a.Recipient, a.Subject = key, bare(m.From), to, m.Subject
				a.BodyHash, a.Size = sum, int64(len(m.raw))
			}
			if row == 0 {
				first.Update(name)
			} else {
				more := first.Get()
				name(&more)
				c.rows = append(c.rows, c.s.ledger.Begin(more))
			}
			row++
		}
	}
	if len(mails) > 0 {
		c.sender, c.named = bare(mails[0].From), c.mailKey(0, mails[0])
	}
	if c.key != "" {
		c.named = c.key
	}
	c.count()
	c.lint(mails)
	return sent
}

// mailKey is the key of the n-th mail: the request's, else the one that the
// mail carries among its headers.
func (c *call) mailKey(n int, m *mail) string {
	if c.key != "" {
		return c.rowKey(n)
	}
	if v := m.header(c.s.opt.KeyHeader); len(v) > 0 {
		return v[0]
	}
	return ""
}

// count counts one more try of a request without a key, by its recipients.
func (c *call) count() {
	if c.subject == "" && len(c.recipients) > 0 {
		c.subject = strings.Join(c.recipients, ",")
		c.nth = c.s.engine.Try("to:" + c.subject)
	}
}

func (c *call) lint(mails []*mail) {
	keyed := digest{}
	if c.key != "" {
		keyed = c.scope()
	}
	now := c.s.engine.Now()
	for _, m := range mails {
		c.find(c.s.memory.look(m, c.key, keyed, now)...)
	}
}

// find notes findings in all rows, each once.
func (c *call) find(names ...string) {
	for _, name := range names {
		c.update(func(a *Attempt) {
			for _, f := range a.Findings {
				if f == name {
					return
				}
			}
			a.Findings = append(a.Findings[:len(a.Findings):len(a.Findings)], name)
		})
	}
}

// checkKey says whether the key has a legal length. An empty header is one
// with no character.
func (c *call) checkKey() *APIError {
	values, sent := c.r.Header["Idempotency-Key"]
	if !sent || (len(values) > 0 && len(values[0]) >= 1 && len([]rune(values[0])) <= maxKey) {
		return nil
	}
	return must(400, "invalid_idempotency_key")
}

// checkAll checks each mail. Permissive batches leave out the bad ones.
func (c *call) checkAll(problem *APIError) (good []int, failed []batchError, err *APIError) {
	permissive := false
	if c.batch {
		switch v := c.r.Header.Get("X-Batch-Validation"); v {
		case "", "strict":
		case "permissive":
			permissive = true
		default:
			return nil, nil, must(422, "validation_error").saying("The `x-batch-validation` header must be `strict` or `permissive`.")
		}
	}
	if problem != nil {
		return nil, nil, problem
	}
	for i, m := range c.mails {
		e := c.s.check(m, c.batch)
		switch {
		case e == nil:
			good = append(good, i)
		case permissive:
			failed = append(failed, batchError{i, e.Message})
		case c.batch:
			return nil, nil, e.saying("emails[%d]: %s", i, e.Message)
		default:
			return nil, nil, e
		}
	}
	return good, failed, nil
}

type batchError struct {
	Index   int    `json:"index"`
	Message string `json:"message"`
}

// scope is what the key is unique within.
func (c *call) scope() digest {
	if c.scoped != nil {
		return *c.scoped
	}
	parts := []string{c.key, c.r.Method, c.r.URL.Path}
	if c.s.opt.Idempotency.Scope == ScopeCredential {
		parts = append(parts, bearer(c.r))
	}
	d := digestOf(parts...)
	c.scoped = &d
	return d
}

// expireKey ends the key's lifetime before its time: the server breaks its
// word.
func (c *call) expireKey() {
	if c.key != "" && c.s.keys.expire(c.scope(), c.s.engine.Now()) {
		c.breach = true
	}
}

// deliver takes the key, keeps the mails and answers; refused is what is wrong
// with the request, if anything is.
func (c *call) deliver(body []byte, sent digest, good []int, failed []batchError, refused *APIError) {
	if refused != nil && (c.key == "" || !c.s.opt.Idempotency.ValidationReservesKey) {
		c.answer(refusal(refused))
		return
	}
	if c.key != "" && !c.claim(c.scope(), sent, c.s.keys.payload(body, sent, c.batch)) {
		return
	}
	// From here on the key is in flight. Whatever ends the request without
	// settling it releases it, before the client can know.
	if refused != nil {
		x := refusal(refused)
		c.settle(-1, &storedAnswer{x.status, x.body})
		c.answer(x)
		return
	}
	if e := c.quota(good); e != nil {
		c.answer(refusal(e))
		return
	}
	c.update(func(a *Attempt) { a.Stage = string(StageReserved) })
	out := c.at(StageReserved)
	if !c.stop(out) {
		c.keep(good, failed, out.status)
	}
}

// claim takes the key; false when the request was answered because of it.
func (c *call) claim(key, sent, payload digest) bool {
	got, old, seen := c.s.keys.begin(key, sent, payload, c.s.engine.Now())
	switch got {
	case concurrent:
		c.answer(refusal(must(409, "concurrent_idempotent_requests")))
		return false
	case conflicted:
		c.find(FindingChangedPayload)
		c.answer(refusal(must(409, "invalid_idempotent_request")))
		return false
	case replayed:
		if old.bytes != sent.start() {
			c.find(FindingChangedBytes)
		}
		c.again(old)
		return false
	}
	c.inFlight = &key
	if seen && old.expired {
		c.breach = true // it would have been known, had the script not made the server forget
	} else if seen {
		c.find(FindingLate)
	}
	return true
}

// again answers a request as its key was answered before.
func (c *call) again(old record) {
	x := answer{status: http.StatusOK}
	if old.serial < 0 {
		x.status, x.body = old.kept.status, old.kept.body
	} else {
		x.body = c.sentBody(old.serial)
	}
	if x.status < 300 {
		for _, r := range c.rows {
			r.Duplicate()
		}
		if old.serial >= 0 {
			id := messageID(c.s.ids.uuid(old.serial))
			c.update(func(a *Attempt) { a.MessageID = id })
		}
	}
	c.stored(x)
}

// stored asks the rules of stage stored and answers.
func (c *call) stored(x answer) {
	out := c.at(StageStored)
	if c.stop(out) {
		return
	}
	if out.status != 0 {
		x.status = out.status
	}
	c.answer(x)
}

func (c *call) sentBody(serial int64) []byte {
	return []byte(`{"id":"` + c.s.ids.uuid(serial) + `"}`)
}

func messageID(id string) string { return "<" + id + "@resend.fake>" }

// settle keeps what the key is answered with.
func (c *call) settle(serial int64, x *storedAnswer) {
	if c.inFlight == nil {
		return
	}
	c.s.keys.settle(*c.inFlight, c.s.engine.Now(), serial, x)
	c.inFlight = nil
	if c.expireLater {
		c.expireKey()
	}
}

// free gives the key back if the request still holds it: nothing was done.
func (c *call) free() {
	if c.inFlight != nil {
		c.s.keys.release(*c.inFlight)
		c.inFlight = nil
	}
}

func (c *call) quota(good []int) *APIError {
	n := 0
	for _, i := range good {
		m := c.mails[i]
		n += len(m.To) + len(m.Cc) + len(m.Bcc)
	}
	return c.s.limits.quota(c.w.Header(), n, c.s.wall())
}

// keep stores the mails, settles the key and answers. A status from a rule at
// stage reserved is the lie that answers without keeping.
func (c *call) keep(good []int, failed []batchError, lie int) {
	serials := make([]int64, len(good))
	row := 0
	next := 0
	for i, m := range c.mails {
		n := len(m.To) + len(m.Cc) + len(m.Bcc)
		if next < len(good) && good[next] == i {
			serials[next] = c.keepOne(i, m, c.rows[row:row+n], lie != 0)
			next++
		} else {
			c.refuse(c.rows[row:row+n], failed, i)
		}
		row += n
	}
	x := answer{status: http.StatusOK}
	if !c.batch {
		x.body = c.sentBody(serials[0])
		c.settle(serials[0], nil)
	} else {
		x.body = c.batchBody(serials, failed)
		c.settle(-1, &storedAnswer{x.status, x.body})
	}
	if lie != 0 {
		x.status = lie
		c.answer(x)
		return
	}
	c.stored(x)
}

// refuse remembers that a permissive batch answers 200 and yet refuses the
// n-th mail.
func (c *call) refuse(rows []*ledger.Row, failed []batchError, n int) {
	for _, f := range failed {
		if f.Index != n {
			continue
		}
		for _, r := range rows {
			if c.refused == nil {
				c.refused = map[*ledger.Row]string{}
			}
			c.refused[r] = "422 " + f.Message
		}
	}
}

func (c *call) keepOne(n int, m *mail, rows []*ledger.Row, discard bool) int64 {
	s := c.s
	now := s.engine.Now()
	e := entry{at: now, due: now, after: s.opt.DeliverAfter}
	if m.scheduled != 0 {
		e.due = m.scheduled
	}
	s.fate(c, m, &e)
	contents := m.kept()
	if discard {
		// The id must be one of its own all the same, or a later mail would
		// share it. It leads nowhere.
		e.canceled, contents = true, nil
	}
	serial := s.mails.put(contents, e)
	id := messageID(s.ids.uuid(serial))
	for _, r := range rows {
		r.Update(func(a *Attempt) { a.MessageID = id })
		if discard {
			continue
		}
		// The ledger counts a mail without a key by its Message-ID: each is
		// one of its own.
		r.Store("", s.opt.Clock())
		r.Update(func(a *Attempt) { a.Stage = string(StageStored) })
		s.mails.name(r.ID(), serial)
	}
	if !discard {
		s.hooks.mail(serial, c.mailKey(n, m), m, e)
	}
	return serial
}

type sentMail struct {
	ID string `json:"id"`
}

func (c *call) batchBody(serials []int64, failed []batchError) []byte {
	out := struct {
		Data   []sentMail   `json:"data"`
		Errors []batchError `json:"errors,omitempty"`
	}{Data: []sentMail{}, Errors: failed}
	for _, n := range serials {
		out.Data = append(out.Data, sentMail{c.s.ids.uuid(n)})
	}
	return marshal(out)
}

// admit checks who asks, and how often.
func (c *call) admit() *APIError {
	if c.client == "" && !c.s.opt.AllowNoUserAgent {
		return errNoAgent
	}
	if e := c.authorize(); e != nil {
		return e
	}
	return c.s.limits.allow(c.w.Header(), bearer(c.r), c.s.engine.Now())
}

// errNoAgent is what a missing User-Agent gets; the service in front of the API
// refuses it.
var errNoAgent = &APIError{http.StatusForbidden, "validation_error", "error code: 1010"}

func (c *call) authorize() *APIError {
	key := bearer(c.r)
	if key == "" {
		return must(401, "missing_api_key")
	}
	if c.s.opt.APIKeys == nil {
		return nil
	}
	switch c.s.opt.APIKeys[key] {
	case FullAccess:
		return nil
	case SendingAccess:
		if c.other {
			return must(401, "restricted_api_key")
		}
		return nil
	case Inactive:
		return must(403, "restricted_api_key")
	case Suspended:
		return must(403, "suspended_api_key")
	case NoScopes:
		return must(403, "invalid_permission")
	}
	if c.other {
		return must(400, "validation_error").saying("API key is invalid")
	}
	return must(401, "validation_error")
}

func bearer(r *http.Request) string {
	kind, key, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(kind, "Bearer") {
		return ""
	}
	return strings.TrimSpace(key)
}

// fate asks the rules, then the test addresses, what becomes of a mail.
func (s *Server) fate(c *call, m *mail, e *entry) {
	to := m.recipients()
	if !s.engine.Quiet(to...) {
		ev := c.event(StageLifecycle)
		ev.Recipients, ev.Sender = to, bare(m.From)
		if strikes := s.engine.Decide(ev); len(strikes) > 0 {
			st := strikes[len(strikes)-1]
			c.note(st)
			e.setFate(st.Action)
			return
		}
	}
	for _, r := range to {
		if f, ok := testAddress(r); ok {
			e.fate = f
			return
		}
	}
}

func (e *entry) setFate(a Action) {
	e.fate = fateOf[a.Kind]
	if a.For != 0 {
		e.after = a.For.D()
	}
	e.bounce = uint8(max(0, slices.Index(bounceKinds, a.Error)))
}

// testAddress knows Resend's addresses for tests; a +label behind the name is
// allowed.
func testAddress(a string) (fate, bool) {
	local, host, _ := strings.Cut(strings.ToLower(a), "@")
	if host != "resend.dev" {
		return 0, false
	}
	local, _, _ = strings.Cut(local, "+")
	switch local {
	case "delivered":
		return fateDelivered, true
	case "bounced":
		return fateBounced, true
	case "complained":
		return fateComplained, true
	case "suppressed":
		return fateSuppressed, true
	}
	return 0, false
}
