package main

import (
	"fmt"
	"strings"
	"testing"

	amqp091 "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"mailproof/fakes/smtp"
	"mailproof/system/contract"
)

// A command that dies after it has made the second mail's row and before its
// doorbell leaves a waiting row: the sweeper rings (OB-12). Each is sent once.
func TestSendAgainKilledAtEachStep(t *testing.T) {
	p := newPlace(t, smtp.Options{})
	p.migrate()
	p.start(map[string]string{"NOTIFYD_SWEEPER": "on", "NOTIFYD_SWEEPER_INTERVAL": "200ms", "NOTIFYD_SWEEPER_GRACE": "300ms"})
	for i, point := range []string{"send-again.after-insert", "send-again.after-ring"} {
		booking := fmt.Sprintf("b%d", i)
		key := contract.TicketKey(booking, 1)
		p.produce(p.confirmed(booking))
		p.awaitState(key, "SENT")
		cmd := p.command("failpoint", map[string]string{"FAILPOINTS": point + "=kill"},
			"send-again", key, "--actor", "test", "--why", "the customer deleted it")
		require.ErrorContains(t, cmd.Run(), "killed", point)
		p.awaitState(key+":resend:1", "SENT")
		require.Equal(t, 1, p.mail.Verdict(key+":resend:1").Copies, point)
		require.Equal(t, 1, p.mail.Verdict(key).Copies, point)
	}
	p.awaitEmpty(0)
}

// A message that nobody can read, and a worker that dies after it has published
// the dead letter and before the alert: the message comes again, and there is one
// alert.
func TestUnreadableMessageKilledBeforeItsAlert(t *testing.T) {
	p := newPlace(t, smtp.Options{})
	p.migrate()
	n := p.launch("failpoint", map[string]string{"FAILPOINTS": "worker.after-park=kill"})
	n.await("ready")
	url, _, _ := strings.Cut(p.env["NOTIFYD_AMQP_URLS"], ",")
	conn, err := amqp091.Dial(url)
	require.NoError(t, err)
	defer conn.Close()
	ch, err := conn.Channel()
	require.NoError(t, err)
	require.NoError(t, ch.PublishWithContext(t.Context(), "", contract.QueueTicket, true, false, amqp091.Publishing{
		MessageId: "m1", Body: []byte("no message"), DeliveryMode: amqp091.Persistent,
	}))
	require.True(t, n.killedItself(), "the point was not passed")
	p.start(nil)
	p.eventually("one alert, two letters, nothing left", func() (bool, string) {
		alerts := p.count("SELECT count(*) FROM alerts WHERE kind = 'message-undecodable'")
		require.LessOrEqual(t, alerts, 1)
		letters, ticket := p.queue(contract.QueueDLQ).Messages, p.queue(contract.QueueTicket).Messages
		return alerts == 1 && letters == 2 && ticket == 0, fmt.Sprint(alerts, letters, ticket)
	})
}

// A sweeper that dies right after it ended a row that is not worth sending any
// more: the alert was committed with the row, since nobody would come back for
// it (OB-11).
func TestExpiredKilledAtOnce(t *testing.T) {
	p := newPlace(t, smtp.Options{Rules: []smtp.Rule{smtp.On(smtp.StageRcpt, smtp.Reply).Code(451).Rule()}})
	p.migrate()
	p.env["NOTIFYD_RETRY_DELAYS"] = "1m" // no message looks at the row meanwhile
	n := p.launch("failpoint", map[string]string{
		"NOTIFYD_SWEEPER": "on", "NOTIFYD_SWEEPER_INTERVAL": "100ms", "FAILPOINTS": "sweeper.after-expired=kill",
	})
	n.await("ready")
	p.produce(p.confirmed("b1"))
	p.awaitState("ticket:b1", "FAILED")
	_, err := p.pool.Exec(t.Context(), "UPDATE notifications SET expires_at = now()")
	require.NoError(t, err)
	require.True(t, n.killedItself(), "the point was not passed")
	p.awaitState("ticket:b1", "EXPIRED")
	require.Equal(t, 1, p.count("SELECT count(*) FROM alerts WHERE kind = 'mail-expired' AND dedupe_key = 'ticket:b1'"))
	p.start(map[string]string{"NOTIFYD_SWEEPER": "on", "NOTIFYD_SWEEPER_INTERVAL": "100ms"})
	require.Equal(t, 1, p.count("SELECT count(*) FROM alerts"))
}
