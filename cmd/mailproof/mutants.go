package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"mailproof/mutants"
	"mailproof/reports"
	"mailproof/target"
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
defect that survives, or dies by something else, makes the command fail; one
that cannot be planted or built is an error of the harness. What was seen is
written to summary.md in the folder of the runs.

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
		return usage(err)
	}
	if f.list {
		listMutants(out, chosen)
		return nil
	}
	var matrix killMatrix
	for _, m := range chosen {
		matrix = append(matrix, runMutant(ctx, binary, f, m, out))
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		// After each one: a run that is cut short leaves what was seen.
		if err := matrix.save(f.out, f.seed); err != nil {
			return err
		}
	}
	fmt.Fprintf(out, "\n%s\nsummary: %s\n", matrix.text(), filepath.Join(f.out, summaryName))
	if v := matrix.verdict(); v != verify.Pass {
		return verdictError{v}
	}
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
	for _, m := range all {
		said := fmt.Sprintf("%s\n%s; %s must turn red by %s", m.Title, m.Trap, m.Scenario, m.Invariant)
		fmt.Fprint(out, indent(m.Name, said))
	}
}

// runMutant runs one defect's scenario. What kept it from being run is part of
// the result: the next defect has its turn all the same.
func runMutant(ctx context.Context, binary string, f mutantsFlags, m mutants.Mutant, out io.Writer) killing {
	began := time.Now()
	fmt.Fprintf(out, "\nmutant %s: %s\n", m.Name, m.Title)
	sum, err := plant(ctx, binary, f, m, out)
	k := judgeMutant(m, sum, err)
	k.seconds = time.Since(began).Seconds()
	if err != nil && ctx.Err() == nil {
		fmt.Fprintf(out, "mutant %s: %v\n", m.Name, err)
	}
	return k
}

// plant builds the system with the defect and runs the scenario that must find
// it. An error means that there is nothing to judge.
func plant(ctx context.Context, binary string, f mutantsFlags, m mutants.Mutant, out io.Writer) (reports.Summary, error) {
	work, err := os.MkdirTemp("", "mailproof-mutant-")
	if err != nil {
		return reports.Summary{}, err
	}
	defer func() { _ = os.RemoveAll(work) }()
	overlay, err := m.Overlay(".", work)
	if err != nil {
		return reports.Summary{}, err
	}
	// Before any part is started: a defect that does not compile would cost a
	// minute otherwise.
	if _, err := target.Build(ctx, target.BuildConfig{Dir: filepath.Join(work, "bin"), Overlay: overlay}); err != nil {
		return reports.Summary{}, fmt.Errorf("with its defect: %w", err)
	}
	run := chaosFlags{
		scenarios: []string{m.Scenario}, seed: f.seed, out: filepath.Join(f.out, m.Name), kafka: "auto", overlay: overlay,
		command: fmt.Sprintf("%s mutants %s --seed %d", binary, m.Name, f.seed),
	}
	for _, name := range slices.Sorted(maps.Keys(m.Env)) {
		run.env = append(run.env, name+"="+m.Env[name])
	}
	err = chaos(ctx, binary, run, out)
	var verdict verdictError
	if err != nil && !errors.As(err, &verdict) {
		return reports.Summary{}, err
	}
	sum, err := reports.Read(filepath.Join(run.out, "latest"))
	if err == nil && sum.NotRun != "" {
		err = errors.New(sum.NotRun)
	}
	return sum, err
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
