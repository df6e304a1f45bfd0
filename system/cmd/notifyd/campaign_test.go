package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/fakes/smtp"
	"mailproof/system/contract"
	"mailproof/system/notify/campaign"
)

// reader is the i-th recipient of a test's campaign.
func reader(i int) string { return fmt.Sprintf("reader%d@example.test", i) }

func offers(from, to int) string {
	var sb strings.Builder
	for i := from; i < to; i++ {
		fmt.Fprintf(&sb, `{"to":%q,"data":{"headline":"Half price","text":"Tonight.","link":"https://example.test/x"}}`+"\n", reader(i))
	}
	return sb.String()
}

// send runs the command and returns its receipt.
func (p *place) send(id string, body string, args ...string) campaign.Receipt {
	p.t.Helper()
	cmd := p.command("", nil, append([]string{"campaign", "send", id, "--template", "offer"}, args...)...)
	var out, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(body), &out, &stderr
	require.NoError(p.t, cmd.Run(), stderr.String())
	require.NotContains(p.t, stderr.String(), "@example.test")
	var r campaign.Receipt
	require.NoError(p.t, json.Unmarshal(out.Bytes(), &r))
	return r
}

func (p *place) campaign(verb, id string) campaign.State {
	p.t.Helper()
	var s campaign.State
	p.dlq(&s, "campaign", verb, id)
	return s
}

// awaitAtRest waits until every mail of the campaign is in one of the states.
func (p *place) awaitAtRest(id string, states ...string) campaign.State {
	p.t.Helper()
	var last map[string]int64
	p.eventually("campaign "+id+" is at rest", func() (bool, string) {
		last = map[string]int64{}
		rows, err := p.pool.Query(p.t.Context(), `SELECT lower(status), count(*) FROM notifications WHERE campaign_id = $1 GROUP BY 1`, id)
		require.NoError(p.t, err)
		for rows.Next() {
			var status string
			var n int64
			require.NoError(p.t, rows.Scan(&status, &n))
			last[status] = n
		}
		require.NoError(p.t, rows.Err())
		for _, s := range states {
			delete(last, s)
		}
		return len(last) == 0, fmt.Sprint(last)
	})
	return p.campaign("show", id)
}

// Killed between any two steps of the intake, and repeated: each recipient has
// one mail. The second batch is the one that dies, so that there is one before
// it; no net helps.
func TestCampaignIsRepeatedAfterAKill(t *testing.T) {
	p := newPlace(t, smtp.Options{})
	p.migrate()
	p.start(nil)
	const mails = 600 // two batches
	body := offers(0, mails)
	for _, point := range []string{"campaign.after-read", "campaign.after-insert", "campaign.after-publish", "campaign.after-stamp"} {
		t.Run(point, func(t *testing.T) {
			p := p.at(t)
			id := strings.ReplaceAll(point, "campaign.", "")
			cmd := p.command("failpoint", map[string]string{"FAILPOINTS": point + "=kill@2"}, "campaign", "send", id, "--template", "offer")
			cmd.Stdin = strings.NewReader(body)
			require.ErrorContains(t, cmd.Run(), "killed")
			before := p.count(`SELECT count(*) FROM notifications WHERE campaign_id = $1`, id)
			unstamped := p.count(`SELECT count(*) FROM notifications WHERE campaign_id = $1 AND published_at IS NULL`, id)
			if point == "campaign.after-insert" || point == "campaign.after-publish" {
				require.GreaterOrEqual(t, unstamped, 1, "the kill left nothing open")
			}
			r := p.send(id, body)
			require.Equal(t, campaign.Receipt{Campaign: id, Read: mails, New: mails - before, Known: before}, r)
			s := p.awaitAtRest(id, "sent")
			require.Equal(t, map[string]int64{"sent": mails}, s.Counts)
			p.requireOneEach(id, mails)
		})
	}
	p.awaitEmpty(0)
}

func (p *place) requireOneEach(id string, mails int) {
	p.t.Helper()
	for i := range mails {
		require.Equal(p.t, 1, p.mail.Verdict(contract.CampaignKey(id, reader(i))).Copies, reader(i))
	}
}

// Killed and not repeated: the sweeper finishes what has a row.
func TestCampaignIsFinishedByTheSweeper(t *testing.T) {
	p := newPlace(t, smtp.Options{})
	p.migrate()
	const mails = 20
	cmd := p.command("failpoint", map[string]string{"FAILPOINTS": "campaign.after-insert=kill"}, "campaign", "send", "spring", "--template", "offer")
	cmd.Stdin = strings.NewReader(offers(0, mails))
	require.ErrorContains(t, cmd.Run(), "killed")
	require.Equal(t, mails, p.count(`SELECT count(*) FROM notifications WHERE published_at IS NULL`))
	p.start(map[string]string{"NOTIFYD_SWEEPER": "on", "NOTIFYD_SWEEPER_INTERVAL": "200ms", "NOTIFYD_SWEEPER_GRACE": "500ms"})
	p.awaitAtRest("spring", "sent")
	p.requireOneEach("spring", mails)
}

// C-14: stopped after some were sent. None is claimed after the flag was set, the
// counts add up, and no row is lost.
func TestCampaignIsStoppedMidway(t *testing.T) {
	p := newPlace(t, smtp.Options{})
	p.migrate()
	n := p.start(map[string]string{"NOTIFYD_MARKETING_RATE": "100"})
	const mails = 1000
	require.Equal(t, mails, p.send("spring", offers(0, mails)).New)
	p.eventually("some were sent", func() (bool, string) {
		n := p.count(`SELECT count(*) FROM notifications WHERE status = 'SENT'`)
		return n >= 20, fmt.Sprint(n)
	})
	require.True(t, p.campaign("stop", "spring").Stopped)
	var stopped time.Time
	require.NoError(t, p.pool.QueryRow(t.Context(), `SELECT clock_timestamp()`).Scan(&stopped))
	s := p.awaitAtRest("spring", "sent", "cancelled")
	require.EqualValues(t, mails, s.Total)
	require.EqualValues(t, mails, s.Counts["sent"]+s.Counts["cancelled"])
	require.GreaterOrEqual(t, s.Counts["cancelled"], int64(1), "all was sent before the flag was set")
	require.Zero(t, p.count(`SELECT count(*) FROM notifications WHERE first_claimed_at > $1`, stopped))
	p.awaitEmpty(0)
	copies := 0
	for i := range mails {
		copies += p.mail.Verdict(contract.CampaignKey("spring", reader(i))).Copies
	}
	require.EqualValues(t, s.Counts["sent"], copies)
	require.Zero(t, p.count(`SELECT count(*) FROM alerts`), "a stopped campaign is what its sender asked for")
	// No mail is taken in any more.
	n.get("/healthz")
	resp, err := http.Post("http://"+n.addr+"/campaigns/spring/mails?template=offer", "application/x-ndjson", strings.NewReader(offers(0, 1)))
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, http.StatusConflict, resp.StatusCode)
}

// OB-11: what waits past its time is not sent. One alert tells of the campaign.
func TestCampaignExpires(t *testing.T) {
	p := newPlace(t, smtp.Options{})
	p.migrate()
	p.start(map[string]string{"NOTIFYD_MARKETING_RATE": "20", "NOTIFYD_SWEEPER": "on", "NOTIFYD_SWEEPER_INTERVAL": "500ms"})
	const mails = 300 // fifteen seconds of work
	expires := time.Now().Add(4 * time.Second)
	p.send("spring", offers(0, mails), "--expires-at", expires.Format(time.RFC3339Nano))
	s := p.awaitAtRest("spring", "sent", "expired")
	require.EqualValues(t, mails, s.Total)
	require.GreaterOrEqual(t, s.Counts["expired"], int64(1))
	require.Zero(t, p.count(`SELECT count(*) FROM notifications WHERE first_claimed_at > expires_at`))
	copies := 0
	for i := range mails {
		copies += p.mail.Verdict(contract.CampaignKey("spring", reader(i))).Copies
	}
	require.EqualValues(t, s.Counts["sent"], copies)
	p.eventually("the alert is raised", func() (bool, string) {
		n := p.count(`SELECT count(*) FROM alerts WHERE kind = 'mail-expired' AND dedupe_key = 'campaign:spring'`)
		return n == 1, fmt.Sprint(n)
	})
	require.Equal(t, 1, p.count(`SELECT count(*) FROM alerts`))
	p.awaitEmpty(0)
}

// The command names the line, and what was before it is taken in.
func TestCampaignCommandNamesTheLine(t *testing.T) {
	p := newPlace(t, smtp.Options{})
	p.migrate()
	file := filepath.Join(t.TempDir(), "recipients.ndjson")
	require.NoError(t, os.WriteFile(file, []byte(offers(0, 3)+`{"to":"anna"}`+"\n"+offers(3, 5)), 0o600))
	cmd := p.command("", nil, "campaign", "send", "spring", "--template", "offer", "--file", file)
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	require.Error(t, cmd.Run())
	require.Contains(t, stderr.String(), "line 4")
	require.NotContains(t, stderr.String(), "anna")
	var r campaign.Receipt
	require.NoError(t, json.Unmarshal(out.Bytes(), &r))
	require.Equal(t, campaign.Receipt{Campaign: "spring", Read: 3, New: 3}, r)
}
