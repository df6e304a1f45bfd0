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
