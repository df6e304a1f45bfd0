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

// progress shows how a run gets on: one line that is redrawn in a terminal,
// plain lines elsewhere.
type progress struct {
	out    io.Writer
	screen screen

	mu       sync.Mutex
	began    time.Time
	expected time.Duration // of all cells that have not ended
	cell     scenarios.Scenario
	cellAt   time.Time
	place    string // "[3/7] t6.2 hold"
	phase    string
	printed  time.Time
	drawn    bool // a live line stands on the screen
	parts    map[string]string
}

func newProgress(out io.Writer, chosen []scenarios.Scenario) *progress {
	p := &progress{out: out, screen: terminal(out), began: time.Now(), parts: map[string]string{}}
	for _, s := range chosen {
		p.expected += s.Expect * time.Duration(len(s.Cells))
	}
	return p
}

func (p *progress) start(seed uint64, dir, again string) {
	p.line("seed %d, evidence in %s", seed, dir)
	p.line("the same again: %s", again)
	p.line("about %s", rough(p.expected+startExpected))
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
	p.cell, p.cellAt, p.phase = s, time.Now(), ""
	p.place = fmt.Sprintf("[%d/%d] %s %s", i, n, s.Name, c.Policy)
	p.lineLocked("%s: %s", p.place, s.Title)
}

// Status comes a few times per second.
func (p *progress) Status(s scenarios.Status) {
	p.mu.Lock()
	defer p.mu.Unlock()
	text := p.describe(s)
	if p.screen.live {
		p.phase = s.Phase
		p.draw("%s  %s", p.place, text)
		return
	}
	if s.Phase != p.phase || time.Since(p.printed) >= plainEvery {
		p.phase, p.printed = s.Phase, time.Now()
		p.lineLocked("%s  %s", p.place, text)
	}
}

func (p *progress) describe(s scenarios.Status) string {
	words := []string{s.Phase, fmt.Sprintf("%d/%d confirmed", s.Confirmed, s.Bookings), fmt.Sprintf("%d kept", s.Stored)}
	if s.Strikes > 0 {
		words = append(words, fmt.Sprintf("%s %d/%d", s.Fault, s.Struck, s.Strikes))
	}
	if n := len(s.Pending); n > 0 {
		key := slices.Min(slices.Collect(maps.Keys(s.Pending)))
		words = append(words, fmt.Sprintf("%d pending, %s: %s", n, key, s.Pending[key]))
	}
	return strings.Join(append(words, "about "+rough(p.left())+" left"), "  ")
}

// left is an estimate from what each cell takes on two cores.
func (p *progress) left() time.Duration {
	return max(p.expected-min(time.Since(p.cellAt), p.cell.Expect), 5*time.Second)
}

// Done ends a cell.
func (p *progress) Done(r reports.Scenario) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expected -= p.cell.Expect
	c := r.Counts
	p.lineLocked("%s  %s in %.0f s: %d confirmed, %d delivered, %d duplicates, %d lost, %d unknown, %d dead",
		p.place, p.screen.paint(r.Verdict), r.Seconds, c.Confirmed, c.Delivered, c.Duplicates, c.Lost, c.Unknown, c.Dead)
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
