package target

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"mailproof/history"
)

const (
	// goneTimeout bounds the wait for a process after SIGKILL.
	goneTimeout = 10 * time.Second
	// stoppedTimeout bounds the wait until SIGSTOP has taken hold.
	stoppedTimeout = 5 * time.Second
	// quotedLines of a log are part of the error when a process does not start.
	quotedLines = 20
	// maxLine of a log that is read as JSON, in bytes.
	maxLine = 1 << 20
)

// program is one process of the system, through all its lives.
type program struct {
	name  string
	path  string
	args  []string
	env   []string // the whole environment
	log   string
	ready time.Duration // limit of a start
	guard func(pid int) error
	spawn *spawner
	// tell hears of every change in the process's life.
	tell func(history.Process)

	mu   sync.Mutex
	life *life // the latest; nil before the first start
}

// life is one run of a program.
type life struct {
	cmd    *exec.Cmd
	start  time.Time
	exited chan struct{} // closed when it was waited for
	tail   *tail
	killed bool // by the harness; guarded by program.mu
	paused bool // guarded by program.mu
}

var _ Process = (*program)(nil)

func (p *program) Name() string { return p.name }
func (p *program) Log() string  { return p.log }

// PID of the running process, 0 if there is none.
func (p *program) PID() int {
	if l := p.current(); l != nil && l.running() {
		return l.cmd.Process.Pid
	}
	return 0
}

func (p *program) Running() bool {
	l := p.current()
	return l != nil && l.running()
}

func (p *program) current() *life {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.life
}

func (l *life) running() bool {
	select {
	case <-l.exited:
		return false
	default:
		return true
	}
}

// addr is where the process listens; "" while it does not say so.
func (p *program) addr() string {
	l := p.current()
	if l == nil || !l.running() {
		return ""
	}
	return l.tail.listening()
}

// say reports an event of the process's life.
func (p *program) say(pid int, event, detail string) {
	p.tell(history.Process{Name: p.name, PID: pid, Event: event, Detail: detail, Wall: time.Now()})
}

// launch starts the program and returns when it says that it is ready.
func (p *program) launch(ctx context.Context) error {
	if p.Running() {
		return fmt.Errorf("start %s: it runs already", p.name)
	}
	l, err := p.fork()
	if err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	ctx, cancel := context.WithTimeout(ctx, p.ready)
	defer cancel()
	select {
	case <-l.tail.ready:
		p.say(l.cmd.Process.Pid, "ready", "")
		return nil
	case <-l.exited:
		return fmt.Errorf("start %s: it ended at once: %s\n%s", p.name, l.cmd.ProcessState, l.tail.last())
	case <-ctx.Done():
		return fmt.Errorf("start %s: not ready within %v: %w\n%s", p.name, p.ready, ctx.Err(), l.tail.last())
	}
}

// fork starts the process under guard.
func (p *program) fork() (*life, error) {
	logFile, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, logFile.Close())
	}
	cmd := exec.Command(p.path, p.args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = p.env, w, w
	// A group of its own: Ctrl-C in the terminal is the harness's to handle. It
	// dies with the thread that forked it, in case it is not guarded yet.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	err = p.spawn.start(cmd)
	err = errors.Join(err, w.Close()) // the child has its own
	if err != nil {
		return nil, errors.Join(err, r.Close(), logFile.Close())
	}
	l := &life{cmd: cmd, start: time.Now(), exited: make(chan struct{}), tail: newTail()}
	p.mu.Lock()
	p.life = l
	p.mu.Unlock()
	pid := cmd.Process.Pid
	p.say(pid, "started", "")
	read := make(chan struct{})
	go func() {
		defer close(read)
		l.tail.follow(r, logFile)
	}()
	go p.wait(l, read)
	if err := p.guard(pid); err != nil {
		return nil, errors.Join(err, p.Kill(context.Background()))
	}
	return l, nil
}

// wait reaps the process and reports an end that the harness did not cause.
func (p *program) wait(l *life, read <-chan struct{}) {
	_ = l.cmd.Wait() // ProcessState tells
	<-read
	p.mu.Lock()
	killed := l.killed
	p.mu.Unlock()
	if !killed {
		p.say(l.cmd.Process.Pid, "exited", l.cmd.ProcessState.String())
	}
	close(l.exited)
}

// Kill sends SIGKILL and returns when the process is gone. A process that does
// not run is not an error: it is gone.
func (p *program) Kill(ctx context.Context) error {
	p.mu.Lock()
	l := p.life
	if l == nil || !l.running() {
		p.mu.Unlock()
		return nil
	}
	l.killed = true
	p.mu.Unlock()
	if err := l.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill %s: %w", p.name, err)
	}
	if err := p.gone(ctx, l, goneTimeout); err != nil {
		return fmt.Errorf("kill %s: %w", p.name, err)
	}
	p.say(l.cmd.Process.Pid, "killed", "SIGKILL")
	return nil
}

func (p *program) gone(ctx context.Context, l *life, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	select {
	case <-l.exited:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("process %d is still there: %w", l.cmd.Process.Pid, ctx.Err())
	}
}

// Pause stops the process and returns when no thread of it runs any more.
func (p *program) Pause(ctx context.Context) error {
	l, err := p.signal(syscall.SIGSTOP, func(l *life) { l.paused = true })
	if err != nil {
		return fmt.Errorf("pause %s: %w", p.name, err)
	}
	p.say(l.cmd.Process.Pid, "paused", "SIGSTOP")
	ctx, cancel := context.WithTimeout(ctx, stoppedTimeout)
	defer cancel()
	if err := awaitStopped(ctx, l.cmd.Process.Pid); err != nil {
		return fmt.Errorf("pause %s: %w", p.name, err)
	}
	return nil
}

// awaitStopped returns when no thread of the process runs.
func awaitStopped(ctx context.Context, pid int) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		if stopped, err := allStopped(pid); err != nil || stopped {
			return err
		}
		select {
		case <-tick.C: // nothing else tells a parent that does not trace
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Resume continues a paused process.
func (p *program) Resume(context.Context) error {
	l, err := p.signal(syscall.SIGCONT, func(l *life) { l.paused = false })
	if err != nil {
		return fmt.Errorf("resume %s: %w", p.name, err)
	}
	p.say(l.cmd.Process.Pid, "resumed", "SIGCONT")
	return nil
}

func (p *program) signal(sig syscall.Signal, note func(*life)) (*life, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.life
	if l == nil || !l.running() {
		return nil, errors.New("it does not run")
	}
	if err := l.cmd.Process.Signal(sig); err != nil {
		return nil, err
	}
	note(l)
	return l, nil
}

// Restart ends the process, if it runs, with SIGKILL, and starts it again.
func (p *program) Restart(ctx context.Context) error {
	if err := p.Kill(ctx); err != nil {
		return err
	}
	return p.launch(ctx)
}

// Begin starts the program and does not wait until it is ready: what it needs
// may be away.
func (p *program) Begin(context.Context) error {
	if p.Running() {
		return fmt.Errorf("start %s: it runs already", p.name)
	}
	if _, err := p.fork(); err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	return nil
}

// AwaitReady returns when this life of the program has said that it is ready.
func (p *program) AwaitReady(ctx context.Context) error {
	l := p.current()
	if l == nil {
		return fmt.Errorf("%s was never started", p.name)
	}
	select {
	case <-l.tail.ready:
		p.say(l.cmd.Process.Pid, "ready", "")
		return nil
	case <-l.exited:
		return fmt.Errorf("%s has ended: %s\n%s", p.name, l.cmd.ProcessState, l.tail.last())
	case <-ctx.Done():
		return fmt.Errorf("%s is not ready: %w\n%s", p.name, ctx.Err(), l.tail.last())
	}
}

// Terminate sends SIGTERM, and does not wait.
func (p *program) Terminate(context.Context) error {
	l, err := p.signal(syscall.SIGTERM, func(*life) {})
	if err != nil {
		return fmt.Errorf("end %s: %w", p.name, err)
	}
	p.say(l.cmd.Process.Pid, "terminated", "SIGTERM")
	return nil
}

// AwaitEnd returns how the process ended, as the kernel says: "exit status 0",
// "signal: terminated".
func (p *program) AwaitEnd(ctx context.Context) (how string, err error) {
	l := p.current()
	if l == nil {
		return "", fmt.Errorf("%s was never started", p.name)
	}
	select {
	case <-l.exited:
		return l.cmd.ProcessState.String(), nil
	case <-ctx.Done():
		return "", fmt.Errorf("%s has not ended: %w\n%s", p.name, ctx.Err(), l.tail.last())
	}
}

// terminate asks the process to end and kills it after limit. The error says
// what was wrong with its end.
func (p *program) terminate(ctx context.Context, limit time.Duration) error {
	l := p.current()
	if l == nil || !l.running() {
		return nil
	}
	p.mu.Lock()
	paused := l.paused
	p.mu.Unlock()
	if paused {
		if err := p.Resume(ctx); err != nil && l.running() {
			return err
		}
	}
	if err := l.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("end %s: %w", p.name, err)
	}
	if err := p.gone(ctx, l, limit); err != nil {
		return errors.Join(fmt.Errorf("%s did not end within %v of SIGTERM\n%s", p.name, limit, l.tail.last()), p.Kill(ctx))
	}
	if code := l.cmd.ProcessState.ExitCode(); code != 0 {
		return fmt.Errorf("%s ended with %s after SIGTERM\n%s", p.name, l.cmd.ProcessState, l.tail.last())
	}
	return nil
}

// spawner forks from one thread that lives as long as it: Pdeathsig is sent
// when the forking thread ends, and Go ends threads as it likes.
type spawner struct {
	requests chan spawnRequest
}

type spawnRequest struct {
	cmd  *exec.Cmd
	done chan error
}

func newSpawner() *spawner {
	s := &spawner{requests: make(chan spawnRequest)}
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		for r := range s.requests {
			r.done <- r.cmd.Start()
		}
	}()
	return s
}

func (s *spawner) start(cmd *exec.Cmd) error {
	r := spawnRequest{cmd, make(chan error, 1)}
	s.requests <- r
	return <-r.done
}

// close ends the thread, and with it what it forked and still runs.
func (s *spawner) close() { close(s.requests) }

// tail copies a process's output to its log and looks for the lines that the
// harness waits for.
type tail struct {
	ready chan struct{} // closed by the first "ready"

	mu    sync.Mutex
	addr  string
	lines []string // the latest quotedLines
	said  bool
}

func newTail() *tail { return &tail{ready: make(chan struct{})} }

// follow ends when the process has closed its output.
func (t *tail) follow(r io.ReadCloser, log io.WriteCloser) {
	in := bufio.NewReaderSize(r, maxLine)
	for {
		line, err := in.ReadSlice('\n')
		if len(line) > 0 {
			// A log that cannot be written (disk full) must not stop the process.
			_, _ = log.Write(line)
			t.see(line)
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			break
		}
	}
	_, _ = r.Close(), log.Close() // read to the end, written without a buffer
}

func (t *tail) see(line []byte) {
	var l struct{ Msg, Addr string }
	isJSON := json.Unmarshal(line, &l) == nil
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lines = append(t.lines, strings.TrimRight(string(line), "\n"))
	if len(t.lines) > quotedLines {
		t.lines = t.lines[1:]
	}
	switch {
	case !isJSON:
	case l.Msg == "listening" && l.Addr != "" && t.addr == "":
		t.addr = l.Addr
	case l.Msg == "ready" && !t.said:
		t.said = true
		close(t.ready)
	}
}

func (t *tail) listening() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.addr
}

// last quotes the end of the log.
func (t *tail) last() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.lines) == 0 {
		return "  (it logged nothing)"
	}
	return "  " + strings.Join(t.lines, "\n  ")
}

// allStopped reports whether no thread of the process runs: SIGSTOP reaches
// them one after the other.
func allStopped(pid int) (bool, error) {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil || len(threads) == 0 {
		return false, fmt.Errorf("process %d has no threads to look at: %w", pid, errors.Join(err, os.ErrNotExist))
	}
	for _, path := range threads {
		stat, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			continue // the thread has ended meanwhile
		}
		if err != nil {
			return false, err
		}
		// The state follows the name in parentheses, which may hold anything.
		if i := strings.LastIndexByte(string(stat), ')'); i < 0 || i+2 >= len(stat) || stat[i+2] != 'T' {
			return false, nil
		}
	}
	return true, nil
}
