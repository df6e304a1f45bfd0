package scenarios

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"mailproof/history"
	"mailproof/reports"
	"mailproof/verify"
)

// Runner takes scenarios through their phases, one cell after another.
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
	// Again writes the command line that runs these cells ("t6.2/hold") again
	// with the same seed; no cells means all that were chosen.
	Again func(cells ...string) string
	Watch Watcher
}

// Watcher is told how a run gets on. Its methods are called from one goroutine.
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
	n, i := 0, 0
	for _, s := range chosen {
		n += len(s.Cells)
	}
	for _, s := range chosen {
		for _, c := range s.Cells {
			i++
			if ctx.Err() != nil {
				break
			}
			r.Watch.Cell(i, n, s, c)
			result := r.cell(ctx, s, c)
			sum.Scenarios = append(sum.Scenarios, result)
			sum.Verdict = verify.Worse(sum.Verdict, result.Verdict)
			r.Watch.Done(result)
		}
	}
	if len(sum.Scenarios) == 0 {
		sum.Verdict = verify.Invalid
	}
	if i < n || ctx.Err() != nil {
		sum.Verdict = verify.Worse(sum.Verdict, verify.Unknown)
	}
	sum.Seconds = seconds(r.Clock() - began)
	return sum, context.Cause(ctx)
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
		dir:  filepath.Join(r.Dir, cellFolder(s, c)),
		plan: drawPlan(r.Seed, s.Name, s.Load),
	}
	result := x.run(ctx)
	result.Name, result.Title, result.Policy = s.Name, s.Title, c.Policy
	if result.Guarantee == "" {
		result.Guarantee = verify.Guarantee(*x.meta())
	}
	result.Seed, result.Seconds = r.Seed, seconds(r.Clock()-began)
	result.Dir = filepath.Base(x.dir)
	result.Command = r.Again(s.Name + "/" + c.Policy)
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
