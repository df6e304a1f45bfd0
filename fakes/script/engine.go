package script

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"path"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"mailproof/fakes/ledger/tally"
)

// Event is what a server knows when it asks the engine.
type Event struct {
	Stage      Stage
	Connection int64
	Message    int // n-th mail of its connection
	Client     string
	ClientIP   string
	Sender     string
	// Recipients of the mail so far; at a recipient's own stage only that one.
	Recipients  []string
	RecipientNo int
	// Known once the headers were read.
	Key       string
	MessageID string
	Header    func(name string) []string
	// Subject and Nth as [Engine.Try] gave them; empty before any was counted.
	Subject string
	Nth     int
}

// Strike is a rule that fits an event.
type Strike struct {
	Rule   string
	Action Action
}

// Decision is one draw, or one strike of a rule that needs none.
type Decision struct {
	N       int64    `json:"n"` // order of the decision
	T       int64    `json:"t"` // nanoseconds since the start, on the movable clock
	Rule    string   `json:"rule"`
	Stage   Stage    `json:"stage"`
	Subject string   `json:"subject"`
	Nth     int      `json:"nth"`
	Draw    *float64 `json:"draw,omitempty"` // in [0,1); nil when nothing was drawn
	Struck  bool     `json:"struck"`
	Action  string   `json:"action"`
}

// decisionsKept bounds the decision log in memory. OnDecision sees all of
// them.
const decisionsKept = 10_000

// Engine holds the rules of one server. It is safe for concurrent use.
type Engine struct {
	seed  uint64
	vocab Vocabulary
	start time.Time
	// OnDecision is called for each decision, in order, under the engine's
	// lock: it must be quick and must not call back. Set it before use.
	OnDecision func(Decision)
	// OnAdvance is called after the clock was moved. Set it before use.
	OnAdvance func()

	offset atomic.Int64 // how far the clock was moved, ns
	active atomic.Int64 // number of rules, so that none costs nothing

	mu        sync.Mutex
	rules     []*entry
	nextID    int
	decisions []Decision
	decided   int64
	grey      map[uint64]time.Duration
	magic     bool
	tries     *tally.Tally
	hashSeed  maphash.Seed
}

type entry struct {
	Rule
	struck int
	window []time.Duration // starts of a Rate's recent events
}

// NewEngine returns an engine without rules.
func NewEngine(seed uint64, vocab Vocabulary, magic bool) *Engine {
	return &Engine{
		seed: seed, vocab: vocab, start: time.Now(), magic: magic,
		grey: map[uint64]time.Duration{}, tries: tally.New(0), hashSeed: maphash.MakeSeed(),
	}
}

// Seed is the number that all draws come from.
func (e *Engine) Seed() uint64 { return e.seed }

// Now is the time since the start, on the movable clock.
func (e *Engine) Now() time.Duration {
	return time.Since(e.start) + time.Duration(e.offset.Load())
}

// Advance moves the clock: time windows, greylisting and rates see it, the
// ledger's times do not.
func (e *Engine) Advance(d time.Duration) {
	e.offset.Add(int64(d))
	if e.OnAdvance != nil {
		e.OnAdvance()
	}
}

// Add checks a rule and puts it behind the ones that are there. It returns the
// rule's id.
func (e *Engine) Add(r Rule) (string, error) {
	ids, err := e.AddAll([]Rule{r})
	if err != nil {
		return "", err
	}
	return ids[0], nil
}

// AddAll adds all rules, or none when one of them is wrong.
func (e *Engine) AddAll(rules []Rule) ([]string, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	taken := map[string]bool{}
	for _, r := range e.rules {
		taken[r.ID] = true
	}
	next := e.nextID
	added := make([]*entry, 0, len(rules))
	ids := make([]string, 0, len(rules))
	for i, r := range rules {
		if err := e.vocab.Validate(r); err != nil {
			return nil, fmt.Errorf("rule %d: %w", i+1, err)
		}
		for r.ID == "" || (taken[r.ID] && rules[i].ID == "") {
			next++
			r.ID = "r" + strconv.Itoa(next)
		}
		if taken[r.ID] {
			return nil, fmt.Errorf("rule %d: id %q is taken", i+1, r.ID)
		}
		taken[r.ID] = true
		added = append(added, &entry{Rule: r})
		ids = append(ids, r.ID)
	}
	e.nextID = next
	e.rules = append(e.rules, added...)
	e.active.Store(int64(len(e.rules)))
	return ids, nil
}

// Remove takes a rule out; false when there is none of that id.
func (e *Engine) Remove(id string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	for i, r := range e.rules {
		if r.ID == id {
			e.rules = append(e.rules[:i:i], e.rules[i+1:]...)
			e.active.Store(int64(len(e.rules)))
			return true
		}
	}
	return false
}

// Clear takes all rules out.
func (e *Engine) Clear() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.rules = nil
	e.active.Store(0)
}

// Forget drops what was counted: tries, greylist, rates, decisions. Ids start
// anew once there are no rules.
func (e *Engine) Forget() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.tries.Reset()
	clear(e.grey)
	e.decisions, e.decided = nil, 0
	for _, r := range e.rules {
		r.struck, r.window = 0, nil
	}
	if len(e.rules) == 0 {
		e.nextID = 0
	}
}

// State is a rule and how often it struck.
type State struct {
	Rule
	Struck int  `json:"struck"`
	Healed bool `json:"healed"`
}

// Rules lists the rules in their order.
func (e *Engine) Rules() []State {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := make([]State, 0, len(e.rules))
	for _, r := range e.rules {
		out = append(out, State{Rule: r.Rule, Struck: r.struck, Healed: r.healed()})
	}
	return out
}

// Decisions returns the kept decisions after the n-th, oldest first.
func (e *Engine) Decisions(n int64) []Decision {
	e.mu.Lock()
	defer e.mu.Unlock()
	for i, d := range e.decisions {
		if d.N > n {
			return append([]Decision(nil), e.decisions[i:]...)
		}
	}
	return nil
}

// Quiet reports whether nothing can strike an event to these recipients: there
// are no rules, and no address asks for a fault. It is cheap, so that a server
// need not describe each event for nothing.
func (e *Engine) Quiet(recipients ...string) bool {
	if e.active.Load() > 0 {
		return false
	}
	if !e.magic {
		return true
	}
	for _, r := range recipients {
		if strings.Contains(r, magicMark) {
			return false
		}
	}
	return true
}

// Try counts one more try of a subject and returns how many there were. The
// count starts with the server, whatever the rules.
func (e *Engine) Try(subject string) int {
	k := tally.KeyOf(subject)
	e.mu.Lock()
	defer e.mu.Unlock()
	return int(e.tries.Add(k))
}

// Close gives back the temporary files that counts of tries stand in, if there
// are any (an engine that is not closed keeps them open until it is collected),
// and tells what went wrong with them.
func (e *Engine) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return errors.Join(e.tries.Err(), e.tries.Close())
}

// Decide returns the strikes on an event, in the order of the rules: those
// that let it go on (hold, delay, changes of the answer) up to and including
// the first that ends it. Rules come before magic addresses.
func (e *Engine) Decide(ev Event) []Strike {
	var out []Strike
	if e.active.Load() > 0 {
		out = e.decideRules(ev)
	}
	if e.magic && !ends(out) {
		out = append(out, e.decideMagic(ev)...)
	}
	return out
}

func (e *Engine) decideRules(ev Event) []Strike {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []Strike
	now := e.Now()
	for _, r := range e.rules {
		if r.Action.Stage != ev.Stage || r.healed() || !r.Match.fits(ev, now) || !e.draw(r, ev, now) {
			continue
		}
		r.struck++
		if r.Action.Kind == Accept {
			return out
		}
		out = append(out, Strike{Rule: r.ID, Action: r.Action})
		if r.Action.Kind.Ends() {
			return out
		}
	}
	return out
}

// draw decides what the match leaves open: the probability, the greylist, the
// rate. It logs the decision.
func (e *Engine) draw(r *entry, ev Event, now time.Duration) bool {
	d := Decision{T: int64(now), Rule: r.ID, Stage: ev.Stage, Subject: ev.Subject, Nth: ev.Nth, Struck: true, Action: r.Action.Name()}
	if p := r.Match.Probability; p != nil {
		v := Draw(e.seed, r.ID, ev.Stage, ev.Subject, ev.Nth)
		d.Draw, d.Struck = &v, v < *p
	}
	if d.Struck {
		switch r.Action.Kind {
		case Greylist:
			d.Struck = e.greylisted(r, ev, now)
		case Rate:
			d.Struck = r.exceeds(now)
		}
	}
	e.log(d)
	return d.Struck
}

func (e *Engine) log(d Decision) {
	e.decided++
	d.N = e.decided
	if len(e.decisions) >= 2*decisionsKept {
		e.decisions = append(e.decisions[:0:0], e.decisions[decisionsKept:]...)
	}
	e.decisions = append(e.decisions, d)
	if e.OnDecision != nil {
		e.OnDecision(d)
	}
}

// greylistKept bounds the triples remembered; the map starts anew above it, as
// a server that restarts would.
const greylistKept = 1 << 20

func (e *Engine) greylisted(r *entry, ev Event, now time.Duration) bool {
	triple := maphash.String(e.hashSeed, r.ID+"\x00"+ev.ClientIP+"\x00"+ev.Sender+"\x00"+strings.Join(ev.Recipients, ","))
	first, seen := e.grey[triple]
	if !seen {
		if len(e.grey) >= greylistKept {
			clear(e.grey)
		}
		e.grey[triple] = now
		return true
	}
	return now-first < r.Action.For.D()
}

// exceeds counts one event of a Rate in its sliding window and reports whether
// it is one too many. Refused events do not count: a client that keeps asking
// is let in as soon as the window allows.
func (r *entry) exceeds(now time.Duration) bool {
	from := now - r.Action.For.D()
	i := 0
	for i < len(r.window) && r.window[i] <= from {
		i++
	}
	r.window = r.window[i:]
	if len(r.window) >= r.Action.Limit {
		return true
	}
	r.window = append(r.window, now)
	return false
}

func (r *entry) healed() bool { return r.Count > 0 && r.struck >= r.Count }

// Ends reports whether nothing regular follows the action at its stage.
func (k Kind) Ends() bool {
	switch k {
	case HoldUntilReleased, Delay, Drip, Swallow, Cut, Garbage, Duplicate, Reorder:
		return false
	}
	return !strings.HasPrefix(string(k), "alter-")
}

func ends(s []Strike) bool { return len(s) > 0 && s[len(s)-1].Action.Kind.Ends() }

// Draw is the number in [0,1) that a rule draws for a subject's n-th try.
func Draw(seed uint64, rule string, stage Stage, subject string, nth int) float64 {
	h := sha256.New()
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], seed)
	binary.BigEndian.PutUint64(b[8:], uint64(nth))
	h.Write(b[:])
	h.Write([]byte(rule + "\x00" + string(stage) + "\x00" + subject))
	// 53 bits are what a float64 holds exactly.
	return float64(binary.BigEndian.Uint64(h.Sum(nil))>>11) / (1 << 53)
}

func (m *Match) fits(ev Event, now time.Duration) bool {
	switch {
	case m.After != 0 && now < m.After.D(), m.Before != 0 && now >= m.Before.D():
		return false
	case !m.Nth.Contains(ev.Nth), !m.Connection.Contains(int(ev.Connection)):
		return false
	case !m.Message.Contains(ev.Message), !m.RecipientNo.Contains(ev.RecipientNo):
		return false
	case !Glob(m.Sender, ev.Sender), !Glob(m.Client, ev.Client):
		return false
	case !Glob(m.Key, ev.Key), !Glob(m.MessageID, ev.MessageID):
		return false
	}
	return globAny(m.Recipient, ev.Recipients) && m.fitsHeaders(ev)
}

func (m *Match) fitsHeaders(ev Event) bool {
	for name, pattern := range m.Header {
		if ev.Header == nil || !globAny(pattern, ev.Header(name)) {
			return false
		}
	}
	return true
}

func globAny(pattern string, values []string) bool {
	if pattern == "" {
		return true
	}
	for _, v := range values {
		if Glob(pattern, v) {
			return true
		}
	}
	return false
}

// Glob reports whether s fits the pattern, without regard to case; an empty
// pattern fits everything.
func Glob(pattern, s string) bool {
	if pattern == "" || pattern == "*" {
		return true
	}
	if !strings.ContainsAny(pattern, `*?[\`) {
		return strings.EqualFold(pattern, s)
	}
	// path.Match lets * stop at a slash, which addresses and keys may hold.
	ok, err := path.Match(unslash(pattern), unslash(s))
	return err == nil && ok
}

func unslash(s string) string { return strings.ReplaceAll(strings.ToLower(s), "/", "\x01") }
