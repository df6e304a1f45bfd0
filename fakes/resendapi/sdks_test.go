//go:build sdks

package resendapi

import (
	"bufio"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// sdk is a program around one of the official SDKs; sdks/run.sh builds them.
type sdk struct {
	t    *testing.T
	name string
	base string
	in   io.WriteCloser
	out  *bufio.Scanner
}

type sdkCall struct {
	Base       string `json:"base"`
	APIKey     string `json:"api_key"`
	Call       string `json:"call"`
	ID         string `json:"id,omitempty"`
	Key        string `json:"key,omitempty"`
	Validation string `json:"validation,omitempty"`
	Args       any    `json:"args"`
}

type sdkResult struct {
	Data  map[string]any
	Error *struct {
		Name       string
		Message    string
		StatusCode *int
		RateLimit  bool   `json:"rate_limit"`
		RetryAfter string `json:"retry_after"`
		Limit      string
	}
}

func startSDK(t *testing.T, base, name string, command ...string) *sdk {
	t.Helper()
	cmd := exec.Command(command[0], command[1:]...)
	// Standard error is left alone: the SDK for Node prints each refusal.
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		require.NoError(t, in.Close())
		require.NoError(t, cmd.Wait())
	})
	return &sdk{t, name, base, in, bufio.NewScanner(out)}
}

func (k *sdk) call(c sdkCall) sdkResult {
	k.t.Helper()
	c.Base = k.base
	if c.APIKey == "" {
		c.APIKey = "re_full"
	}
	if c.Args == nil {
		c.Args = map[string]any{}
	}
	b, err := json.Marshal(c)
	require.NoError(k.t, err)
	_, err = k.in.Write(append(b, '\n'))
	require.NoError(k.t, err)
	require.True(k.t, k.out.Scan(), "%s ended: %v", k.name, k.out.Err())
	var r sdkResult
	require.NoError(k.t, json.Unmarshal(k.out.Bytes(), &r), k.out.Text())
	return r
}

// ok makes a call that must succeed.
func (k *sdk) ok(c sdkCall) map[string]any {
	k.t.Helper()
	r := k.call(c)
	require.Nil(k.t, r.Error, "%s: %+v", c.Call, r.Error)
	return r.Data
}

// fails makes a call that must fail with an error of the table. The SDK for Go
// keeps of it only the message.
func (k *sdk) fails(c sdkCall, status int, name, message string) sdkResult {
	k.t.Helper()
	r := k.call(c)
	require.NotNil(k.t, r.Error, c.Call)
	require.Contains(k.t, r.Error.Message, message)
	if k.name == "node" {
		require.Equal(k.t, name, r.Error.Name)
		require.NotNil(k.t, r.Error.StatusCode)
		require.Equal(k.t, status, *r.Error.StatusCode)
		require.Equal(k.t, message, r.Error.Message)
	} else {
		require.Equal(k.t, status == 429, r.Error.RateLimit)
	}
	return r
}

type object = map[string]any

func sdkMail(to string) object {
	return object{
		"from": "Shop <shop@shop.test>", "to": []string{to}, "cc": []string{"cc@x.test"}, "reply_to": "help@shop.test",
		"subject": "Your ticket", "html": "<p>Hi & welcome</p>", "text": "Hi",
		"headers": object{"X-A": "b"}, "tags": []object{{"name": "kind", "value": "ticket"}},
	}
}

func TestSDKs(t *testing.T) {
	for name, command := range map[string][]string{"go": {os.Getenv("SDK_GO")}, "node": {"node", os.Getenv("SDK_NODE")}} {
		t.Run(name, func(t *testing.T) {
			require.NotEmpty(t, command[len(command)-1], "run sdks/run.sh")
			c := start(t, Options{Seed: 1, APIKeys: map[string]Access{"re_full": FullAccess, "re_send": SendingAccess}})
			k := startSDK(t, c.srv.URL, name, command...)
			sdkSends(t, c, k)
			sdkSchedules(t, k)
			sdkErrors(t, c, k)
			sdkFaults(t, c, k)
			sdkWebhooks(t, c, k)
		})
	}
}

func sdkSends(t *testing.T, c *client, k *sdk) {
	first := k.ok(sdkCall{Call: "emails.send", Key: "ticket:1", Args: sdkMail("ann@x.test")})
	id, _ := first["id"].(string)
	require.NotEmpty(t, id)
	require.Equal(t, first, k.ok(sdkCall{Call: "emails.send", Key: "ticket:1", Args: sdkMail("ann@x.test")}))
	require.Equal(t, "once", c.srv.Verdict("ticket:1").Verdict)
	e := k.ok(sdkCall{Call: "emails.get", ID: id})
	require.Equal(t, "email", e["object"])
	require.Equal(t, id, e["id"])
	require.Equal(t, []any{"ann@x.test"}, e["to"])
	require.Equal(t, []any{"cc@x.test"}, e["cc"])
	require.Equal(t, []any{"help@shop.test"}, e["reply_to"])
	require.Equal(t, "<p>Hi & welcome</p>", e["html"])
	require.Equal(t, "delivered", e["last_event"])
	require.Contains(t, e["message_id"], id)
	second := k.ok(sdkCall{Call: "emails.send", Key: "ticket:2", Args: sdkMail("bob@x.test")})
	list := k.ok(sdkCall{Call: "emails.list", Args: object{"limit": 1}})
	require.Equal(t, true, list["has_more"])
	data, _ := list["data"].([]any)
	require.Equal(t, second["id"], data[0].(object)["id"])
	list = k.ok(sdkCall{Call: "emails.list", Args: object{"limit": 1, "after": second["id"]}})
	require.Equal(t, id, list["data"].([]any)[0].(object)["id"])

	mails := []object{sdkMail("b1@x.test"), sdkMail("b2@x.test")}
	batch := k.ok(sdkCall{Call: "batch.send", Key: "batch:1", Args: mails})
	again := k.ok(sdkCall{Call: "batch.send", Key: "batch:1", Args: mails})
	require.Equal(t, batch, again)
	mails[1]["to"] = []string{"nobody"}
	part := k.ok(sdkCall{Call: "batch.send", Key: "batch:2", Validation: "permissive", Args: mails})
	text, err := json.Marshal(part)
	require.NoError(t, err)
	require.Contains(t, string(text), `"errors":[{"index":1,"message":"Invalid `)
	k.fails(sdkCall{Call: "batch.send", Key: "batch:3", Args: mails}, 422, "validation_error",
		"emails[1]: Invalid `to` field. The email address needs to follow the `email@example.com` or `Name <email@example.com>` format.")
	with := sdkMail("att@x.test")
	with["attachments"] = []object{{"filename": "a.txt", "content": "aGVsbG8="}}
	k.ok(sdkCall{Call: "emails.send", Args: with})
}

func sdkSchedules(t *testing.T, k *sdk) {
	m := sdkMail("later@x.test")
	m["scheduled_at"] = time.Now().Add(time.Hour).UTC().Format(time.RFC3339)
	id, _ := k.ok(sdkCall{Call: "emails.send", Args: m})["id"].(string)
	changed := object{"object": "email", "id": id}
	require.Equal(t, changed, k.ok(sdkCall{Call: "emails.update", ID: id, Args: object{"scheduled_at": "in 2 days"}}))
	require.Equal(t, "scheduled", k.ok(sdkCall{Call: "emails.get", ID: id})["last_event"])
	require.Equal(t, changed, k.ok(sdkCall{Call: "emails.cancel", ID: id}))
	require.Equal(t, "canceled", k.ok(sdkCall{Call: "emails.get", ID: id})["last_event"])
	k.fails(sdkCall{Call: "emails.cancel", ID: id}, 422, "validation_error", "Cannot cancel an email that is not scheduled.")
}

func sdkErrors(t *testing.T, c *client, k *sdk) {
	send := func(key string) sdkCall { return sdkCall{Call: "emails.send", Key: key, Args: sdkMail("err@x.test")} }
	bad := send("")
	bad.APIKey = "re_wrong"
	k.fails(bad, 401, "validation_error", "API key is invalid")
	k.fails(sdkCall{Call: "emails.get", APIKey: "re_send", ID: c.srv.ids.uuid(0)}, 401, "restricted_api_key", "This API key is restricted to only send emails.")
	k.fails(send(strings.Repeat("k", 257)), 400, "invalid_idempotency_key", "Idempotency keys, if present, must have between 1 and 256 characters.")
	k.fails(sdkCall{Call: "emails.get", ID: "7c9e6679-7425-40de-944b-e07fc1f90ae7"}, 404, "not_found", "Email not found")
	k.ok(send("mismatch"))
	other := send("mismatch")
	other.Args = sdkMail("other@x.test")
	k.fails(other, 409, "invalid_idempotent_request", must(409, "invalid_idempotent_request").Message)
	// Every line of the table, as the SDK decodes it.
	for _, e := range Errors() {
		c.srv.ClearRules()
		_, err := c.srv.AddRule(On(StageRequest, Reply).Code(e.Status).Error(e.Name).For(3 * time.Second).Rule())
		require.NoError(t, err)
		want, _ := errorNamed(e.Status, e.Name)
		r := k.fails(send("table"), e.Status, e.Name, want.Message)
		if e.Status == 429 && k.name == "go" {
			require.Equal(t, "3", r.Error.RetryAfter)
		}
	}
	c.srv.ClearRules()
}

// sdkFaults: what each SDK makes of an answer that went wrong, and that the
// same key again ends with one mail.
func sdkFaults(t *testing.T, c *client, k *sdk) {
	for i, f := range []struct {
		rule Builder
		fine map[string]bool // SDKs that report success
	}{
		{On(StageHeaders, Drop), nil},
		{On(StageStored, Drop), nil},
		{On(StageStored, Reset), nil},
		{On(StageStored, Cut), nil},
		{On(StageStored, Garbage), nil},
		{On(StageStored, Reply).Code(502), nil},
		{On(StageStored, Reply).Code(500), nil},
		{On(StageStored, Empty), nil},
		{On(StageStored, Truncate), nil},
		{On(StageStored, NoID), map[string]bool{"go": true, "node": true}},
		{On(StageStored, Reply).Code(202), map[string]bool{"go": true, "node": true}},
		{On(StageStored, SlowHeaders).For(time.Microsecond), map[string]bool{"go": true, "node": true}},
		{On(StageStored, Drip).For(time.Microsecond), map[string]bool{"go": true, "node": true}},
	} {
		rule := f.rule.First(1).Rule()
		name := rule.Action.Name()
		_, err := c.srv.AddRule(rule)
		require.NoError(t, err)
		m := sdkMail("fault@x.test")
		m["subject"] = name
		delete(m, "cc") // one row a request
		call := sdkCall{Call: "emails.send", Key: "fault:" + name, Args: m}
		r := k.call(call)
		t.Logf("%-28s %s", name, outcomeOf(r))
		require.Equal(t, f.fine[k.name], r.Error == nil, "%d %s: %+v", i, name, r)
		c.srv.ClearRules()
		k.ok(call)
		v := c.srv.Verdict(call.Key)
		require.Equal(t, "once", v.Verdict, name)
		require.Equal(t, 2, v.Attempts, "the SDKs do not retry by themselves")
	}
}

func outcomeOf(r sdkResult) string {
	if r.Error == nil {
		return "success"
	}
	return "error: " + r.Error.Message
}

func sdkWebhooks(t *testing.T, c *client, k *sdk) {
	e := takeWebhooks(t)
	w := k.ok(sdkCall{Call: "webhooks.create", Args: object{"endpoint": e.URL, "events": []string{"email.sent"}}})
	id, _ := w["id"].(string)
	secret, _ := w["signing_secret"].(string)
	require.Equal(t, "webhook", w["object"])
	got := k.ok(sdkCall{Call: "webhooks.get", ID: id})
	require.Equal(t, "enabled", got["status"])
	require.Equal(t, secret, got["signing_secret"])
	require.Equal(t, []any{"email.sent"}, got["events"])
	list := k.ok(sdkCall{Call: "webhooks.list", Args: object{"limit": 10}})
	require.Len(t, list["data"], 1)

	verify := func(x received) sdkCall {
		return sdkCall{Call: "webhooks.verify", Args: object{"payload": x.body, "id": x.id, "timestamp": x.at, "signature": x.signature, "secret": secret}}
	}
	k.ok(sdkCall{Call: "emails.send", Key: "hook", Args: sdkMail("hook@x.test")})
	k.ok(verify(e.next(t)))
	for _, kind := range []Builder{On(StageWebhook, BadSignature), On(StageWebhook, StaleTimestamp)} {
		_, err := c.srv.AddRule(kind.Times(1).Rule())
		require.NoError(t, err)
		k.ok(sdkCall{Call: "emails.send", Args: sdkMail("hook@x.test")})
		require.NotNil(t, k.call(verify(e.next(t))).Error, "the SDK must refuse %s", kind.Rule().Action.Kind)
		c.srv.ClearRules()
	}
	require.Equal(t, object{"object": "webhook", "id": id}, k.ok(sdkCall{Call: "webhooks.update", ID: id, Args: object{"status": "disabled"}}))
	require.Equal(t, object{"object": "webhook", "id": id, "deleted": true}, k.ok(sdkCall{Call: "webhooks.remove", ID: id}))
	k.fails(sdkCall{Call: "webhooks.get", ID: id}, 404, "not_found", "Webhook not found")
}
