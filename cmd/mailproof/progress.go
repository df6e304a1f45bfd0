package main

import (
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jedib0t/go-pretty/v6/text"
	"golang.org/x/term"

	"mailproof/reports"
	"mailproof/scenarios"
	"mailproof/verify"
)

const (
	// plainEvery is the pause between two lines of a phase where there is no
	// terminal.
	plainEvery = 15 * time.Second
	// startExpected is how long all parts take to start on two cores.
	startExpected = 40 * time.Second
)

// screen is what is known of where the output goes.
type screen struct {
	live    bool // a terminal that can redraw a line
	colours bool
	width   int // 0: unbounded
}

func terminal(out io.Writer) screen {
	f, ok := out.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return screen{}
	}
	width, _, err := term.GetSize(int(f.Fd()))
	if err != nil || width < 20 {
		width = 80
	}
	dumb := os.Getenv("TERM") == "dumb" || os.Getenv("CI") != ""
	return screen{live: !dumb, colours: !dumb && os.Getenv("NO_COLOR") == "", width: width}
}

func (s screen) paint(v verify.Verdict) string {
	word := strings.ToUpper(string(v))
	if !s.colours {
		return word
	}
	colour := text.FgYellow
	switch v {
	case verify.Pass:
		colour = text.FgGreen
	case verify.Fail, verify.HarnessError:
		colour = text.FgRed
	}
	return text.Colors{colour, text.Bold}.Sprint(word)
}

// fit wraps a line between words to the terminal's width, the lines after the
// first indented; where there is no terminal a line stays whole for those who
// search in it.
func (s screen) fit(line string) string {
	if s.width <= 0 || text.StringWidthWithoutEscSequences(line) <= s.width {
		return line
	}
	first, rest, _ := strings.Cut(text.WrapSoft(line, s.width), "\n")
	rest = strings.Join(strings.Fields(rest), " ")
	return strings.TrimRight(first, " ") + "\n  " + strings.ReplaceAll(trimmedLines(text.WrapSoft(rest, s.width-2)), "\n", "\n  ")
}

// trimmedLines are without the spaces that fill them up.
func trimmedLines(s string) string {
	all := strings.Split(s, "\n")
	for i := range all {
		all[i] = strings.TrimRight(all[i], " ")
	}
	return strings.Join(all, "\n")
}

// progress shows how a run gets on: one line that is redrawn in a terminal,
// plain lines elsewhere.
type progress struct {
	out    io.Writer
	screen screen

	mu    sync.Mutex
	began time.Time
	// expected of the cells that run one after another and have not begun, and of
	// the longest that runs beside them.
	expected, longest time.Duration
	beside            []string
	running           []*running // in the order in which they began
	drawn             bool       // a live line stands on the screen
	parts             map[string]string
}

// running is a cell under way.
type running struct {
	id      string // "t6.2/hold"
	place   string // "[3/7] t6.2 hold"
	expect  time.Duration
	began   time.Time
	phase   string
	printed time.Time
	said    string // what its status says, for the live line
}

// newProgress shows a run of these scenarios; beside names the cells that do not
// wait for the others.
func newProgress(out io.Writer, chosen []scenarios.Scenario, beside ...string) *progress {
	p := &progress{out: out, screen: terminal(out), began: time.Now(), beside: beside, parts: map[string]string{}}
	for _, s := range chosen {
		for _, c := range s.Cells {
			if slices.Contains(beside, cellID(s.Name, c.Name())) {
				p.longest = max(p.longest, s.Expect)
			} else {
				p.expected += s.Expect
			}
		}
	}
	return p
}

func cellID(scenario, policy string) string { return scenario + "/" + policy }

func (p *progress) start(seed uint64, dir, again string) {
	p.line("seed %d, evidence in %s", seed, dir)
	p.line("the same again: %s", again)
	p.line("about %s", rough(max(p.expected, p.longest)+startExpected))
}

// Part is told what a part of the infrastructure is doing.
func (p *progress) Part(part, state string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.parts[part] = state
	if p.screen.live && !strings.HasPrefix(state, "ready") {
		words := make([]string, 0, len(p.parts))
		for _, name := range slices.Sorted(maps.Keys(p.parts)) {
			words = append(words, name+" "+p.parts[name])
		}
		p.draw("starting  %s", strings.Join(words, "  "))
		return
	}
	p.lineLocked("%s %s", part, state)
}

// Cell begins the i-th of n cells.
func (p *progress) Cell(i, n int, s scenarios.Scenario, c scenarios.Cell) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := &running{
		id: cellID(s.Name, c.Name()), place: fmt.Sprintf("[%d/%d] %s %s", i, n, s.Name, c.Name()),
		expect: s.Expect, began: time.Now(),
	}
	p.running = append(p.running, r)
	if !slices.Contains(p.beside, r.id) {
		p.expected -= r.expect
	}
	p.lineLocked("%s: %s", r.place, s.Title)
}

// Status comes a few times per second.
func (p *progress) Status(s scenarios.Status) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := p.find(cellID(s.Scenario, s.Policy))
	if r == nil {
		return
	}
	r.said = describe(s)
	left := "about " + rough(p.left()) + " left"
	if p.screen.live {
		words := []string{left}
		for _, r := range slices.Backward(p.running) { // the one that moves first
			words = append(words, r.place+" "+r.said)
		}
		p.draw("%s", strings.Join(words, "  "))
		return
	}
	if s.Phase != r.phase || time.Since(r.printed) >= plainEvery {
		r.phase, r.printed = s.Phase, time.Now()
		p.lineLocked("%s  %s  %s", r.place, r.said, left)
	}
}

func (p *progress) find(id string) *running {
	for _, r := range p.running {
		if r.id == id {
			return r
		}
	}
	return nil
}

func describe(s scenarios.Status) string {
	words := []string{s.Phase, fmt.Sprintf("%d/%d confirmed", s.Confirmed, s.Bookings), fmt.Sprintf("%d kept", s.Stored)}
	if s.Strikes > 0 {
		words = append(words, fmt.Sprintf("%s %d/%d", s.Fault, s.Struck, s.Strikes))
	}
	if n := len(s.Pending); n > 0 {
		key := slices.Min(slices.Collect(maps.Keys(s.Pending)))
		words = append(words, fmt.Sprintf("%d pending, %s: %s", n, key, s.Pending[key]))
	}
	return strings.Join(words, "  ")
}

// left is an estimate from what each cell takes on two cores.
func (p *progress) left() time.Duration {
	queue, beside := p.expected, time.Duration(0)
	for _, r := range p.running {
		rest := max(r.expect-time.Since(r.began), 0)
		if slices.Contains(p.beside, r.id) {
			beside = max(beside, rest)
		} else {
			queue += rest
		}
	}
	return max(queue, beside, 5*time.Second)
}

// Done ends a cell.
func (p *progress) Done(r reports.Scenario) {
	p.mu.Lock()
	defer p.mu.Unlock()
	place := r.Name + " " + r.Policy
	if ended := p.find(cellID(r.Name, r.Policy)); ended != nil {
		place = ended.place
		p.running = slices.DeleteFunc(p.running, func(o *running) bool { return o == ended })
	}
	c := r.Counts
	p.lineLocked("%s  %s in %.0f s: %d confirmed, %d delivered, %d duplicates, %d lost, %d unknown, %d dead",
		place, p.screen.paint(r.Verdict), r.Seconds, c.Confirmed, c.Delivered, c.Duplicates, c.Lost, c.Unknown, c.Dead)
}

func (p *progress) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clear()
}

func (p *progress) line(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lineLocked(format, args...)
}

func (p *progress) lineLocked(format string, args ...any) {
	p.clear()
	if !p.screen.live {
		fmt.Fprintf(p.out, "%5.0fs  ", time.Since(p.began).Seconds())
	}
	fmt.Fprintf(p.out, format+"\n", args...)
}

// draw replaces the live line, cut to the terminal's width so that it never
// wraps.
func (p *progress) draw(format string, args ...any) {
	line := []rune(fmt.Sprintf(format, args...))
	fmt.Fprintf(p.out, "\r\x1b[K%s", string(line[:min(len(line), p.screen.width-1)]))
	p.drawn = true
}

func (p *progress) clear() {
	if p.drawn {
		fmt.Fprint(p.out, "\r\x1b[K")
		p.drawn = false
	}
}

// rough writes a duration the way one says it.
func rough(d time.Duration) string {
	if d < 90*time.Second {
		return fmt.Sprintf("%d s", int(d.Round(5*time.Second).Seconds()))
	}
	return fmt.Sprintf("%d min", int((d + 30*time.Second).Minutes()))
}
