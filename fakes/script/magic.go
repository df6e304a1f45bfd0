package script

import (
	"strconv"
	"strings"
	"time"
)

// magicMark begins the part of a local part that asks for a fault.
const magicMark = "+fault-"

// ParseMagic reads a fault out of an address, so that a test needs no control
// call:
//
//	ann+fault-rcpt-451@example.com       451 at RCPT
//	ann+fault-stored-drop@example.com    stored, then no answer
//	ann+fault-dot-delay-2s@example.com   answer two seconds late
//	ann+fault-stored-drop-x2@example.com only the first two tries
//
// ok is false when the address asks for nothing that the vocabulary knows.
func ParseMagic(address string, vocab Vocabulary) (r Rule, ok bool) {
	i := strings.Index(address, magicMark)
	if i < 0 {
		return Rule{}, false
	}
	spec, _, _ := strings.Cut(address[i+len(magicMark):], "@")
	parts := strings.Split(strings.ToLower(spec), "-")
	if len(parts) < 2 {
		return Rule{}, false
	}
	r.ID = "magic:" + strings.ToLower(spec)
	r.Match.Recipient = "*"
	r.Action.Stage = Stage(parts[0])
	r.Action.Kind = Kind(parts[1])
	if code, err := strconv.Atoi(parts[1]); err == nil {
		r.Action.Kind, r.Action.Code = Reply, code
	}
	for _, p := range parts[2:] {
		if n, err := strconv.Atoi(strings.TrimPrefix(p, "x")); err == nil && strings.HasPrefix(p, "x") && n > 0 {
			r.Match.Nth = First(n)
			continue
		}
		d, err := time.ParseDuration(p)
		if err != nil {
			return Rule{}, false
		}
		r.Action.For = Duration(d)
	}
	return r, vocab.Validate(r) == nil
}

func (e *Engine) decideMagic(ev Event) []Strike {
	for _, rcpt := range ev.Recipients {
		if !strings.Contains(rcpt, magicMark) {
			continue
		}
		r, ok := ParseMagic(rcpt, e.vocab)
		if !ok || r.Action.Stage != ev.Stage || !r.Match.Nth.Contains(ev.Nth) {
			continue
		}
		e.mu.Lock()
		ent := &entry{Rule: r}
		struck := e.draw(ent, ev, e.Now())
		e.mu.Unlock()
		if struck {
			return []Strike{{Rule: r.ID, Action: r.Action}}
		}
	}
	return nil
}
