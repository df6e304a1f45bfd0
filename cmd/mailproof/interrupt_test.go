package main

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/reports"
	"mailproof/verify"
)

// asMailproof makes the test binary the command itself.
const asMailproof = "MAILPROOF_TEST_AS_COMMAND"

// promisedGone is within what time nothing may be left after the command has
// ended.
const promisedGone = 10 * time.Second

// command is a running mailproof, the leader of a process group of its own.
type command struct {
	*exec.Cmd
	lines *bufio.Scanner
	tmp   string // in the environment of every process that it starts
	said  strings.Builder
}

func startCommand(t *testing.T, args ...string) *command {
	t.Helper()
	// Servers that run as users of their own must get through it.
	tmp, err := os.MkdirTemp("", "mailproof-interrupt-")
	require.NoError(t, err)
	require.NoError(t, os.Chmod(tmp, 0o711))
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(tmp)) })
	self, err := os.Executable()
	require.NoError(t, err)
	c := &command{Cmd: exec.Command(self, args...), tmp: tmp}
	c.Env = append(os.Environ(), asMailproof+"=1", "TMPDIR="+tmp, "GITHUB_STEP_SUMMARY=")
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	c.Stderr = c.Stdout
	require.NoError(t, c.Start())
	t.Cleanup(func() {
		if c.ProcessState == nil { // the test gave up before it ended
			_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL)
			_ = c.Wait()
		}
	})
	c.lines = bufio.NewScanner(out)
	return c
}

// sees reads on to a line that says this.
func (c *command) sees(t *testing.T, word string) {
	t.Helper()
	for c.lines.Scan() {
		c.said.WriteString(c.lines.Text() + "\n")
		if strings.Contains(c.lines.Text(), word) {
			return
		}
	}
	require.Failf(t, "it ended early", "%q was not said:\n%s", word, c.said.String())
}

// interrupt is Ctrl-C in a terminal: the whole group gets it.
func (c *command) interrupt(t *testing.T) {
	t.Helper()
	require.NoError(t, syscall.Kill(-c.Process.Pid, syscall.SIGINT))
}

// end reads all that is still said and returns the exit code.
func (c *command) end(t *testing.T) int {
	t.Helper()
	for c.lines.Scan() {
		c.said.WriteString(c.lines.Text() + "\n")
	}
	_ = c.Wait() // the exit code says it
	return c.ProcessState.ExitCode()
}

// left are the processes that the command started: each has its folder of
// temporary files in its environment.
func (c *command) left(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	require.NoError(t, err)
	var found []string
	for _, e := range entries {
		environ, err := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
		if err != nil || !strings.Contains(string(environ), c.tmp) {
			continue // no process, or gone meanwhile
		}
		name, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "comm"))
		found = append(found, e.Name()+" "+strings.TrimSpace(string(name)))
	}
	return found
}

// TestCtrlCWhilePartsStart: the command says what it does, ends as unknown, keeps
// what there is to keep, and leaves no server and no data.
func TestCtrlCWhilePartsStart(t *testing.T) {
	for name, args := range map[string][]string{
		"gate":  {"gate", "--only", "AC1", "--short", "--seed", "7"},
		"chaos": {"chaos", "--scenario", "t6.1", "--seed", "7"},
		"bench": {"bench", "--only", "hops", "--quick", "--seed", "7"},
	} {
		t.Run(name, func(t *testing.T) {
			out := filepath.Join(t.TempDir(), "runs")
			where := []string{"--out", out}
			if name == "bench" {
				where = []string{"--out", filepath.Join(out, "doc.md"), "--logs", out}
			}
			c := startCommand(t, append(args, where...)...)
			c.sees(t, "postgres starting")
			c.interrupt(t)
			require.Equal(t, verify.Unknown.ExitCode(), c.end(t), c.said.String())
			require.Contains(t, c.said.String(), "interrupted: keeping what there is and stopping all servers; once more to leave at once")
			require.Empty(t, c.left(t), c.said.String())
			data, err := os.ReadDir(c.tmp)
			require.NoError(t, err)
			require.Empty(t, data)
			switch name {
			case "gate":
				g, err := reports.ReadGate(filepath.Join(out, "latest"))
				require.NoError(t, err)
				require.Equal(t, "not judged: interrupted while the real parts started", g.Criteria[0].Reason)
			case "chaos":
				sum, err := reports.Read(filepath.Join(out, "latest"))
				require.NoError(t, err)
				require.Equal(t, "interrupted while the real parts started", sum.NotRun)
			case "bench":
				require.Contains(t, c.said.String(), "interrupted before anything was measured; all servers are stopped")
			}
		})
	}
}

// TestASecondCtrlCLeavesAtOnce: it does not wait for a stop in good order; the
// guardian ends every server all the same.
func TestASecondCtrlCLeavesAtOnce(t *testing.T) {
	c := startCommand(t, "chaos", "--scenario", "t6.1", "--seed", "7", "--out", filepath.Join(t.TempDir(), "runs"))
	c.sees(t, "rabbitmq ready") // what runs takes longer to stop than what is being started
	c.interrupt(t)
	c.sees(t, "once more to leave at once")
	c.interrupt(t)
	require.Equal(t, 130, c.end(t), c.said.String())
	require.Eventually(t, func() bool { return len(c.left(t)) == 0 }, promisedGone, 20*time.Millisecond, "left: %v", c.left(t))
	data, err := filepath.Glob(filepath.Join(c.tmp, "mp-*"))
	require.NoError(t, err)
	require.Empty(t, data, "a server's data is left")
}
