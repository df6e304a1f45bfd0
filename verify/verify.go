// Package verify judges a history. Each invariant is a named checker with
// golden good and bad histories; nothing here asks the running system.
//
// Package verify knows only package history.
package verify

// Verdict is the outcome of a run; a later one outweighs an earlier.
type Verdict string

// The verdicts, from best to worst.
const (
	Pass         Verdict = "pass"
	SkippedRun   Verdict = "skipped"       // with a reason
	Invalid      Verdict = "invalid"       // no traffic, no witness, a floor missed
	Unknown      Verdict = "unknown"       // still moving at the bound
	HarnessError Verdict = "harness-error" // the harness itself failed
	Fail         Verdict = "fail"
)

// rank orders the verdicts; ExitCode is what the binary exits with.
var lattice = map[Verdict]struct{ rank, exit int }{
	Pass: {0, 0}, SkippedRun: {1, 0}, Invalid: {2, 3}, Unknown: {3, 2}, HarnessError: {4, 4}, Fail: {5, 1},
}

// Worse returns the verdict that outweighs the other.
func Worse(a, b Verdict) Verdict {
	if lattice[b].rank > lattice[a].rank {
		return b
	}
	return a
}

// ExitCode of the binary for this verdict.
func (v Verdict) ExitCode() int { return lattice[v].exit }

// Finding is one breach of one invariant.
type Finding struct {
	Invariant string  `json:"invariant"` // "nothing-lost"
	Verdict   Verdict `json:"verdict"`   // fail, invalid, unknown, harness-error
	Key       string  `json:"key"`       // the mail's dedupe key, "" if it is about the run
	Text      string  `json:"text"`      // what was expected, what was seen
	// Story is the mail's life in order, one line per piece of evidence.
	Story []string `json:"story,omitempty"`
}
