package guardian

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// server is the guardian's side.
type server struct {
	log *slog.Logger

	writing sync.Mutex
	replies *json.Encoder

	mu       sync.Mutex
	children map[uint64]*child // by id of the launch, until reaped
	byPID    map[int]*child
	guarded  []identity
	dirs     []string
	started  chan struct{} // wakes the reaper: there may be a child again
}

type child struct {
	launch uint64
	id     identity
	stop   syscall.Signal
}

// serve is the guardian's whole life; it returns the exit status.
func serve() int {
	// PR_SET_PDEATHSIG fires when the thread that forked ends, not the process:
	// all forks happen on this thread, which lives as long as the guardian.
	runtime.LockOSThread()
	syscall.CloseOnExec(requestFD)
	syscall.CloseOnExec(replyFD)
	log := slog.New(slog.NewTextHandler(os.Stderr, nil)).With("guardian", os.Getpid())

	// Caught and dropped, not ignored: an ignored signal would stay ignored in
	// every server that is started from here.
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)

	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		log.Error("become subreaper", "error", err)
		return 1
	}
	if err := os.Chdir("/"); err != nil {
		log.Error("change directory", "error", err)
		return 1
	}
	s := &server{
		log:      log,
		replies:  json.NewEncoder(os.NewFile(replyFD, "replies")),
		children: make(map[uint64]*child),
		byPID:    make(map[int]*child),
		started:  make(chan struct{}, 1),
	}
	go s.reap()

	stopID := s.obey(json.NewDecoder(os.NewFile(requestFD, "requests")))
	err := s.finish()
	if err != nil {
		log.Error("end of the run", "error", err)
	}
	if stopID != 0 {
		s.answer(stopID, reply{}, err)
	}
	if err != nil {
		return 1
	}
	return 0
}

// obey serves requests until the owner stops or is gone. It returns the id of
// the request to stop, 0 when there was none.
func (s *server) obey(requests *json.Decoder) uint64 {
	for {
		var r request
		if err := requests.Decode(&r); err != nil {
			if !errors.Is(err, io.EOF) {
				s.log.Error("read a request", "error", err)
			}
			s.log.Info("the owner is gone")
			return 0
		}
		switch r.Op {
		case opHello:
			s.answer(r.ID, reply{PID: os.Getpid()}, nil)
		case opTempDir:
			path, err := s.tempDir(r.Pattern)
			s.answer(r.ID, reply{Path: path}, err)
		case opLaunch:
			s.launch(r)
		case opSignal:
			// Waits for other processes; must not hold up the next request.
			go func() { s.answer(r.ID, reply{}, s.signal(r)) }()
		case opGuard:
			s.answer(r.ID, reply{}, s.guard(r.PID))
		case opStop:
			return r.ID
		default:
			s.answer(r.ID, reply{}, fmt.Errorf("unknown request %q", r.Op))
		}
	}
}

func (s *server) answer(id uint64, r reply, err error) {
	r.ID = id
	if err != nil {
		r.Error = err.Error()
	}
	s.writing.Lock()
	defer s.writing.Unlock()
	// An owner that is gone reads no replies; the end of the requests says so.
	_ = s.replies.Encode(r)
}

// tempDir makes a directory that is removed at the end. Other users may pass
// through it, since servers that refuse root keep their data below it.
func (s *server) tempDir(pattern string) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	dir, err := os.MkdirTemp("", pattern)
	if err != nil {
		return "", err
	}
	s.dirs = append(s.dirs, dir)
	return dir, os.Chmod(dir, 0o711)
}

// launch forks with the lock held, so that the reaper cannot meet a child that
// is not in the tables yet, and answers before it can announce the exit.
func (s *server) launch(r request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c, err := fork(r.ID, *r.Command)
	if err != nil {
		s.answer(r.ID, reply{}, fmt.Errorf("start %s: %w", r.Command.Path, err))
		return
	}
	s.children[r.ID] = c
	s.byPID[c.id.pid] = c
	s.answer(r.ID, reply{PID: c.id.pid}, nil)
	select {
	case s.started <- struct{}{}:
	default: // already due to look
	}
}

func fork(launch uint64, c Command) (*child, error) {
	if !filepath.IsAbs(c.Path) {
		return nil, errors.New("the path is not absolute")
	}
	files, err := standardFiles(c)
	if err != nil {
		return nil, err
	}
	fds := make([]uintptr, len(files))
	for i, f := range files {
		defer f.Close()
		fds[i] = f.Fd()
	}
	attr := &syscall.ProcAttr{
		Dir:   c.Dir,
		Env:   c.Env,
		Files: fds,
		Sys:   &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL},
	}
	if c.User != nil {
		attr.Sys.Credential = &syscall.Credential{Uid: c.User.UID, Gid: c.User.GID}
	}
	if attr.Env == nil {
		attr.Env = []string{} // nil would mean this process' own
	}
	pid, err := syscall.ForkExec(c.Path, append([]string{c.Path}, c.Args...), attr)
	if err != nil {
		return nil, err
	}
	st, ok, err := look(pid)
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, fmt.Errorf("process %d is gone unreaped", pid)
	}
	return &child{launch: launch, id: st.identity, stop: c.StopSignal}, nil
}

// standardFiles opens standard input, output and error.
func standardFiles(c Command) ([]*os.File, error) {
	in, err := os.Open(os.DevNull)
	if err != nil {
		return nil, err
	}
	out, err := appendTo(c.Stdout)
	if err != nil {
		in.Close()
		return nil, err
	}
	if c.Stderr == c.Stdout {
		return []*os.File{in, out, out}, nil
	}
	errs, err := appendTo(c.Stderr)
	if err != nil {
		in.Close()
		out.Close()
		return nil, err
	}
	return []*os.File{in, out, errs}, nil
}

func appendTo(path string) (*os.File, error) {
	if path == "" {
		return os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	}
	return os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
}

// reap collects every child that ends, adopted ones too, and announces those
// that the owner launched.
func (s *server) reap() {
	for {
		var info unix.Siginfo
		// WNOWAIT only looks: the pid stays taken until the lock is held, so no
		// signal of [server.signal] can hit a process that got it anew.
		err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOWAIT, nil)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ECHILD):
			<-s.started
			continue
		case err != nil:
			s.log.Error("wait for children", "error", err)
			return
		}
		s.reapOne()
	}
}

func (s *server) reapOne() {
	s.mu.Lock()
	defer s.mu.Unlock()
	var status unix.WaitStatus
	pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
	if err != nil || pid == 0 {
		return // taken by nobody else; the next look decides
	}
	c, ours := s.byPID[pid]
	if !ours {
		return // a grandchild that was adopted
	}
	delete(s.byPID, pid)
	delete(s.children, c.launch)
	s.answer(c.launch, reply{Exited: true, PID: pid, Status: int(status)}, nil)
}

// signal delivers a signal to one child, and with Tree to its descendants. It
// returns when the signal has taken effect: gone, stopped, or running again.
func (s *server) signal(r request) error {
	s.mu.Lock()
	c, ok := s.children[r.Process]
	if !ok {
		s.mu.Unlock()
		return os.ErrProcessDone
	}
	if !r.Tree {
		defer s.mu.Unlock()
		return syscall.Kill(c.id.pid, r.Signal)
	}
	s.mu.Unlock()
	done := never
	switch r.Signal {
	case syscall.SIGSTOP:
		done = stopped
	case syscall.SIGCONT:
		done = notStopped
	}
	return signalFamily(r.Signal, done, c.id)
}

func (s *server) guard(pid int) error {
	st, ok, err := look(pid)
	if err != nil {
		return err
	}
	if !ok || st.dead() {
		return fmt.Errorf("process %d: %w", pid, os.ErrProcessDone)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.guarded = append(s.guarded, st.identity)
	return nil
}

// finish ends everything; see the comment of the package.
func (s *server) finish() error {
	gentle, roots := s.ending()
	return errors.Join(
		resume(gentle),
		signalFamily(syscall.SIGKILL, never, roots...),
		awaitEnd(identities(gentle), graceful),
		killDescendants(os.Getpid()),
		s.removeDirs(),
	)
}

// ending tells apart whom to ask first and whom to kill at once.
func (s *server) ending() (gentle []*child, roots []identity) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.children {
		if c.stop == 0 {
			roots = append(roots, c.id)
			continue
		}
		gentle = append(gentle, c)
		// Still in the table, so not reaped, so the pid is its own.
		_ = syscall.Kill(c.id.pid, c.stop)
	}
	return gentle, append(roots, s.guarded...)
}

func identities(gentle []*child) []identity {
	ids := make([]identity, len(gentle))
	for i, c := range gentle {
		ids[i] = c.id
	}
	return ids
}

// resume lets those run that were sent their stop signal while they were
// paused, with their children: a server that ends waits for its children.
func resume(gentle []*child) error {
	if len(gentle) == 0 {
		return nil
	}
	return signalFamily(syscall.SIGCONT, notStopped, identities(gentle)...)
}

func (s *server) removeDirs() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for _, d := range s.dirs {
		errs = append(errs, os.RemoveAll(d))
	}
	return errors.Join(errs...)
}

func awaitEnd(ids []identity, limit time.Duration) error {
	deadline := time.Now().Add(limit)
	for {
		t, err := lookAtAll()
		if err != nil {
			return err
		}
		left := 0
		for _, id := range ids {
			if t.has(id) {
				left++
			}
		}
		if left == 0 || time.Now().After(deadline) {
			return nil
		}
		time.Sleep(poll)
	}
}

// killDescendants kills until pid has no descendant, not even one that waits to
// be reaped: one that does may still hold a port. What is orphaned on the way
// comes to this process, which is its subreaper, and is met by the next look.
func killDescendants(pid int) error {
	self, _, err := look(pid)
	if err != nil {
		return err
	}
	deadline := time.Now().Add(bound)
	for {
		t, err := lookAtAll()
		if err != nil {
			return err
		}
		members := map[identity]bool{self.identity: true}
		t.family(members)
		delete(members, self.identity)
		if len(members) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d processes live on after %v of SIGKILL", len(members), bound)
		}
		for id := range members {
			_ = syscall.Kill(id.pid, syscall.SIGKILL)
		}
		time.Sleep(poll)
	}
}
