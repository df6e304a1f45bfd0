package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"mailproof/reports"
	"mailproof/scenarios"
	"mailproof/verify"
)

func TestTheGateIsRunAgainByItsFlags(t *testing.T) {
	t.Parallel()
	require.Equal(t, "bin/mailproof gate --seed 7", gateFlags{seed: 7}.again("bin/mailproof"))
	require.Equal(t, "bin/mailproof gate --only AC5,AC7 --short --seed 7", gateFlags{seed: 7, short: true, only: []string{"AC5", "AC7"}}.again("bin/mailproof"))
	require.Equal(t, "bin/mailproof gate --only AC5 --seed 7", gateFlags{seed: 7, only: []string{"AC5", "AC7"}}.again("bin/mailproof", "AC5"))
}

func TestAnUnknownCriterionIsRefusedBeforeAnythingStarts(t *testing.T) {
	t.Parallel()
	out := filepath.Join(t.TempDir(), "runs")
	err := gate(t.Context(), "mailproof", gateFlags{only: []string{"AC9"}, out: out}, &strings.Builder{})
	require.ErrorContains(t, err, `no criterion is called "AC9"`)
	require.NoDirExists(t, out)
}

// redGate is the end of a gate in a folder: its summary has one cell, which
// failed.
func redGate(t *testing.T) (dir string, sum reports.Summary, g reports.Gate) {
	t.Helper()
	dir, err := newRunDir(t.TempDir(), 7)
	require.NoError(t, err)
	sum = reports.Summary{Seed: 7, Verdict: verify.Fail, Command: "bin/mailproof gate --seed 7", Scenarios: []reports.Scenario{{
		Name: "t6.8", Policy: "resend", Verdict: verify.Fail, Dir: "t6.8-resend",
		Findings: []verify.Finding{{Invariant: "at-most-one", Verdict: verify.Fail, Key: "ticket:1", Text: "2 copies"}},
	}}}
	f := gateFlags{seed: 7, only: []string{"AC5", "AC7"}}
	criteria, err := scenarios.ChooseCriteria(scenarios.Criteria(), f.only)
	require.NoError(t, err)
	g = scenarios.JudgeGate(sum, criteria, func(ids ...string) string { return f.again("bin/mailproof", ids...) })
	g.Only = f.only
	return dir, sum, g
}

func TestLastLineOfARedGateRunsTheRedCriteriaAgain(t *testing.T) {
	t.Setenv("GITHUB_STEP_SUMMARY", "")
	dir, sum, g := redGate(t)
	var out strings.Builder
	err := settleGate(&out, dir, sum, g)
	require.Equal(t, 1, exitCode(err, &strings.Builder{}), "fail outweighs the invalid one")
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	require.Equal(t, "run the red ones again: bin/mailproof gate --only AC5,AC7 --seed 7", lines[len(lines)-1])
	require.Contains(t, out.String(), "AC5 invalid  the run holds no cell t6.4/resend")
	require.Contains(t, out.String(), "AC7 fail     at-most-one ticket:1: 2 copies")
	require.Contains(t, out.String(), "FAIL  0 of 2 criteria passed, the others were not asked for; seed 7")
	for _, name := range []string{"gate.json", "gate.md", "gate-junit.xml", "summary.json", "junit.xml"} {
		require.FileExists(t, filepath.Join(dir, "..", "latest", name))
	}
}

func TestCheckDecidesAGateAgain(t *testing.T) {
	t.Setenv("GITHUB_STEP_SUMMARY", "")
	dir, sum, g := redGate(t)
	// It passed when it was run, and its history is gone.
	sum.Scenarios[0].Verdict, sum.Scenarios[0].Findings = verify.Pass, nil
	_ = settleGate(&strings.Builder{}, dir, sum, g)
	var out strings.Builder
	cmd := checkCommand()
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	cmd.SetOut(&out)
	cmd.SetArgs([]string{dir})
	err := cmd.Execute()
	require.Equal(t, 4, exitCode(err, &strings.Builder{}), "the cell left no history: %s", out.String())
	require.Contains(t, out.String(), "AC7 harness-error")
	require.Contains(t, out.String(), "the evidence is gone")
	again, err := reports.ReadGate(dir)
	require.NoError(t, err)
	require.Equal(t, verify.HarnessError, again.Verdict)
	require.Equal(t, []string{"AC5", "AC7"}, again.Only)
}
