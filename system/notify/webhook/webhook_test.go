package webhook

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"mailproof/fakes/resendapi"
	"mailproof/system/contract"
	"mailproof/system/delivery"
	"mailproof/system/mail"
)

// rows is a store in memory, and a counter.
type rows struct {
	mu      sync.Mutex
	all     map[string]*delivery.Row
	bounced map[string]int
	reports map[string]Report // by key and event
	counted []string          // lane and event
	results map[Result]int
	away    bool
}

var errAway = errors.New("the database is away")

func (r *rows) ByKey(_ context.Context, key string) (delivery.Row, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch row := r.all[key]; {
	case r.away:
		return delivery.Row{}, errAway
	case row == nil:
		return delivery.Row{}, delivery.ErrNoRow
	default:
		return *row, nil
	}
}

func (r *rows) Found(_ context.Context, id uuid.UUID, providerID string) (delivery.Outcome, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, row := range r.all {
		if row.ID != id {
			continue
		}
		applied := row.Status == delivery.Unknown
		if applied {
			row.Status, row.ProviderMsgID = delivery.Sent, &providerID
		}
		return delivery.Outcome{Applied: applied, Row: *row}, nil
	}
	return delivery.Outcome{}, delivery.ErrNoRow
}

func (r *rows) Bounced(_ context.Context, key string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.bounced[key]++
	return nil
}

func (r *rows) Write(_ context.Context, id uuid.UUID, rep Report) (bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for key, row := range r.all {
		if row.ID != id {
			continue
		}
		at := key + " " + rep.Event
		_, known := r.reports[at]
		r.reports[at] = rep
		return !known, nil
	}
	return false, delivery.ErrNoRow
}

func (r *rows) ProviderReport(lane, event string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.counted = append(r.counted, lane+" "+event)
}

func (r *rows) Webhook(result string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.results[Result(result)]++
}

func (r *rows) set(key string, s delivery.Status) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all[key] = &delivery.Row{ID: uuid.New(), DedupeKey: key, Status: s}
}

func (r *rows) status(key string) delivery.Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.all[key].Status
}

func (r *rows) count(res Result) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.results[res]
}

// bench is the fake provider with a webhook to a handler over rows.
type bench struct {
	t   *testing.T
	api *resendapi.Server
	*rows
}

func newBench(t *testing.T, rules ...resendapi.Builder) *bench {
	t.Helper()
	b := &bench{t, resendapi.NewServer(t, rules...), &rows{all: map[string]*delivery.Row{}, bounced: map[string]int{}, reports: map[string]Report{}, results: map[Result]int{}}}
	var handler http.Handler
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { handler.ServeHTTP(w, r) }))
	t.Cleanup(srv.Close)
	answer := b.call("/webhooks", fmt.Sprintf(`{"endpoint":%q,"events":["email.sent","email.delivered","email.bounced","email.complained","email.suppressed","email.failed"]}`, srv.URL))
	_, rest, _ := strings.Cut(answer, `"signing_secret":"`)
	secret, _, _ := strings.Cut(rest, `"`)
	h, err := New(Config{
		Secret: secret, Store: b.rows, Reports: b.rows, Tag: mail.ResendTagKey, KeyOf: mail.ResendTagged,
		Count: b.rows, Log: slog.New(slog.DiscardHandler), Timeout: time.Minute,
	})
	require.NoError(t, err)
	handler = h
	return b
}

func (b *bench) call(path, body string, head ...string) string {
	b.t.Helper()
	req, err := http.NewRequestWithContext(b.t.Context(), http.MethodPost, b.api.URL+path, strings.NewReader(body))
	require.NoError(b.t, err)
	req.Header.Set("Authorization", "Bearer re_1")
	req.Header.Set("User-Agent", "test")
	for i := 0; i < len(head); i += 2 {
		req.Header.Set(head[i], head[i+1])
	}
	res, err := http.DefaultClient.Do(req)
	require.NoError(b.t, err)
	defer res.Body.Close()
	var out bytes.Buffer
	_, err = out.ReadFrom(res.Body)
	require.NoError(b.t, err)
	require.Less(b.t, res.StatusCode, 300, out.String())
	return out.String()
}

// send hands a mail to the provider, as the sender does.
func (b *bench) send(key, to string) {
	b.t.Helper()
	b.call("/emails", fmt.Sprintf(`{"from":"a@shop.test","to":[%q],"subject":"s","text":"t","tags":[{"name":%q,"value":%q}]}`,
		to, mail.ResendTagKey, mail.ResendTag(key)), "Idempotency-Key", key)
}

func (b *bench) eventually(what func() bool) {
	b.t.Helper()
	require.Eventually(b.t, what, 20*time.Second, 10*time.Millisecond, "%v, deliveries %+v", b.results, b.api.Deliveries())
}

const key = "ticket:0198f2d7-7c6e-7d1a-9a2b-0123456789ab:v2"

func TestADeliveryMakesUnknownSent(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.set(key, delivery.Unknown)
	b.send(key, "ann@x.test")
	b.eventually(func() bool { return b.count(Found) == 1 && b.count(Known) == 1 })
	require.Equal(t, delivery.Sent, b.status(key))
	require.NotEmpty(t, *b.all[key].ProviderMsgID)
	require.Empty(t, b.bounced)
}

// Each event twice, and the first one overtaken by the next.
func TestDuplicatesAndAnyOrderAreHarmless(t *testing.T) {
	t.Parallel()
	b := newBench(t,
		resendapi.On(resendapi.StageWebhook, resendapi.Duplicate),
		resendapi.On(resendapi.StageWebhook, resendapi.Reorder).First(1).Times(1),
		resendapi.On(resendapi.StageLifecycle, resendapi.Bounce).To("gone@*"),
		resendapi.On(resendapi.StageLifecycle, resendapi.Complain).To("angry@*"))
	for _, who := range []string{"gone", "angry"} {
		b.set("ticket:"+who, delivery.Unknown)
		b.send("ticket:"+who, who+"@x.test")
	}
	// gone: sent, bounced; angry: sent, delivered, complained; each twice.
	b.eventually(func() bool { return b.count(Found)+b.count(Known)+b.count(Bounced) == 10 })
	require.Equal(t, delivery.Sent, b.status("ticket:gone"))
	require.Equal(t, delivery.Sent, b.status("ticket:angry"))
	require.Equal(t, map[string]int{"ticket:gone": 2}, b.bounced, "the statement makes one event of both")
	require.ElementsMatch(t, []string{"ticket bounced", "ticket complained"}, b.counted, "each once")
}

// Whatever the provider tells of a mail after it took it is kept with its reason
// and counted by lane and type, a marketing mail's too, of which no booking is
// told.
func TestWhatBecameOfATakenMailIsReported(t *testing.T) {
	t.Parallel()
	for event, c := range map[string]struct {
		how      resendapi.Builder
		returned bool
		reason   string
	}{
		"bounced": {
			resendapi.On(resendapi.StageLifecycle, resendapi.Bounce), true,
			"Permanent, General, The recipient's mail server did not take the mail., smtp; 550 5.1.1 no such mailbox",
		},
		"failed": {resendapi.On(resendapi.StageLifecycle, resendapi.Fail), true, "failed_by_script"},
		"suppressed": {
			resendapi.On(resendapi.StageLifecycle, resendapi.Suppress), true,
			"OnAccountSuppressionList, The recipient is on the account's suppression list.",
		},
		"complained": {resendapi.On(resendapi.StageLifecycle, resendapi.Complain), false, ""},
	} {
		for lane, mailType := range map[string]contract.MailType{"ticket": contract.TicketConfirmation, "marketing": contract.Marketing} {
			t.Run(event+" "+lane, func(t *testing.T) {
				t.Parallel()
				b := newBench(t, c.how)
				b.set(key, delivery.Sent)
				b.all[key].Type = mailType
				b.send(key, "ann@x.test")
				b.eventually(func() bool {
					b.mu.Lock()
					defer b.mu.Unlock()
					return len(b.counted) == 1
				})
				require.Equal(t, []string{lane + " " + event}, b.counted)
				got := b.reports[key+" "+event]
				require.Equal(t, c.reason, got.Reason)
				require.NotEmpty(t, got.ProviderID)
				require.Equal(t, c.returned, b.bounced[key] == 1)
				require.Equal(t, delivery.Sent, b.status(key), "it was sent, and is not sent again")
			})
		}
	}
}

// What the provider did not sign, or signed long ago, changes nothing; it is
// sent again by itself.
func TestForgedAndStaleRequestsAreRefused(t *testing.T) {
	t.Parallel()
	for _, how := range []resendapi.Builder{
		resendapi.On(resendapi.StageWebhook, resendapi.BadSignature),
		resendapi.On(resendapi.StageWebhook, resendapi.StaleTimestamp).For(Tolerance + 2*time.Second),
	} {
		b := newBench(t, how.First(1))
		b.set(key, delivery.Unknown)
		b.send(key, "ann@x.test")
		b.eventually(func() bool { return b.count(Refused) == 2 })
		require.Equal(t, delivery.Unknown, b.status(key))
		b.api.Advance(5 * time.Second)
		b.eventually(func() bool { return b.count(Found) == 1 && b.count(Known) == 1 })
	}
}

// An event that comes before the outcome of its try is known is put off, and so
// is one that cannot be written down.
func TestTheProviderRepeatsWhatComesTooEarly(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		before func(b *bench)
		want   Result
	}{
		"being sent":           {func(b *bench) { b.set(key, delivery.Sending) }, NotYet},
		"waits for a worker":   {func(b *bench) { b.set(key, delivery.Failed) }, NotYet},
		"the database is away": {func(b *bench) { b.set(key, delivery.Unknown); b.away = true }, Failing},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, resendapi.On(resendapi.StageLifecycle, resendapi.Bounce))
			c.before(b)
			b.send(key, "ann@x.test")
			b.eventually(func() bool { return b.count(c.want) == 2 })
			require.Empty(t, b.bounced)
			b.mu.Lock()
			b.away = false
			b.mu.Unlock()
			b.set(key, delivery.Unknown)
			b.api.Advance(5 * time.Second)
			b.eventually(func() bool { return b.count(Bounced) == 1 && b.status(key) == delivery.Sent })
		})
	}
}

func TestOtherMailsAndEventsAreIgnored(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.send("no-such-row", "ann@x.test")
	b.call("/emails", `{"from":"a@shop.test","to":["bob@x.test"],"subject":"s","text":"t"}`)
	b.eventually(func() bool { return b.count(Ignored) == 4 })
	b.set(key, delivery.Cancelled)
	b.send(key, "ann@x.test")
	b.eventually(func() bool { return b.count(Against) == 2 })
	require.Equal(t, delivery.Cancelled, b.status(key))
}

func TestVerify(t *testing.T) {
	t.Parallel()
	// The example of Svix's own documentation.
	const secret, id, at, body = "whsec_plJ3nmyCDGBKInavdOK15jsl", "msg_loFOjxBNrRLzqYUf", "1731705121", `{"event_type":"ping","data":{"success":true}}`
	const signature = "v1,rAvfW3dJ/X/qxhsaXPOyyCGmRKsaKWcsNccKXlIktD0="
	signed := time.Unix(1731705121, 0)
	for name, c := range map[string]struct {
		id, at, signature, body string
		now                     time.Time
		good                    bool
	}{
		"as documented":         {id, at, signature, body, signed, true},
		"at the tolerance":      {id, at, signature, body, signed.Add(Tolerance), true},
		"one second too old":    {id, at, signature, body, signed.Add(Tolerance + time.Second), false},
		"from the future":       {id, at, signature, body, signed.Add(-Tolerance - time.Second), false},
		"two signatures":        {id, at, "v1,AAAA v2,x " + signature, body, signed, true},
		"another version":       {id, at, "v2" + signature[2:], body, signed, false},
		"another body":          {id, at, signature, body + " ", signed, false},
		"another id":            {"msg_x", at, signature, body, signed, false},
		"another time":          {id, strconv.Itoa(1731705122), signature, body, signed, false},
		"no signature":          {id, at, "", body, signed, false},
		"an empty one":          {id, at, "v1,", body, signed, false},
		"a time that is none":   {id, "now", signature, body, signed, false},
		"no id":                 {"", at, signature, body, signed, false},
		"half of the signature": {id, at, signature[:20], body, signed, false},
	} {
		h, err := New(Config{Secret: secret, Now: func() time.Time { return c.now }})
		require.NoError(t, err)
		head := http.Header{}
		head.Set("svix-id", c.id)
		head.Set("svix-timestamp", c.at)
		head.Set("svix-signature", c.signature)
		err = h.verify(head, []byte(c.body))
		require.Equal(t, c.good, err == nil, "%s: %v", name, err)
	}
	for _, bad := range []string{"", "plJ3nmyCDGBKInavdOK15jsl", "whsec_!", "whsec_Zm9yZ2Vk"} {
		_, err := New(Config{Secret: bad})
		require.Error(t, err)
		if bad != "" {
			require.NotContains(t, err.Error(), bad)
		}
	}
}
