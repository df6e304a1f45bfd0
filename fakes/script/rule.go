// Package script decides, from rules and one seed, which fault strikes which
// event of a fake server. It knows no protocol: a server tells it at which
// stage an event stands and what is known of the mail, and carries out the
// actions that come back.
//
// Guarantees:
//
//   - A draw depends only on the seed, the rule's id, the stage, the subject
//     (the key where it is known, else the recipient, else the connection) and
//     how often that subject was tried. Goroutine scheduling has no say, so the
//     same seed, rules and input give the same decisions.
//   - Every draw is kept in the decision log, struck or not.
//   - Nothing here grows without a bound that the caller can name.
//
// It imports nothing of this module but the ledger's tally.
package script

import (
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"sort"
	"strconv"
	"strings"
	"time"
)

// Stage is a point in a session at which rules are asked.
type Stage string

// Kind is what an action does.
type Kind string

// The actions that any transport understands. A server may refuse some of them
// at some stages; [Vocabulary] says which.
const (
	// Accept does nothing and ends the search: rules after it are not asked.
	Accept Kind = "accept"
	// Reply answers with Code (and Text) instead of the regular answer.
	Reply Kind = "reply"
	// Drop closes the connection in an orderly way (FIN), without an answer.
	Drop Kind = "drop"
	// Reset closes it with a TCP reset.
	Reset Kind = "reset"
	// Hang never answers; the connection stays open until the client leaves or
	// For is over.
	Hang Kind = "hang"
	// HoldUntilReleased waits until it is released, or For is over, then goes
	// on.
	HoldUntilReleased Kind = "hold"
	// Delay waits For, then goes on.
	Delay Kind = "delay"
	// Swallow keeps the answer to itself and the connection open.
	Swallow Kind = "swallow"
	// Drip sends the answer byte by byte, For apart.
	Drip Kind = "drip"
	// Cut sends the beginning of the answer (Bytes of it, or half) and closes.
	// Some clients take "250 2.0.0 O" for a whole answer.
	Cut Kind = "cut"
	// Garbage sends bytes that are no answer in place of it.
	Garbage Kind = "garbage"
	// Greylist refuses a (client, sender, recipient) triple until For has
	// passed since it was first seen.
	Greylist Kind = "greylist"
	// Rate refuses what exceeds Limit events per For.
	Rate Kind = "rate"
	// Duplicate delivers a message of the server's own (a webhook) twice,
	// Reorder lets the next one overtake it.
	Duplicate Kind = "duplicate"
	Reorder   Kind = "reorder"
)

// OnRelease says what becomes of a mail that was held before it was stored
// and whose client was gone when it was released.
type OnRelease string

// A server that has read the final dot owns the mail, whether or not the
// client still listens (RFC 5321 4.2.5): storing is the default.
const (
	StoreOnRelease   OnRelease = "store"
	DiscardOnRelease OnRelease = "discard"
)

// Rule is one scripted fault.
type Rule struct {
	// ID names the rule in the ledger and is part of every draw. Given by the
	// engine ("r1", "r2" in the order of adding) when empty.
	ID     string `json:"id,omitempty"`
	Match  Match  `json:"match"`
	Action Action `json:"action"`
	// Count is how often the rule strikes before it heals by itself; 0 means
	// for ever.
	Count int `json:"count,omitempty"`
}

// Match says which events a rule strikes. Every field that is set must fit;
// an empty Match fits everything. Patterns are shell globs (path.Match),
// compared without regard to case.
type Match struct {
	Recipient string `json:"recipient,omitempty"`
	Sender    string `json:"sender,omitempty"`
	Client    string `json:"client,omitempty"` // EHLO name or User-Agent
	// Key, MessageID and Header are known once the mail's headers were read:
	// in SMTP from stage dot on.
	Key       string            `json:"key,omitempty"`
	MessageID string            `json:"message_id,omitempty"`
	Header    map[string]string `json:"header,omitempty"`
	// Nth fits the n-th try of the subject, from 1: the mail's key from the
	// stage on at which it is known, its recipient before. A connection's own
	// stages know no tries (always 1): there Connection counts.
	Nth Range `json:"nth,omitzero"`
	// Connection fits the n-th connection of the server, from 1.
	Connection Range `json:"connection,omitzero"`
	// Message fits the n-th mail of its connection, RecipientNo the n-th
	// recipient of its mail, from 1.
	Message     Range `json:"message,omitzero"`
	RecipientNo Range `json:"recipient_no,omitzero"`
	// Probability in [0,1]; nil means always.
	Probability *float64 `json:"probability,omitempty"`
	// After and Before bound the time since the server's start, on the
	// server's movable clock; 0 means no bound.
	After  Duration `json:"after,omitzero"`
	Before Duration `json:"before,omitzero"`
}

// Action is what a rule does to what it strikes.
type Action struct {
	Kind  Kind  `json:"kind"`
	Stage Stage `json:"stage"`
	// Code, Enhanced and Text of a Reply: 451, "4.7.1", "try later". Empty
	// parts get the server's defaults.
	Code     int    `json:"code,omitempty"`
	Enhanced string `json:"enhanced,omitempty"`
	Text     string `json:"text,omitempty"`
	// Error names the error of a Reply over HTTP ("daily_quota_exceeded"); the
	// code follows from it when there is none.
	Error string `json:"error,omitempty"`
	// For is the length of a Delay, the step of a Drip, the bound of a Hang or
	// a Hold, the window of a Greylist or a Rate; of a Reply over HTTP its
	// Retry-After.
	For Duration `json:"for,omitzero"`
	// Bytes is how much of the body is read before a fault at stage body
	// strikes; of a Cut, how much of the answer is sent (0: half of it).
	Bytes int64 `json:"bytes,omitempty"`
	// Limit of a Rate: events per For.
	Limit int `json:"limit,omitempty"`
	// OnRelease of a Hold before the mail is stored.
	OnRelease OnRelease `json:"on_release,omitempty"`
	// Strip lists what a capability fault removes.
	Strip []string `json:"strip,omitempty"`
}

// Name is the action as the ledger shows it: "stored:drop", "rcpt:451".
func (a Action) Name() string {
	if a.Kind == Reply && a.Error != "" {
		return string(a.Stage) + ":" + a.Error
	}
	if a.Kind == Reply {
		return string(a.Stage) + ":" + strconv.Itoa(a.Code)
	}
	return string(a.Stage) + ":" + string(a.Kind)
}

// Range is a set of positive numbers: "3", "1-3", "2-". The zero Range fits
// everything.
type Range struct{ From, To int }

// Nth is the Range of one number.
func Nth(n int) Range { return Range{n, n} }

// First is the Range 1…n.
func First(n int) Range { return Range{1, n} }

// From is the Range of n and everything above.
func From(n int) Range { return Range{n, 0} }

// IsZero reports whether r fits everything.
func (r Range) IsZero() bool { return r == Range{} }

// Contains reports whether n lies in r.
func (r Range) Contains(n int) bool {
	return n >= r.From && (r.To == 0 || n <= r.To)
}

func (r Range) String() string {
	switch {
	case r.IsZero():
		return ""
	case r.To == 0:
		return strconv.Itoa(r.From) + "-"
	case r.To == r.From:
		return strconv.Itoa(r.From)
	}
	return strconv.Itoa(r.From) + "-" + strconv.Itoa(r.To)
}

// ParseRange reads "3", "1-3" or "2-".
func ParseRange(s string) (Range, error) {
	if s == "" {
		return Range{}, nil
	}
	lo, hi, ranged := strings.Cut(s, "-")
	from, err := strconv.Atoi(lo)
	if err != nil || from < 1 {
		return Range{}, fmt.Errorf("range %q: want a positive number, \"a-b\" or \"a-\"", s)
	}
	if !ranged {
		return Nth(from), nil
	}
	if hi == "" {
		return From(from), nil
	}
	to, err := strconv.Atoi(hi)
	if err != nil || to < from {
		return Range{}, fmt.Errorf("range %q: the end must be a number not below %d", s, from)
	}
	return Range{from, to}, nil
}

// MarshalJSON writes the range as its string.
func (r Range) MarshalJSON() ([]byte, error) { return json.Marshal(r.String()) }

// UnmarshalJSON reads a number or a range's string.
func (r *Range) UnmarshalJSON(b []byte) error {
	var n int
	if err := json.Unmarshal(b, &n); err == nil {
		if n < 1 {
			return fmt.Errorf("range %d: must be at least 1", n)
		}
		*r = Nth(n)
		return nil
	}
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return errors.New("range: want a number or a string like \"1-3\"")
	}
	got, err := ParseRange(s)
	*r = got
	return err
}

// Duration is a time.Duration that JSON writes as "1.5s".
type Duration time.Duration

// IsZero reports whether d is 0.
func (d Duration) IsZero() bool { return d == 0 }

// D is d as a time.Duration.
func (d Duration) D() time.Duration { return time.Duration(d) }

// Or is d, or def when d is 0.
func (d Duration) Or(def time.Duration) time.Duration {
	if d == 0 {
		return def
	}
	return time.Duration(d)
}

// MarshalJSON writes "1.5s".
func (d Duration) MarshalJSON() ([]byte, error) { return json.Marshal(time.Duration(d).String()) }

// UnmarshalJSON reads "1.5s".
func (d *Duration) UnmarshalJSON(b []byte) error {
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return errors.New("duration: want a string like \"1.5s\"")
	}
	v, err := time.ParseDuration(s)
	if err != nil {
		return fmt.Errorf("duration %q: want a string like \"1.5s\"", s)
	}
	if v < 0 {
		return fmt.Errorf("duration %q is negative", s)
	}
	*d = Duration(v)
	return nil
}

// Vocabulary is what one server can do: which action at which stage.
type Vocabulary struct {
	// Stages in the order of a session.
	Stages []Stage
	// Actions lists the stages at which each action may strike.
	Actions map[Kind][]Stage
	// KeyKnownAt lists the stages at which key, Message-ID and headers are
	// known.
	KeyKnownAt []Stage
	// Known lists, by the name of a match's field ("recipient", "client" …), the
	// stages at which it is known, where that is not everywhere: a rule that
	// could never strike is refused.
	Known map[string][]Stage
	// Check refuses what only the server can judge (a reply code), or is nil.
	Check func(Action) error
}

// Validate names the first thing in the rule that could never work.
func (v Vocabulary) Validate(r Rule) error {
	a := r.Action
	if !contains(v.Stages, a.Stage) {
		return fmt.Errorf("action.stage %q is not one of %s", a.Stage, join(v.Stages))
	}
	stages, ok := v.Actions[a.Kind]
	if !ok {
		return fmt.Errorf("action.kind %q is not known", a.Kind)
	}
	if !contains(stages, a.Stage) {
		return fmt.Errorf("action.kind %q cannot strike at stage %q, only at %s", a.Kind, a.Stage, join(stages))
	}
	if !contains(v.KeyKnownAt, a.Stage) && (r.Match.Key != "" || r.Match.MessageID != "" || len(r.Match.Header) > 0) {
		return fmt.Errorf("match by key, message_id or header needs a stage at which the headers were read: %s, not %q", join(v.KeyKnownAt), a.Stage)
	}
	for _, field := range r.Match.fields() {
		if stages, ok := v.Known[field]; ok && !contains(stages, a.Stage) {
			return fmt.Errorf("match.%s is not known at stage %q, only at %s", field, a.Stage, join(stages))
		}
	}
	if err := r.Match.validate(); err != nil {
		return err
	}
	if err := a.validate(); err != nil {
		return err
	}
	if r.Count < 0 {
		return fmt.Errorf("count %d is negative", r.Count)
	}
	if v.Check != nil {
		return v.Check(a)
	}
	return nil
}

// fields names what the match asks for and a server may not know yet.
func (m Match) fields() []string {
	var out []string
	for name, set := range map[string]bool{
		"recipient": m.Recipient != "", "sender": m.Sender != "", "client": m.Client != "",
		"nth": !m.Nth.IsZero(), "message": !m.Message.IsZero(), "recipient_no": !m.RecipientNo.IsZero(),
	} {
		if set {
			out = append(out, name)
		}
	}
	sort.Strings(out)
	return out
}

func (m Match) validate() error {
	globs := map[string]string{
		"recipient": m.Recipient, "sender": m.Sender, "client": m.Client,
		"key": m.Key, "message_id": m.MessageID,
	}
	for name, g := range m.Header {
		globs["header "+name] = g
	}
	for name, g := range globs {
		if _, err := path.Match(g, ""); err != nil {
			return fmt.Errorf("match.%s: %q is not a pattern: %w", name, g, err)
		}
	}
	if p := m.Probability; p != nil && !(*p >= 0 && *p <= 1) {
		return fmt.Errorf("match.probability %v is not in 0…1", *p)
	}
	if m.Before != 0 && m.Before <= m.After {
		return fmt.Errorf("match.before %s is not later than match.after %s", m.Before.D(), m.After.D())
	}
	return nil
}

func (a Action) validate() error {
	switch a.Kind {
	case Delay, Greylist:
		if a.For == 0 {
			return fmt.Errorf("action %q needs \"for\"", a.Kind)
		}
	case Rate:
		if a.For == 0 || a.Limit < 1 {
			return fmt.Errorf("action %q needs \"limit\" (at least 1) and \"for\"", a.Kind)
		}
	case Reply:
		if a.Code == 0 && a.Error == "" {
			return errors.New("action \"reply\" needs \"code\"")
		}
	}
	if a.Bytes < 0 {
		return fmt.Errorf("action.bytes %d is negative", a.Bytes)
	}
	switch a.OnRelease {
	case "", StoreOnRelease, DiscardOnRelease:
	default:
		return fmt.Errorf("action.on_release %q is not store or discard", a.OnRelease)
	}
	return nil
}

func contains[T comparable](list []T, v T) bool {
	for _, x := range list {
		if x == v {
			return true
		}
	}
	return false
}

func join[T ~string](list []T) string {
	parts := make([]string, len(list))
	for i, s := range list {
		parts[i] = string(s)
	}
	return strings.Join(parts, ", ")
}
