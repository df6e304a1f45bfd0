package benchmarks

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"mailproof/infra"
)

// SchemaVersion of [Result]. It rises when a field changes its meaning or goes
// away; new fields do not raise it.
const SchemaVersion = 1

// Result is everything that one run measured: the only source of the document.
// A part that did not run leaves its field nil.
type Result struct {
	Schema  int           `json:"schema"`
	Run     RunInfo       `json:"run"`
	Machine Machine       `json:"machine"`
	Parts   []PartOutcome `json:"parts"`

	Hops      *Hops      `json:"hops,omitempty"`
	Latency   *Latency   `json:"latency,omitempty"`
	Queues    *Queues    `json:"queues,omitempty"`
	Marketing *Marketing `json:"marketing,omitempty"`
	Dead      *Dead      `json:"dead,omitempty"`
	Recovery  *Recovery  `json:"recovery,omitempty"`
}

// RunInfo says how the run was made.
type RunInfo struct {
	Began    time.Time      `json:"began"`
	Seconds  float64        `json:"seconds"`
	Seed     uint64         `json:"seed"`
	Quick    bool           `json:"quick"`
	Repeats  int            `json:"repeats"`
	Command  string         `json:"command"` // that repeats it
	Revision string         `json:"revision"`
	Versions infra.Versions `json:"versions"`
	// Interrupted: the user ended it before its last part.
	Interrupted bool `json:"interrupted,omitempty"`
}

// PartOutcome is what became of one part.
type PartOutcome struct {
	Name    string  `json:"name"`
	Title   string  `json:"title"`
	Seconds float64 `json:"seconds"`
	// Expected is how long it was thought to take on two idle cores, in seconds.
	Expected float64 `json:"expected_seconds,omitempty"`
	// Load is the machine's load average over a minute when the part began.
	Load float64 `json:"load"`
	// Error that ended it; what it had measured until then is kept.
	Error string `json:"error,omitempty"`
	// Skipped says why it was not run.
	Skipped string `json:"skipped,omitempty"`
}

// Stage is one step on a ticket's way, or one step of the serial floor.
type Stage struct {
	Name string `json:"name"`
	// From and To say where the two ends are taken from.
	From string `json:"from"`
	To   string `json:"to"`
	// Floor names the step of the serial floor that does the same durable work;
	// "" where the floor has none.
	Floor string `json:"floor,omitempty"`
	// Samples of each repeat, in the order of arrival.
	Repeats []Samples `json:"repeats"`
}

// Way is where the time of tickets went.
type Way struct {
	// Hops of the system lie end to end: their sum is Total.
	Hops []Stage `json:"hops"`
	// Beside are intervals that no ticket waits for.
	Beside []Stage `json:"beside"`
	// Total from the intended time of the confirmation until SENT is committed
	// and the worker knows it.
	Total []Samples `json:"total"`
	// Unplaced tickets had a boundary without evidence; they are in Total only.
	Unplaced int `json:"unplaced"`
}

// Hops is an idle ticket's way, hop by hop, against the serial floor, and the
// same way while marketing floods.
type Hops struct {
	PerSecond float64 `json:"per_second"` // mean rate of arrivals, all of them
	Way
	// Floor steps lie end to end too.
	Floor      []Stage   `json:"floor"`
	FloorTotal []Samples `json:"floor_total"`
	// Flooded is nil where it was not measured.
	Flooded *FloodedHops `json:"flooded,omitempty"`
}

// FloodedHops is the way of tickets through the system as it ships, behind a
// queue of marketing mails.
type FloodedHops struct {
	Flood int `json:"flood"` // marketing mails queued before the first ticket
	Way
	// MarketingPerSecond that were delivered meanwhile, of each repeat.
	MarketingPerSecond []float64 `json:"marketing_per_second"`
}

// Latency is that of tickets, layout by layout.
type Latency struct {
	Layouts []Layout `json:"layouts"`
	// Marketing mails queued before the first ticket of a flooded measurement.
	Flood int `json:"flood"`
	// SlowFlood is the same where the mail server takes time for each mail, and
	// SlowParallel the marketing mails at work side by side there.
	SlowFlood    int `json:"slow_flood,omitempty"`
	SlowParallel int `json:"slow_parallel,omitempty"`
	// PerSecond is the mean rate of ticket arrivals.
	PerSecond float64 `json:"per_second"`
}

// Layout is one way to share queues and connections between the lanes.
type Layout struct {
	Name  string `json:"name"`  // idle, split, one-pool, one-queue
	Title string `json:"title"` // for people
	// MailMillis is the time that the mail server takes for each mail; 0: it
	// answers at once.
	MailMillis int64 `json:"mail_ms,omitempty"`
	// Repeats of the measurement.
	Repeats []LatencyRepeat `json:"repeats"`
}

// LatencyRepeat is one measurement of one layout.
type LatencyRepeat struct {
	// Accepted: intended time of the confirmation → the mail server kept it.
	Accepted Samples `json:"accepted"`
	// Sent: → the row says SENT (column sent_at).
	Sent Samples `json:"sent"`
	// Intended are the intended times, from the start, of the tickets that were
	// accepted: in the order of Accepted, microseconds.
	Intended []int64 `json:"intended_us"`
	// Queue is the number of mails that wait, over time from the first
	// ticket on; empty when idle.
	Queue []QueuePoint `json:"queue,omitempty"`
	// NotMade are arrivals that the generator could not make in time.
	NotMade int `json:"not_made"`
	// MarketingPerSecond while tickets were measured.
	MarketingPerSecond float64 `json:"marketing_per_second"`
}

// QueuePoint is a queue's length at one moment.
type QueuePoint struct {
	AtMicros int64 `json:"at_us"` // negative: before the first ticket
	Waiting  int   `json:"waiting"`
}

// Queues is throughput of one quorum queue, by prefetch and consumers.
type Queues struct {
	Cells []QueueCell `json:"cells"`
}

// QueueCell is one pair of settings.
type QueueCell struct {
	Prefetch  int `json:"prefetch"`
	Consumers int `json:"consumers"`
	// Bare deliveries per second: bare consumers that ack each message.
	Bare []float64 `json:"bare_per_second"`
	// Worker mails per second: notifyd's workers with these settings.
	Worker []float64 `json:"worker_per_second"`
}

// Marketing is throughput end to end and what the raw stages cost.
type Marketing struct {
	Mails   int            `json:"mails"`
	Repeats []MarketingRun `json:"repeats"`
	// Raw is each stage alone, done by bare clients.
	Raw []RawStage `json:"raw"`
}

// MarketingRun is one campaign, from the call to the last mail.
type MarketingRun struct {
	AcceptSeconds float64 `json:"accept_seconds"` // until the system had taken all of it over
	Seconds       float64 `json:"seconds"`        // until the last mail was kept by the mail server
	Delivered     int     `json:"delivered"`
	// MachineBusy is the share of all cores in use, by whatever program, in
	// percent.
	MachineBusy float64 `json:"machine_busy_percent"`
	// CPU seconds by part over the whole run.
	CPU map[string]float64 `json:"cpu_seconds"`
}

// RawStage is one stage of the way alone.
type RawStage struct {
	Name  string `json:"name"`
	What  string `json:"what"`
	Mails int    `json:"mails"`
	// Seconds of wall time that it took.
	Seconds float64 `json:"seconds"`
	// CPU seconds by part: the servers, and "clients" for the bare clients.
	CPU map[string]float64 `json:"cpu_seconds"`
}

// Dead is a mail's way to the dead-letter queue while the mail server refuses
// everything.
type Dead struct {
	DelaysMillis []int64 `json:"delays_ms"`
	Mails        int     `json:"mails"`
	DeadLetters  int     `json:"dead_letters"`
	// ToDLQ is first error → confirmed dead letter, of each mail.
	ToDLQ Samples `json:"to_dlq"`
	// Tries and broker redeliveries, over all mails.
	Tries        int     `json:"tries"`
	Redeliveries float64 `json:"redeliveries"`
	// CPU of notifyd in percent of one core.
	IdleCPU float64 `json:"idle_cpu_percent"`
	DownCPU float64 `json:"down_cpu_percent"`
}

// Recovery is the longest gap without a delivery, fault by fault.
type Recovery struct {
	// Source of the evidence: the folder of the run.
	Source string        `json:"source"`
	Gaps   []RecoveryGap `json:"gaps"`
}

// RecoveryGap of one cell of a chaos run.
type RecoveryGap struct {
	Scenario string `json:"scenario"`
	Policy   string `json:"policy"`
	Fault    string `json:"fault"`
	Strikes  int    `json:"strikes"`
	// BaselineMillis is the longest gap between two deliveries before any fault,
	// the floor; FaultMillis the longest from the first strike on, while
	// confirmed mail was waiting.
	BaselineMillis float64 `json:"baseline_ms"`
	FaultMillis    float64 `json:"fault_ms"`
	Delivered      int     `json:"delivered"`
}

// Save writes the result to path, whole or not at all.
func (r *Result) Save(path string) error {
	body, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return fmt.Errorf("benchmark result: %w", err)
	}
	return writeFile(path, append(compact(body), '\n'))
}

// Read reads a result that Save wrote.
func Read(path string) (*Result, error) {
	body, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("benchmark result: %w", err)
	}
	var r Result
	if err := json.Unmarshal(body, &r); err != nil {
		return nil, fmt.Errorf("benchmark result %s: %w", path, err)
	}
	if r.Schema != SchemaVersion {
		return nil, fmt.Errorf("benchmark result %s: schema %d, this program reads %d", path, r.Schema, SchemaVersion)
	}
	return &r, nil
}

func writeFile(path string, body []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	tmp := path + ".tmp"
	if err := os.WriteFile(tmp, body, 0o644); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	return os.Rename(tmp, path)
}

// compact puts lists of numbers on one line: a diff of two results then shows
// what changed, and a file of ten thousand samples stays readable.
func compact(body []byte) []byte {
	out := make([]byte, 0, len(body))
	quoted := false
	for i := 0; i < len(body); i++ {
		if body[i] == '"' && (i == 0 || body[i-1] != '\\') { // no text here ends with a backslash
			quoted = !quoted
		}
		if body[i] == '[' && !quoted {
			if end, ok := numbers(body[i:]); ok {
				for _, b := range body[i : i+end] {
					if b != '\n' && b != ' ' {
						out = append(out, b)
					}
				}
				i += end - 1
				continue
			}
		}
		out = append(out, body[i])
	}
	return out
}

// numbers returns the length of the list that b begins with, if it holds
// nothing but numbers.
func numbers(b []byte) (int, bool) {
	for i, c := range b[1:] {
		switch {
		case c == ']':
			return i + 2, true
		case c >= '0' && c <= '9', c == ' ', c == '\n', c == ',', c == '.', c == '-', c == '+', c == 'e':
		default:
			return 0, false
		}
	}
	return 0, false
}
