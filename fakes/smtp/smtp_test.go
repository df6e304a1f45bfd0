package smtp_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	gosmtp "github.com/emersion/go-smtp"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"mailproof/fakes/script"
	"mailproof/fakes/smtp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func start(t *testing.T, opt smtp.Options) *smtp.Server {
	t.Helper()
	srv, err := smtp.Start(opt)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, srv.Close()) })
	return srv
}

func mail(key string) string {
	return "From: a@example.com\r\nTo: b@example.com\r\nSubject: Your ticket\r\nMessage-ID: <" + key +
		"@example.com>\r\nX-Dedupe-Key: " + key + "\r\n\r\nHello.\r\n.. a dot\r\n"
}

// send hands over one mail by a staged client and says at which stage it
// failed, if it did.
func send(t *testing.T, addr, key string, rcpts ...string) (stage string, err error) {
	t.Helper()
	if len(rcpts) == 0 {
		rcpts = []string{"bob@example.com"}
	}
	c, err := gosmtp.Dial(addr)
	if err != nil {
		return "dial", err
	}
	defer c.Close()
	c.CommandTimeout, c.SubmissionTimeout = 2*time.Second, 2*time.Second
	if err := c.Hello("worker-1"); err != nil {
		return "hello", err
	}
	if err := c.Mail("a@example.com", nil); err != nil {
		return "mail", err
	}
	for _, r := range rcpts {
		if err := c.Rcpt(r, nil); err != nil {
			return "rcpt", err
		}
	}
	w, err := c.Data()
	if err != nil {
		return "data", err
	}
	if _, err := io.WriteString(w, mail(key)); err != nil {
		return "body", err
	}
	if err := w.Close(); err != nil {
		return "dot", err
	}
	return "quit", c.Quit()
}

func ctx(t *testing.T) context.Context {
	c, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	t.Cleanup(cancel)
	return c
}

// finished waits for n finished rows.
func finished(t *testing.T, srv *smtp.Server, n int) []smtp.Attempt {
	t.Helper()
	c, cancel := context.WithCancel(ctx(t))
	defer cancel()
	ch := srv.Subscribe(c)
	for len(srv.LedgerSince(0)) < n {
		if _, ok := <-ch; !ok {
			require.FailNow(t, "ledger did not fill", "%d of %d rows: %+v", len(srv.LedgerSince(0)), n, srv.Ledger())
		}
	}
	return srv.LedgerSince(0)
}

func code(err error) int {
	var se *gosmtp.SMTPError
	if errors.As(err, &se) {
		return se.Code
	}
	return 0
}

func TestAPlainMailIsStoredAndToldSo(t *testing.T) {
	srv := start(t, smtp.Options{})
	stage, err := send(t, srv.Addr(), "k1")
	require.NoError(t, err)
	require.Equal(t, "quit", stage)
	a := finished(t, srv, 1)[0]
	require.Equal(t, "k1", a.Key)
	require.Equal(t, "<k1@example.com>", a.MessageID)
	require.Equal(t, "bob@example.com", a.Recipient)
	require.Equal(t, "worker-1", a.Client)
	require.Equal(t, "Your ticket", a.Subject)
	require.Equal(t, "replied", a.Stage)
	require.True(t, a.Stored && a.ReplyWritten)
	require.False(t, a.ClosedWithoutStoring || a.Deduplicated || a.Breach)
	require.Equal(t, "250 2.0.0 Ok: queued as 1", a.Reply)
	require.Less(t, a.From, a.DotAt)
	require.LessOrEqual(t, a.DotAt, a.To)
	kept, ok := srv.Mail(a.ID)
	require.True(t, ok)
	require.Equal(t, mail("k1"), string(kept))
	require.EqualValues(t, len(kept), a.Size)
}

// TestFaults tells for each fault what the client sees and what the ledger
// knows.
func TestFaults(t *testing.T) {
	t.Parallel()
	short := 200 * time.Millisecond
	for _, tc := range []struct {
		name          string
		rule          smtp.Builder
		stage         string // at which the client fails
		code          int    // that it reads, 0 for none
		row           string // last stage in the ledger; "" when there is no row
		stored, reply bool
		breach        bool
	}{
		{"connect drop", smtp.On(smtp.StageConnect, smtp.Drop), "hello", 0, "", false, false, false},
		{"connect reset", smtp.On(smtp.StageConnect, smtp.Reset), "hello", 0, "", false, false, false},
		{"connect 554", smtp.On(smtp.StageConnect, smtp.Reply).Code(554), "hello", 554, "", false, false, false},
		{"connect 421", smtp.On(smtp.StageConnect, smtp.Reply).Code(421), "hello", 421, "", false, false, false},
		{"connect hang", smtp.On(smtp.StageConnect, smtp.Hang).For(short), "hello", 0, "", false, false, false},
		{"connect garbage", smtp.On(smtp.StageConnect, smtp.Garbage), "hello", 0, "", false, false, false},
		{"ehlo drop", smtp.On(smtp.StageEHLO, smtp.Drop), "hello", 0, "", false, false, false},
		{"ehlo 421", smtp.On(smtp.StageEHLO, smtp.Reply).Code(421), "hello", 421, "", false, false, false},
		{"ehlo 502 falls back to HELO", smtp.On(smtp.StageEHLO, smtp.Reply).Code(502).Times(1), "quit", 0, "replied", true, true, false},
		{"mail 451", smtp.On(smtp.StageMail, smtp.Reply).Code(451), "mail", 451, "mail", false, true, false},
		{"mail drop", smtp.On(smtp.StageMail, smtp.Drop), "mail", 0, "mail", false, false, false},
		{"mail swallow", smtp.On(smtp.StageMail, smtp.Swallow), "mail", 0, "mail", false, false, false},
		{"mail cut", smtp.On(smtp.StageMail, smtp.Cut).Bytes(2), "mail", 0, "mail", false, false, false},
		{"rcpt 451", smtp.On(smtp.StageRcpt, smtp.Reply).Code(451), "rcpt", 451, "rcpt", false, true, false},
		{"rcpt 550", smtp.On(smtp.StageRcpt, smtp.Reply).Code(550), "rcpt", 550, "rcpt", false, true, false},
		{"rcpt drop", smtp.On(smtp.StageRcpt, smtp.Drop), "rcpt", 0, "rcpt", false, false, false},
		{"rcpt hang", smtp.On(smtp.StageRcpt, smtp.Hang).For(short), "rcpt", 0, "rcpt", false, false, false},
		{"rcpt greylisted", smtp.On(smtp.StageRcpt, smtp.Greylist).For(time.Minute), "rcpt", 451, "rcpt", false, true, false},
		{"data 451", smtp.On(smtp.StageData, smtp.Reply).Code(451), "data", 451, "rcpt", false, true, false},
		{"data 554", smtp.On(smtp.StageData, smtp.Reply).Code(554), "data", 554, "rcpt", false, true, false},
		{"data reset", smtp.On(smtp.StageData, smtp.Reset), "data", 0, "rcpt", false, false, false},
		{"body drop", smtp.On(smtp.StageBody, smtp.Drop), "dot", 0, "body", false, false, false},
		{"dot 451", smtp.On(smtp.StageDot, smtp.Reply).Code(451), "dot", 451, "replied", false, true, false},
		{"dot 554", smtp.On(smtp.StageDot, smtp.Reply).Code(554), "dot", 554, "replied", false, true, false},
		{"dot 421", smtp.On(smtp.StageDot, smtp.Reply).Code(421), "dot", 421, "replied", false, true, false},
		{"dot drop", smtp.On(smtp.StageDot, smtp.Drop), "dot", 0, "dot", false, false, false},
		{"dot reset", smtp.On(smtp.StageDot, smtp.Reset), "dot", 0, "dot", false, false, false},
		{"stored drop", smtp.On(smtp.StageStored, smtp.Drop), "dot", 0, "stored", true, false, false},
		{"stored reset", smtp.On(smtp.StageStored, smtp.Reset), "dot", 0, "stored", true, false, false},
		{"stored hang", smtp.On(smtp.StageStored, smtp.Hang).For(short), "dot", 0, "stored", true, false, false},
		{"stored swallow", smtp.On(smtp.StageStored, smtp.Swallow), "dot", 0, "stored", true, false, false},
		{"stored cut in the code", smtp.On(smtp.StageStored, smtp.Cut).Bytes(2), "dot", 0, "stored", true, false, false},
		// Go's textproto takes a line that the connection's end cuts for whole.
		{"stored cut in the text", smtp.On(smtp.StageStored, smtp.Cut), "quit", 0, "stored", true, false, false},
		{"stored garbage", smtp.On(smtp.StageStored, smtp.Garbage), "dot", 0, "stored", true, false, false},
		{"late 250", smtp.On(smtp.StageStored, smtp.Delay).For(short), "quit", 0, "replied", true, true, false},
		{"dripped 250", smtp.On(smtp.StageStored, smtp.Drip).For(time.Millisecond), "quit", 0, "replied", true, true, false},
		{"250 and discard", smtp.On(smtp.StageDot, smtp.Reply).Code(250), "quit", 0, "replied", false, true, true},
		{"451 and keep", smtp.On(smtp.StageStored, smtp.Reply).Code(451), "dot", 451, "replied", true, true, true},
		{"554 and keep", smtp.On(smtp.StageStored, smtp.Reply).Code(554), "dot", 554, "replied", true, true, true},
		{"drop after the 250", smtp.On(smtp.StageReplied, smtp.Drop), "quit", 0, "replied", true, true, false},
		{"quit drop", smtp.On(smtp.StageQuit, smtp.Drop), "quit", 0, "replied", true, true, false},
		{"quit garbage", smtp.On(smtp.StageQuit, smtp.Garbage), "quit", 0, "replied", true, true, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			srv := start(t, smtp.Options{Rules: []smtp.Rule{tc.rule.ID("x").Rule()}})
			stage, err := send(t, srv.Addr(), "k1")
			if tc.name == "connect reset" && stage == "dial" {
				stage = "hello" // the reset may already strike connect(2)
			}
			require.Equal(t, tc.stage, stage, "%v", err)
			require.Equal(t, tc.code, code(err), "%v", err)
			if tc.stage != "quit" {
				require.Error(t, err)
			}
			require.Equal(t, 1, srv.Rules()[0].Struck)
			if tc.row == "" {
				require.Empty(t, srv.Ledger())
				return
			}
			a := finished(t, srv, 1)[0]
			require.Equal(t, tc.row, a.Stage)
			require.Equal(t, tc.stored, a.Stored)
			require.Equal(t, !tc.stored, a.ClosedWithoutStoring)
			require.Equal(t, tc.reply, a.ReplyWritten)
			require.Equal(t, tc.breach, a.Breach)
		})
	}
}

func TestOnlyTheKeyAndTryThatARuleNames(t *testing.T) {
	srv := start(t, smtp.Options{Rules: []smtp.Rule{smtp.On(smtp.StageStored, smtp.Drop).Key("k1").First(2).Rule()}})
	for i, want := range []string{"dot", "dot", "quit"} {
		stage, _ := send(t, srv.Addr(), "k1")
		require.Equal(t, want, stage, "try %d", i+1)
	}
	stage, err := send(t, srv.Addr(), "k2")
	require.NoError(t, err)
	require.Equal(t, "quit", stage)
	rows := finished(t, srv, 4)
	require.Equal(t, "stored:drop", rows[0].Fault)
	require.Equal(t, []string{"r1"}, rows[0].Rules)
	v := srv.Verdict("k1")
	require.Equal(t, "doubled", v.Verdict)
	require.Equal(t, 3, v.Copies)
	require.Equal(t, 1, v.Accepted)
	require.Equal(t, 2, v.Silent)
	require.Equal(t, "once", srv.Verdict("k2").Verdict)
	require.Equal(t, "unseen", srv.Verdict("k3").Verdict)
}

func TestDeduplication(t *testing.T) {
	for _, mode := range []smtp.Mode{smtp.DedupByKey, smtp.DedupByMessageID} {
		srv := start(t, smtp.Options{Mode: mode, Rules: []smtp.Rule{smtp.On(smtp.StageStored, smtp.Drop).First(1).Rule()}})
		stage, _ := send(t, srv.Addr(), "k1")
		require.Equal(t, "dot", stage)
		_, err := send(t, srv.Addr(), "k1")
		require.NoError(t, err)
		rows := finished(t, srv, 2)
		require.True(t, rows[0].Stored)
		require.True(t, rows[1].Deduplicated && !rows[1].Stored && !rows[1].ClosedWithoutStoring && !rows[1].Breach)
		require.Equal(t, 1, srv.Verdict("k1").Copies)
	}
}

// TestHeldBeforeTheStore kills the client while its mail is held, with the
// final dot read and nothing kept.
func TestHeldBeforeTheStore(t *testing.T) {
	for _, tc := range []struct {
		release script.OnRelease
		stored  bool
	}{{script.StoreOnRelease, true}, {script.DiscardOnRelease, false}} {
		t.Run(string(tc.release), func(t *testing.T) {
			rule := smtp.On(smtp.StageDot, smtp.HoldUntilReleased).Rule()
			rule.Action.OnRelease = tc.release
			srv := start(t, smtp.Options{Rules: []smtp.Rule{rule}})
			c := raw(t, srv.Addr())
			c.mail("k1", "bob@example.com")
			h, err := srv.AwaitHold(ctx(t), func(h smtp.Hold) bool { return h.Key == "k1" })
			require.NoError(t, err)
			require.Equal(t, smtp.StageDot, h.Stage)
			require.Equal(t, "raw", h.Client)
			require.EqualValues(t, 1, h.Attempt)
			open := srv.Ledger()
			require.Len(t, open, 1)
			require.True(t, open[0].Open())
			require.Equal(t, "dot", open[0].Stage)
			require.NotZero(t, open[0].DotAt)

			require.NoError(t, c.nc.Close())
			_, err = srv.AwaitHold(ctx(t), func(h smtp.Hold) bool { return h.PeerGone })
			require.NoError(t, err, "the closed client is noticed while held")
			require.True(t, srv.Release(h.ID))
			a := finished(t, srv, 1)[0]
			require.Equal(t, tc.stored, a.Stored)
			require.Equal(t, !tc.stored, a.ClosedWithoutStoring)
			require.True(t, a.PeerGone)
			require.Equal(t, "dot:hold", a.Fault)
		})
	}
}

// TestHeldEverywhere holds a session at each stage and lets it go on: nothing
// else changes.
func TestHeldEverywhere(t *testing.T) {
	for _, stage := range []smtp.Stage{
		smtp.StageConnect, smtp.StageEHLO, smtp.StageMail, smtp.StageRcpt, smtp.StageData, smtp.StageBody,
		smtp.StageDot, smtp.StageStored, smtp.StageReplied, smtp.StageQuit,
	} {
		t.Run(string(stage), func(t *testing.T) {
			t.Parallel()
			srv := start(t, smtp.Options{Rules: []smtp.Rule{smtp.On(stage, smtp.HoldUntilReleased).Rule()}})
			done := make(chan error, 1)
			go func() {
				_, err := send(t, srv.Addr(), "k1")
				done <- err
			}()
			h, err := srv.AwaitHold(ctx(t), nil)
			require.NoError(t, err)
			require.Equal(t, stage, h.Stage)
			select {
			case err := <-done:
				require.Fail(t, "the client went on", "%v", err)
			default:
			}
			require.Equal(t, 1, srv.ReleaseAll())
			require.NoError(t, <-done)
			require.True(t, finished(t, srv, 1)[0].Stored)
		})
	}
}

func TestAClientThatVanishesIsRecordedAtOnce(t *testing.T) {
	srv := start(t, smtp.Options{})
	c := raw(t, srv.Addr())
	c.cmd("MAIL FROM:<a@example.com>", "250")
	c.cmd("RCPT TO:<bob@example.com>", "250")
	c.cmd("DATA", "354")
	c.write("Subject: half\r\n\r\nhal")
	require.NoError(t, c.nc.(*net.TCPConn).SetLinger(0))
	require.NoError(t, c.nc.Close())
	a := finished(t, srv, 1)[0]
	require.True(t, a.ClosedWithoutStoring)
	require.False(t, a.Stored)
	require.Zero(t, a.DotAt)
}

func TestRowsPerRecipient(t *testing.T) {
	srv := start(t, smtp.Options{Rules: []smtp.Rule{smtp.On(smtp.StageRcpt, smtp.Reply).Code(550).To("no@*").Rule()}})
	c := raw(t, srv.Addr())
	c.cmd("MAIL FROM:<a@example.com>", "250")
	c.cmd("RCPT TO:<no@example.com>", "550")
	c.cmd("RCPT TO:<yes@example.com>", "250")
	c.cmd("RCPT TO:<also@example.com>", "250")
	c.cmd("DATA", "354")
	c.write(mail("k1") + ".\r\n")
	c.expect("250")
	rows := finished(t, srv, 3)
	require.Equal(t, "no@example.com", rows[0].Recipient)
	require.Equal(t, "rcpt:550", rows[0].Fault)
	require.Equal(t, 550, rows[0].Code)
	for _, a := range rows[1:] {
		require.True(t, a.Stored)
		require.Empty(t, a.Fault)
		require.Equal(t, "k1", a.Key)
	}
	require.Equal(t, map[string]int{"yes@example.com": 1, "also@example.com": 1}, srv.Verdict("k1").Recipients)
}

func TestRefusedConnections(t *testing.T) {
	srv := start(t, smtp.Options{})
	require.NoError(t, srv.Refuse())
	_, err := net.Dial("tcp", srv.Addr())
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	require.NoError(t, srv.Listen())
	_, err = send(t, srv.Addr(), "k1")
	require.NoError(t, err)
}

func TestPipelinedCommandsKeepTheirAnswers(t *testing.T) {
	srv := start(t, smtp.Options{Rules: []smtp.Rule{smtp.On(smtp.StageData, smtp.Reply).Code(451).Times(1).Rule()}})
	c := raw(t, srv.Addr())
	c.write("MAIL FROM:<a@example.com>\r\nRCPT TO:<b@example.com>\r\nDATA\r\nNOOP\r\n")
	c.expect("250")
	c.expect("250")
	c.expect("451")
	c.expect("250")
	c.cmd("DATA", "354")
	c.write(mail("k1") + ".\r\nNOOP\r\nQUIT\r\n")
	c.expect("250 2.0.0 Ok: queued")
	c.expect("250")
	c.expect("221")
	rows := finished(t, srv, 2)
	require.Equal(t, "data:451", rows[0].Fault)
	require.True(t, rows[0].ClosedWithoutStoring)
	require.True(t, rows[1].Stored)
}

func TestChunking(t *testing.T) {
	srv := start(t, smtp.Options{Rules: []smtp.Rule{
		smtp.On(smtp.StageData, smtp.Reply).Code(451).Times(1).Rule(),
		smtp.On(smtp.StageStored, smtp.Drop).Key("k2").Rule(),
	}})
	c := raw(t, srv.Addr())
	c.cmd("MAIL FROM:<a@example.com>", "250")
	c.cmd("RCPT TO:<b@example.com>", "250")
	c.write("BDAT 4\r\nQUIT") // refused, and its bytes are no command
	c.expect("451")
	m := mail("k1")
	c.write(fmt.Sprintf("BDAT %d\r\n%s", 10, m[:10]))
	c.expect("250")
	c.write(fmt.Sprintf("BDAT %d LAST\r\n%s", len(m)-10, m[10:]))
	c.expect("250 2.0.0 Ok: queued")
	m = mail("k2")
	c.write("MAIL FROM:<a@example.com>\r\nRCPT TO:<b@example.com>\r\n")
	c.expect("250")
	c.expect("250")
	c.write(fmt.Sprintf("BDAT %d LAST\r\n%s", len(m), m))
	c.closed()
	rows := finished(t, srv, 3)
	require.Equal(t, "data:451", rows[0].Fault)
	require.True(t, rows[1].Stored && rows[1].ReplyWritten)
	require.EqualValues(t, len(mail("k1")), rows[1].Size)
	require.True(t, rows[2].Stored && !rows[2].ReplyWritten)
}

func TestMagicAddresses(t *testing.T) {
	srv := start(t, smtp.Options{})
	for _, tc := range []struct{ to, stage string }{
		{"ann+fault-rcpt-451@example.com", "rcpt"},
		{"ann+fault-stored-drop-x1@example.com", "dot"},
		{"ann+fault-stored-drop-x1@example.com", "quit"},
		{"ann+fault-nonsense@example.com", "quit"},
	} {
		stage, _ := send(t, srv.Addr(), "k-"+tc.to, tc.to)
		require.Equal(t, tc.stage, stage, tc.to)
	}
}

func TestCloseEndsHeldSessionsWithoutStoring(t *testing.T) {
	srv, err := smtp.Start(smtp.Options{Rules: []smtp.Rule{smtp.On(smtp.StageDot, smtp.HoldUntilReleased).Rule()}})
	require.NoError(t, err)
	c := raw(t, srv.Addr())
	c.mail("k1", "bob@example.com")
	_, err = srv.AwaitHold(ctx(t), nil)
	require.NoError(t, err)
	require.NoError(t, srv.Close())
	c.closed()
	a := srv.Ledger()[0]
	require.False(t, a.Stored)
	require.True(t, a.ClosedWithoutStoring)
}

// rawClient speaks SMTP by hand.
type rawClient struct {
	t  *testing.T
	nc net.Conn
	br *bufio.Reader
}

func raw(t *testing.T, addr string) *rawClient {
	t.Helper()
	nc, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = nc.Close() })
	require.NoError(t, nc.SetDeadline(time.Now().Add(10*time.Second)))
	c := &rawClient{t, nc, bufio.NewReader(nc)}
	c.expect("220")
	c.cmd("EHLO raw", "250")
	return c
}

func (c *rawClient) write(s string) {
	c.t.Helper()
	_, err := io.WriteString(c.nc, s)
	require.NoError(c.t, err)
}

func (c *rawClient) expect(prefix string) string {
	c.t.Helper()
	var all strings.Builder
	for {
		line, err := c.br.ReadString('\n')
		require.NoError(c.t, err, "waiting for %s, read %q", prefix, all.String())
		all.WriteString(line)
		if len(line) < 4 || line[3] != '-' {
			require.True(c.t, strings.HasPrefix(line, prefix), "want %s, read %q", prefix, line)
			return all.String()
		}
	}
}

func (c *rawClient) cmd(line, want string) string {
	c.t.Helper()
	c.write(line + "\r\n")
	return c.expect(want)
}

func (c *rawClient) mail(key, to string) {
	c.t.Helper()
	c.cmd("MAIL FROM:<a@example.com>", "250")
	c.cmd("RCPT TO:<"+to+">", "250")
	c.cmd("DATA", "354")
	c.write(mail(key) + ".\r\n")
}

func (c *rawClient) closed() {
	c.t.Helper()
	rest, err := c.br.ReadString('\n')
	require.Error(c.t, err, "read %q", rest)
	var ne net.Error
	require.False(c.t, errors.As(err, &ne) && ne.Timeout(), "the connection is still open")
}
