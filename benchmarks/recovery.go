package benchmarks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"mailproof/history"
)

// recoveryPart reads the evidence of chaos runs that were made before.
func (r *runner) recoveryPart(context.Context) error {
	if len(r.cfg.From) == 0 {
		return skipped("no saved chaos run was given (--from) or found at runs/latest")
	}
	out := &Recovery{}
	var errs []error
	for _, dir := range r.cfg.From {
		files, err := filepath.Glob(filepath.Join(dir, "*", history.FileName))
		if err != nil {
			return fmt.Errorf("--from %s: %w", dir, err)
		}
		for _, f := range files {
			h, err := history.Load(f)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			out.Gaps = append(out.Gaps, recoveryOf(h)...)
		}
	}
	out.Source = strings.Join(r.cfg.From, ", ")
	if len(out.Gaps) == 0 {
		return errors.Join(append(errs, skipped("no cell of t6.* with a delivery after a fault in "+out.Source))...)
	}
	slices.SortStableFunc(out.Gaps, func(a, b RecoveryGap) int {
		return cmp.Or(cmp.Compare(a.Scenario, b.Scenario), cmp.Compare(a.Policy, b.Policy))
	})
	r.result.Recovery = out
	return errors.Join(errs...)
}

// gap is a stretch without a delivery while confirmed mail waited.
type gap struct{ from, to int64 }

// recoveryOf is the longest gap around each fault of one cell of t6.*, nothing
// where no mail was delivered at all.
func recoveryOf(h *history.History) []RecoveryGap {
	if h.Meta == nil || !strings.HasPrefix(h.Meta.Scenario, "t6.") {
		return nil
	}
	gaps, delivered := gapsOf(h)
	if delivered == 0 {
		return nil
	}
	firstStrike := h.End
	for _, f := range h.Faults {
		if f.Outcome == history.Installed && f.Start > 0 {
			firstStrike = min(firstStrike, f.Start)
		}
	}
	baseline := longest(gaps, h.Start, firstStrike, true)
	var out []RecoveryGap
	for _, f := range h.Faults {
		if f.Outcome != history.Installed || f.Start == 0 {
			continue
		}
		out = append(out, RecoveryGap{
			Scenario: h.Meta.Scenario, Policy: h.Meta.Policy, Fault: f.Name, Strikes: f.Count, Delivered: delivered,
			BaselineMillis: baseline, FaultMillis: longest(gaps, f.Start, max(f.Start, f.End), false),
		})
	}
	return out
}

// longest gap in milliseconds that lies within the stretch, or touches it.
func longest(gaps []gap, from, to int64, within bool) float64 {
	var top int64
	for _, g := range gaps {
		if within && (g.from < from || g.to > to) || g.to < from || g.from > to {
			continue
		}
		top = max(top, g.to-g.from)
	}
	return float64(top) / float64(time.Millisecond)
}

// gapsOf sweeps over confirmations and deliveries. A gap begins with a delivery
// after which mail still waits, or with the confirmation that ends a rest; mail
// that was never delivered waits for nothing here.
func gapsOf(h *history.History) (gaps []gap, delivered int) {
	type event struct {
		at      int64
		waiting int
	}
	first := map[string]int64{} // key → its first copy
	for _, a := range h.Attempts {
		if a.Stored && a.Key != "" {
			at := max(a.DotAt, a.From)
			if known, ok := first[a.Key]; !ok || at < known {
				first[a.Key] = at
			}
		}
	}
	var events []event
	seen := map[string]bool{}
	for _, op := range h.Ops {
		at, ok := first[op.Key]
		if op.Name != "confirm" || !ok || seen[op.Key] {
			continue
		}
		seen[op.Key] = true
		delivered++
		events = append(events, event{min(op.Intended, at), 1}, event{at, -1})
	}
	slices.SortStableFunc(events, func(a, b event) int { return cmp.Compare(a.at, b.at) })
	waiting, since := 0, int64(0)
	for _, e := range events {
		if e.waiting > 0 && waiting == 0 || e.waiting < 0 {
			if e.waiting < 0 {
				gaps = append(gaps, gap{since, e.at})
			}
			since = e.at
		}
		waiting += e.waiting
	}
	return gaps, delivered
}
