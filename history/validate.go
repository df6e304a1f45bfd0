package history

import (
	"errors"
	"fmt"
)

// ErrMalformed marks a record that contradicts itself.
var ErrMalformed = errors.New("malformed record")

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrMalformed, fmt.Sprintf(format, args...))
}

// Validate checks one record by itself: it carries exactly the part that its
// kind names, no time is missing or negative, and nothing ends before it
// begins. Records of a kind that this version does not know pass.
func Validate(r Record) error {
	if r.T <= 0 {
		return malformed("t is %d, not a monotonic time", r.T)
	}
	parts := r.parts()
	if len(parts) > 1 {
		return malformed("carries %d parts, kind %q", len(parts), r.Kind)
	}
	if !known(r.Kind) {
		return nil
	}
	if len(parts) == 0 || parts[0] != r.Kind {
		return malformed("kind is %q, but that part is not set", r.Kind)
	}
	switch r.Kind {
	case KindMeta:
		return validateMeta(r.Meta)
	case KindOp:
		return validateOp(r.Op)
	case KindFault:
		return validateFault(r.Fault)
	case KindProcess:
		if r.Process.Name == "" || r.Process.Event == "" {
			return malformed("process without a name or an event")
		}
	case KindAttempt:
		return validateAttempt(r.Attempt)
	case KindChange:
		return validateChange(r.Change)
	case KindPhase:
		if r.Phase.Name == "" {
			return malformed("phase without a name")
		}
	case KindDepth:
		if r.Depth.Queue == "" || r.Depth.Ready < 0 {
			return malformed("queue %q holds %d messages", r.Depth.Queue, r.Depth.Ready)
		}
	}
	return nil
}

func known(k Kind) bool {
	switch k {
	case KindMeta, KindPhase, KindOp, KindFault, KindProcess, KindAttempt, KindChange, KindFinal, KindNote, KindDepth, KindRefused:
		return true
	default:
		return false
	}
}

func (r Record) parts() []Kind {
	var kinds []Kind
	add := func(set bool, k Kind) {
		if set {
			kinds = append(kinds, k)
		}
	}
	add(r.Meta != nil, KindMeta)
	add(r.Phase != nil, KindPhase)
	add(r.Op != nil, KindOp)
	add(r.Fault != nil, KindFault)
	add(r.Process != nil, KindProcess)
	add(r.Attempt != nil, KindAttempt)
	add(r.Change != nil, KindChange)
	add(r.Final != nil, KindFinal)
	add(r.Note != nil, KindNote)
	add(r.Depth != nil, KindDepth)
	add(r.Refused != nil, KindRefused)
	return kinds
}

func validateMeta(m *Meta) error {
	switch {
	case m.Scenario == "":
		return malformed("meta without a scenario")
	case m.Policy != "same-key" && m.Policy != "resend" && m.Policy != "hold":
		return malformed("policy %q is none of same-key, resend, hold", m.Policy)
	case m.Server != "plain" && m.Server != "deduplicating":
		return malformed("server %q is neither plain nor deduplicating", m.Server)
	case m.Wall.IsZero():
		return malformed("meta without its wall clock time")
	}
	return nil
}

func validateOp(o *Op) error {
	switch {
	case o.Name == "" || o.Key == "":
		return malformed("op %q on key %q: name and key must be set", o.Name, o.Key)
	case o.Intended <= 0 || o.Call <= 0 || o.Return <= 0:
		return malformed("op %s %s: intended %d, call %d, return %d must all be set", o.Name, o.Key, o.Intended, o.Call, o.Return)
	case o.Call > o.Return:
		return malformed("op %s %s returned %d ns before it was called", o.Name, o.Key, o.Call-o.Return)
	case o.Outcome != OpOK && o.Outcome != OpFail && o.Outcome != OpUnknown:
		return malformed("op %s %s: outcome %q is none of ok, fail, unknown", o.Name, o.Key, o.Outcome)
	case o.Campaign != nil:
		return validateCampaign(o)
	}
	return nil
}

func validateCampaign(o *Op) error {
	c := o.Campaign
	switch {
	case c.ID == "":
		return malformed("op %s %s: a campaign without an id", o.Name, o.Key)
	case len(c.Recipients) != len(c.Keys):
		return malformed("op %s %s: %d recipients and %d keys", o.Name, o.Key, len(c.Recipients), len(c.Keys))
	case o.Name == "campaign" && len(c.Keys) == 0:
		return malformed("op %s %s: nobody is to get a mail", o.Name, o.Key)
	}
	return nil
}

func validateFault(f *Fault) error {
	switch {
	case f.Name == "":
		return malformed("fault without a name")
	case f.Outcome != Installed && f.Outcome != Skipped && f.Outcome != Indeterminate:
		return malformed("fault %s: outcome %q is none of installed, skipped, indeterminate", f.Name, f.Outcome)
	case f.Outcome == Skipped && f.Reason == "":
		return malformed("fault %s was skipped without a reason", f.Name)
	case f.Outcome == Installed && (f.Start <= 0 || f.End <= 0):
		return malformed("fault %s was installed, but its start %d or end %d is not set", f.Name, f.Start, f.End)
	case f.Start < 0 || f.End < 0 || f.End < f.Start:
		return malformed("fault %s runs from %d to %d", f.Name, f.Start, f.End)
	case f.Count < 0:
		return malformed("fault %s struck %d times", f.Name, f.Count)
	}
	return nil
}

func validateAttempt(a *Attempt) error {
	switch {
	case a.From <= 0 || a.To <= 0 || a.DotAt < 0:
		return malformed("attempt %d: from %d, to %d, dot %d", a.ID, a.From, a.To, a.DotAt)
	case a.From > a.To:
		return malformed("attempt %d ended %d ns before it began", a.ID, a.From-a.To)
	case a.DotAt != 0 && (a.DotAt < a.From || a.DotAt > a.To):
		return malformed("attempt %d: its dot lies outside of it", a.ID)
	case a.Stored && a.DotAt == 0:
		return malformed("attempt %d is stored, but its dot was never read", a.ID)
	case a.Stored && a.ClosedWithoutStoring:
		return malformed("attempt %d is stored and closed without storing", a.ID)
	case a.Stored && a.Deduplicated:
		return malformed("attempt %d is stored and deduplicated", a.ID)
	}
	return nil
}

func validateChange(c *Change) error {
	switch {
	case c.Database == "" || c.Table == "":
		return malformed("change without a database or a table")
	case c.Order <= 0:
		return malformed("change of %s: order %d, it counts from 1", c.Table, c.Order)
	case c.CommitAt.IsZero():
		return malformed("change %d of %s without a commit time", c.Order, c.Table)
	case c.Op != "INSERT" && c.Op != "UPDATE" && c.Op != "DELETE":
		return malformed("change %d of %s: op %q", c.Order, c.Table, c.Op)
	case c.Delta && (c.Op != "UPDATE" || c.Row == ""):
		return malformed("change %d of %s is a difference, and %s of row %q is none", c.Order, c.Table, c.Op, c.Row)
	}
	return nil
}
