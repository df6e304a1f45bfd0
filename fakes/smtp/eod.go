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

// unstuff copies data from src to dst without the dots that RFC 5321 4.5.2 adds
// at the beginning of lines, and without the terminator. dst must be longer
// than src by one: a CR that might have begun the terminator is given back with
// the byte that shows it did not.
func (s *eodScanner) unstuff(dst, src []byte) (out, in int, end bool) {
	for in < len(src) {
		if s.state == eodData {
			run := bytes.IndexByte(src[in:], '\r')
			if run < 0 {
				run = len(src) - in
			}
			if run > 0 {
				copy(dst[out:], src[in:in+run])
				out, in = out+run, in+run
				continue
			}
		}
		was, c := s.state, src[in]
		in++
		if s.step(c) {
			return out, in, true
		}
		if s.state == eodDot || s.state == eodDotCR {
			continue // not known yet whether it is data
		}
		if was == eodDotCR {
			dst[out] = '\r'
			out++
		}
		dst[out] = c
		out++
	}
	return out, in, false
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
