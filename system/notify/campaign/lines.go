package campaign

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"mailproof/system/contract"
	"mailproof/system/mail"
)

// Line is one recipient: {"to":"a@x","data":{…}}. A field that is not known is an
// error: a typing error in a name would send half a mail to everybody.
type Line struct {
	To   string                `json:"to"`
	Data contract.CampaignData `json:"data"`
}

const (
	maxLine = 64 << 10 // bytes
	// maxBatchBytes bounds a batch of long lines, so that memory is bounded by
	// bytes and not by lines.
	maxBatchBytes = 1 << 20
)

// lines reads batches from a stream of JSON lines. Empty lines are passed over.
type lines struct {
	scan   *bufio.Scanner
	number int
	most   int // lines per batch
}

func newLines(r io.Reader, most int) *lines {
	s := bufio.NewScanner(r)
	s.Buffer(make([]byte, 0, 4096), maxLine)
	return &lines{scan: s, most: most}
}

// batch returns the next lines, and beside them the reason why there are no more
// after them: io.EOF, a [LineError], or [ErrBody].
func (l *lines) batch() ([]Line, error) {
	var out []Line
	size := 0
	for len(out) < l.most && size < maxBatchBytes {
		if !l.scan.Scan() {
			return out, l.end()
		}
		l.number++
		raw := bytes.TrimSpace(l.scan.Bytes())
		if len(raw) == 0 {
			continue
		}
		one, err := parse(raw)
		if err != nil {
			if l.scan.Err() != nil { // the line is half of one
				return out, l.end()
			}
			return out, &LineError{Line: l.number, Reason: err.Error()}
		}
		out, size = append(out, one), size+len(raw)
	}
	return out, nil
}

func (l *lines) end() error {
	switch err := l.scan.Err(); {
	case err == nil:
		return io.EOF
	case errors.Is(err, bufio.ErrTooLong):
		return &LineError{Line: l.number + 1, Reason: fmt.Sprintf("longer than %d bytes", maxLine)}
	default:
		return fmt.Errorf("%w after line %d: %w", ErrBody, l.number, err)
	}
}

func parse(raw []byte) (Line, error) {
	var l Line
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&l); err != nil {
		return l, err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return l, errors.New("something follows the object")
	}
	l.To = strings.TrimSpace(l.To)
	if _, err := mail.ParseAddress(l.To); err != nil {
		return l, fmt.Errorf("to: %w", err)
	}
	if err := l.Data.Validate(); err != nil {
		return l, err
	}
	return l, mail.CheckCampaign(l.Data)
}

// marshal leaves <, > and & as they are: nobody embeds a payload in a page.
func marshal(v any) ([]byte, error) {
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, fmt.Errorf("payload: %w", err)
	}
	return bytes.TrimSuffix(out.Bytes(), []byte{'\n'}), nil
}
