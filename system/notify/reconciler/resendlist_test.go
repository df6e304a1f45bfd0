package reconciler

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"mailproof/fakes/resendapi"
	"mailproof/system/contract"
	"mailproof/system/delivery"
	"mailproof/system/mail"
)

func listOf(t *testing.T, url string) *ResendList {
	t.Helper()
	l := NewResendList(ResendListConfig{URL: url, APIKey: "re_1", UserAgent: "test", Tag: mail.ResendTagKey, ValueOf: mail.ResendTag})
	t.Cleanup(l.Close)
	return l
}

func postMail(t *testing.T, api *resendapi.Server, key, to string) {
	t.Helper()
	body := fmt.Sprintf(`{"from":"a@shop.test","to":[%q],"subject":"s","text":"t","tags":[{"name":%q,"value":%q}]}`, to, mail.ResendTagKey, mail.ResendTag(key))
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, api.URL+"/emails", strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Authorization", "Bearer re_1")
	req.Header.Set("User-Agent", "test")
	req.Header.Set("Idempotency-Key", key)
	res, err := http.DefaultClient.Do(req)
	if err == nil {
		_ = res.Body.Close()
	}
}

// claimedAt is an UNKNOWN row whose only claim was then.
func claimedAt(at time.Time, key, to string) delivery.Row {
	return delivery.Row{
		ID: uuid.New(), DedupeKey: key, Recipient: to, Type: contract.TicketConfirmation, Status: delivery.Unknown,
		Token: 1, Attempts: 1, FirstClaimedAt: &at, ChangedAt: at.Add(time.Second),
	}
}

// TestListShowsWhatTheProviderHas: over several pages, for a mail whose answer
// was lost, for one whose request never arrived, and for one that only its
// recipient has in common with another.
func TestListShowsWhatTheProviderHas(t *testing.T) {
	t.Parallel()
	api := resendapi.NewServer(t,
		resendapi.On(resendapi.StageStored, resendapi.Drop).To("kept@*"),
		resendapi.On(resendapi.StageRequest, resendapi.Drop).To("lost@*"))
	claimed := time.Now()
	postMail(t, api, "ticket:kept", "kept@x.test")
	postMail(t, api, "ticket:lost", "lost@x.test")
	postMail(t, api, "ticket:other", "Twice@x.test")
	for i := range 250 {
		postMail(t, api, fmt.Sprint("filler:", i), fmt.Sprintf("c%d@x.test", i))
	}
	l := listOf(t, api.URL)
	early := claimed.Add(bounds.Lease + bounds.Session)
	late := early.Add(bounds.Processing + 2*time.Second)
	for name, c := range map[string]struct {
		row  delivery.Row
		now  time.Time
		want Result
	}{
		"kept, the answer lost":        {claimedAt(claimed, "ticket:kept", "kept@x.test"), early, Found},
		"never arrived":                {claimedAt(claimed, "ticket:lost", "lost@x.test"), late, Absent},
		"never arrived, it may still":  {claimedAt(claimed, "ticket:lost", "lost@x.test"), early, Open},
		"another mail to the same one": {claimedAt(claimed, "ticket:twice", "twice@x.test"), late, Absent},
		"its own, written otherwise":   {claimedAt(claimed, "ticket:other", "twice@X.test"), early, Found},
	} {
		page, err := l.Lookup(t.Context(), c.row)
		require.NoError(t, err, name)
		got := judge(c.row, page, c.now, bounds)
		require.Equal(t, c.want, got.result, "%s: %s", name, got.why)
		if c.want == Found {
			require.NotEmpty(t, got.providerID)
		}
	}
}

// TestListThatIsNotWholeProvesNothing: whatever is missing is an error, and
// never absence.
func TestListThatIsNotWholeProvesNothing(t *testing.T) {
	t.Parallel()
	now := time.Now()
	row := claimedAt(now, "ticket:1", "ann@x.test")
	entry := func(id, to string, at time.Time) string {
		return fmt.Sprintf(`{"id":%q,"to":[%q],"created_at":%q}`, id, to, at.UTC().Format("2006-01-02 15:04:05.000000-07"))
	}
	page := func(more string, mails ...string) string {
		return `{"object":"list","has_more":` + more + `,"data":[` + strings.Join(mails, ",") + `]}`
	}
	for name, c := range map[string]struct {
		list, whole string
		reach       bool
	}{
		"empty, to its end":             {list: page("false"), reach: true},
		"past the first claim":          {list: page("true", entry("1", "x@x.test", now.Add(-time.Hour))), reach: true},
		"within the skew":               {list: page("true", entry("1", "x@x.test", now.Add(-30*time.Second)))},
		"goes on with nothing":          {list: page("true")},
		"does not say":                  {list: `{"data":[]}`},
		"no time":                       {list: page("false", `{"id":"1","to":["x@x.test"],"created_at":"yesterday"}`)},
		"no id":                         {list: page("false", entry("", "x@x.test", now))},
		"no JSON":                       {list: "<html>"},
		"its mail cannot be read":       {list: page("false", entry("1", "ann@x.test", now)), whole: "-"},
		"its mail is another":           {list: page("false", entry("1", "ann@x.test", now)), whole: `{"id":"2"}`},
		"its mail has another's tag":    {list: page("false", entry("1", "ann@x.test", now)), whole: `{"id":"1","tags":[{"name":"dedupe","value":"x"}]}`, reach: true},
		"its mail has no such tag":      {list: page("false", entry("1", "ann@x.test", now)), whole: `{"id":"1","tags":[{"name":"other","value":"x"}]}`},
		"its mail does not tell tags":   {list: page("false", entry("1", "ann@x.test", now)), whole: `{"id":"1"}`},
		"does not say to whom":          {list: page("false", `{"id":"1","created_at":"`+now.UTC().Format(time.RFC3339)+`"}`), whole: "-"},
		"a mail to somebody else's son": {list: page("false", entry("1", "Ann <ANN@x.test>", now)), whole: "-"},
	} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch {
			case r.URL.Path == "/emails":
				fmt.Fprint(w, c.list)
			case c.whole == "-":
				w.WriteHeader(http.StatusInternalServerError)
			default:
				fmt.Fprint(w, c.whole)
			}
		}))
		p, err := listOf(t, srv.URL).Lookup(t.Context(), row)
		require.Equal(t, c.reach, err == nil && p.Reach > 0, "%s: %v", name, err)
		require.Empty(t, p.Lines, name)
		srv.Close()
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := listOf(t, "http://127.0.0.1:1").Lookup(ctx, row)
	require.Error(t, err)
	row.FirstClaimedAt = nil
	p, err := listOf(t, "http://127.0.0.1:1").Lookup(t.Context(), row)
	require.NoError(t, err)
	require.Zero(t, p.Reach)
}
