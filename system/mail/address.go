package mail

import (
	"errors"
	"fmt"
	netmail "net/mail"
	"regexp"
	"strings"
)

// ErrAddress marks an address that no mail can be sent to (AC5).
var ErrAddress = errors.New("malformed mail address")

// ParseAddress checks a bare address ("bob@example.org"), as it stands in an
// event or an envelope, and returns it unchanged. It accepts what RFC 5321
// 4.1.2 allows as a mailbox, but no quoted local part (nobody has one, and each
// hop reads them in its own way) and nothing that could end a line or the angle
// brackets of a command. The error names no address: it is logged.
func ParseAddress(addr string) (string, error) {
	local, domain, ok := cutLast(addr, '@')
	switch {
	case addr == "":
		return "", fmt.Errorf("%w: empty", ErrAddress)
	case strings.ContainsFunc(addr, func(r rune) bool { return r <= ' ' || r == 0x7f || strings.ContainsRune(`<>",;:\()[]`, r) }):
		// This leaves out address literals (bob@[192.0.2.1]) too: no customer has one.
		return "", fmt.Errorf("%w: it holds a character that no mailbox has", ErrAddress)
	case !ok || local == "" || domain == "":
		return "", fmt.Errorf("%w: it is not of the form name@domain", ErrAddress)
	case len(local) > 64 || len(addr) > 254: // RFC 5321 4.5.3.1.1 and .3
		return "", fmt.Errorf("%w: too long", ErrAddress)
	}
	parsed, err := netmail.ParseAddress(addr)
	if err != nil || parsed.Address != addr || parsed.Name != "" {
		return "", fmt.Errorf("%w: it is not of the form name@domain", ErrAddress)
	}
	for _, label := range strings.Split(domain, ".") {
		if label == "" || len(label) > 63 || strings.HasPrefix(label, "-") || strings.HasSuffix(label, "-") {
			return "", fmt.Errorf("%w: its domain is none", ErrAddress)
		}
	}
	return addr, nil
}

func cutLast(s string, sep byte) (before, after string, ok bool) {
	i := strings.LastIndexByte(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+1:], true
}

// MaskAddress makes an address fit for a log: "b***@example.org" (M6-18,
// TRAP-M6-12).
func MaskAddress(addr string) string {
	local, domain, ok := cutLast(addr, '@')
	if !ok || local == "" {
		return "***"
	}
	return firstRune(local) + "***@" + domain
}

func firstRune(s string) string {
	for _, r := range s {
		return string(r)
	}
	return ""
}

var addressInText = regexp.MustCompile(`[^\s<>()\[\]",;:@]+@[^\s<>()\[\]",;:@]+`)

// maskAddresses does the same to every address in a server's words.
func maskAddresses(text string) string {
	return addressInText.ReplaceAllStringFunc(text, MaskAddress)
}
