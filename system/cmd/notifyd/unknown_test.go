package main

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"mailproof/fakes/resendapi"
	"mailproof/fakes/smtp"
)

// T6.7 under hold, with the provider's log at hand: what was kept is found, what
// was not is sent once more, and what nobody can know yet stays open.
func TestUnknownMailsAreReconciled(t *testing.T) {
	p := newPlace(t, smtp.Options{HTTPAddr: "127.0.0.1:0", Rules: []smtp.Rule{
		smtp.On(smtp.StageStored, smtp.Drop).To("kept*@*").First(1).Rule(),
		smtp.On(smtp.StageDot, smtp.Drop).To("closed*@*").First(1).Rule(),
		smtp.On(smtp.StageDot, smtp.HoldUntilReleased).To("held@*").First(1).Rule(),
	}})
	p.migrate()
	p.env["NOTIFYD_TICKET_POLICY"] = "hold"
	p.env["NOTIFYD_PROVIDER_LOG_URL"] = p.mail.URL() + "/log"
	p.env["NOTIFYD_RECONCILER"] = "off"
	n := p.start(nil)
	bookings := []string{"held"}
	for i := range 5 {
		bookings = append(bookings, fmt.Sprint("kept", i), fmt.Sprint("closed", i))
	}
	for _, b := range bookings {
		p.produce(p.confirmed(b))
	}
	for _, b := range bookings {
		p.awaitState("ticket:"+b, "UNKNOWN")
	}
	out, err := p.command("", nil, "unknown", "list").CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), "11 unknown mails")
	require.NotContains(t, string(out), "held@example.test", "recipients are masked")

	out, err = p.command("", nil, "unknown", "reconcile").Output()
	require.NoError(t, err, string(out))
	require.JSONEq(t, `{"found":5,"absent":5,"open":1}`, string(out))
	for _, b := range bookings[1:] {
		p.awaitState("ticket:"+b, "SENT")
		require.Equal(t, 1, p.mail.Verdict("ticket:"+b).Copies, b)
	}
	require.Equal(t, "UNKNOWN", p.awaitState("ticket:held", "UNKNOWN").Status)

	// The service does it by itself, once the session has shown its end.
	n.kill()
	p.mail.ReleaseAll()
	p.start(map[string]string{"NOTIFYD_RECONCILER": "on", "NOTIFYD_RECONCILER_INTERVAL": "100ms"})
	p.awaitState("ticket:held", "SENT")
	require.Equal(t, 1, p.mail.Verdict("ticket:held").Copies)
	p.eventually("the alerts are resolved", func() (bool, string) {
		open := p.count("SELECT count(*) FROM alerts WHERE kind = 'mail-unknown' AND resolved_at IS NULL")
		return open == 0, fmt.Sprint(open)
	})
	p.awaitEmpty(0)
}

// T6.7 over Resend: each answer lost once, one mail each, by the key alone. A
// mail that has used up its tries is asked for again by the reconciler.
func TestLostAnswersOfResend(t *testing.T) {
	api, err := resendapi.Start(resendapi.Options{Rules: []resendapi.Rule{
		resendapi.On(resendapi.StageStored, resendapi.Drop).To("b*@*").First(1).Rule(),
		resendapi.On(resendapi.StageStored, resendapi.Reply).Code(500).To("stubborn@*").First(4).Rule(),
	}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, api.Close()) })
	p := newPlace(t, smtp.Options{})
	delete(p.env, "NOTIFYD_SMTP_ADDR")
	p.env["NOTIFYD_TRANSPORT"], p.env["NOTIFYD_RESEND_URL"], p.env["NOTIFYD_RESEND_API_KEY"] = "resend", api.URL, "re_secret"
	p.env["NOTIFYD_TICKET_POLICY"] = "same-key"
	p.env["NOTIFYD_RESEND_LIST"] = "off" // it would find the mail before it is asked for again
	p.env["NOTIFYD_RECONCILER_INTERVAL"] = "100ms"
	p.migrate()
	n := p.start(nil)
	keys := []string{"ticket:stubborn"}
	p.produce(p.confirmed("stubborn"))
	for i := range 10 {
		b := fmt.Sprint("b", i)
		keys = append(keys, "ticket:"+b)
		p.produce(p.confirmed(b))
	}
	for _, k := range keys {
		s := p.awaitState(k, "SENT")
		require.GreaterOrEqual(t, s.Attempts, 2, k)
		require.Equal(t, 1, api.Verdict(k).Copies, k)
	}
	require.Equal(t, 5, p.awaitState("ticket:stubborn", "SENT").Attempts, "four tries, and the one that the reconciler let through")
	for _, a := range api.Ledger() {
		require.Empty(t, a.Findings, a.Key)
		require.Contains(t, a.Client, "notifyd-1.ticket-")
	}
	_, metrics := n.get("/metrics")
	require.Contains(t, metrics, `notifyd_reconciled_total{result="asked"} 1`)
	p.awaitEmpty(0)
	out, err := p.command("", nil, "config").CombinedOutput()
	require.NoError(t, err)
	require.NotContains(t, string(out), "re_secret")
}
