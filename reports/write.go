package reports

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
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
	files := []struct {
		name string
		make func(Summary) ([]byte, error)
	}{
		{"summary.json", jsonReport},
		{"summary.md", markdownReport},
		{"junit.xml", junitReport},
		{"index.html", htmlReport},
	}
	for _, f := range files {
		body, err := f.make(s)
		if err != nil {
			return fmt.Errorf("report %s: %w", f.name, err)
		}
		if err := replaceFile(filepath.Join(dir, f.name), body); err != nil {
			return fmt.Errorf("report %s: %w", f.name, err)
		}
	}
	return nil
}

// replaceFile writes beside the target and renames, so that a reader never sees
// half a report.
func replaceFile(path string, body []byte) error {
	tmp := path + ".tmp"
	if err := os.WriteFile(tmp, body, 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// Read reads the summary.json of a run.
func Read(dir string) (Summary, error) {
	var s Summary
	body, err := os.ReadFile(filepath.Join(dir, "summary.json"))
	if err != nil {
		return s, fmt.Errorf("reading the summary: %w", err)
	}
	if err := json.Unmarshal(body, &s); err != nil {
		return s, fmt.Errorf("reading %s: %w", filepath.Join(dir, "summary.json"), err)
	}
	return s, nil
}

func jsonReport(s Summary) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	err := enc.Encode(whole(s))
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

type junitSuites struct {
	XMLName  xml.Name     `xml:"testsuites"`
	Name     string       `xml:"name,attr"`
	Tests    int          `xml:"tests,attr"`
	Failures int          `xml:"failures,attr"`
	Errors   int          `xml:"errors,attr"`
	Skipped  int          `xml:"skipped,attr"`
	Time     string       `xml:"time,attr"`
	Suites   []junitSuite `xml:"testsuite"`
}

type junitSuite struct {
	Name     string      `xml:"name,attr"`
	Tests    int         `xml:"tests,attr"`
	Failures int         `xml:"failures,attr"`
	Errors   int         `xml:"errors,attr"`
	Skipped  int         `xml:"skipped,attr"`
	Time     string      `xml:"time,attr"`
	Cases    []junitCase `xml:"testcase"`
}

type junitCase struct {
	Name    string      `xml:"name,attr"`
	Class   string      `xml:"classname,attr"`
	Time    string      `xml:"time,attr"`
	Failure *junitFault `xml:"failure,omitempty"`
	Error   *junitFault `xml:"error,omitempty"`
	Skipped *junitFault `xml:"skipped,omitempty"`
}

type junitFault struct {
	Message string `xml:"message,attr"`
	Text    string `xml:",chardata"`
}

// junitReport has a suite per scenario and a case per policy. Only fail is a
// failure; invalid, unknown and harness-error are errors, so that a dashboard
// keeps them apart.
func junitReport(s Summary) ([]byte, error) {
	all := junitSuites{Name: "mailproof chaos", Time: fmt.Sprintf("%.3f", s.Seconds)}
	index := map[string]int{}
	for _, sc := range s.Scenarios {
		i, seen := index[sc.Name]
		if !seen {
			i = len(all.Suites)
			index[sc.Name] = i
			all.Suites = append(all.Suites, junitSuite{Name: sc.Name})
		}
		all.Suites[i].add(sc)
	}
	for i, suite := range all.Suites {
		var total float64
		for _, sc := range s.Scenarios {
			if sc.Name == suite.Name {
				total += sc.Seconds
			}
		}
		all.Suites[i].Time = fmt.Sprintf("%.3f", total)
		all.Tests += suite.Tests
		all.Failures += suite.Failures
		all.Errors += suite.Errors
		all.Skipped += suite.Skipped
	}
	body, err := xml.MarshalIndent(all, "", "  ")
	return append([]byte(xml.Header), append(body, '\n')...), err
}

func (j *junitSuite) add(sc Scenario) {
	c := junitCase{Name: sc.Name + "/" + sc.Policy, Class: "mailproof." + sc.Name, Time: fmt.Sprintf("%.3f", sc.Seconds)}
	detail := junitDetail(sc)
	switch sc.Verdict {
	case verify.Pass:
	case verify.SkippedRun:
		c.Skipped = detail
		j.Skipped++
	case verify.Fail:
		c.Failure = detail
		j.Failures++
	default:
		c.Error = detail
		j.Errors++
	}
	j.Tests++
	j.Cases = append(j.Cases, c)
}

func junitDetail(sc Scenario) *junitFault {
	d := &junitFault{Message: string(sc.Verdict)}
	var b strings.Builder
	for i, f := range firstFindings(sc.Findings) {
		if i == 0 {
			d.Message = fmt.Sprintf("%s: %s %s", sc.Verdict, f.Invariant, f.Key)
		}
		fmt.Fprintf(&b, "%s %s %s: %s\n", f.Verdict, f.Invariant, f.Key, f.Text)
		for _, line := range f.Story {
			fmt.Fprintf(&b, "    %s\n", line)
		}
	}
	fmt.Fprintf(&b, "run it again: %s\n", sc.Command)
	d.Text = printable(b.String())
	d.Message = printable(d.Message)
	return d
}

// printable drops what XML 1.0 cannot hold: control characters and bytes that
// are no UTF-8.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r == utf8.RuneError || r < 0x20 && r != '\n' && r != '\t' || r == 0xFFFE || r == 0xFFFF {
			return -1
		}
		return r
	}, s)
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
