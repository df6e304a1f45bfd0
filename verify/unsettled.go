package verify

import (
	"fmt"
	"slices"
	"sort"
	"strings"
	"time"

	"mailproof/history"
)

// An attempt is unsettled when the system could not have known its outcome, or
// could not have written it down. Only that excuses sending a mail again. The
// reasons, and nothing else, are:
//
//   - the ledger: the dot was read and no whole reply was written, or only
//     after the sender's deadline;
//   - the fault log: the attempt's process was killed, or stopped past its
//     lease, or its database was struck, before the outcome was committed.
//
// The write-ahead log, where it was recorded, overrules the fault log: an
// outcome that was committed is settled, whatever was killed afterwards.

// life is what happened to one process.
type life struct {
	deaths []int64
	pauses []span
}

type span struct{ from, to int64 }

// sameInstant absorbs the order of two time stamps taken by two goroutines for
// one event: the ledger stamps a reply after writing it, the harness a kill
// after the process is gone. 100 ms is what two busy cores were seen to need.
const sameInstant = int64(100 * time.Millisecond)

func (e *Evidence) addProcesses() {
	e.lives = map[string]*life{}
	for _, p := range e.Processes {
		if e.Final != nil && p.At > e.Final.At {
			break // the run is over and the system is being stopped
		}
		l := e.lives[p.Name]
		if l == nil {
			l = &life{}
			e.lives[p.Name] = l
			e.processNames = append(e.processNames, p.Name)
		}
		switch p.Event {
		case "killed", "exited":
			l.deaths = append(l.deaths, p.At)
			l.endPause(p.At)
		case "paused":
			l.pauses = append(l.pauses, span{from: p.At, to: e.End})
		case "resumed":
			l.endPause(p.At)
		}
	}
	// "notifyd-10.w3" belongs to notifyd-10, not to notifyd-1.
	slices.SortStableFunc(e.processNames, func(a, b string) int { return len(b) - len(a) })
}

func (l *life) endPause(at int64) {
	if n := len(l.pauses); n > 0 && l.pauses[n-1].to > at {
		l.pauses[n-1].to = at
	}
}

// process names the process that made an attempt: the one whose name the
// client's name starts with. "" when none does.
func (e *Evidence) process(client string) string {
	if name, ok := e.clients[client]; ok {
		return name
	}
	found := ""
	for _, name := range e.processNames {
		rest, ok := strings.CutPrefix(client, name)
		if ok && (rest == "" || !isWordByte(rest[0])) {
			found = name
			break
		}
	}
	e.clients[client] = found
	return found
}

func isWordByte(b byte) bool {
	return b >= '0' && b <= '9' || b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b == '_'
}

// makers are the processes that may have made an attempt: its own, or, when
// its client's name tells nothing, all.
func (e *Evidence) makers(a *history.Attempt) []string {
	if name := e.process(a.Client); name != "" {
		return []string{name}
	}
	return e.processNames
}

// death returns a time in [from, to] at which a process that may have made the
// attempt ended.
func (e *Evidence) death(a *history.Attempt, from, to int64) (name string, at int64) {
	for _, name := range e.makers(a) {
		l := e.lives[name]
		i := sort.Search(len(l.deaths), func(i int) bool { return l.deaths[i] >= from })
		if i < len(l.deaths) && l.deaths[i] <= to {
			return name, l.deaths[i]
		}
	}
	return "", 0
}

// stopped returns a stretch in which the attempt's process was stopped, began
// it before the attempt's outcome could be written down, and came back only
// after the lease was over.
func (e *Evidence) stopped(m *Mail, a *history.Attempt) (name string, s span) {
	leaseOver := e.leaseStart(m, a) + e.Meta.Lease.Nanoseconds()
	for _, name := range e.makers(a) {
		for _, s := range e.lives[name].pauses {
			if s.from <= a.To+sameInstant && s.to >= a.From && s.to >= leaseOver-sameInstant {
				return name, s
			}
		}
	}
	return "", span{}
}

// leaseStart is when the lease under which an attempt was made began: the
// commit of the latest claim before it, or the attempt's first byte.
func (e *Evidence) leaseStart(m *Mail, a *history.Attempt) int64 {
	start := a.From
	for i := range m.Moves {
		if m.Moves[i].claim && m.Moves[i].At <= a.From+sameInstant {
			start = min(m.Moves[i].At, a.From)
		}
	}
	return start
}

// databaseStruck returns an installed fault of the database in [from, to].
func (e *Evidence) databaseStruck(from, to int64) *history.Fault {
	for i := range e.Faults {
		f := &e.Faults[i]
		if f.Outcome == history.Installed && strings.Contains(strings.ToLower(f.Target), "postgres") &&
			f.Start <= to && f.End >= from {
			return f
		}
	}
	return nil
}

// committedSent returns when the mail became SENT in the log, up to until.
func committedSent(m *Mail, until int64) (int64, bool) {
	for i := range m.Moves {
		if m.Moves[i].To == stSent && m.Moves[i].From != stSent && m.Moves[i].At <= until {
			return m.Moves[i].At, true
		}
	}
	return 0, false
}

// unsettled says why the outcome of an attempt could not be known or written
// down before until; "" means that it could. Only an attempt whose dot was
// read, or whose process may still send it, can be unsettled.
func (e *Evidence) unsettled(m *Mail, a *history.Attempt, until int64) string {
	if a.DotAt > 0 && !answered(a) {
		return "its dot was read and no whole reply reached anybody"
	}
	limit := e.sendDeadline.Nanoseconds()
	if limit == 0 {
		limit = e.Meta.Lease.Nanoseconds()
	}
	if a.DotAt > 0 && limit > 0 && a.To-a.From > limit {
		return fmt.Sprintf("its reply came %d ms after its first byte, past the sender's limit", (a.To-a.From)/1e6)
	}
	if _, ok := committedSent(m, until); ok {
		return ""
	}
	return e.struckBeforeSettled(m, a, until)
}

// struckBeforeSettled looks for a fault that kept the system from writing an
// attempt's outcome down before until.
func (e *Evidence) struckBeforeSettled(m *Mail, a *history.Attempt, until int64) string {
	// A worker that lives settles within its lease or not at all.
	bound := min(until, a.To+e.Meta.Lease.Nanoseconds()) + sameInstant
	if name, at := e.death(a, a.From, bound); name != "" {
		return fmt.Sprintf("%s was killed at %s, before it could commit the outcome", name, e.ms(at))
	}
	if name, s := e.stopped(m, a); name != "" {
		return fmt.Sprintf("%s was stopped from %s to %s, past its lease", name, e.ms(s.from), e.ms(s.to))
	}
	if f := e.databaseStruck(a.From, bound); f != nil {
		return fmt.Sprintf("%s struck %s from %s to %s, before the outcome was committed", f.Name, f.Target, e.ms(f.Start), e.ms(f.End))
	}
	return ""
}

// workerStruck reports a process's end or stop, or a fault of the database, in
// [from, to]: what can keep a worker from finishing or writing down a try.
func (e *Evidence) workerStruck(from, to int64) bool {
	for _, l := range e.lives {
		if slices.ContainsFunc(l.deaths, func(at int64) bool { return at >= from && at <= to }) ||
			slices.ContainsFunc(l.pauses, func(s span) bool { return s.from <= to && s.to >= from }) {
			return true
		}
	}
	return e.databaseStruck(from, to) != nil
}

// anyFault reports, beside those, any installed fault in [from, to].
func (e *Evidence) anyFault(from, to int64) bool {
	return e.workerStruck(from, to) || slices.ContainsFunc(e.Faults, func(f history.Fault) bool {
		return f.Outcome == history.Installed && f.Start <= to && f.End >= from
	})
}
