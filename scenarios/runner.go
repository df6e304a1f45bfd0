package scenarios

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"mailproof/history"
	"mailproof/reports"
	"mailproof/verify"
)

// Runner takes scenarios through their phases, one cell after another; those
// named in Beside run side by side with the others, each on parts of its own.
type Runner struct {
	Lab Lab
	// Dir is the run's folder; each cell gets one below it.
	Dir  string
	Seed uint64
	// Clock gives monotonic nanoseconds, the time base of all evidence. Began is
	// its reading when the run began, before the parts were started; 0 means
	// the call of Run.
	Clock func() int64
	Began int64
	// Unplugged are names of faults whose Inject does nothing, and NoTraffic
	// leaves out the workload: the harness's tests of itself.
	Unplugged []string
	NoTraffic bool
	// Beside names cells ("t6.3/resend") that begin at once and run beside all
	// others. It is for one that mostly waits. Cells of an exclusive scenario,
	// which act on shared parts, come last, whatever is named here.
	Beside []string
	// Again writes the command line that runs these cells ("t6.2/hold") again
	// with the same seed; no cells means all that were chosen.
	Again func(cells ...string) string
	Watch Watcher
}

// Watcher is told how a run gets on. Its methods are called one at a time; where
// cells run side by side, their calls come mixed.
type Watcher interface {
	// Cell begins the i-th of n cells.
	Cell(i, n int, s Scenario, c Cell)
	// Status comes a few times per second.
	Status(Status)
	// Done ends a cell.
	Done(reports.Scenario)
}

// Status is a moment of a cell.
type Status struct {
	Scenario, Policy, Phase      string
	Bookings, Confirmed          int // to be made, acknowledged
	Stored                       int
	Pending                      map[string]string // mail → what it waits for
	Fault                        string            // a campaign under way
	Struck, Strikes              int
	Elapsed, ExpectedOfThisPhase time.Duration
}

// Run takes every cell through its phases and returns the summary. An error
// means that the harness could not go on at all; whatever befalls a single cell
// is in the cell's verdict.
func (r *Runner) Run(ctx context.Context, chosen []Scenario) (reports.Summary, error) {
	began := r.Began
	if began == 0 {
		began = r.Clock()
	}
	sum := reports.Summary{
		Verdict: verify.Pass, Seed: r.Seed, RunID: filepath.Base(r.Dir),
		Versions: r.Lab.Versions(), Command: r.Again(),
	}
	r.Watch = &oneAtATime{Watcher: r.Watch}
	results := r.cells(ctx, chosen)
	for _, result := range results {
		if result != nil {
			sum.Scenarios = append(sum.Scenarios, *result)
			sum.Verdict = verify.Worse(sum.Verdict, result.Verdict)
		}
	}
	if len(sum.Scenarios) == 0 {
		sum.Verdict = verify.Invalid
	}
	if len(sum.Scenarios) < len(results) || ctx.Err() != nil {
		sum.Verdict = verify.Worse(sum.Verdict, verify.Unknown)
	}
	sum.Seconds = seconds(r.Clock() - began)
	return sum, context.Cause(ctx)
}

// cells runs every cell and returns their results in the order of chosen, nil
// for one that was never begun.
func (r *Runner) cells(ctx context.Context, chosen []Scenario) []*reports.Scenario {
	var places []place
	for _, s := range chosen {
		for _, c := range s.Cells {
			places = append(places, place{i: len(places), scenario: s, cell: c})
		}
	}
	results := make([]*reports.Scenario, len(places))
	run := func(p place) {
		if ctx.Err() != nil {
			return
		}
		r.Watch.Cell(p.i+1, len(places), p.scenario, p.cell)
		result := r.cell(ctx, p.scenario, p.cell)
		results[p.i] = &result
		r.Watch.Done(result)
	}
	var beside sync.WaitGroup
	for _, p := range places {
		if !p.scenario.Exclusive && slices.Contains(r.Beside, p.id()) {
			beside.Go(func() { run(p) })
		}
	}
	for _, p := range places {
		if !p.scenario.Exclusive && !slices.Contains(r.Beside, p.id()) {
			run(p)
		}
	}
	beside.Wait()
	for _, p := range places { // what breaks the shared parts comes when nobody else needs them
		if p.scenario.Exclusive {
			run(p)
		}
	}
	return results
}

// place is a cell and where its result belongs.
type place struct {
	i        int
	scenario Scenario
	cell     Cell
}

func (p place) id() string { return p.scenario.Name + "/" + p.cell.Name() }

// oneAtATime keeps the calls of cells that run side by side apart.
type oneAtATime struct {
	Watcher
	mu sync.Mutex
}

func (o *oneAtATime) Cell(i, n int, s Scenario, c Cell) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.Watcher.Cell(i, n, s, c)
}

func (o *oneAtATime) Status(s Status) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.Watcher.Status(s)
}

func (o *oneAtATime) Done(r reports.Scenario) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.Watcher.Done(r)
}

// CheckUnplugged refuses the name of a fault that no chosen scenario has: a
// self-test with a typing error would be green.
func (r *Runner) CheckUnplugged(chosen []Scenario) error {
	known := map[string]bool{}
	for _, s := range chosen {
		for _, name := range s.FaultNames {
			known[name] = true
		}
	}
	for _, name := range r.Unplugged {
		if !known[name] {
			return fmt.Errorf("no chosen scenario has a fault called %q; there are %s",
				name, strings.Join(slices.Sorted(maps.Keys(known)), ", "))
		}
	}
	return nil
}

// cell runs one cell and judges it. It never panics: what breaks inside is the
// verdict harness-error.
func (r *Runner) cell(ctx context.Context, s Scenario, c Cell) reports.Scenario {
	began := r.Clock()
	x := &cellRun{
		runner: r, scenario: s, cell: c, clock: r.Clock,
		dir: filepath.Join(r.Dir, cellFolder(s, c)),
	}
	result := x.run(ctx)
	result.Name, result.Title, result.Policy = s.Name, s.Title, c.Name()
	if result.Guarantee == "" {
		result.Guarantee = verify.Guarantee(*x.meta())
	}
	result.Seed, result.Seconds = r.Seed, seconds(r.Clock()-began)
	result.Dir = filepath.Base(x.dir)
	result.Command = r.Again(s.Name + "/" + c.Name())
	return result
}

func seconds(ns int64) float64 { return time.Duration(ns).Round(time.Millisecond).Seconds() }

// harnessError is the finding for a failure of the harness itself.
func harnessError(err error) verify.Finding {
	return verify.Finding{Invariant: "harness", Verdict: verify.HarnessError, Text: err.Error()}
}

func ensureDir(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("the cell's folder: %w", err)
	}
	return nil
}

// phaseRecord marks the start of a phase.
func phaseRecord(t int64, name string) history.Record {
	return history.Record{T: t, Kind: history.KindPhase, Phase: &history.Phase{Name: name}}
}
