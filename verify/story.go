package verify

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"mailproof/history"
)

// storyLine is one piece of evidence on the run's time base.
type storyLine struct {
	at   int64
	text string
	of   string // the process that it is about
}

// Story tells the life of one mail, a line per piece of evidence, in order of
// time. Times are milliseconds since the mail's first operation, or since the
// start of the run when it has none.
func (e *Evidence) Story(key string) []string {
	m := e.Mails[key]
	if m == nil {
		return nil
	}
	var lines []storyLine
	lines = append(lines, e.opLines(m)...)
	lines = append(lines, e.moveLines(m)...)
	lines = append(lines, e.attemptLines(m)...)
	lines = append(lines, e.faultLines(m, lines)...)
	slices.SortStableFunc(lines, func(a, b storyLine) int {
		switch {
		case a.at < b.at:
			return -1
		case a.at > b.at:
			return 1
		}
		return 0
	})
	lines = shorten(lines)
	zero := e.Start
	if len(m.Ops) > 0 {
		zero = m.Ops[0].Call
	}
	var out []string
	for _, l := range lines {
		out = append(out, fmt.Sprintf("%10.1f ms  %s", float64(l.at-zero)/1e6, l.text))
	}
	for _, text := range e.endLines(m) {
		out = append(out, "       end     "+text)
	}
	return out
}

// shorten cuts what happened to one process while nothing happened to the mail:
// a mail that waits for its lease may see thirty restarts.
func shorten(lines []storyLine) []storyLine {
	const keep = 3 // killed, started, ready
	var out []storyLine
	for i := 0; i < len(lines); {
		end := i + 1
		for lines[i].of != "" && end < len(lines) && lines[end].of == lines[i].of {
			end++
		}
		if end-i <= keep+1 {
			out = append(out, lines[i:end]...)
		} else {
			out = append(out, lines[i:i+keep]...)
			last := lines[end-1]
			last.text = fmt.Sprintf("process     %s: %d more events up to here", last.of, end-i-keep)
			out = append(out, last)
		}
		i = end
	}
	return out
}

func (e *Evidence) opLines(m *Mail) []storyLine {
	var lines []storyLine
	for _, o := range m.Ops {
		text := fmt.Sprintf("client      %s of booking %s: %s after %.1f ms", o.Name, o.Booking, o.Outcome, float64(o.Return-o.Call)/1e6)
		if o.Err != "" {
			text += " (" + o.Err + ")"
		}
		lines = append(lines, storyLine{at: o.Call, text: text})
	}
	return lines
}

func (e *Evidence) moveLines(m *Mail) []storyLine {
	c := e.Columns.Mails
	var lines []storyLine
	for i := range m.Moves {
		mv := &m.Moves[i]
		var text string
		switch {
		case mv.Op == "DELETE":
			text = "row         deleted, it was " + mv.From
		case mv.From == "":
			text = "row         created as " + mv.To
		case mv.From == mv.To && !mv.claim:
			text = "row         " + mv.To + " still: " + changedColumns(mv)
		default:
			text = fmt.Sprintf("row         %s → %s", mv.From, mv.To)
		}
		for _, col := range []string{c.Attempts, c.Token} {
			if v := mv.New[col]; v != "" && v != mv.Before[col] && mv.From != "" {
				text += fmt.Sprintf(", %s %s", col, v)
			}
		}
		if due, err := parsePGTime(mv.New[c.NextAttemptAt]); err == nil && mv.To == stFailed {
			text += fmt.Sprintf(", next try due %.1f ms later", float64(due.Sub(mv.CommitAt))/1e6)
		}
		lines = append(lines, storyLine{at: mv.At, text: fmt.Sprintf("%s (commit %d)", text, mv.Order)})
	}
	return lines
}

func changedColumns(mv *Move) string {
	var changed []string
	for col, v := range mv.New {
		if mv.Before[col] != v {
			changed = append(changed, col)
		}
	}
	for col := range mv.Before {
		if _, ok := mv.New[col]; !ok {
			changed = append(changed, col)
		}
	}
	if len(changed) == 0 {
		return "nothing changed"
	}
	slices.Sort(changed)
	return strings.Join(changed, ", ") + " changed"
}

func (e *Evidence) attemptLines(m *Mail) []storyLine {
	var lines []storyLine
	for _, a := range m.Attempts {
		text := fmt.Sprintf("server      attempt %d from %s for %s, session %d", a.ID, a.Client, a.Recipient, a.Session)
		if a.Fault != "" {
			text += ", struck by " + a.Fault
		}
		lines = append(lines, storyLine{at: a.From, text: text})
		if a.DotAt > 0 {
			lines = append(lines, storyLine{at: a.DotAt, text: fmt.Sprintf("server      attempt %d: dot read, %s", a.ID, kept(a))})
		}
		lines = append(lines, storyLine{at: a.To, text: fmt.Sprintf("server      attempt %d over at %s: %s", a.ID, a.Stage, outcomeOf(a))})
	}
	return lines
}

func kept(a *history.Attempt) string {
	switch {
	case a.Stored:
		return "a copy is kept"
	case a.Deduplicated:
		return "key known, no second copy kept"
	default:
		return "nothing kept"
	}
}

func outcomeOf(a *history.Attempt) string {
	text := "no whole reply written"
	if a.ReplyWritten {
		text = "replied " + a.Reply
	}
	if a.ReplyWritten && a.PeerGone {
		text += " to a client that was gone"
	}
	if a.ClosedWithoutStoring {
		text += ", closed without storing"
	}
	if a.Breach {
		text += ", in breach of the protocol"
	}
	return text
}

// faultLines are the faults and process events that lie within the mail's life
// and may have touched it.
func (e *Evidence) faultLines(m *Mail, life []storyLine) []storyLine {
	if len(life) == 0 {
		return nil
	}
	from, to := life[0].at, life[0].at
	for _, l := range life {
		from, to = min(from, l.at), max(to, l.at)
	}
	var lines []storyLine
	for i := range e.Faults {
		f := &e.Faults[i]
		struck := slices.Contains(f.Keys, m.Key)
		if f.Outcome != history.Installed || !struck && (len(f.Keys) > 0 || f.Start > to || f.End < from) {
			continue
		}
		lines = append(lines,
			storyLine{at: f.Start, text: fmt.Sprintf("fault       %s on %s begins", f.Name, f.Target)},
			storyLine{at: f.End, text: fmt.Sprintf("fault       %s healed: %s", f.Name, f.Witness)})
	}
	mine := map[string]bool{}
	for _, a := range m.Attempts {
		if name := e.process(a.Client); name != "" {
			mine[name] = true
		}
	}
	for i := range e.Processes {
		p := &e.Processes[i]
		if p.At < from || p.At > to || len(mine) > 0 && !mine[p.Name] {
			continue
		}
		text := fmt.Sprintf("process     %s (pid %d) %s %s", p.Name, p.PID, p.Event, p.Detail)
		lines = append(lines, storyLine{at: p.At, text: strings.TrimRight(text, " "), of: p.Name})
	}
	return lines
}

func (e *Evidence) endLines(m *Mail) []string {
	var lines []string
	for _, r := range m.Rows {
		text := fmt.Sprintf("row         %s, %d attempts, token %d, %d unsettled", r.State, r.Attempts, r.Token, r.Unsettled)
		if r.LastError != "" {
			text += ", last error: " + r.LastError
		}
		lines = append(lines, text)
	}
	if len(m.Rows) == 0 {
		lines = append(lines, "row         none")
	}
	for _, o := range m.Outbox {
		lines = append(lines, fmt.Sprintf("outbox      event %s, published %t, dead %t", o.EventID, o.Published, o.Dead))
	}
	if m.Letters > 0 {
		lines = append(lines, fmt.Sprintf("dead letter %d in the queue", m.Letters))
	}
	alerts := map[string]int{}
	for _, a := range m.Alerts {
		alerts[a.Kind]++
	}
	for _, kind := range slices.Sorted(maps.Keys(alerts)) {
		lines = append(lines, fmt.Sprintf("alert       %s ×%d", kind, alerts[kind]))
	}
	lines = append(lines, fmt.Sprintf("customer    %d copies", len(m.storedAll())))
	if e.Final != nil && e.Final.Pending[m.Key] != "" {
		lines = append(lines, "waiting     "+e.Final.Pending[m.Key])
	}
	return lines
}

func (m *Mail) storedAll() []*history.Attempt {
	var all []*history.Attempt
	for _, a := range m.Attempts {
		if a.Stored {
			all = append(all, a)
		}
	}
	return all
}
