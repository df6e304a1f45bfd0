package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"mailproof/fakes/cli"
	"mailproof/infra/guardian"
	"mailproof/reports"
	"mailproof/scenarios"
	"mailproof/verify"
)

func TestMain(m *testing.M) {
	guardian.MaybeRun()
	if os.Getenv(asMailproof) != "" {
		os.Exit(run(append([]string{"mailproof"}, os.Args[1:]...)))
	}
	m.Run()
}

func TestExitCodes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		code int
	}{
		{nil, 0},
		{verdictError{verify.Pass}, 0},
		{verdictError{verify.SkippedRun}, 0},
		{verdictError{verify.Fail}, 1},
		{verdictError{verify.Unknown}, 2},
		{verdictError{verify.Invalid}, 3},
		{verdictError{verify.HarnessError}, 4},
		{errors.Join(verdictError{verify.Fail}, errors.New("stopping")), 1},
		{fmt.Errorf("start: %w", errInterrupted), 2},
		{cli.Verdict{Code: 3, Text: "nothing to judge"}, 3},
		{errors.New("no Postgres server"), 4},
		{usage(errors.New("unknown flag: --sead")), 64},
		{usage(nil), 0},
	} {
		var out strings.Builder
		require.Equal(t, c.code, exitCode(c.err, &out), "%v", c.err)
	}
}

func TestVerdictIsNotPrintedAsAnErrorButOthersAre(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	exitCode(verdictError{verify.Fail}, &out)
	require.Empty(t, out.String())
	exitCode(errors.New("no Postgres server"), &out)
	require.Equal(t, "mailproof: no Postgres server\n", out.String())
}

// TestMistakesInTheCommandLine start nothing and have an exit code of their own:
// a caller must not take them for a verdict.
func TestMistakesInTheCommandLine(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"gaet"},
		{"gate", "--sead", "7"},
		{"gate", "--seed", "seven"},
		{"gate", "AC1"},
		{"gate", "--only", "AC9"},
		{"bench", "--only", "hoops"},
		{"chaos", "--scenario", "t9.9"},
		{"chaos", "--kafka", "redpanda"},
		{"chaos", "--scenario", "t6.1", "--unplug", "lose-250"},
		{"crash-table", "--point", "nowhere"},
		{"mutants", "no-such-defect"},
		{"check"},
		{"judge"},
		{"fake", "stmp"},
		{"gate", "--only", ""},
		{"bench", "--only", ""},
		{"bench", "--out", os.DevNull + "/document.md"},
		{"bench", "--out", "."},
		{"crash-table", "--write", os.DevNull + "/table.md"},
		{"chaos", "--provider", "nowhere"},
		{"chaos", "--overlay", "no-such-file.json"},
		{"chaos", "--seed", "-1"},
		{"up", "--policy", "never"},
	} {
		var out strings.Builder
		root := rootCommand("mailproof")
		root.SetOut(io.Discard)
		require.Equal(t, exitUsage, exitCode(execute(t.Context(), root, args), &out), "%v", args)
		require.Regexp(t, `(?s)^mailproof: .*\n--help says what there is\n$`, out.String(), "%v", args)
	}
}

func TestANumberThatIsNoneIsSaidInWords(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]string{
		"gate --seed seven": `--seed "seven" is no whole number from 0 to 18446744073709551615`,
		"bench --repeats x": `--repeats "x" is no whole number`,
	} {
		root := rootCommand("mailproof")
		require.EqualError(t, execute(t.Context(), root, strings.Fields(args)), want)
	}
}

// A document that is written at the end of a long run is looked at before it.
func TestWritable(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "new", "table.md")
	require.NoError(t, writable(file))
	entries, err := os.ReadDir(filepath.Dir(file))
	require.NoError(t, err)
	require.Empty(t, entries, "nothing is left")
	require.NoError(t, os.WriteFile(file, []byte("before"), 0o600))
	require.NoError(t, writable(file))
	body, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, "before", string(body))
	require.ErrorContains(t, writable(filepath.Join(file, "below")), "cannot be written")
}

func TestAgainRepeatsEveryFlagThatMatters(t *testing.T) {
	t.Parallel()
	f := chaosFlags{
		scenarios: []string{"t6.2"}, seed: 7, realDelays: true, unplug: []string{"lose-250"}, noTraffic: true,
		kafka: "kfake", overlay: "o.json", env: []string{"NOTIFYD_SWEEPER=off"}, out: "runs",
	}
	require.Equal(t, "bin/mailproof chaos --scenario t6.2 --real-delays --unplug lose-250 --no-traffic --kafka kfake --overlay o.json --env NOTIFYD_SWEEPER=off --seed 7",
		f.again("bin/mailproof"))
	require.Contains(t, f.again("bin/mailproof", "t6.2/hold"), "--scenario t6.2/hold ")
	require.Equal(t, "mailproof chaos --seed 7", chaosFlags{seed: 7, kafka: "auto"}.again("mailproof"))
}

func TestWrongFlagsAreNamed(t *testing.T) {
	t.Parallel()
	require.ErrorContains(t, chaosFlags{kafka: "redpanda"}.validate(), "redpanda")
	require.ErrorContains(t, chaosFlags{kafka: "auto", env: []string{"X"}}.validate(), `"X"`)
	require.NoError(t, chaosFlags{kafka: "auto", env: []string{"A=b=c"}}.validate())
}

func TestUnpluggingAnUnknownFaultIsRefusedBeforeAnythingStarts(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // should it start anything all the same, it ends there
	out := t.TempDir()
	f := chaosFlags{scenarios: []string{"t6.1"}, unplug: []string{"lose-250"}, kafka: "auto", out: out}
	err := chaos(ctx, "mailproof", f, io.Discard)
	require.ErrorContains(t, err, `no chosen scenario has a fault called "lose-250"; there are duplicate-records`)
	left, err := os.ReadDir(out)
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestListNamesEveryScenario(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	require.NoError(t, listScenarios(&out, scenarios.All(scenarios.Draw{})))
	for _, s := range scenarios.All(scenarios.Draw{}) {
		require.Contains(t, out.String(), s.Name)
		require.Contains(t, out.String(), s.Title)
	}
}

func TestLastLineOfARedRunIsTheCommandThatRunsItAgain(t *testing.T) {
	dir, err := newRunDir(t.TempDir(), 7)
	require.NoError(t, err)
	var out strings.Builder
	sum := reports.Summary{Verdict: verify.Fail, Seed: 7, Scenarios: []reports.Scenario{
		{Name: "t6.1", Policy: "resend", Verdict: verify.Pass},
		{Name: "t6.2", Policy: "hold", Verdict: verify.Fail, Findings: []verify.Finding{{Invariant: "nothing-lost", Verdict: verify.Fail, Key: "ticket:1", Text: "lost"}}},
	}}
	err = report(&out, chaosFlags{seed: 7, kafka: "auto"}, "bin/mailproof", dir, sum)
	require.Equal(t, 1, exitCode(err, &strings.Builder{}))
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	require.Equal(t, "run it again: bin/mailproof chaos --scenario t6.2/hold --seed 7", lines[len(lines)-1])
	require.Contains(t, out.String(), "nothing-lost ticket:1")
	require.FileExists(t, dir+"/../latest/summary.json")
}

func TestProgressPrintsPlainLinesWhereThereIsNoTerminal(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	chosen, err := scenarios.Select(scenarios.All(scenarios.Draw{}), []string{"t6.7/hold"})
	require.NoError(t, err)
	p := newProgress(&out, chosen)
	p.start(7, "runs/x", "again")
	p.Part("postgres", "ready after 1.0 s")
	p.Cell(1, 1, chosen[0], chosen[0].Cells[0])
	for range 3 {
		p.Status(scenarios.Status{Scenario: "t6.7", Policy: "hold", Phase: "faults", Bookings: 550, Confirmed: 10, Fault: "kill", Struck: 1, Strikes: 22})
	}
	p.Status(scenarios.Status{Scenario: "t6.7", Policy: "hold", Phase: "quiesce", Pending: map[string]string{"ticket:1": "SENDING"}})
	p.Done(reports.Scenario{Name: "t6.7", Policy: "hold", Verdict: verify.Pass})
	p.end()
	text := out.String()
	require.Equal(t, 1, strings.Count(text, "  faults"), "a phase is told once")
	require.Contains(t, text, "kill 1/22")
	require.Contains(t, text, "1 pending, ticket:1: SENDING")
	require.Contains(t, text, "PASS")
	require.NotContains(t, text, "\x1b")
	require.NotContains(t, text, "\r")
}

func TestLinesFitTheTerminal(t *testing.T) {
	t.Parallel()
	line := "fail t6.2/hold nothing-lost ticket:0c6d: the mail of a confirmed booking is neither delivered nor visible as DEAD"
	require.Equal(t, line, screen{}.fit(line), "a log's line stays whole")
	require.Equal(t, line, screen{width: 200}.fit(line))
	narrow := screen{width: 40}.fit(line)
	for l := range strings.SplitSeq(narrow, "\n") {
		require.LessOrEqual(t, len(l), 40, narrow)
	}
	require.Equal(t, strings.Fields(line), strings.Fields(narrow), "no word is lost or parted")
}

func TestProgressTellsCellsThatRunSideBySideApart(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	chosen, err := scenarios.Select(scenarios.All(scenarios.Draw{RealDelays: true}), []string{"t6.1", "t6.3"})
	require.NoError(t, err)
	p := newProgress(&out, chosen, "t6.3/resend")
	p.start(7, "runs/x", "again")
	p.Cell(2, 2, chosen[1], chosen[1].Cells[0])
	p.Cell(1, 2, chosen[0], chosen[0].Cells[0])
	for range 2 {
		p.Status(scenarios.Status{Scenario: "t6.3", Policy: "resend", Phase: "faults"})
		p.Status(scenarios.Status{Scenario: "t6.1", Policy: "resend", Phase: "faults"})
	}
	p.Done(reports.Scenario{Name: "t6.1", Policy: "resend", Verdict: verify.Pass})
	p.Status(scenarios.Status{Scenario: "t6.3", Policy: "resend", Phase: "judge"})
	text := out.String()
	require.Equal(t, 1, strings.Count(text, "[1/2] t6.1 resend  faults"), "each cell's phase is told once: %s", text)
	require.Equal(t, 1, strings.Count(text, "[2/2] t6.3 resend  faults"), text)
	require.Contains(t, text, "[1/2] t6.1 resend  PASS")
	require.Contains(t, text, "[2/2] t6.3 resend  judge")
	require.Contains(t, text, "about 8 min", "the longest one beside the others decides: %s", text)
}
