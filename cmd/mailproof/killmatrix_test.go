package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"mailproof/mutants"
	"mailproof/reports"
	"mailproof/verify"
)

func failedBy(names ...string) reports.Summary {
	sum := reports.Summary{Verdict: verify.Fail, Scenarios: []reports.Scenario{{}}}
	for _, n := range names {
		sum.Scenarios[0].Findings = append(sum.Scenarios[0].Findings,
			verify.Finding{Invariant: n, Verdict: verify.Fail, Key: "ticket:1", Text: "was seen by " + n})
	}
	return sum
}

func TestWhatBecomesOfADefect(t *testing.T) {
	t.Parallel()
	m := mutants.Mutant{Name: "auto-ack", Scenario: "t6.2/resend", Invariant: "nothing-lost"}
	for _, c := range []struct {
		name, result string
		verdict      verify.Verdict
		sum          reports.Summary
		err          error
	}{
		{"found by its invariant", caught, verify.Pass, failedBy("nothing-lost"), nil},
		{"found by its invariant and by others before it", caught, verify.Pass, failedBy("quiesced", "nothing-lost"), nil},
		{"found by another", caughtByAnother, verify.Fail, failedBy("quiesced"), nil},
		{"not found", survived, verify.Fail, reports.Summary{Verdict: verify.Pass}, nil},
		{"a run that proves nothing", "run is invalid", verify.Invalid, reports.Summary{Verdict: verify.Invalid}, nil},
		{"a build that fails", notPlanted, verify.HarnessError, reports.Summary{}, errors.New("try.go:15: imported and not used")},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			k := judgeMutant(m, c.sum, c.err)
			require.Equal(t, c.result, k.result)
			require.Equal(t, c.verdict, k.verdict)
			require.Equal(t, c.verdict, killMatrix{k}.verdict())
		})
	}
}

func TestKillMatrixFitsTheScreen(t *testing.T) {
	t.Parallel()
	all, err := mutants.All()
	require.NoError(t, err)
	var x killMatrix
	for _, m := range all {
		sum := failedBy("quiesced", m.Invariant)
		sum.Scenarios[0].Findings[1].Text = strings.Repeat("the story of a mail that was sent twice, ", 8)
		k := judgeMutant(m, sum, nil)
		k.seconds = 1234
		x = append(x, k)
	}
	x = append(x, judgeMutant(mutants.Mutant{Name: "broken", Scenario: "t6.1/resend", Invariant: "at-most-one"}, reports.Summary{},
		errors.New("build the system: exit status 1\nworker/try.go:15:2: imported and not used")))
	for line := range strings.SplitSeq(x.text(), "\n") {
		require.LessOrEqual(t, utf8.RuneCountInString(line), matrixWidth, line)
	}
	require.Contains(t, x.text(), "imported and not used", "a compile error is told")
	require.Contains(t, x.text(), "also: quiesced")

	dir := filepath.Join(t.TempDir(), "mutants")
	require.NoError(t, x.save(dir, 7))
	body, err := os.ReadFile(filepath.Join(dir, summaryName))
	require.NoError(t, err)
	for _, m := range all {
		require.Contains(t, string(body), "**"+m.Name+"**: "+m.Invariant+": ticket:1")
	}
	require.Contains(t, string(body), "seed 7")
	require.Contains(t, string(body), "| broken |")
}

func TestAMutantIsRunAgainByItsName(t *testing.T) {
	t.Parallel()
	f := chaosFlags{scenarios: []string{"t6.2/resend"}, overlay: "gone.json", seed: 7, command: "mailproof mutants auto-ack --seed 7"}
	require.Equal(t, "mailproof mutants auto-ack --seed 7", f.again("mailproof", "t6.2/resend"))
}

// A defect that its invariant finds must also turn the gate's line red.
func TestADefectMustTurnItsCriterionRed(t *testing.T) {
	t.Parallel()
	m := mutants.Mutant{Name: "requeue-on-error", Scenario: "t6.3/resend", Invariant: "no-hot-loop", Criterion: "AC8"}
	run := func(invariant string) reports.Summary {
		sum := failedBy(invariant)
		sum.Scenarios[0].Name, sum.Scenarios[0].Policy, sum.Scenarios[0].Verdict = "t6.3", "resend", verify.Fail
		return sum
	}
	k := judgeMutant(m, run("no-hot-loop"), nil)
	require.Equal(t, caught, k.result)
	require.Contains(t, k.line, "AC8 fail")
	require.Contains(t, killMatrix{k}.text(), "gate: AC8 fail")

	m.Criterion, m.Invariant = "AC8", "exact-tries" // which speaks for AC4 alone
	k = judgeMutant(m, run("exact-tries"), nil)
	require.Equal(t, gateGreen, k.result)
	require.Equal(t, verify.Fail, k.verdict)
}
