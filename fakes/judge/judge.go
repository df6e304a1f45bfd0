// Package judge says, for any application in any language, whether each of
// its mails arrived exactly once: from a list of keys (or recipients) that
// should have arrived, and the ledger of a fake server.
//
// It knows no database and no broker, only what the far side saw. It imports
// nothing of this module but fakes/ledger.
package judge

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"sort"
	"strings"

	"mailproof/fakes/ledger"
)

// By is what the expected lines name.
type By string

// The names of a mail. Auto takes keys if any line is one that the ledger
// knows, else recipients.
const (
	Auto      By = "auto"
	Key       By = "key"
	Recipient By = "recipient"
)

// Mail is one expected or unexpected mail and what became of it.
type Mail struct {
	Name   string `json:"name"`
	Copies int    `json:"copies"`
	Tries  int    `json:"tries"`
	// Told is what the sender read, in order: "250", "451", "nothing".
	Told []string `json:"told"`
	// Breach: the server broke its word by script; the sender is not to blame.
	Breach bool `json:"breach,omitempty"`
	// Why in a sentence.
	Why string `json:"why"`
	// Story are the tries, oldest first.
	Story []ledger.Attempt `json:"-"`
}

// Report is the judgement.
type Report struct {
	By       By     `json:"by"`
	Expected int    `json:"expected"`
	Once     int    `json:"once"`
	Lost     []Mail `json:"lost"`
	Doubled  []Mail `json:"doubled"`
	// Unexpected arrived and was not on the list.
	Unexpected []Mail `json:"unexpected"`
	// Provider counts lost and doubled mails that the server's script is to
	// blame for: it promised and discarded, or refused and kept.
	Provider int `json:"provider_breaches"`
	// Tries in all, and those that ended without an answer.
	Tries  int `json:"tries"`
	Silent int `json:"silent"`
	// Needless tries were made after a try of the same mail had been answered
	// with 250: nothing left a doubt.
	Needless int `json:"needless"`
}

// ErrNothing is returned when there is nothing to judge: an empty list or an
// empty ledger proves nothing.
var ErrNothing = errors.New("nothing to judge")

// ReadKeys reads one key a line; empty lines and lines that begin with # are
// left out. A key that stands twice is an error: it should arrive once.
func ReadKeys(r io.Reader) ([]string, error) {
	var keys []string
	seen := map[string]int{}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for n := 1; lines.Scan(); n++ {
		k := strings.TrimSpace(lines.Text())
		if k == "" || strings.HasPrefix(k, "#") {
			continue
		}
		if seen[k] > 0 {
			return nil, fmt.Errorf("keys: %q stands on line %d and on line %d", k, seen[k], n)
		}
		seen[k] = n
		keys = append(keys, k)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("keys: %w", err)
	}
	return keys, nil
}

// Judge compares what should have arrived once with what the ledger saw.
func Judge(expected []string, rows []ledger.Attempt, by By) (Report, error) {
	if len(expected) == 0 {
		return Report{}, fmt.Errorf("%w: no keys", ErrNothing)
	}
	if len(rows) == 0 {
		return Report{}, fmt.Errorf("%w: the ledger is empty", ErrNothing)
	}
	r := Report{By: by, Expected: len(expected), Lost: []Mail{}, Doubled: []Mail{}, Unexpected: []Mail{}}
	if by == Auto {
		r.By = detect(expected, rows)
	}
	mails := group(rows, r.By)
	wanted := map[string]bool{}
	for _, name := range expected {
		wanted[name] = true
		r.place(fold(name, mails[name]))
	}
	for name, tries := range mails {
		m := fold(name, tries)
		r.count(tries)
		if !wanted[name] && m.Copies > 0 {
			m.Why = "arrived and was not expected"
			r.Unexpected = append(r.Unexpected, m)
		}
	}
	sort.Slice(r.Unexpected, func(i, j int) bool { return r.Unexpected[i].Name < r.Unexpected[j].Name })
	return r, nil
}

func detect(expected []string, rows []ledger.Attempt) By {
	known := map[string]bool{}
	for _, a := range rows {
		known[name(a, Key)] = true
	}
	for _, e := range expected {
		if known[e] {
			return Key
		}
	}
	return Recipient
}

// name is what the row's mail is called; "" when the try ended before its
// mail could be named.
func name(a ledger.Attempt, by By) string {
	if by == Recipient {
		return a.Recipient
	}
	if a.Key == "" && a.MessageID == "" {
		return ""
	}
	return a.Identity()
}

func group(rows []ledger.Attempt, by By) map[string][]ledger.Attempt {
	mails := map[string][]ledger.Attempt{}
	for _, a := range rows {
		if n := name(a, by); n != "" {
			mails[n] = append(mails[n], a)
		}
	}
	for _, tries := range mails {
		sort.SliceStable(tries, func(i, j int) bool { return tries[i].ID < tries[j].ID })
	}
	return mails
}

func fold(name string, tries []ledger.Attempt) Mail {
	m := Mail{Name: name, Tries: len(tries), Told: []string{}, Story: tries}
	perRecipient := map[string]int{}
	for _, a := range tries {
		if a.Stored {
			perRecipient[a.Recipient]++
			m.Copies = max(m.Copies, perRecipient[a.Recipient])
		}
		m.Breach = m.Breach || a.Breach
		m.Told = append(m.Told, told(a))
	}
	return m
}

// heard reports whether the sender can have read the answer. The kernel takes an
// answer also for a connection whose far end was seen closed: that of a sender
// which was killed while the server held its session.
func heard(a ledger.Attempt) bool { return a.ReplyWritten && !a.PeerGone }

func told(a ledger.Attempt) string {
	switch {
	case !heard(a):
		return "nothing"
	case a.Code > 0:
		return fmt.Sprint(a.Code)
	}
	return "an answer"
}

func (r *Report) place(m Mail) {
	switch {
	case m.Copies == 1:
		r.Once++
		return
	case m.Copies > 1:
		m.Why = whyDoubled(m)
		r.Doubled = append(r.Doubled, m)
	default:
		m.Why = whyLost(m)
		r.Lost = append(r.Lost, m)
	}
	if m.Breach {
		r.Provider++
	}
}

func whyLost(m Mail) string {
	switch {
	case m.Tries == 0:
		return "never tried: no session named it"
	case m.Breach:
		return "the server answered 250 and discarded it, by script"
	}
	switch last := m.Told[len(m.Told)-1]; {
	case last == "nothing":
		return "given up after a try that was answered with nothing, and nothing was stored"
	case strings.HasPrefix(last, "5"):
		return "refused for good with " + last
	default:
		return "given up after " + last
	}
}

func whyDoubled(m Mail) string {
	stored := 0
	for i, a := range m.Story {
		if !a.Stored {
			continue
		}
		if stored++; stored < m.Copies {
			switch {
			case a.Breach:
				return "sent again after " + m.Told[i] + ", which the server said although it had stored it, by script"
			case heard(a) && a.Code < 300:
				return "sent again after a 250"
			case a.ReplyWritten && a.PeerGone:
				return "sent again after the sender of a stored mail was gone before its answer"
			}
		}
	}
	return "sent again after the answer to a stored mail was lost"
}

// count adds what the tries of one mail say about its sender.
func (r *Report) count(tries []ledger.Attempt) {
	accepted := map[string]bool{}
	for _, a := range tries {
		r.Tries++
		if !heard(a) {
			r.Silent++
		}
		if accepted[a.Recipient] {
			r.Needless++
		}
		if heard(a) && a.Code >= 200 && a.Code < 300 {
			accepted[a.Recipient] = true
		}
	}
}

// OK reports whether every expected mail arrived exactly once and nothing else
// did.
func (r Report) OK() bool {
	return len(r.Lost) == 0 && len(r.Doubled) == 0 && len(r.Unexpected) == 0
}

// Write prints the report for people: counts first, then each mail that is
// wrong, at most limit of a kind (0: all).
func (r Report) Write(w io.Writer, limit int) error {
	p := &printer{w: w}
	p.f("%d expected by %s: %d once, %d lost, %d doubled, %d unexpected\n",
		r.Expected, r.By, r.Once, len(r.Lost), len(r.Doubled), len(r.Unexpected))
	p.f("%d tries, %d of them ended without an answer, %d were needless (after a 250)\n", r.Tries, r.Silent, r.Needless)
	if r.Provider > 0 {
		p.f("%d of the lost and doubled are the server's doing: its script broke its word\n", r.Provider)
	}
	p.mails("lost", r.Lost, limit)
	p.mails("doubled", r.Doubled, limit)
	p.mails("unexpected", r.Unexpected, limit)
	if r.OK() {
		p.f("pass: each arrived exactly once\n")
	} else {
		p.f("fail\n")
	}
	return p.err
}

type printer struct {
	w   io.Writer
	err error
}

func (p *printer) f(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format, args...)
	}
}

func (p *printer) mails(kind string, mails []Mail, limit int) {
	for i, m := range mails {
		if limit > 0 && i == limit {
			p.f("  … and %d more %s\n", len(mails)-limit, kind)
			return
		}
		p.f("%s  %s  copies %d, told %s\n    %s\n", kind, m.Name, m.Copies, orElse(strings.Join(m.Told, ", "), "nothing"), m.Why)
		for _, a := range m.Story {
			p.f("    try %d by %s to %s: %s, %s%s\n", a.ID, orElse(a.Client, "?"), orElse(a.Recipient, "?"),
				keptOr(a), toldWhole(a), fault(a))
		}
	}
}

func keptOr(a ledger.Attempt) string {
	switch {
	case a.Stored:
		return "stored"
	case a.Deduplicated:
		return "recognised, not stored again"
	}
	return "not stored (reached " + a.Stage + ")"
}

func toldWhole(a ledger.Attempt) string {
	switch {
	case heard(a):
		return "told \"" + a.Reply + "\""
	case a.ReplyWritten:
		return "gone when \"" + a.Reply + "\" was written"
	}
	return "told nothing"
}

func fault(a ledger.Attempt) string {
	if a.Fault == "" {
		return ""
	}
	return " [" + a.Fault + "]"
}

func orElse(s, def string) string {
	if s == "" {
		return def
	}
	return s
}
