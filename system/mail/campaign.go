package mail

import (
	"errors"
	"fmt"
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
	for _, p := range strings.Split(strings.ReplaceAll(d.Text, "\r\n", "\n"), "\n\n") {
		if p = line(p, maxParagraph); p != "" && len(v.Paragraphs) < maxParagraphs {
			v.Paragraphs = append(v.Paragraphs, p)
		}
	}
	return nil
}
