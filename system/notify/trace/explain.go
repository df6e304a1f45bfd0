package trace

import (
	"fmt"
	"strings"
	"time"
)

// explain says what a story means.
func explain(s Story) []string {
	if len(s.Mails) == 0 {
		return []string{
			"no mail of this key or booking is known here: its event has not arrived, was parked, or its row is older than the retention. " +
				"Ask the booking service (bookingd outbox find " + s.Asked + ") and the table parked_events.",
		}
	}
	out := rowsOfOneIntent(s)
	for _, m := range s.Mails {
		out = append(out, copies(m)...)
		out = append(out, reported(m)...)
		out = append(out, cancelled(s, m)...)
	}
	return out
}

// again tells the keys of second sendings.
const again = ":resend:"

// rowsOfOneIntent: is it one row or two (CASE-1)?
func rowsOfOneIntent(s Story) []string {
	byGeneration := map[int][]Mail{}
	var repeats, firsts []Mail
	for _, m := range s.Mails {
		if strings.Contains(m.DedupeKey, again) {
			repeats = append(repeats, m)
			continue
		}
		firsts = append(firsts, m)
		byGeneration[m.Generation] = append(byGeneration[m.Generation], m)
	}
	var out []string
	switch {
	case len(s.Mails) == 1:
		out = append(out, "one row: the system knows of one mail")
	case len(byGeneration) > 1:
		out = append(out, fmt.Sprintf("%d rows of %d generations: the booking was cancelled and reopened, and each generation has a mail of its own",
			len(firsts), len(byGeneration)))
	}
	for _, m := range repeats {
		out = append(out, fmt.Sprintf("%s was sent again on purpose%s", m.DedupeKey, byWhom(s, m)))
	}
	for g, mails := range byGeneration {
		if len(mails) > 1 && sameType(mails) {
			out = append(out, fmt.Sprintf("two rows of generation %d and type %s (%s and %s): two events asked for one mail under different keys. "+
				"The fault is the sender's of the events (TRAP-1-8)", g, mails[0].Type, mails[0].DedupeKey, mails[1].DedupeKey))
		}
	}
	return out
}

func sameType(mails []Mail) bool { return mails[0].Type == mails[1].Type }

// byWhom: the audit of a second sending stands on either row.
func byWhom(s Story, repeat Mail) string {
	for _, m := range s.Mails {
		for _, e := range m.Audit {
			if e.Action == "send-again" && (m.ID == repeat.ID || strings.HasPrefix(repeat.DedupeKey, m.DedupeKey+again)) {
				return fmt.Sprintf(" by %s: %s", e.Actor, orNone(e.Reason))
			}
		}
	}
	return ""
}

// Open is how many tries of the mail ended without anybody knowing how.
func (m Mail) Open() int {
	if m.Status == "SENT" && m.Unsettled > 0 {
		return m.Unsettled - 1 // the accepted one is known
	}
	return m.Unsettled
}

// copies: how many copies of one row can there be, and why?
func copies(m Mail) []string {
	stored := 0
	for _, l := range m.Provider {
		if l.Event == "stored" {
			stored++
		}
	}
	open := m.Open()
	var out []string
	switch {
	case m.Status == "SENT" && open == 0 && m.Attempts <= 1:
		out = append(out, m.DedupeKey+": one try, accepted. A second copy was not made here: look at the receiving side (forwarding, a list, their retry)")
	case m.Status == "SENT" && open == 0:
		out = append(out, fmt.Sprintf("%s: %d tries, all but the last refused for certain. One copy was made here", m.DedupeKey, m.Attempts))
	case open > 0:
		out = append(out, fmt.Sprintf("%s: %d tries, of which %d ended without a known outcome (%s). Each of those may have left a copy: "+
			"under policy resend that is the price of not losing the mail (OB-01)", m.DedupeKey, m.Attempts, open, orNone(m.Error)))
	}
	switch {
	case stored > 1:
		out = append(out, fmt.Sprintf("%s: the provider's log has %d copies; its sessions name the process and worker that sent each", m.DedupeKey, stored))
	case stored == 1:
		out = append(out, m.DedupeKey+": the provider's log has one copy")
	case m.Status == "SENT" && m.ProviderNote != "":
		out = append(out, m.DedupeKey+": provider: "+m.ProviderNote)
	}
	return out
}

// reported: did the provider give it back after it had taken it?
func reported(m Mail) []string {
	var out []string
	for _, r := range m.Reports {
		what := "the recipient does not have it. Send it again to another address, or after the provider's list of suppressed addresses was mended"
		if r.Event == "complained" {
			what = "it arrived, and the recipient called it spam"
		}
		out = append(out, fmt.Sprintf("%s: %s by the provider's word (%s): %s", m.DedupeKey, r.Event, orNone(r.Reason), what))
	}
	return out
}

// cancelled: did a cancelled booking get its mail, and why (CASE-6)?
func cancelled(s Story, m Mail) []string {
	if s.Cancel == nil || s.Cancel.Generation < m.Generation {
		switch m.Status {
		case "SENT", "CANCELLED", "EXPIRED":
			return nil
		}
		return []string{m.DedupeKey + ": no cancel of it was heard here. If the booking is cancelled, its event is still on the way or lost: " +
			"bookingd outbox find " + s.BookingID + ", then bookingd re-emit " + s.BookingID}
	}
	at := s.Cancel.CancelledAt
	switch {
	case m.Status == "CANCELLED":
		return []string{m.DedupeKey + ": cancelled in time, no copy was made"}
	case m.Status == "UNKNOWN":
		return []string{m.DedupeKey + ": cancelled while a try was open; whether it arrived is being found out (runbook reconcile-unknown)"}
	case m.Status != "SENT":
		return []string{fmt.Sprintf("%s: cancelled, and is %s: it will not be sent", m.DedupeKey, m.Status)}
	case before(m.SentAt, at):
		return []string{fmt.Sprintf("%s: too late: it was SENT %s before the cancel was heard here", m.DedupeKey, gap(*m.SentAt, at))}
	case before(m.FirstClaimed, at) && m.CancelAsked:
		return []string{fmt.Sprintf("%s: too late: a try had been claimed before the cancel was heard, and it was accepted %s after it", m.DedupeKey, gap(at, *m.SentAt))}
	case m.Created.After(at):
		return []string{m.DedupeKey + ": DEFECT: its row was made after the cancel, and no tombstone stopped it (TRAP-C2-1; TRAP-C2-5 if the cancel is older than NOTIFYD_RETENTION)"}
	default:
		return []string{m.DedupeKey + ": DEFECT: it was claimed after the cancel was known here (TRAP-C2-7)"}
	}
}

func before(t *time.Time, than time.Time) bool { return t != nil && t.Before(than) }

func gap(from, to time.Time) string { return to.Sub(from).Round(time.Millisecond).String() }
