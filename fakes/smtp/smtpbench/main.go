// Command smtpbench compares the fake with other servers in one run, and shows
// what its memory does over many mails.
//
//	go run ./fakes/smtp/smtpbench [-mailpit PATH] [-smtp-sink PATH] [-before PATH] [-memory 200000]
//
// Every server runs as a process of its own and gets the same mails from the
// same client, in rounds that take turns, so that a machine that slows down
// slows all of them. The figure that counts is the ratio to the bare server:
// the median of the rounds' ratios, with its quartiles. -before takes another
// build of this command and measures its fake too.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"sort"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	gosmtp "github.com/emersion/go-smtp"

	"mailproof/fakes/smtp"
)

func main() {
	var err error
	switch {
	case len(os.Args) > 1 && os.Args[1] == "serve-fake":
		err = serveFake()
	case len(os.Args) > 1 && os.Args[1] == "serve-bare":
		err = serveBare()
	default:
		err = run()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "smtpbench:", err)
		os.Exit(1)
	}
}

type flags struct {
	mailpit, sink string
	before        string
	mails, rounds int
	conns, memory int
	lines         int
	connPerMail   bool
	keys          int
}

func run() error {
	var f flags
	flag.StringVar(&f.mailpit, "mailpit", "", "Mailpit's binary; not measured without")
	flag.StringVar(&f.sink, "smtp-sink", "", "Postfix' smtp-sink; not measured without")
	flag.StringVar(&f.before, "before", "", "an older build of smtpbench whose fake is measured too")
	flag.IntVar(&f.mails, "mails", 6000, "mails a round")
	flag.IntVar(&f.rounds, "rounds", 7, "rounds of each server")
	flag.IntVar(&f.conns, "conns", 16, "connections")
	flag.IntVar(&f.lines, "lines", 30, "lines of 60 bytes in a mail")
	flag.IntVar(&f.memory, "memory", 0, "after it, send so many mails to one fake and print its memory")
	flag.IntVar(&f.keys, "keys", 0, "so many different keys and recipients, 0: none twice")
	flag.BoolVar(&f.connPerMail, "conn-per-mail", false, "a new connection for each mail")
	flag.Parse()
	servers, err := start(f)
	defer func() {
		for _, s := range servers {
			s.stop()
		}
	}()
	if err != nil {
		return err
	}
	if err := compare(servers, f); err != nil {
		return err
	}
	if f.memory > 0 {
		return memory(servers[1], f)
	}
	return nil
}

// server is a process under load.
type server struct {
	name string
	addr string
	cmd  *exec.Cmd

	rates []float64
	cpu   []float64 // seconds of CPU per 1,000 mails
}

func start(f flags) ([]*server, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	var servers []*server
	add := func(name string, argv ...string) error {
		s, err := launch(name, argv)
		if s != nil {
			servers = append(servers, s)
		}
		return err
	}
	if err := errors.Join(add("bare go-smtp", self, "serve-bare"), add("fake", self, "serve-fake")); err != nil {
		return servers, err
	}
	if f.before != "" {
		if err := add("fake before", f.before, "serve-fake"); err != nil {
			return servers, err
		}
	}
	if f.mailpit != "" {
		addr, err := free()
		if err != nil {
			return servers, err
		}
		web, err := free()
		if err != nil {
			return servers, err
		}
		if err := add("Mailpit", f.mailpit, "--smtp", addr, "--listen", web, "--max", "0", "--quiet", "--disable-version-check"); err != nil {
			return servers, err
		}
		servers[len(servers)-1].addr = addr
	}
	if f.sink != "" {
		addr, err := free()
		if err != nil {
			return servers, err
		}
		if err := add("smtp-sink", f.sink, "-u", "nobody", addr, "100"); err != nil {
			return servers, err
		}
		servers[len(servers)-1].addr = addr
	}
	for _, s := range servers {
		if err := s.ready(); err != nil {
			return servers, err
		}
	}
	return servers, nil
}

func free() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// launch starts a server. Our own print their address first.
func launch(name string, argv []string) (*server, error) {
	s := &server{name: name, cmd: exec.Command(argv[0], argv[1:]...)}
	// The end of this process, however it comes, ends the server too.
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if !strings.HasPrefix(argv[len(argv)-1], "serve-") {
		return s, s.cmd.Start()
	}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	s.addr = strings.TrimSpace(line)
	return s, err
}

// ready waits for the greeting.
func (s *server) ready() error {
	deadline := time.Now().Add(20 * time.Second)
	for {
		c, err := gosmtp.Dial(s.addr)
		if err == nil {
			err = c.Hello("bench")
			_ = c.Close()
		}
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s is not ready: %w", s.name, err)
		}
		time.Sleep(50 * time.Millisecond) // nothing of a foreign process to wait for
	}
}

func (s *server) stop() {
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	done := make(chan struct{})
	go func() { _ = s.cmd.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(5 * time.Second):
		_ = s.cmd.Process.Kill()
		<-done
	}
}

func compare(servers []*server, f flags) error {
	for round := range f.rounds {
		for i := range servers {
			s := servers[(i+round)%len(servers)] // nobody is always the first
			before := s.cpuSeconds()
			d, err := load(s.addr, round*f.mails, f)
			if err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
			s.rates = append(s.rates, float64(f.mails)/d.Seconds())
			s.cpu = append(s.cpu, (s.cpuSeconds()-before)*1000/float64(f.mails))
		}
	}
	how := "kept connections"
	if f.connPerMail {
		how = "a connection for each mail"
	}
	fmt.Printf("%d rounds of %d mails of %d bytes, %d clients, %s\n\n", f.rounds, f.mails, len(mail(0, f)), f.conns, how)
	fmt.Printf("| server | mails/s, median | least | most | CPU ms/mail | ratio to bare | quartiles |\n|---|---|---|---|---|---|---|\n")
	for _, s := range servers {
		lo, hi := bounds(s.rates)
		ratios := ratios(s.rates, servers[0].rates)
		fmt.Printf("| %s | %.0f | %.0f | %.0f | %.3f | %.2f | %.2f to %.2f |\n", s.name, median(s.rates), lo, hi, median(s.cpu),
			median(ratios), quantile(ratios, 0.25), quantile(ratios, 0.75))
	}
	for _, s := range servers {
		if s.name == "Mailpit" {
			fmt.Printf("\nfake / Mailpit: %.1f\n", median(servers[1].rates)/median(s.rates))
		}
	}
	return nil
}

// ratios compares two servers round by round: what slows the machine down slows
// the rounds that stand beside each other.
func ratios(v, base []float64) []float64 {
	out := make([]float64, len(v))
	for i := range v {
		out[i] = v[i] / base[i]
	}
	return out
}

func median(v []float64) float64 { return quantile(v, 0.5) }

func quantile(v []float64, q float64) float64 {
	v = append([]float64(nil), v...)
	sort.Float64s(v)
	return v[int(q*float64(len(v)-1)+0.5)]
}

func bounds(v []float64) (lo, hi float64) {
	lo, hi = v[0], v[0]
	for _, x := range v {
		lo, hi = min(lo, x), max(hi, x)
	}
	return lo, hi
}

func mail(i int, f flags) string {
	return "From: a@x.test\r\nTo: b@x.test\r\nMessage-ID: <" + strconv.Itoa(i) + "@x.test>\r\nX-Dedupe-Key: k" + strconv.Itoa(i) +
		"\r\nSubject: bench\r\n\r\n" + strings.Repeat("0123456789abcdef0123456789abcdef0123456789abcdef0123456789\r\n", f.lines)
}

// load sends f.mails mails, numbered from first.
func load(addr string, first int, f flags) (time.Duration, error) {
	var wg sync.WaitGroup
	errs := make(chan error, f.conns)
	began := time.Now()
	for w := range f.conns {
		wg.Go(func() { errs <- worker(addr, first, w, f) })
	}
	wg.Wait()
	took := time.Since(began)
	close(errs)
	for err := range errs {
		if err != nil {
			return took, err
		}
	}
	return took, nil
}

func worker(addr string, first, w int, f flags) error {
	var c *gosmtp.Client
	defer func() {
		if c != nil {
			_ = c.Close()
		}
	}()
	for i := first + w; i < first+f.mails; i += f.conns {
		if c == nil {
			var err error
			if c, err = gosmtp.Dial(addr); err != nil {
				return err
			}
		}
		n := i
		if f.keys > 0 {
			n = i % f.keys
		}
		if err := c.SendMail("a@x.test", []string{"r" + strconv.Itoa(n) + "@x.test"}, strings.NewReader(mail(n, f))); err != nil {
			return err
		}
		if f.connPerMail {
			if err := c.Quit(); err != nil {
				return err
			}
			c = nil
		}
	}
	return nil
}

// grownMost is how many MB the fake may grow by from 40,000 to 200,000 keys: the
// index of the keys in its files (4 counts of 1.6 bytes for each mail: 1 MB),
// twice that for the collector's headroom, and the rest for the collector's
// moods and merges that run.
const grownMost = 8

// memory sends many mails to the fake and prints its resident memory. It fails
// when that grows by more than grownMost after the first fifth, in which all
// fills that is bounded.
func memory(s *server, f flags) error {
	fmt.Printf("\n| mails to one fake | resident MB |\n|---|---|\n")
	fmt.Printf("| %d (the rounds before) | %.0f |\n", 0, s.rss())
	total := f.memory
	f.mails = total / 10
	var filled, last float64
	for i := range 10 {
		if _, err := load(s.addr, 1_000_000+i*f.mails, f); err != nil {
			return err
		}
		last = s.rss()
		fmt.Printf("| %d | %.0f |\n", (i+1)*f.mails, last)
		if i == 1 {
			filled = last
		}
	}
	if most := grownMost * float64(total) / 200_000; last-filled > most {
		return fmt.Errorf("the fake grew by %.0f MB from %d to %d mails, at most %.0f are its due", last-filled, total/5, total, most)
	}
	return nil
}

// stat reads fields of /proc/PID/stat behind the command's name.
func (s *server) stat() []string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.cmd.Process.Pid))
	if err != nil {
		return nil
	}
	text := string(b)
	return strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
}

// cpuSeconds is user and system time, in ticks of 10 ms.
func (s *server) cpuSeconds() float64 {
	f := s.stat()
	if len(f) < 13 {
		return 0
	}
	user, _ := strconv.ParseFloat(f[11], 64)
	system, _ := strconv.ParseFloat(f[12], 64)
	return (user + system) / 100
}

func (s *server) rss() float64 {
	f := s.stat()
	if len(f) < 22 {
		return 0
	}
	pages, _ := strconv.ParseFloat(f[21], 64)
	return pages * float64(os.Getpagesize()) / (1 << 20)
}

func serveFake() error {
	srv, err := smtp.Start(smtp.Options{})
	if err != nil {
		return err
	}
	fmt.Println(srv.Addr())
	wait()
	return srv.Close()
}

// discard is the least that a go-smtp server can do.
type discard struct{}

func (discard) Reset()                                 {}
func (discard) Logout() error                          { return nil }
func (discard) Mail(string, *gosmtp.MailOptions) error { return nil }
func (discard) Rcpt(string, *gosmtp.RcptOptions) error { return nil }
func (discard) Data(r io.Reader) error                 { _, err := io.Copy(io.Discard, r); return err }
func newDiscard(*gosmtp.Conn) (gosmtp.Session, error)  { return discard{}, nil }
func bareServer() *gosmtp.Server                       { return quiet(gosmtp.NewServer(gosmtp.BackendFunc(newDiscard))) }

func quiet(s *gosmtp.Server) *gosmtp.Server { s.ErrorLog = log.New(io.Discard, "", 0); return s }

func serveBare() error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s := bareServer()
	go func() { _ = s.Serve(l) }()
	fmt.Println(l.Addr())
	wait()
	return s.Close()
}

func wait() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	<-ctx.Done()
}
