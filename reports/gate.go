package reports

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"mailproof/infra"
	"mailproof/verify"
)

// GateFile is the gate's result in a run's folder.
const GateFile = "gate.json"

// Gate is gate.json: the decision on the acceptance criteria.
type Gate struct {
	Verdict  verify.Verdict `json:"verdict"`
	Seed     uint64         `json:"seed"`
	Seconds  float64        `json:"seconds"`
	Versions infra.Versions `json:"versions"`
	RunID    string         `json:"run_id"`
	Command  string         `json:"command"` // runs it again
	// Short says that the retry delays were shortened: criteria about the real
	// ones were not decided.
	Short bool `json:"short"`
	// Only lists the criteria that were asked for; empty means all.
	Only     []string    `json:"only,omitempty"`
	Criteria []Criterion `json:"criteria"`
}

// Criterion is one acceptance criterion and what decided on it.
type Criterion struct {
	ID      string         `json:"id"`   // AC1
	Text    string         `json:"text"` // what must hold
	Verdict verify.Verdict `json:"verdict"`
	// Figure is what was measured, one line.
	Figure string `json:"figure"`
	// Reason says why it is not a pass; empty for one.
	Reason string `json:"reason,omitempty"`
	// Cells that decide it, and the files below the run's folder that hold the
	// evidence.
	Cells    []string         `json:"cells"`
	Evidence []string         `json:"evidence"`
	Findings []verify.Finding `json:"findings"`
	Seconds  float64          `json:"seconds"` // of its cells
	Command  string           `json:"command"` // runs this one again
}

// Green reports that a criterion does not stop a release.
func (c Criterion) Green() bool { return c.Verdict == verify.Pass || c.Verdict == verify.SkippedRun }

// Red lists the criteria that are neither passed nor skipped.
func (g Gate) Red() []Criterion {
	var red []Criterion
	for _, c := range g.Criteria {
		if !c.Green() {
			red = append(red, c)
		}
	}
	return red
}

// sameReason is why all of the criteria are as they are, "" where each has its
// own: a gate whose parts did not start.
func (g Gate) sameReason() string {
	red := g.Red()
	for _, c := range red {
		if c.Reason != red[0].Reason || len(c.Findings) > 0 || len(c.Cells) > 0 {
			return ""
		}
	}
	if len(red) < 2 || len(red) < len(g.Criteria) {
		return ""
	}
	return red[0].Reason
}

// Passed counts the criteria that passed.
func (g Gate) Passed() int {
	n := 0
	for _, c := range g.Criteria {
		if c.Verdict == verify.Pass {
			n++
		}
	}
	return n
}

// ShortNote is said by every output of a run with shortened delays.
const ShortNote = "Shortened retry delays: AC4 and AC8 ask for 10 s, 1 min and 5 min and are not decided by this run."

// WriteGate puts gate.json, gate.md and gate-junit.xml into the run's folder,
// each whole or not at all. What $GITHUB_STEP_SUMMARY names receives gate.md
// too: it is the page of a CI job.
func WriteGate(dir string, g Gate) error {
	return writeAll(dir, "gate report", g, []output[Gate]{
		{GateFile, gateJSON},
		{"gate.md", gateMarkdown},
		{"gate-junit.xml", gateJUnit},
	})
}

// AppendJobSummary adds the gate's Markdown to the page of a GitHub job; it does
// nothing where there is none.
func AppendJobSummary(g Gate) error {
	path := os.Getenv("GITHUB_STEP_SUMMARY")
	if path == "" {
		return nil
	}
	body, err := gateMarkdown(g)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("the job's summary: %w", err)
	}
	_, err = f.Write(append(body, '\n'))
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("the job's summary: %w", err)
	}
	return nil
}

// ReadGate reads a run's gate.json. The error is os.ErrNotExist for a run that
// was no gate.
func ReadGate(dir string) (Gate, error) { return readJSON[Gate](filepath.Join(dir, GateFile)) }

// GateLines writes one line per criterion: verdict, figure, and where the
// evidence lies, below dir.
func GateLines(w io.Writer, dir string, g Gate, colours bool) {
	if g.Short {
		fmt.Fprintln(w, ShortNote)
	}
	for _, c := range g.Criteria {
		// Padded before it is painted: colours have no width.
		verdict := strings.Replace(fmt.Sprintf("%-7s", c.Verdict), string(c.Verdict), paint(c.Verdict, colours), 1)
		fmt.Fprintf(w, "%s %s  %s\n", c.ID, verdict, c.line(dir))
	}
}

// GateLine is a criterion's line without its evidence.
func GateLine(c Criterion) string { return fmt.Sprintf("%s %s  %s", c.ID, c.Verdict, c.said()) }

// said is reason and figure in one line.
func (c Criterion) said() string {
	var words []string
	for _, s := range []string{c.Reason, c.Figure} {
		if s != "" {
			words = append(words, oneLine(s))
		}
	}
	return strings.Join(words, "; ")
}

// line is figure, reason and evidence in one line.
func (c Criterion) line(dir string) string {
	said := c.said()
	if len(c.Evidence) == 0 {
		return said + "  (no evidence)"
	}
	return said + "  " + filepath.Join(dir, c.Evidence[0]) + more(len(c.Evidence)-1)
}

func more(n int) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(" (+%d)", n)
}

func gateJSON(g Gate) ([]byte, error) {
	list := make([]Criterion, len(g.Criteria))
	for i, c := range g.Criteria {
		// A reader of the JSON should not have to tell null from an empty list.
		c.Cells = append([]string{}, c.Cells...)
		c.Evidence = append([]string{}, c.Evidence...)
		c.Findings = append([]verify.Finding{}, c.Findings...)
		list[i] = c
	}
	g.Criteria = list
	return indented(g)
}

func gateMarkdown(g Gate) ([]byte, error) {
	var b strings.Builder
	fmt.Fprintf(&b, "## Acceptance gate: %s\n\n", g.Verdict)
	fmt.Fprintf(&b, "%d of %d criteria passed. Seed %d, %s; %s.\n\n", g.Passed(), len(g.Criteria), g.Seed,
		time.Duration(g.Seconds*float64(time.Second)).Round(time.Second), Parts(g.Versions))
	if g.Short {
		fmt.Fprintf(&b, "> **Note.** %s\n\n", ShortNote)
	}
	if len(g.Only) > 0 {
		fmt.Fprintf(&b, "> **Note.** Only %s; the other criteria were not asked for.\n\n", strings.Join(g.Only, ", "))
	}
	b.WriteString("| | criterion | verdict | figure | evidence |\n|---|---|---|---|---|\n")
	for _, c := range g.Criteria {
		said := c.said()
		if g.sameReason() != "" {
			said = "not judged, see below"
		}
		fmt.Fprintf(&b, "| %s | %s | **%s** | %s | %s |\n", c.ID, cell(c.Text), c.Verdict, cell(said), cell(code(c.Evidence)))
	}
	red := g.Red()
	if reason := g.sameReason(); reason != "" {
		fmt.Fprintf(&b, "\nOf all: %s\n", oneLine(reason))
		red = nil
	}
	for _, c := range red {
		fmt.Fprintf(&b, "\n### %s %s\n\n%s\n\n", c.ID, c.Verdict, oneLine(c.Reason))
		for _, f := range firstFindings(c.Findings) {
			fmt.Fprintf(&b, "- **%s** %s %s: %s\n", f.Verdict, f.Invariant, f.Key, oneLine(f.Text))
		}
		fmt.Fprintf(&b, "\nRun it again: `%s`\n", c.Command)
	}
	fmt.Fprintf(&b, "\nThe same gate again: `%s`\n", g.Command)
	return []byte(b.String()), nil
}

// code writes names as code, a dash for none.
func code(names []string) string {
	if len(names) == 0 {
		return "–"
	}
	return "`" + strings.Join(names, "` `") + "`"
}

// cell makes a text fit for a cell of a Markdown table.
func cell(s string) string {
	return strings.NewReplacer("|", "\\|", "\n", " ").Replace(s)
}
