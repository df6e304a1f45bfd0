package guardian

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// setup starts a guardian whose log is shown when the test fails.
func setup(t *testing.T) *Guardian {
	t.Helper()
	log := filepath.Join(t.TempDir(), "guardian.log")
	g, err := Start(t.Context(), log)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, g.Stop(context.Background()))
		if t.Failed() {
			said, _ := os.ReadFile(log)
			t.Logf("guardian: %s", said)
		}
	})
	return g
}

func TestKilledOwnerLeavesNothing(t *testing.T) {
	t.Parallel()
	tmp, value := t.TempDir(), "settled-"+strconv.Itoa(os.Getpid())
	owner, out := startOwner(t, "settled", value, tmp)
	require.True(t, out.Scan(), "the owner ended early")
	require.DirExists(t, out.Text())
	require.Eventually(t, func() bool {
		// owner, two of Launch, three of its own
		return len(withToken(t, value)) == 6
	}, promised, 10*time.Millisecond, "the servers did not start: %v", withToken(t, value))

	require.NoError(t, owner.Process.Kill())
	requireNothingLeft(t, value)
	require.Eventually(t, func() bool { return !exists(out.Text()) }, promised, 10*time.Millisecond, "the directory is left")
}

// An owner may be killed between any two steps, so it is killed at many.
func TestOwnerKilledWhileStarting(t *testing.T) {
	t.Parallel()
	for i := range 12 {
		after := time.Duration(i*i) * time.Millisecond
		t.Run(after.String(), func(t *testing.T) {
			t.Parallel()
			tmp, value := t.TempDir(), fmt.Sprintf("busy-%d-%d", os.Getpid(), i)
			owner, out := startOwner(t, "busy", value, tmp)
			require.True(t, out.Scan(), "the owner ended early")
			time.Sleep(after) // the moment is what is tested
			require.NoError(t, owner.Process.Kill())
			requireNothingLeft(t, value)
			require.Eventually(t, func() bool {
				left, err := os.ReadDir(tmp)
				return err == nil && len(left) == 0
			}, promised, 10*time.Millisecond, "directories are left")
		})
	}
}

// Ctrl-C reaches the whole foreground group of a terminal, and a supervisor
// sends SIGTERM to whatever it finds: the guardian must outlast both.
func TestOutlastsSignalsMeantForOwner(t *testing.T) {
	t.Parallel()
	g := setup(t)
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT} {
		require.NoError(t, syscall.Kill(g.PID(), sig))
		_, err := g.Launch(t.Context(), sh("exit 0"))
		require.NoError(t, err, "after %v", sig)
	}
	own, ok, err := look(g.PID())
	require.NoError(t, err)
	require.True(t, ok)
	require.Equal(t, g.PID(), own.session, "the guardian leads a session of its own")
}

// A signal that the guardian takes no notice of must not be ignored by servers:
// they are stopped by it.
func TestChildrenTakeSignals(t *testing.T) {
	t.Parallel()
	g := setup(t)
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT} {
		p, err := g.Launch(t.Context(), Command{Path: "/bin/sleep", Args: []string{"1000"}})
		require.NoError(t, err)
		require.NoError(t, p.Signal(t.Context(), sig))
		require.NoError(t, p.Wait(t.Context()))
		require.Equal(t, sig, p.Status().Signal())
	}
}

func TestStopEndsAllAndRemovesDirectories(t *testing.T) {
	t.Parallel()
	g := setup(t)
	dir, err := g.TempDir(t.Context(), "guarded-")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "data"), nil, 0o600))
	pids := filepath.Join(dir, "pids")
	p, err := g.Launch(t.Context(), sh("setsid sleep 1000 & echo $! > "+pids+".new; mv "+pids+".new "+pids+"; exec sleep 1000"))
	require.NoError(t, err)
	daemon := readPID(t, pids)

	require.NoError(t, g.Stop(t.Context()))
	require.False(t, p.Running())
	requireGone(t, daemon)
	requireGone(t, g.PID())
	require.NoDirExists(t, dir)
	require.NoError(t, g.Stop(t.Context()), "a second stop")
	_, err = g.Launch(t.Context(), sh("exit 0"))
	require.ErrorIs(t, err, ErrGone)
}

func TestStopSignalLetsProcessEndByItself(t *testing.T) {
	t.Parallel()
	g := setup(t)
	dir := t.TempDir()
	c := sh(`trap 'echo bye > said; exit 0' QUIT; touch ready; while :; do sleep 0.01; done`)
	c.Dir, c.StopSignal = dir, syscall.SIGQUIT
	p, err := g.Launch(t.Context(), c)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return exists(filepath.Join(dir, "ready")) }, promised, time.Millisecond)
	require.NoError(t, p.SignalTree(t.Context(), syscall.SIGSTOP), "a paused process must get its chance too")
	require.NoError(t, g.Stop(t.Context()))
	require.FileExists(t, filepath.Join(dir, "said"))
}

func TestStopDoesNotWaitForOneThatRefuses(t *testing.T) {
	t.Parallel()
	g := setup(t)
	dir := t.TempDir()
	c := sh(`trap '' QUIT; touch ready; while :; do sleep 0.01; done`)
	c.Dir, c.StopSignal = dir, syscall.SIGQUIT
	p, err := g.Launch(t.Context(), c)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return exists(filepath.Join(dir, "ready")) }, promised, time.Millisecond)
	began := time.Now()
	require.NoError(t, g.Stop(t.Context()))
	require.Less(t, time.Since(began), promised)
	require.False(t, p.Running())
}

func TestKilledGuardianTakesItsChildrenAlong(t *testing.T) {
	t.Parallel()
	g, err := Start(t.Context(), os.DevNull)
	require.NoError(t, err)
	p, err := g.Launch(t.Context(), Command{Path: "/bin/sleep", Args: []string{"1000"}})
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(g.PID(), syscall.SIGKILL))
	<-g.Done()
	require.False(t, p.Running())
	requireGone(t, p.PID())
	require.ErrorIs(t, p.Signal(t.Context(), syscall.SIGTERM), ErrGone)
	require.Error(t, g.Stop(t.Context()), "its end was not one that was asked for")
}

func TestSignalTree(t *testing.T) {
	t.Parallel()
	g := setup(t)
	dir := t.TempDir()
	c := sh(`sleep 1000 & echo $! > new; mv new pid; wait`)
	c.Dir = dir
	p, err := g.Launch(t.Context(), c)
	require.NoError(t, err)
	child := readPID(t, filepath.Join(dir, "pid"))

	require.NoError(t, p.SignalTree(t.Context(), syscall.SIGSTOP))
	require.True(t, stopped(mustLook(t, p.PID())))
	require.True(t, stopped(mustLook(t, child)))

	require.NoError(t, p.SignalTree(t.Context(), syscall.SIGCONT))
	require.False(t, stopped(mustLook(t, p.PID())))
	require.False(t, stopped(mustLook(t, child)))

	require.NoError(t, p.Kill(t.Context()))
	require.False(t, p.Running())
	requireGone(t, child)
	require.NoError(t, p.Kill(t.Context()), "killing a process that is gone")
	require.ErrorIs(t, p.Signal(t.Context(), syscall.SIGTERM), os.ErrProcessDone)
}

func TestRun(t *testing.T) {
	t.Parallel()
	g := setup(t)
	scratch := t.TempDir()

	t.Run("output", func(t *testing.T) {
		t.Parallel()
		out, err := g.Run(t.Context(), scratch, sh("echo result; echo noise >&2"))
		require.NoError(t, err)
		require.Equal(t, "result\n", string(out))
	})
	t.Run("only the environment that was given", func(t *testing.T) {
		t.Parallel()
		out, err := g.Run(t.Context(), scratch, Command{Path: "/usr/bin/env", Env: []string{"A=b"}})
		require.NoError(t, err)
		require.Equal(t, "A=b\n", string(out))
		out, err = g.Run(t.Context(), scratch, Command{Path: "/usr/bin/env"})
		require.NoError(t, err)
		require.Empty(t, string(out))
	})
	t.Run("failure says what was written", func(t *testing.T) {
		t.Parallel()
		_, err := g.Run(t.Context(), scratch, sh("echo because >&2; exit 7"))
		require.ErrorContains(t, err, "exit status 7")
		require.ErrorContains(t, err, "because")
	})
	t.Run("killed with the context", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		_, err := g.Run(ctx, scratch, sh("sleep 1000"))
		require.ErrorIs(t, err, context.DeadlineExceeded)
	})
	t.Run("no such program", func(t *testing.T) {
		t.Parallel()
		_, err := g.Run(t.Context(), scratch, Command{Path: "/no/such/program"})
		require.ErrorContains(t, err, "/no/such/program")
	})
	t.Run("relative path", func(t *testing.T) {
		t.Parallel()
		_, err := g.Run(t.Context(), scratch, Command{Path: "sh"})
		require.ErrorContains(t, err, "not absolute")
	})
}

func TestGuardRefusesWhatIsGone(t *testing.T) {
	t.Parallel()
	g := setup(t)
	p, err := g.Launch(t.Context(), sh("exit 0"))
	require.NoError(t, err)
	<-p.Done()
	require.Error(t, g.Guard(t.Context(), p.PID()))
}

// Without MaybeRun in main a guardian would run the program once more, which
// would start a guardian, and so on.
func TestStartRefusesInsideGuardian(t *testing.T) {
	t.Setenv(marker, "1")
	_, err := Start(t.Context(), os.DevNull)
	require.ErrorContains(t, err, "MaybeRun")
}

func TestParseStat(t *testing.T) {
	t.Parallel()
	const after = " S 7 42 41 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 3 0 9876 1000 2000"
	for name, text := range map[string]string{
		"plain":                  "42 (postgres)" + after,
		"space and brackets":     "42 (a) S 1 (b c)" + after,
		"a name that is nothing": "42 ()" + after,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := parseStat([]byte(text))
			require.NoError(t, err)
			require.Equal(t, stat{identity: identity{pid: 42, start: 9876}, state: 'S', ppid: 7, session: 41, threads: 3}, got)
		})
	}
	for name, text := range map[string]string{
		"empty":     "",
		"no name":   "42 S 7",
		"too short": "42 (x) S 7 42",
		"no pid":    "x (x)" + after,
		"reversed":  ")(",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := parseStat([]byte(text))
			require.Error(t, err)
		})
	}
}

// A process that got the pid of a member's dead child must not be taken for
// one of the family.
func TestFamilyKnowsReusedPIDs(t *testing.T) {
	t.Parallel()
	root := identity{pid: 10, start: 100}
	processes := table{
		10: {identity: root, state: 'S', ppid: 1, session: 10},
		11: {identity: identity{11, 110}, state: 'S', ppid: 10, session: 11},
		12: {identity: identity{12, 120}, state: 'S', ppid: 11, session: 12},
		13: {identity: identity{13, 130}, state: 'S', ppid: 1, session: 10},
		14: {identity: identity{14, 90}, state: 'S', ppid: 10, session: 14},
		15: {identity: identity{15, 150}, state: 'Z', ppid: 10, session: 10},
		16: {identity: identity{16, 160}, state: 'S', ppid: 1, session: 16},
	}
	members := map[identity]bool{root: true}
	processes.family(members)
	require.Equal(t, map[identity]bool{
		root:                  true,
		{pid: 11, start: 110}: true, // child
		{pid: 12, start: 120}: true, // grandchild
		{pid: 15, start: 150}: true, // waits to be reaped
		{pid: 13, start: 130}: true, // orphan in the session that root leads
	}, members)

	stale := map[identity]bool{{pid: 10, start: 99}: true}
	processes.family(stale)
	require.Len(t, stale, 1, "the pid was given to another process")
}

func readPID(t *testing.T, path string) int {
	t.Helper()
	var pid int
	require.Eventually(t, func() bool {
		b, err := os.ReadFile(path)
		if err != nil {
			return false
		}
		pid, err = strconv.Atoi(strings.TrimSpace(string(b)))
		return err == nil
	}, promised, time.Millisecond)
	return pid
}

func requireGone(t *testing.T, pid int) {
	t.Helper()
	require.Eventually(t, func() bool {
		s, ok, err := look(pid)
		return err == nil && (!ok || s.dead())
	}, promised, time.Millisecond, "process %d is left", pid)
}

func mustLook(t *testing.T, pid int) stat {
	t.Helper()
	s, ok, err := look(pid)
	require.NoError(t, err)
	require.True(t, ok, "process %d is gone", pid)
	return s
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
