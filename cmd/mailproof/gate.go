package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"mailproof/history"
	"mailproof/reports"
	"mailproof/scenarios"
)

// gateFlags are the flags of "mailproof gate".
type gateFlags struct {
	seed  uint64
	out   string
	only  []string
	short bool
}

func gateCommand(binary string) *cobra.Command {
	var f gateFlags
	cmd := &cobra.Command{
		Use:   "gate",
		Short: "Decide on the eight acceptance criteria, one line each",
		Long: `Runs the cells that decide on the acceptance criteria AC1 to AC8 on real parts,
each cell once, and says pass or fail of each criterion with its figure and where
its evidence lies. AC4 and AC8 are judged with the real retry delays of 10 s, 1
min and 5 min; that cell runs beside all others, so that a gate takes seven
to eight minutes on two cores.

In the run's folder: gate.json, gate.md (also appended to $GITHUB_STEP_SUMMARY
where that is set), gate-junit.xml with one case per criterion, and everything
that "mailproof chaos" leaves. "mailproof check RUN" decides again from the
evidence.

Exit codes: 0 pass or skipped, 1 fail, 2 unknown or interrupted, 3 invalid, 4
harness error; the worst criterion counts, fail before harness error before unknown
before invalid. 64 is a mistake in the command line. Where the real parts do not
start, or at Ctrl-C, the same files say of each criterion that it was not judged,
and why.`,
		Example: `  mailproof gate                    all eight
  mailproof gate --seed 7           the same workload and faults again
  mailproof gate --only AC5,AC7     some of them
  mailproof gate --short            shortened delays, half the time; AC4 and AC8 stay undecided
  mailproof check runs/gate/latest  decide again from the evidence`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("only") && len(f.only) == 0 {
				// An empty variable of a CI must not become all eight.
				return usage(errors.New("--only names no criterion; leave it out for all of them"))
			}
			if !cmd.Flags().Changed("seed") {
				f.seed = uint64(rand.Uint32())
			}
			return gate(cmd.Context(), binary, f, cmd.OutOrStdout())
		},
	}
	flags := cmd.Flags()
	flags.Uint64Var(&f.seed, "seed", 0, "rebuild workload and faults of an earlier run (default: a new one)")
	flags.StringVar(&f.out, "out", filepath.Join("runs", "gate"), "folder of the gate's runs")
	flags.StringSliceVar(&f.only, "only", nil, "criteria to decide on, such as AC5,AC7 (default: all)")
	flags.BoolVar(&f.short, "short", false, "shortened retry delays: AC4 and AC8 are then not decided")
	return cmd
}

// again writes the command line that repeats the gate, or some criteria of it.
func (f gateFlags) again(binary string, ids ...string) string {
	words := []string{binary, "gate"}
	if len(ids) == 0 {
		ids = f.only
	}
	if len(ids) > 0 {
		words = append(words, "--only", strings.Join(ids, ","))
	}
	if f.short {
		words = append(words, "--short")
	}
	return strings.Join(append(words, "--seed", fmt.Sprint(f.seed)), " ")
}

func gate(ctx context.Context, binary string, f gateFlags, out io.Writer) (err error) {
	began := history.Now()
	criteria, err := scenarios.ChooseCriteria(scenarios.Criteria(), f.only)
	if err != nil {
		return usage(err)
	}
	f.only = idsOf(criteria, len(f.only) > 0)
	chosen, beside, err := scenarios.GateScenarios(scenarios.All(scenarios.Draw{RealDelays: !f.short}), criteria)
	if err != nil {
		return err
	}
	dir, err := newRunDir(f.out, f.seed)
	if err != nil {
		return err
	}
	show := newProgress(out, chosen, beside...)
	show.start(f.seed, dir, f.again(binary))
	if f.short {
		show.line("%s", reports.ShortNote)
	}
	lab, err := scenarios.StartLab(ctx, scenarios.LabConfig{
		LogDir: filepath.Join(dir, "nodes"), Kafka: "auto", Progress: show.Part,
	})
	judge := func(sum reports.Summary) reports.Gate {
		sum.Command = f.again(binary)
		g := scenarios.JudgeGate(sum, criteria, func(ids ...string) string { return f.again(binary, ids...) })
		g.Only = f.only
		return g
	}
	if err != nil {
		show.end()
		sum := notRun(dir, f.seed, began, err)
		return errors.Join(settleGate(out, dir, sum, judge(sum)), err)
	}
	defer func() { err = errors.Join(err, stopLab(ctx, lab)) }()
	runner := scenarios.Runner{
		Lab: lab, Dir: dir, Seed: f.seed, Clock: history.Now, Began: began, Beside: beside, Watch: show,
		Again: func(cells ...string) string {
			return chaosFlags{seed: f.seed, kafka: "auto", realDelays: !f.short}.again(binary, cells...)
		},
	}
	sum, err := runner.Run(ctx, chosen)
	show.end()
	sum.Command = f.again(binary)
	return errors.Join(settleGate(out, dir, sum, judge(sum)), err)
}

// idsOf names the criteria as they are written; none when all were asked for.
func idsOf(criteria []scenarios.Criterion, narrowed bool) []string {
	if !narrowed {
		return nil
	}
	ids := make([]string, len(criteria))
	for i, c := range criteria {
		ids[i] = c.ID
	}
	return ids
}

// settleGate writes every report of a gate and says what was decided.
func settleGate(out io.Writer, dir string, sum reports.Summary, g reports.Gate) error {
	if err := errors.Join(reports.Write(dir, sum), reports.WriteGate(dir, g), linkLatest(dir)); err != nil {
		return err
	}
	return errors.Join(reports.AppendJobSummary(g), decision(out, filepath.Join(filepath.Dir(dir), "latest"), g))
}

// decision prints the gate's lines. The last line of one that is not green is
// the command that runs the red criteria again.
func decision(out io.Writer, dir string, g reports.Gate) error {
	t := terminal(out)
	fmt.Fprintln(out)
	reports.GateLines(out, dir, g, t.colours)
	only := ""
	if len(g.Only) > 0 {
		only = ", the others were not asked for"
	}
	fmt.Fprintf(out, "\n%s  %d of %d criteria passed%s; seed %d, %.0f s, %s\nreport: %s\n",
		t.paint(g.Verdict), g.Passed(), len(g.Criteria), only, g.Seed, g.Seconds, reports.Parts(g.Versions), filepath.Join(dir, "gate.md"))
	red := g.Red()
	if len(red) == 0 {
		return nil
	}
	ids := make([]string, len(red))
	for i, c := range red {
		ids[i] = c.ID
	}
	fmt.Fprintf(out, "run the red ones again: %s\n", onlyThese(red[0], ids))
	return verdictError{g.Verdict}
}

// onlyThese is a criterion's command for several of them.
func onlyThese(c reports.Criterion, ids []string) string {
	return strings.Replace(c.Command, "--only "+c.ID, "--only "+strings.Join(ids, ","), 1)
}
