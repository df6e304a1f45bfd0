package scenarios

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
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
	result, _, err := judge(dir)
	return result, err
}

// judge also returns what was found by no checker of package verify, with the
// raw samples.
func judge(dir string) (reports.Scenario, ownFindings, error) {
	h, err := history.Load(filepath.Join(dir, history.FileName))
	if err != nil {
		return reports.Scenario{}, ownFindings{}, err
	}
	evidence, err := fingerprint(filepath.Join(dir, history.FileName))
	if err != nil {
		return reports.Scenario{}, ownFindings{}, err
	}
	own, err := loadOwn(dir)
	if err != nil {
		return reports.Scenario{}, own, err
	}
	runner, err := fingerprint(filepath.Join(dir, ownFile))
	if err != nil {
		return reports.Scenario{}, own, err
	}
	if h.Meta != nil && h.Final != nil {
		own.samples = samplesOf(verify.NewEvidence(h, verify.DefaultColumns()))
	}
	judged := verify.Judge(h)
	if extra := judgeOf(h); extra != nil {
		extra(h, &own)
	}
	result := reports.Scenario{
		Verdict: judged.Verdict, Findings: judged.Findings, Guarantee: judged.Guarantee,
		Counts: judged.Counts, Latency: judged.Latency, Invariants: append(judged.Checked, own.checked...),
		Measured: own.Measured, Dir: filepath.Base(dir), Evidence: evidence, Runner: runner,
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
		result.Name, result.Policy, result.Seed = h.Meta.Scenario, cmp.Or(h.Meta.Params[paramCell], h.Meta.Policy), h.Meta.Seed
		result.Title = h.Meta.Params[paramTitle]
		result.RetryDelays, result.MaxAttempts = h.Meta.RetryDelays, h.Meta.MaxAttempts
	}
	result.Seconds = seconds(h.End - h.Start)
	return result, own, nil
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
	if sum.NotRun != "" && len(before) == 0 {
		return sum, nil // there is nothing to judge, and it does not say that anything passed
	}
	sum.Scenarios, sum.Verdict = nil, verify.Pass
	for _, old := range before {
		again := judgeCellAgain(dir, old)
		sum.Scenarios = append(sum.Scenarios, again)
		sum.Verdict = verify.Worse(sum.Verdict, again.Verdict)
	}
	if len(sum.Scenarios) == 0 {
		sum.Verdict = verify.Invalid
	}
	untold, err := untoldCells(dir, before)
	for _, cell := range untold {
		sum.Scenarios = append(sum.Scenarios, cell)
		sum.Verdict = verify.Worse(sum.Verdict, cell.Verdict)
	}
	return sum, err
}

// untoldCells are the folders that hold a history of which the summary says
// nothing: a cell that was red can be taken out of a summary.
func untoldCells(dir string, told []reports.Scenario) ([]reports.Scenario, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("the run's folder: %w", err)
	}
	var untold []reports.Scenario
	for _, e := range entries {
		if !e.IsDir() || !exists(filepath.Join(dir, e.Name(), history.FileName)) ||
			slices.ContainsFunc(told, func(s reports.Scenario) bool { return s.Dir == e.Name() }) {
			continue
		}
		cell := judgeCellAgain(dir, reports.Scenario{Name: e.Name(), Dir: e.Name(), Verdict: verify.HarnessError})
		noEvidence(&cell, "the folder %s holds a history, and the run's summary says nothing of it", e.Name())
		untold = append(untold, cell)
	}
	return untold, nil
}

// judgeCellAgain judges one cell from its history. A cell that left none keeps
// its verdict only if the harness failed before there was evidence. Any other
// without its history is a harness error, and so is one whose history, or what the
// runner itself found, is not what was judged first: lines can be taken from a
// history so that nothing in it contradicts itself, and the runner's findings are
// contradicted by nothing at all.
// Evidence that cannot be read is that cell's finding: the others are judged.
func judgeCellAgain(dir string, old reports.Scenario) reports.Scenario {
	cell := filepath.Join(dir, old.Dir)
	if old.Dir == "" || !exists(filepath.Join(cell, history.FileName)) {
		if old.Verdict != verify.HarnessError {
			noEvidence(&old, "the evidence is gone: there is no %s to judge; what was said of it before does not count", filepath.Join(cell, history.FileName))
		}
		return old
	}
	again, err := Judge(cell)
	if err != nil {
		noEvidence(&old, "judged again: %v", err)
		return old
	}
	again.Command, again.Seconds = old.Command, old.Seconds
	again.Evidence = sameAsThen(&again, "history", again.Evidence, old.Evidence)
	again.Runner = sameAsThen(&again, "list of the runner's own findings", again.Runner, old.Runner)
	return again
}

// sameAsThen compares a file with what the summary says of it and returns what
// the next summary must say: the first word, so that the next judging finds it
// too. A cell of which the summary says nothing was never judged to its end, or
// somebody took the word out.
func sameAsThen(cell *reports.Scenario, file, now, then string) string {
	switch {
	case then == "":
		noEvidence(cell, "the run's summary does not say what its %s was: nothing shows that this is the one", file)
	case now != then:
		noEvidence(cell, "the %s is not the one of the run: its SHA-256 is %s, and was %s", file, now, then)
	}
	return then
}

// noEvidence adds the finding that a cell's evidence cannot be relied upon.
func noEvidence(sc *reports.Scenario, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	sc.Verdict = verify.Worse(sc.Verdict, verify.HarnessError)
	if slices.ContainsFunc(sc.Findings, func(f verify.Finding) bool { return f.Text == text }) {
		return // an earlier judging said so
	}
	sc.Findings = append(sc.Findings, verify.Finding{
		Invariant: "well-formed-history", Verdict: verify.HarnessError, Text: text,
	})
}

// fingerprint is the SHA-256 of a history, in hexadecimal digits.
func fingerprint(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("fingerprint of the history: %w", err)
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return "", fmt.Errorf("fingerprint of the history: %w", err)
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
