package processes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"mailproof/infra"
	"mailproof/infra/guardian"
)

const (
	// probeEvery is the pause between two questions to a starting server.
	probeEvery = 100 * time.Millisecond
	// probeTimeout bounds one question.
	probeTimeout = 3 * time.Second
	// restartTimeout bounds a restart, with the recovery that it includes.
	restartTimeout = 2 * time.Minute
	// stopWait is how long a server may take to stop by itself in a restart.
	stopWait = 30 * time.Second
)

// node is one server process.
type node struct {
	name     string
	guardian *guardian.Guardian
	command  guardian.Command
	// stop is the signal for a clean stop.
	stop syscall.Signal
	// probe asks the server whether it serves.
	probe func(context.Context) error

	acting sync.Mutex // one act at a time

	mu      sync.Mutex
	process *guardian.Process
	paused  bool
}

var _ infra.Node = (*node)(nil)

func (n *node) Name() string { return n.name }

func (n *node) Log() string { return n.command.Stdout }

func (n *node) current() (p *guardian.Process, paused bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.process, n.paused
}

func (n *node) set(p *guardian.Process, paused bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.process, n.paused = p, paused
}

func (n *node) PID() int {
	p, _ := n.current()
	if p == nil {
		return 0
	}
	return p.PID()
}

func (n *node) Running() bool {
	p, _ := n.current()
	return p != nil && p.Running()
}

// Serving reports whether the node runs and is not paused.
func (n *node) Serving() bool {
	p, paused := n.current()
	return p != nil && p.Running() && !paused
}

// launch starts the process and waits until the server answers; a server that
// does not is killed.
func (n *node) launch(ctx context.Context) error {
	p, err := n.guardian.Launch(ctx, n.command)
	if err != nil {
		return fmt.Errorf("%s: %w", n.name, err)
	}
	n.set(p, false)
	if err := n.await(ctx, p); err != nil {
		killing, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopWait)
		defer cancel()
		return errors.Join(fmt.Errorf("%s does not answer: %w\n%s", n.name, err, tail(n.Log())), p.Kill(killing))
	}
	return nil
}

// await asks until the server answers, ends, or ctx does.
func (n *node) await(ctx context.Context, p *guardian.Process) error {
	tick := time.NewTicker(probeEvery)
	defer tick.Stop()
	for {
		err := n.ask(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.Done():
			return fmt.Errorf("the process has ended: %v", p)
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-tick.C:
		}
	}
}

func (n *node) ask(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	return n.probe(ctx)
}

// Kill ends the server's processes with SIGKILL.
func (n *node) Kill(ctx context.Context) error {
	n.acting.Lock()
	defer n.acting.Unlock()
	p, _ := n.current()
	if p == nil {
		return nil
	}
	if err := p.Kill(ctx); err != nil {
		return fmt.Errorf("kill %s: %w", n.name, err)
	}
	n.set(p, false)
	return nil
}

// Pause stops the server's processes with SIGSTOP.
func (n *node) Pause(ctx context.Context) error {
	n.acting.Lock()
	defer n.acting.Unlock()
	p, _ := n.current()
	if p == nil || !p.Running() {
		return fmt.Errorf("pause %s: it does not run", n.name)
	}
	// Before the signal: whoever looks for a node that answers must not be sent
	// to one that is about to stop.
	n.set(p, true)
	if err := p.SignalTree(ctx, syscall.SIGSTOP); err != nil {
		return fmt.Errorf("pause %s: %w", n.name, err)
	}
	return nil
}

// Resume lets them run again.
func (n *node) Resume(ctx context.Context) error {
	n.acting.Lock()
	defer n.acting.Unlock()
	return n.resume(ctx)
}

func (n *node) resume(ctx context.Context) error {
	p, _ := n.current()
	if p == nil || !p.Running() {
		return fmt.Errorf("resume %s: it does not run", n.name)
	}
	if err := p.SignalTree(ctx, syscall.SIGCONT); err != nil {
		return fmt.Errorf("resume %s: %w", n.name, err)
	}
	n.set(p, false)
	return nil
}

// Restart starts the server on the data and ports that it had.
func (n *node) Restart(ctx context.Context) error {
	n.acting.Lock()
	defer n.acting.Unlock()
	ctx, cancel := context.WithTimeout(ctx, restartTimeout)
	defer cancel()
	if err := n.end(ctx); err != nil {
		return fmt.Errorf("restart %s: %w", n.name, err)
	}
	if err := n.launch(ctx); err != nil {
		return fmt.Errorf("restart: %w", err)
	}
	return nil
}

// end stops a server that runs, by itself if it can.
func (n *node) end(ctx context.Context) error {
	p, paused := n.current()
	if p == nil || !p.Running() {
		return nil
	}
	if paused {
		if err := n.resume(ctx); err != nil {
			return err
		}
	}
	if err := p.Signal(ctx, n.stop); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	waiting, cancel := context.WithTimeout(ctx, stopWait)
	defer cancel()
	if err := p.Wait(waiting); err == nil {
		return nil
	}
	return p.Kill(ctx)
}

// tail is the end of a log, for an error that would otherwise name only a file.
func tail(path string) string {
	const lines, bytes = 15, 8 << 10
	f, err := os.Open(path)
	if err != nil {
		return "(no log: " + err.Error() + ")"
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "(no log: " + err.Error() + ")"
	}
	b := make([]byte, bytes)
	n, _ := f.ReadAt(b, max(0, info.Size()-bytes)) // io.EOF says the end was reached
	all := strings.Split(strings.TrimSpace(string(b[:n])), "\n")
	if len(all) > lines {
		all = all[len(all)-lines:]
	}
	return "end of " + path + ":\n  " + strings.Join(all, "\n  ")
}
