package mail

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
)

const (
	// maxLine of a reply. RFC 5321 4.5.3.1.5 says 512; servers write more.
	maxLine = 4096
	// maxLines bounds a reply that never ends.
	maxLines = 128
	// maxText of a reply is kept in errors and as a provider id.
	maxText = 300
)

// reply is one whole reply of a server.
type reply struct {
	code     int
	enhanced string   // RFC 2034 code, as the first line has it, or ""
	lines    []string // texts, without the codes
}

func (r reply) class() int { return r.code / 100 }

// text is the reply in one line, at most maxText bytes, addresses masked: it
// ends up in logs and in the database.
func (r reply) text() string {
	t := maskAddresses(strings.ToValidUTF8(strings.Join(r.lines, " "), "?"))
	if len(t) > maxText {
		t = strings.ToValidUTF8(t[:maxText], "") + "…"
	}
	return t
}

// replyError is a reply that refuses. It is kept apart from errors of the
// connection: a reply says what became of the mail, a lost connection does not.
type replyError struct{ reply reply }

func (e *replyError) Error() string { return e.reply.text() }

// errProtocol marks bytes that are no reply. What the server meant is unknown.
var errProtocol = errors.New("not an SMTP reply")

var enhancedCode = regexp.MustCompile(`^([245]\.\d{1,3}\.\d{1,3})(?:\s+|$)`)

// readReply reads one reply with all its lines (RFC 5321 4.2). A line without
// its line end is not a reply: the connection broke in the middle of it, and
// "250" may have been meant to go on. Unknown codes are allowed, since the first
// digit decides (4.3.2).
func readReply(r *bufio.Reader) (reply, error) {
	var out reply
	for n := 0; ; n++ {
		if n == maxLines {
			return reply{}, fmt.Errorf("%w: more than %d lines", errProtocol, maxLines)
		}
		code, text, last, err := readLine(r)
		if err != nil {
			return reply{}, err
		}
		if n > 0 && code != out.code {
			return reply{}, fmt.Errorf("%w: %d and %d in one reply", errProtocol, out.code, code)
		}
		out.code = code
		if m := enhancedCode.FindStringSubmatch(text); m != nil {
			text = text[len(m[0]):]
			if n == 0 {
				out.enhanced = m[1]
			}
		}
		out.lines = append(out.lines, text)
		if last {
			return out, nil
		}
	}
}

func readLine(r *bufio.Reader) (code int, text string, last bool, err error) {
	raw, err := r.ReadSlice('\n')
	switch {
	case errors.Is(err, bufio.ErrBufferFull):
		return 0, "", false, fmt.Errorf("%w: a line of more than %d bytes", errProtocol, maxLine)
	case errors.Is(err, io.EOF) && len(raw) > 0:
		return 0, "", false, fmt.Errorf("connection closed within the reply %q: %w", clip(raw), io.ErrUnexpectedEOF)
	case err != nil:
		return 0, "", false, err
	}
	line := strings.TrimRight(string(raw), "\r\n")
	if len(line) < 3 || (len(line) > 3 && line[3] != ' ' && line[3] != '-') {
		return 0, "", false, fmt.Errorf("%w: %q", errProtocol, clip(raw))
	}
	code, err = strconv.Atoi(line[:3])
	if err != nil || code < 200 || code > 599 {
		return 0, "", false, fmt.Errorf("%w: %q", errProtocol, clip(raw))
	}
	if len(line) == 3 {
		return code, "", true, nil
	}
	return code, line[4:], line[3] == ' ', nil
}

func clip(b []byte) string {
	return maskAddresses(string(b[:min(len(b), 64)]))
}

// queueID finds the server's id of the mail in the texts of a 250, as Postfix,
// Exim, Sendmail, SES and others write it; else the whole text serves.
var queueID = []*regexp.Regexp{
	regexp.MustCompile(`(?i)\bqueued as ([[:graph:]]+)`),
	regexp.MustCompile(`(?i)id[=:] ?<?([^\s>,]+)`),
	regexp.MustCompile(`(?i)^([[:alnum:]]{8,}) message accepted`),
	regexp.MustCompile(`(?i)^ok:? ([[:alnum:]][[:alnum:]-]{11,})$`),
}

func providerID(r reply) string {
	text := r.text()
	for _, re := range queueID {
		if m := re.FindStringSubmatch(text); m != nil {
			return strings.Trim(m[1], `"'<>.,;`)
		}
	}
	if text == "" {
		return strconv.Itoa(r.code)
	}
	return text
}
