package reports

import (
	"bytes"
	_ "embed"
	"fmt"
	"html/template"
	"time"

	"mailproof/verify"
)

//go:embed page.html.tmpl
var pageTemplate string

// page is what the template sees.
type page struct {
	Summary
	Headline string
	Passed   int
	Totals   Counts
	When     string
}

func htmlReport(s Summary) ([]byte, error) {
	t, err := template.New("page").Funcs(template.FuncMap{
		"capital":  capital,
		"witness":  witness,
		"measured": measured,
		"ms":       func(v float64) string { return milliseconds(v) },
		"secs":     func(v float64) string { return time.Duration(v * float64(time.Second)).Round(time.Second).String() },
		"first":    firstFindings,
		"more":     func(f []verify.Finding) int { return max(0, len(f)-maxFindings) },
		"anchor":   func(s Scenario) string { return s.Name + "-" + s.Policy },
		"add":      func(a, b float64) float64 { return a + b },
		"percent":  func(part, of int) string { return percentOf(part, of) },
	}).Parse(pageTemplate)
	if err != nil {
		return nil, err
	}
	p := page{Summary: whole(s), Headline: headline(s)}
	for _, sc := range s.Scenarios {
		if sc.Verdict == verify.Pass {
			p.Passed++
		}
		p.Totals.Confirmed += sc.Counts.Confirmed
		p.Totals.Delivered += sc.Counts.Delivered
		p.Totals.Duplicates += sc.Counts.Duplicates
		p.Totals.Lost += sc.Counts.Lost
		p.Totals.Unknown += sc.Counts.Unknown
		p.Totals.Dead += sc.Counts.Dead
	}
	var b bytes.Buffer
	if err := t.Execute(&b, p); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// headline says in a sentence what the verdict means.
func headline(s Summary) string {
	if s.NotRun != "" {
		return "No cell was run: " + s.NotRun
	}
	switch s.Verdict {
	case verify.Pass:
		return "No mail was lost, and none was delivered twice without the cause that the policy allows."
	case verify.SkippedRun:
		return "Nothing failed, but not everything could be tested here."
	case verify.Invalid:
		return "This run proves nothing: it had too little traffic, or a fault that nobody saw strike."
	case verify.Unknown:
		return "The system had not come to rest when the time was up: neither kept nor broken."
	case verify.HarnessError:
		return "The harness itself failed; what it says about the system is not to be trusted."
	default:
		return "A guarantee was broken. The findings say which, and on which mail."
	}
}

func percentOf(part, of int) string {
	if of == 0 {
		return "–"
	}
	return fmt.Sprintf("%.1f %%", 100*float64(part)/float64(of))
}
