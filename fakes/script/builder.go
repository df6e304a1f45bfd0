package script

import "time"

// Builder is a rule under construction; its methods return changed copies. It
// saves tests the nested literals:
//
//	smtp.On(smtp.StageRcpt, smtp.Reply).Code(451).To("bob@*").First(3)
type Builder struct{ r Rule }

// On begins a rule: this action at this stage.
func On(stage Stage, kind Kind) Builder {
	return Builder{Rule{Action: Action{Stage: stage, Kind: kind}}}
}

// Rule is the finished rule.
func (b Builder) Rule() Rule { return b.r }

// Code of a Reply; the enhanced code and the text follow from it.
func (b Builder) Code(code int) Builder { b.r.Action.Code = code; return b }

// Text of a Reply.
func (b Builder) Text(text string) Builder { b.r.Action.Text = text; return b }

// Error names the error of a Reply over HTTP.
func (b Builder) Error(name string) Builder { b.r.Action.Error = name; return b }

// For is the action's duration.
func (b Builder) For(d time.Duration) Builder { b.r.Action.For = Duration(d); return b }

// Bytes of the body before the fault, or of the answer before the cut.
func (b Builder) Bytes(n int64) Builder { b.r.Action.Bytes = n; return b }

// To matches a recipient's pattern.
func (b Builder) To(pattern string) Builder { b.r.Match.Recipient = pattern; return b }

// Key matches a key's pattern.
func (b Builder) Key(pattern string) Builder { b.r.Match.Key = pattern; return b }

// Header matches a header's pattern.
func (b Builder) Header(name, pattern string) Builder {
	headers := map[string]string{name: pattern}
	for k, v := range b.r.Match.Header {
		headers[k] = v
	}
	b.r.Match.Header = headers
	return b
}

// Limit of a Rate.
func (b Builder) Limit(n int) Builder { b.r.Action.Limit = n; return b }

// First matches the first n tries of each subject.
func (b Builder) First(n int) Builder { b.r.Match.Nth = First(n); return b }

// Times lets the rule strike n times in all, then heal.
func (b Builder) Times(n int) Builder { b.r.Count = n; return b }

// Chance matches with a probability, drawn from the seed.
func (b Builder) Chance(p float64) Builder { b.r.Match.Probability = &p; return b }

// ID names the rule.
func (b Builder) ID(id string) Builder { b.r.ID = id; return b }
