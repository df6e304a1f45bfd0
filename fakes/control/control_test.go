package control

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"mailproof/fakes/ledger"
	"mailproof/fakes/script"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("net/http.(*persistConn).readLoop"), goleak.IgnoreAnyFunction("net/http.(*persistConn).writeLoop"))
}

var vocab = script.Vocabulary{
	Stages:     []script.Stage{"a", "b"},
	Actions:    map[script.Kind][]script.Stage{script.Drop: {"a", "b"}, script.HoldUntilReleased: {"b"}},
	KeyKnownAt: []script.Stage{"b"},
}

type fake struct {
	API
	*httptest.Server
	t     *testing.T
	mails map[int64][]byte
	open  *bool
}

func start(t *testing.T) *fake {
	f := &fake{t: t, mails: map[int64][]byte{}}
	f.API = API{
		Name: "test", Facts: map[string]string{"address": "nowhere"},
		Engine: script.NewEngine(7, vocab, false), Holds: script.NewHolds(), Ledger: ledger.New(256),
		Now:    func() int64 { return 42 },
		Mail:   func(id int64) ([]byte, bool) { b, ok := f.mails[id]; return b, ok },
		Forget: func() { clear(f.mails) },
		Open:   func(open bool) error { f.open = &open; return nil },
	}
	f.Server = httptest.NewServer(Handler(f.API))
	t.Cleanup(f.Close)
	t.Cleanup(func() { require.NoError(t, f.Ledger.Close()) })
	return f
}

func (f *fake) row(key string, stored bool) {
	r := f.Ledger.Begin(ledger.Attempt{Recipient: "a@x"})
	r.Update(func(a *ledger.Attempt) { a.Key, a.DotAt = key, 1 })
	if stored {
		r.Store("", 1)
	}
	r.Finish(2, nil)
}

func (f *fake) do(method, path, body string, want int) string {
	f.t.Helper()
	req, err := http.NewRequest(method, f.URL+path, strings.NewReader(body))
	require.NoError(f.t, err)
	resp, err := f.Client().Do(req)
	require.NoError(f.t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(f.t, err)
	require.Equal(f.t, want, resp.StatusCode, "%s %s: %s", method, path, b)
	return string(b)
}

func (f *fake) get(path string, v any) {
	f.t.Helper()
	require.NoError(f.t, json.Unmarshal([]byte(f.do("GET", path, "", 200)), v))
}

func TestLedgerPagesFiltersAndStreams(t *testing.T) {
	f := start(t)
	for i := range 600 {
		f.row(fmt.Sprint("k", i%300), true)
	}
	f.row("absent", false)
	open := f.Ledger.Begin(ledger.Attempt{Recipient: "running@x"})

	var page struct {
		Rows    []ledger.Attempt
		Running []ledger.Attempt
		Next    int64
	}
	f.get("/ledger?limit=400", &page)
	require.Len(t, page.Rows, 400)
	require.Len(t, page.Running, 1)
	f.get(fmt.Sprint("/ledger?limit=400&since=", page.Next), &page)
	require.Len(t, page.Rows, 201)
	f.get("/ledger?tail=3", &page)
	require.Equal(t, "absent", page.Rows[2].Key)
	require.Len(t, page.Rows, 3)
	f.get("/ledger?key=k7&doubled=true", &page)
	require.Len(t, page.Rows, 1)
	require.Equal(t, 2, page.Rows[0].Copy)
	require.Contains(t, f.do("GET", "/ledger?kye=k7", "", 400), "unknown filter")

	rows, err := ledger.Decode(strings.NewReader(f.do("GET", "/ledger?format=jsonl", "", 200)))
	require.NoError(t, err)
	require.Len(t, rows, 601)
	require.Contains(t, f.do("GET", "/log?key=absent", "", 200), "nothing stored")

	var v ledger.Verdict
	f.get("/verdict?key=k7", &v)
	require.Equal(t, "doubled", v.Verdict)
	var all struct {
		Keys     int
		Counts   map[string]int
		Verdicts []ledger.Verdict
	}
	f.get("/verdict?only=absent", &all)
	require.Equal(t, 301, all.Keys)
	require.Equal(t, 300, all.Counts["doubled"])
	require.Len(t, all.Verdicts, 1)

	require.Contains(t, f.do("GET", "/metrics", "", 200), `fake_doubled_total{server="test"} 300`)
	f.do("POST", "/reset", "", 204)
	f.get("/ledger", &page)
	require.Empty(t, page.Rows)
	open.Finish(1, nil) // it was forgotten
	f.get("/ledger", &page)
	require.Empty(t, page.Rows)
}

func TestRulesOverHTTP(t *testing.T) {
	f := start(t)
	require.JSONEq(t, `{"ids":["r1"]}`, f.do("POST", "/rules", `{"match":{"key":"k*","nth":"1-2"},"action":{"kind":"drop","stage":"b"}}`, 201))
	f.do("POST", "/rules", `[{"action":{"kind":"drop","stage":"a"}},{"id":"mine","action":{"kind":"drop","stage":"b"},"count":2}]`, 201)
	f.do("POST", "/rules", `{"rules":[{"action":{"kind":"drop","stage":"a"}}]}`, 201)
	var got struct{ Rules []script.State }
	f.get("/rules", &got)
	require.Len(t, got.Rules, 4)
	require.Equal(t, script.Range{From: 1, To: 2}, got.Rules[0].Match.Nth)
	for _, tc := range []struct {
		body, says string
		status     int
	}{
		{``, "empty", 400},
		{`{`, "rules", 400},
		{`{"action":{"kind":"drop","stage":"a"},"cuont":1}`, "cuont", 400},
		{`{"action":{"kind":"drop","stage":"a"}} {}`, "after top-level", 400},
		{`{"match":{"nth":"3-1"},"action":{"kind":"drop","stage":"a"}}`, "range", 400},
		{`{"action":{"kind":"drop","stage":"z"}}`, "action.stage", 422},
		{`{"action":{"kind":"dorp","stage":"a"}}`, "action.kind", 422},
		{`{"action":{"kind":"hold","stage":"a"}}`, "cannot strike", 422},
		{`{"match":{"key":"k"},"action":{"kind":"drop","stage":"a"}}`, "headers were read", 422},
		{`{"match":{"key":"["},"action":{"kind":"drop","stage":"b"}}`, "pattern", 422},
		{`{"match":{"probability":2},"action":{"kind":"drop","stage":"b"}}`, "probability", 422},
		{`{"id":"mine","action":{"kind":"drop","stage":"b"}}`, "taken", 422},
		{`[{"action":{"kind":"drop","stage":"a"}},{"action":{"kind":"drop","stage":"z"}}]`, "rule 2", 422},
		{strings.Repeat(" ", maxBody+1), "too large", 413},
	} {
		require.Contains(t, f.do("POST", "/rules", tc.body, tc.status), tc.says, tc.body)
	}
	f.get("/rules", &got)
	require.Len(t, got.Rules, 4, "a refused list adds nothing")
	f.do("DELETE", "/rules/mine", "", 204)
	f.do("DELETE", "/rules/mine", "", 404)
	f.do("DELETE", "/rules", "", 204)
	require.Empty(t, f.Engine.Rules())
}

func TestHoldsClockAndListener(t *testing.T) {
	f := start(t)
	done := make(chan error, 2)
	for range 2 {
		go func() {
			_, err := f.Holds.Wait(script.Hold{Key: "k"}, time.Minute, nil)
			done <- err
		}()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := f.Holds.Await(ctx, func(h script.Hold) bool { return h.ID == 2 })
	require.NoError(t, err)
	for _, body := range []string{``, `{}`, `{"id":1,"all":true}`, `{"ids":1}`, `x`} {
		f.do("POST", "/release", body, 400)
	}
	f.do("POST", "/release", `{"id":9}`, 404)
	f.do("POST", "/release", `{"id":1}`, 200)
	require.NoError(t, <-done)
	f.do("POST", "/release", `{"all":true}`, 200)
	require.NoError(t, <-done)

	before := f.Engine.Now()
	f.do("POST", "/clock", `{"advance":"24h"}`, 200)
	require.Greater(t, f.Engine.Now()-before, 24*time.Hour)
	f.do("POST", "/clock", `{"advance":"-1h"}`, 400)
	f.do("POST", "/clock", ``, 400)

	f.do("POST", "/listener", `{"open":false}`, 204)
	require.False(t, *f.open)
	f.do("POST", "/listener", `{}`, 400)
}

func TestEvents(t *testing.T) {
	f := start(t)
	f.row("before", true)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "GET", f.URL+"/events?since=0", nil)
	require.NoError(t, err)
	resp, err := f.Client().Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	next := func(prefix string) string {
		for lines.Scan() {
			if s, ok := strings.CutPrefix(lines.Text(), prefix); ok {
				return s
			}
		}
		require.FailNow(t, "stream ended", "waiting for %q: %v", prefix, lines.Err())
		return ""
	}
	require.Equal(t, "1", next("id: "))
	require.Contains(t, next("data: "), "before")
	f.row("after", true)
	require.Equal(t, "2", next("id: "))
	require.Contains(t, next("data: "), "after")
	f.Ledger.Reset()
	f.row("anew", true)
	next("event: reset")
	require.Equal(t, "1", next("id: "))
}

func TestAForeignPageCannotUseIt(t *testing.T) {
	f := start(t)
	for origin, want := range map[string]int{"http://evil.example": 403, f.URL: 204} {
		req, err := http.NewRequest("DELETE", f.URL+"/rules", nil)
		require.NoError(t, err)
		req.Header.Set("Origin", origin)
		resp, err := f.Client().Do(req)
		require.NoError(t, err)
		resp.Body.Close()
		require.Equal(t, want, resp.StatusCode, origin)
	}
}

func TestMailsAreShownSafely(t *testing.T) {
	f := start(t)
	f.mails[1] = []byte("From: a@x\r\nSubject: =?utf-8?q?caf=C3=A9?=\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n" +
		"--b\r\nContent-Type: text/plain\r\n\r\nplain\r\n--b\r\nContent-Type: text/html\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\n<script>alert(1)</script>=20hi\r\n" +
		"--b\r\nContent-Type: application/pdf; name=t.pdf\r\nContent-Transfer-Encoding: base64\r\n\r\nAAAA\r\nAAAA\r\n--b--\r\n")
	f.mails[2] = []byte("\xff\x00 not a mail")
	var v view
	f.get("/mails/1", &v)
	require.Equal(t, "plain", v.Text)
	require.True(t, v.HasHTML)
	require.Equal(t, []part{{"t.pdf", "application/pdf", 6}}, v.Attachments)
	require.Contains(t, v.Headers, [2]string{"Subject", "café"})
	resp, err := f.Client().Get(f.URL + "/mails/1/html")
	require.NoError(t, err)
	resp.Body.Close()
	csp := resp.Header.Get("Content-Security-Policy")
	require.Contains(t, csp, "sandbox;")
	require.Contains(t, csp, "default-src 'none'")
	require.NotContains(t, csp, "script")
	f.get("/mails/2", &v)
	require.NotEmpty(t, v.Problem)
	f.do("GET", "/mails/3", "", 404)
	f.do("GET", "/mails/x", "", 400)
}

// TestOpenAPI holds the description and the routes together.
func TestOpenAPI(t *testing.T) {
	f := start(t)
	var doc struct {
		Paths map[string]map[string]any
	}
	f.get("/openapi.json", &doc)
	var described, served []string
	for path, methods := range doc.Paths {
		for m := range methods {
			described = append(described, strings.ToUpper(m)+" "+path)
		}
	}
	for r := range (&handler{API: f.API}).routes() {
		served = append(served, r)
	}
	sort.Strings(described)
	sort.Strings(served)
	require.Equal(t, served, described)
}

func TestThePageNeedsNothingFromElsewhere(t *testing.T) {
	f := start(t)
	for _, path := range []string{"/", "/app.js", "/style.css"} {
		body := f.do("GET", path, "", 200)
		require.NotContains(t, body, "http://")
		require.NotContains(t, body, "https://")
	}
	f.do("GET", "/nothing", "", 404)
}

func FuzzRender(f *testing.F) {
	f.Add([]byte("Subject: x\r\n\r\nhi"))
	f.Add([]byte("Content-Type: multipart/mixed; boundary=b\r\n\r\n--b\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n--b\r\n\r\n--b--"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		_, err := json.Marshal(render(raw))
		require.NoError(t, err)
	})
}

func FuzzControlBodies(f *testing.F) {
	f.Add(`{"id":1}`)
	f.Add(`{"advance":"1h"}`)
	f.Add(`{"rules":true}`)
	h := Handler(API{
		Name: "fuzz", Engine: script.NewEngine(1, vocab, false), Holds: script.NewHolds(), Ledger: ledger.New(0),
		Now: func() int64 { return 1 }, Mail: func(int64) ([]byte, bool) { return nil, false },
	})
	f.Fuzz(func(t *testing.T, body string) {
		for _, path := range []string{"/rules", "/release", "/reset", "/clock", "/listener"} {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequest("POST", path, strings.NewReader(body)))
			require.Contains(t, []int{200, 201, 204, 400, 404, 413, 422, 501}, w.Code, "%s: %s", path, w.Body)
			if w.Code >= 400 {
				require.True(t, json.Valid(w.Body.Bytes()))
			}
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("DELETE", "/rules", nil))
	})
}
