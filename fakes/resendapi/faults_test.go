package resendapi

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/fakes/script"
)

func transport(conns int) *http.Transport {
	return &http.Transport{MaxConnsPerHost: conns, MaxIdleConnsPerHost: conns, DisableCompression: true}
}

// TestFaults names each fault, what the client sees of it and what really
// happened, and that the retry with the same key ends with one mail.
func TestFaults(t *testing.T) {
	noAnswer := func(t *testing.T, r response) { require.Error(t, r.err) }
	status := func(code int, has string) func(*testing.T, response) {
		return func(t *testing.T, r response) {
			require.NoError(t, r.err)
			require.Equal(t, code, r.status, r.body)
			require.Contains(t, r.body, has)
		}
	}
	for _, f := range []struct {
		name   string
		rule   Builder
		sees   func(*testing.T, response)
		stored bool
		told   bool // a whole answer was written
		breach bool
	}{
		{"drop before reading", On(StageHeaders, Drop), noAnswer, false, false, false},
		{"reset before reading", On(StageHeaders, Reset), noAnswer, false, false, false},
		{"hang before reading", On(StageHeaders, Hang).For(10 * time.Millisecond), noAnswer, false, false, false},
		{"drop inside the body", On(StageBody, Drop).Bytes(20), noAnswer, false, false, false},
		{"drop after the request", On(StageRequest, Drop), noAnswer, false, false, false},
		{"work done, drop", On(StageStored, Drop), noAnswer, true, false, false},
		{"work done, reset", On(StageStored, Reset), noAnswer, true, false, false},
		{"work done, hang", On(StageStored, Hang).For(10 * time.Millisecond), noAnswer, true, false, false},
		{"work done, 502 of a proxy", On(StageStored, Reply).Code(502), func(t *testing.T, r response) {
			status(502, "<html>")(t, r)
			require.Equal(t, "text/html", r.header.Get("Content-Type"))
		}, true, true, false},
		{"work done, 504 of a proxy", On(StageStored, Reply).Code(504), status(504, "<html>"), true, true, false},
		{"200 and an empty body", On(StageStored, Empty), func(t *testing.T, r response) {
			require.Equal(t, 200, r.status)
			require.Empty(t, r.body)
		}, true, true, false},
		{"200 without an id", On(StageStored, NoID), status(200, "{}"), true, true, false},
		{"200 and half of the JSON", On(StageStored, Truncate), func(t *testing.T, r response) {
			require.Equal(t, 200, r.status)
			require.False(t, json.Valid([]byte(r.body)))
		}, true, true, false},
		{"200 and half of the bytes", On(StageStored, Cut), func(t *testing.T, r response) {
			require.ErrorIs(t, r.err, io.ErrUnexpectedEOF)
		}, true, false, false},
		{"garbage", On(StageStored, Garbage), noAnswer, true, false, false},
		{"202 instead", On(StageStored, Reply).Code(202), status(202, `{"id":"`), true, true, false},
		{"500 after the work", On(StageStored, Reply).Code(500), status(500, "application_error"), true, true, false},
		{"503 after the work", On(StageStored, Reply).Code(503), status(503, "service_unavailable"), true, true, true},
		{"422 after the work", On(StageStored, Reply).Code(422), status(422, "validation_error"), true, true, true},
		{"503 before it", On(StageHeaders, Reply).Code(503), status(503, "API is temporarily unavailable"), false, true, false},
		{"500 before it", On(StageReserved, Reply).Code(500), status(500, "application_error"), false, true, false},
		{"200 and discard", On(StageReserved, Reply).Code(200), status(200, `{"id":"`), false, true, true},
		{"429, come again in 7 s", On(StageRequest, Reply).Code(429).For(6500 * time.Millisecond), func(t *testing.T, r response) {
			status(429, "rate_limit_exceeded")(t, r)
			require.Equal(t, "7", r.header.Get("Retry-After"))
		}, false, true, false},
		{"daily quota", On(StageRequest, Reply).Error("daily_quota_exceeded"), status(429, "daily_quota_exceeded"), false, true, false},
		{"monthly quota", On(StageRequest, Reply).Error("monthly_quota_exceeded"), status(429, "monthly_quota_exceeded"), false, true, false},
		{"rate", On(StageRequest, Rate).Limit(1).For(time.Hour), status(200, "id"), true, true, false},
		{"in flight, by force", On(StageRequest, Reply).Error("concurrent_idempotent_requests"), status(409, "concurrent_idempotent_requests"), false, true, false},
		{"mismatch, by force", On(StageRequest, Reply).Error("invalid_idempotent_request"), status(409, "invalid_idempotent_request"), false, true, false},
		{"slow headers", On(StageStored, SlowHeaders).For(100 * time.Microsecond), status(200, `{"id":"`), true, true, false},
		{"drip", On(StageStored, Drip).For(100 * time.Microsecond), status(200, `{"id":"`), true, true, false},
		{"delay", On(StageStored, Delay).For(20 * time.Millisecond), status(200, `{"id":"`), true, true, false},
		{"drop after the answer", On(StageReplied, Drop), status(200, `{"id":"`), true, true, false},
	} {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			c := start(t, rules(f.rule.First(1)))
			f.sees(t, c.send("ticket:1", "ann@x.test"))
			a := c.last()
			require.Equal(t, f.stored, a.Stored)
			require.Equal(t, f.told, a.ReplyWritten)
			require.Equal(t, f.breach, a.Breach)
			require.Equal(t, !f.stored, a.ClosedWithoutStoring)
			if f.name != "rate" {
				require.Equal(t, f.rule.Rule().Action.Name(), a.Fault)
				require.Equal(t, []string{"r1"}, a.Rules)
			}
			if f.name == "200 and discard" {
				c.ok(c.send("ticket:1", "ann@x.test"))
				require.Equal(t, "absent", verdictCopies(c.srv.Verdict("ticket:1")), "the lie is repeated, as an answer that was kept")
				return
			}
			c.http.CloseIdleConnections() // "drop after the answer" leaves a dead one
			c.ok(c.send("ticket:1", "ann@x.test"))
			v := c.srv.Verdict("ticket:1")
			require.Equal(t, "once", v.Verdict)
			require.Equal(t, f.stored, v.Deduplicated == 1)
			require.Empty(t, v.Findings)
		})
	}
}

func verdictCopies(v Verdict) string {
	if v.Copies == 0 {
		return "absent"
	}
	return v.Verdict
}

// TestWithoutAKeyALostAnswerDoubles is the fault that the project is about.
func TestWithoutAKeyALostAnswerDoubles(t *testing.T) {
	c := start(t, rules(On(StageStored, Drop).First(1)))
	require.Error(t, c.send("", "ann@x.test", "X", "y").err)
	c.ok(c.send("", "ann@x.test"))
	require.EqualValues(t, 2, c.srv.Totals().Stored)
	require.Equal(t, []string{FindingNoKey}, c.last().Findings)
}

// TestExpiredByScript: the server forgets a key before its time; the second
// mail is its doing, and the rows say so.
func TestExpiredByScript(t *testing.T) {
	for _, stage := range []Stage{StageStored, StageReserved} {
		c := start(t, rules(On(stage, ExpireKey).First(1), On(StageStored, Drop).First(1)))
		require.Error(t, c.send("k", "ann@x.test").err)
		c.ok(c.send("k", "ann@x.test"))
		rows := c.srv.Ledger()
		require.Len(t, rows, 2)
		require.True(t, rows[1].Stored && rows[1].Breach)
		require.Equal(t, 2, rows[1].Copy)
		require.Equal(t, "doubled", c.srv.Verdict("k").Verdict)
		require.NotContains(t, rows[1].Findings, FindingLate)
	}
	// At the head of the second request.
	c := start(t, rules(On(StageHeaders, ExpireKey).ID("e")))
	c.ok(c.send("k", "ann@x.test"))
	require.False(t, c.last().Breach, "there was nothing to forget")
	c.ok(c.send("k", "ann@x.test"))
	require.True(t, c.last().Breach)
	require.EqualValues(t, 1, c.srv.Totals().Doubled)
}

// TestConnectStage: faults before anything is read.
func TestConnectStage(t *testing.T) {
	for _, b := range []Builder{
		On(StageConnect, Drop), On(StageConnect, Reset), On(StageConnect, Hang).For(10 * time.Millisecond),
	} {
		c := start(t, rules(b.Times(1)))
		require.Error(t, c.send("k", "ann@x.test").err)
		require.Empty(t, c.srv.Ledger(), "no request was read")
		c.ok(c.send("k", "ann@x.test"))
		require.Contains(t, c.srv.Sessions()[0].Fault, "connect:")
	}
	c := start(t, rules(On(StageConnect, HoldUntilReleased).Times(1)))
	done := make(chan response)
	go func() { done <- c.send("k", "ann@x.test") }()
	h, err := c.srv.AwaitHold(soon(t), nil)
	require.NoError(t, err)
	require.Equal(t, StageConnect, h.Stage)
	c.srv.Release(h.ID)
	c.ok(<-done)
}

// TestRefuse: the kernel refuses new connections, then lets them in again.
func TestRefuse(t *testing.T) {
	c := start(t, Options{ControlAddr: "127.0.0.1:0"})
	r, err := http.Post(c.srv.ControlURL()+"/listener", "application/json", strings.NewReader(`{"open":false}`))
	require.NoError(t, err)
	r.Body.Close()
	require.Equal(t, 204, r.StatusCode)
	require.Error(t, c.send("k", "ann@x.test").err)
	require.NoError(t, c.srv.Listen())
	c.ok(c.send("k", "ann@x.test"))
	http.DefaultClient.CloseIdleConnections()
}

// TestHoldWhileTheClientDies holds at each stage, lets the client go away, and
// releases: the mail is kept, unless the rule says discard.
func TestHoldWhileTheClientDies(t *testing.T) {
	for _, stage := range []Stage{StageRequest, StageReserved, StageStored} {
		for _, discard := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s discard %v", stage, discard), func(t *testing.T) {
				rule := On(stage, HoldUntilReleased).First(1).Rule()
				if discard {
					rule.Action.OnRelease = script.DiscardOnRelease
				}
				c := start(t, Options{Rules: []Rule{rule}})
				nc, err := net.Dial("tcp", c.srv.Addr())
				require.NoError(t, err)
				body := mailTo("ann@x.test")
				fmt.Fprintf(nc, "POST /emails HTTP/1.1\r\nHost: x\r\nUser-Agent: raw\r\nAuthorization: Bearer re\r\nIdempotency-Key: k\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
				h, err := c.srv.AwaitHold(soon(t), nil)
				require.NoError(t, err)
				require.NoError(t, nc.Close())
				_, err = c.srv.AwaitHold(soon(t), func(h Hold) bool { return h.PeerGone })
				require.NoError(t, err)
				sub := c.srv.Subscribe(soon(t))
				c.srv.Release(h.ID)
				a := <-sub
				require.True(t, a.PeerGone)
				require.Equal(t, stage == StageStored || !discard, a.Stored)
				c.ok(c.send("k", "ann@x.test"))
				require.Equal(t, "once", c.srv.Verdict("k").Verdict)
			})
		}
	}
}

// TestCloseEndsHolds: a server that closes ends held requests as a crash would.
func TestCloseEndsHolds(t *testing.T) {
	c := start(t, rules(On(StageReserved, HoldUntilReleased)))
	done := make(chan response)
	go func() { done <- c.send("k", "ann@x.test") }()
	_, err := c.srv.AwaitHold(soon(t), nil)
	require.NoError(t, err)
	require.NoError(t, c.srv.Close())
	require.Error(t, (<-done).err)
	require.True(t, c.last().ClosedWithoutStoring)
}

// TestTransportReplays: Go's http.Transport sends a keyed POST again by itself
// when a kept connection dies before it answered. One call, two requests.
func TestTransportReplays(t *testing.T) {
	c := start(t, rules(On(StageHeaders, Drop).Key("k").First(1)))
	c.ok(c.send("warm", "ann@x.test"))                                                                // so that there is a kept connection
	req, err := http.NewRequest("POST", c.srv.URL+"/emails", strings.NewReader(mailTo("ann@x.test"))) // sets GetBody
	require.NoError(t, err)
	req.Header.Set("Idempotency-Key", "k")
	req.Header.Set("Authorization", "Bearer re_1")
	resp, err := c.http.Do(req)
	require.NoError(t, err, "the client saw nothing of it")
	_, err = io.ReadAll(resp.Body) // so that the connection is kept
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, 200, resp.StatusCode)
	v := c.srv.Verdict("k")
	require.Equal(t, 2, v.Attempts, "requests are counted, not calls")
	require.Equal(t, "once", v.Verdict)

	// The same after the work was done: still one mail, because of the key.
	_, err = c.srv.AddRule(On(StageStored, Drop).Key("k2").First(1).Rule())
	require.NoError(t, err)
	req, err = http.NewRequest("POST", c.srv.URL+"/emails", strings.NewReader(mailTo("ann@x.test")))
	require.NoError(t, err)
	req.Header.Set("Idempotency-Key", "k2")
	req.Header.Set("Authorization", "Bearer re_1")
	resp, err = c.http.Do(req)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	v = c.srv.Verdict("k2")
	require.Equal(t, 2, v.Attempts)
	require.Equal(t, "once", v.Verdict)
	require.Equal(t, 1, v.Deduplicated)
}

func TestMagicAddresses(t *testing.T) {
	c := start(t, Options{})
	require.Error(t, c.send("k", "ann+fault-stored-drop-x1@x.test").err)
	c.ok(c.send("k", "ann+fault-stored-drop-x1@x.test"))
	require.Equal(t, "once", c.srv.Verdict("k").Verdict)
	require.Equal(t, 503, c.send("", "ann+fault-request-503@x.test").status)
	id := c.ok(c.send("", "ann+fault-lifecycle-bounce@x.test")).id(t)
	var e Email
	c.get("/emails/"+id, &e)
	require.Equal(t, "bounced", e.LastEvent)
}

// TestOtherRequests: rules of stage other, told apart by path and method.
func TestOtherRequests(t *testing.T) {
	c := start(t, rules(On(StageOther, Reply).Code(500).Header(":path", "/emails/*").Header(":method", "GET").Times(1)))
	id := c.ok(c.send("k", "ann@x.test")).id(t)
	c.ok(c.do("GET", "/emails", ""))
	require.Equal(t, 500, c.do("GET", "/emails/"+id, "").status)
	c.ok(c.do("GET", "/emails/"+id, ""))
}

// TestSameSeedSameLedger runs the same mails twice.
func TestSameSeedSameLedger(t *testing.T) {
	run := func() (rows []Attempt, decisions []Decision) {
		c := start(t, rules(On(StageStored, Drop).Chance(0.3), On(StageRequest, Reply).Code(503).Chance(0.3), On(StageStored, Reply).Code(500).Chance(0.2)))
		for i := range 60 {
			for range 5 {
				if r := c.send(fmt.Sprintf("k%d", i), fmt.Sprintf("r%d@x.test", i)); r.err == nil && r.status == 200 {
					break
				}
			}
		}
		require.NoError(t, c.settled())
		rows, decisions = c.srv.Ledger(), c.srv.Decisions(0)
		for i := range rows {
			rows[i].From, rows[i].To, rows[i].DotAt, rows[i].StoredAt = 0, 0, 0, 0
		}
		for i := range decisions {
			decisions[i].T = 0
		}
		return rows, decisions
	}
	rows, decisions := run()
	again, decided := run()
	require.Equal(t, rows, again)
	require.Equal(t, decisions, decided)
	require.Greater(t, len(rows), 70)
}

// TestBadInput: what is no correct request gets a correct answer and harms
// nobody.
func TestBadInput(t *testing.T) {
	c := start(t, Options{MaxBody: 3 << 20, BodyTimeout: 300 * time.Millisecond})
	require.Equal(t, 413, c.do("POST", "/emails", strings.Repeat("x", 4<<20)).status)
	req, err := http.NewRequest("POST", c.srv.URL+"/emails", io.MultiReader(bytes.NewReader(make([]byte, 4<<20)))) // chunked
	require.NoError(t, err)
	req.Header.Set("Authorization", "Bearer x")
	resp, err := c.http.Do(req)
	if err == nil { // else the connection was closed while it still wrote
		require.Equal(t, 413, resp.StatusCode)
		resp.Body.Close()
	}
	for _, raw := range []string{
		"\x00\x01\x02\r\n\r\n",
		"POST /emails HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
		"POST /emails HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
		"GET / HTTP/1.1\r\nX: " + strings.Repeat("x", 1<<17) + "\r\n\r\n",
	} {
		nc, err := net.Dial("tcp", c.srv.Addr())
		require.NoError(t, err)
		_, _ = io.WriteString(nc, raw)
		_ = nc.SetReadDeadline(time.Now().Add(5 * time.Second))
		line, err := bufio.NewReader(nc).ReadString('\n')
		if err == nil {
			require.Regexp(t, `^HTTP/1\.1 4\d\d `, line)
		}
		nc.Close()
	}
	// A client that never finishes its body is bounded.
	nc, err := net.Dial("tcp", c.srv.Addr())
	require.NoError(t, err)
	defer nc.Close()
	fmt.Fprint(nc, "POST /emails HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
	_, err = io.ReadAll(nc)
	require.NoError(t, err, "closed by the server")
	c.ok(c.send("k", "ann@x.test"))
	require.NoError(t, c.settled())
}

func TestRulesAreChecked(t *testing.T) {
	for name, r := range map[string]Rule{
		"unknown stage":         On("dot", Drop).Rule(),
		"greylist":              On(StageRequest, script.Greylist).For(time.Hour).Rule(),
		"unknown error":         On(StageRequest, Reply).Error("no_such").Rule(),
		"wrong code for error":  On(StageRequest, Reply).Error("daily_quota_exceeded").Code(500).Rule(),
		"no status":             On(StageRequest, Reply).Code(299).Rule(),
		"success at the head":   On(StageHeaders, Reply).Code(200).Rule(),
		"reply in the body":     On(StageBody, Reply).Code(500).Rule(),
		"bounce of a bad type":  On(StageLifecycle, Bounce).Error("Hard").Rule(),
		"error without a reply": On(StageRequest, Drop).Error("not_found").Rule(),
		"delay without time":    On(StageWebhook, Delay).Rule(),
	} {
		_, err := Start(Options{Rules: []Rule{r}})
		require.Error(t, err, name)
	}
	for _, opt := range []Options{
		{Idempotency: Idempotency{Compare: "loose"}},
		{Idempotency: Idempotency{Scope: "world"}},
		{APIKeys: map[string]Access{"re_1": "root"}},
		{Addr: "nowhere:x"},
	} {
		_, err := Start(opt)
		require.Error(t, err)
	}
	for _, p := range presets() {
		require.NoError(t, vocabulary.Validate(p.Rule), p.Name)
	}
}
