package resendapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	// net/http lingers half a second after it refused a body, whatever closes.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("net/http.(*conn).closeWriteAndWait"))
}

// client speaks to a fake over connections of its own.
type client struct {
	t    testing.TB
	srv  *Server
	http *http.Client
	key  string // API key
}

func start(t testing.TB, opt Options) *client {
	t.Helper()
	srv, err := Start(opt)
	require.NoError(t, err)
	tr := &http.Transport{MaxIdleConnsPerHost: 100, DisableCompression: true}
	t.Cleanup(func() {
		tr.CloseIdleConnections()
		require.NoError(t, srv.Close())
	})
	return &client{t, srv, &http.Client{Transport: tr, Timeout: 20 * time.Second}, "re_test"}
}

func rules(b ...Builder) Options {
	opt := Options{Seed: 1}
	for _, r := range b {
		opt.Rules = append(opt.Rules, r.Rule())
	}
	return opt
}

// response is what the client got.
type response struct {
	status int
	body   string
	header http.Header
	err    error
}

func (r response) id(t testing.TB) string {
	t.Helper()
	var v struct{ ID string }
	require.NoError(t, json.Unmarshal([]byte(r.body), &v), r.body)
	require.NotEmpty(t, v.ID, r.body)
	return v.ID
}

// do makes one request; headers are pairs.
func (c *client) do(method, path, body string, headers ...string) response {
	c.t.Helper()
	req, err := http.NewRequest(method, c.srv.URL+path, strings.NewReader(body))
	require.NoError(c.t, err)
	req.GetBody = nil // no replay by the transport
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "test/1")
	if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	for i := 0; i < len(headers); i += 2 {
		if headers[i+1] == "-" {
			req.Header.Del(headers[i])
			if headers[i] == "User-Agent" {
				req.Header["User-Agent"] = []string{""}
			}
			continue
		}
		req.Header[http.CanonicalHeaderKey(headers[i])] = []string{headers[i+1]}
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return response{err: err}
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return response{resp.StatusCode, string(b), resp.Header, err}
}

func (c *client) send(key, to string, more ...string) response {
	c.t.Helper()
	headers := append([]string{}, more...)
	if key != "" {
		headers = append(headers, "Idempotency-Key", key)
	}
	return c.do("POST", "/emails", mailTo(to), headers...)
}

func mailTo(to string) string {
	return fmt.Sprintf(`{"from":"Shop <shop@shop.test>","to":[%q],"subject":"Your ticket","text":"Hello %s"}`, to, to)
}

func (c *client) ok(r response) response {
	c.t.Helper()
	require.NoError(c.t, r.err)
	require.Equal(c.t, 200, r.status, r.body)
	return r
}

func (c *client) get(path string, v any) {
	c.t.Helper()
	require.NoError(c.t, json.Unmarshal([]byte(c.ok(c.do("GET", path, "")).body), v))
}

// settled returns once no request runs: a client may read an answer a moment
// before its row is closed.
func (c *client) settled() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for {
		changed, _ := c.srv.ledger.Changed()
		if len(c.srv.ledger.Running()) == 0 {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return errors.New("requests still run")
		}
	}
}

// last returns the newest row.
func (c *client) last() Attempt {
	c.t.Helper()
	require.NoError(c.t, c.settled())
	rows := c.srv.Ledger()
	require.NotEmpty(c.t, rows)
	return rows[len(rows)-1]
}

func soon(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestSendAndRead(t *testing.T) {
	c := start(t, Options{})
	body := `{"from":"Shop <shop@shop.test>","to":"ann@x.test","cc":["bob@x.test"],"bcc":"cy@x.test","reply_to":["help@shop.test"],
		"subject":"Your ticket","html":"<p>Hi</p>","text":"Hi","headers":{"X-A":"b"},"tags":[{"name":"kind","value":"ticket"}]}`
	r := c.ok(c.do("POST", "/emails", body, "Idempotency-Key", "ticket:1"))
	require.Equal(t, "application/json; charset=utf-8", r.header.Get("Content-Type"))
	id := r.id(t)
	require.Equal(t, `{"id":"`+id+`"}`, r.body)

	var e Email
	c.get("/emails/"+id, &e)
	require.Equal(t, "email", e.Object)
	require.Equal(t, id, e.ID)
	require.Equal(t, "<"+id+"@resend.fake>", e.MessageID)
	require.Equal(t, addresses{"ann@x.test"}, e.To)
	require.Equal(t, addresses{"bob@x.test"}, e.Cc)
	require.Equal(t, addresses{"cy@x.test"}, e.Bcc)
	require.Equal(t, addresses{"help@shop.test"}, e.ReplyTo)
	require.Equal(t, "Shop <shop@shop.test>", e.From)
	require.Equal(t, "<p>Hi</p>", *e.HTML)
	require.Equal(t, "delivered", e.LastEvent)
	_, err := time.Parse("2006-01-02 15:04:05.999999-07", e.CreatedAt)
	require.NoError(t, err)

	rows := c.srv.Ledger()
	require.Len(t, rows, 3)
	for i, to := range []string{"ann@x.test", "bob@x.test", "cy@x.test"} {
		a := rows[i]
		require.Equal(t, to, a.Recipient)
		require.Equal(t, "ticket:1", a.Key)
		require.Equal(t, "shop@shop.test", a.Sender)
		require.Equal(t, e.MessageID, a.MessageID)
		require.Equal(t, "replied", a.Stage)
		require.True(t, a.Stored && a.ReplyWritten && !a.Breach && !a.ClosedWithoutStoring)
		require.Equal(t, 200, a.Code)
		require.Less(t, a.From, a.To)
		require.LessOrEqual(t, a.DotAt, a.StoredAt)
	}
	require.Equal(t, "once", c.srv.Verdict("ticket:1").Verdict)
	raw, ok := c.srv.Mail(rows[0].ID)
	require.True(t, ok)
	require.Contains(t, string(raw), "Subject: Your ticket\r\n")
	require.Contains(t, string(raw), "X-A: b\r\n")
}

func TestListIsPaged(t *testing.T) {
	c := start(t, Options{})
	var ids []string // newest first
	for i := range 7 {
		ids = append([]string{c.ok(c.send("", fmt.Sprintf("r%d@x.test", i))).id(t)}, ids...)
	}
	type list struct {
		Object  string
		HasMore bool `json:"has_more"`
		Data    []Email
	}
	page := func(query string) (out []string, more bool) {
		var l list
		c.get("/emails"+query, &l)
		require.Equal(t, "list", l.Object)
		for _, e := range l.Data {
			out = append(out, e.ID)
		}
		return out, l.HasMore
	}
	got, more := page("")
	require.Equal(t, ids, got)
	require.False(t, more)
	got, more = page("?limit=3")
	require.Equal(t, ids[:3], got)
	require.True(t, more)
	got, more = page("?limit=3&after=" + ids[2])
	require.Equal(t, ids[3:6], got)
	require.True(t, more)
	got, more = page("?limit=3&after=" + ids[5])
	require.Equal(t, ids[6:], got)
	require.False(t, more)
	got, _ = page("?limit=2&before=" + ids[4])
	require.Equal(t, ids[2:4], got)
	for _, bad := range []string{"?limit=0", "?limit=101", "?limit=x", "?after=x", "?before=" + ids[0] + "&after=" + ids[1]} {
		require.Equal(t, 422, c.do("GET", "/emails"+bad, "").status, bad)
	}
}

func TestSchedulePatchCancel(t *testing.T) {
	c := start(t, Options{})
	event := func(id string) string {
		var e Email
		c.get("/emails/"+id, &e)
		return e.LastEvent
	}
	scheduled := func(at string) response {
		return c.do("POST", "/emails", strings.Replace(mailTo("a@x.test"), `"subject"`, fmt.Sprintf(`"scheduled_at":%q,"subject"`, at), 1))
	}
	a := c.ok(scheduled("in 3 days")).id(t)
	b := c.ok(scheduled(time.Now().Add(time.Hour).Format(time.RFC3339))).id(t)
	require.Equal(t, "scheduled", event(a))
	r := c.ok(c.do("POST", "/emails/"+b+"/cancel", ""))
	require.Equal(t, `{"object":"email","id":"`+b+`"}`, r.body)
	require.Equal(t, "canceled", event(b))
	require.Equal(t, 422, c.do("POST", "/emails/"+b+"/cancel", "").status)

	r = c.ok(c.do("PATCH", "/emails/"+a, `{"scheduled_at":"in 1 hour"}`))
	require.Equal(t, `{"object":"email","id":"`+a+`"}`, r.body)
	c.srv.Advance(2 * time.Hour)
	require.Equal(t, "delivered", event(a))
	require.Equal(t, "canceled", event(b))
	require.Equal(t, 422, c.do("PATCH", "/emails/"+a, `{"scheduled_at":"in 1 hour"}`).status)
	for _, bad := range []string{"in 31 days", "yesterday evening", "2001-01-01T00:00:00Z", "in 99999 weeks"} {
		require.Equal(t, 422, scheduled(bad).status, bad)
	}
	c.ok(scheduled("in 30 days"))
}

func TestBatch(t *testing.T) {
	c := start(t, Options{})
	bad := `{"from":"s@shop.test","to":["nobody"],"subject":"x","text":"x"}`
	r := c.ok(c.do("POST", "/emails/batch", "["+mailTo("a@x.test")+","+mailTo("b@x.test")+"]", "Idempotency-Key", "b1"))
	var out struct {
		Data   []struct{ ID string }
		Errors []struct {
			Index   int
			Message string
		}
	}
	require.NoError(t, json.Unmarshal([]byte(r.body), &out))
	require.Len(t, out.Data, 2)
	require.NotContains(t, r.body, "errors")
	require.Equal(t, "once", c.srv.Verdict("b1[0]").Verdict)
	require.Equal(t, "once", c.srv.Verdict("b1[1]").Verdict)
	again := c.ok(c.do("POST", "/emails/batch", "["+mailTo("a@x.test")+","+mailTo("b@x.test")+"]", "Idempotency-Key", "b1"))
	require.Equal(t, r.body, again.body)
	require.EqualValues(t, 2, c.srv.Totals().Stored)

	// Strict: all or nothing.
	r = c.do("POST", "/emails/batch", "["+mailTo("c@x.test")+","+bad+"]")
	require.Equal(t, 422, r.status)
	require.EqualValues(t, 2, c.srv.Totals().Stored)
	// Permissive: the good ones, and what is wrong with the rest.
	r = c.ok(c.do("POST", "/emails/batch", "["+mailTo("d@x.test")+","+bad+","+mailTo("e@x.test")+"]", "x-batch-validation", "permissive"))
	out.Data, out.Errors = nil, nil
	require.NoError(t, json.Unmarshal([]byte(r.body), &out))
	require.Len(t, out.Data, 2)
	require.Len(t, out.Errors, 1)
	require.Equal(t, 1, out.Errors[0].Index)
	require.Contains(t, out.Errors[0].Message, "Invalid `to` field")
	require.EqualValues(t, 4, c.srv.Totals().Stored)
	require.Zero(t, c.srv.Totals().Breaches, "a mail refused inside a permissive batch is no broken promise")

	require.Equal(t, 422, c.do("POST", "/emails/batch", "[]").status)
	many := "[" + strings.Repeat(mailTo("a@x.test")+",", 100) + mailTo("a@x.test") + "]"
	require.Equal(t, 422, c.do("POST", "/emails/batch", many).status)
	require.Equal(t, 422, c.do("POST", "/emails/batch", "["+mailTo("a@x.test")+"]", "x-batch-validation", "lax").status)
	with := strings.Replace(mailTo("a@x.test"), `"subject"`, `"scheduled_at":"in 1 day","subject"`, 1)
	require.Equal(t, 422, c.do("POST", "/emails/batch", "["+with+"]").status)
}

func TestOneLineStart(t *testing.T) {
	srv := NewServer(t, On(StageStored, Drop).First(1))
	resp, err := http.Get(srv.URL + "/_control/rules")
	require.NoError(t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.True(t, bytes.Contains(b, []byte(`"stored"`)), string(b))
	http.DefaultClient.CloseIdleConnections()
}

func TestIDs(t *testing.T) {
	d := ids{7}
	seen := map[string]bool{}
	for n := range int64(20_000) {
		id := d.uuid(n)
		require.False(t, seen[id])
		seen[id] = true
		back, ok := d.serial(id)
		require.True(t, ok)
		require.Equal(t, n, back)
	}
	require.Regexp(t, `^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`, d.uuid(1))
	_, ok := ids{8}.serial(d.uuid(3))
	require.False(t, ok, "another server's id")
	_, ok = d.serial("00000000-0000-4000-8000-000000000000")
	require.False(t, ok)
}
