package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"mailproof/mutants"
	"mailproof/reports"
	"mailproof/verify"
)

type mutantsFlags struct {
	check, list bool
	only        []string
	seed        uint64
	out         string
}

func mutantsCommand(binary string) *cobra.Command {
	var f mutantsFlags
	cmd := &cobra.Command{
		Use:   "mutants [NAME...]",
		Short: "Plant known defects in the system and see that each turns its scenario red",
		Long: `Builds the system under test with one known defect planted, the net beneath it
removed where it would mask the defect, runs the scenario that must catch it,
and compares: the run must fail, by the invariant that the defect names. A
defect that survives, or dies by something else, makes the command fail.

The work tree is not touched: the patched files go to the build as an overlay.
Run it from the root of the repository.`,
		Example: `  mailproof mutants               every defect
  mailproof mutants auto-ack      one
  mailproof mutants --list        what there is
  mailproof mutants --check       only see that each patch still applies`,
		RunE: func(cmd *cobra.Command, args []string) error {
			f.only = args
			if !cmd.Flags().Changed("seed") {
				f.seed = uint64(rand.Uint32())
			}
			return runMutants(cmd.Context(), binary, f, cmd.OutOrStdout())
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&f.list, "list", false, "list the defects and stop")
	flags.BoolVar(&f.check, "check", false, "see that each patch applies, and stop")
	flags.Uint64Var(&f.seed, "seed", 0, "seed of every run (default: a new one)")
	flags.StringVar(&f.out, "out", filepath.Join("runs", "mutants"), "folder of the runs")
	return cmd
}

func runMutants(ctx context.Context, binary string, f mutantsFlags, out io.Writer) error {
	if f.check {
		return mutants.Check(".")
	}
	all, err := mutants.All()
	if err != nil {
		return err
	}
	chosen, err := chooseMutants(all, f.only)
	if err != nil {
		return err
	}
	if f.list {
		listMutants(out, chosen)
		return nil
	}
	matrix := newKillMatrix()
	survivors := 0
	for _, m := range chosen {
		killed, err := runMutant(ctx, binary, f, m, matrix, out)
		if err != nil {
			return fmt.Errorf("mutant %s: %w", m.Name, err)
		}
		if !killed {
			survivors++
		}
	}
	fmt.Fprintf(out, "\n%s\n", matrix.Render())
	if survivors > 0 {
		fmt.Fprintf(out, "%d of %d defects were not caught as they must be\n", survivors, len(chosen))
		return verdictError{verify.Fail}
	}
	fmt.Fprintf(out, "all %d defects were caught by their invariant\n", len(chosen))
	return nil
}

func chooseMutants(all []mutants.Mutant, names []string) ([]mutants.Mutant, error) {
	if len(names) == 0 {
		return all, nil
	}
	byName := map[string]mutants.Mutant{}
	for _, m := range all {
		byName[m.Name] = m
	}
	chosen := make([]mutants.Mutant, 0, len(names))
	for _, n := range names {
		m, ok := byName[n]
		if !ok {
			return nil, fmt.Errorf("there is no mutant %q; see mailproof mutants --list", n)
		}
		chosen = append(chosen, m)
	}
	return chosen, nil
}

func listMutants(out io.Writer, all []mutants.Mutant) {
	t := table.NewWriter()
	t.AppendHeader(table.Row{"defect", "what is wrong", "trap", "scenario", "must be found by"})
	for _, m := range all {
		t.AppendRow(table.Row{m.Name, m.Title, m.Trap, m.Scenario, m.Invariant})
	}
	fmt.Fprintln(out, t.Render())
}

func newKillMatrix() table.Writer {
	t := table.NewWriter()
	t.AppendHeader(table.Row{"defect", "scenario", "must be found by", "found by", "first finding", "result"})
	t.SetColumnConfigs([]table.ColumnConfig{{Name: "first finding", WidthMax: 60}, {Name: "found by", WidthMax: 30}})
	return t
}

// runMutant runs one defect's scenario and reports whether its own invariant
// caught it.
func runMutant(ctx context.Context, binary string, f mutantsFlags, m mutants.Mutant, matrix table.Writer, out io.Writer) (bool, error) {
	work, err := os.MkdirTemp("", "mailproof-mutant-")
	if err != nil {
		return false, err
	}
	defer func() { _ = os.RemoveAll(work) }()
	overlay, err := m.Overlay(".", work)
	if err != nil {
		return false, err
	}
	fmt.Fprintf(out, "\nmutant %s: %s\n", m.Name, m.Title)
	run := chaosFlags{
		scenarios: []string{m.Scenario}, seed: f.seed, out: filepath.Join(f.out, m.Name), kafka: "auto", overlay: overlay,
	}
	for name, value := range m.Env {
		run.env = append(run.env, name+"="+value)
	}
	err = chaos(ctx, binary, run, out)
	var verdict verdictError
	if err != nil && !errors.As(err, &verdict) {
		return false, err
	}
	sum, err := reports.Read(filepath.Join(run.out, "latest"))
	if err != nil {
		return false, err
	}
	first, found := findings(sum, m.Invariant)
	killed := sum.Verdict == verify.Fail && first.Invariant == m.Invariant
	result := "SURVIVED"
	switch {
	case killed:
		result = "caught"
	case sum.Verdict == verify.Fail:
		result = "caught by another"
	}
	matrix.AppendRow(table.Row{m.Name, m.Scenario, m.Invariant, strings.Join(found, ", "), strings.TrimSpace(first.Key + " " + first.Text), result})
	return killed, nil
}

// findings returns the first failure by the wanted invariant (else the first
// failure), and the names of all invariants that failed.
func findings(sum reports.Summary, wanted string) (verify.Finding, []string) {
	var first verify.Finding
	var names []string
	seen := map[string]bool{}
	for _, sc := range sum.Scenarios {
		for _, f := range sc.Findings {
			if f.Verdict != verify.Fail {
				continue
			}
			if !seen[f.Invariant] {
				seen[f.Invariant] = true
				names = append(names, f.Invariant)
			}
			if first.Invariant == "" || first.Invariant != wanted && f.Invariant == wanted {
				first = f
			}
		}
	}
	return first, names
}
