package scenarios

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"mailproof/history"
	"mailproof/reports"
	"mailproof/verify"
)

// Criterion is one acceptance criterion of the notification system and the cells
// that decide it. A cell is run once, however many criteria it decides.
type Criterion struct {
	ID   string // AC1
	Text string // what must hold, one line
	// From names the scenarios or cells ("t6.2", "t6.2/hold") that decide it. All
	// of them must be there.
	From []string
	// By are the invariants that speak for it: each must have looked at something
	// in each of its cells, else the criterion is invalid.
	By []string
	// Alone are those that speak for no other criterion: what they find of a
	// shared cell leaves the others as they are.
	Alone []string
	// Everywhere counts what Alone finds in any other cell of the run too.
	Everywhere bool
	// OnlyAlone leaves failures by other invariants to the other criteria of the
	// cell. A cell that proves nothing (invalid, unknown, harness-error) still
	// counts.
	OnlyAlone bool
	// RealDelays says that only the delays of the specification decide it: with
	// others a pass is skipped.
	RealDelays bool
	// Need is what must be in the cells beside the invariants; it returns what is
	// missing, "" for nothing. May be nil.
	Need func(Cells) string
	// Figure is what was measured, one line.
	Figure func(Cells) string
	// Evidence is the file of a cell's folder to look at first; "" means its
	// history.
	Evidence string
}

// realDelays are those of M6-04.
func realDelays() []time.Duration {
	return []time.Duration{10 * time.Second, time.Minute, 5 * time.Minute}
}

// besideCell is the cell that mostly waits: with the real delays it takes more
// than seven minutes, and runs beside all others.
const besideCell = "t6.3/resend"

// Criteria are AC1 to AC8 (requirements, section 1), in the order in which their
// cells are run.
func Criteria() []Criterion {
	return []Criterion{
		{
			ID: "AC1", Text: "an event that arrives several times makes one row and one mail",
			From: []string{"t6.1"}, By: []string{"at-most-one", "one-row-per-key", "nothing-lost", "content-and-recipient"},
			Need: func(c Cells) string {
				return cmp.Or(c.struckTooRarely("duplicate-records", 500), c.struckTooRarely("foreign-duplicate", 500))
			},
			Figure: func(c Cells) string {
				return fmt.Sprintf("five records per event and one of a stranger (%d records more): %s", c.strikes("duplicate-records")+c.strikes("foreign-duplicate"), c.once())
			},
		},
		{
			ID: "AC2", Text: "main queues and dead-letter queue are quorum queues",
			From: []string{"t6.1"}, By: []string{"quorum-queues"}, Alone: []string{"quorum-queues"},
			Everywhere: true, OnlyAlone: true, Need: Cells.queuesMissing, Figure: Cells.queueTypes, Evidence: "queues.txt",
		},
		{
			ID: "AC3", Text: "the service is killed while it sends: delivered again, nothing lost",
			From: []string{"t6.2"}, By: []string{"nothing-lost", "at-most-one", "single-flight"},
			Need: func(c Cells) string { return c.struckTooRarely("kill-while-held", len(drawStrikes(rng(0, "", "")))) },
			Figure: func(c Cells) string {
				return fmt.Sprintf("%d SIGKILLs, %d of them with a session held: %s", c.strikes("kill-while-held")+c.strikes("kill-at-random"), c.strikes("kill-while-held"), c.lost())
			},
		},
		{
			ID: "AC4", Text: "SMTP fails for every mail: exactly N tries at growing delays, then dead letter, DEAD, alert",
			From: []string{"t6.3"}, By: []string{"exact-tries", "retry-discipline", "nothing-lost"}, Alone: []string{"exact-tries", "dead-justified"},
			RealDelays: true, Figure: Cells.givenUp,
		},
		{
			ID: "AC5", Text: "permanent error: dead letter at once, no retry",
			From: []string{"t6.4"}, By: []string{deadAtOnce, stillTried, "dead-justified"},
			Figure: func(c Cells) string {
				return fmt.Sprintf("%.0f mails refused for good: tries per mail %.3g, dead letter %s later (p95); %.0f refused for now beside them: tries per mail %.3g",
					c.measured("refused for good"), c.measured(triesForGood), milliseconds(c.measured(letterDelay)),
					c.measured("refused for now, beside them"), c.measured(triesForNow))
			},
		},
		{
			ID: "AC6", Text: "with 50k marketing mails queued, tickets CONFIRMED→sent p95 < 5 s",
			From: []string{"t6.6"}, By: []string{"ticket-latency", "flood-is-there", "flood-is-accepted", paceInvariant, "nothing-lost"},
			Figure: func(c Cells) string {
				return fmt.Sprintf("tickets p95 %s in the flood, %s alone (< 5 s); %.0f marketing mails waited at least",
					milliseconds(c.measured("tickets in the flood, to SENT, p95")), milliseconds(c.measured("tickets alone, to SENT, p95")),
					c.measured("marketing queue, shortest"))
			},
		},
		{
			ID: "AC7", Text: "replay from the dead-letter queue sends, and never doubles one that was sent",
			From: []string{"t6.8"}, By: []string{"at-most-one", "no-needless-send", "nothing-lost"},
			Figure: func(c Cells) string {
				return fmt.Sprintf("three people replayed %s: %s", c.witness(faultReplays), c.once())
			},
		},
		{
			ID: "AC8", Text: "no hot loop: with SMTP down the mail service uses < 30 % CPU and redeliveries follow the delays",
			From: []string{"t6.3"}, By: []string{noHotLoop, "retry-discipline"}, Alone: []string{noHotLoop},
			RealDelays: true, Figure: Cells.idling,
		},
	}
}

// ChooseCriteria returns those that ids names, in their order; no ids means all.
func ChooseCriteria(all []Criterion, ids []string) ([]Criterion, error) {
	if len(ids) == 0 {
		return all, nil
	}
	var chosen []Criterion
	for _, id := range ids {
		if !slices.ContainsFunc(all, func(c Criterion) bool { return strings.EqualFold(c.ID, id) }) {
			names := make([]string, len(all))
			for i, c := range all {
				names[i] = c.ID
			}
			return nil, fmt.Errorf("no criterion is called %q; there are %s", id, strings.Join(names, ", "))
		}
	}
	for _, c := range all {
		if slices.ContainsFunc(ids, func(id string) bool { return strings.EqualFold(c.ID, id) }) {
			chosen = append(chosen, c)
		}
	}
	return chosen, nil
}

// GateScenarios are the cells that decide the criteria, each once, in the order
// of the criteria, and the names of those that run beside the others. A
// criterion's cell that does not exist is left out here; the judge misses it.
func GateScenarios(all []Scenario, criteria []Criterion) (chosen []Scenario, beside []string, err error) {
	var names []string
	for _, c := range criteria {
		names = append(names, c.From...)
	}
	names = slices.DeleteFunc(names, func(n string) bool {
		name, _, _ := strings.Cut(n, "/")
		return !slices.ContainsFunc(all, func(s Scenario) bool { return s.Name == name })
	})
	if len(names) == 0 {
		return nil, nil, errors.New("no cell decides any of these criteria")
	}
	selected, err := Select(all, names)
	if err != nil {
		return nil, nil, err
	}
	rank := func(s Scenario) int {
		return slices.IndexFunc(names, func(n string) bool { name, _, _ := strings.Cut(n, "/"); return name == s.Name })
	}
	slices.SortStableFunc(selected, func(a, b Scenario) int { return rank(a) - rank(b) })
	for _, s := range selected {
		for _, c := range s.Cells {
			if id := (place{scenario: s, cell: c}).id(); id == besideCell {
				beside = append(beside, id)
			}
		}
	}
	return selected, beside, nil
}

// Alias returns the cells behind "ac5", the names of a criterion's scenarios; ok
// is false for any other name.
func Alias(name string) (from []string, ok bool) {
	for _, c := range Criteria() {
		if strings.EqualFold(c.ID, name) {
			return c.From, true
		}
	}
	return nil, false
}

// AsksForRealDelays reports that one of the names is a criterion that only the
// delays of the specification decide.
func AsksForRealDelays(names []string) bool {
	return slices.ContainsFunc(Criteria(), func(c Criterion) bool {
		return c.RealDelays && slices.ContainsFunc(names, func(n string) bool { return strings.EqualFold(n, c.ID) })
	})
}

// JudgeGate decides each criterion from the cells of a run. It asks for nothing
// but the summary, so that it can be asked again. Of a run that never got to its
// cells each criterion has the run's verdict and its reason.
func JudgeGate(sum reports.Summary, criteria []Criterion, again func(ids ...string) string) reports.Gate {
	g := reports.Gate{
		Verdict: verify.Pass, Seed: sum.Seed, Seconds: sum.Seconds, Versions: sum.Versions, RunID: sum.RunID, Command: again(),
	}
	for _, c := range criteria {
		judged := c.judge(sum)
		if sum.NotRun != "" && len(sum.Scenarios) == 0 {
			judged = reports.Criterion{ID: c.ID, Text: c.Text, Verdict: sum.Verdict, Reason: "not judged: " + sum.NotRun}
		}
		judged.Command = again(c.ID)
		g.Criteria = append(g.Criteria, judged)
		g.Verdict = verify.Worse(g.Verdict, judged.Verdict)
		if c.RealDelays && slices.ContainsFunc(c.cells(sum).list, func(s reports.Scenario) bool {
			return len(s.RetryDelays) > 0 && !slices.Equal(s.RetryDelays, realDelays()) // a cell that broke at its start has none
		}) {
			g.Short = true
		}
	}
	if len(g.Criteria) == 0 {
		g.Verdict = verify.Invalid
	}
	return g
}

// Cells are those of one run that decide a criterion.
type Cells struct {
	list    []reports.Scenario
	missing []string
	others  []reports.Scenario // of the same run
}

// cells finds a criterion's cells in a run. What From names by scenario alone
// must be there under every policy that the scenario has.
func (c Criterion) cells(sum reports.Summary) Cells {
	var found Cells
	mine := map[string]bool{}
	for _, name := range c.From {
		ids := cellsOf(name)
		if len(ids) == 0 {
			found.missing = append(found.missing, name)
		}
		for _, id := range ids {
			mine[id] = true
			n := len(found.list)
			for _, s := range sum.Scenarios {
				if s.Name+"/"+s.Policy == id {
					found.list = append(found.list, s)
				}
			}
			if len(found.list) == n {
				found.missing = append(found.missing, id)
			}
		}
	}
	for _, s := range sum.Scenarios {
		if !mine[s.Name+"/"+s.Policy] {
			found.others = append(found.others, s)
		}
	}
	return found
}

// cellsOf names the cells of a scenario, or the one cell that name is; none when
// there is no such scenario.
func cellsOf(name string) []string {
	chosen, err := Select(All(Draw{}), []string{name})
	if err != nil {
		return nil
	}
	var ids []string
	for _, s := range chosen {
		for _, c := range s.Cells {
			ids = append(ids, place{scenario: s, cell: c}.id())
		}
	}
	return ids
}

// judge decides the criterion.
func (c Criterion) judge(sum reports.Summary) reports.Criterion {
	cells := c.cells(sum)
	out := reports.Criterion{ID: c.ID, Text: c.Text, Verdict: verify.Pass}
	worsen := func(v verify.Verdict, reason string) {
		if verify.Worse(out.Verdict, v) != out.Verdict {
			out.Verdict, out.Reason = v, reason
		}
	}
	for _, name := range cells.missing {
		worsen(verify.Invalid, "the run holds no cell "+name)
	}
	for _, cell := range cells.list {
		id := cell.Name + "/" + cell.Policy
		out.Cells = append(out.Cells, id)
		out.Seconds += cell.Seconds
		out.Evidence = append(out.Evidence, c.evidence(cell))
		v, why, findings := c.judgeCell(cell)
		worsen(v, why)
		out.Findings = append(out.Findings, findings...)
		for _, name := range c.By {
			if why := notJudged(cell, name); why != "" {
				worsen(verify.Invalid, id+": "+why)
			}
		}
	}
	if c.Everywhere {
		for _, cell := range cells.others {
			for _, f := range cell.Findings {
				if slices.Contains(c.Alone, f.Invariant) {
					worsen(f.Verdict, cell.Name+"/"+cell.Policy+": "+f.Invariant+": "+f.Text)
					out.Findings = append(out.Findings, f)
				}
			}
		}
	}
	if c.Need != nil && len(cells.list) > 0 {
		if missing := c.Need(cells); missing != "" {
			worsen(verify.Invalid, missing)
		}
	}
	if c.RealDelays {
		for _, cell := range cells.list {
			if !slices.Equal(cell.RetryDelays, realDelays()) {
				worsen(verify.SkippedRun, fmt.Sprintf("the delays were %s, and only %s decide it", durations(cell.RetryDelays), durations(realDelays())))
			}
		}
	}
	if len(cells.list) > 0 && len(cells.missing) == 0 {
		out.Figure = c.Figure(cells)
	}
	return out
}

func (c Criterion) evidence(cell reports.Scenario) string {
	file := c.Evidence
	if file == "" {
		file = history.FileName
	}
	return filepath.Join(cell.Dir, file)
}

// judgeCell is what one of the criterion's cells says about it.
func (c Criterion) judgeCell(cell reports.Scenario) (v verify.Verdict, why string, mine []verify.Finding) {
	v = verify.Pass
	all, spoken := verify.Pass, false // of every finding; by an invariant of By
	for _, f := range cell.Findings {
		all = verify.Worse(all, f.Verdict)
		if !c.concerns(cell, f) {
			continue
		}
		mine = append(mine, f)
		// Of the worst, what the criterion is about goes first.
		named := slices.Contains(c.By, f.Invariant)
		if verify.Worse(v, f.Verdict) != v || f.Verdict == v && named && !spoken {
			v, why, spoken = f.Verdict, strings.TrimSpace(f.Invariant+" "+f.Key)+": "+f.Text, named
		}
	}
	// A verdict that no finding explains is everybody's.
	if verify.Worse(all, cell.Verdict) != all && verify.Worse(v, cell.Verdict) != v {
		v, why = cell.Verdict, fmt.Sprintf("cell %s/%s is %s", cell.Name, cell.Policy, cell.Verdict)
	}
	return v, why, mine
}

// concerns reports whether a finding of a cell speaks about this criterion: it
// does unless another criterion of the same cell claims its invariant for itself.
func (c Criterion) concerns(cell reports.Scenario, f verify.Finding) bool {
	if slices.Contains(c.Alone, f.Invariant) {
		return true
	}
	if c.OnlyAlone && f.Verdict == verify.Fail {
		return false
	}
	for _, other := range Criteria() {
		shared := other.Everywhere || slices.ContainsFunc(other.From, func(n string) bool {
			return slices.Contains(cellsOf(n), cell.Name+"/"+cell.Policy)
		})
		if other.ID != c.ID && shared && slices.Contains(other.Alone, f.Invariant) {
			return false
		}
	}
	return true
}

// notJudged says why an invariant decided nothing in a cell; "" if it did.
func notJudged(cell reports.Scenario, name string) string {
	for _, k := range cell.Invariants {
		if k.Name != name {
			continue
		}
		switch {
		case k.Skipped != "":
			return name + " was not judged: " + k.Skipped
		case k.Looked == 0:
			return name + " had nothing to look at"
		}
		return ""
	}
	return name + " was not judged"
}

// durations writes delays as the specification does: 10s, 1m, 5m.
func durations(all []time.Duration) string {
	words := make([]string, len(all))
	for i, d := range all {
		words[i] = d.String()
		for _, end := range []string{"m0s", "h0m"} {
			if strings.HasSuffix(words[i], end) {
				words[i] = words[i][:len(words[i])-2]
			}
		}
	}
	return strings.Join(words, ", ")
}

// JudgeGateAgain judges a finished gate from its evidence; ok is false for a run
// that was no gate. sum is the run's summary, judged anew.
func JudgeGateAgain(dir string, sum reports.Summary) (g reports.Gate, ok bool, err error) {
	before, err := reports.ReadGate(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return g, false, nil
	}
	if err != nil {
		return g, false, err
	}
	criteria, err := ChooseCriteria(Criteria(), before.Only)
	if err != nil {
		return g, false, fmt.Errorf("%s: %w", filepath.Join(dir, reports.GateFile), err)
	}
	commands := map[string]string{}
	for _, c := range before.Criteria {
		commands[c.ID] = c.Command
	}
	g = JudgeGate(sum, criteria, func(ids ...string) string {
		if len(ids) == 1 {
			return commands[ids[0]]
		}
		return before.Command
	})
	g.Only = before.Only
	return g, true, nil
}
