package main

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"mailproof/infra/provider"
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

// TestAGateWhosePartsDoNotStartSaysSoOfEachCriterion: a CI that reads the files
// finds them, and none of them is green.
func TestAGateWhosePartsDoNotStartSaysSoOfEachCriterion(t *testing.T) {
	page := filepath.Join(t.TempDir(), "page.md")
	t.Setenv("GITHUB_STEP_SUMMARY", page)
	t.Setenv(provider.Variable, "nowhere")
	out := t.TempDir()
	var said strings.Builder
	err := gate(t.Context(), "bin/mailproof", gateFlags{seed: 7, out: out}, &said)
	require.Equal(t, 4, exitCode(err, &strings.Builder{}))
	require.Equal(t, 8, strings.Count(said.String(), "not judged: the real parts did not start: "), said.String())
	dir := filepath.Join(out, "latest")
	g, err := reports.ReadGate(dir)
	require.NoError(t, err)
	require.Equal(t, verify.HarnessError, g.Verdict)
	require.Len(t, g.Criteria, 8)
	for _, c := range g.Criteria {
		require.Equal(t, verify.HarnessError, c.Verdict, c.ID)
		require.Contains(t, c.Reason, "nowhere", c.ID)
		require.Equal(t, "bin/mailproof gate --only "+c.ID+" --seed 7", c.Command)
	}
	for name, want := range map[string]string{
		"gate.md": "no part was there", "gate-junit.xml": `errors="8"`, "summary.json": "not_run", "summary.md": "No cell was run", "index.html": "nowhere",
	} {
		body, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		require.Contains(t, string(body), want, name)
	}
	body, err := os.ReadFile(page)
	require.NoError(t, err)
	require.Contains(t, string(body), "## Acceptance gate: harness-error")
	require.Equal(t, 1, strings.Count(string(body), "nowhere"), "said once:\n%s", body)

	// Judged again it says the same: there is no evidence that could say more.
	cmd := checkCommand()
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	cmd.SetOut(&said)
	cmd.SetArgs([]string{dir})
	require.Equal(t, 4, exitCode(cmd.Execute(), &strings.Builder{}))
	again, err := reports.ReadGate(dir)
	require.NoError(t, err)
	require.Equal(t, g.Criteria, again.Criteria)
}

// TestAGateInterruptedBeforeItsCellsIsUnknown: nothing was found, and nothing is
// green.
func TestAGateInterruptedBeforeItsCellsIsUnknown(t *testing.T) {
	t.Setenv("GITHUB_STEP_SUMMARY", "")
	ctx, interrupt := context.WithCancelCause(t.Context())
	interrupt(errInterrupted)
	out := t.TempDir()
	err := gate(ctx, "bin/mailproof", gateFlags{seed: 7, out: out, only: []string{"AC5"}}, io.Discard)
	require.Equal(t, 2, exitCode(err, &strings.Builder{}))
	g, err := reports.ReadGate(filepath.Join(out, "latest"))
	require.NoError(t, err)
	require.Equal(t, verify.Unknown, g.Criteria[0].Verdict)
	require.Equal(t, "not judged: interrupted while the real parts started", g.Criteria[0].Reason)
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
