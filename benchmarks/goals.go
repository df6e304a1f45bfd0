package benchmarks

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
)

// The goals, as ratios within one run but for the two that the specification
// gives in absolute terms (AC6, and a rate of marketing mails).
const (
	goalIdleRatio      = 3.0    // idle ticket p50 over the serial floor's
	goalFloodRatio     = 2.0    // ticket p95 under the flood over idle p95
	goalFloodMillis    = 5000.0 // the outer limit of it (AC6)
	goalMailsPerSecond = 1000.0
	goalRawShare       = 0.6 // of what the raw stages' CPU allows together
)

// busyShare of all cores from which on a throughput is bound by them.
const busyShare = 0.85

// goal is one line of the table of goals.
type goal struct {
	what, wanted, seen string
	// by is how far the figure is from the goal.
	by      string
	met     bool
	unknown bool // nothing was measured
	binds   string
}

func (g goal) verdict() string {
	switch {
	case g.unknown:
		return "not measured"
	case g.met:
		return "met"
	default:
		return "**missed**"
	}
}

// atMost judges a figure that should not exceed a limit.
func (g *goal) atMost(v, limit float64) {
	g.met = v <= limit
	g.by = distance(v, limit, "below", "above")
}

func (g *goal) atLeast(v, limit float64) {
	g.met = v >= limit
	g.by = distance(v, limit, "below", "above")
}

func distance(v, limit float64, below, above string) string {
	switch {
	case math.IsInf(v, 1):
		return "some never arrived"
	case math.IsNaN(v):
		return "–"
	case v < limit:
		return fmt.Sprintf("%.0f %% %s", 100*(limit-v)/limit, below)
	default:
		return fmt.Sprintf("%.0f %% %s", 100*(v-limit)/limit, above)
	}
}

func goals(r *Result) []goal {
	return []goal{idleGoal(r), floodGoal(r), floodLimit(r), rateGoal(r), shareGoal(r)}
}

func idleGoal(r *Result) goal {
	g := goal{what: "idle ticket, p50", wanted: fmt.Sprintf("≤ %g × serial floor", goalIdleRatio)}
	if r.Hops == nil || len(r.Hops.Total) == 0 || len(r.Hops.FloorTotal) == 0 {
		g.unknown = true
		return g
	}
	ratio := ratios(r.Hops.Total, r.Hops.FloorTotal, 0.5)
	g.seen = ratio.String() + " ×"
	g.atMost(ratio.Median, goalIdleRatio)
	g.binds = bindsIdle(r.Hops)
	return g
}

// bindsIdle names the steps that cost most beyond their floor.
func bindsIdle(h *Hops) string {
	type excess struct {
		name string
		ms   float64
	}
	var all []excess
	for _, s := range compareSteps(h) {
		all = append(all, excess{s.name, s.system - zeroNaN(s.floor)})
	}
	slices.SortFunc(all, func(a, b excess) int {
		switch {
		case a.ms > b.ms:
			return -1
		case a.ms < b.ms:
			return 1
		}
		return 0
	})
	var words []string
	for _, e := range all[:min(3, len(all))] {
		if e.ms > 0 {
			words = append(words, fmt.Sprintf("%s +%s", e.name, millis(e.ms)))
		}
	}
	if len(words) == 0 {
		return "no step costs more than its floor"
	}
	return "beyond the floor: " + strings.Join(words, ", ")
}

func zeroNaN(v float64) float64 {
	if math.IsNaN(v) {
		return 0
	}
	return v
}

func floodGoal(r *Result) goal {
	g := goal{what: "ticket under the flood, p95", wanted: fmt.Sprintf("≤ %g × idle p95", goalFloodRatio)}
	idle, split := r.Latency.layout(layoutIdle), r.Latency.layout(layoutSplit)
	if idle == nil || split == nil {
		g.unknown = true
		return g
	}
	ratio := ratios(split.accepted(), idle.accepted(), 0.95)
	g.seen = ratio.String() + " ×"
	g.atMost(ratio.Median, goalFloodRatio)
	if !g.met {
		g.binds = bindsFlood(r)
	}
	return g
}

func floodLimit(r *Result) goal {
	g := goal{what: "ticket under the flood, p95 (AC6)", wanted: "< " + millis(goalFloodMillis)}
	split := r.Latency.layout(layoutSplit)
	if split == nil {
		g.unknown = true
		return g
	}
	seen := quantiles(split.sent(), 0.95)
	g.seen = seen.Millis()
	g.atMost(seen.Max, goalFloodMillis)
	return g
}

// bindsFlood names the hops that take longer under the flood than idle, by how
// much their p95 grows, and what the flood uses of the machine.
func bindsFlood(r *Result) string {
	var words []string
	if grew := mostGrown(r.Hops.growth()); grew != "" {
		words = append(words, "hops beyond idle, at p95: "+grew)
	}
	if shared := sharedCores(r); shared != "" {
		words = append(words, shared)
	}
	if len(words) == 0 {
		return "not measured: neither the hops under the flood nor its CPU time"
	}
	return strings.Join(words, "; ")
}

// mostGrown are the three hops that grew most, "" if none did.
func mostGrown(all []grown) string {
	all = slices.Clone(all)
	slices.SortStableFunc(all, func(a, b grown) int { return cmp.Compare(b.by(), a.by()) })
	var words []string
	for _, g := range all[:min(3, len(all))] {
		if g.by() > 0 {
			words = append(words, fmt.Sprintf("%s +%s", g.name, millis(g.by())))
		}
	}
	return strings.Join(words, ", ")
}

// sharedCores says how much of the machine a flood uses.
func sharedCores(r *Result) string {
	if r.Marketing != nil && len(r.Marketing.Repeats) > 0 && r.Marketing.busy(r.Machine.Cores) > busyShare {
		return fmt.Sprintf("the lanes share %d cores with every broker, and the flood uses %.0f %% of them",
			r.Machine.Cores, 100*r.Marketing.busy(r.Machine.Cores))
	}
	return ""
}

func rateGoal(r *Result) goal {
	g := goal{what: "marketing end to end", wanted: fmt.Sprintf("≥ %s mails/s", number(goalMailsPerSecond))}
	if r.Marketing == nil || len(r.Marketing.Repeats) == 0 {
		g.unknown = true
		return g
	}
	rate := spreadOf(r.Marketing.rates())
	g.seen = rate.String() + " mails/s"
	g.atLeast(rate.Median, goalMailsPerSecond)
	g.binds = r.Marketing.binds(r.Machine.Cores)
	return g
}

func shareGoal(r *Result) goal {
	g := goal{what: "marketing against the raw stages together", wanted: fmt.Sprintf("≥ %.0f %%", 100*goalRawShare)}
	if r.Marketing == nil || len(r.Marketing.Repeats) == 0 || len(r.Marketing.Raw) == 0 {
		g.unknown = true
		return g
	}
	allowed := r.Marketing.allowed(r.Machine.Cores)
	share := spreadOf(r.Marketing.rates()).Median / allowed
	g.seen = fmt.Sprintf("%.0f %% of %s mails/s", 100*share, number(allowed))
	g.atLeast(share, goalRawShare)
	g.binds = r.Marketing.bindsShare(r.Machine.Cores)
	return g
}

// rates of the repeats, mails per second.
func (m *Marketing) rates() []float64 {
	var out []float64
	for _, rep := range m.Repeats {
		if rep.Seconds > 0 {
			out = append(out, float64(rep.Delivered)/rep.Seconds)
		}
	}
	return out
}

// cpuPerMail in milliseconds by part, over all repeats.
func (m *Marketing) cpuPerMail() map[string]float64 {
	out, mails := map[string]float64{}, 0
	for _, rep := range m.Repeats {
		mails += rep.Delivered
		for part, s := range rep.CPU {
			out[part] += 1000 * s
		}
	}
	for part := range out {
		out[part] /= float64(max(1, mails))
	}
	return out
}

// busy is the share of all cores that the run used.
func (m *Marketing) busy(cores int) float64 {
	var cpu, wall float64
	for _, rep := range m.Repeats {
		cpu += sumCPU(rep.CPU)
		wall += rep.Seconds
	}
	if wall == 0 {
		return 0
	}
	return cpu / (wall * float64(cores))
}

// rawCPU is the CPU time of one mail over all raw stages, milliseconds by part.
func (m *Marketing) rawCPU() map[string]float64 {
	out := map[string]float64{}
	for _, s := range m.Raw {
		for part, seconds := range s.CPU {
			out[part] += 1000 * seconds / float64(max(1, s.Mails))
		}
	}
	return out
}

// allowed is the rate at which the raw stages together would use all cores.
func (m *Marketing) allowed(cores int) float64 {
	perMail := sumCPU(m.rawCPU())
	if perMail == 0 {
		return math.NaN()
	}
	return 1000 * float64(cores) / perMail
}

func (m *Marketing) binds(cores int) string {
	busy := m.busy(cores)
	part, ms := largest(m.cpuPerMail())
	if busy >= busyShare {
		return fmt.Sprintf("CPU: %.0f %% of all cores in use; most by %s, %s of %s per mail",
			100*busy, part, millis(ms), millis(sumCPU(m.cpuPerMail())))
	}
	if others := m.machineBusy() - busy; others > busyShare-busy {
		return fmt.Sprintf("other programs on the machine: they used %.0f %% of its cores, the system and its parts %.0f %%", 100*others, 100*busy)
	}
	return fmt.Sprintf("waiting, not work: %.0f %% of all cores in use", 100*busy)
}

// machineBusy is the share of all cores that any program used, 0 to 1.
func (m *Marketing) machineBusy() float64 {
	var sum float64
	for _, rep := range m.Repeats {
		sum += rep.MachineBusy / 100
	}
	return sum / float64(max(1, len(m.Repeats)))
}

// bindsShare names the parts that cost most beyond their raw stage.
func (m *Marketing) bindsShare(cores int) string {
	if m.busy(cores) < busyShare {
		return m.binds(cores)
	}
	beyond := m.cpuPerMail()
	for part, ms := range m.rawCPU() {
		beyond[part] -= ms
	}
	part, ms := largest(beyond)
	return fmt.Sprintf("%s costs %s of CPU per mail beyond its raw stage", part, millis(ms))
}

// largest part, the first by name of equals.
func largest(of map[string]float64) (string, float64) {
	var name string
	top := math.Inf(-1)
	for _, part := range sortedKeys(of) {
		if of[part] > top {
			name, top = part, of[part]
		}
	}
	return name, top
}
