package mail_test

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	gosmtp "github.com/emersion/go-smtp"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"mailproof/system/mail"
	"mailproof/system/mail/mailtest"
)

// discard is a go-smtp server that keeps nothing.
type discard struct{}

func (discard) Reset()                                 {}
func (discard) Logout() error                          { return nil }
func (discard) Mail(string, *gosmtp.MailOptions) error { return nil }
func (discard) Rcpt(string, *gosmtp.RcptOptions) error { return nil }
func (discard) Data(r io.Reader) error                 { _, err := io.Copy(io.Discard, r); return err }

// The sender beside go-smtp's client, each with kept connections; they take
// turns, 100 mails at a time, so that their ratio survives a busy machine.
//
//	go test ./system/mail -run '^$' -bench Send
func BenchmarkSend(b *testing.B) {
	srv := gosmtp.NewServer(gosmtp.BackendFunc(func(*gosmtp.Conn) (gosmtp.Session, error) { return discard{}, nil }))
	srv.Domain = "localhost"
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	done := make(chan error, 1)
	go func() { done <- srv.Serve(ln) }()
	b.Cleanup(func() { require.NoError(b, srv.Close()); <-done })
	m := mailtest.Mail("k")
	m.Bytes = append(m.Bytes, bytes.Repeat([]byte("eighteen bytes....\r\n"), 90)...) // 1.9 KB

	for _, workers := range []int{1, 8} {
		b.Run(fmt.Sprint("workers=", workers), func(b *testing.B) {
			s, err := mail.NewSMTPSender(mail.SMTPConfig{Addr: ln.Addr().String(), Name: "bench", Connections: workers})
			require.NoError(b, err)
			b.Cleanup(func() { require.NoError(b, s.Close()) })
			clients := make([]*gosmtp.Client, workers)
			for i := range clients {
				clients[i], err = gosmtp.Dial(ln.Addr().String())
				require.NoError(b, err)
				b.Cleanup(func() { require.NoError(b, clients[i].Quit()) })
			}
			bare := func(w int) error {
				return clients[w].SendMail(m.From, []string{m.To}, bytes.NewReader(m.Bytes))
			}
			ours := func(int) error {
				_, err := s.Send(b.Context(), m, func() error { return nil })
				return err
			}
			const mails = 100
			var spent [2]time.Duration
			for b.Loop() {
				for i, send := range []func(int) error{bare, ours} {
					began := time.Now()
					sendAll(b, workers, mails, send)
					spent[i] += time.Since(began)
				}
			}
			n := float64(b.N * mails)
			b.ReportMetric(n/spent[0].Seconds(), "bare-mails/s")
			b.ReportMetric(n/spent[1].Seconds(), "mails/s")
			b.ReportMetric(spent[0].Seconds()/spent[1].Seconds(), "of-bare")
		})
	}
}

func sendAll(b *testing.B, workers, mails int, send func(worker int) error) {
	var group errgroup.Group
	var next atomic.Int64
	for w := range workers {
		group.Go(func() error {
			for next.Add(1) <= int64(mails) {
				if err := send(w); err != nil {
					return err
				}
			}
			return nil
		})
	}
	require.NoError(b, group.Wait())
}
