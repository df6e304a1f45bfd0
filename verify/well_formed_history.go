package verify

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"mailproof/history"
)

// Its findings are the harness's fault, and nothing else is judged then.
var wellFormedHistory = rule{
	name:      "well-formed-history",
	statement: "The evidence is whole and does not contradict itself: every line can be read, nothing was refused, no client had two operations open, the log of changes ends where the rows stand.",
	check:     checkWellFormed,
}

func checkWellFormed(e *Evidence, r *report) {
	harness := func(key, format string, args ...any) { r.find(HarnessError, key, format, args...) }
	r.looked(len(e.Ops) + len(e.Attempts) + len(e.Changes) + len(e.Faults))
	for _, p := range e.Problems {
		harness("", "%v", p)
	}
	for _, x := range e.Refused {
		harness("", "the recorder refused a record of kind %s: %s", x.Kind, x.Reason)
	}
	if e.Meta == nil {
		harness("", "there is no meta record: nothing says by what to judge")
		return
	}
	if e.Final == nil {
		harness("", "there is no final record: the run ended before what was left had been read")
		return
	}
	checkParams(e.Meta.Params, harness)
	checkClients(e, harness)
	checkLogEnds(e, harness)
}

type harnessFinding func(key, format string, args ...any)

func checkParams(params map[string]string, harness harnessFinding) {
	for _, name := range []string{history.ParamSendDeadline, history.ParamStaleAfter} {
		if text, ok := params[name]; ok {
			if _, err := time.ParseDuration(text); err != nil {
				harness("", "param %s: %v", name, err)
			}
		}
	}
	if text, ok := params[history.ParamArrivals]; ok {
		if _, err := strconv.Atoi(text); err != nil {
			harness("", "param %s: %v", history.ParamArrivals, err)
		}
	}
}

// checkClients looks for a client with two operations open at once. The
// recorder refuses that; a history made elsewhere may hold it.
func checkClients(e *Evidence, harness harnessFinding) {
	open := map[string]*history.Op{}
	for i := range e.Ops {
		o := &e.Ops[i]
		if o.Client == "" {
			continue
		}
		if before := open[o.Client]; before != nil && o.Call < before.Return {
			harness(o.Key, "client %s called %s while its %s of %s was open", o.Client, o.Name, before.Name, before.Key)
		}
		open[o.Client] = o
	}
}

// checkLogEnds compares the last status in the log with the row that was read
// at the end: a difference means that the log is not whole, and what it does
// not show was not judged.
func checkLogEnds(e *Evidence, harness harnessFinding) {
	if !e.hasWAL() {
		return
	}
	lastOrder := map[string]int64{}
	for i := range e.Changes {
		c := &e.Changes[i]
		if before := lastOrder[c.Database]; c.Order <= before {
			harness("", "the log of %s holds order %d after %d", c.Database, c.Order, before)
			return
		}
		lastOrder[c.Database] = c.Order
	}
	e.mails(func(m *Mail) {
		if len(m.Rows) == 0 && len(m.Moves) > 0 && m.Moves[len(m.Moves)-1].Op != "DELETE" {
			// A delivered mail needs its row for no other invariant: a reading of
			// the table that missed it would go unseen.
			harness(m.Key, "the log leaves a row at %q, and none was read at the end", m.Moves[len(m.Moves)-1].To)
			return
		}
		if len(m.Rows) != 1 || m.rowsMade() > 1 || e.waiting(m) {
			return // one-row-per-key and quiesced judge those
		}
		i := slices.IndexFunc(m.Moves, func(mv Move) bool { return mv.Op != "DELETE" })
		if i < 0 {
			harness(m.Key, "the row stands at %s and the log holds no change of it", m.State())
			return
		}
		last := m.Moves[len(m.Moves)-1]
		if !strings.EqualFold(last.To, m.State()) {
			harness(m.Key, "the row stands at %s, the log ends at %q", m.State(), last.To)
		}
	})
}
