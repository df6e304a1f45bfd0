package mail

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	htmltemplate "html/template"
	"mime"
	netmail "net/mail"
	"net/url"
	"path"
	"slices"
	"strings"
	texttemplate "text/template"
	"time"
	"unicode"

	gomail "github.com/wneessen/go-mail"

	"mailproof/system/contract"
)

//go:embed templates
var templateFiles embed.FS

// DefaultLocale is used for a mail without a locale, or with one that has no
// templates.
const DefaultLocale = "en"

const (
	maxKey   = 256 // the longest key that Resend takes (OB-04)
	maxField = 200 // runes of one field of the event in a mail
	maxSeats = 100
)

// RendererConfig says who writes.
type RendererConfig struct {
	From     string // address, in the header and in the envelope
	FromName string
	// Domain of the Message-IDs, default the domain of From.
	Domain        string
	DefaultLocale string // default [DefaultLocale]
	// UnsubscribeURL is where the receiver of a marketing mail ends the
	// subscription, https; default /unsubscribe at Domain.
	UnsubscribeURL string
}

// Renderer makes the bytes of a mail. The same input gives the same bytes: the
// Message-ID and the MIME boundary derive from the dedupe key, and the date is
// part of the input.
type Renderer struct {
	cfg           RendererConfig
	unsubscribeAt *url.URL
	text          map[string]*texttemplate.Template // by "<template>.<locale>"
	markup        map[string]*htmltemplate.Template
}

// NewRenderer reads the embedded templates.
func NewRenderer(cfg RendererConfig) (*Renderer, error) {
	if _, err := ParseAddress(cfg.From); err != nil {
		return nil, fmt.Errorf("renderer: sender: %w", err)
	}
	_, domain, _ := cutLast(cfg.From, '@')
	cfg.Domain = cmp.Or(cfg.Domain, domain)
	if _, err := ParseAddress("x@" + cfg.Domain); err != nil || !isASCII([]byte(cfg.Domain)) {
		return nil, fmt.Errorf("renderer: %q is no domain for Message-IDs", cfg.Domain)
	}
	cfg.DefaultLocale = cmp.Or(cfg.DefaultLocale, DefaultLocale)
	r := &Renderer{cfg: cfg, text: map[string]*texttemplate.Template{}, markup: map[string]*htmltemplate.Template{}}
	var err error
	if r.unsubscribeAt, err = unsubscribeURL(cfg.UnsubscribeURL, cfg.Domain); err != nil {
		return nil, fmt.Errorf("renderer: %w", err)
	}
	if err := r.load(); err != nil {
		return nil, fmt.Errorf("renderer: %w", err)
	}
	for _, name := range append(CampaignTemplates(), contract.TemplateTicketConfirmed) {
		if r.text[name+"."+cfg.DefaultLocale] == nil {
			return nil, fmt.Errorf("renderer: there is no template %s for the default locale %q", name, cfg.DefaultLocale)
		}
	}
	return r, nil
}

func (r *Renderer) load() error {
	files, err := templateFiles.ReadDir("templates")
	if err != nil {
		return err
	}
	join := func(s []string) string { return strings.Join(s, ", ") }
	for _, f := range files {
		body, err := templateFiles.ReadFile(path.Join("templates", f.Name()))
		if err != nil {
			return err
		}
		name, ext, _ := cutLast(f.Name(), '.')
		if ext == "html" {
			r.markup[name], err = htmltemplate.New(name).Funcs(htmltemplate.FuncMap{"join": join}).Option("missingkey=error").Parse(string(body))
		} else {
			r.text[name], err = texttemplate.New(name).Funcs(texttemplate.FuncMap{"join": join}).Option("missingkey=error").Parse(string(body))
		}
		if err != nil {
			return fmt.Errorf("template %s: %w", f.Name(), err)
		}
	}
	return nil
}

// Rendering is one mail to be made.
type Rendering struct {
	Template  string // contract.TemplateTicketConfirmed, or one of [CampaignTemplates]
	DedupeKey string
	BookingID string
	To        string
	Data      contract.EventData    // of a ticket; Locale picks the language; Recipient is not looked at
	Campaign  contract.CampaignData // of a marketing mail; Locale picks the language
	// Date of the mail: it is fixed when the mail is rendered, at the first
	// claim, and stays the same over all tries.
	Date time.Time
}

// Render makes the mail. Each error is a [PermanentError]: the same row would
// fail in the same way at the next try (AC5).
func (r *Renderer) Render(in Rendering) (Message, error) {
	m, err := r.render(in)
	if err != nil {
		return Message{}, &PermanentError{Failure{Stage: StageRender, Err: err}}
	}
	return m, nil
}

func (r *Renderer) render(in Rendering) (Message, error) {
	if _, err := ParseAddress(in.To); err != nil {
		return Message{}, err
	}
	if err := checkKey(in.DedupeKey); err != nil {
		return Message{}, err
	}
	if in.Date.IsZero() {
		return Message{}, errors.New("the mail has no date")
	}
	p, err := r.parts(in)
	if err != nil {
		return Message{}, err
	}
	body, err := r.compose(in, p)
	if err != nil {
		return Message{}, err
	}
	return Message{From: r.cfg.From, To: in.To, IdempotencyKey: in.DedupeKey, Bytes: body}, nil
}

// parts are what the templates make of a mail, for every transport the same.
type parts struct{ name, subject, text, markup string }

func (r *Renderer) parts(in Rendering) (parts, error) {
	v, locale := newView(in), in.Data.Locale
	if isCampaign(in.Template) {
		locale = in.Campaign.Locale
		if err := r.campaignView(&v, in); err != nil {
			return parts{}, err
		}
	}
	name, err := r.template(in.Template, locale)
	if err != nil {
		return parts{}, err
	}
	subject, err := r.execute(name, "subject", v)
	if err != nil {
		return parts{}, err
	}
	text, err := r.execute(name, "body", v)
	if err != nil {
		return parts{}, err
	}
	var markup bytes.Buffer
	if err := r.markup[name].Execute(&markup, v); err != nil {
		return parts{}, fmt.Errorf("template %s.html: %w", name, err)
	}
	return parts{name: v.Name, subject: oneLine(subject), text: text, markup: markup.String()}, nil
}

// template finds the templates of a name in the best locale: "vi-VN", "vi", the
// default.
func (r *Renderer) template(name, locale string) (string, error) {
	language, _, _ := strings.Cut(strings.ReplaceAll(locale, "_", "-"), "-")
	for _, l := range []string{locale, strings.ToLower(language), r.cfg.DefaultLocale} {
		key := name + "." + l
		if r.text[key] != nil && r.markup[key] != nil {
			return key, nil
		}
	}
	return "", fmt.Errorf("there is no template %q", name)
}

func (r *Renderer) execute(name, part string, v view) (string, error) {
	var out strings.Builder
	if err := r.text[name].ExecuteTemplate(&out, part, v); err != nil {
		return "", fmt.Errorf("template %s.txt: %w", name, err)
	}
	return out.String(), nil
}

// compose writes RFC 5322, multipart/alternative, in pure ASCII.
func (r *Renderer) compose(in Rendering, p parts) ([]byte, error) {
	sum := sha256.Sum256([]byte(in.DedupeKey))
	id := hex.EncodeToString(sum[:16])
	msg := gomail.NewMsg(gomail.WithNoDefaultUserAgent(), gomail.WithBoundary("part-"+id))
	msg.FromMailAddress(&netmail.Address{Name: strings.ReplaceAll(oneLine(r.cfg.FromName), `\`, "/"), Address: r.cfg.From})
	// net/mail leaves a backslash in an encoded word, and then cannot read what
	// it wrote.
	msg.ToMailAddress(&netmail.Address{Name: strings.ReplaceAll(p.name, `\`, "/"), Address: in.To})
	msg.Subject(p.subject)
	msg.SetMessageIDWithValue(id + "@" + r.cfg.Domain)
	msg.SetDateWithValue(in.Date.UTC())
	msg.SetGenHeader("Auto-Submitted", "auto-generated") // RFC 3834: no vacation replies, please
	msg.SetGenHeader(contract.MailHeaderDedupeKey, in.DedupeKey)
	msg.SetGenHeader(contract.MailHeaderResendIdempotencyKey, in.DedupeKey)
	for _, h := range r.listHeaders(in) {
		msg.SetGenHeader(gomail.Header(h[0]), h[1])
	}
	msg.SetBodyString(gomail.TypeTextPlain, p.text)
	msg.AddAlternativeString(gomail.TypeTextHTML, p.markup)
	var out bytes.Buffer
	if _, err := msg.WriteTo(&out); err != nil {
		return nil, fmt.Errorf("compose: %w", err)
	}
	body := unfoldTokens(out.Bytes())
	if err := checkLines(body); err != nil {
		return nil, fmt.Errorf("compose: %w", err)
	}
	return body, nil
}

// tokenHeaders hold one word each, which receivers compare as it stands.
var tokenHeaders = []string{string(gomail.HeaderMessageID), contract.MailHeaderDedupeKey, contract.MailHeaderResendIdempotencyKey}

// unfoldTokens puts the value of each token header on the line of its name.
// go-mail keeps lines within 76 characters and so folds before a word that is
// too long for the rest of its line, even if it is the first: the line of the
// name is then empty. RFC 5322 allows that, and a receiver that joins the lines
// with a blank reads another key. A line may have 998 characters (2.1.1); a key
// has no more than [maxKey] and a domain 254.
func unfoldTokens(mail []byte) []byte {
	for _, name := range tokenHeaders {
		head := bytes.Index(mail, []byte("\r\n\r\n"))
		if at := bytes.Index(mail[:max(head, 0)], []byte("\r\n"+name+":\r\n ")); at >= 0 {
			fold := at + len("\r\n"+name+":")
			mail = slices.Delete(mail, fold, fold+len("\r\n"))
		}
	}
	return mail
}

// MessageID is the Message-ID header's value of a key's mail (OB-03), with its
// angle brackets.
func (r *Renderer) MessageID(dedupeKey string) string {
	sum := sha256.Sum256([]byte(dedupeKey))
	return "<" + hex.EncodeToString(sum[:16]) + "@" + r.cfg.Domain + ">"
}

// checkKey keeps out what could not stand in a header.
func checkKey(key string) error {
	if key == "" || len(key) > maxKey {
		return fmt.Errorf("dedupe key of %d characters, need 1 to %d", len(key), maxKey)
	}
	if strings.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return errors.New("dedupe key: only printable ASCII without spaces may stand in a header")
	}
	if plain, err := new(mime.WordDecoder).DecodeHeader(key); err != nil || plain != key {
		return errors.New("dedupe key: a receiver would decode it (RFC 2047) and know the mail by another")
	}
	return nil
}

// view is what the templates see: one line each, bounded, without control
// characters.
type view struct {
	BookingID, Name, Event, Price string
	Seats                         []string

	Headline, Link, Unsubscribe string // of a marketing mail, as is
	Paragraphs                  []string
}

func newView(in Rendering) view {
	v := view{BookingID: oneLine(in.BookingID), Name: oneLine(in.Data.Name), Event: oneLine(in.Data.Event)}
	v.Price = strings.TrimSpace(oneLine(in.Data.Amount) + " " + oneLine(in.Data.Currency))
	if in.Data.Amount == "" {
		v.Price = ""
	}
	for _, s := range in.Data.Seats[:min(len(in.Data.Seats), maxSeats)] {
		v.Seats = append(v.Seats, oneLine(s))
	}
	return v
}

// oneLine makes one bounded line of a text: with a line end in a name, whoever
// books could write headers.
func oneLine(s string) string { return line(s, maxField) }

// line is oneLine with at most so many runes.
func line(s string, most int) string {
	s = strings.Map(func(r rune) rune {
		// Cf and the separators hold what turns text around or ends a line in
		// some reader.
		if unicode.IsControl(r) || unicode.Is(unicode.Cf, r) || r == '\u2028' || r == '\u2029' {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
	s = strings.Join(strings.Fields(s), " ")
	if runes := []rune(s); len(runes) > most {
		return string(runes[:most-1]) + "…"
	}
	return s
}
