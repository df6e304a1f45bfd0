package benchmarks

import (
	"bytes"
	"fmt"
	"image/color"
	"maps"
	"math"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// drawing makes one plot of a result, nil when it has nothing to show.
type drawing struct {
	name string
	draw func(*Result) ([]byte, error)
}

func plots() []drawing {
	return []drawing{
		{"hops", drawHops},
		{"growth", drawGrowth},
		{"latency", drawLatency},
		{"flood", drawFlood},
		{"slow", drawSlow},
		{"queues", drawQueues},
	}
}

const (
	plotWidth  = 9 * vg.Inch
	plotHeight = 4.2 * vg.Inch
	// shareHeight keeps the labels at 95 % and 100 % apart.
	shareHeight = 4.9 * vg.Inch
)

// palette of Okabe and Ito, which colour-blind readers can tell apart.
var palette = []color.RGBA{
	{0x00, 0x72, 0xB2, 0xff}, // blue
	{0xE6, 0x9F, 0x00, 0xff}, // orange
	{0x00, 0x9E, 0x73, 0xff}, // green
	{0xD5, 0x5E, 0x00, 0xff}, // vermilion
	{0xCC, 0x79, 0xA7, 0xff}, // purple
	{0x56, 0xB4, 0xE9, 0xff}, // sky
}

// newPlot has a white ground of its own, so that it reads the same on a dark
// page.
func newPlot(title, x, y string) *plot.Plot {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = title, x, y
	p.BackgroundColor = color.White
	sans := font.Font{Typeface: "Liberation", Variant: "Sans"}
	for _, style := range []*draw.TextStyle{
		&p.Title.TextStyle, &p.X.Label.TextStyle, &p.Y.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label, &p.Legend.TextStyle,
	} {
		size := style.Font.Size
		style.Font = sans
		style.Font.Size = size
	}
	p.Title.TextStyle.Font.Size = 14
	p.X.Label.TextStyle.Font.Size, p.Y.Label.TextStyle.Font.Size = 11, 11
	p.Legend.TextStyle.Font.Size = 10
	p.Title.Padding = 8
	p.Legend.Top = true
	p.Legend.Padding = 3
	grid := plotter.NewGrid()
	grid.Horizontal.Color, grid.Vertical.Color = color.Gray{0xd4}, color.Gray{0xd4}
	p.Add(grid)
	return p
}

// encode draws plots one above the other, their axes aligned.
func encode(title string, height vg.Length, rows ...*plot.Plot) ([]byte, error) {
	canvas := vgsvg.New(plotWidth, height)
	dc := draw.New(canvas)
	dc.SetColor(color.White)
	dc.Fill(dc.Rectangle.Path())
	dc = draw.Crop(dc, 8, -14, 8, -8)
	grid := make([][]*plot.Plot, len(rows))
	for i, p := range rows {
		grid[i] = []*plot.Plot{p}
	}
	tiles := draw.Tiles{Rows: len(rows), Cols: 1, PadY: 14}
	for i, row := range plot.Align(grid, tiles, dc) {
		rows[i].Draw(row[0])
	}
	var out bytes.Buffer
	if _, err := canvas.WriteTo(&out); err != nil {
		return nil, err
	}
	// Fonts are named, not embedded; the others have the same widths or are
	// close enough. A title is what a screen reader says.
	svg := strings.ReplaceAll(out.String(), "font-family:Liberation Sans", "font-family:Liberation Sans,Arial,Helvetica,sans-serif")
	at := strings.Index(svg, "<svg")
	end := at + strings.IndexByte(svg[at:], '>') + 1
	return []byte(svg[:end] + "\n<title>" + title + "</title>" + svg[end:]), nil
}

func line(c color.Color, xy plotter.XYs, dashed bool) (*plotter.Line, error) {
	l, err := plotter.NewLine(xy)
	if err != nil {
		return nil, err
	}
	l.Color, l.Width = c, vg.Points(2)
	if dashed {
		l.Dashes = []vg.Length{vg.Points(6), vg.Points(4)}
	}
	return l, nil
}

// drawHops: each step's median, the system's beside the floor's.
func drawHops(r *Result) ([]byte, error) {
	if r.Hops == nil || len(r.Hops.Total) == 0 {
		return nil, nil
	}
	steps := compareSteps(r.Hops)
	system, floor, names := plotter.Values{}, plotter.Values{}, []string{}
	for _, s := range steps {
		system, floor = append(system, zeroNaN(s.system)), append(floor, zeroNaN(s.floor))
		names = append(names, s.hops)
	}
	title := "Idle ticket: median of each hop beside the serial floor"
	return pairs(title, "median, ms", names,
		series{"the system, end to end " + millis(quantiles(r.Hops.Total, 0.5).Median), system, palette[0]},
		series{"serial floor, end to end " + millis(quantiles(r.Hops.FloorTotal, 0.5).Median), floor, palette[1]})
}

// drawGrowth: the p95 of each hop under the flood, beside its idle one.
func drawGrowth(r *Result) ([]byte, error) {
	all := r.Hops.growth()
	if all == nil {
		return nil, nil
	}
	var idle, flood plotter.Values
	var names []string
	for _, g := range all {
		idle, flood = append(idle, zeroNaN(g.idle95)), append(flood, zeroNaN(g.flood95))
		names = append(names, g.name)
	}
	return pairs("Ticket: p95 of each hop, idle and under the flood", "p95, ms", names,
		series{"idle, end to end " + millis(quantiles(r.Hops.Total, 0.95).Median), idle, palette[0]},
		series{"under the flood, end to end " + millis(quantiles(r.Hops.Flooded.Total, 0.95).Median), flood, palette[3]})
}

// series is one of the two bars that stand at each name.
type series struct {
	label string
	v     plotter.Values
	c     color.Color
}

// pairs draws two bars at each name, their figures above them.
func pairs(title, unit string, names []string, left, right series) ([]byte, error) {
	p := newPlot(title, "", unit)
	width := vg.Points(22)
	for i, s := range []series{left, right} {
		b, err := plotter.NewBarChart(s.v, width)
		if err != nil {
			return nil, err
		}
		b.Color, b.Offset, b.LineStyle.Width = s.c, width*vg.Length(2*i-1)/2, 0
		p.Add(b)
		p.Legend.Add(s.label, b)
		if err := values(p, s.v, b.Offset); err != nil {
			return nil, err
		}
	}
	p.NominalX(names...)
	p.Y.Min = 0
	p.Y.Max = 1.15 * max(slices.Max(left.v), slices.Max(right.v))
	return encode(title, plotHeight, p)
}

// values writes each bar's figure above it; offset is the bar's.
func values(p *plot.Plot, v plotter.Values, offset vg.Length) error {
	labels := plotter.XYLabels{}
	for i, ms := range v {
		if ms > 0 {
			labels.XYs = append(labels.XYs, plotter.XY{X: float64(i), Y: ms})
			labels.Labels = append(labels.Labels, short(ms))
		}
	}
	l, err := plotter.NewLabels(labels)
	if err != nil {
		return err
	}
	for i := range l.TextStyle {
		l.TextStyle[i].Font = p.X.Tick.Label.Font
		l.TextStyle[i].Font.Size = 9
		l.TextStyle[i].XAlign = draw.XCenter
	}
	l.Offset = vg.Point{X: offset, Y: 3}
	p.Add(l)
	return nil
}

// short is a figure with two significant digits, for a bar of 22 points.
func short(v float64) string {
	if v >= 10 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.2g", v)
}

// drawLatency: the share of tickets that were accepted within a time, on a
// logarithmic axis.
func drawLatency(r *Result) ([]byte, error) {
	if r.Latency == nil {
		return nil, nil
	}
	quick, _ := r.Latency.byServer()
	return distributions("Tickets: confirmed → accepted by the mail server", quick)
}

// drawSlow: the same where the mail server takes time.
func drawSlow(r *Result) ([]byte, error) {
	if r.Latency == nil {
		return nil, nil
	}
	_, slow := r.Latency.byServer()
	if len(slow) == 0 {
		return nil, nil
	}
	return distributions(fmt.Sprintf("Tickets: confirmed → accepted, the mail server takes %s for each mail", millis(float64(slow[0].MailMillis))), slow)
}

func distributions(title string, layouts []Layout) ([]byte, error) {
	p := newPlot(title, "latency (logarithmic)", "share of tickets")
	lo, hi := math.Inf(1), 0.0
	for i, lay := range layouts {
		all := pool(lay.accepted())
		xy := cdf(all)
		if len(xy) < 2 {
			continue
		}
		lo, hi = min(lo, xy[0].X), max(hi, xy[len(xy)-1].X)
		l, err := line(palette[i%len(palette)], xy, lay.idle())
		if err != nil {
			return nil, err
		}
		p.Add(l)
		p.Legend.Add(fmt.Sprintf("%s (p95 %s)", layoutLabel(lay.Name), millis(all.Quantile(0.95))), l)
	}
	if hi == 0 {
		return nil, nil
	}
	logX(p, lo, hi)
	p.Y.Min, p.Y.Max = 0, 1.05+0.07*float64(len(layouts)) // room for the legend
	p.Y.Tick.Marker = percentTicks{}
	return encode(title, shareHeight, p)
}

// cdf is a staircase; one that never reaches 1 has missing samples.
func cdf(s Samples) plotter.XYs {
	var xy plotter.XYs
	sorted, n := s.sorted(), float64(s.Len())
	for i, v := range sorted {
		if math.IsInf(v, 1) {
			break
		}
		v = max(v, 0.01)
		xy = append(xy, plotter.XY{X: v, Y: float64(i) / n}, plotter.XY{X: v, Y: float64(i+1) / n})
	}
	return xy
}

func logX(p *plot.Plot, lo, hi float64) {
	p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, decades{millis}
	p.X.Min, p.X.Max = decadeBelow(lo), decadeAbove(hi)
}

func decadeBelow(v float64) float64 { return math.Pow(10, math.Floor(math.Log10(v))) }
func decadeAbove(v float64) float64 { return math.Pow(10, math.Ceil(math.Log10(v*1.0001))) }

// decades marks powers of ten, and the steps between.
type decades struct{ label func(float64) string }

func (x decades) Ticks(lo, hi float64) []plot.Tick {
	var ticks []plot.Tick
	for d := decadeBelow(lo); d <= hi*1.0001; d *= 10 {
		ticks = append(ticks, plot.Tick{Value: d, Label: x.label(d)})
		for i := 2.0; i < 10 && d*i < hi; i++ {
			ticks = append(ticks, plot.Tick{Value: d * i})
		}
	}
	return ticks
}

type percentTicks struct{}

func (percentTicks) Ticks(_, _ float64) []plot.Tick {
	var ticks []plot.Tick
	for _, v := range []float64{0, 0.25, 0.5, 0.75, 0.95, 1} {
		ticks = append(ticks, plot.Tick{Value: v, Label: fmt.Sprintf("%.0f %%", 100*v)})
	}
	return ticks
}

// wholeTicks writes whole numbers.
type wholeTicks struct{}

func (wholeTicks) Ticks(lo, hi float64) []plot.Tick {
	ticks := plot.DefaultTicks{}.Ticks(lo, hi)
	for i := range ticks {
		if ticks[i].Label != "" {
			ticks[i].Label = fmt.Sprintf("%.0f", ticks[i].Value)
		}
	}
	return ticks
}

// drawFlood: how many marketing mails wait, and below it the latency of each
// ticket, over the same time.
func drawFlood(r *Result) ([]byte, error) {
	if r.Latency == nil {
		return nil, nil
	}
	title := fmt.Sprintf("Tickets while %d marketing mails drain", r.Latency.Flood)
	top := newPlot(title, "", "marketing mails waiting")
	bottom := newPlot("", "seconds since the first ticket (above: mails that wait; below: latency of each ticket)", "")
	end, lo, hi := 0.0, math.Inf(1), 0.0
	quick, _ := r.Latency.byServer()
	for i, lay := range quick {
		if lay.idle() || len(lay.Repeats) == 0 {
			continue
		}
		rep, c := lay.Repeats[0], palette[i%len(palette)]
		var queue, dots plotter.XYs
		for _, q := range rep.Queue {
			queue = append(queue, plotter.XY{X: float64(q.AtMicros) / 1e6, Y: float64(q.Waiting)})
		}
		for j, us := range rep.Accepted.Micros {
			ms := max(0.1, float64(us)/1000)
			dots = append(dots, plotter.XY{X: float64(rep.Intended[j]) / 1e6, Y: ms})
			lo, hi = min(lo, ms), max(hi, ms)
		}
		if len(queue) < 2 || len(dots) == 0 {
			continue
		}
		l, err := line(c, queue, false)
		if err != nil {
			return nil, err
		}
		s, err := plotter.NewScatter(dots)
		if err != nil {
			return nil, err
		}
		s.GlyphStyle = draw.GlyphStyle{Color: c, Radius: vg.Points(1.8), Shape: draw.CircleGlyph{}}
		top.Add(l)
		top.Legend.Add(layoutLabel(lay.Name), l)
		bottom.Add(s)
		end = max(end, queue[len(queue)-1].X, dots[len(dots)-1].X)
	}
	if hi == 0 {
		return nil, nil
	}
	for _, p := range []*plot.Plot{top, bottom} {
		p.X.Min, p.X.Max = min(0, top.X.Min), end
	}
	top.Y.Min, top.Y.Max = 0, 1.3*top.Y.Max // room for the legend
	top.Y.Tick.Marker = wholeTicks{}
	bottom.Y.Scale, bottom.Y.Tick.Marker = plot.LogScale{}, decades{millis}
	bottom.Y.Min, bottom.Y.Max = decadeBelow(lo), decadeAbove(hi)
	return encode(title, 6.4*vg.Inch, top, bottom)
}

// drawQueues: throughput against prefetch, a line per number of consumers; bare
// consumers dashed.
func drawQueues(r *Result) ([]byte, error) {
	if r.Queues == nil || len(r.Queues.Cells) == 0 {
		return nil, nil
	}
	// What the vertical axis shows stands in the title: gonum's plot takes a label
	// there, on a logarithmic axis, for one at its top, and makes room above it.
	title := "One quorum queue: messages or mails per second"
	p := newPlot(title, "prefetch (both axes logarithmic)", "")
	bare, worker := map[int]plotter.XYs{}, map[int]plotter.XYs{}
	lo, hi := math.Inf(1), 0.0
	add := func(to map[int]plotter.XYs, c QueueCell, rates []float64) {
		if v := spreadOf(rates).Median; v > 0 {
			to[c.Consumers] = append(to[c.Consumers], plotter.XY{X: float64(c.Prefetch), Y: v})
			lo, hi = min(lo, v), max(hi, v)
		}
	}
	for _, c := range r.Queues.Cells {
		add(bare, c, c.Bare)
		add(worker, c, c.Worker)
	}
	for _, kind := range []struct {
		name   string
		lines  map[int]plotter.XYs
		dashed bool
	}{{"bare, messages", bare, true}, {"notifyd, mails", worker, false}} {
		for i, n := range slices.Sorted(maps.Keys(kind.lines)) {
			if err := addMarked(p, kind.lines[n], palette[i%len(palette)], kind.dashed, kind.name+", "+consumers(n)); err != nil {
				return nil, err
			}
		}
	}
	if hi == 0 {
		return nil, nil
	}
	p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, prefetchTicks(r.Queues)
	p.X.Min, p.X.Max = 0.9, 1000
	p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, decades{number}
	p.Y.Min, p.Y.Max = decadeBelow(lo), decadeAbove(hi)
	return encode(title, plotHeight, p)
}

func consumers(n int) string {
	if n == 1 {
		return "1 consumer"
	}
	return fmt.Sprintf("%d consumers", n)
}

func addMarked(p *plot.Plot, xy plotter.XYs, c color.Color, dashed bool, name string) error {
	l, err := line(c, xy, dashed)
	if err != nil {
		return err
	}
	dots, err := plotter.NewScatter(xy)
	if err != nil {
		return err
	}
	dots.GlyphStyle = draw.GlyphStyle{Color: c, Radius: vg.Points(3), Shape: draw.CircleGlyph{}}
	p.Add(l, dots)
	p.Legend.Add(name, l, dots)
	return nil
}

func prefetchTicks(q *Queues) plot.ConstantTicks {
	var ticks plot.ConstantTicks
	seen := map[int]bool{}
	for _, c := range q.Cells {
		if !seen[c.Prefetch] {
			seen[c.Prefetch] = true
			ticks = append(ticks, plot.Tick{Value: float64(c.Prefetch), Label: fmt.Sprint(c.Prefetch)})
		}
	}
	return ticks
}
