package verify

import (
	"net/mail"

	"mailproof/history"
)

var deadJustified = rule{
	name:      "dead-justified",
	statement: "A mail is given up only after a permanent refusal, when its recipient is no address, or when every attempt it may have was made and refused; the dead-letter queue holds the dead mails and nothing else.",
	check: func(e *Evidence, r *report) {
		e.mails(func(m *Mail) {
			// A cancel leaves the letter of a mail that had died where it is.
			buried := m.State() == dead || m.State() == cancelled && m.deaths() > 0
			if m.Letters > 0 && !buried && !e.waiting(m) {
				r.breach(m.Key, "the dead-letter queue holds %d messages of it, and its state is %q", m.Letters, m.State())
			}
			if m.State() == dead {
				r.looked(1)
				checkDeath(e, m, r)
			}
			checkDeadAlerts(e, m, r)
		})
	},
}

func checkDeath(e *Evidence, m *Mail, r *report) {
	for _, a := range m.Attempts {
		if refusedForGood(a) {
			return
		}
	}
	if noAddress(m) {
		return
	}
	claims := m.Rows[0].Attempts
	if limit := e.limit(m); claims < limit {
		r.breach(m.Key, "DEAD after %d of %d attempts, and the receiver never refused it for good", claims, limit)
		return
	}
	if len(m.Attempts) < claims && !e.anyFault(e.lifetime(m)) {
		r.breach(m.Key, "DEAD with %d attempts claimed, but the receiver saw only %d and no fault kept the others away", claims, len(m.Attempts))
	}
}

// noAddress reports a mail that no server can be asked to take: what it was
// asked for under is no address by RFC 5322 section 3.4.1 (AC5).
func noAddress(m *Mail) bool {
	o := m.request()
	if o == nil || o.Recipient == "" {
		return false
	}
	a, err := mail.ParseAddress(o.Recipient)
	return err != nil || a.Address != o.Recipient
}

// lifetime is from the mail's first operation to the end of the run.
func (e *Evidence) lifetime(m *Mail) (from, to int64) {
	if len(m.Ops) > 0 {
		return m.Ops[0].Call, e.End
	}
	return e.Start, e.End
}

// checkDeadAlerts finds alerts of a mail that never was dead, and a second
// alert of the same death that no fault explains.
func checkDeadAlerts(e *Evidence, m *Mail, r *report) {
	alerts := 0
	for _, a := range m.Alerts {
		if alertKind(a) == alertDead {
			alerts++
		}
	}
	if alerts == 0 {
		return
	}
	r.looked(alerts)
	deaths := m.deaths()
	if deaths == 0 {
		r.breach(m.Key, "%d alerts say that it is dead, and it never was", alerts)
		return
	}
	if alerts > deaths && !e.workerStruck(e.lifetime(m)) {
		r.breach(m.Key, "%d alerts for %d deaths, and no fault explains a repeat", alerts, deaths)
	}
}

// deaths counts how often the mail became DEAD; without a log, whether it is.
func (m *Mail) deaths() int {
	n := 0
	for i := range m.Moves {
		if m.Moves[i].To == stDead && m.Moves[i].From != stDead {
			n++
		}
	}
	if n == 0 && (m.State() == dead || m.wasReplayed()) {
		n = 1
	}
	return n
}

func (m *Mail) wasReplayed() bool {
	for _, o := range m.Ops {
		if o.Name == "replay" && o.Outcome != history.OpFail {
			return true
		}
	}
	return false
}
