package wal

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// The text of test_decoding, as its source prints it:
//
//	BEGIN 723
//	table public.t: INSERT: id[integer]:1 name[text]:'it''s' gone[text]:null
//	table public.t: UPDATE: old-key: id[integer]:1 new-tuple: id[integer]:2
//	table public.t: DELETE: id[integer]:1
//	COMMIT 723 (at 2026-03-01 12:00:00.123456+00)
//
// Names and types are quoted as identifiers where they must be. Numbers, oids
// and booleans stand bare, bit strings as B'101', everything else in single
// quotes with only the quote itself doubled, newlines included.

// errSyntax is a line that test_decoding does not print.
var errSyntax = errors.New("not the text of test_decoding")

// unchanged stands for a large value that an UPDATE left as it was and that
// was not logged again.
const unchanged = "unchanged-toast-datum"

// row is one "table …" line.
type row struct {
	table    string // as printed
	op       string // INSERT, UPDATE, DELETE, TRUNCATE
	old, new map[string]string
}

// parseRow reads a line that starts with "table ". Values of dropped columns
// are replaced by their length and hash.
func parseRow(line string, dropped func(column string) bool) (row, error) {
	s := &scanner{text: line, dropped: dropped}
	var r row
	err := s.row(&r)
	if err != nil {
		return row{}, fmt.Errorf("%w, at byte %d of %.80q: %w", errSyntax, s.at, line, err)
	}
	return r, nil
}

type scanner struct {
	text    string
	at      int
	dropped func(column string) bool
}

func (s *scanner) row(r *row) error {
	if err := s.expect("table "); err != nil {
		return err
	}
	begin := s.at
	if err := s.qualifiedName(); err != nil {
		return err
	}
	r.table = s.text[begin:s.at]
	if strings.HasPrefix(s.rest(), ", ") {
		r.op = "TRUNCATE" // it alone lists several tables
		return nil
	}
	if err := s.expect(": "); err != nil {
		return err
	}
	op, _, found := strings.Cut(s.rest(), ":")
	if !found {
		return errors.New("no operation")
	}
	s.at += len(op) + 1
	r.op = op
	switch op {
	case "INSERT":
		return s.tuple(&r.new)
	case "DELETE":
		return s.tuple(&r.old)
	case "UPDATE":
		return s.update(r)
	case "TRUNCATE":
		return nil
	default:
		return fmt.Errorf("operation %q", op)
	}
}

func (s *scanner) update(r *row) error {
	if s.accept(" old-key:") {
		if err := s.tuple(&r.old); err != nil {
			return err
		}
		if err := s.expect(" new-tuple:"); err != nil {
			return err
		}
	}
	if err := s.tuple(&r.new); err != nil {
		return err
	}
	for column, v := range r.new {
		if before, known := r.old[column]; known && v == unchanged {
			r.new[column] = before
		}
	}
	return nil
}

// tuple reads columns up to the end, or up to " new-tuple:". NULLs are left
// out.
func (s *scanner) tuple(into *map[string]string) error {
	if s.accept(" (no-tuple-data)") {
		return nil
	}
	*into = map[string]string{}
	for s.at < len(s.text) && !strings.HasPrefix(s.rest(), " new-tuple:") {
		if err := s.expect(" "); err != nil {
			return err
		}
		name, err := s.identifier()
		if err != nil {
			return err
		}
		if err := s.typeName(); err != nil {
			return fmt.Errorf("type of column %s: %w", name, err)
		}
		if err := s.expect(":"); err != nil {
			return fmt.Errorf("column %s: %w", name, err)
		}
		value, null, err := s.value()
		if err != nil {
			return fmt.Errorf("value of column %s: %w", name, err)
		}
		if null {
			continue
		}
		if s.dropped != nil && s.dropped(name) && value != unchanged {
			value = summary(value)
		}
		(*into)[name] = value
	}
	return nil
}

func (s *scanner) qualifiedName() error {
	if _, err := s.identifier(); err != nil {
		return err
	}
	if err := s.expect("."); err != nil {
		return err
	}
	_, err := s.identifier()
	return err
}

// identifier reads a name as quote_identifier prints it.
func (s *scanner) identifier() (string, error) {
	if s.accept(`"`) {
		return s.quoted('"')
	}
	begin := s.at
	for s.at < len(s.text) && isNameByte(s.text[s.at]) {
		s.at++
	}
	if s.at == begin {
		return "", errors.New("a name was expected")
	}
	return s.text[begin:s.at], nil
}

func isNameByte(b byte) bool {
	return b >= 'a' && b <= 'z' || b >= '0' && b <= '9' || b == '_'
}

// quoted reads up to the closing quote, which stands doubled inside. The
// opening one has been read.
func (s *scanner) quoted(quote byte) (string, error) {
	begin, doubled := s.at, false
	for s.at < len(s.text) {
		i := strings.IndexByte(s.rest(), quote)
		if i < 0 {
			break
		}
		s.at += i + 1
		if s.at < len(s.text) && s.text[s.at] == quote {
			doubled = true
			s.at++
			continue
		}
		value := s.text[begin : s.at-1]
		if doubled {
			q := string(quote)
			value = strings.ReplaceAll(value, q+q, q)
		}
		return value, nil
	}
	return "", fmt.Errorf("no closing %c", quote)
}

// typeName skips "[…]": brackets nest in array types, and a name of a user's
// own may hold any of them in double quotes.
func (s *scanner) typeName() error {
	if err := s.expect("["); err != nil {
		return err
	}
	for depth := 1; s.at < len(s.text); {
		b := s.text[s.at]
		s.at++
		switch b {
		case '"':
			if _, err := s.quoted('"'); err != nil {
				return err
			}
		case '[':
			depth++
		case ']':
			if depth--; depth == 0 {
				return nil
			}
		}
	}
	return errors.New("no closing ]")
}

func (s *scanner) value() (value string, null bool, err error) {
	if s.accept("'") || s.accept("B'") {
		value, err = s.quoted('\'')
		return value, false, err
	}
	bare, _, _ := strings.Cut(s.rest(), " ")
	if bare == "" {
		return "", false, errors.New("empty")
	}
	s.at += len(bare)
	return bare, bare == "null", nil
}

func (s *scanner) rest() string { return s.text[s.at:] }

func (s *scanner) accept(prefix string) bool {
	if !strings.HasPrefix(s.rest(), prefix) {
		return false
	}
	s.at += len(prefix)
	return true
}

func (s *scanner) expect(prefix string) error {
	if !s.accept(prefix) {
		return fmt.Errorf("%q was expected", prefix)
	}
	return nil
}

// summary stands in for a value that is too large to keep: two that are equal
// stay equal, two that differ differ.
func summary(value string) string {
	data := []byte(value)
	if digits, ok := strings.CutPrefix(value, `\x`); ok {
		if raw, err := hex.DecodeString(digits); err == nil {
			data = raw
		}
	}
	sum := sha256.Sum256(data)
	return fmt.Sprintf("(%d bytes, sha256 %x)", len(data), sum[:8])
}

// parseBegin reads "BEGIN 723".
func parseBegin(line string) (xid uint64, err error) {
	xid, err = strconv.ParseUint(strings.TrimPrefix(line, "BEGIN "), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%w: %q", errSyntax, line)
	}
	return xid, nil
}

// parseCommit reads "COMMIT 723 (at 2026-03-01 12:00:00.123456+00)".
func parseCommit(line string) (time.Time, error) {
	_, at, found := strings.Cut(line, " (at ")
	text, closed := strings.CutSuffix(at, ")")
	if !found || !closed {
		return time.Time{}, fmt.Errorf("%w: %q", errSyntax, line)
	}
	t, err := time.Parse("2006-01-02 15:04:05.999999-07", text)
	if err != nil {
		return time.Time{}, fmt.Errorf("%w: %w", errSyntax, err)
	}
	return t.UTC(), nil
}
