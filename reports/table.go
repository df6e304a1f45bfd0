package reports

import (
	"fmt"
	"io"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"

	"mailproof/verify"
)

// Table writes the closing table. Colours are for terminals; width bounds the
// lines, 0 means no bound.
func Table(w io.Writer, s Summary, colours bool, width int) {
	t := table.NewWriter()
	t.SetOutputMirror(w)
	t.SetStyle(table.StyleRounded)
	t.Style().Options.SeparateRows = false
	t.Style().Format.Header = text.FormatLower
	if width > 0 {
		t.SetAllowedRowLength(width)
	}
	t.AppendHeader(table.Row{"scenario", "policy", "verdict", "confirmed", "delivered", "dup", "lost", "unknown", "dead", "p95", "s", "faults"})
	t.SetColumnConfigs([]table.ColumnConfig{
		{Number: 4, Align: text.AlignRight},
		{Number: 5, Align: text.AlignRight},
		{Number: 6, Align: text.AlignRight},
		{Number: 7, Align: text.AlignRight},
		{Number: 8, Align: text.AlignRight},
		{Number: 9, Align: text.AlignRight},
		{Number: 10, Align: text.AlignRight},
		{Number: 11, Align: text.AlignRight},
	})
	for _, sc := range s.Scenarios {
		c := sc.Counts
		t.AppendRow(table.Row{
			sc.Name, sc.Policy, paint(sc.Verdict, colours), c.Confirmed, c.Delivered, c.Duplicates, c.Lost,
			c.Unknown, c.Dead, p95(sc), fmt.Sprintf("%.0f", sc.Seconds), faultsLine(sc.Faults),
		})
	}
	t.Render()
}

// faultsLine names the faults. Those whose names have a first word in common,
// and then a place of their own ("crash worker.after-ack kill"), are counted
// together.
func faultsLine(all []FaultResult) string {
	var parts []string
	family := map[string]int{} // first word → index in parts
	struck := map[string]int{}
	for _, f := range all {
		first, _, several := strings.Cut(f.Name, " ")
		i, known := family[first]
		switch {
		case f.Witness == "":
			parts = append(parts, f.Name+": "+string(f.Outcome)+", no witness")
			continue
		case !several:
			parts = append(parts, fmt.Sprintf("%s ×%d", f.Name, f.Count))
			continue
		case !known:
			i = len(parts)
			family[first] = i
			parts = append(parts, "")
		}
		struck[first] += f.Count
		parts[i] = fmt.Sprintf("%s ×%d", first, struck[first])
	}
	return strings.Join(parts, ", ")
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
