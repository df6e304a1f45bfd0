package resendapi

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"mailproof/fakes/ledger/tally"
)

func TestSameKeySamePayload(t *testing.T) {
	c := start(t, Options{})
	first := c.ok(c.send("ticket:1", "ann@x.test"))
	again := c.ok(c.send("ticket:1", "ann@x.test"))
	require.Equal(t, first.body, again.body)
	a := c.last()
	require.True(t, a.Deduplicated)
	require.False(t, a.Stored || a.Breach)
	require.Empty(t, a.Findings)
	v := c.srv.Verdict("ticket:1")
	require.Equal(t, "once", v.Verdict)
	require.Equal(t, 2, v.Attempts)
	require.Equal(t, 1, v.Deduplicated)
}

func TestSameKeyOtherPayload(t *testing.T) {
	c := start(t, Options{})
	c.ok(c.send("ticket:1", "ann@x.test"))
	r := c.send("ticket:1", "bob@x.test")
	require.Equal(t, 409, r.status)
	require.Equal(t, string(must(409, "invalid_idempotent_request").body()), r.body)
	require.Equal(t, []string{FindingChangedPayload}, c.last().Findings)
	require.False(t, c.last().Stored)
}

func TestScopeIsKeyMethodAndEndpoint(t *testing.T) {
	c := start(t, Options{})
	c.ok(c.send("k", "ann@x.test"))
	c.ok(c.do("POST", "/emails/batch", "["+mailTo("ann@x.test")+"]", "Idempotency-Key", "k"))
	c.key = "re_other"
	c.ok(c.send("k", "ann@x.test"))
	require.EqualValues(t, 2, c.srv.Totals().Stored, "the API key does not count")

	c = start(t, Options{Idempotency: Idempotency{Scope: ScopeCredential}})
	c.ok(c.send("k", "ann@x.test"))
	c.key = "re_other"
	c.ok(c.send("k", "ann@x.test"))
	require.EqualValues(t, 2, c.srv.Totals().Stored)
}

func TestKeyLength(t *testing.T) {
	c := start(t, Options{})
	c.ok(c.send("x", "ann@x.test"))
	c.ok(c.send(strings.Repeat("x", 256), "ann@x.test"))
	for _, key := range []string{"", strings.Repeat("x", 257)} {
		r := c.do("POST", "/emails", mailTo("ann@x.test"), "Idempotency-Key", key)
		require.Equal(t, 400, r.status)
		require.Equal(t, `{"statusCode":400,"message":"Idempotency keys, if present, must have between 1 and 256 characters.","name":"invalid_idempotency_key"}`, r.body)
	}
}

// TestKeyLives24Hours moves the clock: a moment before its end the key holds,
// at its end it is over.
func TestKeyLives24Hours(t *testing.T) {
	c := start(t, Options{})
	first := c.ok(c.send("k", "ann@x.test"))
	c.srv.Advance(24*time.Hour - time.Minute)
	require.Equal(t, first.body, c.ok(c.send("k", "ann@x.test")).body)
	c.srv.Advance(time.Minute)
	late := c.ok(c.send("k", "ann@x.test"))
	require.NotEqual(t, first.body, late.body)
	require.Contains(t, c.last().Findings, FindingLate)
	require.False(t, c.last().Breach, "the server kept its word")
	v := c.srv.Verdict("k")
	require.Equal(t, "doubled", v.Verdict)
	require.Contains(t, v.Findings, FindingLate)
}

// TestInFlight holds a request at the point where it has the key.
func TestInFlight(t *testing.T) {
	for _, first := range []bool{false, true} {
		t.Run(fmt.Sprintf("compare first %v", first), func(t *testing.T) {
			opt := rules(On(StageReserved, HoldUntilReleased).First(1))
			opt.Idempotency.CompareFirst = first
			c := start(t, opt)
			done := make(chan response)
			go func() { done <- c.send("k", "ann@x.test") }()
			h, err := c.srv.AwaitHold(soon(t), nil)
			require.NoError(t, err)
			require.Equal(t, "k", h.Key)
			require.Equal(t, "ann@x.test", h.Recipient)

			r := c.send("k", "ann@x.test")
			require.Equal(t, 409, r.status)
			require.Equal(t, string(must(409, "concurrent_idempotent_requests").body()), r.body)
			r = c.send("k", "bob@x.test")
			require.Equal(t, 409, r.status)
			require.Equal(t, first, strings.Contains(r.body, "invalid_idempotent_request"), r.body)
			require.Zero(t, c.srv.Totals().Stored)
			require.True(t, c.srv.Release(h.ID))
			c.ok(<-done)
			c.ok(c.send("k", "ann@x.test"))
			require.EqualValues(t, 1, c.srv.Totals().Stored)
		})
	}
}

// TestThousandAtOnce: however they meet, one mail.
func TestThousandAtOnce(t *testing.T) {
	c := start(t, Options{})
	tr := transport(200)
	c.http.Transport = tr
	defer tr.CloseIdleConnections()
	var wg sync.WaitGroup
	var accepted, refused atomic.Int64
	ids := sync.Map{}
	for range 1000 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			r := c.send("ticket:1", "ann@x.test")
			switch {
			case r.err != nil:
				t.Error(r.err)
			case r.status == 200:
				accepted.Add(1)
				ids.Store(r.body, true)
			case r.status == 409 && strings.Contains(r.body, "concurrent_idempotent_requests"):
				refused.Add(1)
			default:
				t.Errorf("%d %s", r.status, r.body)
			}
		}()
	}
	wg.Wait()
	distinct := 0
	ids.Range(func(any, any) bool { distinct++; return true })
	require.Equal(t, 1, distinct)
	require.EqualValues(t, 1000, accepted.Load()+refused.Load())
	v := c.srv.Verdict("ticket:1")
	require.Equal(t, "once", v.Verdict)
	require.Equal(t, 1000, v.Attempts)
	require.EqualValues(t, accepted.Load()-1, v.Deduplicated)
	require.EqualValues(t, 1, c.srv.Totals().Stored)
}

func TestPayloadCompare(t *testing.T) {
	plain := `{"from":"s@shop.test","to":["a@x.test"],"subject":"x","text":"x"}`
	same := ` {"to": "a@x.test", "cc": [], "text":"x","subject":"x","from":"s@shop.test"}`
	t.Run("bytes", func(t *testing.T) {
		c := start(t, Options{})
		c.ok(c.do("POST", "/emails", plain, "Idempotency-Key", "k"))
		require.Equal(t, 409, c.do("POST", "/emails", same, "Idempotency-Key", "k").status)
	})
	t.Run("canonical", func(t *testing.T) {
		c := start(t, Options{Idempotency: Idempotency{Compare: CompareCanonical}})
		c.ok(c.do("POST", "/emails", plain, "Idempotency-Key", "k"))
		c.ok(c.do("POST", "/emails", same, "Idempotency-Key", "k"))
		require.Equal(t, []string{FindingChangedBytes}, c.last().Findings)
		r := c.do("POST", "/emails", strings.Replace(same, `"text":"x"`, `"text":"y"`, 1), "Idempotency-Key", "k")
		require.Equal(t, 409, r.status)
		batch := func(m ...string) int {
			return c.do("POST", "/emails/batch", "["+strings.Join(m, ",")+"]", "Idempotency-Key", "b").status
		}
		other := strings.Replace(plain, "a@x.test", "b@x.test", 1)
		require.Equal(t, 200, batch(plain, other))
		require.Equal(t, 200, batch(same, other))
		require.Equal(t, 409, batch(other, plain), "the order counts")
	})
}

func TestRefusalAndTheKey(t *testing.T) {
	bad := `{"from":"s@shop.test","to":["a@x.test"],"subject":"x"}`
	good := `{"from":"s@shop.test","to":["a@x.test"],"subject":"x","text":"x"}`
	c := start(t, Options{})
	require.Equal(t, 422, c.do("POST", "/emails", bad, "Idempotency-Key", "k").status)
	c.ok(c.do("POST", "/emails", good, "Idempotency-Key", "k"))

	c = start(t, Options{Idempotency: Idempotency{ValidationReservesKey: true}})
	first := c.do("POST", "/emails", bad, "Idempotency-Key", "k")
	require.Equal(t, 422, first.status)
	require.Equal(t, 409, c.do("POST", "/emails", good, "Idempotency-Key", "k").status)
	require.Equal(t, first.body, c.do("POST", "/emails", bad, "Idempotency-Key", "k").body)
	require.Zero(t, c.srv.Totals().Stored)
}

// TestFailureBeforeTheWorkLeavesTheKey: after each kind of failure before the
// work, the same key goes through.
func TestFailureBeforeTheWorkLeavesTheKey(t *testing.T) {
	for _, stage := range []Stage{StageHeaders, StageRequest, StageReserved} {
		for _, b := range []Builder{
			On(stage, Reply).Code(500), On(stage, Reply).Code(503), On(stage, Reply).Code(429), On(stage, Drop), On(stage, Reset),
			On(stage, Hang).For(time.Millisecond),
		} {
			c := start(t, rules(b.First(1)))
			r := c.send("k", "ann@x.test")
			require.True(t, r.err != nil || r.status >= 429, "%v", b.Rule())
			require.Zero(t, c.srv.Totals().Stored)
			c.ok(c.send("k", "ann@x.test"))
			v := c.srv.Verdict("k")
			require.Equal(t, "once", v.Verdict, "%v", b.Rule())
			require.Zero(t, v.Breaches, "%v", b.Rule())
			require.Zero(t, v.Deduplicated)
		}
	}
}

// plainKeys is the plainest form of keys: one map. What is known of a key is
// forgotten two lifetimes after its answer, or once max later answers came.
type plainKeys struct {
	opt     Idempotency
	max     int
	known   map[int]plainKey
	answers int
	over    int // answers up to this one are forgotten
	times   []time.Duration
}

type plainKey struct {
	payload, answer int
	at              time.Duration
	running         bool
	expired         bool
	number          int // of its answer, from 1
}

func (p *plainKeys) find(key int) (plainKey, bool) {
	m, ok := p.known[key]
	if !ok || (!m.running && m.number <= p.over) {
		return plainKey{}, false
	}
	return m, true
}

func (p *plainKeys) begin(key, payload int, now time.Duration) (claim, plainKey, bool) {
	for p.over = max(p.over, p.answers-p.max); p.over < p.answers && now-p.times[p.over] >= 2*p.opt.Lifetime; {
		p.over++
	}
	m, seen := p.find(key)
	same := m.payload == payload
	switch {
	case !seen:
	case m.running && (same || !p.opt.CompareFirst):
		return concurrent, m, seen
	case m.running:
		return conflicted, m, seen
	case m.expired || now-m.at >= p.opt.Lifetime:
	case !same:
		return conflicted, m, seen
	default:
		return replayed, m, seen
	}
	p.known[key] = plainKey{payload: payload, running: true}
	return claimed, m, seen
}

func (p *plainKeys) settle(key, answer int, now time.Duration) {
	m := p.known[key]
	p.answers++
	p.times = append(p.times, now)
	p.known[key] = plainKey{payload: m.payload, answer: answer, at: now, number: p.answers}
}

func (p *plainKeys) expire(key int, now time.Duration) bool {
	m, ok := p.find(key)
	if !ok || m.running || m.expired || now-m.at >= p.opt.Lifetime {
		return false
	}
	m.expired = true
	p.known[key] = m
	return true
}

// TestKeysModel compares the keys, most of which stand in files, with the
// plainest model of them, over any order of requests and steps of the clock.
func TestKeysModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		opt := Idempotency{Lifetime: 24 * time.Hour, Compare: CompareBytes, CompareFirst: rapid.Bool().Draw(t, "compare first")}
		limit := rapid.SampledFrom([]int{1, 3, 1000}).Draw(t, "limit")
		k := newKeys(opt, limit, func(err error) { t.Fatal(err) })
		k.number = tally.New(rapid.IntRange(2, 5).Draw(t, "in memory"))
		defer func() { require.NoError(t, k.close()) }()
		p := &plainKeys{opt: opt, max: limit, known: map[int]plainKey{}}
		now := time.Duration(0)
		name := func(n int) digest { return digestOf("key", fmt.Sprint(n)) }
		body := func(n int) digest { return digestOf("body", fmt.Sprint(n)) }
		anyKey := rapid.IntRange(0, 9)
		t.Repeat(map[string]func(*rapid.T){
			"clock": func(t *rapid.T) { now += time.Duration(rapid.IntRange(0, 30).Draw(t, "hours")) * time.Hour },
			"begin": func(t *rapid.T) {
				key, payload := anyKey.Draw(t, "key"), rapid.IntRange(0, 1).Draw(t, "payload")
				want, m, seen := p.begin(key, payload, now)
				got, old, known := k.begin(name(key), body(payload), body(payload), now)
				require.Equal(t, want, got)
				require.Equal(t, seen, known)
				require.Equal(t, m.expired, old.expired)
				if got != replayed {
					return
				}
				if m.answer >= 0 {
					require.EqualValues(t, m.answer, old.serial)
				} else {
					require.Equal(t, storedAnswer{422, fmt.Append(nil, m.answer)}, old.kept)
				}
			},
			"settle": func(t *rapid.T) {
				key, answer := anyKey.Draw(t, "key"), rapid.IntRange(-99, 99).Draw(t, "answer")
				if m := p.known[key]; !m.running {
					t.Skip()
				}
				p.settle(key, answer, now)
				if answer >= 0 {
					k.settle(name(key), now, int64(answer), nil)
				} else {
					k.settle(name(key), now, -1, &storedAnswer{422, fmt.Append(nil, answer)})
				}
			},
			"release": func(t *rapid.T) {
				key := anyKey.Draw(t, "key")
				k.release(name(key))
				if p.known[key].running {
					delete(p.known, key)
				}
			},
			"expire": func(t *rapid.T) {
				key := anyKey.Draw(t, "key")
				require.Equal(t, p.expire(key, now), k.expire(name(key), now))
			},
			"reset": func(t *rapid.T) {
				if rapid.IntRange(0, 9).Draw(t, "rarely") == 0 {
					k.reset()
					*p = plainKeys{opt: opt, max: limit, known: map[int]plainKey{}}
				}
			},
		})
	})
}
