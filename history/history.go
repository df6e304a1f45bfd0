// Package history records what happened in a run, as evidence: operations of
// clients, faults with their witnesses, what the far side's ledger saw, every
// committed change of a row as read from Postgres' write-ahead log, processes,
// and the state that was left. It is saved before anything is judged, one JSON
// object per line, so that "mailproof check RUN" can judge again.
//
// One time base: nanoseconds of CLOCK_MONOTONIC_RAW of this machine (field t).
//
// Package history knows nothing of the system under test.
package history

import (
	"encoding/json"
	"fmt"
	"time"
)

// Record is one line of history.jsonl. Exactly one of the pointers is set, the
// one that Kind names.
type Record struct {
	T    int64 `json:"t"` // monotonic nanoseconds; for an Op, of its return
	Kind Kind  `json:"kind"`

	Meta    *Meta    `json:"meta,omitempty"`
	Phase   *Phase   `json:"phase,omitempty"`
	Op      *Op      `json:"op,omitempty"`
	Fault   *Fault   `json:"fault,omitempty"`
	Process *Process `json:"process,omitempty"`
	Attempt *Attempt `json:"attempt,omitempty"`
	Change  *Change  `json:"change,omitempty"`
	Final   *Final   `json:"final,omitempty"`
	Note    *Note    `json:"note,omitempty"`
	Depth   *Depth   `json:"depth,omitempty"`
	Refused *Refused `json:"refused,omitempty"`
}

// Kind names the part of a [Record] that is set.
type Kind string

// The kinds.
const (
	KindMeta    Kind = "meta"
	KindPhase   Kind = "phase"
	KindOp      Kind = "op"
	KindFault   Kind = "fault"
	KindProcess Kind = "process"
	KindAttempt Kind = "attempt"
	KindChange  Kind = "change"
	KindFinal   Kind = "final"
	KindNote    Kind = "note"
	KindDepth   Kind = "depth"
	KindRefused Kind = "refused"
)

// Meta is the first record: what the run is judged by.
type Meta struct {
	Scenario string `json:"scenario"` // "t6.7"
	Policy   string `json:"policy"`   // same-key, resend, hold
	Server   string `json:"server"`   // plain or deduplicating
	Seed     uint64 `json:"seed"`
	// MaxAttempts and RetryDelays as configured in the system under test.
	MaxAttempts int             `json:"max_attempts"`
	RetryDelays []time.Duration `json:"retry_delays_ns"`
	Lease       time.Duration   `json:"lease_ns"`
	Wall        time.Time       `json:"wall"` // wall clock at T
	Floors      Floors          `json:"floors"`
	Invariants  []string        `json:"invariants"` // names of the checkers that judge it
	// Records that the scenario did not make, and may be judged by: name → value.
	Params map[string]string `json:"params,omitempty"`

	// At is the record's T, the instant of Wall. Filled in by [FromRecords].
	At int64 `json:"-"`
}

// Names of Params that the judge understands. All are optional.
const (
	// ParamFaults lists the faults that were planned, comma-separated names:
	// one that has no record makes the run invalid.
	ParamFaults = "planned_faults"
	// ParamArrivals is how many operations (distinct name and key) the
	// schedule holds: fewer made, and the run is invalid.
	ParamArrivals = "arrivals"
	// ParamSendDeadline is the sender's own limit on one try, as
	// time.ParseDuration reads it: a reply written later reached nobody.
	ParamSendDeadline = "send_deadline"
	// ParamStaleAfter is the age, as time.ParseDuration reads it, from which an
	// event is too old for its mail: one that is younger may not be put aside.
	ParamStaleAfter = "stale_after"
	// ParamCampaignPolicy is the policy for ambiguous outcomes of campaign mails,
	// as Meta.Policy is for those of bookings; default hold.
	ParamCampaignPolicy = "campaign_policy"
	// ParamSubject says what the subject of a mail names, so that one with
	// another's contents is told from it: "booking" is the id of the booking that
	// asked for it (or, of a campaign's mail, its recipient). Default: nothing.
	ParamSubject = "subject_names"
	// ParamEvidence lists the kinds of evidence beside the ledger that the
	// target can show, comma-separated: wal, outbox, topic, queues, alerts. A
	// checker that a scenario names and that finds its evidence missing makes
	// the run invalid, unless this list is there and leaves that kind out.
	ParamEvidence = "evidence"
)

// Floors are what a run must have reached to count at all.
type Floors struct {
	Confirmed int `json:"confirmed"` // acknowledged confirmations
	Faults    int `json:"faults"`    // faults installed, each with a witness
}

// Phase marks the start of one phase of the run.
type Phase struct {
	Name string `json:"name"` // start baseline faults heal quiesce judge
	// Wall is the same instant as T on the wall clock; the recorder fills it in.
	Wall time.Time `json:"wall,omitzero"`
	At   int64     `json:"-"` // the record's T
}

// OpOutcome is what the client knows of its own operation.
type OpOutcome string

// The outcomes. Unknown stays unknown for ever: no answer came, so the
// operation may or may not have happened, now or later.
const (
	OpOK      OpOutcome = "ok"
	OpFail    OpOutcome = "fail" // definitely did not happen
	OpUnknown OpOutcome = "unknown"
)

// Op is one operation of a client against the system under test.
type Op struct {
	// Client is the logical process that made it, "" if the caller does not
	// say. A client has one operation open at a time.
	Client    string    `json:"client,omitempty"`
	Name      string    `json:"name"` // confirm, cancel, reopen, replay, ask (what is known of the mail?); of a campaign: campaign, stop
	Booking   string    `json:"booking"`
	Key       string    `json:"key"` // dedupe key of the mail it is about, or the campaign's name
	Recipient string    `json:"recipient"`
	Intended  int64     `json:"intended"` // when it should have been made
	Call      int64     `json:"call"`
	Return    int64     `json:"return"`
	Outcome   OpOutcome `json:"outcome"`
	Err       string    `json:"err,omitempty"`
	// Answer of an ask, in the words of the system's clients: cancelled, sent …
	Answer string `json:"answer,omitempty"`
	// Campaign is set in an operation on many mails at once.
	Campaign *Campaign `json:"campaign,omitempty"`
}

// Campaign is what an operation on a whole campaign was about: "campaign" asks
// for one mail to each recipient, "stop" sets the flag that ends it.
type Campaign struct {
	ID string `json:"id"`
	// Recipients that were asked for, and the dedupe keys of their mails in the
	// same order. A stop names none: it is about all that the campaign has.
	Recipients []string `json:"recipients,omitempty"`
	Keys       []string `json:"keys,omitempty"`
	// ExpiresAt is when a mail that waits is not worth sending any more; zero:
	// never.
	ExpiresAt time.Time `json:"expires_at,omitzero"`
	// New and Known are what the system under test answered: mails that it took
	// now, and that it had before.
	New   int `json:"new"`
	Known int `json:"known"`
}

// FaultOutcome says whether a fault took hold.
type FaultOutcome string

// The outcomes of a fault.
const (
	Installed     FaultOutcome = "installed"
	Skipped       FaultOutcome = "skipped"
	Indeterminate FaultOutcome = "indeterminate"
)

// Fault is one fault that the run injected, written when it was healed.
type Fault struct {
	Name    string       `json:"name"`
	Target  string       `json:"target"`
	Start   int64        `json:"start"`
	End     int64        `json:"end"`
	Outcome FaultOutcome `json:"outcome"`
	// Witness is the evidence, from the far side, that it took hold; empty
	// means none was seen, and the run is invalid.
	Witness string `json:"witness"`
	Count   int    `json:"count"`            // how often it struck
	Reason  string `json:"reason,omitempty"` // of a skip
	// Keys that it struck, when it strikes single mails.
	Keys []string `json:"keys,omitempty"`
}

// Process is a change in the life of one process of the system under test.
type Process struct {
	Name string `json:"name"` // notifyd-1
	PID  int    `json:"pid"`
	// Event is started, ready, unready (it runs and says that it cannot do its
	// work; Detail is why), terminated (SIGTERM), killed, paused, resumed, exited.
	Event  string `json:"event"`
	Detail string `json:"detail,omitempty"`
	// Wall is the same instant as T on the wall clock.
	Wall time.Time `json:"wall"`
	At   int64     `json:"-"` // the record's T
}

// Attempt is one row of the far side's ledger: one try to hand over one mail
// to one recipient.
type Attempt struct {
	ID        int64  `json:"id"`
	Transport string `json:"transport"` // smtp, resend
	Session   int64  `json:"session"`
	Client    string `json:"client"` // EHLO name or User-Agent: process and worker
	Key       string `json:"key"`    // dedupe key as the far side read it
	MessageID string `json:"message_id"`
	Recipient string `json:"recipient"`
	From      int64  `json:"from"` // first byte of the attempt
	To        int64  `json:"to"`   // the end of it
	// Stage is the last stage reached: rcpt, data, body, dot, replied …
	Stage string `json:"stage"`
	// DotAt is when the final dot (the whole request body) had been read; 0 if
	// it never was.
	DotAt int64 `json:"dot_at"`
	// Stored is set when a copy was kept, so that the customer has it.
	Stored bool `json:"stored"`
	// Deduplicated is set when the receiver recognised the key and kept no
	// second copy.
	Deduplicated bool `json:"deduplicated"`
	// ReplyWritten is set when the whole final reply was handed to the socket.
	ReplyWritten bool   `json:"reply_written"`
	Reply        string `json:"reply,omitempty"` // the final reply's first line
	// RetryAfter is how long the reply asked the client to stay away (HTTP
	// Retry-After); 0 where it named nothing.
	RetryAfter time.Duration `json:"retry_after,omitempty"`
	// PeerGone is set when the client's end was seen closed before the reply
	// was written: it reached nobody.
	PeerGone bool `json:"peer_gone,omitempty"`
	// ClosedWithoutStoring is proof of absence: the attempt is over and
	// nothing was kept.
	ClosedWithoutStoring bool `json:"closed_without_storing"`
	// Fault is the scripted action that struck it, "" if none.
	Fault string `json:"fault,omitempty"`
	// Breach is set where the script broke the protocol (250 and discard, 451
	// and keep): a loss or double that follows is the provider's.
	Breach   bool   `json:"breach,omitempty"`
	BodyHash string `json:"body_hash,omitempty"` // sha256 of the whole mail as read
	Subject  string `json:"subject,omitempty"`
}

// Change is one committed change of one row, read from the write-ahead log in
// commit order. Column values are text as Postgres writes them; a NULL is
// absent from the map.
type Change struct {
	Database string            `json:"db"`
	Table    string            `json:"table"` // schema-qualified
	Op       string            `json:"op"`    // INSERT UPDATE DELETE
	XID      uint64            `json:"xid"`
	LSN      string            `json:"lsn"`
	CommitAt time.Time         `json:"commit_at"`
	Order    int64             `json:"order"` // position in commit order, from 1
	Old      map[string]string `json:"old,omitempty"`
	New      map[string]string `json:"new,omitempty"`
	// Row names the row within its table, "" where the collector does not know
	// how rows are told apart.
	Row string `json:"row,omitempty"`
	// Delta is set on a line whose Old and New hold only the columns in which
	// they differ: a row of 50,000 is written down once, not with each of its
	// transitions. Whoever reads a history finds both whole, and Delta false.
	Delta bool `json:"delta,omitempty"`

	// At is CommitAt on the run's time base: see [History.Monotonic].
	At int64 `json:"-"`
}

// Final is what was left at the end of the run.
type Final struct {
	Rows   []MailState  `json:"rows,omitempty"`
	Outbox []OutboxLeft `json:"outbox,omitempty"`
	DLQ    []DeadLetter `json:"dlq,omitempty"`
	Alerts []Alert      `json:"alerts,omitempty"`
	Queues []QueueState `json:"queues,omitempty"`
	// Topic is the whole event topic read from its start.
	Topic []TopicRecord `json:"topic,omitempty"`
	// Counters of the system under test: sweeper rescues by cause, deliveries,
	// redeliveries …
	Counters map[string]float64 `json:"counters,omitempty"`
	// Counted is how many records the collectors themselves say that they took,
	// by kind: [CountedAttempts], [CountedChanges] and the database. A history
	// that holds fewer lost its end.
	Counted map[string]int64 `json:"counted,omitempty"`
	// Pending says for each mail that is not settled what it waits for.
	Pending map[string]string `json:"pending,omitempty"`
	// Usage of the system's processes over the faults phase: CPU seconds and
	// wall seconds per process name.
	Usage map[string]Usage `json:"usage,omitempty"`

	// Wall is the same instant as T on the wall clock; the recorder fills it in.
	Wall time.Time `json:"wall,omitzero"`
	At   int64     `json:"-"` // the record's T
}

// Names of what [Final.Counted] counts.
const (
	CountedAttempts = "attempts" // rows of the far side's ledger
	CountedChanges  = "changes " // and the name of a database: its changes in the log
)

// Usage is what a process consumed over a stretch of time.
type Usage struct {
	CPUSeconds  float64 `json:"cpu_seconds"`
	WallSeconds float64 `json:"wall_seconds"`
	MaxRSSBytes int64   `json:"max_rss_bytes"`
}

// MailState is the final state of one mail as the system under test tells it,
// in the words of this package.
type MailState struct {
	Key            string `json:"key"`
	Booking        string `json:"booking"`
	Recipient      string `json:"recipient"`
	State          string `json:"state"` // pending sending sent failed unknown dead cancelled expired
	Attempts       int    `json:"attempts"`
	Token          int64  `json:"token"`
	Unsettled      int    `json:"unsettled"`
	EventID        string `json:"event_id,omitempty"`
	ProviderID     string `json:"provider_id,omitempty"`
	LastError      string `json:"last_error,omitempty"`
	DeadLetterSent bool   `json:"dead_letter_sent"`
}

// OutboxLeft is one outbox row.
type OutboxLeft struct {
	EventID   string `json:"event_id"`
	Key       string `json:"key"`
	Booking   string `json:"booking"`
	Published bool   `json:"published"`
	Dead      bool   `json:"dead"`
	Bytes     int    `json:"bytes,omitempty"` // of its payload; 0: not known
}

// DeadLetter is one message of the dead-letter queue.
type DeadLetter struct {
	Key    string `json:"key"`
	Reason string `json:"reason"`
}

// Alert is one alert that the system raised.
type Alert struct {
	Kind string    `json:"kind"` // dead, unknown, parked, dead_outbox, stale …
	Key  string    `json:"key"`
	At   time.Time `json:"at"`
}

// QueueState is one queue of the broker at the end.
type QueueState struct {
	Name     string `json:"name"`
	Type     string `json:"type"`
	Leader   string `json:"leader,omitempty"` // node, "" if there is none
	Members  int    `json:"members"`
	Online   int    `json:"online,omitempty"` // members that run
	Messages int    `json:"messages"`
	Ready    int    `json:"ready"`
	Unacked  int    `json:"unacked"`
}

// TopicRecord is one record of the event topic.
type TopicRecord struct {
	Partition int32  `json:"partition"`
	Offset    int64  `json:"offset"`
	EventID   string `json:"event_id"`
	Key       string `json:"key"`
	Booking   string `json:"booking"`
	Type      string `json:"type"`
}

// Depth is how many messages of a queue wait for a consumer, as the broker said
// at that time.
type Depth struct {
	Queue string `json:"queue"`
	Ready int    `json:"ready"`
	At    int64  `json:"-"` // the record's T
}

// Note is a line for people: what the harness saw or decided.
type Note struct {
	Text string `json:"text"`
	At   int64  `json:"-"` // the record's T
}

// Refused is written in the place of a record that was malformed: evidence was
// offered and could not be kept, so the history is not whole.
type Refused struct {
	Kind   Kind   `json:"kind"`
	Reason string `json:"reason"`
	Record string `json:"record"` // what was offered
}

// Decode reads one line of history.jsonl. A kind that it does not know is no
// error: a newer harness may have written it.
func Decode(line []byte) (Record, error) {
	var r Record
	if err := json.Unmarshal(line, &r); err != nil {
		return Record{}, fmt.Errorf("history line: %w", err)
	}
	return r, nil
}
