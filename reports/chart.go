package reports

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"mailproof/history"
)

// The chart's geometry, in the units of its view box, which is 960 wide. Below
// the axis each fault has a lane.
const (
	plotLeft   = 58.0
	plotRight  = 948.0
	plotBottom = 236.0
	firstLane  = 264.0
	laneHeight = 18.0
	// lossLane is where mails without a copy are drawn: their latency is
	// infinite.
	lossLane = 40.0
	// labelWidth is about what a phase's name needs.
	labelWidth = 52.0
)

// chart is the latency of every mail over the time of its confirmation, drawn
// as inline SVG by the page.
type chart struct {
	Drawn      bool // false where there is nothing to draw
	Height     float64
	Delivered  string // path of dots: one copy
	Doubled    string // more than one copy
	Missing    string // crosses in the top lane: no copy
	Bands      []band // faults in place
	Phases     []tick
	X, Y       []tick
	Kills      []float64 // x of each process that was killed
	Histogram  []bar
	HistX      []tick
	Alt        string // what a reader who cannot see it is told
	HasMissing bool
	HasDoubled bool
}

type band struct {
	Label string
	X, W  float64
	Y     float64 // of its lane
	TextX float64
	Left  bool // the label stands left of the bar, for want of room
}

type tick struct {
	Label string
	At    float64
}

type bar struct {
	X, Y, W, H float64
	Label      string
}

func drawChart(h *history.History, all []mailLife) chart {
	if len(all) == 0 || len(h.Phases) == 0 {
		return chart{}
	}
	start, end := h.Phases[0].At, h.End
	x := func(t int64) float64 {
		share := float64(t-start) / float64(max(1, end-start))
		return plotLeft + (plotRight-plotLeft)*min(1, max(0, share))
	}
	lo, hi := yRange(all)
	y := func(ms float64) float64 {
		share := (math.Log10(max(ms, lo)) - math.Log10(lo)) / (math.Log10(hi) - math.Log10(lo))
		return plotBottom - (plotBottom-lossLane-18)*min(1, share)
	}
	c := chart{Drawn: true, X: timeTicks(end-start, x, start), Y: latencyTicks(lo, hi, y)}
	c.drawMails(all, x, y)
	c.drawBands(h, x)
	for i, p := range h.Phases {
		at := x(p.At)
		// A phase too short for its name (start, heal) goes without.
		if i+1 < len(h.Phases) && x(h.Phases[i+1].At)-at < labelWidth {
			continue
		}
		c.Phases = append(c.Phases, tick{p.Name, round1(at)})
	}
	for _, p := range h.Processes {
		if p.Event == "killed" {
			c.Kills = append(c.Kills, round1(x(p.At)))
		}
	}
	c.Histogram = histogram(all, lo, hi)
	for v := lo; v <= hi*1.0001; v *= 10 {
		share := math.Log10(v/lo) / math.Log10(hi/lo)
		c.HistX = append(c.HistX, tick{milliseconds(v), round1(plotLeft + (plotRight-plotLeft)*share)})
	}
	c.Alt = fmt.Sprintf("Latency of %d mails over the time of their confirmation, from %s to %s.", len(all), milliseconds(lo), milliseconds(hi))
	return c
}

func (c *chart) drawMails(all []mailLife, x func(int64) float64, y func(float64) float64) {
	var one, more, none strings.Builder
	for _, m := range all {
		px := x(m.intended)
		switch {
		case m.copies == 0:
			fmt.Fprintf(&none, "M%.1f %.1fl5 5m0-5l-5 5", px-2.5, lossLane-2.5)
			c.HasMissing = true
		case m.copies > 1:
			fmt.Fprintf(&more, "M%.1f %.1fh0", px, y(m.latency()))
			c.HasDoubled = true
		default:
			fmt.Fprintf(&one, "M%.1f %.1fh0", px, y(m.latency()))
		}
	}
	c.Delivered, c.Doubled, c.Missing = one.String(), more.String(), none.String()
}

func (c *chart) drawBands(h *history.History, x func(int64) float64) {
	lane := firstLane
	for _, f := range h.Faults {
		if f.Outcome == history.Skipped || f.Start == 0 {
			continue
		}
		from, to := x(f.Start), x(max(f.Start, f.End))
		b := band{Label: f.Name, X: round1(from), W: round1(max(2, to-from)), Y: lane, TextX: round1(to + 6)}
		if to > plotRight-150 {
			b.TextX, b.Left = round1(from+6), true
		}
		c.Bands = append(c.Bands, b)
		lane += laneHeight
	}
	c.Height = lane + 4
}

// yRange is the decade-aligned range of the finite latencies.
func yRange(all []mailLife) (lo, hi float64) {
	lo, hi = math.Inf(1), 0
	for _, m := range all {
		if l := m.latency(); !math.IsInf(l, 1) {
			lo, hi = min(lo, max(l, 1)), max(hi, l)
		}
	}
	if hi == 0 {
		return 1, 1000
	}
	lo = math.Pow(10, math.Floor(math.Log10(lo)))
	hi = math.Pow(10, math.Ceil(math.Log10(hi+1)))
	if lo >= hi {
		hi = lo * 10
	}
	return lo, hi
}

func latencyTicks(lo, hi float64, y func(float64) float64) []tick {
	var ticks []tick
	for v := lo; v <= hi*1.0001; v *= 10 {
		ticks = append(ticks, tick{milliseconds(v), round1(y(v))})
	}
	return ticks
}

func timeTicks(span int64, x func(int64) float64, start int64) []tick {
	seconds := float64(span) / 1e9
	step := 1.0
	for _, s := range []float64{1, 2, 5, 10, 20, 30, 60, 120, 300, 600} {
		if step = s; seconds/s <= 10 {
			break
		}
	}
	var ticks []tick
	for v := 0.0; v <= seconds; v += step {
		ticks = append(ticks, tick{fmt.Sprintf("%g s", v), round1(x(start + int64(v*1e9)))})
	}
	return ticks
}

// histogram has ten bars per decade.
func histogram(all []mailLife, lo, hi float64) []bar {
	const perDecade = 10
	n := int(math.Round(math.Log10(hi/lo))) * perDecade
	counts := make([]int, n)
	for _, m := range all {
		l := m.latency()
		if math.IsInf(l, 1) {
			continue
		}
		i := int(math.Log10(max(l, lo)/lo) * perDecade)
		counts[min(n-1, max(0, i))]++
	}
	top := slices.Max(counts)
	if top == 0 {
		return nil
	}
	w := (plotRight - plotLeft) / float64(n)
	bars := make([]bar, 0, n)
	for i, c := range counts {
		if c == 0 {
			continue
		}
		height := 60 * float64(c) / float64(top)
		from := lo * math.Pow(10, float64(i)/perDecade)
		bars = append(bars, bar{
			X: round1(plotLeft + w*float64(i)), W: round1(w - 1.5), Y: round1(64 - height), H: round1(height),
			Label: fmt.Sprintf("%d mails from %s", c, milliseconds(from)),
		})
	}
	return bars
}

func round1(v float64) float64 { return math.Round(v*10) / 10 }

// milliseconds writes a latency as people read it.
func milliseconds(ms float64) string {
	switch {
	case ms < 0:
		return "∞"
	case ms < 1000:
		return fmt.Sprintf("%.3g ms", ms)
	case ms < 100_000:
		return fmt.Sprintf("%.3g s", ms/1000)
	default:
		return fmt.Sprintf("%.0f s", ms/1000)
	}
}
