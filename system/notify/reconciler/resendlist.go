package reconciler

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"mailproof/system/delivery"
)

// ResendList looks a mail up in the list of mails that Resend keeps: GET /emails
// gives the newest first, in pages and without tags; each that went to the row's
// recipient is then read whole, for its tag is the row's key.
//
// The list proves a copy by showing it. It proves absence only when it was read
// back past the first claim, by Skew for clocks that differ, or to its end: the
// answer is then complete over the whole time in which a copy could have come,
// up to now. A page that cannot be read, a mail of the recipient that cannot or
// that carries no tag, and more than MaxPages pages are errors, and prove nothing.
//
// It reads with the key that sends, so that both see the same account.
type ResendList struct {
	cfg    ResendListConfig
	client *http.Client
}

// ResendListConfig of a list.
type ResendListConfig struct {
	URL, APIKey, UserAgent string
	// Tag is the name of the tag that carries the key, ValueOf its value.
	Tag     string
	ValueOf func(dedupeKey string) string
	// Skew is how much the provider's clock may differ; default 1 minute.
	Skew time.Duration
	// MaxPages of 100 mails for one look; default 50.
	MaxPages int
}

var _ Log = (*ResendList)(nil)

// NewResendList makes a reader of the list.
func NewResendList(cfg ResendListConfig) *ResendList {
	cfg.Skew = cmp.Or(cfg.Skew, time.Minute)
	cfg.MaxPages = cmp.Or(cfg.MaxPages, 50)
	return &ResendList{cfg, logClient()}
}

// Close ends kept connections.
func (l *ResendList) Close() { l.client.CloseIdleConnections() }

// everReaches stands for a list that was read over the whole time in question.
const everReaches = 100 * 365 * 24 * time.Hour

type resendPage struct {
	HasMore *bool        `json:"has_more"`
	Data    []resendMail `json:"data"`
}

type resendMail struct {
	ID        string   `json:"id"`
	To        []string `json:"to"`
	CreatedAt string   `json:"created_at"`
	Tags      []struct {
		Name  string `json:"name"`
		Value string `json:"value"`
	} `json:"tags"`
}

// Lookup reads the list back to the row's first claim; ctx bounds it.
func (l *ResendList) Lookup(ctx context.Context, row delivery.Row) (Page, error) {
	if row.FirstClaimedAt == nil {
		return Page{}, nil // nothing is proven
	}
	from := row.FirstClaimedAt.Add(-l.cfg.Skew)
	cursor := ""
	for range l.cfg.MaxPages {
		var p resendPage
		q := url.Values{"limit": {"100"}}
		if cursor != "" {
			q.Set("after", cursor)
		}
		if err := l.get(ctx, "/emails?"+q.Encode(), &p); err != nil {
			return Page{}, err
		}
		if p.HasMore == nil || (*p.HasMore && len(p.Data) == 0) {
			return Page{}, errors.New("the list does not say whether it goes on")
		}
		for _, m := range p.Data {
			at, err := resendTime(m.CreatedAt)
			if err != nil || m.ID == "" {
				return Page{}, errors.New("a mail of the list has no id or no time")
			}
			if at.Before(from) {
				return Page{Reach: everReaches}, nil
			}
			found, err := l.isOf(ctx, m, row)
			if err != nil {
				return Page{}, err
			}
			if found {
				return Page{Lines: []Line{{ID: m.ID, Key: row.DedupeKey, Event: Stored, ProviderID: m.ID}}}, nil
			}
			cursor = m.ID
		}
		if !*p.HasMore {
			return Page{Reach: everReaches}, nil
		}
	}
	return Page{}, fmt.Errorf("the mail was not reached in %d pages of the list", l.cfg.MaxPages)
}

// isOf reports whether a listed mail is the row's.
func (l *ResendList) isOf(ctx context.Context, m resendMail, row delivery.Row) (bool, error) {
	ours := len(m.To) == 0 // it does not say: it may be
	for _, to := range m.To {
		// However it is written: an address that is overlooked would be a false
		// proof of absence, one too many costs a request.
		ours = ours || strings.Contains(strings.ToLower(to), strings.ToLower(row.Recipient))
	}
	if !ours {
		return false, nil
	}
	var whole resendMail
	if err := l.get(ctx, "/emails/"+url.PathEscape(m.ID), &whole); err != nil {
		return false, err
	}
	if whole.ID != m.ID {
		return false, errors.New("the answer is about another mail")
	}
	for _, t := range whole.Tags {
		if t.Name == l.cfg.Tag {
			return t.Value == l.cfg.ValueOf(row.DedupeKey), nil
		}
	}
	// Its bytes may be older than the tag, or the answer leaves tags out: to take
	// it for another's would be a false proof of absence.
	return false, errors.New("a mail to the recipient has no tag that says whose it is")
}

func (l *ResendList) get(ctx context.Context, path string, into any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(l.cfg.URL, "/")+path, http.NoBody)
	if err != nil {
		return errors.New("request cannot be made")
	}
	req.Header.Set("Authorization", "Bearer "+l.cfg.APIKey)
	req.Header.Set("User-Agent", l.cfg.UserAgent)
	resp, err := l.client.Do(req)
	if err != nil {
		return withoutURL(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxPage+1))
	switch {
	case resp.StatusCode != http.StatusOK:
		return fmt.Errorf("the list answered %s", resp.Status)
	case err != nil:
		return fmt.Errorf("read the list: %w", err)
	case len(body) > maxPage:
		return fmt.Errorf("more than %d bytes in one answer of the list", maxPage)
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("the list's answer is no JSON: %w", err)
	}
	return nil
}

// resendTime reads a time as the API writes it.
func resendTime(s string) (time.Time, error) {
	t, err := time.Parse("2006-01-02 15:04:05.999999Z07", s)
	if err != nil {
		t, err = time.Parse(time.RFC3339, s)
	}
	return t, err
}
