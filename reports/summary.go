// Package reports writes what a run found, for machines (summary.json,
// junit.xml) and for people (summary.md, index.html, the closing table).
package reports

import (
	"fmt"
	"time"

	"mailproof/history"
	"mailproof/infra"
	"mailproof/verify"
)

// Summary is summary.json.
type Summary struct {
	Verdict  verify.Verdict `json:"verdict"`
	Seed     uint64         `json:"seed"`
	Seconds  float64        `json:"seconds"`
	Versions infra.Versions `json:"versions"`
	RunID    string         `json:"run_id"`
	Command  string         `json:"command"` // runs it again
	// NotRun says why no cell was run, "" for a run that got so far.
	NotRun    string     `json:"not_run,omitempty"`
	Scenarios []Scenario `json:"scenarios"`
}

// Parts names the real parts of a run and their versions.
func Parts(v infra.Versions) string {
	if v == (infra.Versions{}) {
		return "no part was there"
	}
	return fmt.Sprintf("%s, RabbitMQ %s, Kafka %s (%s)", postgresName(v.Postgres), v.RabbitMQ, v.Kafka, v.KafkaKind)
}

// Scenario is the result of one scenario under one policy.
type Scenario struct {
	Name      string           `json:"name"`
	Title     string           `json:"title"` // one line for people
	Verdict   verify.Verdict   `json:"verdict"`
	Seconds   float64          `json:"seconds"`
	Seed      uint64           `json:"seed"`
	Policy    string           `json:"policy"`
	Guarantee string           `json:"guarantee"` // the row by which it was judged
	Findings  []verify.Finding `json:"findings"`
	Faults    []FaultResult    `json:"faults"`
	Counts    Counts           `json:"counts"`
	Latency   Latency          `json:"latency_ms"`
	Measured  []Measurement    `json:"measured,omitempty"`
	Command   string           `json:"command"` // runs this one again
	// Invariants that judged it, with how many pieces of evidence each looked at.
	Invariants []Checked            `json:"invariants"`
	Queues     []history.QueueState `json:"queues,omitempty"`
	Dir        string               `json:"dir"` // below the run's folder
	// RetryDelays and MaxAttempts as the system under test had them.
	RetryDelays []time.Duration `json:"retry_delays_ns,omitempty"`
	MaxAttempts int             `json:"max_attempts,omitempty"`
	// Evidence is the SHA-256 of the history when it was first judged.
	Evidence string `json:"evidence_sha256,omitempty"`
	// Runner is the SHA-256 of what the runner itself found and measured.
	Runner string `json:"runner_sha256,omitempty"`

	chart chart // for the page, from the history
}

// Chart is what the page draws; summary.json does not hold it.
func (s Scenario) Chart() any { return s.chart }

// FaultResult is one fault of a scenario.
type FaultResult struct {
	Name    string               `json:"name"`
	Outcome history.FaultOutcome `json:"outcome"`
	Witness string               `json:"witness"`
	Count   int                  `json:"count"`
	Reason  string               `json:"reason,omitempty"` // of a skip or a failure
}

// Counts of mails, by what became of them.
type Counts = verify.Counts

// Latency of all mails, as the judge counts it: an undelivered one is written
// as -1.
type Latency = verify.Latency

// Checked is one invariant and how much it looked at.
type Checked = verify.Checked

// Measurement is a figure that the scenario took beside its verdict.
type Measurement struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit"`
	Note  string  `json:"note,omitempty"`
}
