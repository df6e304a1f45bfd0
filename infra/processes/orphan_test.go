package processes

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/infra"
	"mailproof/internal/setup"
)

// role makes this binary a harness that is to be killed.
const role = "PROCESSES_TEST_ROLE"

// runHarness starts servers, one of each kind, and a process of its own, and
// says so.
func runHarness() error {
	ctx := context.Background()
	fmt.Println("starting")
	stack, err := New(setup.Locate()).Start(ctx, infra.Spec{LogDir: os.Getenv("TMPDIR") + "/logs", RabbitNodes: 1})
	if err != nil {
		return err
	}
	if err := checkPIDs(stack); err != nil {
		return err
	}
	own := exec.Command("/bin/sleep", "1000")
	if err := own.Start(); err != nil {
		return err
	}
	if err := stack.Guard(own.Process.Pid); err != nil {
		return err
	}
	fmt.Println("ready")
	select {}
}

// checkPIDs makes sure that a node's pid is that of the server itself, and not of
// a shell or launcher before it: a signal would hit the wrong process.
func checkPIDs(stack infra.Stack) error {
	for _, n := range []struct {
		node infra.Node
		comm string
	}{
		{stack.Postgres(), "postgres"},
		{stack.RabbitMQ().Nodes()[0], "beam.smp"},
		{stack.Kafka(), "java"},
	} {
		comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", n.node.PID()))
		if err != nil {
			return err
		}
		if got := strings.TrimSpace(string(comm)); got != n.comm {
			return fmt.Errorf("the pid of %s is that of %q, not of %q", n.node.Name(), got, n.comm)
		}
	}
	return nil
}

// promised is within what time nothing may be left of a killed harness.
const promised = 5 * time.Second

// belongings lists the processes that have something to do with the temporary
// folder: every server has its home there, and the harness, its child and the
// guardian have it in their environment.
func belongings(t *testing.T, tmp string) []string {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	require.NoError(t, err)
	var found []string
	for _, e := range entries {
		environ, err := os.ReadFile("/proc/" + e.Name() + "/environ")
		if err != nil || !strings.Contains(string(environ), tmp) {
			continue // no process, another user's, or gone meanwhile
		}
		name, _ := os.ReadFile("/proc/" + e.Name() + "/comm")
		found = append(found, e.Name()+" "+strings.TrimSpace(string(name)))
	}
	return found
}

func TestKilledHarnessLeavesNothing(t *testing.T) {
	for name, moment := range map[string]struct {
		says string
		then time.Duration
		sig  syscall.Signal
	}{
		"SIGKILL when all runs":                    {says: "ready", sig: syscall.SIGKILL},
		"SIGKILL while initdb and format run":      {says: "starting", then: 700 * time.Millisecond, sig: syscall.SIGKILL},
		"SIGKILL while servers start":              {says: "starting", then: 4 * time.Second, sig: syscall.SIGKILL},
		"SIGINT, as of Ctrl-C, to the whole group": {says: "starting", then: 4 * time.Second, sig: syscall.SIGINT},
	} {
		t.Run(name, func(t *testing.T) {
			tmp := tempFolder(t)
			lines := startHarness(t, tmp)
			require.True(t, sees(lines.out, moment.says), "the harness ended early")
			time.Sleep(moment.then) // the moment is what is tested
			require.NotEmpty(t, belongings(t, tmp))
			if moment.says == "ready" {
				requireKinds(t, belongings(t, tmp), "postgres", "beam.smp", "epmd", "java", "sleep", "erl_child_setup")
			}
			require.NoError(t, syscall.Kill(-lines.pid, moment.sig))
			require.Eventually(t, func() bool { return len(belongings(t, tmp)) == 0 }, promised, 20*time.Millisecond,
				"left: %v", belongings(t, tmp))
			left, err := filepath.Glob(tmp + "/mp-*")
			require.NoError(t, err)
			require.Empty(t, left, "data is left")
		})
	}
}

type harness struct {
	pid int
	out *bufio.Scanner
}

func startHarness(t *testing.T, tmp string) harness {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), role+"=harness", "TMPDIR="+tmp)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a terminal's foreground group
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return harness{pid: cmd.Process.Pid, out: bufio.NewScanner(out)}
}

func sees(out *bufio.Scanner, line string) bool {
	for out.Scan() {
		if out.Text() == line {
			return true
		}
	}
	return false
}

func requireKinds(t *testing.T, processes []string, kinds ...string) {
	t.Helper()
	all := strings.Join(processes, "\n")
	for _, k := range kinds {
		require.Contains(t, all, " "+k, "the test proves nothing about %s", k)
	}
}
