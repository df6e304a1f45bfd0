package control

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"mime/quotedprintable"
	"net/http"
	"net/mail"
	"net/textproto"
	"strconv"
	"strings"
)

// view is a mail as the page shows it.
type view struct {
	ID          int64       `json:"id"`
	Headers     [][2]string `json:"headers"`
	Text        string      `json:"text"`
	HasHTML     bool        `json:"has_html"`
	Attachments []part      `json:"attachments"`
	Kept        int         `json:"kept"` // bytes that were kept of it
	Problem     string      `json:"problem,omitempty"`
	html        string
}

type part struct {
	Name string `json:"name"`
	Type string `json:"type"`
	Size int    `json:"size"`
}

func (h *handler) load(w http.ResponseWriter, r *http.Request) (int64, []byte, bool) {
	id, err := strconv.ParseInt(r.PathValue("id"), 10, 64)
	if err != nil {
		fail(w, http.StatusBadRequest, fmt.Errorf("mail id %q is not a number", r.PathValue("id")))
		return 0, nil, false
	}
	raw, ok := h.Mail(id)
	if !ok {
		fail(w, http.StatusNotFound, fmt.Errorf("no mail is kept for row %d: it was not stored, or dropped since", id))
	}
	return id, raw, ok
}

func (h *handler) mail(w http.ResponseWriter, r *http.Request) {
	if id, raw, ok := h.load(w, r); ok {
		v := render(raw)
		v.ID = id
		write(w, v)
	}
}

func (h *handler) rawMail(w http.ResponseWriter, r *http.Request) {
	_, raw, ok := h.load(w, r)
	if !ok {
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_, _ = w.Write(raw)
}

// htmlMail serves the mail's HTML for a sandboxed frame: no scripts, no forms,
// nothing from the network, an origin of its own.
func (h *handler) htmlMail(w http.ResponseWriter, r *http.Request) {
	_, raw, ok := h.load(w, r)
	if !ok {
		return
	}
	v := render(raw)
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Header().Set("Content-Security-Policy", "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Referrer-Policy", "no-referrer")
	_, _ = io.WriteString(w, v.html)
}

// maxParts and maxDepth bound what a hostile mail can make the renderer do.
const (
	maxParts = 100
	maxDepth = 8
)

// render takes a mail apart as far as it goes; what cannot be parsed is shown
// as it is.
func render(raw []byte) view {
	v := view{Kept: len(raw), Headers: [][2]string{}, Attachments: []part{}}
	m, err := mail.ReadMessage(bytes.NewReader(raw))
	if err != nil {
		v.Problem, v.Text = "not a regular mail: "+err.Error(), strings.ToValidUTF8(string(raw), "\uFFFD")
		return v
	}
	for _, name := range []string{"From", "To", "Cc", "Subject", "Date", "Message-Id", "X-Dedupe-Key"} {
		for _, value := range m.Header[name] {
			v.Headers = append(v.Headers, [2]string{name, decodeHeader(value)})
		}
	}
	left := maxParts
	v.take(textproto.MIMEHeader(m.Header), m.Body, 0, &left)
	return v
}

func decodeHeader(s string) string {
	if d, err := new(mime.WordDecoder).DecodeHeader(s); err == nil {
		return d
	}
	return s
}

// take adds one part and what is inside it.
func (v *view) take(h textproto.MIMEHeader, body io.Reader, depth int, left *int) {
	if *left--; *left < 0 || depth > maxDepth {
		v.Problem = "too many parts, the rest is not shown"
		return
	}
	kind, params, err := mime.ParseMediaType(h.Get("Content-Type"))
	if err != nil || kind == "" {
		kind = "text/plain"
	}
	if strings.HasPrefix(kind, "multipart/") && params["boundary"] != "" {
		mr := multipart.NewReader(body, params["boundary"])
		for {
			p, err := mr.NextRawPart()
			if err != nil {
				return // the end, or where the kept beginning ends
			}
			v.take(p.Header, p, depth+1, left)
		}
	}
	data, _ := io.ReadAll(decoded(h.Get("Content-Transfer-Encoding"), body))
	disposition, dparams, _ := mime.ParseMediaType(h.Get("Content-Disposition"))
	switch {
	case disposition == "attachment" || (kind != "text/plain" && kind != "text/html"):
		v.Attachments = append(v.Attachments, part{decodeHeader(orElse(dparams["filename"], params["name"])), kind, len(data)})
	case kind == "text/html":
		v.html += strings.ToValidUTF8(string(data), "\uFFFD")
		v.HasHTML = true
	default:
		v.Text += strings.ToValidUTF8(string(data), "\uFFFD")
	}
}

func orElse(s, def string) string {
	if s == "" {
		return def
	}
	return s
}

func decoded(encoding string, r io.Reader) io.Reader {
	switch strings.ToLower(strings.TrimSpace(encoding)) {
	case "quoted-printable":
		return quotedprintable.NewReader(r)
	case "base64":
		return base64.NewDecoder(base64.StdEncoding, &noSpace{r})
	}
	return r
}

// noSpace drops what line folding puts into base64.
type noSpace struct{ r io.Reader }

func (n *noSpace) Read(p []byte) (int, error) {
	got, err := n.r.Read(p)
	kept := 0
	for _, c := range p[:got] {
		if c > ' ' {
			p[kept] = c
			kept++
		}
	}
	return kept, err
}
