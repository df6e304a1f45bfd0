package reports

import (
	"fmt"
	"io"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"

	"mailproof/verify"
)

// plainWidth is what a page of a log shows without wrapping, the bound where the
// output is no terminal.
const plainWidth = 100

// Table writes the closing table: the figures of each cell, then its faults.
// Colours are for terminals; no line is wider than width, 0 means there is no
// terminal.
func Table(w io.Writer, s Summary, colours bool, width int) {
	if width <= 0 {
		width = plainWidth
	}
	fmt.Fprintln(w, figures(s, colours, width))
	faultLines(w, s, width)
}

// figures is the widest of its forms that fits: with whole words, with short ones,
// and with these close together.
func figures(s Summary, colours bool, width int) string {
	whole := table.Row{"cell", "verdict", "confirmed", "delivered", "duplicates", "lost", "unknown", "dead", "p95", "seconds"}
	short := table.Row{"cell", "verdict", "conf", "deliv", "dup", "lost", "unkn", "dead", "p95", "s"}
	out := ""
	for _, form := range []struct {
		head table.Row
		gap  string
	}{{whole, "  "}, {short, "  "}, {short, " "}} {
		out = drawFigures(s, form.head, form.gap, colours)
		if text.LongestLineLen(out) <= width {
			break
		}
	}
	return out
}

func drawFigures(s Summary, head table.Row, gap string, colours bool) string {
	style := table.StyleLight
	style.Options = table.Options{SeparateHeader: true}
	style.Format.Header = text.FormatDefault
	style.Box.PaddingLeft, style.Box.PaddingRight = "", gap
	t := table.NewWriter()
	t.SetStyle(style)
	t.SuppressTrailingSpaces()
	t.AppendHeader(head)
	var right []table.ColumnConfig
	for i := 3; i <= len(head); i++ {
		right = append(right, table.ColumnConfig{Number: i, Align: text.AlignRight, AlignHeader: text.AlignRight})
	}
	t.SetColumnConfigs(right)
	for _, sc := range s.Scenarios {
		c := sc.Counts
		t.AppendRow(table.Row{
			sc.Name + "/" + sc.Policy, paint(sc.Verdict, colours), c.Confirmed, c.Delivered, c.Duplicates, c.Lost,
			c.Unknown, c.Dead, p95(sc), fmt.Sprintf("%.0f", sc.Seconds),
		})
	}
	return t.Render()
}

// faultLines writes the faults of each cell, in as many lines as they need.
func faultLines(w io.Writer, s Summary, width int) {
	column := len("faults")
	for _, sc := range s.Scenarios {
		column = max(column, len(sc.Name)+1+len(sc.Policy))
	}
	name := "faults"
	for _, sc := range s.Scenarios {
		words := faultWords(sc.Faults)
		if len(words) == 0 {
			continue
		}
		if name != "" {
			fmt.Fprintln(w, "\n"+name)
		}
		name = sc.Name + "/" + sc.Policy
		for _, line := range lines(words, width-column-2) {
			fmt.Fprintf(w, "%-*s  %s\n", column, name, line)
			name = ""
		}
	}
}

// lines puts words, commas between them, into lines of a width; a word is never
// parted.
func lines(words []string, width int) []string {
	var all []string
	line := ""
	for i, word := range words {
		if i < len(words)-1 {
			word += ","
		}
		switch {
		case line == "":
			line = word
		case text.StringWidth(line)+1+text.StringWidth(word) <= width:
			line += " " + word
		default:
			all = append(all, line)
			line = word
		}
	}
	return append(all, line)
}

// faultWords name the faults and how often each struck. Those whose names have a
// first word in common, and then a place of their own ("crash worker.after-ack
// kill"), are counted together; which of them has no witness is told elsewhere.
func faultWords(all []FaultResult) []string {
	var order []string
	struck, unseen := map[string]int{}, map[string]int{}
	for _, f := range all {
		first, _, _ := strings.Cut(f.Name, " ")
		if _, known := struck[first]; !known {
			order = append(order, first)
		}
		struck[first] += f.Count
		if f.Witness == "" {
			struck[first] -= f.Count
			unseen[first]++
		}
	}
	words := make([]string, len(order))
	for i, first := range order {
		switch n := unseen[first]; {
		case n == 0:
			words[i] = fmt.Sprintf("%s ×%d", first, struck[first])
		case struck[first] == 0 && n == 1:
			words[i] = first + " (no witness)"
		default:
			words[i] = fmt.Sprintf("%s ×%d (%d without a witness)", first, struck[first], n)
		}
	}
	return words
}

func paint(v verify.Verdict, colours bool) string {
	if !colours {
		return string(v)
	}
	switch v {
	case verify.Pass:
		return text.Colors{text.FgGreen, text.Bold}.Sprint(v)
	case verify.Fail, verify.HarnessError:
		return text.Colors{text.FgRed, text.Bold}.Sprint(v)
	default:
		return text.Colors{text.FgYellow, text.Bold}.Sprint(v)
	}
}
