package reports

import (
	"math"
	"slices"
	"time"

	"mailproof/history"
)

// mailLife is what the evidence says about one confirmed mail.
type mailLife struct {
	key      string
	intended int64 // when the client should have confirmed it
	stored   int64 // when the first copy was kept, 0 if none was
	copies   int
}

func (m mailLife) latency() float64 {
	if m.stored == 0 {
		return math.Inf(1)
	}
	return float64(m.stored-m.intended) / float64(time.Millisecond)
}

// mails folds a history into one life per confirmed mail, in order of intended
// time.
func mails(h *history.History) []mailLife {
	byKey := map[string]*mailLife{}
	for _, op := range h.Ops {
		if op.Name != "confirm" || op.Outcome != history.OpOK {
			continue
		}
		if m, seen := byKey[op.Key]; seen {
			m.intended = min(m.intended, op.Intended)
			continue
		}
		byKey[op.Key] = &mailLife{key: op.Key, intended: op.Intended}
	}
	for _, a := range h.Attempts {
		m, ok := byKey[a.Key]
		if !ok || !a.Stored {
			continue
		}
		m.copies++
		if m.stored == 0 || a.DotAt < m.stored {
			m.stored = a.DotAt
		}
	}
	all := make([]mailLife, 0, len(byKey))
	for _, m := range byKey {
		all = append(all, *m)
	}
	slices.SortFunc(all, func(a, b mailLife) int {
		if a.intended != b.intended {
			return int(a.intended - b.intended)
		}
		if a.key < b.key {
			return -1
		}
		return 1
	})
	return all
}

// FromHistory fills in what the evidence of a scenario says about its faults and
// queues, and draws its chart. Verdict, counts and latency are the judge's.
func FromHistory(h *history.History, s *Scenario) {
	if h.Final != nil {
		s.Queues = h.Final.Queues
	}
	s.Faults = make([]FaultResult, 0, len(h.Faults))
	for _, f := range h.Faults {
		s.Faults = append(s.Faults, FaultResult{Name: f.Name, Outcome: f.Outcome, Witness: f.Witness, Count: f.Count, Reason: f.Reason})
	}
	s.chart = drawChart(h, mails(h))
}
