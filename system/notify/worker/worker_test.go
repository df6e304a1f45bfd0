package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"mailproof/system/amqp"
	"mailproof/system/contract"
	"mailproof/system/delivery"
	"mailproof/system/mail"
	"mailproof/system/notify/alerts"
	"mailproof/system/notify/dlq"
	"mailproof/system/notify/doorbell"
	"mailproof/system/notify/metrics"
	"mailproof/system/notify/patience"
)

var (
	tiers  = []time.Duration{10 * time.Second, time.Minute, 5 * time.Minute}
	rowID  = uuid.MustParse("0190a0a0-0000-7000-8000-000000000001")
	events = "0190a0a0-0000-7000-8000-0000000000e1"
)

// world is everything around a worker; it writes down each call in order.
type world struct {
	metrics *metrics.Set // of the last worker
	t       *testing.T
	mu      sync.Mutex
	steps   []string
	die     string // at this step the process "dies": every later call fails
	cancel  context.CancelFunc

	claims   []delivery.Claim // answers in order, the last one repeats
	settled  delivery.Outcome // what a settle finds
	refused  int              // so many settles are refused first
	noRow    int              // at this claim, from 1, the row is gone
	gone     bool             // the row is gone when it is settled
	notHeld  bool             // the row is another's when the mail is stored
	sendErr  error
	storeErr map[string]int // so many failures of a step before it works
	pubErr   map[string]int
	now      time.Time
	slow     time.Duration // how long the send takes until the dot
	slowAsk  time.Duration // how long the answer to a claim takes
	dots     int           // times that the final dot was sent
	messages []amqp.Message
	alerts   []alerts.Alert
	row      delivery.Row // what Get answers
	limit    Limiter
}

var errDied = errors.New("the process has died")

// step writes a step down, or fails when the process died at it or before.
func (w *world) step(name string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.die == "dead" {
		return errDied
	}
	if w.storeErr[name] > 0 {
		w.storeErr[name]--
		return errors.New("the database is away")
	}
	if name == w.die {
		w.die = "dead"
		w.cancel()
		return errDied
	}
	w.steps = append(w.steps, name)
	return nil
}

func (w *world) Claim(_ context.Context, id uuid.UUID) (delivery.Claim, error) {
	require.Equal(w.t, rowID, id)
	if err := w.step("claim"); err != nil {
		return delivery.Claim{}, err
	}
	w.now = w.now.Add(w.slowAsk)
	if w.noRow > 0 {
		w.noRow--
		if w.noRow == 0 {
			return delivery.Claim{}, fmt.Errorf("claim: %w", delivery.ErrNoRow)
		}
	}
	c := w.claims[0]
	if len(w.claims) > 1 {
		w.claims = w.claims[1:]
	}
	return c, nil
}

func (w *world) StoreRendered(_ context.Context, _ uuid.UUID, token int64, b []byte) ([]byte, error) {
	require.Equal(w.t, int64(7), token)
	err := w.step("store mail")
	if err == nil && w.notHeld {
		err = delivery.ErrNotHeld
	}
	return append([]byte("stored "), b...), err
}

func (w *world) settle(name string) (delivery.Outcome, error) {
	if err := w.step(name); err != nil {
		return delivery.Outcome{}, err
	}
	if w.gone {
		return delivery.Outcome{}, fmt.Errorf("settle refused: %w", delivery.ErrNoRow)
	}
	if w.refused > 0 {
		w.refused--
		return delivery.Outcome{}, nil
	}
	return w.settled, nil
}

func (w *world) Accepted(_ context.Context, _ uuid.UUID, _ int64, id string) (delivery.Outcome, error) {
	require.Equal(w.t, "server-id", id)
	return w.settle("accepted")
}

func (w *world) Transient(_ context.Context, _ uuid.UUID, _ int64, r delivery.Refusal) (delivery.Outcome, error) {
	if r.Free {
		return w.settle("transient, free")
	}
	return w.settle("transient")
}

func (w *world) Permanent(context.Context, uuid.UUID, int64, delivery.Refusal) (delivery.Outcome, error) {
	return w.settle("permanent")
}

func (w *world) Ambiguous(context.Context, uuid.UUID, int64, string) (delivery.Outcome, error) {
	return w.settle("ambiguous")
}

func (w *world) Get(context.Context, uuid.UUID) (delivery.Row, error) { return w.row, w.step("get") }

func (w *world) StampDLQ(context.Context, []delivery.Row) error { return w.step("stamp") }

func (w *world) Publish(_ context.Context, msgs []amqp.Message) []error {
	errs := make([]error, len(msgs))
	for i, m := range msgs {
		name := "publish " + m.Exchange
		if w.pubErr[name] > 0 {
			w.pubErr[name]--
			errs[i] = amqp.ErrUnconfirmed
			continue
		}
		if errs[i] = w.step(name); errs[i] == nil {
			w.messages = append(w.messages, m)
		}
	}
	return errs
}

func (w *world) Raise(_ context.Context, a ...alerts.Alert) error {
	for _, one := range a {
		if err := w.step("alert " + string(one.Kind)); err != nil {
			return err
		}
	}
	w.alerts = append(w.alerts, a...)
	return nil
}

// Send is the mail server as the sender sees it.
func (w *world) Send(ctx context.Context, m mail.Message, beforeCommit func() error) (string, error) {
	require.Equal(w.t, "anna@example.test", m.To)
	_, bounded := ctx.Deadline()
	require.True(w.t, bounded, "each try needs its hard limit")
	if err := w.step("send " + string(m.Bytes)); err != nil {
		return "", &mail.AmbiguousError{Failure: mail.Failure{Err: err}}
	}
	w.now = w.now.Add(w.slow)
	if err := beforeCommit(); err != nil {
		return "", &mail.TransientError{Failure: mail.Failure{Stage: mail.StageDot, Err: err}}
	}
	w.dots++
	if w.sendErr != nil {
		return "", w.sendErr
	}
	return "server-id", nil
}

func (w *world) Close() error { return nil }

func row() delivery.Row {
	return delivery.Row{
		ID: rowID, DedupeKey: "ticket:b1", BookingID: "b1", EventID: &events, Type: contract.TicketConfirmation,
		Channel: contract.Email, Recipient: "anna@example.test", Payload: []byte(`{"event":"Concert","seats":["A1"]}`),
		Status: delivery.Sending, Attempts: 2, Token: 7, Version: 5,
	}
}

func won() delivery.Claim {
	r := row()
	return delivery.Claim{Row: &r, LeaseLeft: 45 * time.Second, Status: delivery.Sending, Token: 7, Attempts: 2}
}

func settledAs(s delivery.Status, wait time.Duration) delivery.Outcome {
	r := row()
	r.Status = s
	return delivery.Outcome{Applied: true, Row: r, Wait: wait}
}

func body(t *testing.T) []byte {
	b, err := json.Marshal(contract.Message{
		NotificationID: rowID.String(), DedupeKey: "ticket:b1", Type: contract.TicketConfirmation,
		Channel: contract.Email, To: "anna@example.test", Template: contract.TemplateTicketConfirmed,
		Data: contract.MessageData{BookingID: "b1", Event: "Concert", Seats: []string{"A1", "A2"}},
	})
	require.NoError(t, err)
	return b
}

// run hands one delivery to a worker in w and returns the steps it took.
func (w *world) run(t *testing.T, body []byte) []string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	w.cancel = cancel
	w.worker().Handle(ctx, amqp.NewDelivery(amqp.Delivery{Body: body, MessageID: "m1", Queue: contract.QueueTicket}, func() error { return w.step("ack") }))
	return w.steps
}

func (w *world) worker() *Worker {
	m := metrics.New()
	w.metrics = m
	quick := patience.Backoff{First: time.Microsecond, Max: time.Microsecond}
	log := slog.New(slog.DiscardHandler)
	retry := patience.Retrier{Backoff: quick, Log: log, Count: m}
	ring := doorbell.Ringer{Publisher: w, Backoff: quick, Log: log, Count: m}
	return New(Config{
		Type: contract.TicketConfirmation, Tiers: tiers, SendDeadline: 30 * time.Second, From: "shop@example.test",
		Store: w, Sender: w, Render: func(delivery.Row) ([]byte, error) { return []byte("mail"), nil }, Ring: ring, Alerts: w,
		Dead:  dlq.Finisher{Store: w, Ring: ring, Alerts: w, Retry: retry, Count: m},
		Retry: retry, Metrics: m, Log: log, Pause: quick, Limit: w.limit, Now: func() time.Time { return w.now },
	})
}

func newWorld(t *testing.T) *world {
	return &world{t: t, now: time.Now(), claims: []delivery.Claim{won()}, storeErr: map[string]int{}, pubErr: map[string]int{}}
}

const (
	dlx     = "publish notify.dlx"
	tier10s = "publish notify.retry.ticket.10s"
	tier1m  = "publish notify.retry.ticket.1m"
	tier5m  = "publish notify.retry.ticket.5m"
	sending = "send stored mail"
)

func failure(stage mail.Stage) mail.Failure {
	return mail.Failure{Stage: stage, Code: 451, Err: errors.New("<anna@example.test> later")}
}

// Order: settle → publish (confirmed) → ack, for each outcome (design §3).
func TestOutcomes(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		set   func(*world)
		steps []string
	}{
		"accepted": {
			func(w *world) { w.settled = settledAs(delivery.Sent, 0) },
			[]string{"claim", "store mail", sending, "accepted", "ack"},
		},
		"the bytes of the first claim are sent again": {
			func(w *world) {
				w.claims[0].Row.Rendered = []byte("first bytes")
				w.settled = settledAs(delivery.Sent, 0)
			},
			[]string{"claim", "send first bytes", "accepted", "ack"},
		},
		"transient goes to the tier that covers the wait": {
			func(w *world) {
				w.sendErr = &mail.TransientError{Failure: failure(mail.StageRcpt)}
				w.settled = settledAs(delivery.Failed, time.Minute)
			},
			[]string{"claim", "store mail", sending, "transient", tier1m, "ack"},
		},
		"a wait beyond all tiers goes to the longest": {
			func(w *world) {
				w.sendErr = &mail.TransientError{Failure: failure(mail.StageRcpt)}
				w.settled = settledAs(delivery.Failed, time.Hour)
			},
			[]string{"claim", "store mail", sending, "transient", tier5m, "ack"},
		},
		"tries used up: dead letter, alert, stamp, ack (AC4)": {
			func(w *world) {
				w.sendErr = &mail.TransientError{Failure: failure(mail.StageRcpt)}
				w.settled = settledAs(delivery.Dead, 0)
			},
			[]string{"claim", "store mail", sending, "transient", dlx, "alert mail-dead", "stamp", "ack"},
		},
		"permanent: dead at once, no retry (AC5)": {
			func(w *world) {
				w.sendErr = &mail.PermanentError{Failure: failure(mail.StageRcpt)}
				w.settled = settledAs(delivery.Dead, 0)
			},
			[]string{"claim", "store mail", sending, "permanent", dlx, "alert mail-dead", "stamp", "ack"},
		},
		"ambiguous under hold: UNKNOWN and an alert": {
			func(w *world) {
				w.sendErr = &mail.AmbiguousError{Failure: failure(mail.StageDot)}
				w.settled = settledAs(delivery.Unknown, 0)
			},
			[]string{"claim", "store mail", sending, "ambiguous", "alert mail-unknown", "ack"},
		},
		"ambiguous under resend: tried again": {
			func(w *world) {
				w.sendErr = &mail.AmbiguousError{Failure: failure(mail.StageDot)}
				w.settled = settledAs(delivery.Failed, 10*time.Second)
			},
			[]string{"claim", "store mail", sending, "ambiguous", tier10s, "ack"},
		},
		"an error of no known kind is ambiguous, not a refusal": {
			func(w *world) {
				w.sendErr = errors.New("something else")
				w.settled = settledAs(delivery.Unknown, 0)
			},
			[]string{"claim", "store mail", sending, "ambiguous", "alert mail-unknown", "ack"},
		},
		"a refusal of the lane costs no attempt and is alerted": {
			func(w *world) {
				w.sendErr = &mail.LaneError{Failure: failure(mail.StageAuth)}
				w.settled = settledAs(delivery.Failed, 10*time.Second)
			},
			[]string{"claim", "store mail", sending, "transient, free", tier10s, "ack", "alert lane-refused"},
		},
		"cancelled while it failed": {
			func(w *world) {
				w.sendErr = &mail.TransientError{Failure: failure(mail.StageRcpt)}
				w.settled = settledAs(delivery.Cancelled, 0)
			},
			[]string{"claim", "store mail", sending, "transient", "ack"},
		},
		"a refused settle looks again": {
			func(w *world) {
				w.refused = 1
				w.claims = append(w.claims, delivery.Claim{Status: delivery.Sent})
			},
			[]string{"claim", "store mail", sending, "accepted", "claim", "ack"},
		},
		"the lease was over before the mail was rendered": {
			func(w *world) {
				w.notHeld = true
				w.claims = append(w.claims, delivery.Claim{Status: delivery.Sending, Wait: 30 * time.Second})
			},
			[]string{"claim", "store mail", "claim", tier1m, "ack"},
		},
		"a row that somebody deleted does not crash the worker (C-05)": {
			func(w *world) { w.noRow = 1 },
			[]string{"claim", dlx, "alert message-undecodable", "ack"},
		},
		"a row that is deleted while its mail is sent": {
			func(w *world) { w.gone, w.noRow = true, 2 },
			[]string{"claim", "store mail", sending, "accepted", "claim", dlx, "alert message-undecodable", "ack"},
		},
		"a channel without a sender is dead, visibly": {
			func(w *world) {
				w.claims[0].Row.Channel = contract.SMS
				w.settled = settledAs(delivery.Dead, 0)
			},
			[]string{"claim", "permanent", dlx, "alert mail-dead", "stamp", "ack"},
		},
		"settled already": {
			func(w *world) { w.claims = []delivery.Claim{{Status: delivery.Sent}} },
			[]string{"claim", "ack"},
		},
		"cancelled before the claim": {
			func(w *world) { w.claims = []delivery.Claim{{Status: delivery.Cancelled}} },
			[]string{"claim", "ack"},
		},
		"not due": {
			func(w *world) {
				w.claims = []delivery.Claim{{Status: delivery.Failed, Wait: 9 * time.Second, Attempts: 1}}
			},
			[]string{"claim", tier10s, "ack"},
		},
		"another worker's live lease": {
			func(w *world) {
				w.claims = []delivery.Claim{{Status: delivery.Sending, Wait: 40 * time.Second, Attempts: 1}}
			},
			[]string{"claim", tier1m, "ack"},
		},
		"dead, but its worker died before the dead letter": {
			func(w *world) {
				w.claims, w.row = []delivery.Claim{{Status: delivery.Dead}}, settledAs(delivery.Dead, 0).Row
			},
			[]string{"claim", "get", dlx, "alert mail-dead", "stamp", "ack"},
		},
		"dead and finished": {
			func(w *world) {
				w.claims, w.row = []delivery.Claim{{Status: delivery.Dead}}, settledAs(delivery.Dead, 0).Row
				w.row.DLQPublishedAt = &w.now
			},
			[]string{"claim", "get", "ack"},
		},
		"unknown: the alert is raised again, which changes nothing": {
			func(w *world) {
				w.claims, w.row = []delivery.Claim{{Status: delivery.Unknown}}, settledAs(delivery.Unknown, 0).Row
			},
			[]string{"claim", "get", "alert mail-unknown", "ack"},
		},
		"the database fails at every step": {
			func(w *world) {
				w.storeErr = map[string]int{"claim": 3, "store mail": 2, "transient": 4, "stamp": 2}
				w.sendErr = &mail.TransientError{Failure: failure(mail.StageRcpt)}
				w.settled = settledAs(delivery.Dead, 0)
			},
			[]string{"claim", "store mail", sending, "transient", dlx, "alert mail-dead", "stamp", "ack"},
		},
		"a publish without a confirm is repeated before the ack": {
			func(w *world) {
				w.pubErr[tier10s] = 3
				w.sendErr = &mail.TransientError{Failure: failure(mail.StageRcpt)}
				w.settled = settledAs(delivery.Failed, 10*time.Second)
			},
			[]string{"claim", "store mail", sending, "transient", tier10s, "ack"},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			c.set(w)
			require.Equal(t, c.steps, w.run(t, body(t)))
		})
	}
}

// A process that dies before any step of a path has acked nothing, and has done
// the steps before it in their order.
func TestDyingAtAnyStepNeverAcks(t *testing.T) {
	t.Parallel()
	paths := map[string]func(*world){
		"sent": func(w *world) { w.settled = settledAs(delivery.Sent, 0) },
		"retry": func(w *world) {
			w.sendErr = &mail.TransientError{Failure: failure(mail.StageRcpt)}
			w.settled = settledAs(delivery.Failed, 10*time.Second)
		},
		"dead": func(w *world) {
			w.sendErr = &mail.PermanentError{Failure: failure(mail.StageRcpt)}
			w.settled = settledAs(delivery.Dead, 0)
		},
		"unknown": func(w *world) {
			w.sendErr = &mail.AmbiguousError{Failure: failure(mail.StageDot)}
			w.settled = settledAs(delivery.Unknown, 0)
		},
		"not due": func(w *world) {
			w.claims = []delivery.Claim{{Status: delivery.Failed, Wait: 9 * time.Second}}
		},
	}
	for name, set := range paths {
		whole := newWorld(t)
		set(whole)
		steps := whole.run(t, body(t))
		for i, step := range steps {
			t.Run(fmt.Sprintf("%s, before %s", name, step), func(t *testing.T) {
				t.Parallel()
				w := newWorld(t)
				set(w)
				w.die = step
				require.Equal(t, steps[:i], append([]string{}, w.run(t, body(t))...))
				require.NotContains(t, w.steps, "ack")
			})
		}
	}
}

// The dot is not sent once the lease is over, by the clock of the claim (R11).
func TestLeaseIsCheckedRightBeforeTheDot(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		slow  time.Duration
		ask   time.Duration
		dots  int
		steps []string
	}{
		"in time":         {44 * time.Second, 0, 1, []string{"claim", "store mail", sending, "accepted", "ack"}},
		"at its very end": {45 * time.Second, 0, 0, []string{"claim", "store mail", sending, "transient", "ack"}},
		"the lease counts from before the claim was asked": {40 * time.Second, 6 * time.Second, 0, []string{"claim", "store mail", sending, "transient", "ack"}},
		"long past it": {time.Hour, 0, 0, []string{"claim", "store mail", sending, "transient", "ack"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.slow, w.slowAsk, w.settled = c.slow, c.ask, settledAs(delivery.Sent, 0)
			require.Equal(t, c.steps, w.run(t, body(t)))
			require.Equal(t, c.dots, w.dots)
		})
	}
}

// A 429 is about the client: the next mail is not claimed before it is over, though
// it had its token, and costs the lane nothing else.
func TestThrottleHoldsTheLane(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		err  mail.Failure
		wait time.Duration
	}{
		"429, come again":            {mail.Failure{Stage: mail.StageResponse, Code: 429, Free: true, RetryAfter: 3 * time.Second}, 3 * time.Second},
		"429 alone":                  {mail.Failure{Stage: mail.StageResponse, Code: 429, Free: true}, time.Second},
		"503 is the mail's own":      {mail.Failure{Stage: mail.StageResponse, Code: 503, RetryAfter: 3 * time.Second}, 0},
		"no connection: never tried": {mail.Failure{Stage: mail.StageConnect, Free: true}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				w.now = time.Time{} // the bubble's own clock
				w.limit = &limits{}
				w.sendErr = &mail.TransientError{Failure: c.err}
				w.settled = settledAs(delivery.Failed, 3*time.Second)
				worker := w.worker()
				worker.cfg.Pause = patience.Backoff{First: time.Second, Max: time.Minute}
				worker.cfg.Now, worker.gate.now, worker.gate.pause = time.Now, time.Now, worker.cfg.Pause
				deliver := func() {
					worker.Handle(t.Context(), amqp.NewDelivery(amqp.Delivery{Body: body(t), MessageID: "m1", Queue: contract.QueueTicket}, func() error { return w.step("ack") }))
				}
				deliver()
				w.sendErr, w.settled = nil, settledAs(delivery.Sent, 0)
				began := time.Now()
				deliver()
				require.Equal(t, c.wait, time.Since(began).Round(time.Millisecond))
				require.Equal(t, limits{taken: 2}, *w.limit.(*limits))
			})
		})
	}
}

// closing is a bucket during whose wait the server says that it takes no more.
type closing struct{ worker *Worker }

func (c *closing) Wait(context.Context) error { c.worker.gate.hold(2 * time.Second); return nil }
func (*closing) Return()                      {}

// A worker that waited for a token looks at the gate after that.
func TestAThrottleDuringTheWaitForATokenCounts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.settled = settledAs(delivery.Sent, 0)
		worker := w.worker()
		worker.cfg.Limit = &closing{worker}
		worker.cfg.Now, worker.gate.now, worker.gate.pause = time.Now, time.Now, patience.Backoff{First: time.Second, Max: time.Minute}
		began := time.Now()
		worker.Handle(t.Context(), amqp.NewDelivery(amqp.Delivery{Body: body(t), MessageID: "m1", Queue: contract.QueueTicket}, func() error { return w.step("ack") }))
		require.Equal(t, 2*time.Second, time.Since(began).Round(time.Millisecond))
		require.Equal(t, "ack", w.steps[len(w.steps)-1])
	})
}

func TestUnreadableMessagesAreParked(t *testing.T) {
	t.Parallel()
	for name, bad := range map[string]string{
		"not JSON":      "{",
		"no id":         `{"dedupeKey":"ticket:b1"}`,
		"id is no UUID": `{"notificationId":"42"}`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			require.Equal(t, []string{dlx, "alert message-undecodable", "ack"}, w.run(t, []byte(bad)))
			require.Equal(t, bad, string(w.messages[0].Body), "the body is kept as it came")
			require.NotEmpty(t, w.messages[0].Headers[contract.HeaderReason])
		})
	}
}

func TestSuccessorIsWrittenFromTheRow(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.sendErr = &mail.TransientError{Failure: failure(mail.StageRcpt)}
	w.settled = settledAs(delivery.Failed, time.Minute)
	w.run(t, body(t))
	m := w.messages[0]
	require.Equal(t, contract.RoutingKey(contract.TicketConfirmation), m.RoutingKey, "it must find its way back")
	require.Equal(t, int32(2), m.Headers[contract.HeaderAttempt])
	require.Equal(t, events, m.Headers[contract.HeaderEventID])
	got, err := contract.DecodeMessage(m.Body)
	require.NoError(t, err)
	require.Equal(t, rowID.String(), got.NotificationID)
	require.Equal(t, []string{"A1"}, got.Data.Seats)
}

func TestAMessageThatGoesRoundKeepsItsBody(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.claims = []delivery.Claim{{Status: delivery.Failed, Wait: 9 * time.Second, Attempts: 3}}
	w.run(t, body(t))
	require.JSONEq(t, string(body(t)), string(w.messages[0].Body))
	require.Equal(t, int32(3), w.messages[0].Headers[contract.HeaderAttempt])
}
