package verify

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"mailproof/history"
)

// Result is what a history proves.
type Result struct {
	Verdict   Verdict   `json:"verdict"`
	Guarantee string    `json:"guarantee"` // the row by which it was judged
	Findings  []Finding `json:"findings"`  // at most [MaxFindings] of each invariant
	Checked   []Checked `json:"checked"`
	Counts    Counts    `json:"counts"`
	Latency   Latency   `json:"latency_ms"`
}

// Checked is one invariant, and how much it looked at.
type Checked struct {
	Name      string `json:"name"`
	Statement string `json:"statement"`
	Looked    int    `json:"looked"`
	Findings  int    `json:"findings"` // all of them, also those that are not listed
	Skipped   string `json:"skipped,omitempty"`
}

// MaxFindings bounds how many findings of one invariant are listed, and
// MaxStories how many of them tell the mail's story: a broken system breaks the
// same thing 50,000 times.
const (
	MaxFindings = 50
	MaxStories  = 10
)

// Option changes how a history is judged.
type Option func(*options)

type options struct {
	columns Columns
}

// WithColumns maps the judge's words to another system's tables.
func WithColumns(c Columns) Option { return func(o *options) { o.columns = c } }

// Judge judges a history by the invariants that its meta names, all when it
// names none.
func Judge(h *history.History, opts ...Option) Result {
	o := options{columns: DefaultColumns()}
	for _, opt := range opts {
		opt(&o)
	}
	e := NewEvidence(h, o.columns)
	res := Result{Verdict: Pass}
	if !judgeOne(e, wellFormedHistory, &res) {
		// A history that contradicts itself proves nothing, neither way.
		return res
	}
	res.Guarantee = Guarantee(*h.Meta)
	res.Counts = countMails(e)
	res.Latency = latency(e)
	chosen, strangers := choose(h.Meta.Invariants)
	for _, c := range chosen {
		if c.Name() != wellFormedHistory.name {
			judgeOne(e, c, &res)
		}
	}
	for _, name := range strangers {
		res.add(Finding{
			Invariant: wellFormedHistory.name, Verdict: HarnessError,
			Text: fmt.Sprintf("the scenario names invariant %q, and there is none of that name", name),
		})
	}
	for _, c := range res.Checked {
		if c.Skipped != "" && promised(h.Meta, c.Name) {
			res.add(Finding{
				Invariant: assurance.name, Verdict: Invalid,
				Text: fmt.Sprintf("the scenario names %s, but it could not be judged: %s", c.Name, c.Skipped),
			})
		}
	}
	slices.SortStableFunc(res.Findings, func(a, b Finding) int { return lattice[b.Verdict].rank - lattice[a.Verdict].rank })
	return res
}

// judgeOne adds what one checker found, and reports whether that was nothing.
func judgeOne(e *Evidence, c Checker, res *Result) bool {
	out := c.Check(e)
	res.Checked = append(res.Checked, Checked{
		Name: c.Name(), Statement: c.Statement(), Looked: out.Looked, Findings: len(out.Findings), Skipped: out.Skipped,
	})
	for i, f := range out.Findings {
		res.Verdict = Worse(res.Verdict, f.Verdict)
		if i >= MaxFindings {
			continue
		}
		if f.Key != "" && i < MaxStories && e.Meta != nil {
			f.Story = e.Story(f.Key)
		}
		res.Findings = append(res.Findings, f)
	}
	return len(out.Findings) == 0
}

func (r *Result) add(f Finding) {
	r.Verdict = Worse(r.Verdict, f.Verdict)
	r.Findings = append(r.Findings, f)
	for i := range r.Checked {
		if r.Checked[i].Name == f.Invariant {
			r.Checked[i].Findings++
		}
	}
}

// promised reports that a scenario relies on an invariant whose evidence the
// target said it can show.
func promised(meta *history.Meta, name string) bool {
	if !slices.Contains(meta.Invariants, name) {
		return false
	}
	list, limited := meta.Params[history.ParamEvidence]
	if !limited {
		return true
	}
	for _, c := range Checkers() {
		if r, ok := c.(rule); ok && r.name == name && r.needs != needsNothing {
			return slices.Contains(splitList(list), string(r.needs))
		}
	}
	return false
}

func splitList(text string) []string {
	var items []string
	for item := range strings.SplitSeq(text, ",") {
		if item = strings.TrimSpace(item); item != "" {
			items = append(items, item)
		}
	}
	return items
}

// CheckDir judges the history in the folder of a scenario again.
func CheckDir(dir string, opts ...Option) (Result, error) {
	h, err := history.Load(filepath.Join(dir, history.FileName))
	if err != nil {
		return Result{}, err
	}
	return Judge(h, opts...), nil
}

// Guarantee is the row by which a run is judged, in words.
func Guarantee(meta history.Meta) string {
	const never = "Nothing is lost, and nothing is sent again without need."
	switch {
	case meta.Policy == "hold":
		return "Policy hold: at most one copy of every mail; one whose outcome only the receiver knows stays visible as UNKNOWN until the receiver's log proves it. " + never
	case meta.Policy == "resend" && meta.Server == "plain":
		return "Policy resend, plain receiver: at most one copy more than the mail has unsettled attempts, each extra copy justified by the ledger or the fault log. " + never
	default:
		return "Policy " + meta.Policy + ", receiver that deduplicates: exactly one copy of every mail. " + never
	}
}
