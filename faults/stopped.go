package faults

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"mailproof/fakes/script"
	"mailproof/fakes/smtp"
	"mailproof/infra"
)

const (
	// drains is how long a process that was asked to end is watched before its
	// mails may go on: an end that does not wait for them shows within it.
	drains = 500 * time.Millisecond
	// endBound is how long a process may take to end once nothing holds it up.
	endBound = 20 * time.Second
	// atOnce is how long it may take after a second signal.
	atOnce = 5 * time.Second
)

// Stoppable is a process that can be asked to end; a program of
// target.Pipeline is one.
type Stoppable interface {
	Process
	Running() bool
	// Terminate sends SIGTERM; AwaitEnd returns how the process ended.
	Terminate(ctx context.Context) error
	AwaitEnd(ctx context.Context) (how string, err error)
	// Begin starts it without waiting, AwaitReady waits until it is ready.
	Begin(ctx context.Context) error
	AwaitReady(ctx context.Context) error
}

const cleanEnd = "exit status 0"

// Drained asks a process to end while the mail server has read the dots of some
// of its mails and answers none. It must wait for the answers, write them down,
// and end by itself.
func Drained(server MailServer, p Stoppable, mails int) Act {
	return Act{
		Title: "terminated-while-sending", Part: p.Name(), Mend: revive(p),
		Strike: func(ctx context.Context) (Witness, error) {
			holds, release, err := holdAtDot(ctx, server, p.Name(), mails)
			defer release()
			if err != nil {
				return Witness{}, err
			}
			if err := p.Terminate(ctx); err != nil {
				return Witness{}, err
			}
			if !sleep(ctx, drains) {
				return Witness{}, ctx.Err()
			}
			if !p.Running() {
				return Witness{}, fmt.Errorf("%s ended with %d mails between dot and reply", p.Name(), mails)
			}
			release()
			how, took, err := ended(ctx, p, endBound)
			if err != nil {
				return Witness{}, err
			}
			if how != cleanEnd {
				return Witness{}, fmt.Errorf("%s ended with %s", p.Name(), how)
			}
			if err := p.Restart(ctx); err != nil {
				return Witness{}, err
			}
			return Witness{
				Text: fmt.Sprintf("%d sessions were held after their dot when %s got SIGTERM; it ran on until they were answered and ended with %s %.1f s later",
					mails, p.Name(), how, took.Seconds()),
				Count: mails, Keys: keysOf(holds),
			}, nil
		},
	}
}

// StoppedAtOnce sends a second SIGTERM while a mail holds up the end: the
// process must be gone at once, and its mail is whoever comes next's.
func StoppedAtOnce(server MailServer, p Stoppable) Act {
	return Act{
		Title: "terminated-twice", Part: p.Name(), Mend: revive(p),
		Strike: func(ctx context.Context) (Witness, error) {
			holds, release, err := holdAtDot(ctx, server, p.Name(), 1)
			defer release()
			if err != nil {
				return Witness{}, err
			}
			if err := p.Terminate(ctx); err != nil {
				return Witness{}, err
			}
			if !sleep(ctx, drains) {
				return Witness{}, ctx.Err()
			}
			if err := p.Terminate(ctx); err != nil {
				return Witness{}, fmt.Errorf("it did not wait for its mail: %w", err)
			}
			how, took, err := ended(ctx, p, atOnce)
			if err != nil {
				return Witness{}, fmt.Errorf("after a second signal: %w", err)
			}
			release()
			if err := p.Restart(ctx); err != nil {
				return Witness{}, err
			}
			return Witness{
				Text: fmt.Sprintf("a session was held after its dot when %s got SIGTERM twice; it was gone %.1f s after the second (%s), with the session still held",
					p.Name(), took.Seconds(), how),
				Count: 1, Keys: keysOf(holds),
			}, nil
		},
	}
}

// Ended asks a process to end while it is at work, and starts it again.
func Ended(title string, p Stoppable) Act {
	return Act{
		Title: title, Part: p.Name(), Mend: revive(p),
		Strike: func(ctx context.Context) (Witness, error) {
			if err := p.Terminate(ctx); err != nil {
				return Witness{}, err
			}
			how, took, err := ended(ctx, p, endBound)
			if err != nil {
				return Witness{}, err
			}
			if how != cleanEnd {
				return Witness{}, fmt.Errorf("%s ended with %s", p.Name(), how)
			}
			if err := p.Restart(ctx); err != nil {
				return Witness{}, err
			}
			return Witness{Text: fmt.Sprintf("%s got SIGTERM and ended with %s after %.1f s", p.Name(), how, took.Seconds()), Count: 1}, nil
		},
	}
}

func revive(p Stoppable) func(context.Context) error {
	return func(ctx context.Context) error {
		if p.Running() {
			return nil
		}
		return p.Restart(ctx)
	}
}

func ended(ctx context.Context, p Stoppable, bound time.Duration) (how string, took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	began := time.Now()
	how, err = p.AwaitEnd(ctx)
	return how, time.Since(began), err
}

// holdAtDot makes the server hold n sessions of a process whose dots it has
// read. release lets all of them go; it may be called twice.
func holdAtDot(ctx context.Context, server MailServer, process string, n int) (holds []script.Hold, release func(), err error) {
	rule, err := server.AddRule(script.Rule{
		Action: script.Action{Kind: script.HoldUntilReleased, Stage: smtp.StageDot, For: script.Duration(holdBound)}, Count: n,
	})
	if err != nil {
		return nil, func() {}, fmt.Errorf("holding at the dot: %w", err)
	}
	release = func() {
		server.RemoveRule(rule)
		for _, h := range holds {
			server.Release(h.ID)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, holdWait)
	defer cancel()
	for len(holds) < n {
		h, err := server.AwaitHold(ctx, func(h script.Hold) bool {
			return h.Rule == rule && !slices.ContainsFunc(holds, func(seen script.Hold) bool { return seen.ID == h.ID })
		})
		if err != nil {
			return holds, release, fmt.Errorf("%d of %d sessions of %s were held after the dot: %w", len(holds), n, process, err)
		}
		holds = append(holds, h)
	}
	return holds, release, nil
}

func keysOf(holds []script.Hold) []string {
	keys := map[string]bool{}
	for _, h := range holds {
		if h.Key != "" {
			keys[h.Key] = true
		}
	}
	return sortedKeys(keys)
}

// StartedBefore starts processes while every part that they need is away: they
// must wait, say for what, and go on by themselves when the parts come. unready
// is what each says of its readiness; said returns the words that one of them
// must name while it waits.
func StartedBefore(stack infra.Stack, all []Stoppable, unready func() map[string]string, said func(process string) []string) Act {
	nodes := append([]infra.Node{stack.Postgres(), stack.Kafka()}, stack.RabbitMQ().Nodes()...)
	names := make([]string, len(all))
	for i, p := range all {
		names[i] = p.Name()
	}
	return Act{
		Title: "started-before-parts", Part: "Postgres, RabbitMQ, Kafka, and the start of " + strings.Join(names, ", "), Mend: func(ctx context.Context) error {
			err := stack.Mend(ctx)
			for _, p := range all {
				err = errors.Join(err, revive(p)(ctx))
			}
			return err
		},
		Strike: func(ctx context.Context) (Witness, error) {
			for _, p := range all {
				if err := p.Terminate(ctx); err != nil {
					return Witness{}, err
				}
			}
			for _, p := range all {
				if _, _, err := ended(ctx, p, endBound); err != nil {
					return Witness{}, err
				}
			}
			if err := each(nodes, func(n infra.Node) error { return n.Kill(ctx) }); err != nil {
				return Witness{}, err
			}
			for _, p := range all {
				if err := p.Begin(ctx); err != nil {
					return Witness{}, err
				}
			}
			waiting, err := awaited(ctx, func(context.Context) (map[string]string, error) { return named(all, unready(), said) })
			if err != nil {
				return Witness{}, err
			}
			if err := stack.Mend(ctx); err != nil {
				return Witness{}, err
			}
			for _, p := range all {
				if err := ready(ctx, p); err != nil {
					return Witness{}, err
				}
			}
			return Witness{Text: "started with every part away: " + listed(waiting) + "; then the parts were started, and each process became ready", Count: len(all)}, nil
		},
	}
}

func ready(ctx context.Context, p Stoppable) error {
	ctx, cancel := context.WithTimeout(ctx, nodeBound)
	defer cancel()
	return p.AwaitReady(ctx)
}

// named wants each process to run, and to name what it waits for.
func named(all []Stoppable, unready map[string]string, said func(string) []string) (map[string]string, error) {
	for _, p := range all {
		why := unready[p.Name()]
		for _, word := range said(p.Name()) {
			if !p.Running() || !strings.Contains(why, word) {
				return nil, fmt.Errorf("%s runs: %t, and says %q, which does not name %s", p.Name(), p.Running(), why, word)
			}
		}
	}
	return unready, nil
}

func listed(said map[string]string) string {
	lines := make([]string, 0, len(said))
	for _, name := range slices.Sorted(maps.Keys(said)) {
		lines = append(lines, fmt.Sprintf("%s said %q", name, said[name]))
	}
	return strings.Join(lines, ", ")
}
