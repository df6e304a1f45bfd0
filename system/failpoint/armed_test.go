//go:build failpoint

package failpoint

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestParse(t *testing.T) {
	got, err := parse("worker.after-claim=kill@3; bridge.after-insert=sleep:20ms;x=stop")
	require.NoError(t, err)
	require.Equal(t, map[string]action{
		"worker.after-claim":  {verb: "kill", at: 3},
		"bridge.after-insert": {verb: "sleep", pause: 20 * time.Millisecond, at: 1},
		"x":                   {verb: "stop", at: 1},
	}, got)
}

func TestParseNamesTheMistake(t *testing.T) {
	for in, want := range map[string]string{
		"worker.after-claim":    "is not name=action",
		"p=explode":             `action "explode" is not kill, stop or sleep`,
		"p=kill@0":              `passage "0"`,
		"p=sleep:soon":          "sleep: time: invalid duration",
		"p=kill:hard":           "kill takes no argument",
		"good=kill;bad=kill@x ": `bad: passage "x"`,
	} {
		_, err := parse(in)
		require.ErrorContains(t, err, want, in)
	}
}
