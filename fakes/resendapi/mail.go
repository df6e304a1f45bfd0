package resendapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Resend's limits.
const (
	maxRecipients  = 50
	maxAttachments = 40 << 20 // bytes of a mail's attachments after base64
	maxBatch       = 100
	maxSchedule    = 30 * 24 * time.Hour
	maxTag         = 256
	maxKey         = 256
)

// addresses is a string or a list of strings.
type addresses []string

func (a *addresses) UnmarshalJSON(b []byte) error {
	// Most requests have one plain address: no need to parse it twice.
	if n := len(b); n > 4 && b[0] == '[' && b[1] == '"' && b[n-2] == '"' && bytes.IndexByte(b, '\\') < 0 && bytes.Count(b, []byte{'"'}) == 2 && utf8.Valid(b) {
		*a = addresses{string(b[2 : n-2])}
		return nil
	}
	if len(b) > 0 && b[0] == '"' {
		var s string
		if err := json.Unmarshal(b, &s); err != nil {
			return err
		}
		*a = addresses{s}
		return nil
	}
	var list []string
	if err := json.Unmarshal(b, &list); err != nil {
		return errors.New("an address field must be a string or a list of strings")
	}
	*a = list
	return nil
}

// literal is a JSON string that is only decoded when somebody wants to read it:
// most mails are never looked at.
type literal []byte

func (l *literal) UnmarshalJSON(b []byte) error {
	switch {
	case string(b) == "null":
		return nil
	case len(b) == 0 || b[0] != '"':
		return errors.New("`html` and `text` must be strings")
	}
	*l = append((*l)[:0], b...)
	return nil
}

// MarshalJSON gives the literal back as it came.
func (l literal) MarshalJSON() ([]byte, error) {
	if len(l) == 0 {
		return []byte(`""`), nil
	}
	return l, nil
}

func (l literal) empty() bool { return len(l) <= 2 }

func (l literal) String() string {
	var s string
	if l.empty() || json.Unmarshal(l, &s) != nil { // it was checked when it came
		return ""
	}
	return s
}

// mail is the body of a request to send.
type mail struct {
	From        string            `json:"from"`
	To          addresses         `json:"to"`
	Cc          addresses         `json:"cc,omitempty"`
	Bcc         addresses         `json:"bcc,omitempty"`
	ReplyTo     addresses         `json:"reply_to,omitempty"`
	Subject     string            `json:"subject"`
	HTML        literal           `json:"html,omitempty"`
	Text        literal           `json:"text,omitempty"`
	Headers     map[string]string `json:"headers,omitempty"`
	Tags        []tag             `json:"tags,omitempty"`
	Attachments []attachment      `json:"attachments,omitempty"`
	ScheduledAt string            `json:"scheduled_at,omitempty"`
	Template    json.RawMessage   `json:"template,omitempty"`
	TopicID     *string           `json:"topic_id,omitempty"`

	raw       []byte        // as it was sent
	rcpts     []string      // see recipients
	scheduled time.Duration // when it is due, on the movable clock; 0: at once
}

type tag struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

type attachment struct {
	// Content is base64, or bytes as a list of numbers (resend-go), or a
	// Buffer of Node. Its size is kept in its place.
	Content     json.RawMessage `json:"content,omitempty"`
	Path        string          `json:"path,omitempty"`
	Filename    string          `json:"filename,omitempty"`
	ContentType string          `json:"content_type,omitempty"`
	ContentID   string          `json:"content_id,omitempty"`
	Size        int             `json:"size,omitempty"`
}

// recipients of the mail in the order to, cc, bcc, without their names.
func (m *mail) recipients() []string {
	if m.rcpts != nil {
		return m.rcpts
	}
	out := make([]string, 0, len(m.To)+len(m.Cc)+len(m.Bcc))
	for _, list := range []addresses{m.To, m.Cc, m.Bcc} {
		for _, a := range list {
			out = append(out, bare(a))
		}
	}
	m.rcpts = out
	return out
}

// header returns the values of a header of the mail itself.
func (m *mail) header(name string) []string {
	var out []string
	for k, v := range m.Headers {
		if strings.EqualFold(k, name) {
			out = append(out, v)
		}
	}
	return out
}

// kept is what is written to disk of the mail: all but the attachments'
// contents.
func (m *mail) kept() []byte {
	if len(m.Attachments) == 0 {
		return m.raw
	}
	lean := *m
	lean.Attachments = make([]attachment, len(m.Attachments))
	for i, a := range m.Attachments {
		a.Size, a.Content = a.size(), nil
		lean.Attachments[i] = a
	}
	return marshal(lean)
}

// size of the content after base64.
func (a attachment) size() int {
	c := bytes.TrimSpace(a.Content)
	switch {
	case len(c) == 0 || string(c) == "null":
		return 0
	case c[0] == '"':
		return len(c) - 2
	}
	n := bytes.Count(c, []byte(",")) + 1 // a list of numbers, bare or in a Buffer
	return (n + 2) / 3 * 4
}

// parse reads the body of a send or a batch. The mails that could be read are
// returned with the error too, so that rules can match their recipients.
func parse(body []byte, batch bool) ([]*mail, *APIError) {
	if !batch {
		m, err := parseOne(body)
		return []*mail{m}, badJSON(err)
	}
	var raws []json.RawMessage
	if err := json.Unmarshal(body, &raws); err != nil {
		return nil, badJSON(err)
	}
	if len(raws) == 0 || len(raws) > maxBatch {
		return nil, must(422, "validation_error").saying("A batch must hold between 1 and %d emails, not %d.", maxBatch, len(raws))
	}
	mails := make([]*mail, len(raws))
	for i, raw := range raws {
		m, err := parseOne(raw)
		if err != nil {
			return mails[:i], badJSON(err)
		}
		mails[i] = m
	}
	return mails, nil
}

func parseOne(body []byte) (*mail, error) {
	m := &mail{raw: body}
	if m.scan(body) {
		return m, nil
	}
	*m = mail{raw: body}
	return m, json.Unmarshal(body, m)
}

func badJSON(err error) *APIError {
	if err == nil {
		return nil
	}
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) || strings.Contains(err.Error(), "unexpected end") {
		return must(400, "validation_error").saying("The request body is not valid JSON: %s.", err)
	}
	var kind *json.UnmarshalTypeError
	if errors.As(err, &kind) {
		return must(422, "validation_error").saying("Invalid `%s` field: it must not be a %s.", kind.Field, kind.Value)
	}
	return must(422, "validation_error").saying("%s: %s.", must(422, "validation_error").Message, err)
}

var tagPattern = regexp.MustCompile(`^[A-Za-z0-9_-]*$`)

// check names the first thing that is wrong with the mail.
func (s *Server) check(m *mail, batch bool) *APIError {
	if err := missing(m); err != nil {
		return err
	}
	if err := s.checkAddresses(m); err != nil {
		return err
	}
	if err := checkContents(m); err != nil {
		return err
	}
	if batch && (len(m.Attachments) > 0 || m.ScheduledAt != "") {
		return must(422, "validation_error").saying("`attachments` and `scheduled_at` are not supported in a batch.")
	}
	if m.ScheduledAt == "" {
		return nil
	}
	due, err := s.parseSchedule(m.ScheduledAt)
	m.scheduled = due
	return err
}

func missing(m *mail) *APIError {
	templated := len(m.Template) > 0 && string(m.Template) != "null"
	for _, f := range []struct {
		name   string
		absent bool
	}{
		{"from", m.From == "" && !templated},
		{"to", len(m.To) == 0},
		{"subject", m.Subject == "" && !templated},
	} {
		if f.absent {
			return must(422, "missing_required_field").saying("Missing `%s` field.", f.name)
		}
	}
	if m.HTML.empty() && m.Text.empty() && !templated {
		return must(422, "missing_required_field").saying("Missing `html` or `text` field.")
	}
	return nil
}

func (s *Server) checkAddresses(m *mail) *APIError {
	if m.From != "" && !valid(m.From) {
		return invalidAddress("from")
	}
	for _, f := range []struct {
		name string
		list addresses
	}{{"to", m.To}, {"cc", m.Cc}, {"bcc", m.Bcc}, {"reply_to", m.ReplyTo}} {
		for _, a := range f.list {
			if !valid(a) {
				return invalidAddress(f.name)
			}
			if f.name != "reply_to" && !s.opt.AllowExampleDomains && isExample(domain(a)) {
				return must(422, "validation_error").saying("Invalid `%s` field. Please use our testing email address instead of domains like `example.com`.", f.name)
			}
		}
	}
	if n := len(m.To) + len(m.Cc) + len(m.Bcc); n > maxRecipients {
		return must(422, "validation_error").saying("The email has %d recipients, the limit is %d.", n, maxRecipients)
	}
	return s.checkDomain(m)
}

func invalidAddress(field string) *APIError {
	return must(422, "validation_error").saying("Invalid `%s` field. The email address needs to follow the `email@example.com` or `Name <email@example.com>` format.", field)
}

// checkDomain says whether the sender may write from there and to there.
func (s *Server) checkDomain(m *mail) *APIError {
	from := domain(m.From)
	if from == "" {
		return nil // from a template
	}
	if own := s.opt.TestingAddress; own != "" && from == "resend.dev" {
		for _, r := range m.recipients() {
			if !strings.EqualFold(r, own) && domain(r) != "resend.dev" {
				return must(403, "validation_error").saying("You can only send testing emails to your own email address (`%s`). To send emails to other recipients, please verify a domain at resend.com/domains, and change the `from` address to an email using this domain.", own)
			}
		}
		return nil
	}
	if s.opt.Domains == nil || from == "resend.dev" {
		return nil
	}
	for _, d := range s.opt.Domains {
		if strings.EqualFold(d, from) {
			return nil
		}
	}
	return must(403, "validation_error").saying("The `%s` domain is not verified. Please, add and verify your domain.", from)
}

func checkContents(m *mail) *APIError {
	for _, t := range m.Tags {
		if t.Name == "" || len(t.Name) > maxTag || len(t.Value) > maxTag || !tagPattern.MatchString(t.Name) || !tagPattern.MatchString(t.Value) {
			return must(422, "validation_error").saying("Tags should only contain ASCII letters, numbers, underscores, or dashes, and at most %d characters.", maxTag)
		}
	}
	for k, v := range m.Headers {
		if k == "" || strings.ContainsAny(k, "\r\n: ") || strings.ContainsAny(v, "\r\n") {
			return must(422, "validation_error").saying("Invalid `headers` field: %q is not a header.", k)
		}
	}
	total := 0
	for _, a := range m.Attachments {
		n := a.size()
		if n == 0 && a.Path == "" {
			return must(422, "invalid_attachment")
		}
		total += n
	}
	if total > maxAttachments {
		return must(422, "validation_error").saying("The attachments exceed the limit of 40MB after Base64 encoding.")
	}
	return nil
}

// bare is the address without a name around it.
func bare(a string) string {
	if i := strings.LastIndexByte(a, '<'); i >= 0 && strings.HasSuffix(a, ">") {
		return a[i+1 : len(a)-1]
	}
	return strings.TrimSpace(a)
}

func domain(a string) string {
	a = bare(a)
	return strings.ToLower(a[strings.LastIndexByte(a, '@')+1:])
}

// valid accepts what has the form of an address; whether it exists nobody
// knows.
func valid(a string) bool {
	if i := strings.LastIndexByte(a, '<'); i >= 0 && !strings.HasSuffix(a, ">") {
		return false
	}
	a = bare(a)
	at := strings.LastIndexByte(a, '@')
	if at < 1 || at == len(a)-1 || len(a) > 320 || strings.Count(a, "@") != 1 {
		return false
	}
	return !strings.ContainsFunc(a, func(r rune) bool { return r <= ' ' || r == 0x7f || r == '<' || r == '>' || r == ',' })
}

// isExample says whether a domain is one of those that Resend refuses.
func isExample(domain string) bool {
	switch domain {
	case "example.com", "example.org", "example.net", "test.com", "test.org", "test.net":
		return true
	}
	return false
}

// parseSchedule reads ISO 8601, or "in 3 days".
func (s *Server) parseSchedule(text string) (time.Duration, *APIError) {
	at, err := s.parseTime(text)
	if err != nil {
		return 0, must(422, "validation_error").saying("Invalid `scheduled_at` field: %s.", err)
	}
	due := at.Sub(s.started)
	switch now := s.engine.Now(); {
	case due > now+maxSchedule:
		return 0, must(422, "validation_error").saying("Invalid `scheduled_at` field: it is more than 30 days in the future.")
	case due <= now:
		return 0, must(422, "validation_error").saying("Invalid `scheduled_at` field: it is in the past.")
	}
	return due, nil
}

var (
	inPattern = regexp.MustCompile(`(?i)^in (\d{1,9}|an?|one) (s|sec|second|min|minute|h|hour|day|week)s?$`)
	unit      = map[string]time.Duration{
		"s": time.Second, "sec": time.Second, "second": time.Second, "min": time.Minute, "minute": time.Minute,
		"h": time.Hour, "hour": time.Hour, "day": 24 * time.Hour, "week": 7 * 24 * time.Hour,
	}
)

func (s *Server) parseTime(text string) (time.Time, error) {
	for _, layout := range []string{time.RFC3339Nano, "2006-01-02T15:04:05.999999999", "2006-01-02 15:04:05.999999999-07", "2006-01-02"} {
		if t, err := time.Parse(layout, text); err == nil {
			return t, nil
		}
	}
	m := inPattern.FindStringSubmatch(strings.TrimSpace(text))
	if m == nil {
		return time.Time{}, fmt.Errorf("%q is neither ISO 8601 nor of the form \"in 3 days\"", text)
	}
	n, err := strconv.Atoi(m[1])
	if err != nil {
		n = 1 // "an hour"
	}
	if n > 1000 {
		return time.Time{}, fmt.Errorf("%q is too far away", text)
	}
	return s.wall().Add(time.Duration(n) * unit[strings.ToLower(m[2])]), nil
}
