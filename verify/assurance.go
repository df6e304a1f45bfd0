package verify

import (
	"strconv"

	"mailproof/history"
)

// A run that proves nothing is invalid, never green. Most harnesses of the
// field have passed runs without traffic, or whose faults never struck.
var assurance = rule{
	name:      "assurance",
	statement: "The run can prove something: it started empty, the traffic was made, every planned fault struck and has a witness.",
	check:     checkAssurance,
}

func checkAssurance(e *Evidence, r *report) {
	invalid := func(key, format string, args ...any) { r.find(Invalid, key, format, args...) }
	r.looked(len(e.Ops) + len(e.Faults))
	checkTraffic(e, invalid)
	checkFaults(e, invalid)
	checkEmptyStart(e, invalid)
}

func checkTraffic(e *Evidence, invalid harnessFinding) {
	confirmed := 0
	e.mails(func(m *Mail) {
		if m.Confirmed() && m.Campaign == "" {
			confirmed++
		}
	})
	if confirmed < e.Meta.Floors.Confirmed {
		invalid("", "%d confirmations were acknowledged, the floor is %d", confirmed, e.Meta.Floors.Confirmed)
	}
	if len(e.Ops) == 0 {
		invalid("", "no client made an operation")
	}
	okays, kinds := map[string]int{}, []string{}
	made := map[[2]string]bool{}
	for i := range e.Ops {
		o := &e.Ops[i]
		if _, seen := okays[o.Name]; !seen {
			okays[o.Name] = 0
			kinds = append(kinds, o.Name)
		}
		if o.Outcome == history.OpOK {
			okays[o.Name]++
		}
		if o.Campaign == nil { // of the schedule's arrivals none
			made[[2]string{o.Name, o.Key}] = true
		}
	}
	for _, kind := range kinds {
		if okays[kind] == 0 {
			invalid("", "no %s was ever acknowledged", kind)
		}
	}
	// A malformed number was reported by well-formed-history.
	if planned, err := strconv.Atoi(e.Meta.Params[history.ParamArrivals]); err == nil && len(made) < planned {
		invalid("", "%d of %d scheduled operations were made", len(made), planned)
	}
}

func checkFaults(e *Evidence, invalid harnessFinding) {
	installed, recorded := 0, map[string]bool{}
	for i := range e.Faults {
		f := &e.Faults[i]
		recorded[f.Name] = true
		switch f.Outcome {
		case history.Indeterminate:
			invalid("", "it is not known whether fault %s on %s took hold", f.Name, f.Target)
		case history.Installed:
			installed++
			if f.Witness == "" {
				invalid("", "fault %s on %s was installed, and nothing witnesses that it struck", f.Name, f.Target)
			} else if f.Count == 0 {
				invalid("", "fault %s on %s was installed and struck 0 times", f.Name, f.Target)
			}
		}
	}
	if installed < e.Meta.Floors.Faults {
		invalid("", "%d faults were installed, the floor is %d", installed, e.Meta.Floors.Faults)
	}
	for _, name := range splitList(e.Meta.Params[history.ParamFaults]) {
		if !recorded[name] {
			invalid("", "fault %s was planned, and the history holds no record of it", name)
		}
	}
}

// checkEmptyStart finds leftovers of an earlier run: a mail that reached the
// far side, or a row that stood, before the first operation.
func checkEmptyStart(e *Evidence, invalid harnessFinding) {
	if len(e.Ops) == 0 {
		return
	}
	first := e.Ops[0].Call
	if len(e.Attempts) > 0 && e.Attempts[0].From < first {
		a := &e.Attempts[0]
		invalid(a.Key, "attempt %d began %d ms before the first operation: the start was not empty", a.ID, (first-a.From)/1e6)
	}
	e.mails(func(m *Mail) {
		if len(m.Moves) > 0 && m.Moves[0].Op != "INSERT" {
			invalid(m.Key, "the first change of its row in the log is an %s: the table was not empty at the start", m.Moves[0].Op)
		}
	})
}
