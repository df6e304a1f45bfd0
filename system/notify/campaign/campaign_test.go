package campaign

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"mailproof/system/amqp"
	"mailproof/system/contract"
	"mailproof/system/delivery"
	"mailproof/system/notify/doorbell"
	"mailproof/system/notify/metrics"
	"mailproof/system/notify/patience"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	today   = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	errDied = errors.New("the process has died")
)

// world keeps what outlives a process: rows, queues, stopped campaigns.
type world struct {
	mu      sync.Mutex
	rows    map[string]*delivery.Row // by dedupe key
	rung    map[string][]string      // exchanges of the messages, by dedupe key
	stopped map[string]bool
	steps   []string
	dieAt   int // before this step, from 1; 0: never
	away    map[string]int
	log     bytes.Buffer
	hooks   map[string]func() // called once before a step
}

func newWorld() *world {
	return &world{rows: map[string]*delivery.Row{}, rung: map[string][]string{}, stopped: map[string]bool{}, away: map[string]int{}, hooks: map[string]func(){}}
}

// step counts one step of a process; a dead process makes none.
func (w *world) step(name string) error {
	if hook := w.hooks[name]; hook != nil {
		delete(w.hooks, name)
		hook()
	}
	if w.dieAt > 0 && len(w.steps)+1 >= w.dieAt {
		return errDied
	}
	if w.away[name] > 0 {
		w.away[name]--
		return errors.New("away")
	}
	w.steps = append(w.steps, name)
	return nil
}

func (w *world) CampaignStopped(_ context.Context, id string) (*time.Time, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.step("look"); err != nil {
		return nil, err
	}
	if w.stopped[id] {
		return &today, nil
	}
	return nil, nil
}

func (w *world) StopCampaign(_ context.Context, id string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.step("stop"); err != nil {
		return err
	}
	w.stopped[id] = true
	return nil
}

func (w *world) Campaign(context.Context, string) (delivery.CampaignState, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return delivery.CampaignState{Total: int64(len(w.rows)), Counts: map[delivery.Status]int64{delivery.Pending: int64(len(w.rows))}}, w.step("count")
}

func (w *world) Insert(_ context.Context, rows []delivery.NewRow) ([]delivery.Inserted, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.step("insert"); err != nil {
		return nil, err
	}
	out := make([]delivery.Inserted, len(rows))
	for i, r := range rows {
		have, ok := w.rows[r.DedupeKey]
		if !ok {
			have = &delivery.Row{
				ID: uuid.New(), DedupeKey: r.DedupeKey, Status: delivery.Pending, Recipient: r.Recipient, Payload: r.Payload, Type: r.Type,
				CampaignID: &r.CampaignID, EventID: &r.EventID, ExpiresAt: r.ExpiresAt, SendAfter: r.SendAfter,
			}
			w.rows[r.DedupeKey] = have
		}
		out[i] = delivery.Inserted{ID: have.ID, New: !ok, Status: have.Status, Published: have.PublishedAt != nil}
	}
	return out, nil
}

func (w *world) StampPublished(_ context.Context, ids []uuid.UUID) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.step("stamp"); err != nil {
		return err
	}
	for _, r := range w.rows {
		for _, id := range ids {
			if r.ID == id {
				r.PublishedAt = &today
			}
		}
	}
	return nil
}

func (w *world) Publish(_ context.Context, msgs []amqp.Message) []error {
	w.mu.Lock()
	defer w.mu.Unlock()
	errs := make([]error, len(msgs))
	if err := w.step("publish"); err != nil {
		for i := range errs {
			errs[i] = amqp.ErrUnconfirmed
		}
		return errs
	}
	for _, m := range msgs {
		msg, err := contract.DecodeMessage(m.Body)
		if err != nil {
			panic(err)
		}
		w.rung[msg.DedupeKey] = append(w.rung[msg.DedupeKey], m.Exchange)
	}
	return errs
}

// service is that of a new process.
// OfCampaign is what the provider told.
func (*world) OfCampaign(context.Context, string) (map[string]int64, error) {
	return map[string]int64{"bounced": 1}, nil
}

func (w *world) service(change ...func(*Config)) *Service {
	m := metrics.New()
	quick := patience.Backoff{First: time.Microsecond, Max: time.Microsecond}
	log := slog.New(slog.NewTextHandler(&w.log, nil))
	cfg := Config{
		Store: w, Reports: w, Metrics: m, Log: log, Step: time.Second, Window: 1, Batch: 2, Tiers: []time.Duration{10 * time.Second, time.Minute},
		Ring:     doorbell.Ringer{Publisher: w, Backoff: quick, Log: slog.New(slog.DiscardHandler), Count: m},
		Retry:    patience.Retrier{Backoff: quick, Log: slog.New(slog.DiscardHandler), Count: m},
		Hopeless: func(err error) bool { return errors.Is(err, errDied) },
		Now:      func() time.Time { return today },
	}
	for _, c := range change {
		c(&cfg)
	}
	return New(cfg)
}

func line(to string) string {
	return fmt.Sprintf(`{"to":%q,"data":{"headline":"Half price","text":"Tonight."}}`, to)
}

func request(lines ...string) Request {
	return Request{ID: "spring", Template: contract.TemplateOffer, Lines: strings.NewReader(strings.Join(lines, "\n"))}
}

// five mails are three batches of two, two and one.
func five() Request {
	return request(line("a@x"), line("b@x"), line("c@x"), line("d@x"), line("e@x"))
}

func TestSend(t *testing.T) {
	t.Parallel()
	w := newWorld()
	r, err := w.service().Send(t.Context(), five())
	require.NoError(t, err)
	require.Equal(t, Receipt{Campaign: "spring", Read: 5, New: 5}, r)
	require.Len(t, w.rows, 5)
	row := w.rows[contract.CampaignKey("spring", "a@x")]
	require.Equal(t, "spring", *row.CampaignID)
	require.Equal(t, row.DedupeKey, *row.EventID)
	require.Equal(t, contract.Marketing, row.Type)
	require.JSONEq(t, `{"template":"offer","data":{"headline":"Half price","text":"Tonight."}}`, string(row.Payload))
	require.Equal(t, []string{contract.Exchange}, w.rung[row.DedupeKey])
	require.NotNil(t, row.PublishedAt)

	// Again, with one more: nothing is published twice.
	r, err = w.service().Send(t.Context(), request(line("e@x"), line("A@X "), "", line("f@x"), line("F@x")))
	require.NoError(t, err)
	require.Equal(t, Receipt{Campaign: "spring", Read: 4, New: 1, Known: 3}, r)
	for key, rung := range w.rung {
		require.Len(t, rung, 1, key)
	}
	require.NotContains(t, w.log.String(), "@", "a recipient is in the log")
}

// Killed before any step, and repeated: each row is there, rung for and stamped;
// a second message is the only trace.
func TestRepeatedAfterADeath(t *testing.T) {
	t.Parallel()
	whole := newWorld()
	_, err := whole.service().Send(t.Context(), five())
	require.NoError(t, err)
	require.Equal(t, []string{"look", "look", "insert", "publish", "stamp"}, whole.steps[:5])
	for dieAt := 1; dieAt <= len(whole.steps); dieAt++ {
		w := newWorld()
		w.dieAt = dieAt
		died := w.service(func(c *Config) { c.Step = 20 * time.Millisecond }) // a dead process publishes for no longer
		_, err := died.Send(t.Context(), five())
		require.Error(t, err, "at step %d", dieAt)
		w.dieAt = 0
		r, err := w.service().Send(t.Context(), five())
		require.NoError(t, err, "at step %d", dieAt)
		require.Equal(t, 5, r.Read)
		require.Equal(t, 5, r.New+r.Known)
		require.Len(t, w.rows, 5)
		for key, row := range w.rows {
			require.NotNil(t, row.PublishedAt, "%s, died at step %d", key, dieAt)
			require.GreaterOrEqual(t, len(w.rung[key]), 1)
			require.LessOrEqual(t, len(w.rung[key]), 2)
		}
	}
}

// A database or broker that is away for a while costs patience alone.
func TestDependenciesAway(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.away = map[string]int{"look": 1, "insert": 2, "publish": 2, "stamp": 1}
	r, err := w.service().Send(t.Context(), five())
	require.NoError(t, err)
	require.Equal(t, 5, r.New)
}

// Away for longer than a step may take: the caller learns of it, and what was
// done is counted.
func TestDependencyAwayForLong(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.away = map[string]int{"publish": 1 << 30}
		slow := func(c *Config) {
			c.Ring.Backoff = patience.Default()
			c.Step = 30 * time.Second
		}
		began := time.Now()
		r, err := w.service(slow).Send(t.Context(), five())
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 30*time.Second, time.Since(began))
		require.Equal(t, 2, r.New, "no batch was begun after the one that failed")
		w.away = nil
		r, err = w.service(slow).Send(t.Context(), five())
		require.NoError(t, err)
		require.Equal(t, Receipt{Campaign: "spring", Read: 5, New: 3, Known: 2}, r)
		for key, rung := range w.rung {
			require.Len(t, rung, 1, key)
		}
	})
}

func TestBadLines(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ line, reason string }{
		"no JSON":        {`{"to"`, "unexpected EOF"},
		"no object":      {`["a@x"]`, "cannot unmarshal"},
		"two objects":    {line("c@x") + line("d@x"), "something follows"},
		"no address":     {line("nobody"), "not of the form name@domain"},
		"no recipient":   {`{"data":{"headline":"h","text":"t"}}`, "empty"},
		"unknown field":  {`{"to":"c@x","data":{"headlnie":"h","text":"t"}}`, "headlnie"},
		"no words":       {`{"to":"c@x","data":{"headline":"h"}}`, "data.text"},
		"a NUL":          {`{"to":"c@x","data":{"headline":"h\u0000","text":"t"}}`, "U+0000"},
		"two recipients": {line("c@x,d@x"), "character that no mailbox has"},
		"far too long":   {line(strings.Repeat("c", maxLine)), "longer than 65536 bytes"},
	} {
		w := newWorld()
		r, err := w.service().Send(t.Context(), request(line("a@x"), line("b@x"), line("e@x"), "", c.line, line("z@x")))
		var bad *LineError
		require.ErrorAs(t, err, &bad, name)
		require.Equal(t, 5, bad.Line, name)
		require.Contains(t, bad.Reason, c.reason, name)
		require.Equal(t, Receipt{Campaign: "spring", Read: 3, New: 3}, r, name)
		for _, to := range []string{"a@x", "b@x", "e@x"} {
			row := w.rows[contract.CampaignKey("spring", to)]
			require.NotNil(t, row, "%s: %s", name, to)
			require.NotNil(t, row.PublishedAt, "%s: %s", name, to)
		}
		require.NotContains(t, w.log.String(), "@x", name)
	}
}

// breaking is a body whose connection is lost in the middle of a line.
type breaking struct{ rest io.Reader }

func (b *breaking) Read(p []byte) (int, error) {
	n, err := b.rest.Read(p)
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

func TestABodyThatBreaksOff(t *testing.T) {
	t.Parallel()
	w := newWorld()
	req := request()
	req.Lines = &breaking{strings.NewReader(line("a@x") + "\n" + line("b@x") + "\n" + line("c@x") + "\n" + `{"to":"d@`)}
	r, err := w.service().Send(t.Context(), req)
	require.ErrorIs(t, err, ErrBody)
	require.Equal(t, Receipt{Campaign: "spring", Read: 3, New: 3}, r)
	for key, row := range w.rows {
		require.NotNil(t, row.PublishedAt, key)
	}
}

// The caller goes away after the insert: the batch is carried on.
func TestCallerGone(t *testing.T) {
	t.Parallel()
	w := newWorld()
	ctx, cancel := context.WithCancel(t.Context())
	w.hooks["publish"] = cancel
	_, err := w.service().Send(ctx, request(line("a@x"), line("b@x")))
	require.NoError(t, err)
	require.Equal(t, []string{"look", "look", "insert", "publish", "stamp"}, w.steps)
}

func TestStoppedCampaignTakesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld()
	require.NoError(t, w.service().Stop(t.Context(), "spring"))
	r, err := w.service().Send(t.Context(), five())
	require.ErrorIs(t, err, ErrStopped)
	require.Zero(t, r.Read)
	require.Empty(t, w.rows)
}

// Stopped while a call is under way: no further batch is taken in.
func TestStoppedUnderWay(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.hooks["publish"] = func() { w.stopped["spring"] = true }
	r, err := w.service().Send(t.Context(), five())
	require.ErrorIs(t, err, ErrStopped)
	require.Equal(t, 2, r.New)
	require.Len(t, w.rows, 2)
}

func TestRequestsThatCannotBeRight(t *testing.T) {
	t.Parallel()
	soon, later := today.Add(time.Hour), today.Add(2*time.Hour)
	for want, change := range map[string]func(*Request){
		"letters, digits":                 func(r *Request) { r.ID = "a b" },
		`no campaign template ""`:         func(r *Request) { r.Template = "" },
		"ticket-confirmed":                func(r *Request) { r.Template = contract.TemplateTicketConfirmed },
		"expire before they may be sent":  func(r *Request) { r.SendAfter, r.ExpiresAt = &later, &soon },
		"expire before they may be sent ": func(r *Request) { r.SendAfter, r.ExpiresAt = &soon, &soon },
	} {
		w := newWorld()
		req := five()
		change(&req)
		_, err := w.service().Send(t.Context(), req)
		require.ErrorIs(t, err, ErrInvalid)
		require.ErrorContains(t, err, strings.TrimSpace(want))
		require.Empty(t, w.steps)
	}
	for _, id := range []string{"", "a:b"} {
		require.ErrorIs(t, newWorld().service().Stop(t.Context(), id), ErrInvalid)
		_, err := newWorld().service().Show(t.Context(), id)
		require.ErrorIs(t, err, ErrInvalid)
	}
}

// A mail whose time has not come waits in the tier that covers it.
func TestSendAfter(t *testing.T) {
	t.Parallel()
	for wait, exchange := range map[time.Duration]string{
		-time.Second: contract.Exchange, 5 * time.Second: "notify.retry.marketing.10s", 30 * time.Second: "notify.retry.marketing.1m",
		time.Hour: "notify.retry.marketing.1m",
	} {
		w := newWorld()
		req := request(line("a@x"))
		at, end := today.Add(wait), today.Add(2*time.Hour)
		req.SendAfter, req.ExpiresAt = &at, &end
		_, err := w.service().Send(t.Context(), req)
		require.NoError(t, err)
		row := w.rows[contract.CampaignKey("spring", "a@x")]
		require.Equal(t, []string{exchange}, w.rung[row.DedupeKey], wait)
		require.Equal(t, at, *row.SendAfter)
		require.Equal(t, end, *row.ExpiresAt)
	}
}

// endless gives lines for as long as somebody reads.
type endless struct{ n, most int }

func (e *endless) Read(p []byte) (int, error) {
	if e.n == e.most {
		return 0, io.EOF
	}
	e.n++
	return copy(p, line(fmt.Sprintf("r%d@x", e.n))+"\n"), nil
}

// slow is a store that lets nothing through until it is released.
type slow struct {
	*world
	gate chan struct{}
}

func (s slow) Insert(ctx context.Context, rows []delivery.NewRow) ([]delivery.Inserted, error) {
	<-s.gate
	return s.world.Insert(ctx, rows)
}

// Reading waits for the batches under way: what is held in memory does not grow
// with the call.
func TestReadingIsHeldBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		gate := make(chan struct{})
		body := &endless{most: 1000}
		req := request()
		req.Lines = body
		done := make(chan Receipt, 1)
		go func() {
			r, err := w.service(func(c *Config) { c.Store, c.Window = slow{w, gate}, 3 }).Send(t.Context(), req)
			if err != nil {
				panic(err)
			}
			done <- r
		}()
		synctest.Wait()
		// Three batches under way, and one that was read and waits; the scanner
		// may hold a line more.
		require.LessOrEqual(t, body.n, 4*2+1)
		close(gate)
		require.Equal(t, Receipt{Campaign: "spring", Read: 1000, New: 1000}, <-done)
	})
}

// A batch of long lines is bounded by its bytes.
func TestBatchesAreBoundedByBytes(t *testing.T) {
	t.Parallel()
	long := strings.Repeat(strings.Repeat("word ", 399)+"\n\n", 20)
	var body strings.Builder
	for i := range 60 {
		fmt.Fprintf(&body, `{"to":"r%d@x","data":{"headline":"h","text":%q}}`+"\n", i, long)
	}
	l := newLines(strings.NewReader(body.String()), 500)
	first, err := l.batch()
	require.NoError(t, err)
	require.LessOrEqual(t, len(first), 27, "a megabyte and the line that passes it")
	rest, err := l.batch()
	require.NoError(t, err)
	require.NotEmpty(t, rest)
}

func TestShow(t *testing.T) {
	t.Parallel()
	w := newWorld()
	_, err := w.service().Send(t.Context(), five())
	require.NoError(t, err)
	s, err := w.service().Show(t.Context(), "spring")
	require.NoError(t, err)
	require.Equal(t, State{
		Campaign: "spring", Total: 5, Counts: map[string]int64{"pending": 5}, Reports: map[string]int64{"bounced": 1},
	}, s)
}
