package verify

import "strings"

var contentAndRecipient = rule{
	name:      "content-and-recipient",
	statement: "A mail goes to the customer who asked for it, and its row names that customer's booking.",
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
