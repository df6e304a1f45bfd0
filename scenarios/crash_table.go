package scenarios

import (
	"cmp"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"mailproof/history"
	"mailproof/reports"
	"mailproof/verify"
)

// CrashCell is one cell of the crash table, as a run shows it.
type CrashCell struct {
	Point  CrashPoint
	Policy string
	Act    string // kill, pause
	// Verdict of the cell: what was found of its mails, invalid if the process
	// was not seen at the point.
	Verdict verify.Verdict
	Hits    int // how often the process was struck there
	Batches int // that were sent past it until then
	Mails   int
	Copies  int // that their customers have
	Extra   int // of them beyond the first of each mail
	States  map[string]int
	Witness string
	// Found are the findings of its mails, and why it is invalid.
	Found []string

	Seed    uint64
	Command string // that runs it again
	at      int64
}

// key is the cell's place in the table.
func (c CrashCell) key() string { return c.Policy + " " + faultOf(c.Point, c.Act) }

// Ends are the states that the cell's mails ended in, the most frequent first.
func (c CrashCell) Ends() string {
	names := slices.SortedFunc(maps.Keys(c.States), func(a, b string) int {
		return cmp.Or(cmp.Compare(c.States[b], c.States[a]), strings.Compare(a, b))
	})
	words := make([]string, len(names))
	for i, n := range names {
		words[i] = fmt.Sprintf("%d %s", c.States[n], n)
	}
	return strings.Join(words, ", ")
}

// CrashTable is the cells of one or more runs; of several runs of a cell the
// last counts.
type CrashTable struct {
	cells map[string]CrashCell
	// Runs are the runs that it was made from, in the order of reading.
	Runs []reports.Summary
	// Notes are lines for people, such as what else the machine did.
	Notes []string
	// Loose are findings that name no mail of a cell: they speak against the whole
	// run. Of several runs of a scenario under a policy the last one's count.
	Loose []string
}

// Add judges the run in the folder again from its evidence, and takes its cells.
func (t *CrashTable) Add(dir string) error {
	sum, err := JudgeAgain(dir)
	if err != nil {
		return err
	}
	t.Runs = append(t.Runs, sum)
	for _, sc := range sum.Scenarios {
		if !strings.HasPrefix(sc.Name, "crash-") || sc.Dir == "" {
			continue
		}
		h, err := history.Load(filepath.Join(dir, sc.Dir, history.FileName))
		if err != nil {
			return err
		}
		t.add(h, sc)
	}
	return nil
}

func (t *CrashTable) add(h *history.History, sc reports.Scenario) {
	if t.cells == nil {
		t.cells = map[string]CrashCell{}
	}
	of := sc.Name + "/" + sc.Policy + ": "
	t.Loose = slices.DeleteFunc(t.Loose, func(text string) bool { return strings.HasPrefix(text, of) })
	cells := crashCellsOf(h, sc.Findings)
	owned := map[string]bool{}
	// Evidence that is not whole proves nothing of any cell.
	broken := slices.ContainsFunc(sc.Findings, func(f verify.Finding) bool { return f.Verdict == verify.HarnessError })
	for _, c := range cells {
		if broken {
			c.Verdict = verify.Worse(c.Verdict, verify.HarnessError)
		}
		c.Seed = sc.Seed
		c.Command = crashCommand(c)
		t.cells[c.key()] = c
		for _, text := range c.Found {
			owned[text] = true
		}
	}
	for _, f := range sc.Findings {
		if text := told(f); !owned[text] {
			t.Loose = append(t.Loose, of+text)
		}
	}
}

func told(f verify.Finding) string {
	return strings.TrimSpace(fmt.Sprintf("%s %s %s: %s", f.Verdict, f.Invariant, f.Key, f.Text))
}

// crashCellsOf reads the cells from one history and what was found of it.
func crashCellsOf(h *history.History, findings []verify.Finding) []CrashCell {
	points := map[string]CrashPoint{}
	for _, p := range CrashPoints() {
		for _, act := range []string{actKill, actPause} {
			points[faultOf(p, act)] = p
		}
	}
	var cells []CrashCell
	owner := map[string]int{} // mail → its cell
	for _, f := range h.Faults {
		p, ok := points[f.Name]
		if !ok {
			continue
		}
		c := CrashCell{
			Point: p, Policy: h.Meta.Policy, Act: f.Name[strings.LastIndexByte(f.Name, ' ')+1:], Verdict: verify.Pass,
			Hits: f.Count, Mails: len(f.Keys), Witness: f.Witness, States: map[string]int{}, at: f.Start,
		}
		c.Batches = max(len(f.Keys)/crashBatch, 1)
		if f.Outcome != history.Installed || f.Witness == "" || f.Count == 0 {
			c.Verdict = verify.Invalid
			c.Found = append(c.Found, "the process was not seen there: "+cmp.Or(f.Reason, "no witness"))
		}
		for _, k := range f.Keys {
			owner[k] = len(cells)
		}
		cells = append(cells, c)
	}
	countCopies(h, owner, cells)
	for _, f := range findings {
		i, ok := owner[f.Key]
		if !ok {
			i = slices.IndexFunc(cells, func(c CrashCell) bool { return strings.Contains(f.Text, "fault "+faultOf(c.Point, c.Act)+" ") })
			if i < 0 {
				continue
			}
		}
		cells[i].Verdict = verify.Worse(cells[i].Verdict, f.Verdict)
		cells[i].Found = append(cells[i].Found, told(f))
	}
	return cells
}

func countCopies(h *history.History, owner map[string]int, cells []CrashCell) {
	copies := map[string]int{}
	for _, a := range h.Attempts {
		if i, ok := owner[a.Key]; ok && a.Stored {
			cells[i].Copies++
			if copies[a.Key]++; copies[a.Key] > 1 {
				cells[i].Extra++
			}
		}
	}
	if h.Final == nil {
		return
	}
	for _, row := range h.Final.Rows {
		if i, ok := owner[row.Key]; ok {
			cells[i].States[row.State]++
		}
	}
}

// Cells in the order of the table.
func (t *CrashTable) Cells() []CrashCell {
	var all []CrashCell
	for _, p := range CrashPoints() {
		for _, act := range []string{actKill, actPause} {
			for _, policy := range crashPolicies {
				if c, ok := t.cells[policy+" "+faultOf(p, act)]; ok {
					all = append(all, c)
				}
			}
		}
	}
	return all
}

var crashPolicies = []string{"resend", "hold", "same-key"}

// Has reports whether the table holds a green cell there: what a resumed run
// need not make again.
func (t *CrashTable) Has(policy string, p CrashPoint, act string) bool {
	c, ok := t.cells[policy+" "+faultOf(p, act)]
	return ok && c.Verdict == verify.Pass
}

// Verdict of the whole: a cell that was not run makes it invalid.
func (t *CrashTable) Verdict() verify.Verdict {
	worst := verify.Pass
	for _, p := range CrashPoints() {
		for _, act := range []string{actKill, actPause} {
			for _, policy := range crashPolicies {
				if !p.under(policy) {
					continue
				}
				c, ok := t.cells[policy+" "+faultOf(p, act)]
				if !ok {
					c.Verdict = verify.Invalid
				}
				worst = verify.Worse(worst, c.Verdict)
			}
		}
	}
	for range t.Loose {
		worst = verify.Worse(worst, verify.Fail)
	}
	return worst
}

// Markdown is the table for people: a summary, the matrix, and how each cell was
// reached.
func (t *CrashTable) Markdown() string {
	cells := t.Cells()
	var b strings.Builder
	b.WriteString("# The crash table\n\n" + crashIntro + "\n")
	t.writeSummary(&b, cells)
	t.writeMatrix(&b, cells)
	t.writeElsewhere(&b)
	t.writeFound(&b, cells)
	writeReached(&b, cells)
	return b.String()
}

const crashIntro = `Every boundary between two steps of the pipeline, and what becomes of the mails
when a process is lost there. Written by ` + "`make crash-table`" + `, not by hand.

- **kill**: the process dies by SIGKILL at the boundary and is started again.
- **pause**: the process is stopped as a whole (SIGSTOP) at the boundary until its
  lease, its database session or its group membership is over and another of the
  same kind has taken its place, and is then continued. It must do no harm.

Two bookingd and two notifyd run. Most boundaries are crash points of a build with
the tag ` + "`failpoint`" + `; the release build does not hold their names (tested). The stages
of a mail session are held by the mail server. Each cell is a batch of six bookings
or more, sent until the chosen process had come by: a cell whose process was not
*seen* at the boundary (it tells before it acts; its exit status is checked) is
invalid. Beside the batch the whole run is judged by every invariant of the
scenarios: nothing lost, copies within the policy's guarantee and each extra one
justified, every row's end true, the booking service's word the same, queues empty,
dead letters as many as dead mails.

In a cell: the verdict, the mails, **+n** copies beyond the first of each, and what
is not SENT.
`

func (t *CrashTable) writeSummary(b *strings.Builder, cells []CrashCell) {
	planned, green, hits, mails, extra := 0, 0, 0, 0, 0
	for _, p := range CrashPoints() {
		for _, policy := range crashPolicies {
			if p.under(policy) {
				planned += 2
			}
		}
	}
	for _, c := range cells {
		if c.Verdict == verify.Pass {
			green++
		}
		hits, mails, extra = hits+c.Hits, mails+c.Mails, extra+c.Extra
	}
	fmt.Fprintf(b, "**%d of %d cells green** (%d boundaries); processes were struck %d times at their boundary, with %d mails on their way; %d extra copies, each justified where the cell is green.\n\n",
		green, planned, len(CrashPoints()), hits, mails, extra)
	for _, r := range t.Runs {
		fmt.Fprintf(b, "- run of %.0f s, seed %d: Postgres %s, RabbitMQ %s ×3, Kafka %s (%s); `%s`\n",
			r.Seconds, r.Seed, r.Versions.Postgres, r.Versions.RabbitMQ, r.Versions.Kafka, r.Versions.KafkaKind, plainCommand(r.Command))
	}
	for _, note := range t.Notes {
		b.WriteString("- " + note + "\n")
	}
	b.WriteString("\n")
}

// plainCommand leaves out where the program lay.
func plainCommand(command string) string {
	program, rest, _ := strings.Cut(command, " ")
	return "bin/" + filepath.Base(program) + " " + rest
}

func (t *CrashTable) writeMatrix(b *strings.Builder, cells []CrashCell) {
	at := map[string]CrashCell{}
	for _, c := range cells {
		at[c.key()] = c
	}
	group, begun := "", map[string]bool{}
	for _, p := range CrashPoints() {
		if p.Group != group {
			group = p.Group
			more := ""
			if begun[group] {
				more = ", continued"
			}
			begun[group] = true
			fmt.Fprintf(b, "## %s%s\n\n| boundary | between | resend kill | resend pause | hold kill | hold pause | same-key kill | same-key pause |\n|---|---|---|---|---|---|---|---|\n", groupTitle(group), more)
		}
		fmt.Fprintf(b, "| `%s` | %s |", p.ID(), p.Between)
		for _, policy := range crashPolicies {
			for _, act := range []string{actKill, actPause} {
				c, ran := at[policy+" "+faultOf(p, act)]
				switch {
				case !p.under(policy):
					b.WriteString(" |")
				case !ran:
					b.WriteString(" *not run* |")
				default:
					b.WriteString(" " + c.short() + " |")
				}
			}
		}
		b.WriteString("\n")
		if last(p) {
			b.WriteString("\n")
		}
	}
}

// last reports the last boundary of its group.
func last(p CrashPoint) bool {
	all := CrashPoints()
	i := slices.IndexFunc(all, func(q CrashPoint) bool { return q.ID() == p.ID() })
	return i+1 == len(all) || all[i+1].Group != p.Group
}

func groupTitle(group string) string {
	for _, s := range crashes(Draw{}) {
		if s.Name == "crash-"+group {
			return s.Name + ": " + strings.TrimPrefix(s.Title, crashTitle)
		}
	}
	return group
}

// short is the cell in the matrix.
func (c CrashCell) short() string {
	words := []string{string(c.Verdict)}
	if c.Mails > 0 {
		words = append(words, fmt.Sprint(c.Mails))
	}
	if c.Extra > 0 {
		words = append(words, fmt.Sprintf("**+%d**", c.Extra))
	}
	for _, end := range slices.Sorted(maps.Keys(c.States)) {
		if end != "sent" {
			words = append(words, fmt.Sprintf("%d %s", c.States[end], strings.ToUpper(end)))
		}
	}
	return strings.Join(words, ", ")
}

func (t *CrashTable) writeElsewhere(b *strings.Builder) {
	others := elsewhere()
	if len(others) == 0 {
		return
	}
	b.WriteString("## Crash points that are not in the matrix\n\n")
	for _, name := range slices.Sorted(maps.Keys(others)) {
		fmt.Fprintf(b, "- `%s`: %s\n", name, others[name])
	}
	b.WriteString("\n")
}

func (t *CrashTable) writeFound(b *strings.Builder, cells []CrashCell) {
	if len(t.Loose) > 0 {
		b.WriteString("## Found, of no cell alone\n\n")
		for _, text := range t.Loose {
			b.WriteString("- " + text + "\n")
		}
		b.WriteString("\n")
	}
	red := slices.DeleteFunc(slices.Clone(cells), func(c CrashCell) bool { return c.Verdict == verify.Pass })
	if len(red) == 0 {
		return
	}
	b.WriteString("## Cells that are not green\n\n")
	for _, c := range red {
		fmt.Fprintf(b, "- `%s` %s under %s: %s\n", c.Point.ID(), c.Act, c.Policy, c.Verdict)
		for _, text := range c.Found {
			b.WriteString("  - " + strings.ReplaceAll(text, "\n", " ") + "\n")
		}
	}
	b.WriteString("\n")
}

func writeReached(b *strings.Builder, cells []CrashCell) {
	b.WriteString("## How each cell was reached\n\nEach can be run alone: `" + crashCommand(CrashCell{}) + "`.\n\n" +
		"| boundary | act | policy | seed | struck | mails | copies | ended | witness |\n|---|---|---|--:|--:|--:|--:|---|---|\n")
	for _, c := range cells {
		fmt.Fprintf(b, "| `%s` | %s | %s | %d | %d | %d | %d | %s | %s |\n",
			c.Point.ID(), c.Act, c.Policy, c.Seed, c.Hits, c.Mails, c.Copies, c.Ends(), strings.ReplaceAll(c.Witness, "|", "/"))
	}
}

// crashCommand runs a cell again; of the zero cell it is the pattern.
func crashCommand(c CrashCell) string {
	point, policy, act, seed := "BOUNDARY", "POLICY", "ACT", "SEED"
	if c.Act != "" {
		point, policy, act, seed = c.Point.ID(), c.Policy, c.Act, fmt.Sprint(c.Seed)
	}
	return fmt.Sprintf("bin/mailproof crash-table --point %s --policy %s --act %s --seed %s", point, policy, act, seed)
}
