package ledger

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"
)

// Filter selects rows; zero fields select everything.
type Filter struct {
	Key       string // exact, as MessageID, Recipient, Client, Stage
	MessageID string
	Recipient string
	Client    string
	Stage     string
	Session   int64
	Stored    *bool
	Breach    *bool
	Struck    *bool  // a fault struck
	Doubled   *bool  // a copy beyond the first
	Finding   string // exact name of one of the row's findings
	Q         string // found anywhere in the row's texts, without regard to case
}

// ParseFilter reads a filter from a query string. Unknown names are errors: a
// mistyped filter must not look like an empty ledger.
func ParseFilter(q url.Values, also ...string) (Filter, error) {
	var f Filter
	texts := map[string]*string{
		"key": &f.Key, "message_id": &f.MessageID, "recipient": &f.Recipient,
		"client": &f.Client, "stage": &f.Stage, "q": &f.Q, "finding": &f.Finding,
	}
	bools := map[string]**bool{"stored": &f.Stored, "breach": &f.Breach, "struck": &f.Struck, "doubled": &f.Doubled}
	for name, values := range q {
		v := values[0]
		switch {
		case texts[name] != nil:
			*texts[name] = v
		case bools[name] != nil:
			b, err := strconv.ParseBool(v)
			if err != nil {
				return f, fmt.Errorf("%s=%q is not true or false", name, v)
			}
			*bools[name] = &b
		case name == "session":
			n, err := strconv.ParseInt(v, 10, 64)
			if err != nil {
				return f, fmt.Errorf("session=%q is not a number", v)
			}
			f.Session = n
		case !contains(also, name):
			return f, fmt.Errorf("unknown filter %q", name)
		}
	}
	return f, nil
}

// Match reports whether the row is selected.
func (f Filter) Match(a Attempt) bool {
	switch {
	case f.Key != "" && f.Key != a.Key,
		f.MessageID != "" && f.MessageID != a.MessageID,
		f.Recipient != "" && !strings.EqualFold(f.Recipient, a.Recipient),
		f.Client != "" && f.Client != a.Client,
		f.Stage != "" && f.Stage != a.Stage,
		f.Session != 0 && f.Session != a.Session,
		f.Stored != nil && *f.Stored != a.Stored,
		f.Breach != nil && *f.Breach != a.Breach,
		f.Struck != nil && *f.Struck != (a.Fault != ""),
		f.Doubled != nil && *f.Doubled != (a.Copy > 1):
		return false
	}
	if f.Finding != "" && !contains(a.Findings, f.Finding) {
		return false
	}
	return f.Q == "" || a.mentions(strings.ToLower(f.Q))
}

func (a Attempt) mentions(lower string) bool {
	for _, s := range []string{a.Key, a.MessageID, a.Recipient, a.Sender, a.Client, a.Subject, a.Fault, a.Reply} {
		if strings.Contains(strings.ToLower(s), lower) {
			return true
		}
	}
	return false
}

func contains(list []string, s string) bool {
	for _, x := range list {
		if x == s {
			return true
		}
	}
	return false
}

// LogLine is the row as a provider's delivery log would show it to a customer:
// what the server knows for certain, in one word and one sentence.
type LogLine struct {
	At        int64  `json:"at"` // monotonic ns
	Event     string `json:"event"`
	Session   int64  `json:"session"`
	Client    string `json:"client"`
	Key       string `json:"key,omitempty"`
	MessageID string `json:"message_id,omitempty"`
	Recipient string `json:"recipient,omitempty"`
	Detail    string `json:"detail"`
}

// Log turns a row into its line.
func (a Attempt) Log() LogLine {
	l := LogLine{At: a.To, Session: a.Session, Client: a.Client, Key: a.Key, MessageID: a.MessageID, Recipient: a.Recipient}
	told := "the session ended without an answer"
	if a.ReplyWritten {
		told = "answered " + a.Reply
	}
	switch {
	case a.Open():
		l.Event, l.Detail = "running", "at stage "+a.Stage
	case a.Stored:
		l.Event, l.Detail = "stored", told
	case a.Deduplicated:
		l.Event, l.Detail = "duplicate", "known already, no second copy; "+told
	case a.ReplyWritten && a.Transport == "resend" && a.Code >= 400:
		l.Event, l.Detail = httpRefusal(a.Code), told+"; nothing stored"
	case a.ReplyWritten && a.Code/100 == 4:
		l.Event, l.Detail = "deferred", told+"; nothing stored"
	case a.ReplyWritten && a.Code/100 == 5:
		l.Event, l.Detail = "rejected", told+"; nothing stored"
	case a.ReplyWritten:
		l.Event, l.Detail = "discarded", told+"; nothing stored"
	default:
		l.Event, l.Detail = "closed", "closed at stage "+a.Stage+", nothing stored"
	}
	return l
}

// httpRefusal says whether an HTTP status asks to come again: 409 (another
// request runs), 429 and what is the server's own trouble do.
func httpRefusal(code int) string {
	if code == 409 || code == 429 || code >= 500 {
		return "deferred"
	}
	return "rejected"
}
