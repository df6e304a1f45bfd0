package mail

import (
	"errors"
	"fmt"
	"math"
	"net/url"
	"slices"
	"strings"

	"mailproof/system/contract"
)

const (
	maxParagraph  = 2000 // runes
	maxParagraphs = 20
)

// CampaignTemplates are the templates that a marketing mail may have. A mail of
// one of them can be unsubscribed from; no other mail can.
func CampaignTemplates() []string { return []string{contract.TemplateOffer} }

func isCampaign(template string) bool { return slices.Contains(CampaignTemplates(), template) }

// unsubscribeURL checks where a marketing mail is unsubscribed from. RFC 8058
// 3.1 asks for https.
func unsubscribeURL(raw, domain string) (*url.URL, error) {
	if raw == "" {
		raw = "https://" + domain + "/unsubscribe"
	}
	u, err := url.Parse(raw)
	if err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil {
		return nil, errors.New("the address to unsubscribe at must be https://…")
	}
	return u, nil
}

// unsubscribe is the address that ends the subscription of one mail's receiver:
// its key says which campaign and, as a hash, who (RFC 8058 3.1). What is done
// with it is the subscription service's.
func (r *Renderer) unsubscribe(key string) string {
	u := *r.unsubscribeAt
	q := u.Query()
	q.Set("key", key)
	u.RawQuery = q.Encode()
	return u.String()
}

// listHeaders are what a marketing mail has and a ticket has not: one click ends
// the subscription (RFC 2369 3.2, RFC 8058 3.1), as large receivers ask of bulk
// senders. nil for a ticket.
func (r *Renderer) listHeaders(in Rendering) [][2]string {
	if !isCampaign(in.Template) {
		return nil
	}
	return [][2]string{
		{"List-Unsubscribe", "<" + r.unsubscribe(in.DedupeKey) + ">"},
		{"List-Unsubscribe-Post", "List-Unsubscribe=One-Click"},
	}
}

// campaignView fills in what a marketing template shows.
func (r *Renderer) campaignView(v *view, in Rendering) error {
	d := in.Campaign
	if err := d.Validate(); err != nil {
		return fmt.Errorf("template %s: %w", in.Template, err)
	}
	v.Name, v.Headline, v.Link = oneLine(d.Name), oneLine(d.Headline), d.Link
	v.Unsubscribe = r.unsubscribe(in.DedupeKey)
	for _, p := range paragraphs(d.Text) {
		if p = line(p, maxParagraph); p != "" && len(v.Paragraphs) < maxParagraphs {
			v.Paragraphs = append(v.Paragraphs, p)
		}
	}
	return nil
}

func paragraphs(text string) []string {
	return strings.Split(strings.ReplaceAll(text, "\r\n", "\n"), "\n\n")
}

// CheckCampaign names the first field of which a mail would show a part only, or
// returns nil: whoever hands a campaign over shall hear of it, and not its
// readers. A row that has it all the same is shortened. The error holds no value
// of a field.
func CheckCampaign(d contract.CampaignData) error {
	for _, f := range []struct{ name, value string }{{"headline", d.Headline}, {"name", d.Name}} {
		if n := len([]rune(line(f.value, math.MaxInt))); n > maxField {
			return fmt.Errorf("data.%s has %d characters, a mail shows %d", f.name, n, maxField)
		}
	}
	shown := 0
	for i, p := range paragraphs(d.Text) {
		p = line(p, math.MaxInt)
		if n := len([]rune(p)); n > maxParagraph {
			return fmt.Errorf("paragraph %d of data.text has %d characters, a mail shows %d", i+1, n, maxParagraph)
		}
		if p != "" {
			shown++
		}
	}
	if shown > maxParagraphs {
		return fmt.Errorf("data.text has %d paragraphs, a mail shows %d", shown, maxParagraphs)
	}
	return nil
}
