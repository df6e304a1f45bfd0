package verify

import (
	"cmp"
	"strings"

	"mailproof/history"
)

var contentAndRecipient = rule{
	name:      "content-and-recipient",
	statement: "A mail goes to the customer who asked for it, it is about what he asked for, and its row names his booking.",
	check: func(e *Evidence, r *report) {
		e.mails(func(m *Mail) {
			o := m.request()
			if o == nil {
				return
			}
			for _, a := range m.Attempts {
				r.looked(1)
				if o.Recipient != "" && a.Recipient != "" && !strings.EqualFold(a.Recipient, o.Recipient) {
					r.breach(m.Key, "attempt %d was made to %s, the customer is %s", a.ID, a.Recipient, o.Recipient)
				}
				checkSubject(e, m, o, a, r)
			}
			for _, row := range m.Rows {
				r.looked(1)
				if row.Booking != "" && o.Booking != "" && row.Booking != o.Booking {
					r.breach(m.Key, "its row names booking %s, it was asked for by booking %s", row.Booking, o.Booking)
				}
			}
		})
	},
}

// checkSubject looks for the mail's own mark in its subject, where the target
// promises one: the right person with another's ticket is the worst mail of all,
// and neither key nor recipient shows it.
func checkSubject(e *Evidence, m *Mail, o *history.Op, a *history.Attempt, r *report) {
	if e.Meta.Params[history.ParamSubject] != "booking" || a.DotAt == 0 {
		return
	}
	mark := cmp.Or(o.Booking, o.Recipient)
	if mark != "" && !strings.Contains(strings.ToLower(a.Subject), strings.ToLower(mark)) {
		r.breach(m.Key, "the subject of attempt %d is %q, and should name %s: the mail is another's", a.ID, a.Subject, mark)
	}
}
