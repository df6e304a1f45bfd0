package resendapi

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// route finds what a request asks for.
func (s *Server) route(w http.ResponseWriter, r *http.Request) {
	c := &call{s: s, w: w, r: r, conn: connOf(r.Context()), client: r.Header.Get("User-Agent"), key: r.Header.Get("Idempotency-Key")}
	c.number = c.conn.request(c.client, r.Method+" "+r.URL.Path)
	path := strings.TrimSuffix(r.URL.Path, "/")
	if r.Method == http.MethodPost && (path == "/emails" || path == "/emails/batch") {
		c.batch = path == "/emails/batch"
		c.send()
		return
	}
	c.other, c.key = true, ""
	c.serveOther(path)
}

// maxOther bounds the body of a request that sends nothing.
const maxOther = 1 << 20

func (c *call) serveOther(path string) {
	if c.stop(c.at(StageOther)) {
		return
	}
	_ = c.conn.SetReadDeadline(time.Now().Add(c.s.opt.BodyTimeout))
	c.r.Body = http.MaxBytesReader(c.w, c.r.Body, maxOther)
	f, e := c.find404(path)
	if e == nil {
		e = c.admit()
	}
	if e != nil {
		c.answer(refusal(e))
		return
	}
	v, e := f()
	_ = c.conn.SetReadDeadline(time.Time{})
	if e != nil {
		c.answer(refusal(e))
		return
	}
	c.answer(answer{status: http.StatusOK, body: marshal(v)})
}

type endpoint = func() (any, *APIError)

// find404 finds the endpoint of a path and method, or says which of the two is
// wrong.
func (c *call) find404(path string) (endpoint, *APIError) {
	parts := strings.Split(strings.TrimPrefix(path, "/"), "/")
	id := ""
	if len(parts) > 1 {
		id = parts[1]
	}
	var methods map[string]endpoint
	switch {
	case path == "/emails":
		methods = map[string]endpoint{"GET": c.listEmails, "POST": nil}
	case path == "/emails/batch":
		methods = map[string]endpoint{"POST": nil}
	case len(parts) == 2 && parts[0] == "emails":
		methods = map[string]endpoint{
			"GET":   func() (any, *APIError) { return c.getEmail(id) },
			"PATCH": func() (any, *APIError) { return c.updateEmail(id) },
		}
	case len(parts) == 3 && parts[0] == "emails" && parts[2] == "cancel":
		methods = map[string]endpoint{"POST": func() (any, *APIError) { return c.cancelEmail(id) }}
	case path == "/webhooks":
		methods = map[string]endpoint{"GET": c.listWebhooks, "POST": c.createWebhook}
	case len(parts) == 2 && parts[0] == "webhooks":
		methods = map[string]endpoint{
			"GET":    func() (any, *APIError) { return c.getWebhook(id) },
			"PATCH":  func() (any, *APIError) { return c.updateWebhook(id) },
			"DELETE": func() (any, *APIError) { return c.deleteWebhook(id) },
		}
	default:
		return nil, must(404, "not_found")
	}
	if f := methods[c.r.Method]; f != nil {
		return f, nil
	}
	return nil, must(405, "method_not_allowed")
}

// read decodes the request's body.
func (c *call) read(v any) *APIError {
	err := json.NewDecoder(c.r.Body).Decode(v)
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) {
		return &APIError{http.StatusRequestEntityTooLarge, "validation_error", "The request body is too large."}
	}
	if err != nil {
		return must(400, "validation_error").saying("The request body is not valid JSON: %s.", err)
	}
	return nil
}

// Email is a mail as GET /emails/{id} gives it.
type Email struct {
	Object      string    `json:"object,omitempty"`
	ID          string    `json:"id"`
	MessageID   string    `json:"message_id"`
	To          addresses `json:"to"`
	From        string    `json:"from"`
	CreatedAt   string    `json:"created_at"`
	Subject     string    `json:"subject"`
	HTML        *string   `json:"html"`
	Text        *string   `json:"text"`
	Bcc         addresses `json:"bcc"`
	Cc          addresses `json:"cc"`
	ReplyTo     addresses `json:"reply_to"`
	LastEvent   string    `json:"last_event"`
	ScheduledAt *string   `json:"scheduled_at"`
	Tags        []tag     `json:"tags,omitempty"`
}

// listed is a mail as GET /emails lists it: without its contents.
type listed struct {
	ID          string    `json:"id"`
	MessageID   string    `json:"message_id"`
	To          addresses `json:"to"`
	From        string    `json:"from"`
	CreatedAt   string    `json:"created_at"`
	Subject     string    `json:"subject"`
	Bcc         addresses `json:"bcc"`
	Cc          addresses `json:"cc"`
	ReplyTo     addresses `json:"reply_to"`
	LastEvent   string    `json:"last_event"`
	ScheduledAt *string   `json:"scheduled_at"`
}

// stamp is a time as the API writes it.
func stamp(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05.000000-07") }

// load reads a mail back.
func (s *Server) load(serial int64) (*mail, error) {
	b, err := s.mails.contents(serial)
	if err != nil {
		return nil, err
	}
	m := &mail{raw: b}
	if err := json.Unmarshal(b, m); err != nil {
		return nil, fmt.Errorf("reading mail %s back: %w", s.ids.uuid(serial), err)
	}
	return m, nil
}

func (s *Server) email(serial int64, e entry) (*Email, *APIError) {
	m, err := s.load(serial)
	if err != nil {
		s.diskFailed(err)
		return nil, must(500, "application_error").saying("%s", err)
	}
	id := s.ids.uuid(serial)
	x := &Email{
		Object: "email", ID: id, MessageID: messageID(id), To: m.To, From: m.From,
		CreatedAt: stamp(s.started.Add(e.at)), Subject: m.Subject,
		Bcc: list(m.Bcc), Cc: list(m.Cc), ReplyTo: list(m.ReplyTo),
		LastEvent: e.event(s.engine.Now()), Tags: m.Tags,
	}
	x.HTML, x.Text = orNull(m.HTML.String()), orNull(m.Text.String())
	if e.due != e.at {
		at := stamp(s.started.Add(e.due))
		x.ScheduledAt = &at
	}
	return x, nil
}

func list(a addresses) addresses {
	if a == nil {
		return addresses{}
	}
	return a
}

func orNull(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// event is the last thing that happened to the mail.
func (e *entry) event(now time.Duration) string {
	switch {
	case e.canceled:
		return "canceled"
	case now < e.due:
		return "scheduled"
	case e.fate == fateSuppressed:
		return "suppressed"
	}
	last := "sent"
	for _, step := range e.steps() {
		if now >= e.due+step.after {
			last = step.event
		}
	}
	return last
}

// step is one event in a mail's life, so long after it was sent.
type step struct {
	event string
	after time.Duration
}

// deferral is how long a deferred mail waits when its rule names no time.
const deferral = time.Hour

// steps of the mail's life after it was sent.
func (e *entry) steps() []step {
	switch e.fate {
	case fateBounced:
		return []step{{"bounced", e.after}}
	case fateComplained:
		return []step{{"delivered", e.after}, {"complained", 2 * e.after}}
	case fateSuppressed:
		return []step{{"suppressed", 0}}
	case fateFailed:
		return []step{{"failed", e.after}}
	case fateDeferred:
		wait := e.after
		if wait == 0 {
			wait = deferral
		}
		return []step{{"delivery_delayed", 0}, {"delivered", wait}}
	}
	return []step{{"delivered", e.after}}
}

// serialOf finds a mail by its id.
func (c *call) serialOf(id string) (int64, entry, *APIError) {
	if _, ok := parseUUID(id); !ok {
		return 0, entry{}, must(422, "invalid_parameter").saying("The `id` must be a valid UUID.")
	}
	serial, ok := c.s.ids.serial(id)
	if ok {
		if e, ok := c.s.mails.get(serial); ok && !e.lie() {
			return serial, e, nil
		}
	}
	return 0, entry{}, must(404, "not_found").saying("Email not found")
}

// lie reports whether the mail's id was given away and nothing was kept.
func (e *entry) lie() bool { return e.canceled && e.size == 0 }

func (c *call) getEmail(id string) (any, *APIError) {
	serial, e, err := c.serialOf(id)
	if err != nil {
		return nil, err
	}
	x, err := c.s.email(serial, e)
	if err != nil {
		return nil, err
	}
	return x, nil
}

// listEmails lists the mails, the newest first.
func (c *call) listEmails() (any, *APIError) {
	p, err := c.page()
	if err != nil {
		return nil, err
	}
	from, step := c.s.mails.count()-1, int64(-1)
	switch {
	case p.after != "":
		serial, _, err := c.serialOf(p.after)
		if err != nil {
			return nil, err
		}
		from = serial - 1
	case p.before != "":
		serial, _, err := c.serialOf(p.before)
		if err != nil {
			return nil, err
		}
		from, step = serial+1, 1
	}
	data, more, err := c.collect(from, step, p.limit)
	if err != nil {
		return nil, err
	}
	if step > 0 {
		for i, j := 0, len(data)-1; i < j; i, j = i+1, j-1 {
			data[i], data[j] = data[j], data[i]
		}
	}
	return page[listed]{"list", more, data}, nil
}

type page[T any] struct {
	Object  string `json:"object"`
	HasMore bool   `json:"has_more"`
	Data    []T    `json:"data"`
}

func (c *call) collect(from, step int64, limit int) ([]listed, bool, *APIError) {
	data := []listed{}
	for n := from; ; n += step {
		e, ok := c.s.mails.get(n)
		if !ok {
			return data, false, nil
		}
		if e.lie() {
			continue
		}
		if len(data) == limit {
			return data, true, nil
		}
		x, err := c.s.email(n, e)
		if err != nil {
			return nil, false, err // a list that leaves it out would say that it does not exist
		}
		data = append(data, listed{
			x.ID, x.MessageID, x.To, x.From, x.CreatedAt, x.Subject, x.Bcc, x.Cc, x.ReplyTo, x.LastEvent, x.ScheduledAt,
		})
	}
}

type paging struct {
	limit         int
	after, before string
}

// The bounds of a page, and its size when none is asked for.
const (
	pageMax     = 100
	pageDefault = 20
)

func (c *call) page() (paging, *APIError) {
	q := c.r.URL.Query()
	p := paging{pageDefault, q.Get("after"), q.Get("before")}
	if s := q.Get("limit"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 || n > pageMax {
			return p, must(422, "validation_error").saying("The `limit` must be a number between 1 and %d.", pageMax)
		}
		p.limit = n
	}
	if p.after != "" && p.before != "" {
		return p, must(422, "validation_error").saying("`after` and `before` cannot be used together.")
	}
	return p, nil
}

type changed struct {
	Object string `json:"object"`
	ID     string `json:"id"`
}

// updateEmail gives a scheduled mail another time.
func (c *call) updateEmail(id string) (any, *APIError) {
	serial, e, err := c.scheduled(id, "update")
	if err != nil {
		return nil, err
	}
	var ask struct {
		ScheduledAt string `json:"scheduled_at"`
	}
	if err := c.read(&ask); err != nil {
		return nil, err
	}
	if ask.ScheduledAt == "" {
		return nil, must(422, "missing_required_field").saying("Missing `scheduled_at` field.")
	}
	due, err := c.s.parseSchedule(ask.ScheduledAt)
	if err != nil {
		return nil, err
	}
	c.s.mails.change(serial, func(e *entry) { e.due = due; e.plan++ })
	c.s.hooks.planned(serial, due-e.due, e.plan+1)
	return changed{"email", id}, nil
}

// cancelEmail takes a scheduled mail back.
func (c *call) cancelEmail(id string) (any, *APIError) {
	serial, _, err := c.scheduled(id, "cancel")
	if err != nil {
		return nil, err
	}
	c.s.mails.change(serial, func(e *entry) { e.canceled = true; e.plan++ })
	return changed{"email", id}, nil
}

// scheduled finds a mail that still waits for its time.
func (c *call) scheduled(id, what string) (int64, entry, *APIError) {
	serial, e, err := c.serialOf(id)
	if err != nil {
		return 0, e, err
	}
	if e.canceled || c.s.engine.Now() >= e.due {
		return 0, e, must(422, "validation_error").saying("Cannot %s an email that is not scheduled.", what)
	}
	return serial, e, nil
}
