package verify

// The guarantee holds for servers that keep RFC 5321 section 4.2.5 and their
// key's lifetime. Where the script broke that, the finding says so and does not
// fail the system; the other checkers leave those copies out.
var providerBreach = rule{
	name:      "provider-breach",
	statement: "The receiver kept its protocol; a loss or a double that follows from its breach is its own.",
	check: func(e *Evidence, r *report) {
		e.mails(func(m *Mail) {
			breaches, stored := 0, 0
			for _, a := range m.Attempts {
				if a.Breach {
					breaches++
				}
				if a.Stored {
					stored++
				}
			}
			r.looked(breaches)
			switch {
			case breaches == 0:
			case stored == 0 && m.discarded():
				r.find(Pass, m.Key, "lost by the receiver: it accepted the mail and threw it away")
			case stored > len(m.Copies()) && stored > 1:
				r.find(Pass, m.Key, "doubled by the receiver: it kept a mail that it had refused, or forgot a key that it had promised to keep")
			}
		})
	},
}
