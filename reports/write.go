package reports

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"mailproof/verify"
)

// Write puts summary.json, summary.md, junit.xml and index.html into the run's
// folder, each whole or not at all.
func Write(dir string, s Summary) error {
	return writeAll(dir, "report", s, []output[Summary]{
		{"summary.json", jsonReport},
		{"summary.md", markdownReport},
		{"junit.xml", junitReport},
		{"index.html", htmlReport},
	})
}

// output is one file that shows a T.
type output[T any] struct {
	name string
	make func(T) ([]byte, error)
}

func writeAll[T any](dir, what string, of T, files []output[T]) error {
	for _, f := range files {
		body, err := f.make(of)
		if err != nil {
			return fmt.Errorf("%s %s: %w", what, f.name, err)
		}
		if err := replaceFile(filepath.Join(dir, f.name), body); err != nil {
			return fmt.Errorf("%s %s: %w", what, f.name, err)
		}
	}
	return nil
}

// replaceFile writes beside the target and renames, so that a reader never sees
// half a report.
func replaceFile(path string, body []byte) error {
	tmp := path + ".tmp"
	err := os.WriteFile(tmp, body, 0o644)
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		_ = os.Remove(tmp) // half a file on a full disk is in the way
	}
	return err
}

// Read reads the summary.json of a run.
func Read(dir string) (Summary, error) { return readJSON[Summary](filepath.Join(dir, "summary.json")) }

func readJSON[T any](path string) (v T, err error) {
	body, err := os.ReadFile(path)
	if err != nil {
		return v, fmt.Errorf("%s is no folder of a finished run (such as runs/latest): %w", filepath.Dir(path), err)
	}
	if err := json.Unmarshal(body, &v); err != nil {
		return v, fmt.Errorf("reading %s: %w", path, err)
	}
	return v, nil
}

func jsonReport(s Summary) ([]byte, error) { return indented(whole(s)) }

// indented is JSON for people too: "<" stays "<".
func indented(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	err := enc.Encode(v)
	return b.Bytes(), err
}

// whole replaces nil lists, which a reader of the JSON would have to tell from
// empty ones.
func whole(s Summary) Summary {
	list := make([]Scenario, len(s.Scenarios))
	for i, sc := range s.Scenarios {
		if sc.Findings == nil {
			sc.Findings = []verify.Finding{}
		}
		if sc.Faults == nil {
			sc.Faults = []FaultResult{}
		}
		if sc.Invariants == nil {
			sc.Invariants = []Checked{}
		}
		list[i] = sc
	}
	s.Scenarios = list
	return s
}

func markdownReport(s Summary) ([]byte, error) {
	var b strings.Builder
	fmt.Fprintf(&b, "# mailproof: %s\n\n", s.Verdict)
	fmt.Fprintf(&b, "Seed %d, %.0f s, %s.\n", s.Seed, s.Seconds, Parts(s.Versions))
	if s.NotRun != "" {
		fmt.Fprintf(&b, "No cell was run: %s\n", oneLine(s.NotRun))
	}
	fmt.Fprintf(&b, "Run it again: `%s`\n\n", s.Command)
	b.WriteString("| scenario | policy | verdict | confirmed | delivered | duplicates | lost | unknown | dead | p95 | seconds |\n")
	b.WriteString("|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|\n")
	for _, sc := range s.Scenarios {
		c := sc.Counts
		fmt.Fprintf(&b, "| %s | %s | **%s** | %d | %d | %d | %d | %d | %d | %s | %.0f |\n", sc.Name, sc.Policy, sc.Verdict,
			c.Confirmed, c.Delivered, c.Duplicates, c.Lost, c.Unknown, c.Dead, p95(sc), sc.Seconds)
	}
	for _, sc := range s.Scenarios {
		markdownScenario(&b, sc)
	}
	return []byte(b.String()), nil
}

func markdownScenario(b *strings.Builder, sc Scenario) {
	fmt.Fprintf(b, "\n## %s (%s): %s\n\n%s.", sc.Name, sc.Policy, sc.Verdict, capital(sc.Title))
	if sc.Guarantee != "" {
		fmt.Fprintf(b, " Judged by: %s", sc.Guarantee)
	}
	b.WriteString("\n\n")
	for _, f := range sc.Faults {
		fmt.Fprintf(b, "- fault %s, %s: %s\n", f.Name, f.Outcome, witness(f))
	}
	for _, m := range sc.Measured {
		fmt.Fprintf(b, "- %s: %s\n", m.Name, measured(m))
	}
	for _, f := range firstFindings(sc.Findings) {
		fmt.Fprintf(b, "- **%s** %s %s: %s\n", f.Verdict, f.Invariant, f.Key, oneLine(f.Text))
	}
	if rest := len(sc.Findings) - maxFindings; rest > 0 {
		fmt.Fprintf(b, "- and %d more findings, in summary.json\n", rest)
	}
	if sc.Verdict != verify.Pass {
		fmt.Fprintf(b, "\nRun it again: `%s`\n", sc.Command)
	}
}

// maxFindings of one scenario are shown to people; summary.json has them all.
const maxFindings = 25

func firstFindings(all []verify.Finding) []verify.Finding { return all[:min(len(all), maxFindings)] }

func oneLine(s string) string {
	first, _, cut := strings.Cut(strings.TrimSpace(s), "\n")
	if cut {
		first += " …"
	}
	return first
}

func capital(s string) string {
	r, n := utf8.DecodeRuneInString(s)
	if n == 0 {
		return s
	}
	return strings.ToUpper(string(r)) + s[n:]
}

func p95(sc Scenario) string {
	if sc.Latency.N == 0 {
		return "–"
	}
	return milliseconds(sc.Latency.P95)
}

func witness(f FaultResult) string {
	switch {
	case f.Witness != "":
		return f.Witness
	case f.Reason != "":
		return "no witness: " + oneLine(f.Reason)
	default:
		return "no witness"
	}
}

func measured(m Measurement) string {
	text := fmt.Sprintf("%.4g", m.Value)
	if m.Unit != "" {
		text += " " + m.Unit
	}
	if m.Note != "" {
		text += " (" + m.Note + ")"
	}
	return text
}

func postgresName(v string) string {
	if strings.HasPrefix(v, "PostgreSQL") {
		return v
	}
	return "Postgres " + v
}
