package resendapi

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// fuzzed is a server whose handler is called directly, over a connection that
// only exists so that there is one.
type fuzzed struct {
	c *client
	t testing.TB
}

// post sends bytes as they are and checks what must hold of every answer: JSON,
// a known status, an error of the table's form, and a ledger that agrees.
func (f fuzzed) post(t *testing.T, method, path, body string, headers map[string]string) {
	before := f.c.srv.Totals()
	req, err := http.NewRequest(method, f.c.srv.URL+path, strings.NewReader(body))
	if err != nil {
		return
	}
	for k, v := range headers {
		req.Header[k] = []string{v}
	}
	resp, err := f.c.http.Do(req)
	if err != nil {
		return // the client refuses to send such a header
	}
	defer resp.Body.Close()
	var v any
	dec := json.NewDecoder(resp.Body)
	if resp.StatusCode == 400 && resp.Header.Get("Content-Type") == "text/plain; charset=utf-8" {
		return // net/http's own word about what is no HTTP
	}
	require.NoError(t, dec.Decode(&v))
	require.Contains(t, []int{200, 400, 401, 403, 404, 405, 409, 413, 422}, resp.StatusCode)
	if m, ok := v.(map[string]any); ok && resp.StatusCode != 200 {
		_, known := errorNamed(resp.StatusCode, fmt.Sprint(m["name"]))
		require.True(t, known || resp.StatusCode == 413, "%v", m)
		require.EqualValues(t, resp.StatusCode, m["statusCode"])
	}
	require.NoError(t, f.c.settled())
	after := f.c.srv.Totals()
	if resp.StatusCode != 200 {
		require.Equal(t, before.Stored, after.Stored, "a refusal stores nothing")
	}
	require.Zero(t, after.Breaches)
	require.Equal(t, int64(0), after.Open)
}

func newFuzzed(f *testing.F) fuzzed {
	return fuzzed{start(f, Options{NoMagic: true, KeepRows: 512}), f}
}

func FuzzBodies(f *testing.F) {
	for _, body := range []string{
		mailTo("ann@x.test"), `{}`, `[]`, `null`, `{"to":5}`, `{"to":[null]}`, `[[]]`, `[` + mailTo("a@x.test") + `]`, "\xff\xfe", `{"from":"a@x.test","to":"b@x.test","subject":"x","html":5}`,
		`{"from":"a@x.test","to":["<b@x.test>"],"subject":"\ud800","text":"x","headers":{"a":"b\r\nc"},"tags":[{}],"attachments":[{"content":{"type":"Buffer","data":[1]}}],"scheduled_at":"in 3 days","template":{},"topic_id":null}`,
		`{"endpoint":"http://x","events":["email.sent"]}`, `{"scheduled_at":"in 1 day"}`, strings.Repeat("[", 20000),
	} {
		f.Add(body)
	}
	z := newFuzzed(f)
	f.Fuzz(func(t *testing.T, body string) {
		headers := map[string]string{"Authorization": "Bearer re_1", "User-Agent": "fuzz"}
		z.post(t, "POST", "/emails", body, headers)
		z.post(t, "POST", "/emails/batch", body, map[string]string{"Authorization": "Bearer re_1", "X-Batch-Validation": "permissive"})
		z.post(t, "PATCH", "/emails/"+z.c.srv.ids.uuid(0), body, headers)
		z.post(t, "PATCH", "/webhooks/"+z.c.srv.ids.uuid(0), body, headers)
	})
}

func FuzzHeaders(f *testing.F) {
	f.Add("k", "Bearer re_1", "ua", "strict", "/emails?limit=1")
	f.Add("", "Basic x", "", "permissive", "/emails/x/cancel")
	f.Add(strings.Repeat("k", 300), "Bearer", "ua", "", "/webhooks/%00?after=1")
	f.Add("ключ\x80", "bearer  re", "ua", "x", "//emails//batch")
	z := newFuzzed(f)
	f.Fuzz(func(t *testing.T, key, auth, agent, validation, path string) {
		headers := map[string]string{"Idempotency-Key": key, "Authorization": auth, "User-Agent": agent, "X-Batch-Validation": validation}
		z.post(t, "POST", "/emails", mailTo("ann@x.test"), headers)
		z.post(t, "POST", "/emails/batch", "["+mailTo("ann@x.test")+"]", headers)
		if strings.HasPrefix(path, "/") && !strings.HasPrefix(path, "/_control") {
			z.post(t, "GET", path, "", headers)
			z.post(t, "DELETE", path, "", headers)
		}
	})
}

// FuzzSchedule: whatever is asked for lies within bounds or is refused.
func FuzzSchedule(f *testing.F) {
	for _, s := range []string{"in 3 days", "2030-01-01", "in an hour", "in 999999999 weeks", "now"} {
		f.Add(s)
	}
	z := newFuzzed(f)
	f.Fuzz(func(t *testing.T, text string) {
		due, err := z.c.srv.parseSchedule(text)
		now := z.c.srv.engine.Now()
		require.True(t, err != nil || (due > 0 && due <= now+maxSchedule), "%q: %s", text, due)
	})
}

// TestOpenAPI holds the description and the routes together.
func TestOpenAPI(t *testing.T) {
	c := start(t, Options{})
	var doc struct {
		Paths map[string]map[string]any
	}
	c.get("/_control/resend.json", &doc)
	require.Len(t, doc.Paths, 7)
	for path, methods := range doc.Paths {
		if strings.HasPrefix(path, "/_control/") {
			require.Equal(t, 200, c.do("GET", path, "").status)
			continue
		}
		for _, m := range []string{"get", "post", "patch", "delete", "put"} {
			w := httptest.NewRecorder()
			x := &call{s: c.srv, w: w, r: httptest.NewRequest(strings.ToUpper(m), "/", nil)}
			f, err := x.find404(strings.ReplaceAll(path, "{id}", c.srv.ids.uuid(1)))
			served := f != nil || (m == "post" && (path == "/emails" || path == "/emails/batch"))
			_, described := methods[m]
			require.Equal(t, served, described, "%s %s", m, path)
			if !served {
				require.Equal(t, 405, err.Status)
			}
		}
	}
}
