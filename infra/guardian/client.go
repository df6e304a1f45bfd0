package guardian

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Guardian is the owner's handle on its guardian.
type Guardian struct {
	pid      int
	requests *os.File      // its end is the guardian's order to clean up
	done     chan struct{} // closed when the guardian has ended
	exitErr  error         // how it ended; read after done

	writing sync.Mutex
	encoder *json.Encoder

	mu        sync.Mutex
	lastID    uint64
	waiting   map[uint64]chan reply
	launching map[uint64]*Process // made before the request is sent
	closed    bool
}

// helloTimeout is how long the second process may take to answer: starting the
// same binary takes milliseconds, on a machine with two busy cores a second.
const helloTimeout = 20 * time.Second

// lost is the status of a process whose end nobody saw, since the guardian
// ended before it: wait(2) never reports it of a process that has ended.
const lost syscall.WaitStatus = 0x7f

// Start starts a guardian that writes what it has to say to logPath.
func Start(ctx context.Context, logPath string) (*Guardian, error) {
	if os.Getenv(marker) != "" {
		return nil, errors.New("this process was started as a guardian: call guardian.MaybeRun first thing in main or TestMain")
	}
	g, err := start(logPath)
	if err != nil {
		return nil, fmt.Errorf("start the guardian: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	if _, err := g.call(ctx, request{Op: opHello}); err != nil {
		_ = syscall.Kill(g.pid, syscall.SIGKILL)
		g.requests.Close()
		<-g.done
		return nil, fmt.Errorf("the guardian does not answer (does main or TestMain call guardian.MaybeRun first?): %w", err)
	}
	return g, nil
}

func start(logPath string) (*Guardian, error) {
	log, err := os.OpenFile(logPath, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	requestsR, requestsW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer requestsR.Close()
	repliesR, repliesW, err := os.Pipe()
	if err != nil {
		requestsW.Close()
		return nil, err
	}
	defer repliesW.Close()

	cmd := exec.Command("/proc/self/exe") // also when the file was replaced or removed meanwhile
	cmd.Args = []string{"mailproof-guardian"}
	cmd.Env = append(essentials(), marker+"=1")
	cmd.Dir = "/"
	cmd.Stderr = log
	cmd.ExtraFiles = []*os.File{requestsR, repliesW}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		requestsW.Close()
		repliesR.Close()
		return nil, err
	}
	g := &Guardian{
		pid:       cmd.Process.Pid,
		requests:  requestsW,
		done:      make(chan struct{}),
		encoder:   json.NewEncoder(requestsW),
		waiting:   make(map[uint64]chan reply),
		launching: make(map[uint64]*Process),
	}
	go g.listen(cmd, repliesR)
	return g, nil
}

// essentials is the environment that a guardian needs: where temporary files
// go, and what the race detector and the coverage of a test binary look for.
func essentials() []string {
	var env []string
	for _, name := range []string{"PATH", "HOME", "TMPDIR", "GOCOVERDIR", "GORACE"} {
		if v, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+v)
		}
	}
	return env
}

// listen hands out replies until the guardian ends.
func (g *Guardian) listen(cmd *exec.Cmd, replies *os.File) {
	defer replies.Close()
	decoder := json.NewDecoder(replies)
	for {
		var r reply
		if err := decoder.Decode(&r); err != nil {
			break // the guardian has closed its end: it is ending
		}
		g.deliver(r)
	}
	g.exitErr = cmd.Wait()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	for _, w := range g.waiting {
		close(w)
	}
	// Its children went with it: it kills them, or they die of its death.
	for _, p := range g.launching {
		p.end(lost)
	}
	clear(g.launching)
	close(g.done)
}

func (g *Guardian) deliver(r reply) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if r.Exited {
		if p, ok := g.launching[r.ID]; ok {
			delete(g.launching, r.ID)
			p.end(syscall.WaitStatus(r.Status))
		}
		return
	}
	if w, ok := g.waiting[r.ID]; ok {
		delete(g.waiting, r.ID)
		w <- r // buffered
	}
}

// call sends a request and waits for its reply. When ctx ends first the request
// may still be carried out.
func (g *Guardian) call(ctx context.Context, r request) (reply, error) {
	w, err := g.send(&r, nil)
	if err != nil {
		return reply{}, err
	}
	return g.await(ctx, r.ID, w)
}

// send assigns the id and writes the request; p, if any, will get the exit.
func (g *Guardian) send(r *request, p *Process) (chan reply, error) {
	g.mu.Lock()
	if g.closed {
		g.mu.Unlock()
		return nil, ErrGone
	}
	g.lastID++
	r.ID = g.lastID
	w := make(chan reply, 1)
	g.waiting[r.ID] = w
	if p != nil {
		p.launch = r.ID
		g.launching[r.ID] = p
	}
	g.mu.Unlock()

	g.writing.Lock()
	defer g.writing.Unlock()
	if err := g.encoder.Encode(r); err != nil {
		g.forget(r.ID)
		return nil, errors.Join(ErrGone, err)
	}
	return w, nil
}

func (g *Guardian) await(ctx context.Context, id uint64, w chan reply) (reply, error) {
	select {
	case <-ctx.Done():
		g.forget(id)
		return reply{}, ctx.Err()
	case r, ok := <-w:
		if !ok {
			return reply{}, ErrGone
		}
		if r.Error != "" {
			return r, remoteError(r.Error)
		}
		return r, nil
	}
}

// remoteError keeps the one error that callers act on.
func remoteError(text string) error {
	if text == os.ErrProcessDone.Error() {
		return os.ErrProcessDone
	}
	return errors.New(text)
}

func (g *Guardian) forget(id uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.waiting, id)
}

// PID of the guardian process.
func (g *Guardian) PID() int { return g.pid }

// Done is closed when the guardian has ended, asked to or not.
func (g *Guardian) Done() <-chan struct{} { return g.done }

// TempDir makes a directory below [os.TempDir] that is removed at the end of
// the run, whoever owns what lies in it; pattern as of [os.MkdirTemp].
func (g *Guardian) TempDir(ctx context.Context, pattern string) (string, error) {
	r, err := g.call(ctx, request{Op: opTempDir, Pattern: pattern})
	if err != nil {
		return "", fmt.Errorf("make a temporary directory: %w", err)
	}
	return r.Path, nil
}

// Launch starts a process. It runs until it ends, is signalled, or the run is
// over. A ctx that has ended starts nothing; one that ends later changes nothing.
func (g *Guardian) Launch(ctx context.Context, c Command) (*Process, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	// Giving up half-way would leave a process without a handle. A fork takes
	// milliseconds.
	ctx = context.WithoutCancel(ctx)
	p := &Process{guardian: g, done: make(chan struct{})}
	r := request{Op: opLaunch, Command: &c}
	w, err := g.send(&r, p)
	if err != nil {
		return nil, err
	}
	rep, err := g.await(ctx, r.ID, w)
	if err != nil {
		g.mu.Lock()
		defer g.mu.Unlock()
		delete(g.launching, r.ID)
		return nil, err
	}
	p.pid = rep.PID
	return p, nil
}

// Run runs a process to its end and returns what it wrote to standard output.
// The error of a command that failed holds what it wrote to standard error.
// scratch is a directory for both; the process is killed when ctx ends.
func (g *Guardian) Run(ctx context.Context, scratch string, c Command) ([]byte, error) {
	dir, err := os.MkdirTemp(scratch, "run-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	c.Stdout, c.Stderr = dir+"/out", dir+"/err"
	p, err := g.Launch(ctx, c)
	if err != nil {
		return nil, err
	}
	name := c.Path[strings.LastIndexByte(c.Path, '/')+1:]
	select {
	case <-ctx.Done():
		err := fmt.Errorf("%s %s: %w", name, strings.Join(c.Args, " "), ctx.Err())
		killing, cancel := context.WithTimeout(context.WithoutCancel(ctx), bound)
		defer cancel()
		return nil, errors.Join(err, p.Kill(killing))
	case <-p.Done():
	}
	out, err := os.ReadFile(c.Stdout)
	if err != nil {
		return nil, err
	}
	if status := p.Status(); !status.Exited() || status.ExitStatus() != 0 {
		said, _ := os.ReadFile(c.Stderr)
		return out, fmt.Errorf("%s %s: %s: %s", name, strings.Join(c.Args, " "), describe(status), lastLines(string(said)+string(out)))
	}
	return out, nil
}

func describe(s syscall.WaitStatus) string {
	switch {
	case s.Exited():
		return fmt.Sprintf("exit status %d", s.ExitStatus())
	case s.Signaled():
		return fmt.Sprintf("killed by %v", s.Signal())
	}
	return "ended with the guardian"
}

// lastLines keeps an error readable: tools of the JVM and of Erlang print pages.
func lastLines(s string) string {
	const keep = 12
	lines := strings.Split(strings.TrimSpace(s), "\n")
	if len(lines) > keep {
		lines = append([]string{"…"}, lines[len(lines)-keep:]...)
	}
	return strings.Join(lines, "\n")
}

// Guard puts a process that the caller started itself under the guardian's
// care, with everything that descends from it at the end of the run.
func (g *Guardian) Guard(ctx context.Context, pid int) error {
	if _, err := g.call(ctx, request{Op: opGuard, PID: pid}); err != nil {
		return fmt.Errorf("guard process %d: %w", pid, err)
	}
	return nil
}

// Stop ends every process, removes the directories and ends the guardian. A
// second call waits for the first and returns the same.
func (g *Guardian) Stop(ctx context.Context) error {
	r := request{Op: opStop}
	w, err := g.send(&r, nil)
	if err != nil {
		return g.awaitEnd(ctx)
	}
	if _, err := g.await(ctx, r.ID, w); err != nil && !errors.Is(err, ErrGone) {
		return fmt.Errorf("stop the guardian: %w", err)
	}
	return g.awaitEnd(ctx)
}

func (g *Guardian) awaitEnd(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return fmt.Errorf("wait for the guardian to end: %w", ctx.Err())
	case <-g.done:
	}
	_ = g.requests.Close() // a second close is an error that means nothing
	if g.exitErr != nil {
		return fmt.Errorf("the guardian failed, see its log: %w", g.exitErr)
	}
	return nil
}

// Process is a process that the guardian started.
type Process struct {
	guardian *Guardian
	launch   uint64
	pid      int
	done     chan struct{}
	status   syscall.WaitStatus // read after done
}

func (p *Process) end(status syscall.WaitStatus) {
	p.status = status
	close(p.done)
}

// PID of the process; it may have been reaped.
func (p *Process) PID() int { return p.pid }

// Done is closed when the process has ended and was reaped.
func (p *Process) Done() <-chan struct{} { return p.done }

// Running reports whether the process exists.
func (p *Process) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Status says how the process ended; only after Done.
func (p *Process) Status() syscall.WaitStatus {
	<-p.done
	return p.status
}

// String says how the process ended, for error texts.
func (p *Process) String() string {
	if p.Running() {
		return "running"
	}
	return describe(p.status)
}

// Signal sends a signal to the process alone.
func (p *Process) Signal(ctx context.Context, sig syscall.Signal) error {
	return p.signal(ctx, sig, false)
}

// SignalTree sends a signal to the process and its descendants, and returns
// when it has taken effect: after SIGKILL all are gone, after SIGSTOP all are
// stopped, after SIGCONT none is.
func (p *Process) SignalTree(ctx context.Context, sig syscall.Signal) error {
	return p.signal(ctx, sig, true)
}

func (p *Process) signal(ctx context.Context, sig syscall.Signal, tree bool) error {
	_, err := p.guardian.call(ctx, request{Op: opSignal, Process: p.launch, Signal: sig, Tree: tree})
	if err != nil {
		return fmt.Errorf("signal process %d with %v: %w", p.pid, sig, err)
	}
	return nil
}

// Kill ends the process and its descendants with SIGKILL and returns when they
// are gone. A process that has ended already is no error.
func (p *Process) Kill(ctx context.Context) error {
	if err := p.SignalTree(ctx, syscall.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return p.Wait(ctx)
}

// Wait returns when the process has ended.
func (p *Process) Wait(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of process %d: %w", p.pid, ctx.Err())
	case <-p.done:
		return nil
	}
}
