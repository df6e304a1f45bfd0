package benchmarks

import (
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
)

// WriteDocument writes the Markdown at path and the plots beside it, from the
// result alone. The notes of a person, notes.md in the same folder, are put at
// its end.
func WriteDocument(r *Result, path string) error {
	notes, err := readNotes(path)
	if err != nil {
		return fmt.Errorf("benchmark document: %w", err)
	}
	base := strings.TrimSuffix(path, filepath.Ext(path))
	drawn := map[string]string{} // plot → file name
	for _, p := range plots() {
		svg, err := p.draw(r)
		if err != nil {
			return fmt.Errorf("plot %s: %w", p.name, err)
		}
		if svg == nil {
			continue
		}
		file := base + "-" + p.name + ".svg"
		if err := writeFile(file, svg); err != nil {
			return fmt.Errorf("benchmark document: %w", err)
		}
		drawn[p.name] = filepath.Base(file)
	}
	if err := writeFile(path, []byte(Markdown(r, notes, drawn))); err != nil {
		return fmt.Errorf("benchmark document: %w", err)
	}
	return nil
}

// Markdown is the document. drawn names the file of each plot that exists.
func Markdown(r *Result, notes string, drawn map[string]string) string {
	d := &document{Result: r, drawn: drawn}
	for _, section := range []func(){
		d.head, d.goals, d.hops, d.floodedHops, d.latency, d.queues, d.marketing, d.dead, d.recovery, d.repeat, d.notClaimed,
	} {
		section()
	}
	if notes = strings.TrimSpace(notes); notes != "" {
		d.heading("Notes")
		d.line("%s", notes)
	}
	return strings.TrimSpace(d.text.String()) + "\n"
}

type document struct {
	*Result
	drawn map[string]string
	text  strings.Builder
}

func (d *document) line(format string, args ...any) { fmt.Fprintf(&d.text, format+"\n\n", args...) }

func (d *document) heading(name string) { d.line("## %s", name) }

// rows writes a table.
func (d *document) rows(head []any, rows [][]any) {
	t := table.NewWriter()
	t.AppendHeader(table.Row(head))
	for _, r := range rows {
		t.AppendRow(table.Row(r))
	}
	d.line("%s", t.RenderMarkdown())
}

func (d *document) plot(name, alt string) {
	if file, ok := d.drawn[name]; ok {
		d.line("![%s](%s)", alt, file)
	}
}

// absent says why a section has nothing to show.
func (d *document) absent(part string) {
	for _, p := range d.Parts {
		switch {
		case p.Name != part:
		case p.Skipped != "":
			d.line("Not measured: %s.", p.Skipped)
			return
		case p.Error != "":
			d.line("Not measured: %s.", p.Error)
			return
		}
	}
	d.line("Not measured in this run.")
}

// cut says that a part ended early, above what it had measured until then.
func (d *document) cut(part string) {
	for _, p := range d.Parts {
		if p.Name == part && p.Error != "" {
			d.line("> This part did not end well, and what follows is what it had measured until then: %s", p.Error)
		}
	}
}

func (d *document) head() {
	d.line("# M6: the notification system, measured")
	d.line("<!-- Written by \"mailproof bench\" from the JSON beside it. Do not edit: what a person has to say belongs in notes.md. -->")
	m := d.Machine
	d.line("Every figure of the system stands beside its raw floor: the same work done by bare clients on the same Postgres, "+
		"RabbitMQ and Kafka in the same run. Ratios are the result; milliseconds are those of one machine with %d cores on which "+
		"all brokers, the system, the mail server and the load ran together. Where a figure was repeated it is the median, with "+
		"the smallest and the largest repeat in parentheses.", m.Cores)
	d.line("Measured %s in %s, seed %d%s. Load average before anything was started %.2f, %.0f %% of the cores in use.",
		d.Run.Began.Format("2006-01-02 15:04 UTC"), time.Duration(d.Run.Seconds*float64(time.Second)).Round(time.Second), d.Run.Seed,
		map[bool]string{true: ", the quick size", false: ""}[d.Run.Quick], m.LoadAtStart, m.BusyPercent)
	if m.Busy() {
		d.line("> **The machine was not idle**: %.0f %% of its cores were in use before the run began. Ratios within the run are "+
			"still worth a look, absolute figures are not.", m.BusyPercent)
	}
	if d.Run.Versions.KafkaKind == "kfake" {
		d.line("> **Kafka was the in-process stand-in** (kfake): what is said of Kafka is not said of Apache Kafka.")
	}
	if d.Run.Interrupted {
		d.line("> **The run was interrupted**: what it had not measured yet is missing.")
	}
}

func (d *document) goals() {
	d.heading("Goals")
	var rows [][]any
	for _, g := range goals(d.Result) {
		rows = append(rows, []any{g.what, g.wanted, g.seen, g.verdict(), g.by, g.binds})
	}
	d.rows([]any{"what", "goal", "measured", "", "off the goal by", "what binds it"}, rows)
}

// step compares one step of the floor with the hops that do the same work.
type step struct {
	name, hops    string
	system, floor float64 // p50, ms; NaN where there is none
}

// compareSteps in the order of the way.
func compareSteps(h *Hops) []step {
	var out []step
	for _, s := range h.Hops {
		p50 := quantiles(s.Repeats, 0.5).Median
		if n := len(out); s.Floor != "" && n > 0 && out[n-1].name == s.Floor {
			out[n-1].system += p50
			out[n-1].hops += " + " + s.Name
			continue
		}
		next := step{name: s.Floor, hops: s.Name, system: p50, floor: math.NaN()}
		if s.Floor == "" {
			next.name = s.Name
		}
		for _, f := range h.Floor {
			if f.Name == s.Floor {
				next.floor = quantiles(f.Repeats, 0.5).Median
			}
		}
		out = append(out, next)
	}
	return out
}

func (d *document) hops() {
	d.heading("An idle ticket, hop by hop")
	h := d.Hops
	if h == nil || len(h.Total) == 0 {
		d.absent("hops")
		return
	}
	d.cut("hops")
	d.line("%d tickets in %d repeats, Poisson arrivals at %g per second, nothing else to do. From the intended time of the "+
		"confirmation until SENT is committed: p50 %s, p95 %s. The serial floor, the same durable round trips done by bare clients one "+
		"after the other at the same arrivals: p50 %s, p95 %s. **Ratio of the medians: %s.**",
		pool(h.Total).Len(), len(h.Total), h.PerSecond, quantiles(h.Total, 0.5).Millis(), quantiles(h.Total, 0.95).Millis(),
		quantiles(h.FloorTotal, 0.5).Millis(), quantiles(h.FloorTotal, 0.95).Millis(), ratios(h.Total, h.FloorTotal, 0.5))
	d.plot("hops", "Median of each hop beside the serial floor's step")
	var rows [][]any
	for _, s := range h.Hops {
		rows = append(rows, []any{s.Name, quantiles(s.Repeats, 0.5).Millis(), quantiles(s.Repeats, 0.95).Millis(), s.From, s.To, dash(s.Floor)})
	}
	d.rows([]any{"hop", "p50", "p95", "from", "to", "floor"}, rows)
	d.line("The hops lie end to end. A commit record is written before the log is flushed, so the flush counts to the hop behind " +
		"it; commit times, columns, record timestamps and the ledger are put on one clock (CLOCK_MONOTONIC_RAW) by pairs of both clocks " +
		"read before and after. No ticket waits for these:")
	rows = nil
	for _, s := range h.Beside {
		rows = append(rows, []any{s.Name, quantiles(s.Repeats, 0.5).Millis(), quantiles(s.Repeats, 0.95).Millis(), s.From, s.To})
	}
	d.rows([]any{"beside", "p50", "p95", "from", "to"}, rows)
	rows = nil
	for _, s := range h.Floor {
		rows = append(rows, []any{s.Name, quantiles(s.Repeats, 0.5).Millis(), quantiles(s.Repeats, 0.95).Millis(), s.To})
	}
	d.rows([]any{"serial floor", "p50", "p95", "what is done"}, rows)
	rows = nil
	for _, s := range compareSteps(h) {
		rows = append(rows, []any{s.name, s.hops, millis(s.system), millis(s.floor), number(s.system / s.floor)})
	}
	d.rows([]any{"step", "hops", "system p50", "floor p50", "ratio"}, rows)
	if h.Unplaced > 0 {
		d.line("%d tickets lacked the evidence of a hop; they count in the total only.", h.Unplaced)
	}
}

// grown is what one hop takes longer under the flood.
type grown struct {
	name                             string
	idle50, flood50, idle95, flood95 float64 // ms
}

// by is the growth of the hop's p95, ms.
func (g grown) by() float64 { return g.flood95 - g.idle95 }

// growth of each hop, in the order of the way; nil where one of the two was not
// measured.
func (h *Hops) growth() []grown {
	if h == nil || h.Flooded == nil || len(h.Total) == 0 || len(h.Flooded.Total) == 0 || len(h.Hops) != len(h.Flooded.Hops) {
		return nil
	}
	out := make([]grown, len(h.Hops))
	for i, s := range h.Hops {
		flooded := h.Flooded.Hops[i].Repeats
		out[i] = grown{
			name: s.Name, idle50: quantiles(s.Repeats, 0.5).Median, idle95: quantiles(s.Repeats, 0.95).Median,
			flood50: quantiles(flooded, 0.5).Median, flood95: quantiles(flooded, 0.95).Median,
		}
	}
	return out
}

func (d *document) floodedHops() {
	all := d.Hops.growth()
	if all == nil {
		return // the section before says why there are no hops
	}
	d.heading("A ticket under the flood, hop by hop")
	h, f := d.Hops, d.Hops.Flooded
	d.line("%d tickets in %d repeats through the layout that ships, %d marketing mails queued before the first of them, %s mails/s delivered "+
		"meanwhile; the same boundaries as above. From the intended time of the confirmation until SENT is committed: p50 %s, p95 %s; "+
		"idle %s and %s. The write-ahead log is read meanwhile, which costs the flood some CPU time.",
		pool(f.Total).Len(), len(f.Total), f.Flood, spreadOf(f.MarketingPerSecond), quantiles(f.Total, 0.5).Millis(), quantiles(f.Total, 0.95).Millis(),
		quantiles(h.Total, 0.5).Millis(), quantiles(h.Total, 0.95).Millis())
	d.plot("growth", "p95 of each hop, idle and under the flood")
	var rows [][]any
	for _, g := range all {
		rows = append(rows, []any{
			g.name, millis(g.idle50), millis(g.flood50), millis(g.idle95), millis(g.flood95), signedMillis(g.by()), times(g.flood95 / g.idle95),
		})
	}
	d.rows([]any{"hop", "idle p50", "flood p50", "idle p95", "flood p95", "p95 grows by", "p95 ratio"}, rows)
	d.line("The p95 of the hops do not add up to that of the whole way: they are not those of the same tickets.")
	if f.Unplaced > 0 {
		d.line("%d tickets lacked the evidence of a hop; they count in the total only.", f.Unplaced)
	}
}

// signedMillis writes a difference.
func signedMillis(ms float64) string {
	if ms < 0 {
		return "−" + millis(-ms)
	}
	return "+" + millis(ms)
}

func dash(s string) string {
	if s == "" {
		return "–"
	}
	return s
}

func (d *document) latency() {
	d.heading("Tickets while marketing floods")
	l := d.Latency
	if l == nil || len(l.Layouts) == 0 {
		d.absent("latency")
		return
	}
	d.cut("latency")
	d.line("Poisson arrivals at %g tickets per second; %d marketing mails are queued before the first of them, except where idle. "+
		"*accepted*: from the intended time of the confirmation until the mail server kept the mail (its ledger); *SENT*: until the row "+
		"says so (column sent_at). A ticket that did not arrive within the bound counts as ∞.", l.PerSecond, l.Flood)
	quick, slow := l.byServer()
	d.layouts(quick)
	d.plot("latency", "Share of tickets accepted within a time, by layout")
	d.plot("flood", "Marketing mails that wait, and ticket latency, over time")
	if len(slow) == 0 {
		return
	}
	d.line("### The same with a mail server that takes %s for each mail", millis(float64(slow[0].MailMillis)))
	d.line("Above the mail server answers at once: a connection is free again before many wait for it, and one pool looks little worse than two. Here %d marketing "+
		"mails are at work side by side in every layout, %d are queued, and the cores are not what binds. With one pool those %d stand in "+
		"line for the connections that tickets need, and a ticket stands behind them; with a pool for each lane (M6-17) a ticket finds a "+
		"connection free.", l.SlowParallel, l.SlowFlood, l.SlowParallel)
	d.layouts(slow)
	d.plot("slow", "Share of tickets accepted within a time where the mail server takes time, by layout")
}

// layouts writes the tables of some of them.
func (d *document) layouts(some []Layout) {
	var rows, made [][]any
	for _, lay := range some {
		for _, end := range []struct {
			name    string
			repeats []Samples
		}{{"accepted", lay.accepted()}, {"SENT", lay.sent()}} {
			all := pool(end.repeats)
			rows = append(rows, []any{
				lay.Title, end.name, fmt.Sprintf("%d in %d", all.Len(), len(end.repeats)),
				quantiles(end.repeats, 0.5).Millis(), quantiles(end.repeats, 0.95).Millis(), quantiles(end.repeats, 0.99).Millis(),
				millis(all.Quantile(1)), d.againstIdle(lay, end.name),
			})
		}
		if lay.idle() {
			continue
		}
		var rate []float64
		notMade := 0
		for _, rep := range lay.Repeats {
			rate = append(rate, rep.MarketingPerSecond)
			notMade += rep.NotMade
		}
		made = append(made, []any{lay.Title, spreadOf(rate).String(), notMade})
	}
	d.rows([]any{"layout", "until", "tickets, repeats", "p50", "p95", "p99", "max", "p95 against idle"}, rows)
	d.rows([]any{"layout", "marketing mails/s meanwhile", "arrivals not made"}, made)
}

// againstIdle is the ratio to the idle system beside the same mail server, in the
// same run.
func (d *document) againstIdle(lay Layout, end string) string {
	idle := d.Latency.idleOf(lay)
	if idle == nil || lay.idle() {
		return "–"
	}
	if end == "accepted" {
		return times(quantiles(lay.accepted(), 0.95).Median / quantiles(idle.accepted(), 0.95).Median)
	}
	return times(quantiles(lay.sent(), 0.95).Median / quantiles(idle.sent(), 0.95).Median)
}

func times(v float64) string { return number(v) + " ×" }

func (d *document) queues() {
	d.heading("Throughput of one queue")
	q := d.Queues
	if q == nil || len(q.Cells) == 0 {
		d.absent("queues")
		return
	}
	d.cut("queues")
	d.line("One quorum queue on three nodes, filled beforehand. *Bare*: consumers that ack each message and do nothing else. " +
		"*Worker*: the marketing lane of notifyd with these settings, which for each message claims the row, sends a mail and settles; as many mails at work side by side as it has unless told " +
		"otherwise, at most the prefetch of each consumer.")
	var rows [][]any
	for _, c := range q.Cells {
		bare, worker := spreadOf(c.Bare), spreadOf(c.Worker)
		rows = append(rows, []any{c.Prefetch, c.Consumers, bare.String(), worker.String(), share(worker.Median / bare.Median)})
	}
	d.rows([]any{"prefetch", "consumers", "bare, messages/s", "worker, mails/s", "worker of bare"}, rows)
	d.plot("queues", "Throughput against prefetch")
}

func share(v float64) string {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return "–"
	}
	return fmt.Sprintf("%.0f %%", 100*v)
}

func (d *document) marketing() {
	d.heading("Marketing, end to end")
	m := d.Marketing
	if m == nil || len(m.Repeats) == 0 {
		d.absent("marketing")
		return
	}
	d.cut("marketing")
	var accept []float64
	for _, rep := range m.Repeats {
		accept = append(accept, rep.AcceptSeconds)
	}
	d.line("%d mails in one campaign, without the token bucket, from the call to the last mail at the mail server: %s mails/s; the system had taken all of "+
		"them over after %s s. The system and its parts used %.0f %% of all cores, all programs together %.0f %%.",
		m.Mails, spreadOf(m.rates()), spreadOf(accept), 100*m.busy(d.Machine.Cores), 100*m.machineBusy())
	system, raw := m.cpuPerMail(), m.rawCPU()
	both := maps.Clone(system)
	maps.Copy(both, raw)
	var rows [][]any
	for _, part := range sortedKeys(both) {
		rows = append(rows, []any{part, millis(of(system, part)), millis(of(raw, part))})
	}
	rows = append(rows, []any{"together", millis(sumCPU(system)), millis(sumCPU(raw))})
	d.rows([]any{"CPU time per mail", "the system", "raw stages"}, rows)
	if len(m.Raw) == 0 {
		return
	}
	d.line("The raw stages are what a mail cannot do without, each done alone by bare clients in batches; from their CPU time %d cores "+
		"allow **%s mails/s** together, of which the system reaches %s.", d.Machine.Cores, number(m.allowed(d.Machine.Cores)),
		share(spreadOf(m.rates()).Median/m.allowed(d.Machine.Cores)))
	rows = nil
	for _, s := range m.Raw {
		rows = append(rows, []any{s.Name, s.What, number(float64(s.Mails) / s.Seconds), millis(1000 * sumCPU(s.CPU) / float64(max(1, s.Mails)))})
	}
	d.rows([]any{"raw stage", "what is done", "alone, per second", "CPU per mail"}, rows)
}

func of(m map[string]float64, part string) float64 {
	if v, ok := m[part]; ok {
		return v
	}
	return math.NaN()
}

func (d *document) dead() {
	d.heading("A mail server that refuses everything")
	x := d.Dead
	if x == nil || x.Mails == 0 {
		d.absent("dead")
		return
	}
	d.cut("dead")
	var sum int64
	var names []string
	for _, ms := range x.DelaysMillis {
		sum += ms
		names = append(names, millis(float64(ms)))
	}
	d.line("%d tickets while every RCPT is answered 451; delays %s, so the last try comes %s after the first at the earliest.",
		x.Mails, strings.Join(names, ", "), millis(float64(sum)))
	d.rows([]any{"what", "seen", "floor"}, [][]any{
		{"first error → dead letter confirmed, p50", millis(x.ToDLQ.Quantile(0.5)), millis(float64(sum))},
		{"the same, p95", millis(x.ToDLQ.Quantile(0.95)), millis(float64(sum))},
		{"ratio of the p50 to the sum of delays", number(x.ToDLQ.Quantile(0.5) / float64(sum)), "1"},
		{"dead letters", x.DeadLetters, x.Mails},
		{"tries per mail", number(float64(x.Tries) / float64(x.Mails)), len(x.DelaysMillis) + 1},
		{"broker redeliveries per mail", number(x.Redeliveries / float64(x.Mails)), "0"},
		{"CPU of notifyd, % of one core", number(x.DownCPU), number(x.IdleCPU) + " idle"},
	})
}

func (d *document) recovery() {
	d.heading("Recovery")
	x := d.Recovery
	if x == nil || len(x.Gaps) == 0 {
		d.absent("recovery")
		return
	}
	d.cut("recovery")
	d.line("From the saved evidence of the chaos runs in %s: the longest time without a delivery while confirmed mail waited, of all "+
		"that touch the stretch in which the fault was in place. The floor is the longest such gap of the same cell before any fault. "+
		"Mail that was never delivered (DEAD, UNKNOWN) waits for nothing here; faults in place at the same time share their gap.", x.Source)
	var rows [][]any
	for _, g := range x.Gaps {
		rows = append(rows, []any{g.Scenario + "/" + g.Policy, g.Fault, g.Strikes, millis(g.FaultMillis), millis(g.BaselineMillis), g.Delivered})
	}
	d.rows([]any{"cell", "fault", "strikes", "longest gap", "before any fault", "delivered"}, rows)
}

func (d *document) repeat() {
	d.heading("Machine, versions, and how to repeat")
	m, v := d.Machine, d.Run.Versions
	d.rows([]any{"", ""}, [][]any{
		{"processor", fmt.Sprintf("%s, %d cores", m.CPU, m.Cores)},
		{"memory", fmt.Sprintf("%.1f GiB", float64(m.MemoryBytes)/(1<<30))},
		{"system", m.System + ", " + m.Kernel},
		{"disk", fmt.Sprintf("%s; 8 KiB write + fdatasync p50 %s, p95 %s", m.Filesystem, millis(m.Fsync.Quantile(0.5)), millis(m.Fsync.Quantile(0.95)))},
		{"Postgres", v.Postgres},
		{"RabbitMQ", v.RabbitMQ + ", 3 nodes"},
		{"Kafka", fmt.Sprintf("%s (%s)", v.Kafka, v.KafkaKind)},
		{"mailproof", d.Run.Revision},
		{"how often each was measured", d.Result.repeated()},
		{"the same arrivals again", "`" + d.Run.Command + "`"},
		{"this document from its JSON", "`mailproof bench --render`"},
	})
	var rows [][]any
	for _, p := range d.Parts {
		outcome := "measured"
		switch {
		case p.Skipped != "":
			outcome = "skipped: " + p.Skipped
		case p.Error != "":
			outcome = "failed: " + p.Error
		}
		rows = append(rows, []any{p.Name, p.Title, fmt.Sprintf("%.0f s", p.Seconds), expected(p), fmt.Sprintf("%.2f", p.Load), outcome})
	}
	d.rows([]any{"part", "what", "took", "expected on two idle cores", "load average at its start", ""}, rows)
}

// repeated counts the measurements of each kind.
func (r *Result) repeated() string {
	var words []string
	count := func(n int, what string) {
		if n > 0 {
			words = append(words, fmt.Sprintf("%s %d ×", what, n))
		}
	}
	if h := r.Hops; h != nil {
		count(len(h.Total), "hops and serial floor")
		if h.Flooded != nil {
			count(len(h.Flooded.Total), "hops under the flood")
		}
	}
	if r.Latency != nil {
		atOnce, inTime := r.Latency.byServer()
		for _, lay := range atOnce {
			count(len(lay.Repeats), layoutLabel(lay.Name))
		}
		for _, lay := range inTime {
			count(len(lay.Repeats), layoutLabel(lay.Name)+" beside the slow server")
		}
	}
	if r.Marketing != nil {
		count(len(r.Marketing.Repeats), "campaign")
	}
	if r.Queues != nil && len(r.Queues.Cells) > 0 {
		count(len(r.Queues.Cells[0].Bare), "bare queue")
		count(len(r.Queues.Cells[0].Worker), "queue with notifyd")
	}
	return dash(strings.Join(words, "; "))
}

func expected(p PartOutcome) string {
	if p.Expected == 0 {
		return "–"
	}
	return fmt.Sprintf("%.0f s", p.Expected)
}

func (d *document) notClaimed() {
	d.heading("What is not claimed")
	for _, s := range []string{
		"That these milliseconds hold elsewhere. One machine, one disk, loopback instead of a network, three broker nodes that share its cores: ratios travel better than times, and not all of them do.",
		"Anything about a real provider: the mail server is a fake that answers at once, or after a fixed time where that is said.",
		"A limit of Postgres, RabbitMQ or Kafka: they run with the settings of a test, next to their clients.",
		"Tails beyond what the number of samples can show: with n tickets, a p99 rests on n/100 of them.",
		"Durability under power loss: what fdatasync promises here is what the disk under this machine keeps.",
	} {
		fmt.Fprintf(&d.text, "- %s\n", s)
	}
	d.text.WriteString("\n")
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
