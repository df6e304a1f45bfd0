package smtp

import "bytes"

// eodScanner finds the end of a mail's data, <CRLF>.<CRLF>, in a stream. It
// must agree byte for byte with the reader of go-smtp that gets the same bytes:
// if the two disagreed, a command would be taken for data or data for a command
// (SMTP smuggling). A fuzz test holds them together.
type eodScanner struct{ state eodState }

type eodState uint8

const (
	eodBeginLine eodState = iota // must be zero: data begins at the beginning of a line
	eodDot
	eodDotCR
	eodCR
	eodData
)

// scan returns how many bytes of b still belong to the data, its terminator
// included, and whether the terminator was among them.
func (s *eodScanner) scan(b []byte) (n int, end bool) {
	for i := 0; i < len(b); i++ {
		if s.state == eodData {
			skip := bytes.IndexByte(b[i:], '\r')
			if skip < 0 {
				return len(b), false
			}
			i += skip
		}
		if s.step(b[i]) {
			return i + 1, true
		}
	}
	return len(b), false
}

// step takes one byte and reports the end of the data.
func (s *eodScanner) step(c byte) bool {
	next := eodData
	switch s.state {
	case eodBeginLine:
		switch c {
		case '.':
			next = eodDot
		case '\r':
			next = eodCR
		}
	case eodDot:
		if c == '\r' {
			next = eodDotCR
		}
	case eodDotCR:
		if c == '\n' {
			s.state = eodBeginLine
			return true
		}
	case eodCR:
		if c == '\n' {
			next = eodBeginLine
		}
	case eodData:
		if c == '\r' {
			next = eodCR
		}
	}
	s.state = next
	return false
}
