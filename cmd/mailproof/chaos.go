package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"mailproof/history"
	"mailproof/infra/provider"
	"mailproof/reports"
	"mailproof/scenarios"
	"mailproof/verify"
)

// chaosFlags are the flags of "mailproof chaos".
type chaosFlags struct {
	scenarios  []string
	seed       uint64
	list       bool
	realDelays bool
	out        string
	unplug     []string
	noTraffic  bool
	kafka      string
	provider   string
	overlay    string
	env        []string
	command    string // that runs it again, when it is no chaos command
}

func chaosCommand(binary string) *cobra.Command {
	var f chaosFlags
	cmd := &cobra.Command{
		Use:   "chaos",
		Short: "Run the failure scenarios on real parts and judge them",
		Long: `Starts Postgres, three RabbitMQ nodes and Kafka, runs each scenario beside a
misbehaving mail server, and judges it from evidence that is saved first. The
report is runs/latest/index.html.`,
		Example: `  mailproof chaos                               every scenario
  mailproof chaos --scenario t6.2               one of them, under each of its policies
  mailproof chaos --scenario t6.2/hold --seed 7 one cell, the same workload and faults again
  mailproof chaos --scenario ac5                the cells that decide on an acceptance criterion
  mailproof chaos --provider containers         with the parts in containers of a Docker engine
  mailproof chaos --list                        what there is

The harness's tests of itself, each of which must come out invalid:
  mailproof chaos --scenario t6.7 --unplug lose-250
  mailproof chaos --scenario t6.7 --no-traffic`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.list {
				return listScenarios(cmd.OutOrStdout(), scenarios.All(scenarios.Draw{RealDelays: f.realDelays}))
			}
			if !cmd.Flags().Changed("seed") {
				f.seed = uint64(rand.Uint32())
			}
			// ac4 and ac8 are about the delays of the specification.
			f.realDelays = f.realDelays || scenarios.AsksForRealDelays(f.scenarios)
			return chaos(cmd.Context(), binary, f, cmd.OutOrStdout())
		},
	}
	flags := cmd.Flags()
	flags.StringArrayVarP(&f.scenarios, "scenario", "s", nil, "scenario (t6.2), one cell of it (t6.2/hold), or the cells of a criterion (ac3); may be given several times")
	flags.Uint64Var(&f.seed, "seed", 0, "rebuild workload and faults of an earlier run (default: a new one)")
	flags.BoolVar(&f.list, "list", false, "list the scenarios and stop")
	flags.BoolVar(&f.realDelays, "real-delays", false, "t6.3 with the specification's delays of 10s, 1m and 5m")
	flags.StringVar(&f.out, "out", "runs", "folder of all runs")
	flags.StringArrayVar(&f.unplug, "unplug", nil, "self-test: this fault's injection does nothing")
	flags.BoolVar(&f.noTraffic, "no-traffic", false, "self-test: no client makes an operation")
	flags.StringVar(&f.kafka, "kafka", "auto", "apache, kfake, or auto: the stand-in only where Java or Kafka's jars are missing")
	flags.StringVar(&f.provider, "provider", provider.Auto, "processes, containers (by a Docker engine), or auto: containers only where the servers are missing")
	flags.StringVar(&f.overlay, "overlay", "", "build the system under test with this \"go build -overlay\" file (a planted defect)")
	flags.StringArrayVar(&f.env, "env", nil, "NAME=value for the processes of the system under test, such as NOTIFYD_SWEEPER=off")
	return cmd
}

// again writes the command line that repeats a run, or cells of it.
func (f chaosFlags) again(binary string, cells ...string) string {
	if f.command != "" {
		return f.command
	}
	words := []string{binary, "chaos"}
	if len(cells) == 0 {
		cells = f.scenarios
	}
	for _, c := range cells {
		words = append(words, "--scenario", c)
	}
	if f.realDelays {
		words = append(words, "--real-delays")
	}
	for _, u := range f.unplug {
		words = append(words, "--unplug", u)
	}
	if f.noTraffic {
		words = append(words, "--no-traffic")
	}
	if f.kafka != "auto" {
		words = append(words, "--kafka", f.kafka)
	}
	if f.provider != "" && f.provider != provider.Auto {
		words = append(words, "--provider", f.provider)
	}
	if f.overlay != "" {
		words = append(words, "--overlay", f.overlay)
	}
	for _, e := range f.env {
		words = append(words, "--env", e)
	}
	return strings.Join(append(words, "--seed", fmt.Sprint(f.seed)), " ")
}

func (f chaosFlags) validate() error {
	switch f.kafka {
	case "auto", "apache", "kfake":
	default:
		return fmt.Errorf("--kafka %q is none of auto, apache, kfake", f.kafka)
	}
	if err := provider.Known(f.provider); err != nil {
		return fmt.Errorf("--provider: %w", err)
	}
	if f.overlay != "" {
		if _, err := os.Stat(f.overlay); err != nil {
			return fmt.Errorf("--overlay: %w", err)
		}
	}
	for _, e := range f.env {
		if name, _, ok := strings.Cut(e, "="); !ok || name == "" {
			return fmt.Errorf("--env %q is not NAME=value", e)
		}
	}
	return nil
}

func chaos(ctx context.Context, binary string, f chaosFlags, out io.Writer) error {
	if err := f.validate(); err != nil {
		return usage(err)
	}
	chosen, err := scenarios.Select(scenarios.All(scenarios.Draw{RealDelays: f.realDelays}), f.scenarios)
	if err != nil {
		return usage(err)
	}
	// Before anything starts: a typing error should not cost a minute.
	if err := (&scenarios.Runner{Unplugged: f.unplug}).CheckUnplugged(chosen); err != nil {
		return usage(fmt.Errorf("--unplug: %w", err))
	}
	_, err = runScenarios(ctx, binary, f, chosen, out)
	return err
}

// runScenarios runs them on parts of their own, writes the report, and returns
// the run's folder.
func runScenarios(ctx context.Context, binary string, f chaosFlags, chosen []scenarios.Scenario, out io.Writer) (dir string, err error) {
	began := history.Now()
	dir, err = newRunDir(f.out, f.seed)
	if err != nil {
		return "", err
	}
	show := newProgress(out, chosen)
	show.start(f.seed, dir, f.again(binary))
	lab, err := scenarios.StartLab(ctx, scenarios.LabConfig{
		LogDir: filepath.Join(dir, "nodes"), Kafka: f.kafka, Provider: f.provider, Overlay: f.overlay, Env: f.env, Progress: show.Part,
	})
	if err != nil {
		show.end()
		sum := notRun(dir, f.seed, began, err)
		sum.Command = f.again(binary)
		return "", errors.Join(report(out, f, binary, dir, sum), err)
	}
	defer func() { err = errors.Join(err, stopLab(ctx, lab)) }()
	runner := scenarios.Runner{
		Lab: lab, Dir: dir, Seed: f.seed, Clock: history.Now, Began: began, Unplugged: f.unplug, NoTraffic: f.noTraffic,
		Again: func(cells ...string) string { return f.again(binary, cells...) }, Watch: show,
	}
	sum, err := runner.Run(ctx, chosen)
	show.end()
	return dir, errors.Join(report(out, f, binary, dir, sum), err)
}

// notRun is the summary of a run whose parts did not start: nothing can be said of
// the system.
func notRun(dir string, seed uint64, began int64, err error) reports.Summary {
	sum := reports.Summary{
		RunID: filepath.Base(dir), Seed: seed, Seconds: time.Duration(history.Now() - began).Seconds(),
		Verdict: verify.HarnessError, NotRun: "the real parts did not start: " + err.Error(),
	}
	if errors.Is(err, errInterrupted) {
		sum.Verdict, sum.NotRun = verify.Unknown, "interrupted while the real parts started"
	}
	return sum
}

// stopTimeout bounds the stop of all parts.
const stopTimeout = time.Minute

func stopLab(ctx context.Context, lab *scenarios.RealLab) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	return lab.Stop(ctx)
}

// report writes the files and the closing lines. The last line of a run that is
// not green is the command that runs it again.
func report(out io.Writer, f chaosFlags, binary, dir string, sum reports.Summary) error {
	if err := reports.Write(dir, sum); err != nil {
		return err
	}
	if err := linkLatest(dir); err != nil {
		return err
	}
	closing(out, filepath.Join(filepath.Dir(dir), "latest"), sum)
	if sum.Verdict == verify.Pass || sum.Verdict == verify.SkippedRun {
		return nil
	}
	var cells []string
	for _, sc := range sum.Scenarios {
		if sc.Verdict != verify.Pass {
			cells = append(cells, sc.Name+"/"+sc.Policy)
		}
	}
	fmt.Fprintf(out, "run it again: %s\n", f.again(binary, cells...))
	return verdictError{sum.Verdict}
}

// closing prints the table, the first findings and where everything is.
func closing(out io.Writer, dir string, sum reports.Summary) {
	t := terminal(out)
	if len(sum.Scenarios) > 0 {
		fmt.Fprintln(out)
		reports.Table(out, sum, t.colours, t.width)
	}
	for _, sc := range sum.Scenarios {
		for _, fault := range sc.Faults {
			if fault.Witness == "" && fault.Reason != "" {
				fmt.Fprintln(out, t.fit(fmt.Sprintf("%s/%s fault %s: %s", sc.Name, sc.Policy, fault.Name, fault.Reason)))
			}
		}
		for _, c := range sc.Invariants {
			if strings.HasPrefix(c.Name, "LAB-") {
				fmt.Fprintln(out, t.fit(c.Name+"  "+c.Statement))
			}
		}
		for i, finding := range sc.Findings {
			if i == maxFindingLines {
				fmt.Fprintf(out, "  … and %d more findings in %s/%s\n", len(sc.Findings)-i, sc.Name, sc.Policy)
				break
			}
			fmt.Fprintln(out, t.fit(fmt.Sprintf("%s %s/%s %s: %s", finding.Verdict, sc.Name, sc.Policy,
				strings.TrimSpace(finding.Invariant+" "+finding.Key), finding.Text)))
		}
	}
	fmt.Fprintln(out, "\n"+t.fit(fmt.Sprintf("%s  seed %d, %.0f s, %s", t.paint(sum.Verdict), sum.Seed, sum.Seconds, reports.Parts(sum.Versions))))
	if sum.NotRun != "" {
		fmt.Fprintln(out, t.fit("no cell was run: "+sum.NotRun))
	}
	fmt.Fprintf(out, "report: %s\n", filepath.Join(dir, "index.html"))
}

// maxFindingLines of one cell are printed; the report has them all.
const maxFindingLines = 5

// newRunDir makes the run's folder, named by time and seed.
func newRunDir(out string, seed uint64) (string, error) {
	dir := filepath.Join(out, time.Now().UTC().Format("20060102-150405")+fmt.Sprintf("-%d", seed))
	if err := os.MkdirAll(out, 0o755); err != nil {
		return "", fmt.Errorf("the folder of all runs: %w", err)
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", fmt.Errorf("the run's folder: %w", err)
	}
	return dir, nil
}

// linkLatest points runs/latest at the run.
func linkLatest(dir string) error {
	link := filepath.Join(filepath.Dir(dir), "latest")
	tmp := link + ".tmp"
	_ = os.Remove(tmp)
	if err := os.Symlink(filepath.Base(dir), tmp); err != nil {
		return fmt.Errorf("pointing %s at the run: %w", link, err)
	}
	if err := os.Rename(tmp, link); err != nil {
		return fmt.Errorf("pointing %s at the run: %w", link, err)
	}
	return nil
}

func listScenarios(out io.Writer, all []scenarios.Scenario) error {
	for _, s := range all {
		cells := make([]string, len(s.Cells))
		for i, c := range s.Cells {
			cells[i] = c.Name()
		}
		title := s.Title
		if s.OnDemand {
			title += " (only when named)"
		}
		if _, err := fmt.Fprintf(out, "%s: %s\n       policies: %s\n       shows: %s\n", s.Name, title,
			strings.Join(cells, ", "), strings.Join(slices.Clone(s.Proves), ", ")); err != nil {
			return err
		}
	}
	for _, c := range scenarios.Criteria() {
		if _, err := fmt.Fprintf(out, "%s: %s\n       cells: %s\n", strings.ToLower(c.ID), c.Text, strings.Join(c.From, ", ")); err != nil {
			return err
		}
	}
	return nil
}
