package reports

import (
	"encoding/xml"
	"fmt"
	"strings"
	"unicode/utf8"

	"mailproof/verify"
)

type junitSuites struct {
	XMLName xml.Name `xml:"testsuites"`
	Name    string   `xml:"name,attr"`
	junitCounts
	Suites []junitSuite `xml:"testsuite"`
}

type junitSuite struct {
	Name string `xml:"name,attr"`
	junitCounts
	Properties *junitProperties `xml:"properties,omitempty"`
	Cases      []junitCase      `xml:"testcase"`
}

type junitCounts struct {
	Tests    int    `xml:"tests,attr"`
	Failures int    `xml:"failures,attr"`
	Errors   int    `xml:"errors,attr"`
	Skipped  int    `xml:"skipped,attr"`
	Time     string `xml:"time,attr"`
}

type junitProperties struct {
	List []junitProperty `xml:"property"`
}

type junitProperty struct {
	Name  string `xml:"name,attr"`
	Value string `xml:"value,attr"`
}

type junitCase struct {
	Name    string      `xml:"name,attr"`
	Class   string      `xml:"classname,attr"`
	Time    string      `xml:"time,attr"`
	Failure *junitFault `xml:"failure,omitempty"`
	Error   *junitFault `xml:"error,omitempty"`
	Skipped *junitFault `xml:"skipped,omitempty"`
	Out     string      `xml:"system-out,omitempty"`
}

type junitFault struct {
	Message string `xml:"message,attr"`
	Text    string `xml:",chardata"`
}

// add puts a case into the suite. Only fail is a failure; invalid, unknown and
// harness-error are errors, so that a dashboard keeps them apart.
func (s *junitSuite) add(c junitCase, v verify.Verdict, detail *junitFault) {
	switch v {
	case verify.Pass:
	case verify.SkippedRun:
		c.Skipped = detail
		s.Skipped++
	case verify.Fail:
		c.Failure = detail
		s.Failures++
	default:
		c.Error = detail
		s.Errors++
	}
	s.Tests++
	s.Cases = append(s.Cases, c)
}

// include adds a suite, and its counts.
func (all *junitSuites) include(s junitSuite) {
	all.Suites = append(all.Suites, s)
	all.Tests += s.Tests
	all.Failures += s.Failures
	all.Errors += s.Errors
	all.Skipped += s.Skipped
}

func (all *junitSuites) marshal() ([]byte, error) {
	body, err := xml.MarshalIndent(all, "", "  ")
	return append([]byte(xml.Header), append(body, '\n')...), err
}

func junitTime(seconds float64) string { return fmt.Sprintf("%.3f", seconds) }

// junitReport has a suite per scenario and a case per policy.
func junitReport(s Summary) ([]byte, error) {
	var suites []junitSuite
	var seconds []float64
	index := map[string]int{}
	for _, sc := range s.Scenarios {
		i, seen := index[sc.Name]
		if !seen {
			i = len(suites)
			index[sc.Name] = i
			suites, seconds = append(suites, junitSuite{Name: sc.Name}), append(seconds, 0)
		}
		suites[i].add(junitCase{
			Name: sc.Name + "/" + sc.Policy, Class: "mailproof." + sc.Name, Time: junitTime(sc.Seconds),
		}, sc.Verdict, junitDetail(sc))
		seconds[i] += sc.Seconds
	}
	all := junitSuites{Name: "mailproof chaos", junitCounts: junitCounts{Time: junitTime(s.Seconds)}}
	for i, suite := range suites {
		suite.Time = junitTime(seconds[i])
		all.include(suite)
	}
	return all.marshal()
}

func junitDetail(sc Scenario) *junitFault {
	d := &junitFault{Message: string(sc.Verdict)}
	var b strings.Builder
	for i, f := range firstFindings(sc.Findings) {
		if i == 0 {
			d.Message = fmt.Sprintf("%s: %s %s", sc.Verdict, f.Invariant, f.Key)
		}
		fmt.Fprintf(&b, "%s %s %s: %s\n", f.Verdict, f.Invariant, f.Key, f.Text)
		for _, line := range f.Story {
			fmt.Fprintf(&b, "    %s\n", line)
		}
	}
	fmt.Fprintf(&b, "run it again: %s\n", sc.Command)
	d.Text = printable(b.String())
	d.Message = printable(d.Message)
	return d
}

// gateJUnit has one case per criterion.
func gateJUnit(g Gate) ([]byte, error) {
	suite := junitSuite{
		Name: "acceptance", junitCounts: junitCounts{Time: junitTime(g.Seconds)},
		Properties: &junitProperties{List: []junitProperty{
			{"seed", fmt.Sprint(g.Seed)}, {"command", printable(g.Command)}, {"short", fmt.Sprint(g.Short)},
		}},
	}
	for _, c := range g.Criteria {
		suite.add(junitCase{
			Name: c.ID + ": " + printable(c.Text), Class: "mailproof.gate", Time: junitTime(c.Seconds), Out: criterionOut(c),
		}, c.Verdict, criterionDetail(c))
	}
	all := junitSuites{Name: "mailproof gate", junitCounts: junitCounts{Time: suite.Time}}
	all.include(suite)
	return all.marshal()
}

// criterionOut is what a passed criterion shows too.
func criterionOut(c Criterion) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s\n", c.ID, c.Verdict)
	if c.Figure != "" {
		fmt.Fprintf(&b, "%s\n", c.Figure)
	}
	fmt.Fprintf(&b, "cells: %s\nevidence: %s\n", strings.Join(c.Cells, ", "), strings.Join(c.Evidence, ", "))
	return printable(b.String())
}

func criterionDetail(c Criterion) *junitFault {
	var b strings.Builder
	for _, f := range firstFindings(c.Findings) {
		fmt.Fprintf(&b, "%s %s %s: %s\n", f.Verdict, f.Invariant, f.Key, f.Text)
	}
	fmt.Fprintf(&b, "run it again: %s\n", c.Command)
	return &junitFault{
		Message: printable(fmt.Sprintf("%s: %s", c.Verdict, oneLine(c.Reason))), Text: printable(b.String()),
	}
}

// printable drops what XML 1.0 cannot hold: control characters and bytes that
// are no UTF-8.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r == utf8.RuneError || r < 0x20 && r != '\n' && r != '\t' || r == 0xFFFE || r == 0xFFFF {
			return -1
		}
		return r
	}, s)
}
