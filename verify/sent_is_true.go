package verify

var sentIsTrue = rule{
	name:      "sent-is-true",
	statement: "The state tells the truth: SENT means that the customer has it; CANCELLED, DEAD and EXPIRED mean that he has not.",
	check: func(e *Evidence, r *report) {
		e.mails(func(m *Mail) {
			if len(m.Rows) == 0 {
				return
			}
			r.looked(1)
			copies := len(m.Copies())
			switch m.State() {
			case sent:
				if !m.Delivered() && !m.discarded() {
					r.breach(m.Key, "the row says SENT, and the ledger holds no copy")
				}
			case cancelled, dead, expired:
				if copies > 0 {
					r.breach(m.Key, "the row says %s, and the customer has %d copies", m.State(), copies)
				}
			}
		})
	},
}
