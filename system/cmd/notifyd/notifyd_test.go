package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/fakes/smtp"
	"mailproof/infra"
	"mailproof/system/contract"
)

func TestOneEventIsOneMail(t *testing.T) {
	p := newPlace(t, smtp.Options{})
	p.migrate()
	n := p.start(nil)
	p.produce(p.confirmed("b1"))
	require.Equal(t, 1, p.awaitState("ticket:b1", "SENT").Attempts)

	mails := p.mail.LedgerSince(0)
	require.Len(t, mails, 1)
	require.True(t, mails[0].Stored)
	require.Equal(t, "ticket:b1", mails[0].Key)
	require.Equal(t, "b1@example.test", mails[0].Recipient)
	require.Contains(t, mails[0].Client, "notifyd-1.")
	p.awaitEmpty(0)
	for _, q := range []string{contract.QueueTicket, contract.QueueMarketing, contract.QueueDLQ} {
		require.Equal(t, "quorum", p.queue(q).Type, q)
	}

	status, body := n.get("/readyz")
	require.Equal(t, 200, status, body)
	_, metrics := n.get("/metrics")
	require.Contains(t, metrics, `notifyd_sends_total{lane="ticket",outcome="accepted"} 1`)
	require.Contains(t, metrics, `notifyd_acks_total{lane="ticket",result="ok"} 1`)

	sent := n.await("sent")
	require.Equal(t, "ticket:b1", sent["dedupe_key"])
	require.NotEmpty(t, sent["event_id"])
	require.NotEmpty(t, sent["provider_id"])
	require.EqualValues(t, 1, sent["attempts"])
	require.NotContains(t, n.text(), "b1@example.test", "recipients are masked")
	require.NotContains(t, n.text(), "NOT JSON")

	require.NoError(t, n.cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, n.awaitExit())
	n.await("stopped")
}

// AC1: the event five times, and the same intent under another event id.
func TestDuplicateEventsSendOnce(t *testing.T) {
	p := newPlace(t, smtp.Options{})
	p.migrate()
	p.start(nil)
	e := p.confirmed("b1")
	other := p.confirmed("b1")
	p.produce(e, e, e, other, e, e, p.confirmed("b2"))
	p.awaitState("ticket:b1", "SENT")
	p.awaitState("ticket:b2", "SENT")
	p.awaitEmpty(0)
	require.Equal(t, 1, p.mail.Verdict("ticket:b1").Copies)
	require.Equal(t, 2, p.count("SELECT count(*) FROM notifications"))
}

// M6-11, AC4: 451 for every try → exactly N tries at growing delays, DLQ holds
// one message, DEAD, an alert.
func TestTransientFailureEndsInTheDLQ(t *testing.T) {
	p := newPlace(t, smtp.Options{Rules: []smtp.Rule{smtp.On(smtp.StageRcpt, smtp.Reply).Code(451).To("b1@*").Rule()}})
	p.migrate()
	n := p.start(nil)
	p.produce(p.confirmed("b1"))
	require.Equal(t, 4, p.awaitState("ticket:b1", "DEAD").Attempts)
	p.awaitEmpty(1)

	tries := p.mail.LedgerSince(0)
	require.Len(t, tries, 4)
	for i, delay := range []time.Duration{200 * time.Millisecond, 400 * time.Millisecond, 800 * time.Millisecond} {
		// From the end of a try to the beginning of the next; how much longer it
		// takes depends on the machine.
		gap := time.Duration(tries[i+1].From - tries[i].To)
		require.GreaterOrEqual(t, gap, delay, "try %d came before its time", i+2)
	}
	require.True(t, p.awaitState("ticket:b1", "DEAD").Stamped)
	require.Equal(t, 1, p.count("SELECT count(*) FROM alerts WHERE kind = 'mail-dead' AND dedupe_key = 'ticket:b1'"))
	_, list := n.get("/admin/dlq")
	var dead []map[string]any
	require.NoError(t, json.Unmarshal([]byte(list), &dead))
	require.Len(t, dead, 1)
	require.Equal(t, "ticket:b1", dead[0]["dedupe_key"])
	require.NotContains(t, list, "b1@example.test")
}

// AC5: a permanent refusal is not tried again.
func TestPermanentFailureIsDeadAtOnce(t *testing.T) {
	p := newPlace(t, smtp.Options{Rules: []smtp.Rule{smtp.On(smtp.StageRcpt, smtp.Reply).Code(550).To("b1@*").Rule()}})
	p.migrate()
	p.start(nil)
	p.produce(p.confirmed("b1"))
	require.Equal(t, 1, p.awaitState("ticket:b1", "DEAD").Attempts)
	p.awaitEmpty(1)
	require.Len(t, p.mail.LedgerSince(0), 1)
}

// T6.7 at its smallest: stored, and the 250 lost.
func TestLostReplyFollowsThePolicy(t *testing.T) {
	for policy, want := range map[string]struct {
		state    string
		attempts int
		copies   int
	}{
		"hold":   {"UNKNOWN", 1, 1},
		"resend": {"SENT", 2, 2},
	} {
		t.Run(policy, func(t *testing.T) {
			p := newPlace(t, smtp.Options{Rules: []smtp.Rule{smtp.On(smtp.StageStored, smtp.Drop).First(1).Rule()}})
			p.migrate()
			p.start(map[string]string{"NOTIFYD_TICKET_POLICY": policy})
			p.produce(p.confirmed("b1"))
			require.Equal(t, want.attempts, p.awaitState("ticket:b1", want.state).Attempts)
			p.awaitEmpty(0)
			mails := p.mail.LedgerSince(0)
			require.Equal(t, want.copies, p.mail.Verdict("ticket:b1").Copies)
			for _, m := range mails {
				require.Equal(t, mails[0].MessageID, m.MessageID, "OB-03")
				require.Equal(t, mails[0].BodyHash, m.BodyHash, "the bytes never change")
			}
			require.Equal(t, map[string]int{"hold": 1, "resend": 0}[policy], p.count("SELECT count(*) FROM alerts WHERE kind = 'mail-unknown'"))
		})
	}
}

func TestUnreadableEventIsParkedAndThePartitionGoesOn(t *testing.T) {
	p := newPlace(t, smtp.Options{})
	p.migrate()
	p.start(nil)
	p.produceRaw("b1", []byte(`{"event_id":"e","event_type":"BookingConfirmed","version":99}`))
	nul := p.confirmed("b1")
	nul.Data.Name = "a\x00b"
	p.produce(nul)
	after := p.confirmed("b1")
	after.Generation, after.DedupeKey, after.EventType = 2, contract.TicketKey("b1", 2), contract.BookingReopened
	p.produce(after)
	p.awaitState("ticket:b1:v2", "SENT")
	require.Equal(t, 2, p.count("SELECT count(*) FROM parked_events"))
	require.Equal(t, 2, p.count("SELECT count(*) FROM alerts WHERE kind = 'event-parked'"))
}

func TestCancelStaleAndTombstone(t *testing.T) {
	p := newPlace(t, smtp.Options{})
	p.migrate()
	p.start(nil)
	cancel := p.confirmed("b1")
	cancel.EventType = contract.BookingCancelled
	stale := p.confirmed("b2")
	stale.OccurredAt = time.Now().Add(-25 * time.Hour)
	p.produce(cancel, p.confirmed("b1"), stale, p.confirmed("b3"))
	p.awaitState("ticket:b3", "SENT")
	p.awaitState("ticket:b1", "CANCELLED")
	p.awaitState("ticket:b2", "EXPIRED")
	require.Equal(t, 1, p.count("SELECT count(*) FROM alerts WHERE kind = 'mail-expired'"))
	p.awaitEmpty(0)
	require.Len(t, p.mail.LedgerSince(0), 1)
}

// AC3: killed while the server holds the session; the mail is not lost, and a
// restart under the same name takes its partitions and messages at once.
func TestKilledWhileSending(t *testing.T) {
	p := newPlace(t, smtp.Options{Rules: []smtp.Rule{smtp.On(smtp.StageDot, smtp.HoldUntilReleased).First(1).Rule()}})
	p.migrate()
	n := p.start(nil)
	p.produce(p.confirmed("b1"))
	hold, err := p.mail.AwaitHold(t.Context(), nil)
	require.NoError(t, err)
	n.kill()
	require.True(t, p.mail.Release(hold.ID))
	p.start(nil)
	require.Equal(t, 2, p.awaitState("ticket:b1", "SENT").Attempts)
	p.awaitEmpty(0)
	require.LessOrEqual(t, p.mail.Verdict("ticket:b1").Copies, 2, "one unsettled attempt justifies one copy more")
}

// A process that was stopped past its lease and wakes right before the dot does
// not send it: another one has (R11).
func TestStoppedPastItsLease(t *testing.T) {
	p := newPlace(t, smtp.Options{})
	p.migrate()
	// The sweeper rings for leases that are over; the stopped process's window
	// may take the message until the broker misses its heartbeats.
	p.env["NOTIFYD_SWEEPER"], p.env["NOTIFYD_SWEEPER_INTERVAL"], p.env["NOTIFYD_SWEEPER_GRACE"] = "on", "200ms", "300ms"
	n := p.launch("failpoint", map[string]string{"FAILPOINTS": "worker.before-dot=stop"})
	n.await("ready")
	p.produce(p.confirmed("b1"))
	p.eventually("the process is stopped", func() (bool, string) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", n.cmd.Process.Pid))
		require.NoError(t, err)
		_, rest, _ := strings.Cut(string(stat), ") ")
		return strings.HasPrefix(rest, "T"), rest
	})
	other := p.start(map[string]string{"NOTIFYD_INSTANCE": "2"})
	require.Equal(t, 2, p.awaitState("ticket:b1", "SENT").Attempts)
	require.NoError(t, n.cmd.Process.Signal(syscall.SIGCONT))
	require.Contains(t, n.await("the row was no longer held, looking again")["error"], "the lease on the row is over")
	require.Equal(t, 1, p.mail.Verdict("ticket:b1").Copies)
	p.awaitEmpty(0)
	_, metrics := other.get("/metrics")
	require.Contains(t, metrics, `notifyd_sweeper_rescues_total{cause="overdue"}`)
}

// Postgres and RabbitMQ are killed under load, one after the other: nothing is
// lost, nothing is sent without need, readiness says so meanwhile.
func TestDependenciesGoAway(t *testing.T) {
	p := newPlace(t, smtp.Options{})
	p.migrate()
	n := p.start(nil)
	stack := parts(t)
	const each = 40
	for round, node := range []infra.Node{stack.Postgres(), stack.RabbitMQ().Nodes()[0]} {
		for i := range each / 2 {
			p.produce(p.confirmed(fmt.Sprintf("b%d-%d", round, i)))
		}
		require.NoError(t, node.Kill(t.Context()))
		p.eventually("readiness is red", func() (bool, string) {
			status, body := n.get("/readyz")
			return status == 503, body
		})
		for i := range each / 2 {
			p.produce(p.confirmed(fmt.Sprintf("b%d-%d", round, each/2+i)))
		}
		require.NoError(t, node.Restart(t.Context()))
		p.eventually("all are sent", func() (bool, string) {
			var sent, all int
			err := p.pool.QueryRow(t.Context(), "SELECT count(*) FILTER (WHERE status = 'SENT'), count(*) FROM notifications").Scan(&sent, &all)
			return err == nil && sent == each*(round+1), fmt.Sprintf("%d of %d, %v", sent, all, err)
		})
		p.eventually("readiness is green", func() (bool, string) {
			status, body := n.get("/readyz")
			return status == 200, body
		})
	}
	p.awaitEmpty(0)
	for _, v := range p.mail.Verdicts() {
		// A second copy needs an attempt that the row could not be told of.
		require.LessOrEqual(t, v.Copies, 1+p.count("SELECT unsettled FROM notifications WHERE dedupe_key = $1", v.Key), v.Key)
	}
}

// It starts before its tables are there, says what it waits for, and goes on.
func TestStartsBeforeItsTables(t *testing.T) {
	p := newPlace(t, smtp.Options{})
	n := p.launch("", nil)
	require.Equal(t, "wait for the tables", n.await("waiting for a dependency")["duty"])
	status, _ := n.get("/healthz")
	require.Equal(t, 200, status)
	status, _ = n.get("/readyz")
	require.Equal(t, 503, status)
	p.migrate()
	n.await("ready")
}

// A second signal ends it at once although a mail is held.
func TestSecondSignalStopsAtOnce(t *testing.T) {
	p := newPlace(t, smtp.Options{Rules: []smtp.Rule{smtp.On(smtp.StageDot, smtp.HoldUntilReleased).Rule()}})
	p.migrate()
	n := p.start(map[string]string{"NOTIFYD_SEND_DEADLINE": "60s", "NOTIFYD_LEASE": "120s"})
	p.produce(p.confirmed("b1"))
	_, err := p.mail.AwaitHold(t.Context(), nil)
	require.NoError(t, err)
	require.NoError(t, n.cmd.Process.Signal(syscall.SIGTERM))
	n.await("draining")
	require.NoError(t, n.cmd.Process.Signal(syscall.SIGTERM))
	require.Error(t, n.awaitExit())
	p.mail.ReleaseAll()
}

// A wrong environment is named whole, on stderr, before anything starts.
func TestWrongEnvironment(t *testing.T) {
	p := &place{t: t, env: map[string]string{"NOTIFYD_LEASE": "1s"}}
	out, err := p.command("", nil).CombinedOutput()
	require.Error(t, err)
	for _, name := range []string{"NOTIFYD_DATABASE_URL", "NOTIFYD_AMQP_URLS", "NOTIFYD_KAFKA_BROKERS", "NOTIFYD_SMTP_ADDR"} {
		require.Contains(t, string(out), name)
	}
}

// points are the crash points that one ticket mail passes.
var points = []struct {
	name   string
	fails  bool // the server refuses the mail
	copies int  // at most, under resend
	end    string
}{
	{"bridge.after-poll", false, 1, "SENT"},
	{"bridge.after-insert", false, 1, "SENT"},
	{"bridge.after-cancel", false, 1, "SENT"},
	{"bridge.after-publish", false, 1, "SENT"},
	{"bridge.after-stamp", false, 1, "SENT"},
	{"bridge.after-commit", false, 1, "SENT"},
	{"worker.after-delivery", false, 1, "SENT"},
	{"worker.after-claim", false, 1, "SENT"},
	{"worker.after-render", false, 1, "SENT"},
	{"worker.before-dot", false, 1, "SENT"},
	{"worker.after-250", false, 2, "SENT"},
	{"worker.after-settle", false, 1, "SENT"},
	{"worker.after-ack", false, 1, "SENT"},
	// The refusal was known to the dead process alone: the attempt stays
	// unsettled, and a mail with one is never called dead.
	{"worker.after-failure", true, 0, "UNKNOWN"},
	{"worker.after-settle", true, 0, "DEAD"},
	{"worker.after-publish", true, 0, "DEAD"},
	{"dlq.after-publish", true, 0, "DEAD"},
	{"dlq.after-alert", true, 0, "DEAD"},
	{"dlq.after-stamp", true, 0, "DEAD"},
}

// Killed between any two steps, with the sweeper off: after a restart the mail
// is sent, or dead with its letter and alert; a second copy only where a 250
// was lost.
func TestKilledBetweenAnyTwoSteps(t *testing.T) {
	p := newPlace(t, smtp.Options{Rules: []smtp.Rule{smtp.On(smtp.StageRcpt, smtp.Reply).Code(451).To("bad*@*").Rule()}})
	p.migrate()
	p.env["NOTIFYD_RETRY_DELAYS"], p.env["NOTIFYD_MAX_ATTEMPTS"] = "200ms", "3"
	for i, point := range points {
		t.Run(fmt.Sprintf("%s fails=%t", point.name, point.fails), func(t *testing.T) {
			p := p.at(t)
			kind := "good"
			if point.fails {
				kind = "bad"
			}
			booking := fmt.Sprintf("%s%d", kind, i)
			key := contract.TicketKey(booking, 1)
			// A message of the kill before that comes again late may pass the point
			// before this mail does, and before everything is up: what must be true
			// afterwards stays the same.
			n := p.launch("failpoint", map[string]string{"FAILPOINTS": point.name + "=kill"})
			p.produce(p.confirmed(booking))
			require.True(t, n.killedItself(), "the point was not passed")
			next := p.start(nil)
			p.awaitState(key, point.end)
			p.awaitTraces(key, point.end)
			v := p.mail.Verdict(key)
			require.LessOrEqual(t, v.Copies, point.copies)
			if point.end == "SENT" {
				require.GreaterOrEqual(t, v.Copies, 1)
			}
			require.NoError(t, next.cmd.Process.Signal(syscall.SIGTERM))
			require.NoError(t, next.awaitExit())
		})
	}
}

// awaitTraces waits for what a final state leaves outside the row.
func (p *place) awaitTraces(key, end string) {
	p.t.Helper()
	kind := map[string]string{"DEAD": "mail-dead", "UNKNOWN": "mail-unknown"}[end]
	if kind == "" {
		return
	}
	p.eventually("the alert, and the stamp of a dead letter", func() (bool, string) {
		s := p.awaitState(key, end)
		n := p.count("SELECT count(*) FROM alerts WHERE kind = $1 AND dedupe_key = $2", kind, key)
		require.LessOrEqual(p.t, n, 1, "one alert per incident")
		return n == 1 && (s.Stamped || end != "DEAD"), fmt.Sprintf("%+v, %d alerts", s, n)
	})
}

// R13: the release binary does not even hold the names of the crash points.
func TestReleaseBinaryHasNoCrashPoints(t *testing.T) {
	release, err := os.ReadFile(binary(t, ""))
	require.NoError(t, err)
	tagged, err := os.ReadFile(binary(t, "failpoint"))
	require.NoError(t, err)
	for _, point := range points {
		require.False(t, strings.Contains(string(release), point.name), point.name)
		require.True(t, strings.Contains(string(tagged), point.name), point.name)
	}
}
