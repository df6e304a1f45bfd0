package verify

import "mailproof/history"

var atMostOne = rule{
	name:      "at-most-one",
	statement: "No customer gets a mail twice. Only plain SMTP under policy resend may leave an extra copy, and each needs an earlier attempt whose outcome could not be known or written down.",
	check: func(e *Evidence, r *report) {
		e.mails(func(m *Mail) {
			copies := m.Copies()
			r.looked(len(copies))
			if len(copies) < 2 {
				return
			}
			if policy := e.policy(m); policy != "resend" || e.Meta.Server != "plain" {
				r.breach(m.Key, "%d copies were kept; under policy %s and a %s receiver it may be 1", len(copies), policy, e.Meta.Server)
				return
			}
			checkExtraCopies(e, m, copies, r)
		})
	},
}

// checkExtraCopies demands a reason for each copy after the first: the copy
// before it, or this one itself, is of an attempt that was unsettled.
func checkExtraCopies(e *Evidence, m *Mail, copies []*history.Attempt, r *report) {
	for i := 1; i < len(copies); i++ {
		before, extra := copies[i-1], copies[i]
		if e.unsettled(m, before, extra.DotAt) != "" || e.overtaken(m, extra) != "" {
			continue
		}
		r.breach(m.Key, "copy %d of %d (attempt %d) has no excuse: attempt %d before it was answered %q, and no fault kept the system from writing that down",
			i+1, len(copies), extra.ID, before.ID, before.Reply)
	}
}

// overtaken says why an attempt was sent although another had taken the mail
// over: its process was stopped past the lease, or the dot had left a process
// that was killed before the server read it.
func (e *Evidence) overtaken(m *Mail, a *history.Attempt) string {
	if name, _ := e.death(a, a.From, a.DotAt); name != "" {
		return name + " was killed before the server read its dot"
	}
	if name, s := e.stopped(m, a); name != "" && s.to <= a.DotAt+sameInstant {
		return name + " was stopped past its lease and woke"
	}
	return ""
}
