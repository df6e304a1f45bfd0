package target

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// CrashPoints arms the crash points of one process, and hears of those that it
// reached. The process reads its orders from a file at each passage, so it is
// armed and disarmed while it runs, and writes each action into a pipe before it
// takes it: the witness that the point was reached outlives the process.
type CrashPoints struct {
	path    string
	pipe    *os.File
	hits    chan Hit
	orders  int
	program *program
}

// Hit is one action that a crash point took.
type Hit struct {
	Point   string
	Action  string // kill, stop
	Passage int    // of the point since it was armed, from 1
	PID     int
}

func (h Hit) String() string {
	return fmt.Sprintf("process %d took %q at passage %d of %s", h.PID, h.Action, h.Passage, h.Point)
}

// CrashPoints of a process; nil when the pipeline was started without.
func (p *Pipeline) CrashPoints(process string) *CrashPoints { return p.crash[process] }

// maxHits is more than anybody leaves unread: a process acts once per order.
const maxHits = 1024

func newCrashPoints(dir, process string) (*CrashPoints, error) {
	// The process has a working directory of its own.
	path, err := filepath.Abs(filepath.Join(dir, process+".crash"))
	if err != nil {
		return nil, fmt.Errorf("crash points of %s: %w", process, err)
	}
	c := &CrashPoints{path: path, hits: make(chan Hit, maxHits)}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("crash points of %s: %w", process, err)
	}
	if err := c.Disarm(); err != nil {
		return nil, err
	}
	if err := syscall.Mkfifo(path+".hits", 0o600); err != nil {
		return nil, fmt.Errorf("crash points of %s: pipe: %w", process, err)
	}
	// Open for both: the process never finds it without a reader, and the end of
	// one process is not the end of the pipe.
	c.pipe, err = os.OpenFile(path+".hits", os.O_RDWR|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("crash points of %s: pipe: %w", process, err)
	}
	go c.listen()
	return c, nil
}

// listen ends when the pipe is closed.
func (c *CrashPoints) listen() {
	defer close(c.hits)
	lines := bufio.NewScanner(c.pipe)
	for lines.Scan() {
		if hit, err := parseHit(lines.Text()); err == nil {
			c.hits <- hit
		}
	}
}

func parseHit(line string) (Hit, error) {
	f := strings.Fields(line)
	if len(f) != 4 {
		return Hit{}, fmt.Errorf("hit %q has %d words, not 4", line, len(f))
	}
	passage, err := strconv.Atoi(f[2])
	if err != nil {
		return Hit{}, fmt.Errorf("hit %q: passage: %w", line, err)
	}
	pid, err := strconv.Atoi(f[3])
	if err != nil {
		return Hit{}, fmt.Errorf("hit %q: process id: %w", line, err)
	}
	return Hit{Point: f[0], Action: f[1], Passage: passage, PID: pid}, nil
}

// Arm makes the point act at its n-th passage from now, once: action is "kill"
// or "stop".
func (c *CrashPoints) Arm(point, action string, passage int) error {
	// Numbered, by a point that does not exist: passages are counted anew also for
	// an order that is given twice.
	c.orders++
	return c.order(fmt.Sprintf("%s=%s@%d;order-%d=sleep:0s\n", point, action, passage, c.orders))
}

// Disarm makes no point act. What the process was about to do when it read the
// order before may still be done, and is then heard of.
func (c *CrashPoints) Disarm() error { return c.order("") }

// order replaces the file at once: a process reads all of it or all of the one
// before.
func (c *CrashPoints) order(text string) error {
	tmp := c.path + ".tmp"
	if err := os.WriteFile(tmp, []byte(text), 0o644); err != nil {
		return fmt.Errorf("crash points: %w", err)
	}
	if err := os.Rename(tmp, c.path); err != nil {
		return fmt.Errorf("crash points: %w", err)
	}
	return nil
}

// Await returns the next hit.
func (c *CrashPoints) Await(ctx context.Context) (Hit, error) {
	select {
	case hit, open := <-c.hits:
		if !open {
			return Hit{}, errors.New("crash points: the pipeline was stopped")
		}
		return hit, nil
	case <-ctx.Done():
		return Hit{}, ctx.Err()
	}
}

// AwaitDeath returns when the process is gone, and an error if anything but a
// SIGKILL ended it, or if the harness did.
func (c *CrashPoints) AwaitDeath(ctx context.Context) error {
	p := c.program
	l := p.current()
	if l == nil {
		return fmt.Errorf("death of %s: it never ran", p.name)
	}
	if err := p.gone(ctx, l, goneTimeout); err != nil {
		return fmt.Errorf("death of %s: %w", p.name, err)
	}
	p.mu.Lock()
	ours := l.killed
	p.mu.Unlock()
	status, ok := l.cmd.ProcessState.Sys().(syscall.WaitStatus)
	if ours || !ok || !status.Signaled() || status.Signal() != syscall.SIGKILL {
		return fmt.Errorf("death of %s: it ended with %s (by the harness: %t), not by its own SIGKILL", p.name, l.cmd.ProcessState, ours)
	}
	return nil
}

// AwaitStop returns when the process has stopped itself. It tells of the hit
// before: a SIGSTOP of the harness's in between would be the first of two, and
// the process would stop once more when it is continued.
func (c *CrashPoints) AwaitStop(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stoppedTimeout)
	defer cancel()
	if err := awaitStopped(ctx, c.program.PID()); err != nil {
		return fmt.Errorf("%s stops itself: %w", c.program.name, err)
	}
	return nil
}

func (c *CrashPoints) close() error {
	if c.pipe == nil {
		return nil
	}
	err := errors.Join(c.pipe.Close(), os.Remove(c.path+".hits"), os.Remove(c.path))
	if err != nil {
		return fmt.Errorf("crash points: %w", err)
	}
	return nil
}
