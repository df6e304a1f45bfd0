package resendapi

import (
	"bytes"
	"encoding/json"
)

// scan reads a mail's JSON in one pass. encoding/json goes over the input twice
// and copies the texts; at this server's speed that is most of its own work.
// ok is false when something is not of the plain form; then encoding/json says
// what it makes of it. A test holds the two together.
func (m *mail) scan(b []byte) (ok bool) {
	s := scanner{b: b}
	if !s.take('{') {
		return false
	}
	for first := true; ; first = false {
		if s.take('}') {
			return s.end()
		}
		if !first && !s.take(',') {
			return false
		}
		name, plain := s.text()
		if !plain || !s.take(':') || !m.field(&s, name) {
			return false
		}
	}
}

// field reads the value of one field.
func (m *mail) field(s *scanner, name []byte) bool {
	switch string(name) {
	case "from":
		return s.plain(&m.From)
	case "subject":
		return s.plain(&m.Subject)
	case "scheduled_at":
		return s.plain(&m.ScheduledAt)
	case "html":
		return s.literal(&m.HTML)
	case "text":
		return s.literal(&m.Text)
	case "to":
		return s.list(&m.To)
	case "cc":
		return s.list(&m.Cc)
	case "bcc":
		return s.list(&m.Bcc)
	case "reply_to":
		return s.list(&m.ReplyTo)
	case "headers":
		return s.decode(&m.Headers)
	case "tags":
		return s.decode(&m.Tags)
	}
	return false
}

// scanner walks over JSON.
type scanner struct {
	b []byte
	i int
}

func (s *scanner) space() {
	for s.i < len(s.b) {
		switch s.b[s.i] {
		case ' ', '\t', '\r', '\n':
			s.i++
		default:
			return
		}
	}
}

// take takes one character if it comes next.
func (s *scanner) take(c byte) bool {
	s.space()
	if s.i < len(s.b) && s.b[s.i] == c {
		s.i++
		return true
	}
	return false
}

func (s *scanner) end() bool {
	s.space()
	return s.i == len(s.b)
}

// raw takes a string with its quotes. simple says that it holds neither
// escapes nor anything but ASCII.
func (s *scanner) raw() (str []byte, simple bool) {
	if !s.take('"') {
		return nil, false
	}
	begin := s.i - 1
	simple = true
	for s.i < len(s.b) {
		switch c := s.b[s.i]; {
		case c == '"':
			s.i++
			return s.b[begin:s.i], simple
		case c == '\\':
			simple = false
			s.i += 2
		case c < ' ':
			return nil, false
		default:
			simple = simple && c < 0x80
			s.i++
		}
	}
	return nil, false
}

// text takes a simple string without its quotes.
func (s *scanner) text() ([]byte, bool) {
	str, simple := s.raw()
	if str == nil || !simple {
		return nil, false
	}
	return str[1 : len(str)-1], true
}

func (s *scanner) plain(to *string) bool {
	str, simple := s.raw()
	switch {
	case str == nil:
		return false
	case simple:
		*to = string(str[1 : len(str)-1])
		return true
	}
	return json.Unmarshal(str, to) == nil
}

// literal takes a string and leaves it encoded.
func (s *scanner) literal(to *literal) bool {
	str, simple := s.raw()
	if str == nil || (!simple && !json.Valid(str)) {
		return false
	}
	*to = append((*to)[:0], str...)
	return true
}

// list takes a string or a list of strings.
func (s *scanner) list(to *addresses) bool {
	if !s.take('[') {
		var one string
		if !s.plain(&one) {
			return false
		}
		*to = addresses{one}
		return true
	}
	*to = addresses{}
	for first := true; ; first = false {
		if s.take(']') {
			return true
		}
		if !first && !s.take(',') {
			return false
		}
		var one string
		if !s.plain(&one) {
			return false
		}
		*to = append(*to, one)
	}
}

// decode takes a list or an object and lets encoding/json read it.
func (s *scanner) decode(to any) bool {
	s.space()
	begin, depth := s.i, 0
	for s.i < len(s.b) {
		switch s.b[s.i] {
		case '"':
			if str, _ := s.raw(); str == nil {
				return false
			}
			continue
		case '{', '[':
			depth++
		case '}', ']':
			depth--
		}
		s.i++
		if depth <= 0 {
			part := s.b[begin:s.i]
			return bytes.IndexByte([]byte("{["), part[0]) >= 0 && json.Unmarshal(part, to) == nil
		}
	}
	return false
}
