package verify

var oneRowPerKey = rule{
	name:      "one-row-per-key",
	statement: "However often its event arrives, a mail has one row (AC1).",
	check: func(e *Evidence, r *report) {
		e.mails(func(m *Mail) {
			if len(m.Rows)+len(m.Moves) == 0 {
				return
			}
			r.looked(1)
			if n := max(len(m.Rows), m.rowsMade()); n > 1 {
				r.breach(m.Key, "%d rows were made for one key", n)
			}
		})
	},
}

// rowsMade counts the rows of the mail that the log saw made.
func (m *Mail) rowsMade() int {
	ids := map[string]bool{}
	for i := range m.Moves {
		if m.Moves[i].Op == "INSERT" {
			ids[m.Moves[i].ID] = true
		}
	}
	return len(ids)
}
