// Package logging makes the log of a service: JSON lines in which no mail
// address can be read.
//
// It guarantees that whatever a caller logs, also the text of a server's reply
// that quotes an address, comes out masked (M6-18, TRAP-M6-12). The values of
// [Whole] are exempt: ids that look like addresses and are needed to follow a
// mail from hop to hop (OB-13).
//
// It must not import any other package of the system.
package logging

import (
	"fmt"
	"io"
	"log/slog"
	"regexp"
	"strings"
	"unicode/utf8"
)

// Names of the attributes that every line about a mail carries where they are
// known (OB-13).
const (
	DedupeKey  = "dedupe_key"
	EventID    = "event_id"
	Attempts   = "attempts"
	ProviderID = "provider_id"
)

// New returns a logger that writes JSON lines at level and above.
func New(w io.Writer, level slog.Leveler) *slog.Logger {
	return slog.New(slog.NewJSONHandler(w, &slog.HandlerOptions{Level: level, ReplaceAttr: mask}))
}

// Whole reports whether an attribute is an id and never a person's address.
func Whole(key string) bool {
	switch key {
	case DedupeKey, EventID, ProviderID, "message_id":
		return true
	}
	return false
}

// address finds what reads like a mail address, quoted local parts included.
// It rather finds too much.
var address = regexp.MustCompile(`("[^"\r\n]{1,64}"|[^\s<>()\[\]",;:@=]{1,128})@([^\s<>()\[\]",;:@]+)`)

// Mask replaces the local part of every mail address in s but its first
// character.
func Mask(s string) string {
	return address.ReplaceAllStringFunc(s, func(found string) string {
		m := address.FindStringSubmatch(found)
		if m[1][0] == '"' {
			return "***@" + m[2]
		}
		return string([]rune(m[1])[:1]) + "***@" + m[2]
	})
}

func mask(_ []string, a slog.Attr) slog.Attr {
	if Whole(a.Key) {
		return a
	}
	switch a.Value.Kind() {
	case slog.KindString:
		return slog.String(a.Key, Mask(a.Value.String()))
	case slog.KindAny:
		switch v := a.Value.Any().(type) {
		case error:
			return slog.String(a.Key, Mask(v.Error()))
		case fmt.Stringer:
			return slog.String(a.Key, Mask(v.String()))
		}
	}
	return a
}

// Plain makes any text fit for a database column and a header: valid UTF-8
// without NUL, at most limit bytes. A server's reply is whatever the server
// likes, and a row that cannot be written would hold its message for ever.
func Plain(s string, limit int) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
	if len(s) <= limit {
		return s
	}
	cut := limit
	for cut > 0 && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + "…"
}
