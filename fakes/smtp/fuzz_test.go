package smtp

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	gosmtp "github.com/emersion/go-smtp"
	"github.com/stretchr/testify/require"
)

// FuzzEndOfData holds the scanner and go-smtp together: both must see the end
// of the data at the same byte, however the bytes are cut into reads.
func FuzzEndOfData(f *testing.F) {
	for _, s := range []string{
		".\r\n", "x\r\n.\r\n", "x\n.\n", "\r\r\n.\r\n", "x\r\n.\rx\r\n.\r\n", "x\r\n..\r\n.\r\n", "\r\n.\r\nQUIT\r\n", "x\r\n.\r\r\n.\r\n",
	} {
		f.Add([]byte(s), uint8(3))
	}
	f.Fuzz(func(t *testing.T, data []byte, cut uint8) {
		want, wantEnd := goSMTPEnd(data)
		var s eodScanner
		step := int(cut)%7 + 1
		got, end := 0, false
		for got < len(data) && !end {
			var n int
			n, end = s.scan(data[got:min(got+step, len(data))])
			got += n
		}
		require.Equal(t, wantEnd, end, "%q", data)
		if end {
			require.Equal(t, want, got, "%q", data)
		}
	})
}

// FuzzUnstuff: what unstuff takes away is dots at the beginning of lines and
// the terminator, nothing else, and it ends where scan ends.
func FuzzUnstuff(f *testing.F) {
	f.Add([]byte("a\r\n..b\r\n.\r\n"), uint8(1))
	f.Add([]byte(".\rx\r\n.\r\n"), uint8(2))
	f.Add([]byte("\r\r\n.x\r\n.\r\n"), uint8(1))
	f.Fuzz(func(t *testing.T, data []byte, cut uint8) {
		n, end := (&eodScanner{}).scan(data)
		var s eodScanner
		var got []byte
		var in int
		var ended bool
		step := int(cut)%9 + 1
		buf := make([]byte, step+1)
		for in < len(data) && !ended {
			o, i, e := s.unstuff(buf, data[in:min(in+step, len(data))])
			got, in, ended = append(got, buf[:o]...), in+i, e
		}
		require.Equal(t, end, ended)
		require.Equal(t, n, in)
		if end {
			require.Equal(t, string(naiveUnstuff(data[:n-3])), string(got))
		}
	})
}

func naiveUnstuff(data []byte) []byte {
	out, atStart := []byte{}, true
	for i := 0; i < len(data); i++ {
		if atStart && data[i] == '.' {
			// The byte behind the dot is data whatever it is, so also a CR: it
			// begins no line end.
			atStart = false
			if i++; i < len(data) {
				out = append(out, data[i])
				if data[i] == '\r' {
					if i++; i < len(data) {
						out = append(out, data[i])
					}
				}
			}
			continue
		}
		atStart = false
		out = append(out, data[i])
		if data[i] == '\r' {
			if i++; i < len(data) {
				out = append(out, data[i])
				atStart = data[i] == '\n'
			}
		}
	}
	return out
}

// goSMTPEnd is the byte behind the data's end as a state machine written from
// RFC 5321 4.1.1.4 and 4.5.2 sees it, in the reading of go-smtp (a CR that is
// no line end makes the next CR plain data).
func goSMTPEnd(data []byte) (int, bool) {
	atStart, i := true, 0
	for i < len(data) {
		if atStart && bytes.HasPrefix(data[i:], []byte(".\r\n")) {
			return i + 3, true
		}
		if atStart && data[i] == '.' {
			// A stuffed dot hides one byte; ".\r" hides the CR too.
			i++
			if i < len(data) && data[i] == '\r' {
				i++
			}
			if i < len(data) {
				i++
			}
			atStart = false
			continue
		}
		atStart = false
		if data[i] == '\r' {
			i++
			if i < len(data) {
				atStart = data[i] == '\n'
				i++
			}
			continue
		}
		i++
	}
	return 0, false
}

// FuzzEndOfDataAgainstGoSMTP asks go-smtp itself, over a connection: the bytes
// behind the end are a command, and it is answered as one.
func FuzzEndOfDataAgainstGoSMTP(f *testing.F) {
	srv, err := Start(Options{IdleTimeout: 10 * time.Second})
	require.NoError(f, err)
	f.Cleanup(func() { require.NoError(f, srv.Close()) })
	f.Add([]byte("x\r\n.\r"))
	f.Add([]byte("\r\r\n.\r\n"))
	f.Add([]byte(".\r\r\n.\r\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		nc, err := net.Dial("tcp", srv.Addr())
		require.NoError(t, err)
		defer nc.Close()
		require.NoError(t, nc.SetDeadline(time.Now().Add(10*time.Second)))
		var s eodScanner
		n, end := s.scan(data)
		if end {
			data = data[:n]
		} else {
			data = append(data, "\r\r\n\r\n.\r\n"...)
			// Whatever state the fuzzed bytes left, this is an end for both.
			if m, e := (&eodScanner{}).scan(data); !e || m != len(data) {
				return
			}
		}
		_, err = fmt.Fprintf(nc, "EHLO x\r\nMAIL FROM:<a@x.test>\r\nRCPT TO:<b@x.test>\r\nDATA\r\n%sQUIT\r\n", data)
		require.NoError(t, err)
		all, err := io.ReadAll(nc)
		require.NoError(t, err, "%q", data)
		require.Contains(t, string(all), "221 ", "%q: %s", data, all)
		require.Equal(t, 1, strings.Count(string(all), "queued as"), "%q: %s", data, all)
	})
}

// FuzzSession throws any bytes at the wrapper, with rules that change answers
// and hold nothing: the session ends, and every row ends with it.
func FuzzSession(f *testing.F) {
	rules := []Rule{
		On(StageMail, Drip).For(time.Microsecond).Chance(0.3).Rule(),
		On(StageRcpt, Reply).Code(451).Chance(0.3).Rule(),
		On(StageData, Reply).Code(451).Chance(0.3).Rule(),
		On(StageStored, Swallow).Chance(0.3).Rule(),
		On(StageStored, Reply).Code(554).Chance(0.2).Rule(),
	}
	conf, _, err := SelfSigned()
	require.NoError(f, err)
	f.Add([]byte("EHLO x\r\nMAIL FROM:<a@x>\r\nRCPT TO:<b@x>\r\nDATA\r\nhi\r\n.\r\nQUIT\r\n"))
	f.Add([]byte("EHLO x\r\nMAIL FROM:<a@x>\r\nRCPT TO:<b@x>\r\nBDAT 5\r\nhello\r\nBDAT 0 LAST\r\nRSET\r\n"))
	f.Add([]byte("EHLO x\r\nSTARTTLS\r\n\x16\x03\x01"))
	f.Add([]byte("EHLO x\r\nAUTH PLAIN\r\n=\r\nAUTH LOGIN\r\nYQ==\r\nYQ==\r\nBDAT 4294967295\r\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		srv, err := Start(Options{Seed: 3, Rules: rules, TLS: conf, MaxMessageBytes: 1 << 16, IdleTimeout: 5 * time.Second})
		require.NoError(t, err)
		nc, err := net.Dial("tcp", srv.Addr())
		require.NoError(t, err)
		require.NoError(t, nc.SetDeadline(time.Now().Add(10*time.Second)))
		var writer sync.WaitGroup
		writer.Go(func() {
			_, _ = nc.Write(data)
			_ = nc.(*net.TCPConn).CloseWrite()
		})
		_, _ = io.Copy(io.Discard, nc)
		_ = nc.Close()
		writer.Wait() // the fuzzer changes data afterwards
		require.NoError(t, srv.Close())
		for _, a := range srv.Ledger() {
			require.False(t, a.Open(), "%+v", a)
			require.Equal(t, !a.Stored && !a.Deduplicated, a.ClosedWithoutStoring)
		}
	})
}

func FuzzHeaders(f *testing.F) {
	f.Add([]byte("Subject: a\r\n b\r\nX-Dedupe-Key: k\r\n\r\nbody"), "subject")
	f.Fuzz(func(t *testing.T, head []byte, name string) {
		for _, v := range headers(head, name)[0] {
			require.NotContains(t, v, "\n")
		}
	})
}

var _ gosmtp.Session = (*session)(nil)
