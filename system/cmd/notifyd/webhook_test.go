package main

import (
	"encoding/json"
	"maps"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"mailproof/fakes/resendapi"
	"mailproof/fakes/smtp"
	"mailproof/system/contract"
	"mailproof/system/notify/trace"
)

// What the provider tells of mails that it has taken is seen by whoever asks for
// the campaign or the mail, and counted by lane and type.
func TestReturnedMailsAreSeen(t *testing.T) {
	p := newPlace(t, smtp.Options{})
	api := resendapi.NewServer(t,
		resendapi.On(resendapi.StageLifecycle, resendapi.Fail).To(reader(0)),
		resendapi.On(resendapi.StageLifecycle, resendapi.Suppress).To(reader(1)),
		resendapi.On(resendapi.StageLifecycle, resendapi.Bounce).To("gone@*"))
	var hook struct {
		ID     string `json:"id"`
		Secret string `json:"signing_secret"`
	}
	callAPI(t, http.MethodPost, api.URL+"/webhooks",
		`{"endpoint":"http://127.0.0.1:9/","events":["email.sent","email.delivered","email.bounced","email.failed","email.suppressed"]}`, &hook)
	maps.Copy(p.env, map[string]string{
		"NOTIFYD_TRANSPORT": "resend", "NOTIFYD_RESEND_URL": api.URL, "NOTIFYD_RESEND_API_KEY": "re_1",
		"NOTIFYD_RESEND_WEBHOOK_SECRET": hook.Secret,
	})
	p.migrate()
	n := p.start(nil)
	_, zero := n.get("/metrics")
	require.Contains(t, zero, `notifyd_provider_reports_total{event="complained",lane="marketing"} 0`, "the first one is an increase too")
	callAPI(t, http.MethodPatch, api.URL+"/webhooks/"+hook.ID, `{"endpoint":"http://`+n.addr+`/webhooks/resend"}`, nil)

	p.send("spring", offers(0, 3))
	gone := p.confirmed("gone")
	p.produce(gone)
	p.eventually("all is told", func() (bool, string) {
		_, metrics := n.get("/metrics")
		return strings.Contains(metrics, `notifyd_provider_reports_total{event="failed",lane="marketing"} 1`) &&
			strings.Contains(metrics, `notifyd_provider_reports_total{event="suppressed",lane="marketing"} 1`) &&
			strings.Contains(metrics, `notifyd_provider_reports_total{event="bounced",lane="ticket"} 1`), metrics
	})

	state := p.awaitAtRest("spring", "sent")
	require.Equal(t, map[string]int64{"sent": 3}, state.Counts)
	require.Equal(t, map[string]int64{"failed": 1, "suppressed": 1}, state.Reports)

	var story trace.Story
	p.dlq(&story, "trace", "--json", gone.DedupeKey)
	require.Len(t, story.Mails, 1)
	require.Len(t, story.Mails[0].Reports, 1)
	require.Contains(t, story.Mails[0].Reports[0].Reason, "did not take the mail")
	told := ""
	for _, e := range story.Mails[0].Events {
		told += e.Type + " "
	}
	require.Equal(t, string(contract.EmailSent)+" "+string(contract.EmailBounced)+" ", told)

	// A report goes when its row does (retention).
	_, err := p.pool.Exec(t.Context(), `DELETE FROM notifications WHERE campaign_id = 'spring'`)
	require.NoError(t, err)
	require.Equal(t, 1, p.count(`SELECT count(*) FROM provider_reports`))
}

// callAPI asks the provider's API; into may be nil.
func callAPI(t *testing.T, method, url, body string, into any) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Authorization", "Bearer re_1")
	req.Header.Set("User-Agent", "test")
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Less(t, resp.StatusCode, 300)
	if into != nil {
		require.NoError(t, json.NewDecoder(resp.Body).Decode(into))
	}
}
