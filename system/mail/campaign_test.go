package mail_test

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"mailproof/system/contract"
	"mailproof/system/mail"
)

func offer() mail.Rendering {
	return mail.Rendering{
		Template: contract.TemplateOffer, DedupeKey: contract.CampaignKey("spring-26", "bob@example.com"), To: "bob@example.com",
		Campaign: contract.CampaignData{
			Name: "Bob", Headline: "Half price <tonight>", Text: "First words.\n\nSecond words.", Link: "https://example.org/spring?a=1&b=2",
		},
		Date: time.Date(2026, 11, 30, 7, 0, 0, 0, time.UTC),
	}
}

func TestRenderOffer(t *testing.T) {
	t.Parallel()
	m, err := renderer(t).Render(offer())
	require.NoError(t, err)
	p := parse(t, m.Bytes)
	key := offer().DedupeKey
	require.Equal(t, key, p.header.Get(contract.MailHeaderDedupeKey))
	require.Equal(t, renderer(t).MessageID(key), p.header.Get("Message-ID"))
	require.Equal(t, "Half price <tonight>", subject(t, p.header))
	out := "https://example.org/unsubscribe?key=" + strings.ReplaceAll(key, ":", "%3A")
	require.Equal(t, "<"+out+">", p.header.Get("List-Unsubscribe"))
	require.Equal(t, "List-Unsubscribe=One-Click", p.header.Get("List-Unsubscribe-Post"))
	for _, want := range []string{"Hello Bob", "First words.\r\n\r\nSecond words.", "https://example.org/spring?a=1&b=2", out} {
		require.Contains(t, p.text, want)
	}
	require.Contains(t, p.html, "<p>Second words.</p>")
	require.Contains(t, p.html, "Half price &lt;tonight&gt;")
	require.Contains(t, p.html, `href="https://example.org/spring?a=1&amp;b=2"`)
	for _, ticket := range []string{"ticket", "booking", "Seats"} {
		require.NotContains(t, strings.ToLower(p.text+p.html), strings.ToLower(ticket))
	}
	again, err := renderer(t).Render(offer())
	require.NoError(t, err)
	require.Equal(t, string(m.Bytes), string(again.Bytes), "OB-03")
}

// A ticket is no bulk mail: a client that offers to unsubscribe from it would
// promise what is not meant.
func TestTicketsCannotBeUnsubscribedFrom(t *testing.T) {
	t.Parallel()
	m, err := renderer(t).Render(rendering())
	require.NoError(t, err)
	require.NotContains(t, string(m.Bytes), "List-Unsubscribe")
	resend, err := renderer(t).RenderResend(rendering())
	require.NoError(t, err)
	require.NotContains(t, string(resend.Bytes), "List-Unsubscribe")
}

func TestRenderOfferForResend(t *testing.T) {
	t.Parallel()
	m, err := renderer(t).RenderResend(offer())
	require.NoError(t, err)
	var body struct {
		Subject string
		Headers map[string]string
	}
	require.NoError(t, json.Unmarshal(m.Bytes, &body))
	require.Equal(t, "Half price <tonight>", body.Subject)
	require.Equal(t, "List-Unsubscribe=One-Click", body.Headers["List-Unsubscribe-Post"])
	require.Contains(t, body.Headers["List-Unsubscribe"], "https://example.org/unsubscribe?key=campaign")
}

func TestOfferInTheReadersLanguage(t *testing.T) {
	t.Parallel()
	in := offer()
	in.Campaign.Locale = "vi-VN"
	m, err := renderer(t).Render(in)
	require.NoError(t, err)
	require.Contains(t, parse(t, m.Bytes).text, "Xin chào Bob")
}

func TestAnOfferWithoutWordsIsPermanent(t *testing.T) {
	t.Parallel()
	in := offer()
	in.Campaign.Headline = ""
	_, err := renderer(t).Render(in)
	require.Equal(t, "permanent", outcome(err), "%v", err)
}

func TestUnsubscribeURLMayHaveAQuery(t *testing.T) {
	t.Parallel()
	r, err := mail.NewRenderer(mail.RendererConfig{From: "a@example.org", UnsubscribeURL: "https://example.net/out?list=offers"})
	require.NoError(t, err)
	m, err := r.Render(offer())
	require.NoError(t, err)
	require.Contains(t, parse(t, m.Bytes).header.Get("List-Unsubscribe"), "<https://example.net/out?key=campaign%3A")
	require.Contains(t, parse(t, m.Bytes).header.Get("List-Unsubscribe"), "&list=offers>")
}

// Whoever writes a campaign cannot write headers either.
func TestNothingFromACampaignBecomesAHeader(t *testing.T) {
	t.Parallel()
	evil := rapid.OneOf(rapid.String(), rapid.SampledFrom([]string{
		"x\r\nBcc: evil@example.net", "x\nList-Unsubscribe: <mailto:e@x>", `"><script>alert(1)</script>`, "--part-", "\u2028Bcc: e@x", "\xff",
	}))
	r := renderer(t)
	plain, err := r.Render(offer())
	require.NoError(t, err)
	names := headerNames(parse(t, plain.Bytes).header)
	rapid.Check(t, func(rt *rapid.T) {
		in := offer()
		in.Campaign.Name = evil.Draw(rt, "name")
		in.Campaign.Headline = "h" + evil.Draw(rt, "headline")
		in.Campaign.Text = "t" + evil.Draw(rt, "text") + "\n\n" + evil.Draw(rt, "more")
		m, err := r.Render(in)
		if in.Campaign.Validate() != nil { // a NUL: no row can hold it
			require.Error(rt, err)
			return
		}
		require.NoError(rt, err)
		p := parse(rt, m.Bytes)
		require.Equal(rt, names, headerNames(p.header))
		require.NotContains(rt, p.html, "<script>")
		for _, line := range bytes.Split(m.Bytes, []byte("\r\n")) {
			require.LessOrEqual(rt, len(line), 998, "RFC 5322 2.1.1")
		}
	})
}

func BenchmarkRenderOffer(b *testing.B) {
	r := renderer(b)
	in := offer()
	for b.Loop() {
		if _, err := r.Render(in); err != nil {
			b.Fatal(err)
		}
	}
}

// What a mail cannot show in full is refused where a campaign is handed over: a
// mail without its last paragraph is nothing that anybody would notice.
func TestACampaignThatAMailCannotShow(t *testing.T) {
	t.Parallel()
	good := contract.CampaignData{Headline: strings.Repeat("ä", 200), Text: strings.Repeat(strings.Repeat("x", 2000)+"\r\n\r\n", 20), Name: "Anna"}
	require.NoError(t, mail.CheckCampaign(good))
	for says, change := range map[string]func(*contract.CampaignData){
		"data.headline has 201 characters, a mail shows 200":              func(d *contract.CampaignData) { d.Headline += "!" },
		"data.name has 201 characters":                                    func(d *contract.CampaignData) { d.Name = strings.Repeat("n", 201) },
		"paragraph 1 of data.text has 2001 characters, a mail shows 2000": func(d *contract.CampaignData) { d.Text = "x" + d.Text },
		"data.text has 21 paragraphs, a mail shows 20":                    func(d *contract.CampaignData) { d.Text += "and one more" },
	} {
		d := good
		change(&d)
		require.ErrorContains(t, mail.CheckCampaign(d), says)
	}
}
