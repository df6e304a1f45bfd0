package resendapi

import (
	"bytes"
	_ "embed" // the API's description
	"encoding/json"
	"fmt"
	"mime/multipart"
	"mime/quotedprintable"
	"net/http"
	"net/textproto"
	"sort"
	"strconv"
	"strings"
	"time"

	"mailproof/fakes/control"
)

//go:embed openapi.json
var openAPI []byte

// Control is the control API and the page as a handler, for a server of the
// caller's own. The fake itself serves it below /_control/.
func (s *Server) Control() http.Handler {
	api := control.API{
		Name: "resend", Facts: s.facts(),
		Engine: s.engine, Holds: s.holds, Ledger: s.ledger, Now: s.opt.Clock,
		Presets: presets(), Mail: s.mime, Forget: s.forget,
		Extra: map[string]http.HandlerFunc{
			"GET /resend.json": func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				_, _ = w.Write(openAPI)
			},
			"GET /deliveries": func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				_ = json.NewEncoder(w).Encode(map[string]any{"deliveries": s.Deliveries()})
			},
		},
	}
	if s.opt.ControlAddr != "" {
		// Without an address of its own the control API could shut itself out.
		api.Open = func(open bool) error {
			if open {
				return s.Listen()
			}
			return s.Refuse()
		}
	}
	return control.Handler(api)
}

func (s *Server) facts() map[string]string {
	i := s.opt.Idempotency
	f := map[string]string{
		"address": s.opt.Addr, "keys live": short(i.Lifetime), "payloads compared by": string(i.Compare),
		"keys scoped by": string(i.Scope),
	}
	if s.gate != nil {
		f["address"] = s.URL
	}
	for name, on := range map[string]bool{
		"a refusal reserves the key": i.ValidationReservesKey, "payload before in-flight": i.CompareFirst,
		"example domains": s.opt.AllowExampleDomains, "remote webhooks": s.opt.RemoteWebhooks,
	} {
		if on {
			f[name] = "yes"
		}
	}
	if s.opt.RateLimit > 0 {
		f["rate limit"] = strconv.Itoa(s.opt.RateLimit) + "/s"
	}
	return f
}

// short writes 24h0m0s as 24h.
func short(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

func (s *Server) forget() {
	s.mails.reset()
	s.keys.reset()
	s.memory.reset()
	s.limits.reset()
	s.hooks.reset()
}

// Mail returns the mail of a ledger row, by the row's ID, as a provider would
// hand it on; false when it was never kept, is not one of the latest 16,384
// rows, or its contents were dropped.
func (s *Server) Mail(row int64) ([]byte, bool) { return s.mime(row) }

func (s *Server) mime(row int64) ([]byte, bool) {
	serial, ok := s.mails.of(row)
	if !ok {
		return nil, false
	}
	m, err := s.load(serial)
	if err != nil {
		s.diskFailed(err)
		return nil, false
	}
	e, _ := s.mails.get(serial)
	return m.mime(messageID(s.ids.uuid(serial)), s.started.Add(e.at)), true
}

// mime writes the mail as RFC 5322 has it. Attachments are named; their
// contents were not kept.
func (m *mail) mime(id string, at time.Time) []byte {
	var b bytes.Buffer
	head := func(name string, values ...string) {
		if v := strings.Join(values, ", "); v != "" {
			fmt.Fprintf(&b, "%s: %s\r\n", name, strings.NewReplacer("\r", " ", "\n", " ").Replace(v))
		}
	}
	head("From", m.From)
	head("To", m.To...)
	head("Cc", m.Cc...)
	head("Reply-To", m.ReplyTo...)
	head("Subject", m.Subject)
	head("Date", at.UTC().Format(time.RFC1123Z))
	head("Message-ID", id)
	names := make([]string, 0, len(m.Headers))
	for name := range m.Headers {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		head(name, m.Headers[name])
	}
	head("MIME-Version", "1.0")
	w := multipart.NewWriter(&b)
	head("Content-Type", `multipart/mixed; boundary="`+w.Boundary()+`"`)
	b.WriteString("\r\n")
	// Writing into a buffer does not fail.
	part := func(kind, body string) {
		if body == "" {
			return
		}
		p, err := w.CreatePart(textproto.MIMEHeader{
			"Content-Type": {kind + "; charset=utf-8"}, "Content-Transfer-Encoding": {"quoted-printable"},
		})
		if err == nil {
			q := quotedprintable.NewWriter(p)
			_, _ = q.Write([]byte(body))
			_ = q.Close()
		}
	}
	part("text/plain", m.Text.String())
	part("text/html", m.HTML.String())
	for _, a := range m.Attachments {
		name := strings.NewReplacer(`"`, "'", "\r", " ", "\n", " ", `\`, "/").Replace(a.Filename)
		kind := a.ContentType
		if kind == "" || strings.ContainsAny(kind, "\r\n") {
			kind = "application/octet-stream"
		}
		p, err := w.CreatePart(textproto.MIMEHeader{
			"Content-Type": {kind}, "Content-Disposition": {`attachment; filename="` + name + `"`},
		})
		if err == nil {
			fmt.Fprintf(p, "(%d bytes of base64, not kept)", a.Size)
		}
	}
	_ = w.Close()
	return b.Bytes()
}
