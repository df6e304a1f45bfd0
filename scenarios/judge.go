package scenarios

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"mailproof/history"
	"mailproof/reports"
	"mailproof/verify"
)

// Judge judges the evidence in a cell's folder: the history by the invariants
// that its meta names, and what the runner itself found. It asks nothing of a
// running system, so that it gives the same answer a year later.
func Judge(dir string) (reports.Scenario, error) {
	h, err := history.Load(filepath.Join(dir, history.FileName))
	if err != nil {
		return reports.Scenario{}, err
	}
	own, err := loadOwn(dir)
	if err != nil {
		return reports.Scenario{}, err
	}
	judged := verify.Judge(h)
	if extra := judgeOf(h); extra != nil {
		extra(h, &own)
	}
	result := reports.Scenario{
		Verdict: judged.Verdict, Findings: judged.Findings, Guarantee: judged.Guarantee,
		Counts: judged.Counts, Latency: judged.Latency, Invariants: append(judged.Checked, own.checked...),
		Measured: own.Measured, Dir: filepath.Base(dir),
	}
	tellStories(h, own.Findings)
	for _, f := range own.Findings {
		result.Verdict = verify.Worse(result.Verdict, f.Verdict)
		result.Findings = append(result.Findings, f)
	}
	slices.SortStableFunc(result.Findings, func(a, b verify.Finding) int {
		return cmp.Compare(severity(b.Verdict), severity(a.Verdict))
	})
	reports.FromHistory(h, &result)
	if h.Meta != nil {
		result.Name, result.Policy, result.Seed = h.Meta.Scenario, h.Meta.Policy, h.Meta.Seed
		result.Title = h.Meta.Params[paramTitle]
	}
	result.Seconds = seconds(h.End - h.Start)
	return result, nil
}

// tellStories adds the mail's life to the first findings that name one.
func tellStories(h *history.History, findings []verify.Finding) {
	var evidence *verify.Evidence
	told := 0
	for i := range findings {
		f := &findings[i]
		if f.Key == "" || f.Story != nil || told >= verify.MaxStories || h.Meta == nil {
			continue
		}
		if evidence == nil {
			evidence = verify.NewEvidence(h, verify.DefaultColumns())
		}
		f.Story = evidence.Story(f.Key)
		told++
	}
}

// judgeOf is the judge of the history's own scenario, nil if it has none. A
// history that is not whole is judged by nobody else than the checkers.
func judgeOf(h *history.History) func(*history.History, *ownFindings) {
	if h.Meta == nil || h.Final == nil {
		return nil
	}
	for _, s := range All(Draw{}) {
		if s.Name == h.Meta.Scenario {
			return s.Judge
		}
	}
	return nil
}

// severity orders verdicts as the lattice does.
func severity(v verify.Verdict) int {
	all := []verify.Verdict{verify.Pass, verify.SkippedRun, verify.Invalid, verify.Unknown, verify.HarnessError, verify.Fail}
	return slices.Index(all, v)
}

// JudgeAgain judges a finished run from its evidence and returns its summary
// anew. What only the first judging knew (versions, commands, times) is taken
// from the summary that it left.
func JudgeAgain(dir string) (reports.Summary, error) {
	sum, err := reports.Read(dir)
	if err != nil {
		return sum, err
	}
	before := sum.Scenarios
	sum.Scenarios, sum.Verdict = nil, verify.Pass
	for _, old := range before {
		again := old
		if old.Dir != "" && exists(filepath.Join(dir, old.Dir, history.FileName)) {
			if again, err = Judge(filepath.Join(dir, old.Dir)); err != nil {
				return sum, fmt.Errorf("%s/%s: %w", old.Name, old.Policy, err)
			}
			again.Command, again.Seconds = old.Command, old.Seconds
		}
		sum.Scenarios = append(sum.Scenarios, again)
		sum.Verdict = verify.Worse(sum.Verdict, again.Verdict)
	}
	if len(sum.Scenarios) == 0 {
		sum.Verdict = verify.Invalid
	}
	return sum, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
