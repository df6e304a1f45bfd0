package guardian

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// role makes this binary play another part than the tests: an owner that is to
// be killed.
const role = "GUARDIAN_TEST_ROLE"

func TestMain(m *testing.M) {
	MaybeRun()
	switch os.Getenv(role) {
	case "":
		goleak.VerifyTestMain(m)
	case "settled":
		os.Exit(exitCode(settledOwner()))
	case "busy":
		os.Exit(exitCode(busyOwner()))
	}
}

func exitCode(err error) int {
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// token stands in the environment of everything that a test starts; by it the
// test finds what is left, without having been told a pid.
const token = "GUARDIAN_TEST_TOKEN"

// withToken lists the processes that carry the token.
func withToken(t *testing.T, value string) []string {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	require.NoError(t, err)
	var found []string
	for _, e := range entries {
		env, err := os.ReadFile("/proc/" + e.Name() + "/environ")
		if err != nil || !strings.Contains(string(env), token+"="+value) {
			continue // no process, not ours to read, or gone meanwhile
		}
		name, _ := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		found = append(found, e.Name()+" "+strings.ReplaceAll(string(name), "\x00", " "))
	}
	return found
}

// promised is within what time nothing may be left of a killed owner.
const promised = 5 * time.Second

func requireNothingLeft(t *testing.T, value string) {
	t.Helper()
	require.Eventually(t, func() bool { return len(withToken(t, value)) == 0 }, promised, 10*time.Millisecond,
		"left: %v", withToken(t, value))
}

// startOwner runs this binary in a role.
func startOwner(t *testing.T, part, value, tmp string) (*exec.Cmd, *bufio.Scanner) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), role+"="+part, token+"="+value, "TMPDIR="+tmp)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd, bufio.NewScanner(out)
}

// sh is a shell with the token of this process in its environment.
func sh(script string) Command {
	return Command{
		Path: "/bin/sh",
		Args: []string{"-c", script},
		Env:  []string{"PATH=/usr/bin:/bin", token + "=" + os.Getenv(token)},
	}
}

// detached starts a daemon: a process whose parent is gone and that leads a
// session of its own.
const detached = `setsid sleep 1000 & exec sleep 1000`

// settledOwner has started everything there is, and waits to be killed.
func settledOwner() error {
	ctx := context.Background()
	g, err := Start(ctx, os.DevNull)
	if err != nil {
		return err
	}
	dir, err := g.TempDir(ctx, "guarded-")
	if err != nil {
		return err
	}
	if _, err := g.Launch(ctx, sh(detached)); err != nil {
		return err
	}
	own := exec.Command("/bin/sh", "-c", "sleep 1000 & setsid sleep 1000 & wait")
	if err := own.Start(); err != nil {
		return err
	}
	if err := g.Guard(ctx, own.Process.Pid); err != nil {
		return err
	}
	fmt.Println(dir)
	select {}
}

// busyOwner starts processes for as long as it lives.
func busyOwner() error {
	ctx := context.Background()
	fmt.Println("begins")
	g, err := Start(ctx, os.DevNull)
	if err != nil {
		return err
	}
	for {
		if _, err := g.TempDir(ctx, "guarded-"); err != nil {
			return err
		}
		if _, err := g.Launch(ctx, sh(detached)); err != nil {
			return err
		}
	}
}
