package resendapi

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// The benchmarks compare the fake with a bare net/http handler that decodes
// the same JSON and answers with an id, under the same client: raw requests
// over kept connections, so that the server is most of what is measured.
func BenchmarkFake(b *testing.B) {
	srv, err := Start(Options{})
	require.NoError(b, err)
	defer func() { require.NoError(b, srv.Close()) }()
	benchmark(b, srv.Addr())
	require.EqualValues(b, b.N, srv.Totals().Stored)
}

func BenchmarkBare(b *testing.B) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	srv := &http.Server{Handler: bareHandler()}
	go func() { _ = srv.Serve(l) }()
	defer srv.Close()
	benchmark(b, l.Addr().String())
}

func bareHandler() http.Handler {
	var n atomic.Int64
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var m struct {
			From, Subject, HTML, Text string
			To                        []string
		}
		if err := json.NewDecoder(r.Body).Decode(&m); err != nil || len(m.To) == 0 {
			http.Error(w, "bad", http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "application/json; charset=utf-8")
		_ = json.NewEncoder(w).Encode(map[string]string{"id": strconv.FormatInt(n.Add(1), 10)})
	})
}

// BenchmarkRatio compares both in one run, in turns: what else the machine does
// meets both alike. It reports bare/fake, the median over the rounds, by the
// clock and by processor time; 1 means as fast as the bare handler.
func BenchmarkRatio(b *testing.B) {
	srv, err := Start(Options{})
	require.NoError(b, err)
	defer func() { require.NoError(b, srv.Close()) }()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	plain := &http.Server{Handler: bareHandler()}
	go func() { _ = plain.Serve(l) }()
	defer plain.Close()

	fake, bare := newLoad(b, srv.Addr()), newLoad(b, l.Addr().String())
	defer fake.close()
	defer bare.close()
	var wall, processor []float64
	for range b.N {
		bw, bp := bare.round(b)
		fw, fp := fake.round(b)
		wall, processor = append(wall, bw/fw), append(processor, bp/fp)
	}
	sort.Float64s(wall)
	sort.Float64s(processor)
	b.ReportMetric(wall[len(wall)/2], "ratio-clock")
	b.ReportMetric(processor[len(processor)/2], "ratio-cpu")
}

// load is clients on kept connections.
type load struct {
	conns []net.Conn
	brs   []*bufio.Reader
	html  string
	n     atomic.Int64
	run   int64
}

func newLoad(b *testing.B, addr string) *load {
	l := &load{html: strings.Repeat("<p>0123456789abcdef0123456789abcdef</p>", 45), run: benchRun.Add(1)}
	for range 8 {
		nc, err := net.Dial("tcp", addr)
		require.NoError(b, err)
		l.conns, l.brs = append(l.conns, nc), append(l.brs, bufio.NewReader(nc))
	}
	return l
}

// round sends 800 mails and returns what it took, by both measures, in
// nanoseconds.
func (l *load) round(b *testing.B) (wall, processor float64) {
	begun, used := time.Now(), processorTime(b)
	var wg sync.WaitGroup
	for i := range l.conns {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for range 100 {
				if err := post(l.conns[i], l.brs[i], l.run, l.n.Add(1), l.html); err != nil {
					b.Error(err)
					return
				}
			}
		}()
	}
	wg.Wait()
	return float64(time.Since(begun)), float64(processorTime(b) - used)
}

func (l *load) close() {
	for _, nc := range l.conns {
		_ = nc.Close()
	}
}

func processorTime(b testing.TB) time.Duration {
	var u unix.Rusage
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

var benchRun atomic.Int64

func benchmark(b *testing.B, addr string) {
	html := strings.Repeat("<p>0123456789abcdef0123456789abcdef</p>", 45) // 1.8 KB, no escapes
	run := benchRun.Add(1)
	var n atomic.Int64
	b.ReportAllocs()
	b.SetParallelism(8)
	// Processor time says more than the clock on a machine that does other
	// things too; half of it is the client's.
	used := processorTime(b)
	defer func() { b.ReportMetric(float64(processorTime(b)-used)/float64(b.N), "cpu-ns/op") }()
	b.RunParallel(func(pb *testing.PB) {
		nc, err := net.Dial("tcp", addr)
		if err != nil {
			b.Error(err)
			return
		}
		defer nc.Close()
		br := bufio.NewReader(nc)
		for pb.Next() {
			if err := post(nc, br, run, n.Add(1), html); err != nil {
				b.Error(err)
				return
			}
		}
	})
}

// post sends one mail of its own key and reads the answer.
func post(nc net.Conn, br *bufio.Reader, run, n int64, html string) error {
	body := fmt.Sprintf(`{"from":"shop@shop.test","to":["r%d@x.test"],"subject":"Your ticket %d","html":"%s"}`, n, n, html)
	_, err := fmt.Fprintf(nc, "POST /emails HTTP/1.1\r\nHost: x\r\nUser-Agent: bench\r\nAuthorization: Bearer re_1\r\nIdempotency-Key: k%d-%d\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
		run, n, len(body), body)
	if err != nil {
		return err
	}
	length := 0
	for first := true; ; first = false {
		line, err := br.ReadSlice('\n')
		if err != nil {
			return err
		}
		if first && !strings.Contains(string(line), " 200 ") {
			return fmt.Errorf("answered %s", line)
		}
		if rest, ok := strings.CutPrefix(string(line), "Content-Length: "); ok {
			if length, err = strconv.Atoi(strings.TrimSpace(rest)); err != nil {
				return err
			}
		}
		if len(line) == 2 {
			break
		}
	}
	_, err = io.CopyN(io.Discard, br, int64(length))
	return err
}
