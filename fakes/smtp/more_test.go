package smtp_test

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	netsmtp "net/smtp"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/emersion/go-sasl"
	gosmtp "github.com/emersion/go-smtp"
	"github.com/stretchr/testify/require"

	"mailproof/fakes/script"
	"mailproof/fakes/smtp"
)

func tlsServer(t *testing.T, opt smtp.Options) (*smtp.Server, *tls.Config) {
	t.Helper()
	conf, pool, err := smtp.SelfSigned()
	require.NoError(t, err)
	opt.TLS = conf
	return start(t, opt), &tls.Config{RootCAs: pool, ServerName: "localhost"}
}

// TestFaultsInsideTLS: after STARTTLS every fault still works.
func TestFaultsInsideTLS(t *testing.T) {
	srv, conf := tlsServer(t, smtp.Options{
		Users: map[string]string{"shop": "secret"},
		Rules: []smtp.Rule{
			smtp.On(smtp.StageData, smtp.Reply).Code(451).Times(1).Rule(),
			smtp.On(smtp.StageStored, smtp.Drop).Key("k2").Rule(),
		},
	})
	c, err := gosmtp.DialStartTLS(srv.Addr(), conf)
	require.NoError(t, err)
	defer c.Close()
	ok, _ := c.Extension("STARTTLS")
	require.False(t, ok, "not offered twice")
	require.Equal(t, 535, code(c.Auth(sasl.NewPlainClient("", "shop", "wrong"))))
	require.NoError(t, c.Auth(sasl.NewLoginClient("shop", "secret")))
	require.NoError(t, c.Mail("a@example.com", nil))
	require.NoError(t, c.Rcpt("b@example.com", nil))
	_, err = c.Data()
	require.Equal(t, 451, code(err))
	w, err := c.Data()
	require.NoError(t, err)
	_, err = io.WriteString(w, mail("k1"))
	require.NoError(t, err)
	require.NoError(t, w.Close())
	require.Error(t, c.SendMail("a@example.com", []string{"b@example.com"}, strings.NewReader(mail("k2"))))
	rows := finished(t, srv, 3)
	require.Equal(t, "data:451", rows[0].Fault)
	require.True(t, rows[1].Stored && rows[1].ReplyWritten)
	require.True(t, rows[2].Stored && !rows[2].ReplyWritten)
}

// TestTLSAndAuthFaults: what a client meets before it may send.
func TestTLSAndAuthFaults(t *testing.T) {
	for name, tc := range map[string]struct {
		rule smtp.Builder
		want func(*testing.T, error)
	}{
		"454 to STARTTLS":        {smtp.On(smtp.StageSTARTTLS, smtp.Reply).Code(454), wantCode(454)},
		"handshake fails":        {smtp.On(smtp.StageSTARTTLS, smtp.BreakTLS), wantBroken},
		"drop at STARTTLS":       {smtp.On(smtp.StageSTARTTLS, smtp.Drop), wantBroken},
		"garbage to STARTTLS":    {smtp.On(smtp.StageSTARTTLS, smtp.Garbage), wantBroken},
		"454 to AUTH":            {smtp.On(smtp.StageAuth, smtp.Reply).Code(454), wantCode(454)},
		"535 to AUTH":            {smtp.On(smtp.StageAuth, smtp.Reply).Code(535), wantCode(535)},
		"drop at AUTH":           {smtp.On(smtp.StageAuth, smtp.Drop), wantBroken},
		"dripped answer to AUTH": {smtp.On(smtp.StageAuth, smtp.Drip).For(time.Millisecond), func(t *testing.T, err error) { require.NoError(t, err) }},
	} {
		t.Run(name, func(t *testing.T) {
			srv, conf := tlsServer(t, smtp.Options{Rules: []smtp.Rule{tc.rule.Rule()}})
			tc.want(t, secureHello(srv.Addr(), conf))
			require.Empty(t, srv.Ledger())
			require.Equal(t, 1, srv.Rules()[0].Struck)
		})
	}
}

func secureHello(addr string, conf *tls.Config) error {
	c, err := gosmtp.DialStartTLS(addr, conf)
	if err != nil {
		return err
	}
	defer c.Close()
	c.CommandTimeout = 2 * time.Second
	return c.Auth(sasl.NewPlainClient("", "any", "body"))
}

func wantCode(n int) func(*testing.T, error) {
	return func(t *testing.T, err error) { require.Equal(t, n, code(err), "%v", err) }
}

func wantBroken(t *testing.T, err error) {
	require.Error(t, err)
	require.Zero(t, code(err), "%v", err)
}

// TestNothingSaidInClearCountsInTLS: commands sent behind STARTTLS in the same
// packet are dropped (CVE-2011-0411), and the session starts anew.
func TestNothingSaidInClearCountsInTLS(t *testing.T) {
	srv, conf := tlsServer(t, smtp.Options{})
	c := raw(t, srv.Addr())
	c.write("STARTTLS\r\nMAIL FROM:<injected@example.com>\r\n")
	c.expect("220")
	secure := tls.Client(c.nc, conf)
	require.NoError(t, secure.Handshake())
	c.nc = secure
	c.br.Reset(secure)
	c.cmd("MAIL FROM:<a@example.com>", "503")
	c.cmd("EHLO again", "250")
	c.cmd("RCPT TO:<b@example.com>", "502")
	require.Empty(t, srv.Ledger())
}

// TestHeldOutsideOfMails holds at the stages that TestHeldEverywhere's client
// does not pass.
func TestHeldOutsideOfMails(t *testing.T) {
	for _, tc := range []struct {
		stage      smtp.Stage
		line, want string
	}{
		{smtp.StageSTARTTLS, "STARTTLS", "220"},
		{smtp.StageAuth, "AUTH PLAIN AHUAcA==", "235"},
		{smtp.StageRset, "RSET", "250"},
		{smtp.StageNoop, "NOOP", "250"},
		{smtp.StageNoop, "VRFY somebody", "252"},
	} {
		t.Run(tc.line, func(t *testing.T) {
			srv, _ := tlsServer(t, smtp.Options{Rules: []smtp.Rule{smtp.On(tc.stage, smtp.HoldUntilReleased).Rule()}})
			c := raw(t, srv.Addr())
			c.write(tc.line + "\r\n")
			h, err := srv.AwaitHold(ctx(t), nil)
			require.NoError(t, err)
			require.Equal(t, tc.stage, h.Stage)
			require.Zero(t, h.Attempt)
			require.True(t, srv.Release(h.ID))
			c.expect(tc.want)
		})
	}
}

func TestCapabilities(t *testing.T) {
	strip := smtp.On(smtp.StageEHLO, smtp.StripCaps).Rule()
	strip.Action.Strip = []string{"PIPELINING", "chunking", "AUTH", "STARTTLS", "LIMITS"}
	srv, _ := tlsServer(t, smtp.Options{Rules: []smtp.Rule{strip}})
	nc, err := net.Dial("tcp", srv.Addr())
	require.NoError(t, err)
	defer nc.Close()
	c, err := gosmtp.NewClient(nc), nil
	require.NoError(t, err)
	require.NoError(t, c.Hello("x"))
	for _, gone := range strip.Action.Strip {
		ok, _ := c.Extension(strings.ToUpper(gone))
		require.False(t, ok, gone)
	}
	ok, _ := c.Extension("8BITMIME")
	require.True(t, ok)
}

func TestAnswersThatContradictThemselves(t *testing.T) {
	srv := start(t, smtp.Options{Rules: []smtp.Rule{
		smtp.On(smtp.StageMail, smtp.Mismatch).Times(1).Rule(),
		smtp.On(smtp.StageRcpt, smtp.Disagree).Times(1).Rule(),
		smtp.On(smtp.StageNoop, smtp.Reply).Code(500).Times(1).Rule(),
		smtp.On(smtp.StageRset, smtp.Drop).Rule(),
	}})
	c := raw(t, srv.Addr())
	c.write("MAIL FROM:<a@example.com>\r\n")
	require.Contains(t, c.expect("250"), "451-")
	require.Contains(t, c.cmd("RCPT TO:<b@example.com>", "250"), "250 5.0.0")
	c.cmd("NOOP", "500")
	c.cmd("NOOP", "250")
	c.write("RSET\r\n")
	c.closed()
	finished(t, srv, 1)
}

func TestLimits(t *testing.T) {
	perMinute := smtp.On(smtp.StageMail, smtp.Rate).For(time.Minute).Rule()
	perMinute.Action.Limit = 2
	perConn := smtp.On(smtp.StageMail, smtp.Reply).Code(421).Rule()
	perConn.Match.Message = script.From(2)
	perMail := smtp.On(smtp.StageRcpt, smtp.Reply).Code(452).Rule()
	perMail.Match.RecipientNo = script.From(3)

	t.Run("rate", func(t *testing.T) {
		srv := start(t, smtp.Options{Rules: []smtp.Rule{perMinute}})
		for i, want := range []int{0, 0, 421} {
			_, err := send(t, srv.Addr(), fmt.Sprint("k", i))
			require.Equal(t, want, code(err))
		}
		srv.Advance(time.Minute)
		_, err := send(t, srv.Addr(), "k4")
		require.NoError(t, err)
	})
	t.Run("mails per connection", func(t *testing.T) {
		srv := start(t, smtp.Options{Rules: []smtp.Rule{perConn}})
		c := raw(t, srv.Addr())
		c.mail("k1", "b@example.com")
		c.expect("250")
		c.cmd("MAIL FROM:<a@example.com>", "421")
		c.closed()
	})
	t.Run("recipients per mail", func(t *testing.T) {
		srv := start(t, smtp.Options{Rules: []smtp.Rule{perMail}, MaxRecipients: 5})
		c := raw(t, srv.Addr())
		c.cmd("MAIL FROM:<a@example.com>", "250")
		c.cmd("RCPT TO:<1@example.com>", "250")
		c.cmd("RCPT TO:<2@example.com>", "250")
		c.cmd("RCPT TO:<3@example.com>", "452")
	})
	t.Run("connections at once", func(t *testing.T) {
		srv := start(t, smtp.Options{MaxConnections: 2})
		one, two := raw(t, srv.Addr()), raw(t, srv.Addr())
		_, err := send(t, srv.Addr(), "k")
		require.Equal(t, 421, code(err))
		one.cmd("QUIT", "221")
		one.closed()
		two.cmd("NOOP", "250")
	})
	t.Run("size", func(t *testing.T) {
		srv := start(t, smtp.Options{MaxMessageBytes: 1000})
		c := raw(t, srv.Addr())
		c.cmd("MAIL FROM:<a@example.com> SIZE=2000", "552")
		c.cmd("MAIL FROM:<a@example.com>", "250")
		c.cmd("RCPT TO:<b@example.com>", "250")
		c.cmd("DATA", "354")
		c.write(strings.Repeat("x", 900) + "\r\n" + strings.Repeat("y", 900) + "\r\n.\r\n")
		c.expect("552")
		c.cmd("NOOP", "250")
		a := finished(t, srv, 1)[0]
		require.Equal(t, 552, a.Code)
		require.True(t, a.ClosedWithoutStoring)
	})
	t.Run("size by BDAT", func(t *testing.T) {
		srv := start(t, smtp.Options{MaxMessageBytes: 1000})
		c := raw(t, srv.Addr())
		c.cmd("MAIL FROM:<a@example.com>", "250")
		c.cmd("RCPT TO:<b@example.com>", "250")
		c.write("BDAT 2000 LAST\r\n" + strings.Repeat("x", 2000))
		c.expect("552")
		c.cmd("NOOP", "250")
		require.True(t, finished(t, srv, 1)[0].ClosedWithoutStoring)
	})
}

// TestBodyFaults: inside the body, by DATA and by BDAT.
func TestBodyFaults(t *testing.T) {
	for _, chunked := range []bool{false, true} {
		for name, rule := range map[string]smtp.Builder{
			"drop":  smtp.On(smtp.StageBody, smtp.Drop).Bytes(50),
			"reset": smtp.On(smtp.StageBody, smtp.Reset).Bytes(50),
			"hang":  smtp.On(smtp.StageBody, smtp.Hang).Bytes(50).For(100 * time.Millisecond),
		} {
			t.Run(fmt.Sprintf("%s chunked=%v", name, chunked), func(t *testing.T) {
				srv := start(t, smtp.Options{Rules: []smtp.Rule{rule.Rule()}})
				c := raw(t, srv.Addr())
				c.cmd("MAIL FROM:<a@example.com>", "250")
				c.cmd("RCPT TO:<b@example.com>", "250")
				if chunked {
					c.write("BDAT 1000 LAST\r\n" + strings.Repeat("x", 100))
				} else {
					c.cmd("DATA", "354")
					c.write(strings.Repeat("x", 100))
				}
				c.closed()
				a := finished(t, srv, 1)[0]
				require.Equal(t, "body", a.Stage)
				require.True(t, a.ClosedWithoutStoring)
				require.NotEmpty(t, a.Fault)
			})
		}
	}
	t.Run("tarpit", func(t *testing.T) {
		srv := start(t, smtp.Options{Rules: []smtp.Rule{smtp.On(smtp.StageBody, smtp.Tarpit).For(20 * time.Millisecond).Rule()}})
		began := time.Now()
		_, err := send(t, srv.Addr(), "k1")
		require.NoError(t, err)
		require.Greater(t, time.Since(began), 20*time.Millisecond)
	})
}

func TestAChunkedMailGivenUpIsRecorded(t *testing.T) {
	for name, end := range map[string]func(*rawClient){
		"RSET":   func(c *rawClient) { c.cmd("RSET", "250") },
		"closed": func(c *rawClient) { require.NoError(c.t, c.nc.Close()) },
	} {
		t.Run(name, func(t *testing.T) {
			srv := start(t, smtp.Options{})
			c := raw(t, srv.Addr())
			c.cmd("MAIL FROM:<a@example.com>", "250")
			c.cmd("RCPT TO:<b@example.com>", "250")
			c.write("BDAT 10\r\n0123456789")
			c.expect("250")
			end(c)
			a := finished(t, srv, 1)[0]
			require.True(t, a.ClosedWithoutStoring)
			require.Zero(t, a.DotAt)
		})
	}
}

// TestSameSeedSameLedger runs the same rules and input twice: times aside, the
// ledgers are equal.
func TestSameSeedSameLedger(t *testing.T) {
	run := func(seed uint64) string {
		var rules []smtp.Rule
		for _, b := range []smtp.Builder{
			smtp.On(smtp.StageRcpt, smtp.Reply).Code(451).Chance(0.2),
			smtp.On(smtp.StageDot, smtp.Reply).Code(451).Chance(0.2),
			smtp.On(smtp.StageStored, smtp.Drop).Chance(0.3),
			smtp.On(smtp.StageStored, smtp.Reset).Chance(0.1),
			smtp.On(smtp.StageConnect, smtp.Drop).Chance(0.1),
		} {
			rules = append(rules, b.Rule())
		}
		srv, err := smtp.Start(smtp.Options{Seed: seed, Rules: rules})
		require.NoError(t, err)
		for i := range 60 {
			for range 3 {
				if _, err := send(t, srv.Addr(), fmt.Sprint("k", i), fmt.Sprintf("r%d@example.com", i)); err == nil {
					break
				}
			}
		}
		require.NoError(t, srv.Close())
		rows := srv.Ledger()
		for i := range rows {
			a := &rows[i]
			a.From, a.To, a.DotAt, a.StoredAt = 0, 0, 0, 0
			a.PeerGone = false // a race of the client's, not a decision
			a.Seq = 0
		}
		b, err := json.MarshalIndent(rows, "", " ")
		require.NoError(t, err)
		return string(b)
	}
	first := run(7)
	require.Equal(t, first, run(7))
	require.NotEqual(t, first, run(8))
}

func TestBadInput(t *testing.T) {
	srv := start(t, smtp.Options{MaxMessageBytes: 10_000, IdleTimeout: 5 * time.Second})
	t.Run("long line", func(t *testing.T) {
		c := raw(t, srv.Addr())
		c.write("NOOP " + strings.Repeat("x", 200_000) + "\r\n")
		c.expect("500")
		c.cmd("NOOP", "250")
	})
	t.Run("line without end", func(t *testing.T) {
		c := raw(t, srv.Addr())
		go func() { _, _ = c.nc.Write([]byte(strings.Repeat("x", 3<<20))) }()
		c.expect("500")
	})
	t.Run("binary", func(t *testing.T) {
		c := raw(t, srv.Addr())
		c.write("\x00\xff\xfe\x80\r\n")
		c.expect("50")
		c.cmd("NOOP", "250")
	})
	t.Run("errors without end", func(t *testing.T) {
		c := raw(t, srv.Addr())
		go func() { _, _ = c.nc.Write([]byte(strings.Repeat("XYZZY\r\n", 1000))) }()
		_, err := io.Copy(io.Discard, c.br)
		var ne net.Error
		require.False(t, errors.As(err, &ne) && ne.Timeout())
	})
	t.Run("body without end", func(t *testing.T) {
		c := raw(t, srv.Addr())
		c.cmd("MAIL FROM:<a@example.com>", "250")
		c.cmd("RCPT TO:<endless@example.com>", "250")
		c.cmd("DATA", "354")
		go func() {
			for {
				if _, err := c.nc.Write([]byte(strings.Repeat("x", 70) + "\r\n")); err != nil {
					return
				}
			}
		}()
		c.expect("552")
	})
	t.Run("half closed", func(t *testing.T) {
		c := raw(t, srv.Addr())
		c.mail("half", "b@example.com")
		require.NoError(t, c.nc.(*net.TCPConn).CloseWrite())
		c.expect("250 2.0.0 Ok: queued")
		c.closed()
	})
	t.Run("half closed inside the body", func(t *testing.T) {
		c := raw(t, srv.Addr())
		c.cmd("MAIL FROM:<a@example.com>", "250")
		c.cmd("RCPT TO:<b@example.com>", "250")
		c.cmd("DATA", "354")
		c.write("Subject: half")
		require.NoError(t, c.nc.(*net.TCPConn).CloseWrite())
		c.expect("451")
		c.closed()
	})
	t.Run("long lines inside a body are kept whole", func(t *testing.T) {
		c := raw(t, srv.Addr())
		c.cmd("MAIL FROM:<a@example.com>", "250")
		c.cmd("RCPT TO:<b@example.com>", "250")
		c.cmd("DATA", "354")
		c.write(strings.Repeat("z", 5000) + "\r\n.\r\n")
		c.expect("250")
	})
	t.Run("nobody else waited", func(t *testing.T) {
		_, err := send(t, srv.Addr(), "after")
		require.NoError(t, err)
	})
}

func TestSilentClientsAreBounded(t *testing.T) {
	srv := start(t, smtp.Options{IdleTimeout: 50 * time.Millisecond, MailTimeout: 200 * time.Millisecond})
	t.Run("between commands", func(t *testing.T) {
		c := raw(t, srv.Addr())
		c.expect("421")
		c.closed()
	})
	t.Run("dripping a body", func(t *testing.T) {
		c := raw(t, srv.Addr())
		c.cmd("MAIL FROM:<a@example.com>", "250")
		c.cmd("RCPT TO:<b@example.com>", "250")
		c.cmd("DATA", "354")
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for range tick.C { // never idle for long, never done
			if _, err := c.nc.Write([]byte("x")); err != nil {
				break
			}
			if len(srv.LedgerSince(0)) > 0 {
				break
			}
		}
		a := finished(t, srv, 1)[0]
		require.True(t, a.ClosedWithoutStoring)
	})
}

// TestAThousandAtOnce keeps 1,000 connections open at the same time and sends
// one mail through each.
func TestAThousandAtOnce(t *testing.T) {
	srv := start(t, smtp.Options{})
	const n = 1000
	var ready, done sync.WaitGroup
	ready.Add(n)
	errs := make(chan error, n)
	for i := range n {
		done.Go(func() {
			err := atOnce(srv.Addr(), fmt.Sprint("k", i), &ready)
			errs <- err
		})
	}
	done.Wait()
	close(errs)
	for err := range errs {
		require.NoError(t, err)
	}
	require.EqualValues(t, n, srv.Totals().Stored)
	require.Len(t, finished(t, srv, n), n)
	require.Zero(t, srv.Totals().Doubled)
}

func atOnce(addr, key string, ready *sync.WaitGroup) error {
	c, err := gosmtp.Dial(addr)
	if err == nil {
		defer c.Close()
		err = c.Hello("x")
	}
	ready.Done()
	if err != nil {
		return err
	}
	ready.Wait()
	return c.SendMail("a@example.com", []string{"b@example.com"}, strings.NewReader(mail(key)))
}

func TestSessionsThatDieBeforeAnyMailAreKept(t *testing.T) {
	srv := start(t, smtp.Options{Rules: []smtp.Rule{smtp.On(smtp.StageEHLO, smtp.Drop).ID("x").Rule()}})
	_, err := send(t, srv.Addr(), "k1")
	require.Error(t, err)
	require.Eventually(t, func() bool { return len(srv.Sessions()) > 0 }, 5*time.Second, time.Millisecond)
	s := srv.Sessions()[0]
	require.Equal(t, "EHLO", s.Last)
	require.Equal(t, "ehlo:drop", s.Fault)
	require.Equal(t, []string{"x"}, s.Rules)
	require.Equal(t, "worker-1", s.Client)
}

func TestControlAPI(t *testing.T) {
	srv := start(t, smtp.Options{HTTPAddr: "127.0.0.1:0", Mode: smtp.DedupByKey})
	post := func(path, body string) int {
		resp, err := http.Post(srv.URL()+path, "application/json", strings.NewReader(body))
		require.NoError(t, err)
		resp.Body.Close()
		return resp.StatusCode
	}
	require.Equal(t, 201, post("/rules", `{"match":{"nth":1},"action":{"kind":"drop","stage":"stored"}}`))
	require.Equal(t, 422, post("/rules", `{"action":{"kind":"reply","stage":"rcpt","code":250}}`))
	require.Equal(t, 422, post("/rules", `{"action":{"kind":"reply","stage":"rcpt","code":777}}`))
	stage, _ := send(t, srv.Addr(), "k1")
	require.Equal(t, "dot", stage)
	_, err := send(t, srv.Addr(), "k1")
	require.NoError(t, err)
	resp, err := http.Get(srv.URL() + "/verdict?key=k1")
	require.NoError(t, err)
	defer resp.Body.Close()
	var v smtp.Verdict
	require.NoError(t, json.NewDecoder(resp.Body).Decode(&v))
	require.Equal(t, "once", v.Verdict)
	require.Equal(t, 1, v.Deduplicated)
	require.Equal(t, 204, post("/listener", `{"open":false}`))
	_, err = net.Dial("tcp", srv.Addr())
	require.Error(t, err)
	require.Equal(t, 204, post("/listener", `{"open":true}`))
	http.DefaultClient.CloseIdleConnections()
}

func TestWrongOptionsAreNamed(t *testing.T) {
	for want, opt := range map[string]smtp.Options{
		"mode":    {Mode: "x"},
		"rule 1":  {Rules: []smtp.Rule{{}}},
		"listen":  {Addr: "256.0.0.1:1"},
		"control": {HTTPAddr: "256.0.0.1:1"},
	} {
		_, err := smtp.Start(opt)
		require.ErrorContains(t, err, want)
	}
}

func TestRulesThatCouldNeverStrikeAreRefused(t *testing.T) {
	srv := start(t, smtp.Options{})
	for _, b := range []smtp.Builder{
		smtp.On(smtp.StageConnect, smtp.Drop).To("bob@*"),
		smtp.On(smtp.StageMail, smtp.Drop).To("bob@*"),
		smtp.On(smtp.StageRcpt, smtp.Drop).Key("k"),
		smtp.On(smtp.StageEHLO, smtp.Drop).First(1),
		smtp.On(smtp.StageQuit, smtp.Drop).To("bob@*"),
	} {
		_, err := srv.AddRule(b.Rule())
		require.Error(t, err, "%+v", b.Rule())
	}
	split := smtp.On(smtp.StageRcpt, smtp.Reply).Code(451).Rule()
	split.Action.Enhanced = "4.7.1\r\n250"
	_, err := srv.AddRule(split)
	require.ErrorContains(t, err, "enhanced")
}

func TestHugeHeadersDoNotFillTheLedger(t *testing.T) {
	srv := start(t, smtp.Options{})
	for _, end := range []string{"a", "b"} {
		_, err := send(t, srv.Addr(), strings.Repeat("k", 5000)+end)
		require.NoError(t, err)
	}
	rows := finished(t, srv, 2)
	require.Less(t, len(rows[0].Key), 1024)
	require.NotEqual(t, rows[0].Key, rows[1].Key, "they are still two mails")
	require.Equal(t, 1, rows[1].Copy)
}

// sendRaw hands over one mail by go-smtp's client, as it stands.
func sendRaw(t *testing.T, addr, raw string) {
	t.Helper()
	c, err := gosmtp.Dial(addr)
	require.NoError(t, err)
	defer c.Close()
	require.NoError(t, c.SendMail("a@example.com", []string{"b@example.com"}, strings.NewReader(raw)))
	require.NoError(t, c.Quit())
}

// What other clients make of a header that is too long for a line, as they
// wrote it, and what RFC 5322 lets them write.
func TestFoldedHeadersAreUnfolded(t *testing.T) {
	srv := start(t, smtp.Options{})
	key := "campaign:" + strings.Repeat("a", 100) + ":5ff860bf1190596c7188ab851db691f0"
	for _, c := range []struct{ name, header, key, subject string }{
		{"go-mail", "X-Dedupe-Key:\r\n " + key, key, ""},
		{"Python's compat32", "X-Dedupe-Key: \r\n " + key, key, ""},
		{"Python's email.policy.SMTP", "X-Dedupe-Key: =?utf-8?q?campaign=3Aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa?=\r\n" +
			" =?utf-8?q?aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa=3A5ff?=\r\n =?utf-8?q?860bf1190596c7188ab851db691f0?=", key, ""},
		{"a tab", "X-Dedupe-Key:\r\n\t" + key + "\t", key, ""},
		{"several folds, one of them of blanks alone", "X-Dedupe-Key:\r\n \r\n \t " + key + "\r\n ", key, ""},
		{"at the end of the headers", "Subject: Hello\r\nX-Dedupe-Key:\r\n k1", "k1", "Hello"},
		{"the blank of the fold is the value's", "X-Dedupe-Key: k2\r\nSubject: Your\r\n  ticket\r\n\tis here", "k2", "Your  ticket\tis here"},
		{"another header's value is not ours", "X-Other:\r\n X-Dedupe-Key: no\r\nX-Dedupe-Key: k3", "k3", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			raw := c.header + "\r\n\r\nX-Dedupe-Key: of the body\r\n"
			sendRaw(t, srv.Addr(), raw)
			rows := srv.Ledger()
			last := rows[len(rows)-1]
			require.Equal(t, c.key, last.Key)
			require.Equal(t, c.subject, last.Subject)
		})
	}
}

// A folded key is one and the same as the key in one line: the
// second mail is known.
func TestAFoldedKeyIsTheSameKey(t *testing.T) {
	srv := start(t, smtp.Options{Mode: smtp.DedupByKey})
	for _, header := range []string{"X-Dedupe-Key: k", "X-Dedupe-Key:\r\n k"} {
		sendRaw(t, srv.Addr(), header+"\r\n\r\nHello.\r\n")
	}
	rows := finished(t, srv, 2)
	require.True(t, rows[0].Stored && rows[1].Deduplicated)
}

// TestMemoryIsBoundedByOptions sends big mails and looks at what is kept.
func TestMemoryIsBoundedByOptions(t *testing.T) {
	srv := start(t, smtp.Options{KeepBody: 100, KeepBodies: 1000})
	for i := range 30 {
		_, err := send(t, srv.Addr(), fmt.Sprint("k", i))
		require.NoError(t, err)
	}
	kept := 0
	for _, a := range finished(t, srv, 30) {
		if b, ok := srv.Mail(a.ID); ok {
			require.LessOrEqual(t, len(b), 100)
			kept++
		}
	}
	require.Equal(t, 10, kept)
	runtime.GC()
}

// TestALostAnswerIsLostForAllRecipients: SMTP has one answer to the dot, the
// ledger a row for each recipient.
func TestALostAnswerIsLostForAllRecipients(t *testing.T) {
	srv := start(t, smtp.Options{Mode: smtp.DedupByKey, Rules: []smtp.Rule{smtp.On(smtp.StageStored, smtp.Drop).Times(1).Rule()}})
	_, err := send(t, srv.Addr(), "k1", "a@example.com", "b@example.com")
	require.Error(t, err)
	_, err = send(t, srv.Addr(), "k1", "b@example.com", "c@example.com")
	require.NoError(t, err)
	rows := finished(t, srv, 4)
	for _, a := range rows[:2] {
		require.True(t, a.Stored && !a.ReplyWritten)
		require.Equal(t, "stored:drop", a.Fault)
	}
	require.True(t, rows[2].Deduplicated, "known for b")
	require.True(t, rows[3].Stored, "new for c")
	require.Equal(t, 1, srv.Verdict("k1").Copies)
}

func TestBodiesOnDisk(t *testing.T) {
	dir := t.TempDir()
	srv := start(t, smtp.Options{BodyDir: dir, KeepBody: 10, KeepBodies: 1, Rules: []smtp.Rule{
		smtp.On(smtp.StageDot, smtp.Reply).Code(451).Key("k2").Rule(),
	}})
	_, err := send(t, srv.Addr(), "k1", "a@example.com", "b@example.com")
	require.NoError(t, err)
	_, err = send(t, srv.Addr(), "k2")
	require.Equal(t, 451, code(err))
	rows := finished(t, srv, 3)
	for _, a := range rows[:2] {
		got, ok := srv.Mail(a.ID)
		require.True(t, ok)
		require.Equal(t, mail("k1"), string(got))
	}
	_, ok := srv.Mail(rows[2].ID)
	require.False(t, ok)
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, files, 2, "nothing is left of a mail that was not stored")
}

func TestNetSMTPSpeaksTLSAndAuth(t *testing.T) {
	srv, conf := tlsServer(t, smtp.Options{Users: map[string]string{"u": "p"}})
	c, err := netsmtp.Dial(srv.Addr())
	require.NoError(t, err)
	defer c.Close()
	require.NoError(t, c.StartTLS(conf))
	require.NoError(t, c.Auth(netsmtp.PlainAuth("", "u", "p", "127.0.0.1")))
	require.NoError(t, c.Quit())
	var _ *x509.CertPool = conf.RootCAs
}
