package verify

import "mailproof/history"

var noPhantom = rule{
	name:      "no-phantom",
	statement: "Every copy belongs to a mail that was asked for; what definitely failed sends nothing.",
	check: func(e *Evidence, r *report) {
		if n := len(e.Strays.storedAll()); n > 0 {
			r.breach("", "%d copies were kept of mails that carry no key, of recipients who expect none or several", n)
		}
		e.mails(func(m *Mail) {
			stored := len(m.storedAll())
			r.looked(stored)
			if stored == 0 {
				return
			}
			switch m.Asked() {
			case "":
				r.breach(m.Key, "%d copies were kept of a mail that nobody asked for", stored)
			case history.OpFail:
				r.breach(m.Key, "%d copies were kept of a mail whose request definitely failed", stored)
			}
		})
	},
}
