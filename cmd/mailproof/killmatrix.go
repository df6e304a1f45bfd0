package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"

	"mailproof/mutants"
	"mailproof/reports"
	"mailproof/scenarios"
	"mailproof/verify"
)

// summaryName is the file in the folder of the mutants' runs.
const summaryName = "summary.md"

// matrixWidth is what a terminal and a page of a log show without wrapping.
const matrixWidth = 100

// killing is what became of one defect.
type killing struct {
	mutant  mutants.Mutant
	result  string
	verdict verify.Verdict // Pass: caught as it must be
	found   []string       // invariants that failed
	first   verify.Finding // by the named invariant, if it failed
	line    string         // of the gate, for the criterion that the defect names
	err     error          // why there was no run
	seconds float64
}

// The results.
const (
	caught          = "caught"
	caughtByAnother = "caught by another"
	gateGreen       = "criterion not red"
	survived        = "SURVIVED"
	notPlanted      = "not planted"
)

// judgeMutant compares a run with what its defect must do to it.
func judgeMutant(m mutants.Mutant, sum reports.Summary, err error) killing {
	k := killing{mutant: m, err: err}
	if err != nil {
		k.result, k.verdict = notPlanted, verify.HarnessError
		return k
	}
	k.first, k.found = findings(sum, m.Invariant)
	gate := verify.Fail
	if m.Criterion != "" {
		k.line, gate = criterionOf(m.Criterion, sum)
	}
	switch {
	case sum.Verdict == verify.Fail && k.first.Invariant == m.Invariant && gate != verify.Fail:
		k.result, k.verdict = gateGreen, verify.Fail
	case sum.Verdict == verify.Fail && k.first.Invariant == m.Invariant:
		k.result, k.verdict = caught, verify.Pass
	case sum.Verdict == verify.Fail:
		k.result, k.verdict = caughtByAnother, verify.Fail
	case sum.Verdict == verify.Pass:
		k.result, k.verdict = survived, verify.Fail
	default:
		// Neither caught nor survived: the run says nothing.
		k.result, k.verdict = "run is "+string(sum.Verdict), sum.Verdict
	}
	return k
}

// criterionOf is the gate's line on one criterion, from the cells of this run
// alone: a failure in one of its cells is enough for it to be red.
func criterionOf(id string, sum reports.Summary) (line string, v verify.Verdict) {
	criteria, err := scenarios.ChooseCriteria(scenarios.Criteria(), []string{id})
	if err != nil {
		return err.Error(), verify.HarnessError
	}
	g := scenarios.JudgeGate(sum, criteria, func(...string) string { return "" })
	return reports.GateLine(g.Criteria[0]), g.Verdict
}

// told is the finding in one line, or what there is instead.
func (k killing) told() string {
	switch {
	case k.err != nil:
		return k.err.Error()
	case k.first.Invariant == "":
		return "no invariant failed"
	}
	return k.first.Invariant + ": " + strings.TrimSpace(k.first.Key+" "+k.first.Text)
}

// others are the invariants that failed beside the one of the finding.
func (k killing) others() string {
	var names []string
	for _, n := range k.found {
		if n != k.first.Invariant {
			names = append(names, n)
		}
	}
	return strings.Join(names, ", ")
}

type killMatrix []killing

// verdict of all: Pass when each defect was caught by its invariant.
func (x killMatrix) verdict() verify.Verdict {
	worst := verify.Pass
	for _, k := range x {
		worst = verify.Worse(worst, k.verdict)
	}
	return worst
}

func (x killMatrix) caught() int {
	n := 0
	for _, k := range x {
		if k.verdict == verify.Pass {
			n++
		}
	}
	return n
}

func (x killMatrix) conclusion() string {
	return fmt.Sprintf("%d of %d defects were caught by the invariant that they name", x.caught(), len(x))
}

// text is the matrix for a terminal, no line longer than matrixWidth: a line per
// defect, then what was found of each.
func (x killMatrix) text() string {
	t := table.NewWriter()
	t.SetStyle(table.StyleRounded)
	t.Style().Format.Header = text.FormatDefault
	t.AppendHeader(table.Row{"defect", "scenario", "must be found by", "result"})
	for _, k := range x {
		t.AppendRow(table.Row{k.mutant.Name, k.mutant.Scenario, k.mutant.Invariant, k.result})
	}
	var b strings.Builder
	b.WriteString(t.Render() + "\n")
	for _, k := range x {
		b.WriteString(indent(k.mutant.Name, k.told()))
		if k.line != "" {
			b.WriteString(indent("", "gate: "+k.line))
		}
		if others := k.others(); others != "" {
			b.WriteString(indent("", "also: "+others))
		}
	}
	b.WriteString(x.conclusion() + "\n")
	return b.String()
}

// indent writes a name, and beside it a text in as many lines as it needs.
func indent(name, said string) string {
	const column = 24
	var b strings.Builder
	for paragraph := range strings.SplitSeq(strings.TrimSpace(said), "\n") {
		for line := range strings.SplitSeq(text.WrapSoft(paragraph, matrixWidth-column), "\n") {
			fmt.Fprintf(&b, "%-*s%s\n", column, name, strings.TrimRight(line, " "))
			name = ""
		}
	}
	return b.String()
}

// markdown is the matrix for people who were not there.
func (x killMatrix) markdown(seed uint64) string {
	t := table.NewWriter()
	t.AppendHeader(table.Row{"defect", "what is wrong", "trap", "scenario", "must be found by", "result", "s"})
	for _, k := range x {
		m := k.mutant
		t.AppendRow(table.Row{m.Name, m.Title, m.Trap, m.Scenario, m.Invariant, k.result, fmt.Sprintf("%.0f", k.seconds)})
	}
	var b strings.Builder
	fmt.Fprintf(&b, "# Planted defects, seed %d\n\n%s.\n\n%s\n\n## What was found\n\n", seed, x.conclusion(), t.RenderMarkdown())
	for _, k := range x {
		fmt.Fprintf(&b, "- **%s**: %s\n", k.mutant.Name, strings.ReplaceAll(k.told(), "\n", "\n  "))
		if k.line != "" {
			fmt.Fprintf(&b, "  - gate: %s\n", k.line)
		}
		if others := k.others(); others != "" {
			fmt.Fprintf(&b, "  - also failed: %s\n", others)
		}
	}
	return b.String()
}

// save writes the summary into the folder of the runs.
func (x killMatrix) save(dir string, seed uint64) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("the folder of the mutants' runs: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, summaryName), []byte(x.markdown(seed)), 0o644); err != nil {
		return fmt.Errorf("the mutants' summary: %w", err)
	}
	return nil
}
