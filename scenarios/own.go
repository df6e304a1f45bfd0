package scenarios

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"mailproof/history"
	"mailproof/loadgen"
	"mailproof/reports"
	"mailproof/verify"
)

// Params of the history's meta that only this package reads.
const (
	paramTitle = "title"
	paramCell  = "cell" // its name, where that is not the policy
)

// ownFile holds what only the runner can know, beside the history.
const ownFile = "runner.json"

// ownFindings is what the runner itself found and measured: whether the system
// came to rest, whether the arrivals were made, whether the harness broke. It is
// evidence too, and saved with it, so that judging again gives the same verdict.
type ownFindings struct {
	Findings []verify.Finding      `json:"findings,omitempty"`
	Measured []reports.Measurement `json:"measured,omitempty"`

	checked []verify.Checked // of a scenario's own judge; not saved, made anew
	samples []loadgen.Sample // raw latencies, taken from the history
}

// check begins an invariant that a scenario judges by itself; what a fault has
// found of it while the system ran counts.
func (o *ownFindings) check(name, statement string, looked int) {
	c := verify.Checked{Name: name, Statement: statement, Looked: looked}
	for _, f := range o.Findings {
		if f.Invariant == name {
			c.Findings++
		}
	}
	o.checked = append(o.checked, c)
}

func (o *ownFindings) find(v verify.Verdict, invariant, key, text string) {
	o.Findings = append(o.Findings, verify.Finding{Invariant: invariant, Verdict: v, Key: key, Text: text})
	for i := range o.checked {
		if o.checked[i].Name == invariant {
			o.checked[i].Findings++
		}
	}
}

func (o *ownFindings) measure(name string, value float64, unit, note string) {
	o.Measured = append(o.Measured, reports.Measurement{Name: name, Value: value, Unit: unit, Note: note})
}

func (o *ownFindings) measured(name string) (float64, bool) {
	for _, m := range o.Measured {
		if m.Name == name {
			return m.Value, true
		}
	}
	return 0, false
}

func (o *ownFindings) save(dir string) error {
	body, err := json.MarshalIndent(o, "", "  ")
	if err != nil {
		return fmt.Errorf("the runner's findings: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, ownFile), append(body, '\n'), 0o644); err != nil {
		return fmt.Errorf("the runner's findings: %w", err)
	}
	return nil
}

func loadOwn(dir string) (ownFindings, error) {
	var o ownFindings
	body, err := os.ReadFile(filepath.Join(dir, ownFile))
	if err != nil {
		return o, fmt.Errorf("the runner's findings: %w", err)
	}
	if err := json.Unmarshal(body, &o); err != nil {
		return o, fmt.Errorf("the runner's findings in %s: %w", dir, err)
	}
	return o, nil
}

// writeQueues writes what "rabbitmqctl list_queues name type leader members
// online" prints, with the members counted (AC2).
func writeQueues(dir string, queues []history.QueueState) error {
	var b strings.Builder
	b.WriteString("name\ttype\tleader\tmembers\tonline\n")
	for _, q := range queues {
		fmt.Fprintf(&b, "%s\t%s\t%s\t%d\t%d\n", q.Name, q.Type, q.Leader, q.Members, q.Online)
	}
	if err := os.WriteFile(filepath.Join(dir, "queues.txt"), []byte(b.String()), 0o644); err != nil {
		return fmt.Errorf("the list of queues: %w", err)
	}
	return nil
}
