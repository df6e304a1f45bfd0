//go:build failpoint

package failpoint

import (
	"bufio"
	"os"
	"path/filepath"
	"syscall"
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

// A point that is armed by file acts once per order, counts anew with each, and
// tells of it in the pipe before it acts.
func TestOrdersFromAFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "orders")
	require.NoError(t, syscall.Mkfifo(path+hitsSuffix, 0o600))
	pipe, err := os.OpenFile(path+hitsSuffix, os.O_RDWR, 0)
	require.NoError(t, err)
	defer pipe.Close()
	hits := bufio.NewReader(pipe)
	t.Setenv(EnvVar, "@"+path)
	require.NoError(t, Check())

	At("p") // no file: nothing is ordered
	for range 2 {
		require.NoError(t, os.WriteFile(path, []byte("p=sleep:1ms@2\n"), 0o600))
		for range 4 {
			At("p")
			At("q")
		}
		line, err := hits.ReadString('\n')
		require.NoError(t, err)
		require.Regexp(t, `^p sleep 2 \d+\n$`, line)
		require.NoError(t, os.WriteFile(path, nil, 0o600))
		At("p") // disarmed, and the next order counts from one
		require.NoError(t, os.WriteFile(path, []byte("other=kill"), 0o600))
		At("p")
	}
	// Nothing else was told: the next line is that of this order.
	require.NoError(t, os.WriteFile(path, []byte("last=sleep:0s"), 0o600))
	At("last")
	line, err := hits.ReadString('\n')
	require.NoError(t, err)
	require.Regexp(t, "^last sleep 1 ", line)
}
