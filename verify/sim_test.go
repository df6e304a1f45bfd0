package verify_test

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"mailproof/history"
	"mailproof/verify"
)

// A small language for histories. A world is a run on a clock that only moves
// when it is told to; a mail in it lives by calling the steps of its life, and
// each step leaves the evidence that a real one would leave. Steps follow the
// system's rules; what breaks them is written by editing the evidence.

const (
	simStart = int64(1_000_000_000_000)
	simLease = 4 * time.Second
	simStale = 10 * time.Minute
)

var (
	simDelays = []time.Duration{200 * time.Millisecond, 400 * time.Millisecond, 800 * time.Millisecond}
	simWall   = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
)

type world struct {
	now      int64
	meta     history.Meta
	records  []history.Record
	final    history.Final
	mails    []*mail
	orders   map[string]int64 // of the changes of each database
	attempts int64
}

type mail struct {
	w        *world
	booking  string
	key      string
	row      map[string]string // nil: none
	outbox   *history.OutboxLeft
	topic    int // records of its event
	letters  int
	alerts   []string
	client   string // who holds it
	lastTry  *history.Attempt
	bodyHash string
	// recipient is set where it is another than the usual one.
	recipient string
	campaign  string // that asked for it; its mails have no booking
}

func (m *mail) address() string {
	if m.recipient != "" {
		return m.recipient
	}
	return m.booking + "@customers.test"
}

// subject names what the mail is about: its booking, or the reader.
func (m *mail) subject() string {
	if m.campaign != "" {
		return m.address()
	}
	return m.booking
}

func newWorld(policy, server string) *world {
	return &world{now: simStart, orders: map[string]int64{}, meta: history.Meta{
		Scenario: "golden", Policy: policy, Server: server, MaxAttempts: 3, RetryDelays: simDelays, Lease: simLease,
		Wall: simWall, Floors: history.Floors{Confirmed: 1},
		Params: map[string]string{history.ParamStaleAfter: simStale.String(), history.ParamSubject: "booking"},
	}}
}

func (w *world) wall() time.Time { return simWall.Add(time.Duration(w.now - simStart)) }

func (w *world) pass(d time.Duration) *world { w.now += int64(d); return w }

func (w *world) step() { w.pass(time.Millisecond) }

func (w *world) add(r history.Record) { w.records = append(w.records, r) }

func (w *world) phase(name string) {
	w.step()
	w.add(history.Record{T: w.now, Kind: history.KindPhase, Phase: &history.Phase{Name: name, Wall: w.wall()}})
}

func (w *world) process(name, event string) {
	w.step()
	w.add(history.Record{T: w.now, Kind: history.KindProcess, Process: &history.Process{Name: name, PID: 42, Event: event, Wall: w.wall()}})
}

// fault records one that struck from d ago until now.
func (w *world) fault(name, target string, d time.Duration) *history.Fault {
	f := &history.Fault{
		Name: name, Target: target, Start: w.now - int64(d), End: w.now,
		Outcome: history.Installed, Witness: "the far side saw it", Count: 1,
	}
	w.add(history.Record{T: w.now, Kind: history.KindFault, Fault: f})
	return f
}

func (w *world) mail(booking string) *mail {
	m := &mail{w: w, booking: booking, key: "ticket:" + booking, client: "notifyd-1.w1", bodyHash: "sha-" + booking}
	w.mails = append(w.mails, m)
	return m
}

func (m *mail) op(name string, outcome history.OpOutcome) *history.Op {
	w := m.w
	w.step()
	o := &history.Op{
		Client: "client of " + m.booking, Name: name, Booking: m.booking, Key: m.key, Recipient: m.address(),
		Intended: w.now, Call: w.now, Return: w.now + int64(500*time.Microsecond), Outcome: outcome,
	}
	w.add(history.Record{T: o.Return, Kind: history.KindOp, Op: o})
	w.step()
	return o
}

// change moves the row and logs it.
func (m *mail) change(set map[string]string) {
	w := m.w
	w.step()
	order := w.next("notify")
	c := &history.Change{Database: "notify", Table: "public.notifications", XID: uint64(order), Order: order, CommitAt: w.wall(), Op: "UPDATE", Old: maps.Clone(m.row)}
	if m.row == nil {
		c.Op = "INSERT"
		m.row = map[string]string{"id": "id-" + m.booking, "dedupe_key": m.key, "booking_id": m.booking, "attempts": "0", "token": "0", "unsettled": "0", "attempt_limit": "3", "cancel_requested": "false"}
	}
	for col, v := range set {
		if v == "" {
			delete(m.row, col)
			continue
		}
		m.row[col] = v
	}
	c.New = maps.Clone(m.row)
	w.add(history.Record{T: w.now, Kind: history.KindChange, Change: c})
}

// next is the place of the next change in the commit order of a database.
func (w *world) next(database string) int64 {
	w.orders[database]++
	return w.orders[database]
}

func (m *mail) num(col string, plus int) string {
	n, err := strconv.Atoi(m.row[col])
	if err != nil {
		panic(err)
	}
	return strconv.Itoa(n + plus)
}

func (m *mail) pg(d time.Duration) string {
	return m.w.wall().Add(d).Format("2006-01-02 15:04:05.999999-07")
}

// confirmed books, relays and leaves a row that waits.
func (m *mail) confirmed() *mail {
	m.op("confirm", history.OpOK)
	return m.relayed().arrives()
}

// relayed commits the booking with its outbox row and puts it in the topic.
func (m *mail) relayed() *mail {
	w := m.w
	xid := uint64(1_000_000 + w.orders["booking"])
	for _, table := range []string{"public.bookings", "public.outbox"} {
		w.add(history.Record{T: w.now, Kind: history.KindChange, Change: &history.Change{
			Database: "booking", Table: table, Op: "INSERT", XID: xid, Order: w.next("booking"), CommitAt: w.wall(),
			New: map[string]string{"id": m.booking, "status": "CONFIRMED"},
		}})
	}
	m.outbox = &history.OutboxLeft{EventID: "event-" + m.booking, Key: m.key, Booking: m.booking, Published: true}
	m.topic = 1
	return m
}

func (m *mail) arrives() *mail { m.change(map[string]string{"status": "PENDING"}); return m }

func (m *mail) claimed(client string) *mail {
	m.client = client
	m.change(map[string]string{
		"status": "SENDING", "attempts": m.num("attempts", 1), "token": m.num("token", 1), "unsettled": m.num("unsettled", 1),
		"locked_until": m.pg(simLease), "next_attempt_at": "",
	})
	return m
}

// try is an attempt as the server saw it: by default the mail is stored and a
// 250 answered.
func (m *mail) try(how ...func(*history.Attempt)) *mail {
	w := m.w
	w.attempts++
	w.step()
	a := &history.Attempt{
		ID: w.attempts, Transport: "smtp", Session: w.attempts, Client: m.client, Key: m.key, MessageID: "<" + m.booking + "@mailproof.test>",
		Recipient: m.address(), From: w.now, Stage: "replied", BodyHash: m.bodyHash,
		Subject: "Your ticket for Final of " + m.subject() + " is confirmed",
	}
	w.step()
	a.DotAt, a.Stored, a.ReplyWritten, a.Reply = w.now, true, true, "250 2.0.0 ok"
	w.step()
	a.To = w.now
	for _, h := range how {
		h(a)
	}
	m.lastTry = a
	w.add(history.Record{T: a.To, Kind: history.KindAttempt, Attempt: a})
	return m
}

// lost250 keeps the mail and drops the answer.
func lost250(a *history.Attempt) {
	a.Stage, a.ReplyWritten, a.Reply, a.Fault = "stored", false, "", "stored:drop"
}

// lostBeforeStored reads the dot, keeps nothing and drops the session.
func lostBeforeStored(a *history.Attempt) {
	a.Stage, a.Stored, a.ReplyWritten, a.Reply, a.Fault, a.ClosedWithoutStoring = "dot", false, false, "", "dot:drop", true
}

// refuse answers at RCPT, before the server has seen a header.
func refuse(reply string) func(*history.Attempt) {
	return func(a *history.Attempt) {
		a.Stage, a.Stored, a.DotAt, a.Reply, a.ClosedWithoutStoring = "rcpt", false, 0, reply, true
		a.Key, a.MessageID, a.BodyHash = "", "", ""
	}
}

// refuseAfterDot answers the dot with a refusal.
func refuseAfterDot(reply string) func(*history.Attempt) {
	return func(a *history.Attempt) {
		a.Stored, a.Reply, a.ClosedWithoutStoring = false, reply, true
	}
}

// overHTTP is a try at an API, which gave the mail an id if it kept it.
func overHTTP(a *history.Attempt) {
	a.Transport = "resend"
	if !a.Stored && !a.Deduplicated {
		a.MessageID = ""
	}
}

// throttle is the answer of an API that takes no more for now.
func throttle(wait time.Duration) func(*history.Attempt) {
	return func(a *history.Attempt) {
		a.Stored, a.Reply, a.RetryAfter, a.ClosedWithoutStoring = false, "429 rate_limit_exceeded", wait, true
		overHTTP(a)
	}
}

// known is the answer of a server that has the key already.
func known(a *history.Attempt) { a.Stored, a.Deduplicated = false, true }

func (m *mail) settled(status string, set map[string]string) *mail {
	all := map[string]string{"status": status, "locked_until": ""}
	maps.Copy(all, set)
	m.change(all)
	return m
}

// expired ends a mail that waited beyond its time.
func (m *mail) expired() *mail {
	return m.settled("EXPIRED", map[string]string{"expires_at": m.pg(-time.Millisecond)})
}

// tooOld is an event that asked for a mail when it was too old for one.
func (m *mail) tooOld() *mail {
	m.op("confirm", history.OpOK)
	m.relayed().w.pass(simStale)
	m.change(map[string]string{"status": "EXPIRED"})
	return m
}

func (m *mail) sent() *mail { return m.settled("SENT", nil) }

func (m *mail) delay() time.Duration {
	n, _ := strconv.Atoi(m.row["attempts"])
	return simDelays[min(n, len(simDelays))-1]
}

// spared settles a try that was throttled: it costs none of the mail's.
func (m *mail) spared(wait time.Duration) *mail {
	return m.settled("FAILED", map[string]string{
		"unsettled": m.num("unsettled", -1), "attempts": m.num("attempts", -1), "next_attempt_at": m.pg(wait + 2*time.Millisecond),
	})
}

// failed waits after a refusal; unclear after an answer that got lost. Both
// pass the delay.
func (m *mail) failed() *mail {
	d := m.delay()
	m.settled("FAILED", map[string]string{"unsettled": m.num("unsettled", -1), "next_attempt_at": m.pg(d + 2*time.Millisecond)})
	m.w.pass(d + 5*time.Millisecond)
	return m
}

func (m *mail) unclear() *mail {
	d := m.delay()
	m.settled("FAILED", map[string]string{"next_attempt_at": m.pg(d + 2*time.Millisecond)})
	m.w.pass(d + 5*time.Millisecond)
	return m
}

func (m *mail) dead() *mail {
	m.settled("DEAD", map[string]string{"unsettled": m.num("unsettled", -1)})
	m.letters, m.alerts = 1, append(m.alerts, "mail-dead")
	return m
}

func (m *mail) unknown() *mail {
	m.settled("UNKNOWN", nil)
	m.alerts = append(m.alerts, "mail-unknown")
	return m
}

func (m *mail) cancelled() *mail {
	m.op("cancel", history.OpOK)
	m.change(map[string]string{"status": "CANCELLED", "cancel_requested": "true", "next_attempt_at": ""})
	return m
}

func (m *mail) delivered() *mail { return m.confirmed().claimed("notifyd-1.w1").try().sent() }

// rest ends the run: everything that was left is read.
func (w *world) rest() *world {
	w.phase("judge")
	w.pass(20 * time.Millisecond)
	f := &w.final
	f.Wall = w.wall()
	for _, m := range w.mails {
		m.leave(f)
	}
	f.Queues = []history.QueueState{
		{Name: "q.notify.ticket", Type: "quorum", Leader: "rabbit-1", Members: 3},
		{Name: "q.notify.retry.200ms", Type: "quorum", Leader: "rabbit-1", Members: 3},
		{Name: "q.notify.dlq", Type: "quorum", Leader: "rabbit-1", Members: 3, Messages: len(f.DLQ), Ready: len(f.DLQ)},
	}
	f.Counters = map[string]float64{`sweeper_rescues_total{cause="lease"}`: 0}
	return w
}

func (m *mail) leave(f *history.Final) {
	if m.row != nil {
		attempts, _ := strconv.Atoi(m.row["attempts"])
		f.Rows = append(f.Rows, history.MailState{
			Key: m.key, Booking: m.booking, Recipient: m.address(),
			State: strings.ToLower(m.row["status"]), Attempts: attempts,
		})
	}
	if m.outbox != nil {
		f.Outbox = append(f.Outbox, *m.outbox)
	}
	for range m.topic {
		f.Topic = append(f.Topic, history.TopicRecord{Offset: int64(len(f.Topic)), EventID: m.outbox.EventID, Key: m.key, Booking: m.booking})
	}
	for range m.letters {
		f.DLQ = append(f.DLQ, history.DeadLetter{Key: m.key, Reason: "used up"})
	}
	for _, kind := range m.alerts {
		f.Alerts = append(f.Alerts, history.Alert{Kind: kind, Key: m.key})
	}
}

// all are the run's records, the meta first and the final state last.
func (w *world) all() []history.Record {
	meta, final := w.meta, w.final
	records := []history.Record{{T: simStart - 1, Kind: history.KindMeta, Meta: &meta}}
	records = append(records, w.records...)
	return append(records, history.Record{T: w.now, Kind: history.KindFinal, Final: &final})
}

func (w *world) history() *history.History { return history.FromRecords(w.all()) }

func (w *world) judge() verify.Result { return verify.Judge(w.history()) }

// campaign hands over a campaign of one mail for each name.
func (w *world) campaign(id string, outcome history.OpOutcome, names ...string) []*mail {
	mails := make([]*mail, len(names))
	for i, name := range names {
		mails[i] = w.mail(name)
		mails[i].key, mails[i].campaign = "campaign:"+id+":"+name, id
	}
	w.handOver(id, outcome, mails...)
	return mails
}

// handOver is one call for the campaign's mails; it may be repeated.
func (w *world) handOver(id string, outcome history.OpOutcome, mails ...*mail) {
	c := &history.Campaign{ID: id}
	for _, m := range mails {
		c.Recipients, c.Keys = append(c.Recipients, m.address()), append(c.Keys, m.key)
	}
	w.campaignOp("campaign", outcome, c)
}

func (w *world) stop(id string, outcome history.OpOutcome) {
	w.campaignOp("stop", outcome, &history.Campaign{ID: id})
}

func (w *world) campaignOp(name string, outcome history.OpOutcome, c *history.Campaign) {
	w.step()
	o := &history.Op{Name: name, Key: "campaign:" + c.ID, Intended: w.now, Call: w.now, Return: w.now + int64(500*time.Microsecond), Outcome: outcome, Campaign: c}
	w.add(history.Record{T: o.Return, Kind: history.KindOp, Op: o})
	w.step()
}

// campaignLives are what may become of one mail of a campaign that was accepted.
// Policy hold is theirs, whatever that of the tickets.
func campaignLives() map[string]func(m *mail) {
	return map[string]func(m *mail){
		"delivered": func(m *mail) { m.arrives().claimed("notifyd-1.marketing-1").try().sent() },
		"refused, then delivered": func(m *mail) {
			m.arrives().claimed("notifyd-1.marketing-1").try(refuse("451 4.7.1 later")).failed().claimed("notifyd-1.marketing-2").try().sent()
		},
		"refused for good": func(m *mail) {
			m.arrives().claimed("notifyd-1.marketing-1").try(refuse("550 5.1.1 no such user")).dead()
		},
		"answer lost, held":         func(m *mail) { m.arrives().claimed("notifyd-1.marketing-1").try(lost250).unknown() },
		"throttled, then delivered": func(m *mail) { throttledOften(m.arrives(), "notifyd-1.marketing-1") },
		"sent before its time was over": func(m *mail) {
			m.change(map[string]string{"status": "PENDING", "expires_at": m.pg(time.Minute)})
			m.claimed("notifyd-1.marketing-1").try().sent()
		},
		"expired, one alert for all": func(m *mail) {
			m.change(map[string]string{"status": "PENDING", "expires_at": m.pg(-2 * time.Second)}) // handed over too late
			m.settled("EXPIRED", nil)
			alert := history.Alert{Kind: "mail-expired", Key: "campaign:" + m.campaign}
			if !slices.Contains(m.w.final.Alerts, alert) {
				m.w.final.Alerts = append(m.w.final.Alerts, alert)
			}
		},
		"stopped before the claim": func(m *mail) {
			m.arrives().w.stop(m.campaign, history.OpOK)
			m.settled("CANCELLED", nil)
		},
		"stopped while it was sent": func(m *mail) {
			m.arrives().claimed("notifyd-1.marketing-1").w.stop(m.campaign, history.OpOK)
			m.try().sent()
		},
		"handed over twice": func(m *mail) {
			m.arrives().w.handOver(m.campaign, history.OpOK, m)
			m.claimed("notifyd-1.marketing-1").try().sent()
		},
	}
}

// throttledOften is told to come again more often than a mail has tries, comes
// when it was told to, and is delivered.
func throttledOften(m *mail, client string) {
	const wait = 2 * time.Second
	for range 5 {
		m.claimed(client).try(throttle(wait)).spared(wait).w.pass(wait)
	}
	m.claimed(client).try(overHTTP).sent()
}

// lives are the well-behaved lives that a mail may have under a policy and a
// server. Each starts with a client's operation and ends at rest.
func lives(policy, server string) map[string]func(m *mail) {
	all := map[string]func(m *mail){
		"delivered": func(m *mail) { m.delivered() },
		"refused, and the server stamps the end of the try late": func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuse("451 4.7.1 later"))
			first := m.lastTry
			m.failed()
			first.To += int64(m.delay() / 2) // long after the reply was read and the row settled
			m.claimed("notifyd-1.w2").try().sent()
		},
		"refused, then delivered": func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuse("451 4.7.1 later")).failed().claimed("notifyd-1.w2").try().sent()
		},
		"refused after the dot, then delivered": func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuseAfterDot("451 4.3.0 later")).failed().claimed("notifyd-1.w2").try().sent()
		},
		"throttled, then delivered": func(m *mail) { throttledOften(m.confirmed(), "notifyd-1.w1") },
		"throttled, while the client had claimed another": func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1")
			other := m.w.mail(m.booking + "-other").confirmed().claimed("notifyd-1.w1")
			m.try(throttle(2 * time.Second)).spared(2 * time.Second)
			other.try().sent() // it was claimed before anybody could know
			m.w.pass(2 * time.Second)
			m.claimed("notifyd-1.w1").try(overHTTP).sent()
		},
		"refused for now with a time, which costs a try": func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(throttle(100*time.Millisecond), func(a *history.Attempt) { a.Reply = "503 service_unavailable" }).failed()
			m.claimed("notifyd-1.w1").try(overHTTP).sent()
		},
		"throttled, then cancelled": func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").op("cancel", history.OpOK)
			m.change(map[string]string{"cancel_requested": "true"})
			m.try(throttle(time.Minute)).settled("CANCELLED", map[string]string{"unsettled": "0", "attempts": "0"}).w.pass(time.Minute)
		},
		"tries used up": func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuse("451 4.7.1 later")).failed()
			m.claimed("notifyd-1.w1").try(refuse("451 4.7.1 later")).failed().claimed("notifyd-1.w1").try(refuse("451 4.7.1 later")).dead()
		},
		"refused for good": func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuse("550 5.1.1 no such user")).dead()
		},
		"no address": func(m *mail) {
			m.recipient = m.booking + "@@customers.test"
			m.confirmed().claimed("notifyd-1.w1").dead()
		},
		"dead, replayed, delivered": func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuse("550 5.1.1 no such user")).dead()
			m.op("replay", history.OpOK)
			m.change(map[string]string{"status": "PENDING", "attempt_limit": "4"})
			m.letters = 0
			m.claimed("notifyd-1.w1").try().sent()
		},
		"cancelled before the claim": func(m *mail) { m.confirmed().cancelled() },
		"cancelled while it was sent, then refused": func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").op("cancel", history.OpOK)
			m.change(map[string]string{"cancel_requested": "true"})
			m.try(refuse("451 4.7.1 later")).settled("CANCELLED", map[string]string{"unsettled": "0"})
		},
		"cancelled while it was sent, then accepted": func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").op("cancel", history.OpOK)
			m.change(map[string]string{"cancel_requested": "true"})
			m.try().sent()
		},
		"dead, then cancelled": func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuse("550 5.1.1 no such user")).dead().cancelled() // its dead letter stays: a message is a pointer
		},
		"cancelled too late": func(m *mail) { m.delivered().op("cancel", history.OpOK) },
		"cancelled before it came": func(m *mail) {
			m.op("confirm", history.OpOK)
			m.relayed().cancelled()
		},
		"event read five times": func(m *mail) { m.delivered().topic = 5 },
		"unknown to the client, happened": func(m *mail) {
			m.op("confirm", history.OpUnknown)
			m.relayed().arrives().claimed("notifyd-1.w1").try().sent()
		},
		"unknown to the client, did not happen": func(m *mail) { m.op("confirm", history.OpUnknown) },
		"failed":                                func(m *mail) { m.op("confirm", history.OpFail) },
		"expired":                               func(m *mail) { m.confirmed().expired().alerts = []string{"expired"} },
		"its event came too late":               func(m *mail) { m.tooOld().alerts = []string{"stale"} },
		"dead in the outbox": func(m *mail) {
			m.op("confirm", history.OpOK)
			m.relayed()
			m.topic, m.outbox.Published, m.outbox.Dead, m.outbox.Bytes, m.alerts = 0, false, true, 2<<20, []string{"dead_outbox"}
		},
		"parked": func(m *mail) {
			m.op("confirm", history.OpOK)
			m.relayed().alerts = []string{"event-parked"}
			m.w.fault("spoil-records", "topic booking.events", time.Second).Keys = []string{m.key}
		},
		"thrown away by the server": func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(func(a *history.Attempt) { a.Stored, a.Breach = false, true }).sent()
		},
	}
	if policy == "hold" {
		maps.Copy(all, map[string]func(m *mail){
			"answer lost, held": func(m *mail) { m.confirmed().claimed("notifyd-1.w1").try(lost250).unknown() },
			"answer lost, found": func(m *mail) {
				m.confirmed().claimed("notifyd-1.w1").try(lost250).unknown().settled("SENT", nil)
			},
			"proven absent, sent again": func(m *mail) {
				m.confirmed().claimed("notifyd-1.w1").try(lostBeforeStored).unknown()
				m.settled("PENDING", map[string]string{"unsettled": "0"}).claimed("notifyd-1.w1").try().sent()
			},
		})
		return all
	}
	again := []func(*history.Attempt){}
	if server == "deduplicating" {
		again = append(again, known)
	}
	maps.Copy(all, map[string]func(m *mail){
		"answer lost, sent again": func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(lost250).unclear().claimed("notifyd-1.w1").try(again...).sent()
		},
		"every answer lost": func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(lost250).unclear()
			for range 2 {
				m.claimed("notifyd-1.w1").try(append(again, func(a *history.Attempt) { a.ReplyWritten, a.Reply = false, "" })...)
				if m.row["attempts"] == "3" {
					m.unknown()
					return
				}
				m.unclear()
			}
		},
	})
	return all
}

// struckLives need a fault of a process, which touches the whole run.
func struckLives(policy, server string) map[string]func(m *mail) {
	again := []func(*history.Attempt){}
	if server == "deduplicating" {
		again = append(again, known)
	}
	if policy == "hold" {
		return map[string]func(m *mail){
			"killed before it dialled": func(m *mail) {
				m.confirmed().claimed("notifyd-1.w1")
				m.w.process("notifyd-1", "killed")
				m.w.pass(simLease)
				m.unknown()
			},
			"killed between dot and mark": func(m *mail) {
				m.confirmed().claimed("notifyd-1.w1").try()
				m.w.process("notifyd-1", "killed")
				m.w.pass(simLease)
				m.unknown()
			},
		}
	}
	return map[string]func(m *mail){
		"killed between dot and mark, taken over": func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try()
			m.w.process("notifyd-1", "killed")
			m.w.pass(simLease)
			m.claimed("notifyd-2.w1").try(again...).sent()
		},
		"killed before the dot, taken over": func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try(refuse(""), func(a *history.Attempt) { a.ReplyWritten = false })
			m.w.process("notifyd-1", "killed")
			m.w.pass(simLease)
			m.claimed("notifyd-2.w1").try().sent()
		},
		"stopped past its lease, taken over": func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try()
			m.w.process("notifyd-1", "paused")
			m.w.pass(simLease)
			m.claimed("notifyd-2.w1").try(again...).sent()
			m.w.process("notifyd-1", "resumed")
		},
		"database gone between dot and mark, taken over": func(m *mail) {
			m.confirmed().claimed("notifyd-1.w1").try()
			m.w.pass(simLease)
			m.w.fault("kill-postgres", "postgres", simLease)
			m.claimed("notifyd-2.w1").try(again...).sent()
		},
	}
}

var modes = [][2]string{{"same-key", "deduplicating"}, {"resend", "deduplicating"}, {"resend", "plain"}, {"hold", "plain"}, {"hold", "deduplicating"}}

func simName(i int) string { return fmt.Sprintf("b%04d", i) }
