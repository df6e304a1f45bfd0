package admin

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/system/notify/campaign"
)

// campaigns remembers what it was asked for.
type campaigns struct {
	err     error
	asked   campaign.Request
	body    string
	stopped string
}

func (c *campaigns) Send(_ context.Context, r campaign.Request) (campaign.Receipt, error) {
	c.asked = r
	body, err := io.ReadAll(r.Lines)
	if err != nil {
		return campaign.Receipt{}, err
	}
	c.body = string(body)
	return campaign.Receipt{Campaign: r.ID, Read: 3, New: 2, Known: 1}, c.err
}

func (c *campaigns) Show(_ context.Context, id string) (campaign.State, error) {
	return campaign.State{Campaign: id, Stopped: id == c.stopped, Total: 7, Counts: map[string]int64{"sent": 7}}, c.err
}

func (c *campaigns) Stop(_ context.Context, id string) error {
	c.stopped = id
	return c.err
}

func TestCampaignIsTakenIn(t *testing.T) {
	c := &campaigns{}
	ask := asker(t, Config{Campaigns: c})
	q := url.Values{"template": {"offer"}, "expires_at": {"2026-12-24T18:00:00+01:00"}, "send_after": {"2026-12-24T08:00:00Z"}}
	status, body := ask(http.MethodPost, "/campaigns/spring-26/mails?"+q.Encode(), "application/x-ndjson; charset=utf-8", "line one\nline two\n")
	require.Equal(t, http.StatusOK, status, body)
	require.JSONEq(t, `{"campaign":"spring-26","read":3,"new":2,"known":1}`, body)
	require.Equal(t, "spring-26", c.asked.ID)
	require.Equal(t, "offer", c.asked.Template)
	require.Equal(t, "line one\nline two\n", c.body)
	require.True(t, c.asked.ExpiresAt.Equal(time.Date(2026, 12, 24, 17, 0, 0, 0, time.UTC)))
	require.True(t, c.asked.SendAfter.Equal(time.Date(2026, 12, 24, 8, 0, 0, 0, time.UTC)))
}

func TestCampaignRefusals(t *testing.T) {
	for name, r := range map[string]struct {
		err    error
		status int
		says   string
	}{
		"bad line": {&campaign.LineError{Line: 4, Reason: "data.text is empty"}, http.StatusBadRequest, `{"error":"line 4: data.text is empty","line":4,"campaign":"x","read":3,"new":2,"known":1}`},
		"stopped":  {campaign.ErrStopped, http.StatusConflict, `{"error":"the campaign was stopped","campaign":"x","read":3,"new":2,"known":1}`},
		"invalid":  {campaign.ErrInvalid, http.StatusBadRequest, `{"error":"invalid campaign request","campaign":"x","read":3,"new":2,"known":1}`},
		"away":     {errors.New("dial tcp: secret"), http.StatusServiceUnavailable, ""},
	} {
		ask := asker(t, Config{Campaigns: &campaigns{err: r.err}})
		status, body := ask(http.MethodPost, "/campaigns/x/mails?template=offer", "application/x-ndjson", "")
		require.Equal(t, r.status, status, name)
		if r.says != "" {
			require.JSONEq(t, r.says, body, name)
			continue
		}
		require.Contains(t, body, "repeat the request")
		require.Contains(t, body, `"new":2`)
		require.NotContains(t, body, "secret")
	}
}

// What a web page could make a browser send, and what is misspelt, is not taken
// in.
func TestCampaignRequestsThatAreNotTakenIn(t *testing.T) {
	for want, r := range map[string][2]string{
		"Content-Type":     {"?template=offer", "text/plain"},
		"application/x-nd": {"?template=offer", "application/json"},
		"expires_at":       {"?template=offer&expires_at=tomorrow", "application/x-ndjson"},
		"send_after":       {"?template=offer&send_after=2026-12-24", "application/x-ndjson"},
		`\"expires\"`:      {"?template=offer&expires=2026-12-24T18:00:00Z", "application/x-ndjson"},
	} {
		c := &campaigns{}
		status, body := asker(t, Config{Campaigns: c})(http.MethodPost, "/campaigns/x/mails"+r[0], r[1], line)
		require.Equal(t, http.StatusBadRequest, status, want)
		require.Contains(t, body, want)
		require.Empty(t, c.asked)
	}
}

const line = `{"to":"a@x","data":{}}`

func TestCampaignIsShownAndStopped(t *testing.T) {
	c := &campaigns{}
	ask := asker(t, Config{Campaigns: c})
	status, body := ask(http.MethodGet, "/campaigns/x", "", "")
	require.Equal(t, http.StatusOK, status)
	require.JSONEq(t, `{"campaign":"x","stopped":false,"total":7,"counts":{"sent":7}}`, body)
	status, body = ask(http.MethodDelete, "/campaigns/x", "", "")
	require.Equal(t, http.StatusOK, status)
	require.JSONEq(t, `{"campaign":"x","stopped":true,"total":7,"counts":{"sent":7}}`, body)
	c.err = errors.New("dial tcp: secret")
	for _, method := range []string{http.MethodGet, http.MethodDelete} {
		status, body = ask(method, "/campaigns/x", "", "")
		require.Equal(t, http.StatusServiceUnavailable, status)
		require.NotContains(t, body, "secret")
	}
}
