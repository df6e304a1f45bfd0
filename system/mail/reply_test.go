package mail

import (
	"bufio"
	"bytes"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
)

func read(s string) (reply, error) {
	return readReply(bufio.NewReaderSize(iotest.OneByteReader(strings.NewReader(s)), maxLine))
}

func TestReadReply(t *testing.T) {
	t.Parallel()
	r, err := read("250-2.1.0 first\r\n250-2.1.0 second\r\n250 2.1.0 third\r\nnext")
	require.NoError(t, err)
	require.Equal(t, reply{code: 250, enhanced: "2.1.0", lines: []string{"first", "second", "third"}}, r)

	r, err = read("451 4.7.1\r\n")
	require.NoError(t, err)
	require.Equal(t, "4.7.1", r.enhanced)
	r, err = read("220 2.0 is no enhanced code\r\n")
	require.NoError(t, err)
	require.Empty(t, r.enhanced)
}

func TestReplyTextIsFitForALog(t *testing.T) {
	t.Parallel()
	r := reply{code: 550, lines: []string{"<bob@example.org>: unknown", "ask postmaster@example.org\x00\xff"}}
	require.NotContains(t, r.text(), "bob@")
	require.NotContains(t, r.text(), "postmaster@")
	r.lines = []string{strings.Repeat("ă", 4000)}
	require.LessOrEqual(t, len(r.text()), maxText+len("…"))
}

func TestProviderID(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"2.0.0 Ok: queued as 4bXz9K0Lq1z":                        "4bXz9K0Lq1z",                      // Postfix
		"OK id=1tHabc-0000Xy-2Z":                                 "1tHabc-0000Xy-2Z",                 // Exim
		"2.0.0 4AUEp7Xk012345 Message accepted for delivery":     "4AUEp7Xk012345",                   // Sendmail
		"Ok 0100019372b6f9a1-5c0a2f5e-000000":                    "0100019372b6f9a1-5c0a2f5e-000000", // SES
		"2.6.0 <abc@x> [InternalId=123, Hostname=h] Queued mail": "123",                              // Exchange
		"thanks": "thanks",
		"":       "250",
	} {
		r, err := read("250 " + text + "\r\n")
		require.NoError(t, err)
		require.Equal(t, want, providerID(r), text)
	}
}

// Whatever a server says: no panic, and a reply only from whole lines.
func FuzzReadReply(f *testing.F) {
	for _, s := range []string{"", "250 ok\r\n", "250-a\r\n250 b\r\n", "250", "999 x\r\n", "250-a\r\n550 b\r\n", "\r\n", "25\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		r, err := readReply(bufio.NewReaderSize(bytes.NewReader(in), maxLine))
		if err != nil {
			return
		}
		require.GreaterOrEqual(t, r.code, 200)
		require.LessOrEqual(t, r.code, 599)
		require.NotEmpty(t, r.lines)
		require.GreaterOrEqual(t, bytes.Count(in, []byte{'\n'}), len(r.lines))
		require.LessOrEqual(t, len(r.text()), maxText+len("…"))
		require.NotEmpty(t, providerID(r))
	})
}
