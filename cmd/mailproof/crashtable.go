package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"mailproof/scenarios"
	"mailproof/verify"
)

// crashTableFlags are the flags of "mailproof crash-table".
type crashTableFlags struct {
	points, policies, acts []string
	seed                   uint64
	out, write             string
	from, notes            []string
	resume, noRun          bool
	list                   bool
}

func crashTableCommand(binary string) *cobra.Command {
	f := crashTableFlags{seed: 1}
	cmd := &cobra.Command{
		Use:   "crash-table",
		Short: "Kill and stop the system at every boundary between two steps, and print the matrix",
		Long: `Runs the scenarios crash-… with a build of the system that has crash points: at
each boundary a process is killed, or stopped until its lease is over and another
has taken its place. Writes the matrix as Markdown; each cell carries the command
that runs it again.

A run can be continued: --from RUN takes the cells of an earlier run (several may
be given, the last one counts), and --resume makes only those that are missing or
not green there.`,
		Example: `  mailproof crash-table                                       the whole table
  mailproof crash-table --point worker.after-250              one boundary, under each policy
  mailproof crash-table --point smtp --policy hold --act pause
  mailproof crash-table --from runs/latest --resume --write docs/crash-table.md
  mailproof crash-table --from runs/latest --no-run           the matrix of a run, nothing is started`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return crashTable(cmd.Context(), binary, f, cmd.OutOrStdout())
		},
	}
	flags := cmd.Flags()
	flags.StringArrayVarP(&f.points, "point", "p", nil, "a boundary (worker.after-250) or the beginning of several (worker); may be given several times")
	flags.StringArrayVar(&f.policies, "policy", nil, "resend, hold or same-key; may be given several times")
	flags.StringArrayVar(&f.acts, "act", nil, "kill or pause; may be given several times")
	flags.Uint64Var(&f.seed, "seed", f.seed, "rebuilds the batches and the passages")
	flags.StringVar(&f.out, "out", "runs", "folder of all runs")
	flags.StringVar(&f.write, "write", "", "write the matrix into this file; default: print it")
	flags.StringArrayVar(&f.from, "from", nil, "take the cells of this run")
	flags.StringArrayVar(&f.notes, "note", nil, "a line for the matrix, such as what else the machine did")
	flags.BoolVar(&f.resume, "resume", false, "make only cells that --from does not show green")
	flags.BoolVar(&f.noRun, "no-run", false, "start nothing")
	flags.BoolVar(&f.list, "list", false, "list the boundaries and stop")
	return cmd
}

func (f crashTableFlags) wants(policy string, p scenarios.CrashPoint, act string) bool {
	return (len(f.points) == 0 || slices.ContainsFunc(f.points, p.Fits)) &&
		(len(f.policies) == 0 || slices.Contains(f.policies, policy)) &&
		(len(f.acts) == 0 || slices.Contains(f.acts, act))
}

// again is the command line that repeats the run.
func (f crashTableFlags) again(binary string) string {
	words := []string{binary, "crash-table"}
	for flag, values := range map[string][]string{"--act": f.acts, "--point": f.points, "--policy": f.policies} {
		for _, v := range values {
			words = append(words, flag+" "+v)
		}
	}
	slices.Sort(words[2:])
	if f.resume {
		words = append(words, "--from EARLIER --resume")
	}
	return strings.Join(append(words, "--seed", fmt.Sprint(f.seed)), " ")
}

func crashTable(ctx context.Context, binary string, f crashTableFlags, out io.Writer) error {
	if f.list {
		return listCrashPoints(out)
	}
	for _, p := range f.points {
		if !slices.ContainsFunc(scenarios.CrashPoints(), func(c scenarios.CrashPoint) bool { return c.Fits(p) }) {
			return usage(fmt.Errorf("--point %s: there is no such boundary; --list names them", p))
		}
	}
	if f.write != "" {
		if err := writable(f.write); err != nil {
			return usage(fmt.Errorf("--write: %w", err))
		}
	}
	table := scenarios.CrashTable{Notes: f.notes}
	for _, dir := range f.from {
		if err := table.Add(dir); err != nil {
			return err
		}
	}
	verdict := error(nil)
	if !f.noRun {
		dir, err := runCrashTable(ctx, binary, f, &table, out)
		var v verdictError
		if err != nil && !errors.As(err, &v) {
			return err
		}
		verdict = err
		if dir != "" {
			if err := table.Add(dir); err != nil {
				return err
			}
		}
	}
	if f.write == "" {
		_, err := io.WriteString(out, table.Markdown())
		return errors.Join(err, verdict)
	}
	if err := os.WriteFile(f.write, []byte(table.Markdown()), 0o644); err != nil {
		return fmt.Errorf("the crash table: %w", err)
	}
	fmt.Fprintf(out, "crash table: %s\n", f.write)
	if verdict == nil && f.noRun && table.Verdict() != verify.Pass {
		verdict = verdictError{table.Verdict()}
	}
	return verdict
}

// runCrashTable runs the chosen cells and returns the run's folder, "" when there
// was nothing to run.
func runCrashTable(ctx context.Context, binary string, f crashTableFlags, table *scenarios.CrashTable, out io.Writer) (dir string, err error) {
	all := scenarios.All(scenarios.Draw{CrashCell: func(policy string, p scenarios.CrashPoint, act string) bool {
		return f.wants(policy, p, act) && (!f.resume || !table.Has(policy, p, act))
	}})
	var chosen []scenarios.Scenario
	for _, s := range all {
		if s.OnDemand && strings.HasPrefix(s.Name, "crash-") && len(s.Cells) > 0 {
			chosen = append(chosen, s)
		}
	}
	if len(chosen) == 0 {
		fmt.Fprintln(out, "nothing to run")
		return "", nil
	}
	return runScenarios(ctx, binary, chaosFlags{seed: f.seed, out: f.out, kafka: "auto", command: f.again(binary)}, chosen, out)
}

func listCrashPoints(out io.Writer) error {
	for _, p := range scenarios.CrashPoints() {
		if _, err := fmt.Fprintf(out, "%-36s %-9s %s\n", p.ID(), p.Process, p.Between); err != nil {
			return fmt.Errorf("print: %w", err)
		}
	}
	return nil
}
