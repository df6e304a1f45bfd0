package reports

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"mailproof/verify"
)

func aGate() Gate {
	return Gate{
		Verdict: verify.Fail, Seed: 7, Seconds: 431.5, RunID: "run", Command: "mailproof gate --seed 7",
		Criteria: []Criterion{
			{
				ID: "AC1", Text: "one mail", Verdict: verify.Pass, Figure: "550 of 550 mails once", Cells: []string{"t6.1/resend"},
				Evidence: []string{"t6.1-resend/history.jsonl"}, Seconds: 20,
			},
			{
				ID: "AC3", Text: "killed | while sending", Verdict: verify.Fail, Reason: "nothing-lost ticket:1: \x01lost\nstory", Figure: "26 SIGKILLs",
				Cells: []string{"t6.2/resend", "t6.2/hold"}, Evidence: []string{"t6.2-resend/history.jsonl", "t6.2-hold/history.jsonl"},
				Findings: []verify.Finding{{Invariant: "nothing-lost", Verdict: verify.Fail, Key: "ticket:1", Text: "\x01lost\nstory"}},
				Command:  "mailproof gate --only AC3 --seed 7",
			},
			{ID: "AC4", Text: "tries", Verdict: verify.SkippedRun, Reason: "the delays were 1s"},
			{ID: "AC7", Text: "replay", Verdict: verify.Invalid, Reason: "the run holds no cell t6.8/resend", Command: "mailproof gate --only AC7 --seed 7"},
		},
	}
}

func TestEachCriterionIsOneLineWithItsFigureAndItsEvidence(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	GateLines(&b, "runs/gate/latest", aGate(), false)
	require.Equal(t, []string{
		"AC1 pass     550 of 550 mails once  runs/gate/latest/t6.1-resend/history.jsonl",
		"AC3 fail     nothing-lost ticket:1: \x01lost …; 26 SIGKILLs  runs/gate/latest/t6.2-resend/history.jsonl (+1)",
		"AC4 skipped  the delays were 1s  (no evidence)",
		"AC7 invalid  the run holds no cell t6.8/resend  (no evidence)",
	}, strings.Split(strings.TrimSpace(b.String()), "\n"))

	g := aGate()
	g.Short = true
	b.Reset()
	GateLines(&b, ".", g, false)
	require.Contains(t, b.String(), ShortNote)
}

func TestTheGateIsWrittenForMachinesAndForPeople(t *testing.T) {
	page := filepath.Join(t.TempDir(), "job.md")
	t.Setenv("GITHUB_STEP_SUMMARY", page)
	dir, g := t.TempDir(), aGate()
	g.Short, g.Only = true, []string{"AC1", "AC3", "AC4", "AC7"}
	require.NoError(t, WriteGate(dir, g))
	require.NoError(t, AppendJobSummary(g))

	back, err := ReadGate(dir)
	require.NoError(t, err)
	require.Equal(t, g.Criteria[1], back.Criteria[1])
	body, err := os.ReadFile(filepath.Join(dir, GateFile))
	require.NoError(t, err)
	require.NotContains(t, string(body), "null")
	require.True(t, json.Valid(body))

	md, err := os.ReadFile(filepath.Join(dir, "gate.md"))
	require.NoError(t, err)
	require.Contains(t, string(md), "| AC1 | one mail | **pass** | 550 of 550 mails once | `t6.1-resend/history.jsonl` |")
	require.Contains(t, string(md), `killed \| while sending`)
	require.Contains(t, string(md), ShortNote)
	require.Contains(t, string(md), "Only AC1, AC3, AC4, AC7")
	require.Contains(t, string(md), "Run it again: `mailproof gate --only AC3 --seed 7`")
	for line := range strings.SplitSeq(string(md), "\n") {
		if strings.HasPrefix(line, "| AC") {
			require.Equal(t, 6, strings.Count(strings.ReplaceAll(line, `\|`, ""), "|"), "a row of five cells: %s", line)
		}
	}
	onPage, err := os.ReadFile(page)
	require.NoError(t, err)
	require.Equal(t, string(md)+"\n", string(onPage))

	junit, err := os.ReadFile(filepath.Join(dir, "gate-junit.xml"))
	require.NoError(t, err)
	var suites junitSuites
	require.NoError(t, xml.Unmarshal(junit, &suites), "%s", junit)
	require.Equal(t, []int{4, 1, 1, 1}, []int{suites.Tests, suites.Failures, suites.Errors, suites.Skipped})
	require.Len(t, suites.Suites, 1)
	require.Len(t, suites.Suites[0].Cases, 4)
	require.Contains(t, suites.Suites[0].Cases[0].Out, "550 of 550 mails once")
	require.Contains(t, suites.Suites[0].Cases[0].Out, "t6.1-resend/history.jsonl")
	require.Contains(t, suites.Suites[0].Cases[1].Failure.Text, "run it again: mailproof gate --only AC3 --seed 7")
	require.NotNil(t, suites.Suites[0].Cases[2].Skipped)
	require.Contains(t, suites.Suites[0].Cases[3].Error.Message, "the run holds no cell")
}

func TestARunThatWasNoGateSaysSo(t *testing.T) {
	t.Parallel()
	_, err := ReadGate(t.TempDir())
	require.True(t, errors.Is(err, fs.ErrNotExist))
}

func TestWithoutAJobThereIsNoPageToWrite(t *testing.T) {
	t.Setenv("GITHUB_STEP_SUMMARY", "")
	require.NoError(t, AppendJobSummary(aGate()))
}
