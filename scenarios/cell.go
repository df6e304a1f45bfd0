package scenarios

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"mailproof/faults"
	"mailproof/history"
	"mailproof/reports"
	"mailproof/target"
	"mailproof/verify"
)

const (
	// baselineBound is how long an undisturbed system may take to settle the
	// baseline's mails.
	baselineBound = 30 * time.Second
	// campaignBound bounds the faults phase beyond its workload.
	campaignBound = 3 * time.Minute
	// healBound and saveBound bound what is done even after an interrupt.
	healBound = 2 * time.Minute
	saveBound = 2 * time.Minute
	// idleStretch is how long an idle system's CPU time is sampled.
	idleStretch = 3 * time.Second
)

// cellRun is one cell on its way through the phases.
type cellRun struct {
	runner   *Runner
	scenario Scenario
	cell     Cell
	clock    func() int64
	dir      string
	plan     Plan

	journal *history.Recorder
	bench   *Bench
	clients *clients
	runs    []*faults.Run
	own     ownFindings
	usage   usageMeter
	mended  bool // the parts, after an exclusive cell

	mu      sync.Mutex // guards what the status shows
	phase   string
	phaseAt int64
	pending map[string]string
}

// run opens the cell, takes it through its phases, saves the evidence, and only
// then judges it.
func (x *cellRun) run(ctx context.Context) reports.Scenario {
	if err := x.open(ctx); err != nil {
		return x.broken(ctx, fmt.Errorf("start: %w", err))
	}
	stopWatch := x.watch()
	err := guard("phases", func() error { return x.phases(ctx) })
	err = errors.Join(err, guard("heal", func() error { return x.heal(ctx) }))
	x.noteError(err)
	if ctx.Err() == nil {
		x.noteError(guard("saving the evidence", func() error { return x.save(ctx) }))
	}
	x.noteError(guard("stop", func() error { return errors.Join(x.close(ctx), x.journal.Close()) }))
	stopWatch()
	if ctx.Err() != nil {
		return x.interrupted()
	}
	if err := x.own.save(x.dir); err != nil {
		return x.broken(ctx, err)
	}
	result, own, err := judge(x.dir)
	if err == nil {
		err = own.saveSamples(x.dir)
	}
	if err != nil {
		return x.broken(ctx, fmt.Errorf("judge: %w", err))
	}
	return result
}

func (x *cellRun) open(ctx context.Context) error {
	if err := ensureDir(x.dir); err != nil {
		return err
	}
	if !x.runner.NoTraffic {
		var err error
		if x.plan, err = drawPlan(x.runner.Seed, x.scenario.Name, x.scenario.Load); err != nil {
			return err
		}
		if adjust := x.scenario.Adjust; adjust != nil {
			adjust(&x.plan, rng(x.runner.Seed, x.scenario.Name, "adjust"))
		}
	}
	journal, err := history.Create(filepath.Join(x.dir, history.FileName))
	if err != nil {
		return err
	}
	journal.Clock = x.clock
	x.journal = journal
	x.record(history.Record{T: x.clock(), Kind: history.KindMeta, Meta: x.meta()})
	x.enter("start")
	x.bench, err = x.runner.Lab.Open(ctx, Order{
		Scenario: x.scenario.Name, Cell: x.cell, System: x.scenario.System, Seed: x.runner.Seed,
		Plan: x.plan, Dir: x.dir, Record: x.record,
	})
	if err != nil {
		return errors.Join(err, x.journal.Close())
	}
	x.bench.Find = x.own.find
	x.clients = newClients(x.bench.Target, x.clock, x.record)
	for _, f := range x.scenario.Faults(x.bench) {
		if slices.Contains(x.runner.Unplugged, f.Name()) {
			f = faults.Unplug(f)
		}
		x.runs = append(x.runs, faults.NewRun(f, x.clock))
	}
	return nil
}

// record hands one piece of evidence to the journal, which remembers what it
// refused: closing it returns the first such error.
func (x *cellRun) record(r history.Record) { _ = x.journal.Record(r) }

func (x *cellRun) meta() *history.Meta {
	s := x.scenario
	arrivals := s.Load.Operations()
	if s.Load.UntilStruck {
		arrivals = s.Floors.Confirmed
	}
	floors := s.Floors
	if s.FaultsOf != nil {
		floors.Faults = len(x.planned())
	}
	return &history.Meta{
		Scenario: s.Name, Policy: x.cell.Policy, Server: x.cell.Server(), Seed: x.runner.Seed,
		MaxAttempts: s.System.MaxAttempts, RetryDelays: s.System.RetryDelays, Lease: s.System.Lease,
		Wall: time.Now(), Floors: floors, Invariants: s.Invariants,
		Params: map[string]string{
			paramTitle:                s.Title,
			paramCell:                 x.cell.Name(),
			history.ParamArrivals:     strconv.Itoa(arrivals),
			history.ParamSendDeadline: s.System.SendDeadline.String(),
			history.ParamStaleAfter:   target.StaleAfter.String(),
			history.ParamSubject:      "booking",
			history.ParamFaults:       strings.Join(x.planned(), ","),
		},
	}
}

// planned are the names of the cell's faults.
func (x *cellRun) planned() []string {
	if x.scenario.FaultsOf != nil {
		return x.scenario.FaultsOf(x.cell)
	}
	return x.scenario.FaultNames
}

func (x *cellRun) phases(ctx context.Context) error {
	for _, p := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"baseline", x.baseline},
		{"faults", x.strike},
		{"heal", x.heal},
		{"quiesce", x.quiesce},
	} {
		x.enter(p.name)
		if err := p.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return nil
}

func (x *cellRun) enter(phase string) {
	t := x.clock()
	x.mu.Lock()
	x.phase, x.phaseAt, x.pending = phase, t, nil
	x.mu.Unlock()
	x.record(phaseRecord(t, phase))
}

// baseline shows that the undisturbed system works; if it does not, what
// follows says nothing about faults.
func (x *cellRun) baseline(ctx context.Context) error {
	if x.scenario.MeasureCPU {
		x.usage.begin(x.bench.Target.Processes())
		pause(ctx, idleStretch)
		x.own.measure(idleCPU, x.usage.percent(mailService), "%", "of one core, no traffic")
		x.usage.last = nil
	}
	x.clients.drive(ctx, x.clock(), x.plan.Baseline, nil)
	if len(x.plan.Baseline) == 0 {
		return ctx.Err()
	}
	rest := x.awaitRest(ctx, baselineBound, x.mails)
	if rest.state != atRest && ctx.Err() == nil {
		x.own.find(verify.Invalid, "baseline", "", fmt.Sprintf(
			"before any fault the system settles the baseline's %d mails within %s; %s", len(x.plan.Baseline), baselineBound, rest.describe()))
	}
	return ctx.Err()
}

// strike injects the faults, runs the workload under them, and waits for the
// campaigns.
func (x *cellRun) strike(ctx context.Context) error {
	x.usage.begin(x.bench.Target.Processes())
	for _, f := range x.runs {
		if err := f.Inject(ctx); err != nil {
			return err
		}
	}
	if x.scenario.Load.UntilStruck {
		x.driveUntilStruck(ctx)
	} else {
		x.clients.drive(ctx, x.clock(), x.plan.Faults, nil)
		x.awaitCampaigns(ctx)
	}
	if x.scenario.FaultsUntilSettled {
		x.awaitRest(ctx, x.quiesceBound(), x.mails)
	}
	x.usage.end()
	return ctx.Err()
}

// driveUntilStruck runs the workload until every campaign has made its last
// strike and the floor of confirmations is reached: what arrives while a part is
// away may be given up by its client.
func (x *cellRun) driveUntilStruck(ctx context.Context) {
	driving, driven := context.WithCancel(ctx)
	struck, enough := make(chan struct{}), make(chan struct{})
	go func() { defer close(struck); x.awaitCampaigns(ctx) }()
	go func() {
		defer close(enough)
		<-struck
		for x.clients.confirmed.Load() < int64(x.scenario.Floors.Confirmed) && pause(driving, restPoll) {
			continue
		}
	}()
	x.clients.drive(ctx, x.clock(), x.plan.Faults, enough)
	driven()
	<-enough
}

// awaitCampaigns returns when every campaign has made its last strike.
func (x *cellRun) awaitCampaigns(ctx context.Context) {
	bound := cmp.Or(x.scenario.Campaign, campaignBound)
	bounded, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	for _, f := range x.runs {
		if err := f.Wait(bounded); err != nil {
			x.own.find(verify.Invalid, "faults", "", fmt.Sprintf("the fault makes its last strike within %s: %v", bound, err))
		}
	}
}

// heal undoes every fault that is still in place, the last one first. It is
// called as a phase and once more after the phases, whatever ended them.
func (x *cellRun) heal(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), healBound)
	defer cancel()
	var errs []error
	for _, f := range slices.Backward(x.runs) {
		errs = append(errs, f.Heal(ctx))
	}
	if x.scenario.Exclusive && x.bench.Mend != nil && !x.mended {
		x.mended = true
		errs = append(errs, x.bench.Mend(ctx))
	}
	return errors.Join(errs...)
}

// quiesce waits until nothing is pending. At the bound a system that still
// moves is unknown, one that stands still has failed: of mails the checker
// "quiesced" says which, of what lies between the parts this does.
func (x *cellRun) quiesce(ctx context.Context) error {
	rest := x.awaitRest(ctx, x.quiesceBound(), x.everything)
	if ctx.Err() != nil || rest.state == atRest {
		return ctx.Err()
	}
	_ = x.journal.Note("%s after %s: %s", rest.state, x.quiesceBound(), rest.describe())
	verdict, how := verify.Fail, fmt.Sprintf("nothing has moved for %s", rest.still.Round(time.Second))
	if rest.state == moving {
		verdict, how = verify.Unknown, "the system was still moving at the bound"
	}
	for _, part := range firstKeys(rest.between, maxStalled) {
		x.own.find(verdict, "comes-to-rest", "", fmt.Sprintf(
			"with all faults healed every record is read and every queue empties within %s; %s, and %s: %s",
			x.quiesceBound(), how, part, rest.between[part]))
	}
	return nil
}

// save asks the faults for their witnesses and writes everything that is not on
// disk yet.
func (x *cellRun) save(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), saveBound)
	defer cancel()
	x.enter("judge")
	var errs []error
	for _, f := range x.runs {
		errs = append(errs, f.Witness(ctx))
		record := f.Record()
		x.record(history.Record{T: x.clock(), Kind: history.KindFault, Fault: &record})
	}
	final, err := x.bench.Target.Final(ctx)
	errs = append(errs, err)
	final.Usage = x.usage.result()
	// The ledger comes after the rest was read: a copy that arrived meanwhile
	// must be in it.
	evidence, err := x.bench.Evidence(ctx)
	errs = append(errs, err)
	for _, r := range evidence {
		x.record(r)
	}
	if x.bench.Counted != nil {
		final.Counted = x.bench.Counted()
	}
	x.record(history.Record{T: x.clock(), Kind: history.KindFinal, Final: &final})
	errs = append(errs, writeQueues(x.dir, final.Queues))
	x.measure()
	return errors.Join(append(errs, x.journal.Close())...)
}

// measure adds what the generator of the load did. One that could not keep its
// schedule measured itself, and the run counts for nothing.
func (x *cellRun) measure() {
	tally := x.clients.driver.Tally()
	x.own.measure("arrivals not made", float64(tally.Planned-tally.Made), "", "the schedule asked for them")
	x.own.measure("longest lag behind the schedule", float64(tally.WorstLag)/1e6, "ms", "")
	if short := tally.Shortfall(); short != "" {
		x.own.find(verify.Invalid, "arrivals", "", "every arrival of the schedule is made; "+short)
	}
}

func (x *cellRun) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), saveBound)
	defer cancel()
	return x.bench.Close(ctx)
}

func (x *cellRun) quiesceBound() time.Duration {
	if x.scenario.Quiesce > 0 {
		return x.scenario.Quiesce
	}
	return time.Minute
}

func (x *cellRun) noteError(err error) {
	if err == nil || errors.Is(err, context.Canceled) {
		return
	}
	x.own.Findings = append(x.own.Findings, harnessError(err))
}

// broken is the result of a cell that could not be run or judged.
func (x *cellRun) broken(ctx context.Context, err error) reports.Scenario {
	if ctx.Err() != nil {
		return x.interrupted()
	}
	return reports.Scenario{Verdict: verify.HarnessError, Findings: append(x.own.Findings, harnessError(err))}
}

// interrupted is the result of a cell that the user cut short: what it left is
// not whole, and is not judged.
func (x *cellRun) interrupted() reports.Scenario {
	return reports.Scenario{Verdict: verify.Unknown, Findings: []verify.Finding{{
		Invariant: "harness", Verdict: verify.Unknown, Text: "the run was interrupted before it could be judged",
	}}}
}

// watch reports the cell's status until the returned function is called.
func (x *cellRun) watch() (stop func()) {
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(250 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				x.runner.Watch.Status(x.status())
			case <-quit:
				return
			}
		}
	}()
	return func() { close(quit); <-done }
}

func (x *cellRun) status() Status {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := Status{
		Scenario: x.scenario.Name, Policy: x.cell.Name(), Phase: x.phase,
		Bookings:  len(x.plan.Baseline) + len(x.plan.Faults),
		Confirmed: int(x.clients.confirmed.Load()),
		Pending:   x.pending,
		Elapsed:   time.Duration(x.clock() - x.phaseAt),
	}
	if x.bench.Stored != nil {
		s.Stored = x.bench.Stored()
	}
	for _, f := range x.runs {
		if name, struck, of, ok := f.Progress(); ok && struck < of {
			s.Fault, s.Struck, s.Strikes = name, struck, of
			break
		}
	}
	return s
}

func guard(what string, f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic in %s: %v\n%s", what, p, debug.Stack())
		}
	}()
	return f()
}
