package verify

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"mailproof/history"
)

// Evidence is a history with everything about one mail in one place. It is
// built once, in one pass, and only read by the checkers.
type Evidence struct {
	*history.History
	Columns Columns
	// Mails by dedupe key, in the order of Keys (sorted).
	Mails map[string]*Mail
	Keys  []string
	// Strays is what names no key and cannot be told to belong to one: an
	// attempt that ended before its headers were read, to a recipient who
	// expects several mails.
	Strays Mail

	lives        map[string]*life  // process → its kills and pauses
	clients      map[string]string // client name of an attempt → process
	processNames []string          // longest first
	sendDeadline time.Duration     // 0: not known
	staleAfter   time.Duration     // 0: not known
	lastRest     int64             // when the last mail came to rest
}

// Mail is what is known of one dedupe key.
type Mail struct {
	Key string
	// Campaign is the id of the campaign that asked for it, "" for a mail of a
	// booking.
	Campaign string
	Ops      []*history.Op
	Attempts []*history.Attempt // by first byte
	Moves    []Move             // of its rows, in commit order
	Rows     []*history.MailState
	Outbox   []*history.OutboxLeft
	Topic    []*history.TopicRecord
	Letters  int // in the dead-letter queue
	Alerts   []*history.Alert
}

// Move is one committed change of a mail's row.
type Move struct {
	*history.Change
	ID       string
	From, To string // status before and after; "" where there was no row
	Before   map[string]string
	claim    bool // To is SENDING under a new token
}

// NewEvidence arranges a history. Columns name the system's tables.
func NewEvidence(h *history.History, columns Columns) *Evidence {
	e := &Evidence{History: h, Columns: columns, Mails: make(map[string]*Mail, len(h.Ops)), clients: map[string]string{}}
	ops := e.addOps()
	owners := keysOfRecipients(ops)
	for i := range h.Attempts {
		a := &h.Attempts[i]
		key := a.Key
		if key == "" {
			key = owners[strings.ToLower(a.Recipient)]
		}
		m := e.mail(key)
		m.Attempts = append(m.Attempts, &h.Attempts[i])
	}
	e.addMoves()
	e.addFinal()
	for key := range e.Mails {
		e.Keys = append(e.Keys, key)
	}
	slices.Sort(e.Keys)
	e.addProcesses()
	e.lastRest = e.latestRest()
	if h.Meta != nil {
		// A malformed value is reported by well-formed-history.
		e.sendDeadline, _ = time.ParseDuration(h.Meta.Params[history.ParamSendDeadline])
		e.staleAfter, _ = time.ParseDuration(h.Meta.Params[history.ParamStaleAfter])
	}
	return e
}

// addOps gives each mail the operations that it is about, those on its whole
// campaign included, and returns them all.
func (e *Evidence) addOps() []*history.Op {
	campaigns := map[string][]string{} // id → keys
	all := make([]*history.Op, 0, len(e.Ops))
	add := func(m *Mail, o *history.Op) {
		m.Ops = append(m.Ops, o)
		all = append(all, o)
	}
	for i := range e.Ops {
		o := &e.Ops[i]
		c := o.Campaign
		if c == nil {
			add(e.mail(o.Key), o)
			continue
		}
		for n, key := range c.Keys {
			m := e.mail(key)
			if m.Campaign == "" {
				m.Campaign = c.ID
				campaigns[c.ID] = append(campaigns[c.ID], key)
			}
			add(m, ofOne(o, key, c.Recipients[n]))
		}
		if len(c.Keys) > 0 {
			continue
		}
		for _, key := range campaigns[c.ID] {
			add(e.mail(key), ofOne(o, key, ""))
		}
	}
	return all
}

// ofOne is the part of an operation on a campaign that is about one mail.
func ofOne(o *history.Op, key, recipient string) *history.Op {
	one := *o
	one.Key, one.Recipient, one.Campaign = key, recipient, nil
	return &one
}

// keysOfRecipients finds the key of each recipient who expects one mail. A
// server that refuses a recipient never sees the headers and so no key.
func keysOfRecipients(ops []*history.Op) map[string]string {
	owners := map[string]string{}
	for _, o := range ops {
		to := strings.ToLower(o.Recipient)
		if to == "" || !asks(o) {
			continue
		}
		if key, known := owners[to]; known && key != o.Key {
			owners[to] = ""
			continue
		}
		owners[to] = o.Key
	}
	return owners
}

func (e *Evidence) mail(key string) *Mail {
	if key == "" {
		return &e.Strays
	}
	m := e.Mails[key]
	if m == nil {
		m = &Mail{Key: key}
		e.Mails[key] = m
	}
	return m
}

func (e *Evidence) addMoves() {
	c := e.Columns.Mails
	last := map[string]map[string]string{} // row → its columns after the latest change
	for i := range e.Changes {
		ch := &e.Changes[i]
		if ch.Table != c.Table {
			continue
		}
		row := ch.New
		if row == nil {
			row = ch.Old
		}
		id := ch.Database + "/" + row[c.ID]
		before := last[id]
		if ch.Op == "UPDATE" && before == nil {
			before = ch.Old // the row is older than the log
		}
		move := Move{Change: ch, ID: id, Before: before, From: before[c.Status], To: ch.New[c.Status]}
		move.claim = move.To == stSending && (move.From != stSending || before[c.Token] != ch.New[c.Token])
		key := row[c.Key]
		if key == "" {
			key = before[c.Key]
		}
		m := e.mail(key)
		m.Moves = append(m.Moves, move)
		if ch.Op == "DELETE" {
			delete(last, id)
			continue
		}
		last[id] = ch.New
	}
}

func (e *Evidence) addFinal() {
	f := e.Final
	if f == nil {
		return
	}
	for i := range f.Rows {
		m := e.mail(f.Rows[i].Key)
		m.Rows = append(m.Rows, &f.Rows[i])
	}
	for i := range f.Outbox {
		m := e.mail(f.Outbox[i].Key)
		m.Outbox = append(m.Outbox, &f.Outbox[i])
	}
	for i := range f.Topic {
		m := e.mail(f.Topic[i].Key)
		m.Topic = append(m.Topic, &f.Topic[i])
	}
	for i := range f.DLQ {
		e.mail(f.DLQ[i].Key).Letters++
	}
	for i := range f.Alerts {
		m := e.mail(f.Alerts[i].Key)
		m.Alerts = append(m.Alerts, &f.Alerts[i])
	}
}

// Words of a mail's state in history.MailState, and as a row's status in the
// log of mailproof's own system.
const (
	pending   = "pending"
	sending   = "sending"
	sent      = "sent"
	failed    = "failed"
	unknown   = "unknown"
	dead      = "dead"
	cancelled = "cancelled"
	expired   = "expired"

	stPending   = "PENDING"
	stSending   = "SENDING"
	stSent      = "SENT"
	stFailed    = "FAILED"
	stUnknown   = "UNKNOWN"
	stDead      = "DEAD"
	stCancelled = "CANCELLED"
	stExpired   = "EXPIRED"
)

// State is the mail's final state, "" without a row. With several rows
// (one-row-per-key reports that) it is the first one's.
func (m *Mail) State() string {
	if len(m.Rows) == 0 {
		return ""
	}
	return m.Rows[0].State
}

// asks says whether an operation asks for a mail; a cancel does not.
func asks(o *history.Op) bool {
	return o.Name != "cancel" && o.Name != "replay" && o.Name != "stop" && o.Name != "ask"
}

// Asked is the best known outcome of the operations that asked for this mail,
// "" if none did. One acknowledged request is enough; an unknown one outweighs
// a failed one, since it may have happened.
func (m *Mail) Asked() history.OpOutcome {
	var best history.OpOutcome
	for _, o := range m.Ops {
		if !asks(o) {
			continue
		}
		switch {
		case o.Outcome == history.OpOK:
			return history.OpOK
		case o.Outcome == history.OpUnknown, best == "":
			best = o.Outcome
		}
	}
	return best
}

// Confirmed reports an acknowledged request for this mail.
func (m *Mail) Confirmed() bool { return m.Asked() == history.OpOK }

// MayBeCancelled reports a cancel that happened or may have, of the mail or of
// its whole campaign.
func (m *Mail) MayBeCancelled() bool {
	return slices.ContainsFunc(m.Ops, func(o *history.Op) bool {
		return (o.Name == "cancel" || o.Name == "stop") && o.Outcome != history.OpFail
	})
}

// request is the operation that the mail is due to: the first acknowledged
// one, else the first.
func (m *Mail) request() *history.Op {
	var first *history.Op
	for _, o := range m.Ops {
		if !asks(o) {
			continue
		}
		if o.Outcome == history.OpOK {
			return o
		}
		if first == nil {
			first = o
		}
	}
	return first
}

// Copies are the attempts that left a copy with the customer, by the time of
// the dot. Those that the server kept in breach of its protocol are not
// counted: see provider-breach.
func (m *Mail) Copies() []*history.Attempt {
	var copies []*history.Attempt
	for _, a := range m.Attempts {
		if a.Stored && !a.Breach {
			copies = append(copies, a)
		}
	}
	slices.SortStableFunc(copies, byDot)
	return copies
}

func byDot(a, b *history.Attempt) int { return cmp.Compare(a.DotAt, b.DotAt) }

// Delivered reports that at least one copy is there, whoever is to blame for
// how it came.
func (m *Mail) Delivered() bool {
	return slices.ContainsFunc(m.Attempts, func(a *history.Attempt) bool { return a.Stored })
}

// discarded reports an attempt that was accepted and thrown away, in breach of
// RFC 5321 section 4.2.5.
func (m *Mail) discarded() bool {
	return slices.ContainsFunc(m.Attempts, func(a *history.Attempt) bool { return a.Breach && !a.Stored && accepted(a) })
}

// policy for an ambiguous outcome of this mail.
func (e *Evidence) policy(m *Mail) string {
	if m.Campaign != "" {
		if p := e.Meta.Params[history.ParamCampaignPolicy]; p != "" {
			return p
		}
		return "hold"
	}
	return e.Meta.Policy
}

// campaignName is the key under which a campaign's own alerts stand, and its
// operations: "campaign:" and its id.
func campaignName(id string) string { return "campaign:" + id }

// alertedWithCampaign reports an alert of the mail, or one for all the mails of
// its campaign.
func (e *Evidence) alertedWithCampaign(m *Mail, kinds ...string) bool {
	if m.Alerted(kinds...) {
		return true
	}
	all := e.Mails[campaignName(m.Campaign)]
	return m.Campaign != "" && all != nil && all.Alerted(kinds...)
}

// Alerted reports an alert of one of these kinds.
func (m *Mail) Alerted(kinds ...string) bool {
	return slices.ContainsFunc(m.Alerts, func(a *history.Alert) bool { return slices.Contains(kinds, alertKind(a)) })
}

// alertKind is what an alert is about, however it is spelt: mail-dead,
// dead_outbox.
func alertKind(a *history.Alert) string {
	kind := strings.ReplaceAll(strings.ToLower(a.Kind), "_", "-")
	return strings.TrimPrefix(strings.TrimPrefix(kind, "mail-"), "event-")
}

// answered reports that a whole final reply was written to a client that was
// there to read it.
func answered(a *history.Attempt) bool { return a.ReplyWritten && !a.PeerGone }

// accepted reports that the answer was positive.
func accepted(a *history.Attempt) bool { return answered(a) && strings.HasPrefix(a.Reply, "2") }

// refused reports that the answer was negative.
func refused(a *history.Attempt) bool { return answered(a) && !strings.HasPrefix(a.Reply, "2") }

// refusedForGood reports a refusal that no later try can change: SMTP 5xx; of
// an HTTP API a 4xx other than those about time, rate, concurrency and rights.
func refusedForGood(a *history.Attempt) bool {
	if !refused(a) {
		return false
	}
	if a.Transport == "smtp" {
		return strings.HasPrefix(a.Reply, "5")
	}
	if !strings.HasPrefix(a.Reply, "4") {
		return false
	}
	for _, code := range []string{"401", "403", "408", "409", "425", "429"} {
		if strings.HasPrefix(a.Reply, code) {
			return false
		}
	}
	return true
}

// ms is a monotonic time in milliseconds since the start of the history, for
// people.
func (e *Evidence) ms(t int64) string { return fmt.Sprintf("%+.1f ms", float64(t-e.Start)/1e6) }

// hasWAL reports that changes of the mails' table were recorded.
func (e *Evidence) hasWAL() bool {
	return slices.ContainsFunc(e.Changes, func(c history.Change) bool { return c.Table == e.Columns.Mails.Table })
}

// waiting reports that the mail had not come to rest when the run ended;
// checker quiesced judges that.
func (e *Evidence) waiting(m *Mail) bool {
	if e.Final != nil && e.Final.Pending[m.Key] != "" {
		return true
	}
	switch m.State() {
	case pending, sending, failed:
		return true
	}
	return false
}
