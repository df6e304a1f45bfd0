package logging

import (
	"bytes"
	"errors"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestMask(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"anna@example.test": "a***@example.test",
		"550 5.1.1 <anna.b+c@example.test>: no such user": "550 5.1.1 <a***@example.test>: no such user",
		`"odd one"@example.test`:                          `***@example.test`,
		"to=anna@example.test,bob@example.test":           "to=a***@example.test,b***@example.test",
		"no address here":                                 "no address here",
	} {
		require.Equal(t, want, Mask(in))
	}
}

func TestIDsStayWhole(t *testing.T) {
	t.Parallel()
	var buf bytes.Buffer
	New(&buf, slog.LevelInfo).Error("refused", ProviderID, "<x1@mx.example.test>", "error", errors.New("550 <anna@example.test>"), "to", "bob@example.test")
	require.Contains(t, buf.String(), "x1@mx.example.test")
	require.NotContains(t, buf.String(), "anna@")
	require.NotContains(t, buf.String(), "bob@")
}

// No ordinary address gets through, whatever stands around it.
func TestNoAddressGetsThrough(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		local := rapid.StringMatching(`[a-z][a-z0-9._+-]{3,20}`).Draw(t, "local")
		text := rapid.StringMatching(`[ -?A-~]{0,10}`).Draw(t, "before") + " <" + local + "@example.test> " + rapid.StringMatching(`[ -?A-~]{0,10}`).Draw(t, "after")
		require.NotContains(t, Mask(text), local+"@")
	})
}

func TestPlain(t *testing.T) {
	t.Parallel()
	require.Equal(t, "a\uFFFDb\uFFFD", Plain("a\x00b\xff", 100))
	require.Equal(t, "gr…", Plain("grün", 3))
	require.Equal(t, "grün", Plain("grün", 5))
}
