package mail_test

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"mime/quotedprintable"
	netmail "net/mail"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"mailproof/system/contract"
	"mailproof/system/mail"
)

func renderer(t require.TestingT) *mail.Renderer {
	r, err := mail.NewRenderer(mail.RendererConfig{From: "tickets@example.org", FromName: "Vé Concert"})
	require.NoError(t, err)
	return r
}

func rendering() mail.Rendering {
	return mail.Rendering{
		Template: contract.TemplateTicketConfirmed, DedupeKey: "ticket:b-42", BookingID: "b-42", To: "bob@example.com",
		Data: contract.EventData{
			Name: "Bob", Locale: "en", Event: "Night <of> Music", Seats: []string{"A1", "A2"}, Amount: "500000", Currency: "VND",
		},
		Date: time.Date(2026, 11, 30, 14, 0, 0, 0, time.FixedZone("ICT", 7*3600)),
	}
}

// parsed is a mail as a receiver reads it.
type parsed struct {
	header     netmail.Header
	text, html string
}

func parse(t require.TestingT, raw []byte) parsed {
	m, err := netmail.ReadMessage(bytes.NewReader(raw))
	require.NoError(t, err)
	kind, params, err := mime.ParseMediaType(m.Header.Get("Content-Type"))
	require.NoError(t, err)
	require.Equal(t, "multipart/alternative", kind)
	out := parsed{header: m.Header}
	parts := multipart.NewReader(m.Body, params["boundary"])
	for {
		p, err := parts.NextRawPart()
		if err == io.EOF {
			return out
		}
		require.NoError(t, err)
		var body io.Reader = p
		switch p.Header.Get("Content-Transfer-Encoding") {
		case "quoted-printable":
			body = quotedprintable.NewReader(p)
		case "base64":
			body = base64.NewDecoder(base64.StdEncoding, p)
		}
		b, err := io.ReadAll(body)
		require.NoError(t, err)
		if strings.HasPrefix(p.Header.Get("Content-Type"), "text/plain") {
			out.text = string(b)
		} else {
			require.Contains(t, p.Header.Get("Content-Type"), "text/html")
			out.html = string(b)
		}
	}
}

func subject(t require.TestingT, h netmail.Header) string {
	s, err := new(mime.WordDecoder).DecodeHeader(h.Get("Subject"))
	require.NoError(t, err)
	return s
}

func TestRenderTicket(t *testing.T) {
	t.Parallel()
	r := renderer(t)
	m, err := r.Render(rendering())
	require.NoError(t, err)
	require.Equal(t, "tickets@example.org", m.From)
	require.Equal(t, "bob@example.com", m.To)
	require.Equal(t, "ticket:b-42", m.IdempotencyKey)

	p := parse(t, m.Bytes)
	require.Equal(t, "ticket:b-42", p.header.Get(contract.MailHeaderDedupeKey))
	require.Equal(t, "ticket:b-42", p.header.Get(contract.MailHeaderResendIdempotencyKey))
	require.Equal(t, r.MessageID("ticket:b-42"), p.header.Get("Message-ID"))
	require.Equal(t, "Mon, 30 Nov 2026 07:00:00 +0000", p.header.Get("Date"))
	require.Equal(t, "auto-generated", p.header.Get("Auto-Submitted"))
	require.Equal(t, "Your ticket for Night <of> Music is confirmed", subject(t, p.header))
	for _, want := range []string{"Hello Bob", "b-42", "Night <of> Music", "A1, A2", "500000 VND"} {
		require.Contains(t, p.text, want)
	}
	require.Contains(t, p.html, "Night &lt;of&gt; Music")
	require.NotContains(t, p.html, "<of>")
	for _, c := range m.Bytes {
		require.Less(t, c, byte(128), "pure ASCII needs no 8BITMIME")
	}
}

// OB-03: what a receiver could recognise a copy by is the same over all tries;
// a Message-ID made anew each time is the classic way to a second mail.
func TestRenderIsStable(t *testing.T) {
	t.Parallel()
	one, err := renderer(t).Render(rendering())
	require.NoError(t, err)
	two, err := renderer(t).Render(rendering())
	require.NoError(t, err)
	require.Equal(t, string(one.Bytes), string(two.Bytes))

	later := rendering()
	later.Date = later.Date.Add(time.Hour)
	other := rendering()
	other.DedupeKey += ":v2"
	id := func(in mail.Rendering) string {
		m, err := renderer(t).Render(in)
		require.NoError(t, err)
		return parse(t, m.Bytes).header.Get("Message-ID")
	}
	require.Equal(t, id(rendering()), id(later))
	require.NotEqual(t, id(rendering()), id(other), "a reopened booking's mail is another mail")
}

func TestRenderLocales(t *testing.T) {
	t.Parallel()
	for locale, want := range map[string]string{
		"en": "Hello", "en-US": "Hello", "vi": "Xin chào", "vi-VN": "Xin chào", "vi_VN": "Xin chào", "VI": "Xin chào", "": "Hello", "fr": "Hello", "../en": "Hello",
	} {
		in := rendering()
		in.Data.Locale = locale
		m, err := renderer(t).Render(in)
		require.NoError(t, err, locale)
		p := parse(t, m.Bytes)
		require.Contains(t, p.text, want, locale)
		require.Contains(t, p.html, want, locale)
	}
}

func TestRenderWithoutOptionalFields(t *testing.T) {
	t.Parallel()
	in := rendering()
	in.Data = contract.EventData{}
	m, err := renderer(t).Render(in)
	require.NoError(t, err)
	p := parse(t, m.Bytes)
	require.Equal(t, "Your ticket is confirmed", subject(t, p.header))
	for _, no := range []string{"Seats", "Paid", "Event", "<no value>", "Hello ,"} {
		require.NotContains(t, p.text+p.html, no)
	}
}

// AC5: what no retry can repair is permanent.
func TestRenderRefusesForGood(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*mail.Rendering){
		"address":          func(in *mail.Rendering) { in.To = "not-an-address" },
		"template":         func(in *mail.Rendering) { in.Template = "nope" },
		"empty key":        func(in *mail.Rendering) { in.DedupeKey = "" },
		"long key":         func(in *mail.Rendering) { in.DedupeKey = strings.Repeat("k", 257) },
		"key with a break": func(in *mail.Rendering) { in.DedupeKey = "k\r\nBcc: e@x.org" },
		"key in code":      func(in *mail.Rendering) { in.DedupeKey = "=?utf-8?q?ticket:1?=" },
		"no date":          func(in *mail.Rendering) { in.Date = time.Time{} },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			in := rendering()
			change(&in)
			_, err := renderer(t).Render(in)
			require.Equal(t, "permanent", outcome(err), "%v", err)
			require.Equal(t, mail.StageRender, failureOf(t, err).Stage)
			require.NotContains(t, err.Error(), "not-an-address")
		})
	}
}

func TestNewRendererChecksItsConfig(t *testing.T) {
	t.Parallel()
	for want, cfg := range map[string]mail.RendererConfig{
		"sender":         {From: "nobody"},
		"no domain":      {From: "a@example.org", Domain: "x y"},
		"default locale": {From: "a@example.org", DefaultLocale: "xx"},
		"https":          {From: "a@example.org", UnsubscribeURL: "http://example.org/out"},
	} {
		_, err := mail.NewRenderer(cfg)
		require.ErrorContains(t, err, want)
	}
}

// Whoever books chooses these texts. None of them may add a header, a part or
// markup, or move the mail to somebody else.
func TestNothingFromTheEventBecomesAHeader(t *testing.T) {
	t.Parallel()
	evil := rapid.OneOf(
		rapid.String(),
		rapid.SampledFrom([]string{
			"x\r\nBcc: evil@example.net", "x\nX-Dedupe-Key: other", "x\r\r\n\n\r\nbody", "\r\n.\r\nMAIL FROM:<e@x>",
			`"><script>alert(1)</script>`, `Bob" <evil@example.net>, "`, "a,b;c:d<e@f>", "=?utf-8?q?=0D=0ABcc:_e@x?=",
			"--part-", "{{.BookingID}}", "\u2028Bcc: e@x", "\u202Egnp.exe", strings.Repeat("long ", 500), "\x00\x1b[31m", "\xff\xfe", `\À`, `\`, `"\`,
		}),
	)
	r := renderer(t)
	plain, err := r.Render(rendering())
	require.NoError(t, err)
	names := headerNames(parse(t, plain.Bytes).header)
	rapid.Check(t, func(rt *rapid.T) {
		in := rendering()
		in.Data.Name = evil.Draw(rt, "name")
		in.Data.Event = evil.Draw(rt, "event")
		in.Data.Seats = rapid.SliceOfN(evil, 0, 3).Draw(rt, "seats")
		in.Data.Amount, in.Data.Currency = evil.Draw(rt, "amount"), evil.Draw(rt, "currency")
		in.BookingID = evil.Draw(rt, "booking")
		m, err := r.Render(in)
		require.NoError(rt, err)
		p := parse(rt, m.Bytes)
		require.Equal(rt, names, headerNames(p.header))
		for name, values := range p.header {
			require.Len(rt, values, 1, name)
		}
		require.Equal(rt, in.DedupeKey, p.header.Get(contract.MailHeaderDedupeKey))
		to, err := p.header.AddressList("To")
		require.NoError(rt, err)
		require.Len(rt, to, 1)
		require.Equal(rt, "bob@example.com", to[0].Address)
		require.NotContains(rt, p.html, "<script>")
		for _, line := range bytes.Split(m.Bytes, []byte("\r\n")) {
			require.LessOrEqual(rt, len(line), 998, "RFC 5322 2.1.1")
		}
	})
}

func headerNames(h netmail.Header) []string {
	var out []string
	for name := range h {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

func TestParseAddress(t *testing.T) {
	t.Parallel()
	for _, good := range []string{
		"a@b", "bob@example.org", "bob.b+tag@sub.example.org", "x_y-z@example.co", "o'neil@example.org", "vũ@example.com", "a@xn--bcher-kva.example", "1@2.3",
	} {
		got, err := mail.ParseAddress(good)
		require.NoError(t, err, good)
		require.Equal(t, good, got)
	}
	for _, bad := range []string{
		"", "bob", "@", "bob@", "@example.org", "bob@@example.org", "a@b@c", "bob@example..org", "bob@.example.org", "bob@example.org.", "bob@-a.org", "bob@a-.org",
		".bob@example.org", "bob.@example.org", "b..ob@example.org", "Bob <bob@example.org>", "<bob@example.org>", `"b b"@example.org`, "bob@[127.0.0.1]",
		"bob@example.org\r\n", "bob\n@example.org", "bob @example.org", " bob@example.org", "a,b@example.org", "bob@exam\x00ple.org", "bob@example.org,eve@example.org",
		strings.Repeat("a", 65) + "@example.org", "a@" + strings.Repeat("b", 64) + ".org", "a@" + strings.Repeat("b.", 130) + "org",
	} {
		_, err := mail.ParseAddress(bad)
		require.ErrorIs(t, err, mail.ErrAddress, "%q", bad)
		if len(bad) > 4 {
			require.NotContains(t, err.Error(), bad)
		}
	}
}

// What passes can stand between the angle brackets of a command and in a header.
func TestParsedAddressesAreHarmless(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		s := rapid.OneOf(rapid.String(), rapid.StringMatching(`[ -~]{0,10}@[ -~]{0,10}`)).Draw(rt, "address")
		got, err := mail.ParseAddress(s)
		if err != nil {
			return
		}
		require.Equal(rt, s, got)
		require.False(rt, strings.ContainsAny(got, "\r\n<> \x00"), "%q", got)
		list, err := netmail.ParseAddressList(got)
		require.NoError(rt, err)
		require.Len(rt, list, 1)
	})
}

func TestMaskAddress(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"bob@example.org": "b***@example.org", "vũ@example.org": "v***@example.org", "x": "***", "@y": "***", "": "***",
	} {
		require.Equal(t, want, mail.MaskAddress(in), fmt.Sprintf("%q", in))
	}
}
