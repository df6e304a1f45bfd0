package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"mailproof/fakes/smtp"
	"mailproof/system/contract"
	"mailproof/system/notify/dlq"
)

// dlq runs a command that must succeed, and decodes what it prints.
func (p *place) dlq(into any, args ...string) {
	p.t.Helper()
	cmd := p.command("", nil, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	require.NoError(p.t, err, "%s: %s", strings.Join(args, " "), stderr.String())
	if text, ok := into.(*string); ok {
		*text = string(out)
		return
	}
	require.NoError(p.t, json.Unmarshal(out, into), string(out))
}

// AC7 on the real parts: dead mails are listed, replayed by filter and given up;
// one that was sent meanwhile stays single; a replay killed between any two of
// its steps is made good, with the sweeper off.
func TestDeadMailsAreReplayed(t *testing.T) {
	p := newPlace(t, smtp.Options{Rules: []smtp.Rule{smtp.On(smtp.StageRcpt, smtp.Reply).Code(550).To("bad*@*").Rule()}})
	p.migrate()
	n := p.start(nil)
	const mails = 8
	key := func(i int) string { return contract.TicketKey(fmt.Sprintf("bad%d", i), 1) }
	for i := range mails {
		p.produce(p.confirmed(fmt.Sprintf("bad%d", i)))
	}
	for i := range mails {
		p.awaitState(key(i), "DEAD")
	}
	p.awaitEmpty(mails)
	p.mail.ClearRules()

	var list string
	p.dlq(&list, "dlq", "list", "--type", "ticket", "--reason", "550")
	require.Contains(t, list, fmt.Sprintf("%d dead mails", mails))
	require.NotContains(t, list, "bad0@example.test", "recipients are masked")
	var report dlq.Report
	p.dlq(&report, "dlq", "replay", "--all", "--dry-run", "--actor", "test")
	require.Equal(t, mails, report.Matched)
	require.Zero(t, report.Replayed)

	// One after the other: given up, replayed alone, killed at each step.
	p.dlq(&report, "dlq", "discard", "--key", key(0), "--actor", "test", "--why", "the address does not exist")
	require.Equal(t, 1, report.Letters.Removed)
	for i, point := range []string{"replay.after-move", "replay.after-ring", "replay.after-letters"} {
		cmd := p.command("failpoint", map[string]string{"FAILPOINTS": point + "=kill"}, "dlq", "replay", "--key", key(i+1), "--actor", "test")
		require.ErrorContains(t, cmd.Run(), "killed", point)
		var tally dlq.Tally
		p.dlq(&tally, "dlq", "tidy")
		p.awaitState(key(i+1), "SENT")
	}
	// Sent by somebody else's late 250 while it lay dead: not DEAD any more.
	_, err := p.pool.Exec(t.Context(), `UPDATE notifications SET status = 'SENT', sent_at = now(), version = version + 1 WHERE dedupe_key = $1`, key(4))
	require.NoError(t, err)
	p.dlq(&report, "dlq", "replay", "--all", "--rate", "50", "--actor", "test", "--why", "the server is healed")
	require.Equal(t, mails-5, report.Replayed)
	require.Equal(t, 1, report.Skipped, "a discarded mail is left alone")
	require.Equal(t, mails-4, report.Letters.Removed, "the letter of the mail that was sent goes too")
	for i := 5; i < mails; i++ {
		require.Equal(t, 2, p.awaitState(key(i), "SENT").Attempts)
	}
	p.awaitEmpty(0)
	for i := range mails {
		want := 1
		if i == 0 || i == 4 {
			want = 0
		}
		require.Equal(t, want, p.mail.Verdict(key(i)).Copies, key(i))
	}

	var one dlq.Case
	p.dlq(&one, "dlq", "inspect", key(0))
	require.True(t, one.Discarded)
	require.Equal(t, "the address does not exist", one.Audit[0].Reason)
	p.sendAgain(n, key(5), http.StatusCreated)
	p.awaitState(key(5)+":resend:1", "SENT")
	cancel := p.confirmed("bad6")
	cancel.EventType = contract.BookingCancelled
	p.produce(cancel)
	p.eventually("the cancel is known", func() (bool, string) {
		n := p.count("SELECT count(*) FROM cancelled_bookings")
		return n == 1, fmt.Sprint(n)
	})
	p.sendAgain(n, key(6), http.StatusConflict)
	p.requireTold(map[string]string{
		key(5): "EmailSent", key(5) + ":resend:1": "EmailSent", key(6): "EmailCancelTooLate", key(0): "EmailFailed",
	})
}

func (p *place) sendAgain(n *process, key string, want int) {
	p.t.Helper()
	n.get("/healthz")
	body := fmt.Sprintf(`{"key":%q,"actor":"support","why":"the customer deleted it"}`, key)
	resp, err := http.Post("http://"+n.addr+"/admin/mail/send-again", "application/json", strings.NewReader(body))
	require.NoError(p.t, err)
	require.NoError(p.t, resp.Body.Close())
	require.Equal(p.t, want, resp.StatusCode)
}

// requireTold waits until mail.events has told of each key, and looks at the
// last that it told.
func (p *place) requireTold(want map[string]string) {
	p.t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(parts(p.t).Kafka().Brokers()...), kgo.ConsumeTopics(p.topic+".mail"),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	require.NoError(p.t, err)
	defer client.Close()
	last := map[string]string{}
	p.eventually("the events of all mails", func() (bool, string) {
		client.PollFetches(p.t.Context()).EachRecord(func(r *kgo.Record) {
			e, err := contract.DecodeMailEvent(r.Value)
			require.NoError(p.t, err)
			require.Equal(p.t, e.BookingID, string(r.Key))
			last[e.DedupeKey] = string(e.EventType)
		})
		for key, kind := range want {
			if last[key] != kind {
				return false, fmt.Sprint(last)
			}
		}
		return true, ""
	})
}

// A message that the broker gave up at its delivery limit, while its mail is
// still to be sent, is rung for again and counted.
func TestDeliveryLimitLetterOfALiveMail(t *testing.T) {
	p := newPlace(t, smtp.Options{})
	p.migrate()
	p.env["NOTIFYD_DELIVERY_LIMIT"] = "1"
	p.env["FAILPOINTS"] = "worker.after-delivery=kill"
	n := p.launch("failpoint", nil)
	n.await("ready")
	p.produce(p.confirmed("b1"))
	require.True(t, n.killedItself())
	// The bridge may have died before its stamp; with it nobody but the letter
	// rings again.
	_, err := p.pool.Exec(t.Context(), `UPDATE notifications SET published_at = coalesce(published_at, now())`)
	require.NoError(t, err)
	// How many deliveries a limit of one allows is the broker's to say.
	queue := dlq.BrokerQueue{URLs: strings.Split(p.env["NOTIFYD_AMQP_URLS"], ","), Name: "test"}
	p.eventually("the broker gave the message up", func() (bool, string) {
		letters, err := queue.Count(t.Context())
		require.NoError(t, err)
		if letters == 0 && n.ended() {
			n = p.launch("failpoint", nil)
		}
		return letters == 1, fmt.Sprint(letters)
	})
	n.kill()
	delete(p.env, "FAILPOINTS")
	require.Zero(t, p.awaitState("ticket:b1", "PENDING").Attempts)

	// The net's grace is minutes: what rings is the look at the letters.
	n = p.start(map[string]string{"NOTIFYD_SWEEPER": "on", "NOTIFYD_DLQ_INTERVAL": "200ms"})
	p.awaitState("ticket:b1", "SENT")
	p.awaitEmpty(0)
	_, metrics := n.get("/metrics")
	require.Contains(t, metrics, `notifyd_dead_letters_revived_total{cause="delivery_limit",lane="ticket"} 1`)
	require.Equal(t, 1, p.awaitState("ticket:b1", "SENT").Attempts)
	require.Equal(t, 1, p.mail.Verdict("ticket:b1").Copies)
}
