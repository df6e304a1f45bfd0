package verify

import "mailproof/history"

var keyDiscipline = rule{
	name:      "key-discipline",
	statement: "A mail keeps its key, its Message-ID and its bytes over all attempts and processes; no two mails share one.",
	check: func(e *Evidence, r *report) {
		owners := map[string]string{} // Message-ID → key
		for _, a := range e.Strays.Attempts {
			if a.DotAt > 0 {
				r.breach("", "attempt %d for %s carries no dedupe key", a.ID, a.Recipient)
			}
		}
		e.mails(func(m *Mail) {
			checkOneBooking(m, r)
			checkAttemptKeys(m, owners, r)
		})
	},
}

func checkOneBooking(m *Mail, r *report) {
	booking := ""
	for _, o := range m.Ops {
		if o.Booking == "" || o.Booking == booking {
			continue
		}
		if booking != "" {
			r.breach(m.Key, "bookings %s and %s share one key", booking, o.Booking)
			return
		}
		booking = o.Booking
	}
}

func checkAttemptKeys(m *Mail, owners map[string]string, r *report) {
	var first, named *history.Attempt // with the whole mail read; with a Message-ID
	for _, a := range m.Attempts {
		if a.DotAt == 0 {
			continue
		}
		r.looked(1)
		if a.Key == "" {
			r.breach(m.Key, "attempt %d for %s carries no dedupe key", a.ID, a.Recipient)
			continue
		}
		switch {
		case first == nil:
			first = a
			if a.MessageID == "" && a.Transport == "smtp" { // an HTTP API makes it
				r.breach(m.Key, "attempt %d carries no Message-ID: no receiver can tell its copies from other mails (OB-03)", a.ID)
			}
		case a.BodyHash != first.BodyHash:
			r.breach(m.Key, "the bytes of attempt %d differ from those of attempt %d", a.ID, first.ID)
		}
		switch {
		case a.MessageID == "" && a.Transport != "smtp":
			// An API over HTTP gives a mail its id when it keeps it: a try that it
			// refused has none.
		case named == nil:
			named = a
			if owner, taken := owners[a.MessageID]; a.MessageID != "" && taken {
				r.breach(m.Key, "Message-ID %s is also that of %s", a.MessageID, owner)
			}
			owners[a.MessageID] = m.Key
		case a.MessageID != named.MessageID:
			r.breach(m.Key, "attempt %d has Message-ID %s, attempt %d had %s", a.ID, a.MessageID, named.ID, named.MessageID)
		}
	}
}
