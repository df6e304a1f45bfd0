package verify

import (
	"fmt"
	"math"
	"slices"
	"time"

	"mailproof/history"
)

var nothingLost = rule{
	name:      "nothing-lost",
	statement: "Every confirmed mail is delivered, or cancelled on request, or visible: DEAD with its dead letter and alert; UNKNOWN, EXPIRED, a dead outbox row or a parked event, each with an alert; EXPIRED only once its time was over, the outbox row only with an event that a broker refuses, a parked event only one that cannot be read. One that waits and that nothing moves any more is none of these.",
	check: func(e *Evidence, r *report) {
		e.mails(func(m *Mail) {
			switch m.Asked() {
			case history.OpOK:
				r.looked(1)
			case history.OpUnknown:
				// It happened or it did not: a row, where there is one, obeys.
				if len(m.Rows) == 0 && len(m.Outbox) == 0 {
					return
				}
				r.looked(1)
			default:
				return
			}
			if lost, why := e.lost(m); lost {
				r.breach(m.Key, "confirmed and not delivered: %s", why)
			}
		})
	},
}

// Kinds of alert by which a mail that is not delivered becomes visible.
const (
	alertDead       = "dead"
	alertUnknown    = "unknown"
	alertParked     = "parked"
	alertStale      = "stale"
	alertExpired    = "expired"
	alertDeadOutbox = "dead-outbox"
)

// lost reports a mail that is owed and neither delivered nor visible, with
// what is missing.
func (e *Evidence) lost(m *Mail) (bool, string) {
	asked := m.Asked()
	if asked != history.OpOK && (asked != history.OpUnknown || len(m.Rows)+len(m.Outbox) == 0) {
		return false, ""
	}
	if m.Delivered() || m.discarded() {
		return false, "" // provider-breach judges what was thrown away
	}
	if e.waiting(m) {
		rest := e.unrest(m)
		return rest.stalled, rest.why // one that still moves is quiesced's
	}
	switch m.State() {
	case dead:
		if m.Letters == 0 {
			return true, "it is DEAD, and the dead-letter queue holds no message of it"
		}
		return !m.Alerted(alertDead), "it is DEAD, and no alert was raised"
	case unknown:
		return !m.Alerted(alertUnknown), "it is UNKNOWN, and no alert was raised"
	case expired:
		if why := e.expiredEarly(m); why != "" {
			return true, why
		}
		return !e.alertedWithCampaign(m, alertExpired, alertStale), "it is EXPIRED, and no alert was raised"
	case cancelled:
		if !m.MayBeCancelled() {
			return true, "it is CANCELLED, and nobody cancelled it"
		}
		return e.cancelledUnasked(m), "it was CANCELLED before anybody asked for that"
	case sent:
		return true, "it is SENT, and the ledger holds no copy"
	case "":
		return e.lostWithoutRow(m)
	default:
		return true, "its state is " + m.State()
	}
}

// cancelledUnasked reports a mail that became CANCELLED before the first cancel of
// it, or of its campaign, was called. A fault that names the mail may have put the
// cancel on the topic ahead of the customer's own.
func (e *Evidence) cancelledUnasked(m *Mail) bool {
	asked := int64(math.MaxInt64)
	for _, o := range m.Ops {
		if o.Name == "cancel" || o.Name == "stop" {
			asked = min(asked, o.Call)
		}
	}
	for i := range e.Faults {
		if f := &e.Faults[i]; f.Outcome == history.Installed && slices.Contains(f.Keys, m.Key) {
			asked = min(asked, f.Start)
		}
	}
	for i := range m.Moves {
		if mv := &m.Moves[i]; mv.To == stCancelled && mv.From != stCancelled {
			return mv.At+sameInstant < asked
		}
	}
	return false
}

// refusedFrom is the least size in bytes of an event that the broker refuses for
// its own sake: message.max.bytes of Kafka, 1 MiB and 12 as it comes, less what a
// record costs beside its value. A broker that is away refuses nothing; a relay
// that gives events up for that has lost them, whatever it tells.
const refusedFrom = 1000 << 10

func (e *Evidence) lostWithoutRow(m *Mail) (bool, string) {
	if m.Campaign == "" && m.MayBeCancelled() || m.Campaign != "" && m.stoppedFirst() {
		return false, ""
	}
	if m.Alerted(alertParked) {
		return e.parkedUnread(m)
	}
	for _, o := range m.Outbox {
		if o.Dead && o.Bytes > 0 && o.Bytes < refusedFrom {
			return true, fmt.Sprintf("its outbox row was given up, and no broker refuses an event of %d bytes", o.Bytes)
		}
		if o.Dead {
			return !m.Alerted(alertDeadOutbox, "outbox-dead"), "its outbox row is dead, and no alert was raised"
		}
	}
	if m.Campaign != "" {
		return true, "its campaign was accepted, and the mail service holds no row of it"
	}
	if len(m.Outbox) == 0 {
		return true, "no row of it exists anywhere"
	}
	return true, "its event left the outbox, and the mail service holds no row of it"
}

// parkedUnread reports a mail whose event the mail service put aside although the
// very record that the booking service wrote can be read. An alert alone excuses
// nothing: a bridge that parks every other event and says so would lose none.
func (e *Evidence) parkedUnread(m *Mail) (bool, string) {
	for i := range e.Faults {
		if f := &e.Faults[i]; f.Outcome == history.Installed && slices.Contains(f.Keys, m.Key) {
			return false, "" // its record was tampered with
		}
	}
	for _, rec := range m.Topic {
		own := func(o *history.OutboxLeft) bool { return o.EventID == rec.EventID }
		if rec.EventID != "" && slices.ContainsFunc(m.Outbox, own) {
			return true, fmt.Sprintf("its event %s was parked, and anybody can read it (partition %d, offset %d)", rec.EventID, rec.Partition, rec.Offset)
		}
	}
	return false, ""
}

// stoppedFirst reports that the stop of the mail's campaign may have come before
// the campaign had been taken: a mail of it need not have a row then. One that was
// acknowledged before anybody called the stop has its row, whatever becomes of it.
func (m *Mail) stoppedFirst() bool {
	taken, stop := int64(math.MaxInt64), int64(math.MaxInt64)
	for _, o := range m.Ops {
		switch {
		case o.Name == "stop" && o.Outcome != history.OpFail:
			stop = min(stop, o.Call)
		case asks(o) && o.Outcome == history.OpOK:
			taken = min(taken, o.Return)
		}
	}
	return stop < taken
}

// expiredEarly says why an EXPIRED mail was still worth sending; "" where its time
// was over, or where nothing shows when it became EXPIRED. An alert alone excuses
// nothing: a system that put every mail aside and said so would lose none.
func (e *Evidence) expiredEarly(m *Mail) string {
	var end *Move
	for i := range m.Moves {
		if m.Moves[i].To == stExpired {
			end = &m.Moves[i]
		}
	}
	if end == nil {
		return ""
	}
	if end.From == "" { // its event came too late
		asked := m.request()
		if asked == nil || e.staleAfter == 0 {
			return ""
		}
		if age := time.Duration(end.At - asked.Call); age < e.staleAfter {
			return fmt.Sprintf("it is EXPIRED since %s after it was asked for, and is too old after %s", age.Round(time.Millisecond), e.staleAfter)
		}
		return ""
	}
	column := e.Columns.Mails.ExpiresAt
	if column == "" {
		return ""
	}
	// Both are times of the database's own clock.
	text := end.New[column]
	if text == "" {
		return "it is EXPIRED, and nothing says that it ever would be"
	}
	at, err := parsePGTime(text)
	switch {
	case err != nil:
		return fmt.Sprintf("it is EXPIRED, and its time cannot be read: %v", err)
	case end.CommitAt.Before(at):
		return fmt.Sprintf("it became EXPIRED at %s, and was worth sending until %s", end.CommitAt.UTC().Format(time.RFC3339Nano), at.UTC().Format(time.RFC3339Nano))
	}
	return ""
}
