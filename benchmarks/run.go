package benchmarks

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

// Config of a run.
type Config struct {
	// Out is the document's path, "docs/benchmarks/m06-notification.md"; the
	// JSON and the plots lie beside it.
	Out string
	// Logs receives the logs of all processes.
	Logs string
	// Only names the parts to run; empty means all.
	Only []string
	// Quick measures less of everything: minutes instead of a quarter of an hour.
	Quick bool
	// Repeats of each measurement; 0 is the default of the size.
	Repeats int
	Seed    uint64
	// From are folders of chaos runs whose evidence shows recovery.
	From []string
	// Command that repeats the run, and Revision of the program, for the document.
	Command, Revision string
	// Say is told what is being done, a line at a time; Part what a server is
	// waiting for. Say may be nil.
	Say  func(line string)
	Part func(part, state string)
}

// size is how much is measured. Both sizes are bounded: full in a quarter of an
// hour on two idle cores, quick in four minutes.
type size struct {
	repeats     int
	idleTickets int
	ticketRate  float64 // per second
	deadTickets int
	deadDelays  []time.Duration
	// ticketBound is how long the last ticket of a stretch is waited for.
	ticketBound  time.Duration
	floodTickets int
	flood        int // marketing mails of a campaign
	floodedHops  int // repeats of the hops under the flood
	splitRepeats int // of the layout that ships
	otherRepeats int // of those that it is compared with
	slowFlood    int // marketing mails where the mail server takes time
	slowRepeats  int // of the layouts there
	campaigns    int // whole campaigns, one after the other
	rawMails     int

	prefetch, consumers []int
	bareRepeats         int
	bareMessages        int
	bareFor             time.Duration
	workerMails         int
	workerFor           time.Duration
	// partBound is how long one part may take, runBound how long all may.
	partBound, runBound time.Duration
}

func sizeOf(quick bool) size {
	if quick {
		return size{
			repeats: 2, idleTickets: 40, ticketRate: 10,
			deadTickets: 40, deadDelays: []time.Duration{time.Second, 2 * time.Second},
			ticketBound: 30 * time.Second, floodTickets: 60, flood: 10_000, floodedHops: 1, splitRepeats: 1, otherRepeats: 1,
			slowFlood: 5_000, slowRepeats: 1, campaigns: 1, rawMails: 6_000,
			prefetch: []int{1, 100}, consumers: []int{1, 8},
			bareRepeats: 1, bareMessages: 12_000, bareFor: time.Second, workerMails: 1500, workerFor: 3 * time.Second,
			partBound: 150 * time.Second, runBound: 4 * time.Minute,
		}
	}
	return size{
		repeats: 3, idleTickets: 100, ticketRate: 10,
		deadTickets: 100, deadDelays: []time.Duration{time.Second, 2 * time.Second, 4 * time.Second},
		ticketBound: 90 * time.Second, floodTickets: 100, flood: 50_000, floodedHops: 2, splitRepeats: 2, otherRepeats: 2,
		slowFlood: 10_000, slowRepeats: 2, campaigns: 2, rawMails: 20_000,
		prefetch: []int{1, 10, 50, 100}, consumers: []int{1, 2, 8},
		bareRepeats: 2, bareMessages: 15_000, bareFor: time.Second, workerMails: 3000, workerFor: 3 * time.Second,
		partBound: 8 * time.Minute, runBound: 15 * time.Minute,
	}
}

// repeat each measurement n times.
func (s *size) repeat(n int) {
	for _, of := range []*int{&s.repeats, &s.floodedHops, &s.splitRepeats, &s.otherRepeats, &s.slowRepeats, &s.campaigns} {
		*of = n
	}
}

// runner is one run.
type runner struct {
	cfg    Config
	size   size
	lab    *lab
	result *Result
}

// part is one line of the list of parts.
type part struct {
	name, title string
	do          func(*runner, context.Context) error
	expect      func(size) time.Duration // on two idle cores
	saved       bool                     // reads what was saved before: no server is started for it
}

// parts in the order in which they run.
func parts() []part {
	return []part{
		{name: "hops", title: "a ticket hop by hop, idle and under the flood, and the serial floor", do: (*runner).hopsPart, expect: size.hopsTime},
		{name: "dead", title: "a mail server that refuses everything", do: (*runner).deadPart, expect: size.deadTime},
		{name: "recovery", title: "recovery, from saved evidence", do: (*runner).recoveryPart, expect: func(size) time.Duration { return 0 }, saved: true},
		{name: "latency", title: "tickets idle and under the flood, layout by layout", do: (*runner).latencyPart, expect: size.latencyTime},
		{name: "marketing", title: "the raw stages, and campaigns end to end", do: (*runner).marketingPart, expect: size.marketingTime},
		{name: "queues", title: "one queue by prefetch and consumers", do: (*runner).queuesPart, expect: size.queuesTime},
	}
}

// Parts lists the names that Config.Only knows.
func Parts() []string {
	var names []string
	for _, p := range parts() {
		names = append(names, p.name)
	}
	return names
}

// Knows returns an error that names the first of these parts that there is not.
func Knows(only []string) error {
	_, err := choose(only)
	return err
}

// errPart says that a part did not end well; the document holds the others.
var errPart = errors.New("not everything was measured")

// Run measures and writes the document. It writes after each part, so that what
// was measured is kept whatever happens next. The error says which parts failed.
func Run(ctx context.Context, cfg Config) (err error) {
	chosen, err := choose(cfg.Only)
	if err != nil {
		return err
	}
	if cfg.Say == nil {
		cfg.Say = func(string) {}
	}
	r := &runner{cfg: cfg, size: sizeOf(cfg.Quick)}
	if n := cfg.Repeats; n > 0 {
		r.size.repeat(n)
	}
	r.say("%s", estimate(r.size, chosen))
	began := time.Now()
	machine, err := inspectMachine()
	if err != nil {
		return err
	}
	r.result = &Result{Schema: SchemaVersion, Machine: machine, Run: RunInfo{
		Began: began.UTC().Truncate(time.Second), Seed: cfg.Seed, Quick: cfg.Quick, Repeats: r.size.repeats,
		Command: cfg.Command, Revision: cfg.Revision,
	}}
	if machine.Busy() {
		r.say("this machine is busy (%.0f %% of its cores): the document will say so", machine.BusyPercent)
	}
	if slices.ContainsFunc(chosen, func(p part) bool { return !p.saved }) {
		if r.lab, err = startLab(ctx, cfg.Logs, cfg.Part); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, r.lab.stop(ctx)) }()
		r.result.Run.Versions = r.lab.stack.Versions()
	}
	return r.run(ctx, chosen, began)
}

func choose(only []string) ([]part, error) {
	if len(only) == 0 {
		return parts(), nil
	}
	var chosen []part
	for _, p := range parts() {
		if slices.Contains(only, p.name) {
			chosen = append(chosen, p)
		}
	}
	for _, name := range only {
		if !slices.Contains(Parts(), name) {
			return nil, fmt.Errorf("no part is called %q; there are %s", name, strings.Join(Parts(), ", "))
		}
	}
	return chosen, nil
}

func (r *runner) run(ctx context.Context, chosen []part, began time.Time) error {
	var failed []error
	for _, p := range chosen {
		if ctx.Err() != nil {
			break
		}
		outcome, err := r.part(ctx, p, r.size.runBound-time.Since(began))
		if ctx.Err() != nil {
			outcome.Error = "interrupted"
		} else if err != nil {
			r.say("%s failed: %v", p.name, err)
			failed = append(failed, fmt.Errorf("%s: %w", p.name, err))
		}
		r.result.Parts = append(r.result.Parts, outcome)
		r.result.Run.Seconds = time.Since(began).Seconds()
		r.result.Run.Interrupted = ctx.Err() != nil
		if err := r.write(); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if len(failed) > 0 {
		return fmt.Errorf("%w: %w", errPart, errors.Join(failed...))
	}
	return nil
}

// part runs one part within its bound; a panic in it is its error.
func (r *runner) part(ctx context.Context, p part, left time.Duration) (o PartOutcome, err error) {
	o = PartOutcome{Name: p.name, Title: p.title, Load: loadAverage()}
	if p.expect != nil {
		o.Expected = p.expect(r.size).Seconds()
	}
	if left <= 0 {
		o.Skipped = fmt.Sprintf("the %s of a run were over", r.size.runBound)
		return o, nil
	}
	began := time.Now()
	limit := min(r.size.partBound, left)
	bound := fmt.Errorf("not done within %s", limit.Round(time.Second))
	ctx, cancel := context.WithTimeoutCause(ctx, limit, bound)
	defer cancel()
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v\n%s", v, debug.Stack())
		}
		o.Seconds = time.Since(began).Seconds()
		if errors.Is(err, context.DeadlineExceeded) {
			err = bound
		}
		var skip skipped
		if errors.As(err, &skip) {
			o.Skipped, err = string(skip), nil
		}
		if err != nil {
			o.Error, _, _ = strings.Cut(err.Error(), "\n")
		}
	}()
	return o, p.do(r, ctx)
}

// skipped is the reason why a part has nothing to measure.
type skipped string

func (s skipped) Error() string { return "skipped: " + string(s) }

func (r *runner) say(format string, args ...any) { r.cfg.Say(fmt.Sprintf(format, args...)) }

// write writes JSON, plots and Markdown.
func (r *runner) write() error {
	if err := r.result.Save(jsonPath(r.cfg.Out)); err != nil {
		return err
	}
	return WriteDocument(r.result, r.cfg.Out)
}

func jsonPath(document string) string {
	return strings.TrimSuffix(document, filepath.Ext(document)) + ".json"
}

// readNotes returns the interpretation that a person wrote beside the document,
// "" if there is none.
func readNotes(document string) (string, error) {
	body, err := os.ReadFile(filepath.Join(filepath.Dir(document), "notes.md"))
	if errors.Is(err, os.ErrNotExist) {
		return "", nil
	}
	return string(body), err
}
