package mail_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"mailproof/fakes/script"
	fake "mailproof/fakes/smtp"
	"mailproof/system/contract"
	"mailproof/system/mail"
	"mailproof/system/mail/mailtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// provider shows the fake server to the suite.
type provider struct{ srv *fake.Server }

func startFake(t testing.TB, opt fake.Options) *fake.Server {
	t.Helper()
	srv, err := fake.Start(opt)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, srv.Close()) })
	return srv
}

func (p provider) Sender(t *testing.T, limit time.Duration) mail.EmailSender {
	return sender(t, mail.SMTPConfig{Addr: p.srv.Addr(), SendTimeout: limit})
}

func sender(t testing.TB, cfg mail.SMTPConfig) *mail.SMTPSender {
	t.Helper()
	if cfg.Name == "" {
		cfg.Name = "notifyd-1.ticket"
	}
	s, err := mail.NewSMTPSender(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func (p provider) Behave(t *testing.T, b mailtest.Behaviour) {
	p.srv.ClearRules()
	rule := map[mailtest.Behaviour]fake.Builder{
		mailtest.RefuseForNow:    fake.On(fake.StageRcpt, fake.Reply).Code(451),
		mailtest.RefuseForGood:   fake.On(fake.StageRcpt, fake.Reply).Code(550),
		mailtest.RefuseClient:    fake.On(fake.StageConnect, fake.Reply).Code(554),
		mailtest.DropBefore:      fake.On(fake.StageData, fake.Drop),
		mailtest.HangBefore:      fake.On(fake.StageData, fake.Hang),
		mailtest.StoreThenDrop:   fake.On(fake.StageStored, fake.Drop),
		mailtest.StoreThenReset:  fake.On(fake.StageStored, fake.Reset),
		mailtest.StoreThenHang:   fake.On(fake.StageStored, fake.Hang),
		mailtest.StoreThenNoise:  fake.On(fake.StageStored, fake.Garbage),
		mailtest.StoreThenHalf:   fake.On(fake.StageStored, fake.Cut),
		mailtest.AcceptThenClose: fake.On(fake.StageReplied, fake.Drop),
	}
	if b == mailtest.Accept {
		return
	}
	r, ok := rule[b]
	require.True(t, ok, "behaviour %q", b)
	_, err := p.srv.AddRule(r.Rule())
	require.NoError(t, err)
}

func (p provider) Copies(key string) int { return p.srv.Verdict(key).Copies }

func (p provider) Hash(key string) string {
	var hash string
	for _, a := range p.srv.Ledger() {
		if a.Key == key && a.Stored {
			hash = a.BodyHash
		}
	}
	return hash
}

func TestSMTPSenderPassesTheSuite(t *testing.T) {
	t.Parallel()
	mailtest.Run(t, mailtest.Suite{New: func(t *testing.T) mailtest.Provider {
		return provider{startFake(t, fake.Options{})}
	}})
}

// outcome of a Send in one word.
func outcome(err error) string {
	if err == nil {
		return "accepted"
	}
	if _, ok := errors.AsType[*mail.TransientError](err); ok {
		return "transient"
	}
	if _, ok := errors.AsType[*mail.PermanentError](err); ok {
		return "permanent"
	}
	if _, ok := errors.AsType[*mail.AmbiguousError](err); ok {
		return "ambiguous"
	}
	if _, ok := errors.AsType[*mail.LaneError](err); ok {
		return "lane"
	}
	return fmt.Sprintf("%T", err)
}

// Every stage of a session × everything that can go wrong there. The connection
// has TLS and AUTH, so that each stage exists.
func TestStageMatrix(t *testing.T) {
	t.Parallel()
	// When the connection fails, or the server hangs or writes what is no reply.
	broken := []script.Kind{fake.Drop, fake.Reset, fake.Hang, fake.Swallow, fake.Cut, fake.Garbage, fake.Mismatch}
	type row struct {
		stage       fake.Stage
		onBroken    string
		replies     map[int]string
		mayBeStored bool
	}
	rows := []row{
		{fake.StageConnect, "transient", map[int]string{421: "transient", 450: "transient", 554: "lane"}, false},
		{fake.StageEHLO, "transient", map[int]string{421: "transient", 451: "transient", 504: "lane", 550: "lane", 502: "lane"}, false},
		{fake.StageSTARTTLS, "transient", map[int]string{421: "transient", 454: "transient", 501: "lane", 554: "lane"}, false},
		{fake.StageAuth, "transient", map[int]string{421: "transient", 454: "transient", 432: "transient", 535: "lane", 534: "lane", 538: "lane"}, false},
		{fake.StageMail, "transient", map[int]string{421: "transient", 451: "transient", 452: "transient", 501: "permanent", 550: "permanent", 552: "permanent", 553: "permanent", 530: "lane", 535: "lane", 521: "lane"}, false},
		{fake.StageRcpt, "transient", map[int]string{421: "transient", 450: "transient", 451: "transient", 452: "transient", 550: "permanent", 551: "permanent", 552: "permanent", 553: "permanent", 521: "permanent"}, false},
		{fake.StageData, "transient", map[int]string{421: "transient", 451: "transient", 503: "permanent", 554: "permanent"}, false},
		{fake.StageDot, "ambiguous", map[int]string{421: "transient", 450: "transient", 451: "transient", 452: "transient", 550: "permanent", 552: "permanent", 554: "permanent", 250: "accepted", 251: "accepted"}, true},
		{fake.StageStored, "ambiguous", map[int]string{421: "transient", 451: "transient", 554: "permanent", 250: "accepted"}, true},
	}
	for _, r := range rows {
		for _, kind := range broken {
			t.Run(fmt.Sprintf("%s/%s", r.stage, kind), func(t *testing.T) {
				t.Parallel()
				tryOne(t, fake.On(r.stage, kind).Rule(), r.onBroken, r.mayBeStored)
			})
		}
		for code, want := range r.replies {
			t.Run(fmt.Sprintf("%s/%d", r.stage, code), func(t *testing.T) {
				t.Parallel()
				tryOne(t, fake.On(r.stage, fake.Reply).Code(code).Rule(), want, r.mayBeStored)
			})
		}
	}
	for name, c := range map[string]struct {
		rule fake.Rule
		want string
	}{
		"starttls/handshake breaks": {fake.On(fake.StageSTARTTLS, fake.BreakTLS).Rule(), "transient"},
		"starttls/not offered":      {fake.Rule{Action: fake.Action{Stage: fake.StageEHLO, Kind: fake.StripCaps, Strip: []string{"STARTTLS"}}}, "lane"},
		"auth/not offered":          {fake.Rule{Action: fake.Action{Stage: fake.StageEHLO, Kind: fake.StripCaps, Strip: []string{"AUTH"}}}, "lane"},
		"rcpt/too many (5.5.3)":     {fake.Rule{Action: fake.Action{Stage: fake.StageRcpt, Kind: fake.Reply, Code: 552, Enhanced: "5.5.3"}}, "transient"},
		"dot/drip":                  {fake.On(fake.StageDot, fake.Drip).For(time.Millisecond).Rule(), "accepted"},
		"replied/drop":              {fake.On(fake.StageReplied, fake.Drop).Rule(), "accepted"},
		"replied/reset":             {fake.On(fake.StageReplied, fake.Reset).Rule(), "accepted"},
		"quit/drop":                 {fake.On(fake.StageQuit, fake.Drop).Rule(), "accepted"},
		"quit/hang":                 {fake.On(fake.StageQuit, fake.Hang).Rule(), "accepted"},
		"quit/garbage":              {fake.On(fake.StageQuit, fake.Garbage).Rule(), "accepted"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tryOne(t, c.rule, c.want, c.want == "accepted")
		})
	}
}

func tryOne(t *testing.T, rule fake.Rule, want string, mayBeStored bool) {
	t.Helper()
	tlsConfig, roots, err := fake.SelfSigned()
	require.NoError(t, err)
	srv := startFake(t, fake.Options{TLS: tlsConfig, Users: map[string]string{"u": "p"}, Rules: []fake.Rule{rule}})
	cfg := mail.SMTPConfig{
		Addr: srv.Addr(), TLS: mail.TLSStartTLS, Username: "u", Password: "p",
		CommandTimeout: 10 * time.Second, SendTimeout: 20 * time.Second,
	}
	if k := rule.Action.Kind; k == fake.Hang || k == fake.Swallow { // only here a limit plays a part
		cfg.DotTimeout = 300 * time.Millisecond
		if want == "transient" {
			cfg.CommandTimeout = 300 * time.Millisecond
		}
	}
	cfg.TLSConfig = trust(roots)
	s := sender(t, cfg)
	asked := 0
	began := time.Now()
	_, err = s.Send(t.Context(), mailtest.Mail("k"), func() error { asked++; return nil })
	require.Equal(t, want, outcome(err), "%v", err)
	require.Less(t, time.Since(began), 15*time.Second)
	if !mayBeStored {
		require.Zero(t, asked, "the commit was never near")
		require.Zero(t, srv.Verdict("k").Copies)
	}
	if rule.Action.Kind == fake.Reply && err != nil {
		require.Equal(t, rule.Action.Code, failureOf(t, err).Code)
	}
}

func failureOf(t *testing.T, err error) mail.Failure {
	t.Helper()
	switch e := err.(type) {
	case *mail.TransientError:
		return e.Failure
	case *mail.PermanentError:
		return e.Failure
	case *mail.AmbiguousError:
		return e.Failure
	case *mail.LaneError:
		return e.Failure
	}
	require.FailNow(t, "no outcome", "%T", err)
	return mail.Failure{}
}

// A body that is cut off is never accepted. The large one does not fit into the
// buffers on the way, so that the client sees it while it writes.
func TestCutInTheBody(t *testing.T) {
	t.Parallel()
	for _, kind := range []script.Kind{fake.Drop, fake.Reset} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			srv := startFake(t, fake.Options{Rules: []fake.Rule{fake.On(fake.StageBody, kind).Bytes(100).Rule()}})
			s := sender(t, mail.SMTPConfig{Addr: srv.Addr()})
			m := mailtest.Mail("k")
			m.Bytes = append(m.Bytes, bytes.Repeat([]byte("0123456789abcdef\r\n"), 1<<20)...) // 18 MB
			_, err := s.Send(t.Context(), m, func() error { return nil })
			require.Equal(t, "transient", outcome(err), "%v", err)
			require.Equal(t, mail.StageBody, failureOf(t, err).Stage)

			_, err = s.Send(t.Context(), mailtest.Mail("small"), nil)
			require.Contains(t, []string{"transient", "ambiguous"}, outcome(err), "a small one may be out as a whole")
			require.Zero(t, srv.Verdict("k").Copies+srv.Verdict("small").Copies)
		})
	}
}

func TestFailuresCarryStageAndCodes(t *testing.T) {
	t.Parallel()
	srv := startFake(t, fake.Options{Rules: []fake.Rule{{Action: fake.Action{
		Stage: fake.StageRcpt, Kind: fake.Reply, Code: 550, Enhanced: "5.1.1", Text: "<bob@example.com>: no such user",
	}}}})
	s := sender(t, mail.SMTPConfig{Addr: srv.Addr()})
	_, err := s.Send(t.Context(), mailtest.Mail("k"), nil)
	f := failureOf(t, err)
	require.Equal(t, mail.StageRcpt, f.Stage)
	require.Equal(t, 550, f.Code)
	require.Equal(t, "5.1.1", f.Enhanced)
	require.ErrorContains(t, err, "permanent at rcpt: 550 5.1.1: <b***@example.com>: no such user")
	require.NotContains(t, err.Error(), "bob@", "errors are logged (TRAP-M6-12)")
}

func TestEHLONamesTheProcess(t *testing.T) {
	t.Parallel()
	srv := startFake(t, fake.Options{})
	s := sender(t, mail.SMTPConfig{Addr: srv.Addr(), Name: "notifyd-7.ticket-w3"})
	_, err := s.Send(t.Context(), mailtest.Mail("k"), nil)
	require.NoError(t, err)
	require.Equal(t, "notifyd-7.ticket-w3", srv.Ledger()[0].Client)
}

// sessions that came as far as MAIL.
func sessions(srv *fake.Server) int {
	seen := map[int64]bool{}
	for _, a := range srv.Ledger() {
		seen[a.Session] = true
	}
	return len(seen)
}

func TestKeptConnections(t *testing.T) {
	t.Parallel()
	send := func(t *testing.T, s *mail.SMTPSender, n int) {
		t.Helper()
		for i := range n {
			_, err := s.Send(t.Context(), mailtest.Mail(fmt.Sprint("k", i)), nil)
			require.NoError(t, err)
		}
	}
	t.Run("one connection serves mail after mail", func(t *testing.T) {
		t.Parallel()
		srv := startFake(t, fake.Options{})
		send(t, sender(t, mail.SMTPConfig{Addr: srv.Addr()}), 20)
		require.Equal(t, 1, sessions(srv))
	})
	t.Run("a bound on mails per connection", func(t *testing.T) {
		t.Parallel()
		srv := startFake(t, fake.Options{})
		send(t, sender(t, mail.SMTPConfig{Addr: srv.Addr(), MailsPerConnection: 5}), 20)
		require.Equal(t, 4, sessions(srv))
	})
	t.Run("none are kept", func(t *testing.T) {
		t.Parallel()
		srv := startFake(t, fake.Options{})
		send(t, sender(t, mail.SMTPConfig{Addr: srv.Addr(), IdleLimit: -1}), 3)
		require.Equal(t, 3, sessions(srv))
	})
	t.Run("idle ones take leave", func(t *testing.T) {
		t.Parallel()
		srv := startFake(t, fake.Options{})
		s := sender(t, mail.SMTPConfig{Addr: srv.Addr(), IdleLimit: 30 * time.Millisecond})
		send(t, s, 1)
		require.Eventually(t, func() bool {
			return srv.Totals().Sessions == 1 // counted when they end
		}, 10*time.Second, 10*time.Millisecond)
		send(t, s, 1)
		require.Equal(t, 2, sessions(srv))
	})
	t.Run("a refusal is followed by RSET", func(t *testing.T) {
		t.Parallel()
		srv := startFake(t, fake.Options{Rules: []fake.Rule{fake.On(fake.StageRcpt, fake.Reply).Code(451).Times(1).Rule()}})
		s := sender(t, mail.SMTPConfig{Addr: srv.Addr()})
		_, err := s.Send(t.Context(), mailtest.Mail("k"), nil)
		require.Equal(t, "transient", outcome(err))
		send(t, s, 2)
		require.Equal(t, 1, sessions(srv))
	})
	// Whatever tells that the kept connection is gone: the try goes on over a
	// new one, and asks before the commit once.
	for name, rule := range map[string]fake.Builder{
		"RSET fails":   fake.On(fake.StageRset, fake.Drop),
		"RSET refused": fake.On(fake.StageRset, fake.Reply).Code(550),
		"MAIL drop":    fake.On(fake.StageMail, fake.Drop),
		"MAIL reset":   fake.On(fake.StageMail, fake.Reset),
		"MAIL 421":     fake.On(fake.StageMail, fake.Reply).Code(421),
		"MAIL 503":     fake.On(fake.StageMail, fake.Reply).Code(503),
		"RCPT drop":    fake.On(fake.StageRcpt, fake.Drop),
		"DATA drop":    fake.On(fake.StageData, fake.Drop),
		"DATA garbage": fake.On(fake.StageData, fake.Garbage),
	} {
		t.Run("dead at "+name, func(t *testing.T) {
			t.Parallel()
			srv := startFake(t, fake.Options{})
			s := sender(t, mail.SMTPConfig{Addr: srv.Addr()})
			if strings.HasPrefix(name, "RSET") { // a refused mail first
				_, err := srv.AddRule(fake.On(fake.StageRcpt, fake.Reply).Code(550).Times(1).Rule())
				require.NoError(t, err)
				_, err = s.Send(t.Context(), mailtest.Mail("refused"), nil)
				require.Equal(t, "permanent", outcome(err))
			} else {
				send(t, s, 1)
			}
			_, err := srv.AddRule(rule.Times(1).Rule())
			require.NoError(t, err)
			asked := 0
			_, err = s.Send(t.Context(), mailtest.Mail("next"), func() error { asked++; return nil })
			require.NoError(t, err)
			require.Equal(t, 1, asked)
			require.Equal(t, 1, srv.Verdict("next").Copies)
			require.Equal(t, 2, sessions(srv))
		})
	}
	t.Run("only once", func(t *testing.T) {
		t.Parallel()
		srv := startFake(t, fake.Options{})
		s := sender(t, mail.SMTPConfig{Addr: srv.Addr()})
		send(t, s, 1)
		_, err := srv.AddRule(fake.On(fake.StageMail, fake.Drop).Rule())
		require.NoError(t, err)
		_, err = s.Send(t.Context(), mailtest.Mail("next"), nil)
		require.Equal(t, "transient", outcome(err))
		require.Equal(t, 2, sessions(srv))
	})
	t.Run("one that hangs is not dead", func(t *testing.T) {
		t.Parallel()
		srv := startFake(t, fake.Options{})
		s := sender(t, mail.SMTPConfig{Addr: srv.Addr(), CommandTimeout: 100 * time.Millisecond})
		send(t, s, 1)
		_, err := srv.AddRule(fake.On(fake.StageMail, fake.Hang).Times(1).Rule())
		require.NoError(t, err)
		_, err = s.Send(t.Context(), mailtest.Mail("next"), nil)
		require.Equal(t, "transient", outcome(err))
		require.Equal(t, 1, sessions(srv))
	})
}

// M6-17: the pool is the lane's bulkhead.
func TestPoolNeverGrows(t *testing.T) {
	t.Parallel()
	srv := startFake(t, fake.Options{Rules: []fake.Rule{fake.On(fake.StageDot, fake.HoldUntilReleased).Rule()}})
	s := sender(t, mail.SMTPConfig{Addr: srv.Addr(), Connections: 2})
	var wg sync.WaitGroup
	for i := range 2 {
		wg.Go(func() {
			_, err := s.Send(t.Context(), mailtest.Mail(fmt.Sprint("held", i)), nil)
			assert.NoError(t, err)
		})
	}
	require.Eventually(t, func() bool { return len(srv.Holds()) == 2 }, 10*time.Second, 5*time.Millisecond)

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := s.Send(ctx, mailtest.Mail("third"), nil)
	require.Equal(t, "transient", outcome(err))
	require.True(t, failureOf(t, err).Free, "it was not tried")
	require.Equal(t, 2, sessions(srv))
	srv.ClearRules()
	srv.ReleaseAll()
	wg.Wait()
}

// script is a server of a few lines, for what the fake would never say.
func scripted(t *testing.T, serve func(c net.Conn, r *bufio.Reader)) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				serve(c, bufio.NewReader(c))
			})
		}
	})
	t.Cleanup(func() { _ = ln.Close(); wg.Wait() })
	return ln.Addr().String()
}

// upTo plays the dialogue until and with the 354.
func upTo354(c net.Conn, r *bufio.Reader) bool {
	say := func(s string) { _, _ = fmt.Fprint(c, s) }
	say("220 hi\r\n")
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return false
		}
		if strings.HasPrefix(line, "DATA") {
			say("354 go\r\n")
			return true
		}
		say("250 ok\r\n")
	}
}

// readBody reads lines until the final dot.
func readBody(r *bufio.Reader) bool {
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return false
		}
		if line == ".\r\n" {
			return true
		}
	}
}

// The whole body is at the server when the caller is asked, and the dot is not.
func TestCommitIsAskedForAfterTheBodyAndBeforeTheDot(t *testing.T) {
	t.Parallel()
	m := mailtest.Mail("k")
	m.Bytes = append(m.Bytes, bytes.Repeat([]byte("line\r\n"), 5000)...)
	var got atomic.Int64
	arrived := make(chan struct{})
	addr := scripted(t, func(c net.Conn, r *bufio.Reader) {
		if !upTo354(c, r) {
			return
		}
		for {
			line, err := r.ReadString('\n')
			if err != nil {
				return
			}
			if line == ".\r\n" {
				_, _ = fmt.Fprint(c, "250 2.0.0 Ok: queued as ABC123\r\n")
				_, _ = r.ReadString('\n') // QUIT
				return
			}
			if got.Add(int64(len(line))) == int64(len(m.Bytes)) {
				_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
				if b, err := r.Peek(1); err == nil {
					panic(fmt.Sprintf("%q came before the caller agreed", b))
				}
				_ = c.SetReadDeadline(time.Time{})
				close(arrived)
			}
		}
	})
	s := sender(t, mail.SMTPConfig{Addr: addr})
	id, err := s.Send(t.Context(), m, func() error { <-arrived; return nil })
	require.NoError(t, err)
	require.Equal(t, "ABC123", id)
}

func TestOnlyAWholeReplyToTheDotCounts(t *testing.T) {
	t.Parallel()
	for said, want := range map[string]string{
		"250\r\n":                          "accepted",
		"250 \r\n":                         "accepted",
		"250 ok\n":                         "accepted",
		"250-one\r\n250 two\r\n":           "accepted",
		"299 unknown, but a 2\r\n":         "accepted",
		"450 later\r\n":                    "transient",
		"499 unknown, but a 4\r\n":         "transient",
		"550 4.2.1 digits disagree\r\n":    "permanent",
		"":                                 "ambiguous",
		"\r\n":                             "ambiguous",
		"2":                                "ambiguous",
		"25":                               "ambiguous",
		"250":                              "ambiguous",
		"250 ok":                           "ambiguous",
		"250-ok\r\n":                       "ambiguous",
		"250-ok\r\n250 al":                 "ambiguous",
		"250-ok\r\n550 no\r\n":             "ambiguous",
		"550 5.7.1 go aw":                  "ambiguous",
		"354 what else\r\n":                "ambiguous",
		"150 wait\r\n":                     "ambiguous",
		"650 no\r\n":                       "ambiguous",
		"+OK\r\n":                          "ambiguous",
		"250ok\r\n":                        "ambiguous",
		strings.Repeat("250-x\r\n", 500):   "ambiguous",
		"250 " + strings.Repeat("x", 9000): "ambiguous",
		"\x00\x01\x02\xff\r\n":             "ambiguous",
	} {
		t.Run(fmt.Sprintf("%.20q", said), func(t *testing.T) {
			t.Parallel()
			addr := scripted(t, func(c net.Conn, r *bufio.Reader) {
				if upTo354(c, r) && readBody(r) {
					_, _ = fmt.Fprint(c, said)
				}
			})
			s := sender(t, mail.SMTPConfig{Addr: addr})
			_, err := s.Send(t.Context(), mailtest.Mail("k"), nil)
			require.Equal(t, want, outcome(err), "%v", err)
		})
	}
}

// An answer that comes before its question must not be taken for the answer to
// the next one.
func TestServerOutOfTurn(t *testing.T) {
	t.Parallel()
	addr := scripted(t, func(c net.Conn, r *bufio.Reader) {
		_, _ = fmt.Fprint(c, "220 hi\r\n")
		for _, answer := range []string{"250 ok\r\n", "250 ok\r\n", "250 ok\r\n", "354 go\r\n250 already\r\n"} {
			if _, err := r.ReadString('\n'); err != nil {
				return
			}
			_, _ = fmt.Fprint(c, answer)
		}
		readBody(r)
	})
	s := sender(t, mail.SMTPConfig{Addr: addr})
	asked := 0
	_, err := s.Send(t.Context(), mailtest.Mail("k"), func() error { asked++; return nil })
	require.Equal(t, "transient", outcome(err), "%v", err)
	require.ErrorContains(t, err, "out of turn")
	require.Zero(t, asked)
}

func TestHELOForOldServers(t *testing.T) {
	t.Parallel()
	addr := scripted(t, func(c net.Conn, r *bufio.Reader) {
		_, _ = fmt.Fprint(c, "220 hi\r\n")
		for {
			line, err := r.ReadString('\n')
			if err != nil {
				return
			}
			switch verb, _, _ := strings.Cut(strings.TrimSpace(line), " "); verb {
			case "EHLO":
				_, _ = fmt.Fprint(c, "502 what?\r\n")
			case "DATA":
				_, _ = fmt.Fprint(c, "354 go\r\n")
				readBody(r)
				_, _ = fmt.Fprint(c, "250 ok\r\n")
			default:
				_, _ = fmt.Fprint(c, "250 ok\r\n")
			}
		}
	})
	s := sender(t, mail.SMTPConfig{Addr: addr})
	_, err := s.Send(t.Context(), mailtest.Mail("k"), nil)
	require.NoError(t, err)
	m := mailtest.Mail("k2")
	m.To = "vũ@example.com"
	_, err = s.Send(t.Context(), m, nil)
	require.Equal(t, "permanent", outcome(err), "no SMTPUTF8 there")
}

// OB-02: a write that nobody reads ends with the send, and not minutes later,
// when the system gives up.
func TestEndOfTheSendEndsABlockedWrite(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	addr := scripted(t, func(c net.Conn, r *bufio.Reader) {
		_ = c.(*net.TCPConn).SetReadBuffer(4 << 10)
		if upTo354(c, r) {
			time.AfterFunc(100*time.Millisecond, cancel)
			<-ctx.Done()
		}
	})
	s := sender(t, mail.SMTPConfig{Addr: addr, SendTimeout: time.Minute})
	m := mailtest.Mail("k")
	m.Bytes = append(m.Bytes, bytes.Repeat([]byte("0123456789abcdef\r\n"), 1<<19)...) // 9 MB, more than the buffers hold
	_, err := s.Send(ctx, m, nil)
	require.Equal(t, "transient", outcome(err), "%v", err)
	require.Equal(t, mail.StageBody, failureOf(t, err).Stage)
}

func TestTLS(t *testing.T) {
	t.Parallel()
	tlsConfig, roots, err := fake.SelfSigned()
	require.NoError(t, err)
	srv := startFake(t, fake.Options{TLS: tlsConfig, Users: map[string]string{"u": "p"}})
	cfg := mail.SMTPConfig{Addr: srv.Addr(), TLS: mail.TLSStartTLS, Username: "u", Password: "p"}

	_, err = sender(t, cfg).Send(t.Context(), mailtest.Mail("untrusted"), nil)
	require.Equal(t, "lane", outcome(err), "a certificate that does not hold: %v", err)

	cfg.TLSConfig = trust(roots)
	_, err = sender(t, cfg).Send(t.Context(), mailtest.Mail("trusted"), nil)
	require.NoError(t, err)

	cfg.Password = "wrong-secret"
	_, err = sender(t, cfg).Send(t.Context(), mailtest.Mail("denied"), nil)
	require.Equal(t, "lane", outcome(err))
	require.Equal(t, mail.StageAuth, failureOf(t, err).Stage)
	require.NotContains(t, err.Error(), "wrong-secret")
}

func TestConfigIsChecked(t *testing.T) {
	t.Parallel()
	for want, cfg := range map[string]mail.SMTPConfig{
		"SMTP address":         {Addr: "no-port", Name: "n"},
		"EHLO name":            {Addr: "h:25", Name: "a b\r\nMAIL"},
		"TLS mode":             {Addr: "h:25", Name: "n", TLS: "maybe"},
		"both or none":         {Addr: "h:25", Name: "n", Username: "u"},
		"travel in the clear":  {Addr: "h:25", Name: "n", Username: "u", Password: "p"},
		"must not be negative": {Addr: "h:25", Name: "n", SendTimeout: -1},
	} {
		_, err := mail.NewSMTPSender(cfg)
		require.ErrorContains(t, err, want)
	}
}

func TestUnusableMailsAreRefusedBeforeTheServerIsAsked(t *testing.T) {
	t.Parallel()
	s := sender(t, mail.SMTPConfig{Addr: "127.0.0.1:1"})
	for _, body := range []string{"", "a\nb", "a\rb\r\n", "\r\n.\n", "a\x00b\r\n", "\n"} {
		m := mailtest.Mail("k")
		m.Bytes = []byte(body)
		_, err := s.Send(t.Context(), m, nil)
		require.Equal(t, "permanent", outcome(err), "%q", body)
	}
}

// Whatever the lines hold, the server has the same bytes.
func TestAnyBodyArrivesUnchanged(t *testing.T) {
	t.Parallel()
	srv := startFake(t, fake.Options{})
	s := sender(t, mail.SMTPConfig{Addr: srv.Addr()})
	n := 0
	rapid.Check(t, func(rt *rapid.T) {
		n++
		key := fmt.Sprint("k", n)
		lines := rapid.SliceOfN(rapid.StringMatching(`\.{0,3}[ -~]{0,5}\.?`), 1, 20).Draw(rt, "lines")
		m := mailtest.Mail(key)
		m.Bytes = append(m.Bytes, strings.Join(lines, "\r\n")+"\r\n"...)
		_, err := s.Send(context.Background(), m, nil)
		require.NoError(rt, err)
		rows := srv.Ledger()
		got, ok := srv.Mail(rows[len(rows)-1].ID)
		require.True(rt, ok)
		require.Equal(rt, string(m.Bytes), string(got))
	})
}

// A key, however long, is in the server's ledger what it was in the row, and so
// is the Message-ID: whoever compares the two finds the mail (OB-03). No library
// on the way may fold it into something else.
func TestAnyKeyArrivesUnchanged(t *testing.T) {
	t.Parallel()
	srv := startFake(t, fake.Options{})
	s := sender(t, mail.SMTPConfig{Addr: srv.Addr()})
	r := renderer(t)
	far, err := mail.NewRenderer(mail.RendererConfig{From: "a@example.org", Domain: strings.Repeat("mail.", 45) + "example.org"})
	require.NoError(t, err)
	check := func(t require.TestingT, r *mail.Renderer, in mail.Rendering) {
		m, err := r.Render(in)
		require.NoError(t, err)
		require.NotRegexp(t, "(?i)\r\n(Message-ID|X-Dedupe-Key|Resend-Idempotency-Key):[ \t]*\r\n", string(m.Bytes))
		read := parse(t, m.Bytes).header
		require.Equal(t, in.DedupeKey, read.Get(contract.MailHeaderDedupeKey))
		require.Equal(t, in.DedupeKey, read.Get(contract.MailHeaderResendIdempotencyKey))
		_, err = s.Send(context.Background(), m, nil)
		require.NoError(t, err)
		rows := srv.Ledger()
		last := rows[len(rows)-1]
		require.Equal(t, in.DedupeKey, last.Key)
		require.Equal(t, r.MessageID(in.DedupeKey), last.MessageID)
	}
	withKey := func(in mail.Rendering, key string) mail.Rendering { in.DedupeKey = key; return in }

	for _, n := range []int{1, 34, 58, 59, 60, 61, 62, 63, 73, 74, 75, 76, 77, 78, 255, 256} { // about each line's end
		check(t, r, withKey(rendering(), strings.Repeat("k", n)))
		check(t, far, withKey(rendering(), strings.Repeat("k", n)))
	}
	check(t, r, withKey(offer(), contract.CampaignKey(strings.Repeat("i", 100), "bob@example.com")))
	inSubject := withKey(rendering(), strings.Repeat("k", 256))
	inSubject.Data.Event = "X-Dedupe-Key: " + strings.Repeat("x", 100)
	check(t, r, inSubject)

	keys := rapid.StringMatching(`[!-~]{1,256}`)
	rapid.Check(t, func(rt *rapid.T) {
		key := keys.Filter(func(k string) bool { return !strings.Contains(k, "=?") }).Draw(rt, "key")
		check(rt, rapid.SampledFrom([]*mail.Renderer{r, far}).Draw(rt, "renderer"), withKey(rendering(), key))
	})
}

func trust(roots *x509.CertPool) *tls.Config {
	return &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
}
