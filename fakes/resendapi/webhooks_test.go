package resendapi

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// received is one webhook as its endpoint got it.
type received struct {
	id, at, signature string
	body              string
	typ               string
	data              eventData
}

// endpoint is a server that takes webhooks.
type endpoints struct {
	*httptest.Server
	got    chan received
	answer chan int // statuses to answer, then 200
}

func takeWebhooks(t *testing.T) *endpoints {
	e := &endpoints{got: make(chan received, 1000), answer: make(chan int, 100)}
	e.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		x := received{id: r.Header.Get("svix-id"), at: r.Header.Get("svix-timestamp"), signature: r.Header.Get("svix-signature"), body: string(b)}
		var env event
		if json.Unmarshal(b, &env) == nil {
			x.typ, x.data = env.Type, env.Data
		}
		select {
		case status := <-e.answer:
			w.WriteHeader(status)
		default:
		}
		e.got <- x
	}))
	t.Cleanup(e.Close)
	return e
}

func (e *endpoints) next(t *testing.T) received {
	t.Helper()
	select {
	case x := <-e.got:
		return x
	case <-soon(t).Done():
		t.Fatal("no webhook came")
		return received{}
	}
}

// verify is the check that the SDKs make.
func verify(secret string, x received, now time.Time) error {
	at, err := strconv.ParseInt(x.at, 10, 64)
	if err != nil {
		return err
	}
	if d := now.Sub(time.Unix(at, 0)); d > 5*time.Minute || d < -5*time.Minute {
		return fmt.Errorf("timestamp is off by %s", d)
	}
	key, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(secret, "whsec_"))
	if err != nil {
		return err
	}
	h := hmac.New(sha256.New, key)
	fmt.Fprintf(h, "%s.%s.%s", x.id, x.at, x.body)
	for _, s := range strings.Fields(x.signature) {
		if s == "v1,"+base64.StdEncoding.EncodeToString(h.Sum(nil)) {
			return nil
		}
	}
	return fmt.Errorf("no signature fits")
}

func (c *client) subscribe(url string, events ...string) (id, secret string) {
	c.t.Helper()
	list, err := json.Marshal(events)
	require.NoError(c.t, err)
	var w struct {
		ID            string
		SigningSecret string `json:"signing_secret"`
	}
	r := c.ok(c.do("POST", "/webhooks", fmt.Sprintf(`{"endpoint":%q,"events":%s}`, url, list)))
	require.NoError(c.t, json.Unmarshal([]byte(r.body), &w))
	return w.ID, w.SigningSecret
}

var mailEvents = []string{
	"email.sent", "email.scheduled", "email.delivered", "email.delivery_delayed", "email.complained", "email.bounced",
	"email.failed", "email.suppressed",
}

func TestWebhookIsSigned(t *testing.T) {
	e := takeWebhooks(t)
	c := start(t, Options{})
	_, secret := c.subscribe(e.URL, mailEvents...)
	id := c.ok(c.do("POST", "/emails", strings.Replace(mailTo("ann@x.test"), `"subject"`, `"tags":[{"name":"kind","value":"ticket"}],"subject"`, 1), "Idempotency-Key", "k")).id(t)
	for _, typ := range []string{"email.sent", "email.delivered"} {
		x := e.next(t)
		require.Equal(t, typ, x.typ)
		require.NoError(t, verify(secret, x, time.Now()))
		require.Equal(t, id, x.data.EmailID)
		require.Equal(t, "<"+id+"@resend.fake>", x.data.MessageID)
		require.Equal(t, addresses{"ann@x.test"}, x.data.To)
		require.Equal(t, map[string]string{"kind": "ticket"}, x.data.Tags)
		require.True(t, strings.HasPrefix(x.id, "msg_"))
	}
	c.ok(c.send("k2", "ann@x.test"))
	c.ok(c.send("k2", "ann@x.test")) // a replay sends nothing, so nothing happens
	e.next(t)
	e.next(t)
	require.Eventually(t, func() bool { return len(c.srv.Deliveries()) == 4 }, 5*time.Second, time.Millisecond)
	require.Empty(t, e.got)
}

// TestLifecycles by script and by test address: events, and what the mail says
// of itself.
func TestLifecycles(t *testing.T) {
	for _, x := range []struct {
		name   string
		rules  []Builder
		to     string
		events string
		last   string
	}{
		{"plain", nil, "ann@x.test", "sent delivered", "delivered"},
		{"delivered@", nil, "delivered+a@resend.dev", "sent delivered", "delivered"},
		{"bounced@", nil, "bounced@resend.dev", "sent bounced", "bounced"},
		{"complained@", nil, "complained+x@resend.dev", "sent delivered complained", "complained"},
		{"suppressed@", nil, "suppressed@resend.dev", "suppressed", "suppressed"},
		{"bounce", []Builder{On(StageLifecycle, Bounce).To("ann@*").Error("Transient")}, "ann@x.test", "sent bounced", "bounced"},
		{"complain", []Builder{On(StageLifecycle, Complain)}, "ann@x.test", "sent delivered complained", "complained"},
		{"suppress", []Builder{On(StageLifecycle, Suppress)}, "ann@x.test", "suppressed", "suppressed"},
		{"fail", []Builder{On(StageLifecycle, Fail)}, "ann@x.test", "sent failed", "failed"},
		{"defer", []Builder{On(StageLifecycle, Defer).For(time.Minute)}, "ann@x.test", "sent delivery_delayed delivered", "delivered"},
		{"deliver, later", []Builder{On(StageLifecycle, Deliver).For(time.Minute)}, "bounced@resend.dev", "sent delivered", "delivered"},
	} {
		t.Run(x.name, func(t *testing.T) {
			e := takeWebhooks(t)
			c := start(t, rules(x.rules...))
			c.subscribe(e.URL, mailEvents...)
			id := c.ok(c.send("k", x.to)).id(t)
			for i, want := range strings.Fields(x.events) {
				if i == 1 {
					c.srv.Advance(2 * time.Minute)
				}
				got := e.next(t)
				require.Equal(t, "email."+want, got.typ)
				if want == "bounced" {
					require.NotEmpty(t, got.data.Bounce.Type)
					require.Equal(t, x.name == "bounce", got.data.Bounce.Type == "Transient")
				}
			}
			var m Email
			c.get("/emails/"+id, &m)
			require.Equal(t, x.last, m.LastEvent)
		})
	}
}

// TestWebhookRetries walks through the documented schedule on the moved clock:
// the same svix-id each time, a new timestamp, and an end.
func TestWebhookRetries(t *testing.T) {
	e := takeWebhooks(t)
	c := start(t, Options{})
	_, secret := c.subscribe(e.URL, "email.sent")
	for range 8 {
		e.answer <- 503
	}
	c.ok(c.send("k", "ann@x.test"))
	first := e.next(t)
	logged := func(n int) {
		t.Helper()
		require.Eventually(t, func() bool { return len(c.srv.Deliveries()) == n }, 5*time.Second, time.Millisecond)
	}
	for i, wait := range []time.Duration{5 * time.Second, 5 * time.Minute, 30 * time.Minute, 2 * time.Hour, 5 * time.Hour, 10 * time.Hour, 10 * time.Hour} {
		logged(i + 1)
		d := c.srv.Deliveries()[i]
		require.Equal(t, 503, d.Status)
		require.Equal(t, i+1, d.Attempt)
		require.Equal(t, "k", d.Key)
		require.WithinDuration(t, d.At.Add(wait), *d.Next, time.Second)
		c.srv.Advance(wait - 2*time.Second)
		require.Empty(t, e.got, "not before its time")
		c.srv.Advance(2 * time.Second)
		again := e.next(t)
		require.Equal(t, first.id, again.id)
		require.Equal(t, first.body, again.body)
		require.NoError(t, verify(secret, again, c.srv.wall()))
	}
	logged(8)
	require.Nil(t, c.srv.Deliveries()[7].Next, "given up")
	c.srv.Advance(100 * time.Hour)
	c.ok(c.send("k2", "ann@x.test"))
	require.NotEqual(t, first.id, e.next(t).id)
}

func TestWebhookFaults(t *testing.T) {
	send := func(t *testing.T, b Builder) (*client, *endpoints, string) {
		e := takeWebhooks(t)
		c := start(t, rules(b))
		_, secret := c.subscribe(e.URL, mailEvents...)
		c.ok(c.send("k", "ann@x.test"))
		return c, e, secret
	}
	t.Run("duplicate", func(t *testing.T) {
		_, e, _ := send(t, On(StageWebhook, Duplicate).Times(1))
		a, b := e.next(t), e.next(t)
		require.Equal(t, a.id, b.id)
		require.Equal(t, "email.delivered", e.next(t).typ)
	})
	t.Run("reorder", func(t *testing.T) {
		_, e, _ := send(t, On(StageWebhook, Reorder).Header(":type", "email.sent").Times(1))
		require.Equal(t, "email.delivered", e.next(t).typ)
		require.Equal(t, "email.sent", e.next(t).typ)
	})
	t.Run("reorder without another", func(t *testing.T) {
		c, e, _ := send(t, On(StageWebhook, Reorder).Header(":type", "email.delivered").Times(1))
		require.Equal(t, "email.sent", e.next(t).typ)
		require.Eventually(t, func() bool { return c.srv.Rules()[0].Struck == 1 }, 5*time.Second, time.Millisecond)
		c.srv.Advance(time.Minute)
		require.Equal(t, "email.delivered", e.next(t).typ)
	})
	t.Run("delay", func(t *testing.T) {
		c, e, _ := send(t, On(StageWebhook, Delay).For(time.Hour).Header(":type", "email.sent").Times(1))
		require.Equal(t, "email.delivered", e.next(t).typ)
		c.srv.Advance(time.Hour)
		require.Equal(t, "email.sent", e.next(t).typ)
	})
	t.Run("drop", func(t *testing.T) {
		c, e, _ := send(t, On(StageWebhook, Drop).Times(1))
		require.Equal(t, "email.delivered", e.next(t).typ)
		require.Equal(t, "webhook:drop", c.srv.Deliveries()[0].Fault)
		c.srv.Advance(48 * time.Hour)
		require.Empty(t, e.got, "lost for good")
	})
	t.Run("bad signature", func(t *testing.T) {
		_, e, secret := send(t, On(StageWebhook, BadSignature).Times(1))
		require.Error(t, verify(secret, e.next(t), time.Now()))
		require.NoError(t, verify(secret, e.next(t), time.Now()))
	})
	t.Run("stale timestamp", func(t *testing.T) {
		_, e, secret := send(t, On(StageWebhook, StaleTimestamp).Times(1))
		x := e.next(t)
		require.ErrorContains(t, verify(secret, x, time.Now()), "off by")
		require.NoError(t, verify(secret, x, time.Now().Add(-10*time.Minute)), "it is signed for its own time")
		require.NoError(t, verify(secret, e.next(t), time.Now()))
	})
}

func TestWebhooksOfScheduledMails(t *testing.T) {
	e := takeWebhooks(t)
	c := start(t, Options{})
	c.subscribe(e.URL, mailEvents...)
	later := func(at string) string {
		return c.ok(c.do("POST", "/emails", strings.Replace(mailTo("a@x.test"), `"subject"`, `"scheduled_at":"`+at+`","subject"`, 1))).id(t)
	}
	moved, canceled := later("in 1 day"), later("in 1 hour")
	require.Equal(t, "email.scheduled", e.next(t).typ)
	require.Equal(t, "email.scheduled", e.next(t).typ)
	c.ok(c.do("PATCH", "/emails/"+moved, `{"scheduled_at":"in 3 days"}`))
	c.ok(c.do("POST", "/emails/"+canceled+"/cancel", ""))
	c.srv.Advance(25 * time.Hour)
	c.ok(c.send("k", "probe@x.test"))
	require.Equal(t, addresses{"probe@x.test"}, e.next(t).data.To, "neither the moved nor the cancelled one")
	e.next(t)
	c.srv.Advance(48 * time.Hour)
	require.Equal(t, moved, e.next(t).data.EmailID)
	require.Equal(t, "email.delivered", e.next(t).typ)
}

func TestWebhooksStayOnThisMachine(t *testing.T) {
	c := start(t, Options{})
	c.subscribe("http://192.0.2.1/hook", "email.sent") // TEST-NET-1, nobody's
	c.ok(c.send("k", "ann@x.test"))
	require.Eventually(t, func() bool { return len(c.srv.Deliveries()) == 1 }, 5*time.Second, time.Millisecond)
	d := c.srv.Deliveries()[0]
	require.Contains(t, d.Error, "not a loopback")
	require.Nil(t, d.Next)
}

func TestWebhookCRUD(t *testing.T) {
	e := takeWebhooks(t)
	c := start(t, Options{})
	id, secret := c.subscribe(e.URL, "email.sent")
	require.True(t, strings.HasPrefix(secret, "whsec_"))
	other, otherSecret := c.subscribe(e.URL, "email.bounced")
	require.NotEqual(t, secret, otherSecret)
	var l page[shown]
	c.get("/webhooks?limit=1", &l)
	require.True(t, l.HasMore)
	require.Equal(t, other, l.Data[0].ID)
	c.get("/webhooks?after="+other, &l)
	require.Equal(t, id, l.Data[0].ID)
	var got shown
	c.get("/webhooks/"+id, &got)
	require.Equal(t, secret, got.SigningSecret)
	c.ok(c.do("PATCH", "/webhooks/"+id, `{"status":"disabled"}`))
	c.ok(c.send("", "a@x.test"))
	c.ok(c.do("PATCH", "/webhooks/"+id, `{"status":"enabled","events":["email.delivered"]}`))
	c.ok(c.send("", "b@x.test"))
	x := e.next(t)
	require.Equal(t, "email.delivered", x.typ)
	require.Equal(t, addresses{"b@x.test"}, x.data.To)
	c.ok(c.do("DELETE", "/webhooks/"+id, ""))
	require.Equal(t, 404, c.do("GET", "/webhooks/"+id, "").status)
	for _, bad := range []string{
		`{}`, `{"endpoint":"x","events":["email.sent"]}`, `{"endpoint":"ftp://x","events":["email.sent"]}`,
		`{"endpoint":"http://x","events":[]}`, `{"endpoint":"http://x","events":["email.read"]}`,
	} {
		require.Equal(t, 422, c.do("POST", "/webhooks", bad).status, bad)
	}
	require.Equal(t, 400, c.do("POST", "/webhooks", `{`).status)
	require.Equal(t, 422, c.do("PATCH", "/webhooks/"+other, `{"status":"off"}`).status)
	require.Equal(t, 413, c.do("POST", "/webhooks", `{"endpoint":"`+strings.Repeat("x", 2<<20)+`"}`).status)
}
