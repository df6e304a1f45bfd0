package verify

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"mailproof/history"
)

// Its findings are the harness's fault, and nothing else is judged then.
var wellFormedHistory = rule{
	name:      "well-formed-history",
	statement: "The evidence is whole and does not contradict itself: every line can be read, nothing was refused, no client had two operations open, no page of the ledger or of the log is missing, the log of changes ends where the rows stand.",
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
	if jump := e.ClockJump(); jump.Abs() > clockTolerance {
		harness("", "the machine's wall clock jumped by %s during the run: no commit can be told to lie before or after anything", jump.Round(time.Millisecond))
	}
	checkParams(e.Meta.Params, harness)
	checkClients(e, harness)
	checkWhole(e, harness)
	checkLogEnds(e, harness)
}

// clockTolerance absorbs that the two clocks are read one after the other, with
// whatever a busy machine does in between, and what NTP does.
const clockTolerance = 2 * time.Second

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

// checkWhole counts. The ledger numbers its rows and the collector its changes
// from 1 and without a gap, and both tell at the end how many there were: a page
// that is missing in the middle or at the end is a hole in what everything else
// is judged by. A copy that only the missing page shows would be no double.
func checkWhole(e *Evidence, harness harnessFinding) {
	ids := make([]int64, len(e.Attempts))
	for i := range e.Attempts {
		ids[i] = e.Attempts[i].ID
	}
	if hole := firstHole(ids); hole != 0 {
		harness("", "the ledger holds %d attempts, and none (or more than one) of number %d", len(ids), hole)
	}
	orders := map[string][]int64{}
	for i := range e.Changes {
		db := e.Changes[i].Database
		orders[db] = append(orders[db], e.Changes[i].Order)
	}
	for _, db := range slices.Sorted(maps.Keys(orders)) {
		if hole := firstHole(orders[db]); hole != 0 {
			harness("", "the log of %s holds %d changes, and none (or more than one) of order %d", db, len(orders[db]), hole)
		}
	}
	for _, what := range slices.Sorted(maps.Keys(e.Final.Counted)) {
		have := int64(len(ids))
		if db, ok := strings.CutPrefix(what, history.CountedChanges); ok {
			have = int64(len(orders[db]))
		} else if what != history.CountedAttempts {
			continue // a newer harness counted it
		}
		if n := e.Final.Counted[what]; n != have {
			harness("", "%d %s were taken down, and the history holds %d", n, what, have)
		}
	}
}

// firstHole is the first number of 1, 2, 3 … that does not stand in its place; 0
// where all do.
func firstHole(numbers []int64) int64 {
	slices.Sort(numbers)
	for i, n := range numbers {
		if n != int64(i+1) {
			return int64(i + 1)
		}
	}
	return 0
}

// checkLogEnds compares the last status in the log with the row that was read
// at the end: a difference means that the log is not whole, and what it does
// not show was not judged.
func checkLogEnds(e *Evidence, harness harnessFinding) {
	if !e.hasWAL() {
		return
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
