package mail_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"mailproof/fakes/resendapi"
	"mailproof/system/contract"
	"mailproof/system/mail"
	"mailproof/system/mail/mailtest"
)

// resend shows the fake API to the suite.
type resend struct {
	srv    *resendapi.Server
	sender *mail.ResendSender
}

func startResend(t testing.TB, opt resendapi.Options) *resendapi.Server {
	t.Helper()
	opt.AllowExampleDomains = true
	srv, err := resendapi.Start(opt)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, srv.Close()) })
	return srv
}

func (p *resend) Sender(t *testing.T, limit time.Duration) mail.EmailSender {
	p.sender = resendSender(t, mail.ResendConfig{URL: p.srv.URL, SendTimeout: limit})
	return p.sender
}

func resendSender(t testing.TB, cfg mail.ResendConfig) *mail.ResendSender {
	t.Helper()
	cfg.APIKey, cfg.UserAgent = "re_test", "notifyd-1.ticket-1"
	s, err := mail.NewResendSender(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func (p *resend) Behave(t *testing.T, b mailtest.Behaviour) {
	p.srv.ClearRules()
	rule := map[mailtest.Behaviour]resendapi.Builder{
		mailtest.RefuseForNow:  resendapi.On(resendapi.StageHeaders, resendapi.Reply).Code(503),
		mailtest.RefuseForGood: resendapi.On(resendapi.StageRequest, resendapi.Reply).Code(422),
		mailtest.RefuseClient:  resendapi.On(resendapi.StageRequest, resendapi.Reply).Code(401),
		// An HTTP server says nothing before the last byte. What a sender can see
		// is that it stops taking the request: see resendMail.
		mailtest.DropBefore:      resendapi.On(resendapi.StageBody, resendapi.Drop).Bytes(1000),
		mailtest.HangBefore:      resendapi.On(resendapi.StageConnect, resendapi.Hang),
		mailtest.StoreThenDrop:   resendapi.On(resendapi.StageStored, resendapi.Drop),
		mailtest.StoreThenReset:  resendapi.On(resendapi.StageStored, resendapi.Reset),
		mailtest.StoreThenHang:   resendapi.On(resendapi.StageStored, resendapi.Hang),
		mailtest.StoreThenNoise:  resendapi.On(resendapi.StageStored, resendapi.Garbage),
		mailtest.StoreThenHalf:   resendapi.On(resendapi.StageStored, resendapi.Cut),
		mailtest.AcceptThenClose: resendapi.On(resendapi.StageReplied, resendapi.Drop),
	}
	if b == mailtest.Accept {
		return
	}
	r, ok := rule[b]
	require.True(t, ok, "behaviour %q", b)
	_, err := p.srv.AddRule(r.Rule())
	require.NoError(t, err)
}

// Quiet waits until the sender's side has the end of each kept connection.
func (p *resend) Quiet(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool { return p.sender.AliveIdle() == 0 }, 10*time.Second, time.Millisecond)
}

func (p *resend) Copies(key string) int { return p.srv.Verdict(key).Copies }

func (p *resend) Hash(key string) string {
	var hash string
	for _, a := range p.srv.Ledger() {
		if a.Key == key && a.Stored {
			hash = a.BodyHash
		}
	}
	return hash
}

// earlyBody is longer than all buffers between two processes (Linux: 4 MiB of
// the sender, 6 MiB of the receiver at most).
var earlyBody = sync.OnceValue(func() []byte { return resendBody("early", strings.Repeat("x", 16<<20)) })

// resendMail is a request with its key. The mails of the behaviours "before the
// commit" cannot leave the process as long as nobody reads them.
func resendMail(key string) mail.Message {
	m := mail.Message{From: "tickets@example.org", To: "bob@example.com", IdempotencyKey: key}
	if m.Bytes = resendBody(key, "Your ticket."); key == "early" {
		m.Bytes = earlyBody()
	}
	return m
}

func resendBody(key, text string) []byte {
	b, err := json.Marshal(map[string]any{
		"from": "tickets@example.org", "to": []string{"bob@example.com"}, "subject": "ticket " + key, "text": text,
		"headers": map[string]string{"X-Dedupe-Key": key},
	})
	if err != nil {
		panic(err) // strings always encode
	}
	return b
}

func TestResendSenderPassesTheSuite(t *testing.T) {
	t.Parallel()
	earlyBody() // outside of what is timed
	mailtest.Run(t, mailtest.Suite{
		New:  func(t *testing.T) mailtest.Provider { return &resend{srv: startResend(t, resendapi.Options{})} },
		Mail: resendMail,
		Longer: func(m mail.Message, tail string) mail.Message {
			m.Bytes = resendBody(m.IdempotencyKey, "Your ticket."+tail)
			return m
		},
	})
}

// Every answer that the API documents, and what else may stand in its place.
func TestResendAnswers(t *testing.T) {
	t.Parallel()
	name := func(n string) string { return `{"statusCode":0,"message":"m","name":"` + n + `"}` }
	for _, c := range []struct {
		status     int
		body       string
		want, half string // half: the request was not sent whole
	}{
		{200, `{"id":"1"}`, "accepted", "transient"},
		{201, `{"id":"1"}`, "accepted", "transient"},
		{200, `{}`, "ambiguous", "transient"},
		{200, `{"id":""}`, "ambiguous", "transient"},
		{200, ``, "ambiguous", "transient"},
		{200, `<html>`, "ambiguous", "transient"},
		{204, ``, "ambiguous", "transient"},
		{302, ``, "lane", "lane"},
		{303, ``, "ambiguous", "transient"},
		{400, name("validation_error"), "permanent", "permanent"},
		{400, name("invalid_idempotency_key"), "permanent", "permanent"},
		{401, name("missing_api_key"), "lane", "lane"},
		{403, name("validation_error"), "lane", "lane"},
		{404, name("not_found"), "lane", "lane"},
		{405, name("method_not_allowed"), "lane", "lane"},
		{408, ``, "transient", "transient"},
		{409, name("concurrent_idempotent_requests"), "transient", "transient"},
		{409, name("resource_locked"), "transient", "transient"},
		{409, name("invalid_idempotent_request"), "ambiguous", "ambiguous"},
		{413, ``, "permanent", "permanent"},
		{422, name("missing_required_field"), "permanent", "permanent"},
		{429, name("rate_limit_exceeded"), "transient", "transient"},
		{429, name("daily_quota_exceeded"), "lane", "lane"},
		{429, name("monthly_quota_exceeded"), "lane", "lane"},
		{451, name("security_error"), "permanent", "permanent"},
		{500, name("application_error"), "ambiguous", "transient"},
		{502, `<html>`, "ambiguous", "transient"},
		{503, name("service_unavailable"), "transient", "transient"},
		{504, ``, "ambiguous", "transient"},
		{520, ``, "ambiguous", "transient"},
	} {
		for whole, want := range map[bool]string{true: c.want, false: c.half} {
			id, err := mail.ClassifyResend(c.status, http.Header{}, []byte(c.body), whole)
			require.Equal(t, want, outcome(err), "%d %s whole=%t", c.status, c.body, whole)
			require.Equal(t, want == "accepted", id != "", "%d %s", c.status, c.body)
		}
	}
}

// 429 costs nothing and says when to come again.
func TestResendThrottleIsFree(t *testing.T) {
	t.Parallel()
	srv := startResend(t, resendapi.Options{RateLimit: 1})
	s := resendSender(t, mail.ResendConfig{URL: srv.URL})
	var throttled *mail.TransientError
	for i := 0; throttled == nil && i < 50; i++ {
		_, err := s.Send(t.Context(), resendMail(fmt.Sprint("k", i)), nil)
		throttled, _ = errors.AsType[*mail.TransientError](err)
	}
	require.NotNil(t, throttled)
	require.True(t, throttled.Free)
	require.Positive(t, throttled.RetryAfter)
}

// The same request again, after each way of losing an answer: one copy, the id
// of the first, and no request that differs by a byte.
func TestResendSameKeyIsOneMail(t *testing.T) {
	t.Parallel()
	for name, r := range map[string]resendapi.Builder{
		"drop":  resendapi.On(resendapi.StageStored, resendapi.Drop),
		"reset": resendapi.On(resendapi.StageStored, resendapi.Reset),
		"500":   resendapi.On(resendapi.StageStored, resendapi.Reply).Code(500),
		"no id": resendapi.On(resendapi.StageStored, resendapi.NoID),
		"half":  resendapi.On(resendapi.StageStored, resendapi.Cut),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv := startResend(t, resendapi.Options{Rules: []resendapi.Rule{r.Times(1).Rule()}})
			s := resendSender(t, mail.ResendConfig{URL: srv.URL})
			_, err := s.Send(t.Context(), resendMail("k"), nil)
			require.Equal(t, "ambiguous", outcome(err), "%v", err)
			require.Len(t, srv.Ledger(), 1, "one call, one request")
			id, err := s.Send(t.Context(), resendMail("k"), nil)
			require.NoError(t, err)
			require.NotEmpty(t, id)
			require.Equal(t, 1, srv.Verdict("k").Copies)
			for _, a := range srv.Ledger() {
				require.Empty(t, a.Findings)
				require.Equal(t, "notifyd-1.ticket-1", a.Client)
			}
		})
	}
}

// Two requests of one key at once: the second is told to come again.
func TestResendConcurrentKey(t *testing.T) {
	t.Parallel()
	srv := startResend(t, resendapi.Options{Rules: []resendapi.Rule{resendapi.On(resendapi.StageReserved, resendapi.HoldUntilReleased).Times(1).Rule()}})
	s := resendSender(t, mail.ResendConfig{URL: srv.URL})
	first := make(chan error, 1)
	go func() {
		_, err := s.Send(t.Context(), resendMail("k"), nil)
		first <- err
	}()
	hold, err := srv.AwaitHold(t.Context(), nil)
	require.NoError(t, err)
	_, err = s.Send(t.Context(), resendMail("k"), nil)
	require.Equal(t, "transient", outcome(err), "%v", err)
	require.True(t, srv.Release(hold.ID))
	require.NoError(t, <-first)
	require.Equal(t, 1, srv.Verdict("k").Copies)
}

// The key that was used for other contents is no mail that was sent, and none
// that was not.
func TestResendKeyOfAnotherMail(t *testing.T) {
	t.Parallel()
	srv := startResend(t, resendapi.Options{})
	s := resendSender(t, mail.ResendConfig{URL: srv.URL})
	_, err := s.Send(t.Context(), resendMail("k"), nil)
	require.NoError(t, err)
	other := resendMail("k")
	other.Bytes = resendBody("k", "Another ticket.")
	_, err = s.Send(t.Context(), other, nil)
	require.Equal(t, "ambiguous", outcome(err), "%v", err)
}

// A server that refuses before it has the request (a proxy with a limit) is
// understood although the request never went out whole.
func TestResendAnswerBeforeTheRequestIsWhole(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			_, err = c.Write([]byte("HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"))
			if tcp, ok := c.(*net.TCPConn); ok && err == nil {
				err = tcp.CloseWrite()
			}
			defer c.Close()
		}
		served <- errors.Join(err, l.Close())
		buf := make([]byte, 1<<20)
		for err == nil {
			_, err = c.Read(buf)
		}
	}()
	s := resendSender(t, mail.ResendConfig{URL: "http://" + l.Addr().String(), SendTimeout: 5 * time.Second})
	asked := false
	_, err = s.Send(t.Context(), resendMail("early"), func() error { asked = true; return nil })
	require.Equal(t, "permanent", outcome(err), "%v", err)
	require.False(t, asked)
	require.NoError(t, <-served)
}

// Bytes that were stored for one transport are refused by the other.
func TestStoredForAnotherTransport(t *testing.T) {
	t.Parallel()
	r := resendSender(t, mail.ResendConfig{URL: startResend(t, resendapi.Options{}).URL})
	_, err := r.Send(t.Context(), mailtest.Mail("k"), nil)
	require.Equal(t, "permanent", outcome(err), "%v", err)
	s := sender(t, mail.SMTPConfig{Addr: "127.0.0.1:1"})
	_, err = s.Send(t.Context(), resendMail("k"), nil)
	require.Equal(t, "permanent", outcome(err), "%v", err)
}

func TestResendConfigIsChecked(t *testing.T) {
	t.Parallel()
	good := mail.ResendConfig{URL: "https://api.resend.com", APIKey: "re_1", UserAgent: "x"}
	_, err := mail.NewResendSender(good)
	require.NoError(t, err)
	for want, change := range map[string]func(*mail.ResendConfig){
		"in the clear":       func(c *mail.ResendConfig) { c.URL = "http://api.resend.com" },
		"must be https":      func(c *mail.ResendConfig) { c.URL = "api.resend.com" },
		"no user, query":     func(c *mail.ResendConfig) { c.URL = "https://a:b@api.resend.com" },
		"API key":            func(c *mail.ResendConfig) { c.APIKey = "a\r\nb" },
		"User-Agent":         func(c *mail.ResendConfig) { c.UserAgent = "" },
		"not be negative":    func(c *mail.ResendConfig) { c.SendTimeout = -1 },
		"size must not be n": func(c *mail.ResendConfig) { c.Connections = -1 },
	} {
		c := good
		change(&c)
		_, err := mail.NewResendSender(c)
		require.ErrorContains(t, err, want)
		require.NotContains(t, err.Error(), "re_1")
	}
}

// The same row gives the same request, whatever stands in it, and the API takes
// it.
func TestRenderResendIsStable(t *testing.T) {
	t.Parallel()
	r, err := mail.NewRenderer(mail.RendererConfig{From: "tickets@example.org", FromName: `Büro "A\B"`})
	require.NoError(t, err)
	srv := startResend(t, resendapi.Options{})
	s := resendSender(t, mail.ResendConfig{URL: srv.URL})
	n := 0
	rapid.Check(t, func(t *rapid.T) {
		n++
		in := mail.Rendering{
			Template: contract.TemplateTicketConfirmed, DedupeKey: fmt.Sprint("ticket:", n), BookingID: rapid.String().Draw(t, "booking"),
			To: "bob@example.com", Date: time.Unix(1_700_000_000, 0),
			Data: contract.EventData{Name: rapid.String().Draw(t, "name"), Event: rapid.String().Draw(t, "event"), Locale: rapid.SampledFrom([]string{"", "vi", "en"}).Draw(t, "locale")},
		}
		one, err := r.RenderResend(in)
		require.NoError(t, err)
		two, err := r.RenderResend(in)
		require.NoError(t, err)
		require.True(t, bytes.Equal(one.Bytes, two.Bytes))
		require.NotContains(t, strings.ToLower(string(one.Bytes)), "idempotency-key", "OB-05")
		_, err = s.Send(t.Context(), one, nil)
		require.NoError(t, err)
	})
	for _, a := range srv.Ledger() {
		require.Empty(t, a.Findings, a.Key)
	}
}

// A tag gives the key back; one that is none of ours gives none.
func TestResendTag(t *testing.T) {
	t.Parallel()
	legal := regexp.MustCompile(`^[A-Za-z0-9_-]{1,256}$`)
	for _, key := range []string{"k", "ticket:0198f2d7-7c6e-7d1a-9a2b-0123456789ab:v2", strings.Repeat("~", 192)} {
		tag := mail.ResendTag(key)
		require.Regexp(t, legal, tag)
		got, ok := mail.ResendTagged(tag)
		require.True(t, ok)
		require.Equal(t, key, got)
	}
	long := strings.Repeat("k", 193)
	require.Regexp(t, legal, mail.ResendTag(long))
	require.NotEqual(t, mail.ResendTag(long), mail.ResendTag(long+"k"))
	for _, tag := range []string{"", "!", "YQ==", "_", mail.ResendTag(long), "IA"} {
		_, ok := mail.ResendTagged(tag)
		require.False(t, ok, tag)
	}
}
