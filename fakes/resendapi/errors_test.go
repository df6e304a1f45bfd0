package resendapi

import (
	"encoding/json"
	"fmt"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/fakes/ledger/tally"
)

// TestErrorTable asks for each error that the server gives by itself, the body
// compared byte by byte with what Resend publishes or was recorded from it.
func TestErrorTable(t *testing.T) {
	mail := mailTo("ann@x.test")
	with := func(field string) string { return strings.Replace(mail, `"subject"`, field+`,"subject"`, 1) }
	many := func(n int) string {
		list := make([]string, n)
		for i := range list {
			list[i] = fmt.Sprintf(`"r%d@x.test"`, i)
		}
		return strings.Replace(mail, `["ann@x.test"]`, "["+strings.Join(list, ",")+"]", 1)
	}
	keys := map[string]Access{
		"re_full": FullAccess, "re_send": SendingAccess, "re_off": Inactive, "re_bad": Suspended, "re_none": NoScopes,
	}
	const (
		unknown = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
		format  = "The email address needs to follow the `email@example.com` or `Name <email@example.com>` format."
	)
	for _, x := range []struct {
		name    string
		opt     Options
		method  string // POST /emails unless given
		path    string
		body    string // mail unless given
		headers []string
		status  int
		errName string
		message string
	}{
		{name: "key too long", headers: []string{"Idempotency-Key", strings.Repeat("k", 257)}, status: 400, errName: "invalid_idempotency_key", message: "Idempotency keys, if present, must have between 1 and 256 characters."},
		{name: "no API key", headers: []string{"Authorization", "-"}, status: 401, errName: "missing_api_key", message: "Missing API key in the authorization header."},
		{name: "API key not as bearer", headers: []string{"Authorization", "Basic cmU6"}, status: 401, errName: "missing_api_key", message: "Missing API key in the authorization header."},
		{name: "sending key reads", headers: []string{"Authorization", "Bearer re_send"}, method: "GET", path: "/emails", status: 401, errName: "restricted_api_key", message: "This API key is restricted to only send emails."},
		{name: "unknown key sends", headers: []string{"Authorization", "Bearer re_x"}, status: 401, errName: "validation_error", message: "API key is invalid"},
		{name: "unknown key reads", headers: []string{"Authorization", "Bearer re_x"}, method: "GET", path: "/emails", status: 400, errName: "validation_error", message: "API key is invalid"},
		{name: "inactive key", headers: []string{"Authorization", "Bearer re_off"}, status: 403, errName: "restricted_api_key", message: "API key is not active"},
		{name: "suspended key", headers: []string{"Authorization", "Bearer re_bad"}, status: 403, errName: "suspended_api_key", message: "This API key is suspended"},
		{name: "no scopes", headers: []string{"Authorization", "Bearer re_none"}, status: 403, errName: "invalid_permission", message: "Access token is missing required scopes."},
		{name: "domain not verified", opt: Options{Domains: []string{"other.test"}}, status: 403, errName: "validation_error", message: "The `shop.test` domain is not verified. Please, add and verify your domain."},
		{name: "unknown path", method: "GET", path: "/nothing", status: 404, errName: "not_found", message: "The requested endpoint does not exist."},
		{name: "unknown mail", method: "GET", path: "/emails/" + unknown, status: 404, errName: "not_found", message: "Email not found"},
		{name: "unknown webhook", method: "DELETE", path: "/webhooks/" + unknown, status: 404, errName: "not_found", message: "Webhook not found"},
		{name: "wrong method", method: "DELETE", path: "/emails", status: 405, errName: "method_not_allowed", message: "Method is not allowed for the requested path."},
		{name: "wrong method, below", method: "PUT", path: "/emails/" + unknown, status: 405, errName: "method_not_allowed", message: "Method is not allowed for the requested path."},
		{name: "attachment without content", body: with(`"attachments":[{"filename":"a.pdf"}]`), status: 422, errName: "invalid_attachment", message: "Attachment must have either a `content` or `path`."},
		{name: "not a UUID", method: "GET", path: "/emails/42", status: 422, errName: "invalid_parameter", message: "The `id` must be a valid UUID."},
		{name: "no from", body: `{"to":["a@x.test"],"subject":"x","text":"x"}`, status: 422, errName: "missing_required_field", message: "Missing `from` field."},
		{name: "no to", body: `{"from":"a@x.test","subject":"x","text":"x"}`, status: 422, errName: "missing_required_field", message: "Missing `to` field."},
		{name: "no subject", body: `{"from":"a@x.test","to":["a@x.test"],"text":"x"}`, status: 422, errName: "missing_required_field", message: "Missing `subject` field."},
		{name: "nothing to say", body: `{"from":"a@x.test","to":["a@x.test"],"subject":"x"}`, status: 422, errName: "missing_required_field", message: "Missing `html` or `text` field."},
		{name: "bad from", body: strings.Replace(mail, "shop@shop.test", "shop", 1), status: 422, errName: "validation_error", message: "Invalid `from` field. " + format},
		{name: "bad to", body: strings.Replace(mail, `["ann@x.test"]`, `"ann"`, 1), status: 422, errName: "validation_error", message: "Invalid `to` field. " + format},
		{name: "example.com", body: strings.Replace(mail, `["ann@x.test"]`, `"ann@example.com"`, 1), status: 422, errName: "validation_error", message: "Invalid `to` field. Please use our testing email address instead of domains like `example.com`."},
		{name: "51 recipients", body: many(51), status: 422, errName: "validation_error", message: "The email has 51 recipients, the limit is 50."},
		{name: "bad tag", body: with(`"tags":[{"name":"a b","value":"c"}]`), status: 422, errName: "validation_error", message: "Tags should only contain ASCII letters, numbers, underscores, or dashes, and at most 256 characters."},
		{name: "long tag", body: with(`"tags":[{"name":"a","value":"` + strings.Repeat("v", 257) + `"}]`), status: 422, errName: "validation_error", message: "Tags should only contain ASCII letters, numbers, underscores, or dashes, and at most 256 characters."},
		{name: "41 MB of attachments", body: with(`"attachments":[{"filename":"a","content":"` + strings.Repeat("A", 41<<20) + `"}]`), status: 422, errName: "validation_error", message: "The attachments exceed the limit of 40MB after Base64 encoding."},
		{name: "header injection", body: with(`"headers":{"X-A\r\nBcc":"z@x.test"}`), status: 422, errName: "validation_error", message: "Invalid `headers` field: \"X-A\\r\\nBcc\" is not a header."},
		{name: "more than 30 days", body: with(`"scheduled_at":"in 31 days"`), status: 422, errName: "validation_error", message: "Invalid `scheduled_at` field: it is more than 30 days in the future."},
		{name: "not JSON", body: `{"from":`, status: 400, errName: "validation_error", message: "The request body is not valid JSON: unexpected end of JSON input."},
		{name: "wrong type", body: `{"from":5}`, status: 422, errName: "validation_error", message: "Invalid `from` field: it must not be a number."},
		{name: "rate limit", opt: Options{RateLimit: 1}, status: 429, errName: "rate_limit_exceeded", message: must(429, "rate_limit_exceeded").Message},
		{name: "daily quota", opt: Options{DailyQuota: 1}, status: 429, errName: "daily_quota_exceeded", message: "You have exceeded your daily email sending quota."},
		{name: "monthly quota", opt: Options{MonthlyQuota: 1}, status: 429, errName: "monthly_quota_exceeded", message: "You have exceeded your monthly email sending quota."},
		{name: "no user agent", headers: []string{"User-Agent", "-"}, status: 403, errName: "validation_error", message: "error code: 1010"},
		{name: "only one's own address", opt: Options{TestingAddress: "me@x.test"}, body: strings.Replace(mail, "shop@shop.test", "onboarding@resend.dev", 1), status: 403, errName: "validation_error", message: "You can only send testing emails to your own email address (`me@x.test`). To send emails to other recipients, please verify a domain at resend.com/domains, and change the `from` address to an email using this domain."},
	} {
		t.Run(x.name, func(t *testing.T) {
			x.opt.APIKeys = keys
			c := start(t, x.opt)
			c.key = "re_full"
			if x.opt.RateLimit+x.opt.DailyQuota+x.opt.MonthlyQuota > 0 {
				c.ok(c.send("", "first@x.test"))
			}
			before := c.srv.Totals().Stored
			method, path, body := x.method, x.path, x.body
			if method == "" {
				method, path = "POST", "/emails"
				if body == "" {
					body = mail
				}
			}
			r := c.do(method, path, body, x.headers...)
			require.NoError(t, r.err)
			require.Equal(t, x.status, r.status, r.body)
			message, err := json.Marshal(x.message)
			require.NoError(t, err)
			want := strings.NewReplacer(`\u003c`, "<", `\u003e`, ">").Replace(string(message))
			require.Equal(t, fmt.Sprintf(`{"statusCode":%d,"message":%s,"name":"%s"}`, x.status, want, x.errName), r.body)
			require.Equal(t, "application/json; charset=utf-8", r.header.Get("Content-Type"))
			require.Equal(t, before, c.srv.Totals().Stored)
		})
	}
}

// TestEveryErrorByRule: what the table holds, a rule can make the server say.
func TestEveryErrorByRule(t *testing.T) {
	c := start(t, Options{})
	for _, e := range Errors() {
		c.srv.ClearRules()
		_, err := c.srv.AddRule(On(StageRequest, Reply).Code(e.Status).Error(e.Name).Rule())
		require.NoError(t, err)
		r := c.send("k", "ann@x.test")
		require.Equal(t, e.Status, r.status)
		var got struct {
			StatusCode int
			Name       string
			Message    string
		}
		require.NoError(t, json.Unmarshal([]byte(r.body), &got))
		require.Equal(t, e.Name, got.Name)
		require.Equal(t, e.Status, got.StatusCode)
		if e.Name != "validation_error" && e.Name != "restricted_api_key" {
			require.Equal(t, e.Message, got.Message)
		}
		require.Equal(t, e.Status == 429, r.header.Get("Retry-After") != "")
	}
}

// TestFields compares the fields of each answer with Resend's lists.
func TestFields(t *testing.T) {
	c := start(t, Options{})
	id := c.ok(c.send("k", "ann@x.test")).id(t)
	var hook struct{ ID string }
	require.NoError(t, json.Unmarshal([]byte(c.ok(c.do("POST", "/webhooks", `{"endpoint":"https://shop.test/hook","events":["email.sent"]}`)).body), &hook))
	later := c.ok(c.do("POST", "/emails", strings.Replace(mailTo("a@x.test"), `"subject"`, `"scheduled_at":"in 1 day","subject"`, 1))).id(t)
	email := "id message_id to from created_at subject bcc cc reply_to last_event scheduled_at"
	for _, x := range []struct{ name, method, path, body, fields, inside string }{
		{"POST /emails", "POST", "/emails", mailTo("b@x.test"), "id", ""},
		{"POST /emails/batch", "POST", "/emails/batch", "[" + mailTo("c@x.test") + "]", "data", "id"},
		{"GET /emails", "GET", "/emails", "", "object has_more data", email},
		{"GET /emails/{id}", "GET", "/emails/" + id, "", email + " object html text", ""},
		{"PATCH /emails/{id}", "PATCH", "/emails/" + later, `{"scheduled_at":"in 2 days"}`, "object id", ""},
		{"POST /emails/{id}/cancel", "POST", "/emails/" + later + "/cancel", "", "object id", ""},
		{"POST /webhooks", "POST", "/webhooks", `{"endpoint":"https://shop.test","events":["email.bounced"]}`, "object id signing_secret", ""},
		{"GET /webhooks", "GET", "/webhooks", "", "object has_more data", "id created_at status endpoint events"},
		{"GET /webhooks/{id}", "GET", "/webhooks/" + hook.ID, "", "object id created_at status endpoint events signing_secret", ""},
		{"PATCH /webhooks/{id}", "PATCH", "/webhooks/" + hook.ID, `{"status":"disabled"}`, "object id", ""},
		{"DELETE /webhooks/{id}", "DELETE", "/webhooks/" + hook.ID, "", "object id deleted", ""},
	} {
		t.Run(x.name, func(t *testing.T) {
			var got map[string]any
			require.NoError(t, json.Unmarshal([]byte(c.ok(c.do(x.method, x.path, x.body)).body), &got))
			require.Equal(t, sorted(x.fields), names(got))
			if x.inside != "" {
				list, ok := got["data"].([]any)
				require.True(t, ok)
				require.NotEmpty(t, list)
				require.Equal(t, sorted(x.inside), names(list[0]))
			}
		})
	}
}

func names(v any) []string {
	m, _ := v.(map[string]any)
	var out []string
	for k := range m {
		out = append(out, k)
	}
	sort.Strings(out)
	return out
}

func sorted(fields string) []string {
	out := strings.Fields(fields)
	sort.Strings(out)
	return out
}

func TestRateLimitAndQuotaHeaders(t *testing.T) {
	c := start(t, Options{RateLimit: 2, DailyQuota: 3, MonthlyQuota: 5})
	header := func(r response, name string) string { return r.header.Get(name) }
	r := c.ok(c.send("", "a@x.test"))
	for name, want := range map[string]string{
		"ratelimit-limit": "2", "ratelimit-policy": "2;w=1", "ratelimit-remaining": "1", "ratelimit-reset": "1",
		"x-resend-daily-quota": "1", "x-resend-monthly-quota": "1", "retry-after": "",
	} {
		require.Equal(t, want, header(r, name), name)
	}
	c.ok(c.do("GET", "/emails", ""))
	r = c.send("", "b@x.test")
	require.Equal(t, 429, r.status)
	require.Equal(t, "1", header(r, "retry-after"))
	require.Equal(t, int64(time.Second), c.last().RetryAfter, "the ledger has it")
	require.Equal(t, "0", header(r, "ratelimit-remaining"))
	c.srv.Advance(time.Second)
	two := strings.Replace(mailTo("b@x.test"), `"subject"`, `"cc":"c@x.test","subject"`, 1)
	r = c.ok(c.do("POST", "/emails", two))
	require.Equal(t, "3", header(r, "x-resend-daily-quota"), "each recipient counts")
	c.srv.Advance(time.Second)
	r = c.send("k", "d@x.test")
	require.Contains(t, r.body, "daily_quota_exceeded")
	c.srv.Advance(24 * time.Hour)
	c.ok(c.send("k", "d@x.test"))
	c.srv.Advance(time.Second)
	r = c.do("POST", "/emails", two)
	monthly := strings.Contains(r.body, "monthly_quota_exceeded")
	newMonth := c.srv.wall().UTC().Day() == 1 // the clock may have stepped into a new month
	require.True(t, monthly || newMonth, r.body)
}

// A client that is one too many is told to come again once the window is empty.
func TestRateSaysWhenToComeAgain(t *testing.T) {
	c := start(t, rules(On(StageRequest, Rate).Limit(1).For(3*time.Second)))
	c.ok(c.send("ticket:1", "a@x.test"))
	require.Zero(t, c.last().RetryAfter)
	r := c.send("ticket:2", "b@x.test")
	require.Equal(t, 429, r.status)
	require.Equal(t, "3", r.header.Get("Retry-After"))
	require.Equal(t, int64(3*time.Second), c.last().RetryAfter)
	c.srv.Advance(3 * time.Second)
	c.ok(c.send("ticket:2", "b@x.test"))
}

func TestSwitches(t *testing.T) {
	c := start(t, Options{AllowNoUserAgent: true, AllowExampleDomains: true})
	c.ok(c.send("", "ann@example.com", "User-Agent", "-"))
	c.ok(c.do("POST", "/emails", strings.Replace(mailTo("a@x.test"), `"subject"`, `"attachments":[{"filename":"a","content":[1,2,3]},{"filename":"b","path":"https://x.test/b"}],"subject"`, 1)))
	raw, ok := c.srv.Mail(c.last().ID)
	require.True(t, ok)
	require.Contains(t, string(raw), `filename="a"`)
	require.NotContains(t, string(raw), "1,2,3")
}

func TestLint(t *testing.T) {
	inMail := strings.Replace(mailTo("ann@x.test"), `"subject"`, `"headers":{"idempotency-key":"k"},"subject"`, 1)
	for _, x := range []struct {
		name string
		run  func(c *client)
		want []string // of the last row
	}{
		{"a careful retry", func(c *client) { c.send("k", "ann@x.test"); c.send("k", "ann@x.test") }, nil},
		{"two mails to one person", func(c *client) {
			c.send("k1", "ann@x.test")
			c.do("POST", "/emails", strings.Replace(mailTo("ann@x.test"), "Hello", "Bye", 1), "Idempotency-Key", "k2")
		}, nil},
		{"the key in the mail", func(c *client) { c.do("POST", "/emails", inMail) }, []string{FindingKeyInMail}},
		{"a new key", func(c *client) { c.send("k1", "ann@x.test"); c.send("k2", "ann@x.test") }, []string{FindingNewKey}},
		{"a new key a day later", func(c *client) {
			c.send("k1", "ann@x.test")
			c.srv.Advance(25 * time.Hour)
			c.send("k2", "ann@x.test")
		}, nil},
		{"no key", func(c *client) { c.send("", "ann@x.test"); c.send("", "ann@x.test") }, []string{FindingNoKey}},
		{"changed bytes", func(c *client) {
			c.send("k", "ann@x.test")
			c.do("POST", "/emails", mailTo("ann@x.test")+" ", "Idempotency-Key", "k")
		}, []string{FindingChangedPayload}},
		{"past 24 hours", func(c *client) {
			c.send("k", "ann@x.test")
			c.srv.Advance(24*time.Hour + time.Second)
			c.send("k", "ann@x.test")
		}, []string{FindingLate}},
	} {
		t.Run(x.name, func(t *testing.T) {
			c := start(t, Options{})
			x.run(c)
			require.Equal(t, x.want, c.last().Findings)
			want := int64(0)
			if x.want != nil {
				want = 1
			}
			require.Equal(t, want, c.srv.Totals().Findings)
			if x.want == nil {
				return
			}
			var rows struct{ Rows []Attempt }
			c.get("/_control/ledger?finding="+x.want[0], &rows)
			require.Len(t, rows.Rows, 1)
			require.Contains(t, c.do("GET", "/_control/metrics", "").body, `fake_findings_total{server="resend"} 1`)
			require.Contains(t, c.do("GET", "/_control/verdict", "").body, x.want[0])
		})
	}
}

// TestLintRemembersADay: what came within 24 hours is known, however many mails
// came between, also where it left memory.
func TestLintRemembersADay(t *testing.T) {
	m := newMemory(func(err error) { require.NoError(t, err) })
	m.number = tally.New(8)
	defer func() { require.NoError(t, m.close()) }()
	look := func(n int, key string, now time.Duration) []string {
		return m.look(&mail{To: addresses{fmt.Sprint(n)}}, key, digestOf(key), now)
	}
	for i := range 5000 {
		require.Empty(t, look(i, "k", 0))
	}
	require.Empty(t, look(0, "k", time.Hour), "the same key")
	require.Equal(t, []string{FindingNewKey}, look(0, "other", time.Hour))
	require.Equal(t, []string{FindingNoKey}, look(1, "", time.Hour))
	require.Equal(t, []string{FindingNewKey}, look(1, "k", 24*time.Hour), "the one before it had none")
	require.Empty(t, look(2, "other", 24*time.Hour), "a day later")
	m.reset()
	require.Empty(t, look(3, "", 25*time.Hour), "forgotten")
}
