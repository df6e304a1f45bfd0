package smtp

import (
	"bufio"
	"io"
	"log"
	"net"
	"strconv"
	"strings"
	"testing"

	gosmtp "github.com/emersion/go-smtp"
	"github.com/stretchr/testify/require"
)

// The benchmarks compare the fake with a bare go-smtp server that discards,
// under the same client: pipelined commands over kept connections, so that the
// server is most of what is measured. smtpbench compares processes.
func BenchmarkFake(b *testing.B) {
	srv, err := Start(Options{})
	require.NoError(b, err)
	defer srv.Close()
	benchmark(b, srv.Addr())
	require.EqualValues(b, b.N, srv.Totals().Stored)
}

func BenchmarkBare(b *testing.B) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	s := gosmtp.NewServer(gosmtp.BackendFunc(func(*gosmtp.Conn) (gosmtp.Session, error) { return discard{}, nil }))
	s.ErrorLog = log.New(io.Discard, "", 0)
	go func() { _ = s.Serve(l) }()
	defer s.Close()
	benchmark(b, l.Addr().String())
}

type discard struct{}

func (discard) Reset()                                 {}
func (discard) Logout() error                          { return nil }
func (discard) Mail(string, *gosmtp.MailOptions) error { return nil }
func (discard) Rcpt(string, *gosmtp.RcptOptions) error { return nil }
func (discard) Data(r io.Reader) error                 { _, err := io.Copy(io.Discard, r); return err }

func benchmark(b *testing.B, addr string) {
	body := "Subject: bench\r\n\r\n" + strings.Repeat("0123456789abcdef0123456789abcdef0123456789abcdef0123456789\r\n", 30) + ".\r\n"
	b.ReportAllocs()
	b.SetParallelism(8)
	b.RunParallel(func(pb *testing.PB) {
		nc, err := net.Dial("tcp", addr)
		if err != nil {
			b.Error(err)
			return
		}
		defer nc.Close()
		br := bufio.NewReader(nc)
		answers := func(n int) bool {
			for n > 0 {
				line, err := br.ReadSlice('\n')
				if err != nil || line[0] > '3' {
					b.Errorf("%s %v", line, err)
					return false
				}
				if line[3] == ' ' {
					n--
				}
			}
			return true
		}
		if !answers(1) {
			return
		}
		_, _ = io.WriteString(nc, "EHLO bench\r\n")
		if !answers(1) {
			return
		}
		for i := 0; pb.Next(); i++ {
			n := strconv.Itoa(i)
			_, _ = io.WriteString(nc, "MAIL FROM:<a@x.test>\r\nRCPT TO:<r"+n+"@x.test>\r\nDATA\r\n")
			if !answers(3) {
				return
			}
			_, _ = io.WriteString(nc, "Message-ID: <"+n+"@x.test>\r\nX-Dedupe-Key: k"+n+"\r\n"+body)
			if !answers(1) {
				return
			}
		}
	})
}
