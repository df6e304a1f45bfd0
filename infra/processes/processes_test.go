package processes

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/goleak"

	"mailproof/infra"
	"mailproof/infra/guardian"
	"mailproof/infra/infratest"
	"mailproof/infra/ports"
	"mailproof/internal/setup"
)

func TestMain(m *testing.M) {
	guardian.MaybeRun()
	if os.Getenv(role) != "" {
		fmt.Fprintln(os.Stderr, runHarness())
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

// tempFolder makes a folder for temporary files that this test alone uses and
// that servers of other users may enter. Its path is short, which t.TempDir's
// is not: a Unix socket's path ends at 107 bytes.
func tempFolder(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "mpt-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, os.Chmod(dir, 0o755))
	return dir
}

func TestConformance(t *testing.T) {
	tmp := tempFolder(t)
	t.Setenv("TMPDIR", tmp)
	paths := setup.Locate()
	require.NotEmpty(t, paths.KafkaLib, "Kafka's jars are missing: run \"mailproof setup\"")
	require.NotEmpty(t, paths.Java, "Java is missing: run \"mailproof setup\"")
	infratest.Run(t, New(paths), infratest.Features{Signals: true, PIDs: true, Guards: true, KafkaKind: "apache"})
	if t.Failed() {
		return // then the stack stops only at the end of the test
	}
	left, err := filepath.Glob(tmp + "/mp-*")
	require.NoError(t, err)
	require.Empty(t, left, "data is left")
}

// Where Java or the jars are missing kfake takes Kafka's place, and says so.
func TestKfakeStandsIn(t *testing.T) {
	t.Parallel()
	stack, err := New(setup.Paths{}).Start(t.Context(), infra.Spec{LogDir: t.TempDir(), Kafka: true})
	require.NoError(t, err)
	defer func() { require.NoError(t, stack.Stop(context.Background())) }()
	require.Nil(t, stack.Postgres())
	require.Nil(t, stack.RabbitMQ())
	k := stack.Kafka()
	require.Equal(t, "kfake", k.Kind())
	require.Equal(t, "kfake", stack.Versions().KafkaKind)
	require.NotEmpty(t, stack.Versions().Kafka)
	require.Empty(t, stack.Versions().Postgres)

	require.NoError(t, k.CreateTopic(t.Context(), "events", 3))
	require.Error(t, k.CreateTopic(t.Context(), "events", 3))
	client, err := kgo.NewClient(kgo.SeedBrokers(k.Brokers()...), kgo.ConsumeTopics("events"))
	require.NoError(t, err)
	defer client.Close()
	sent := &kgo.Record{Topic: "events", Value: []byte("one")}
	require.NoError(t, client.ProduceSync(t.Context(), sent).FirstErr())
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	fetched := client.PollFetches(ctx)
	require.NoError(t, fetched.Err())
	require.Equal(t, "one", string(fetched.Records()[0].Value))

	for _, act := range []func(context.Context) error{k.Kill, k.Pause, k.Resume, k.Restart} {
		require.ErrorIs(t, act(t.Context()), infra.ErrUnsupported)
	}
	require.True(t, k.Running())
}

func TestStartNamesWhatIsMissing(t *testing.T) {
	t.Parallel()
	_, err := New(setup.Paths{}).Start(t.Context(), infra.Spec{LogDir: t.TempDir()})
	require.ErrorContains(t, err, "Postgres")
	require.ErrorContains(t, err, "RabbitMQ")
	require.ErrorContains(t, err, "mailproof setup")
	_, err = New(setup.Paths{}).Start(t.Context(), infra.Spec{Kafka: true})
	require.ErrorContains(t, err, "LogDir")
}

// The guardian has a working directory of its own.
func TestLogDirMayBeRelative(t *testing.T) {
	t.Chdir(t.TempDir())
	stack, err := New(setup.Locate()).Start(t.Context(), infra.Spec{LogDir: "logs", Postgres: true})
	require.NoError(t, err)
	require.NoError(t, stack.Stop(context.WithoutCancel(t.Context())))
	require.FileExists(t, filepath.Join("logs", "postgres.log"))
}

// A start that fails half-way leaves nothing, and says what the server said.
func TestFailedStartLeavesNothing(t *testing.T) {
	tmp := tempFolder(t)
	t.Setenv("TMPDIR", tmp)
	bin := filepath.Join(tmp, "bin")
	require.NoError(t, os.Mkdir(bin, 0o755))
	for name, script := range map[string]string{
		"initdb":   `while [ $# -gt 0 ]; do [ "$1" = -D ] && mkdir -p "$2"; shift; done`,
		"postgres": `echo "the disk is on fire"; exit 3`,
	} {
		require.NoError(t, os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755))
	}
	_, err := New(setup.Paths{PostgresBin: bin}).Start(t.Context(), infra.Spec{LogDir: t.TempDir(), Postgres: true})
	require.ErrorContains(t, err, "exit status 3")
	require.ErrorContains(t, err, "the disk is on fire")
	require.Empty(t, belongings(t, tmp+"/mp-"))
	left, err := filepath.Glob(tmp + "/mp-*")
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestStartRefusesFolderThatServersCannotEnter(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Log("only root hands data to other users")
		return
	}
	tmp := tempFolder(t)
	require.NoError(t, os.Chmod(tmp, 0o700))
	t.Setenv("TMPDIR", tmp)
	_, err := New(setup.Locate()).Start(t.Context(), infra.Spec{LogDir: t.TempDir(), Postgres: true})
	require.ErrorContains(t, err, tmp)
	require.ErrorContains(t, err, "TMPDIR")
}

// A part is started again elsewhere only when a port was really lost.
func TestFreshPorts(t *testing.T) {
	t.Parallel()
	e := &environment{progress: func(string, string) {}}
	t.Run("a port was taken", func(t *testing.T) {
		t.Parallel()
		tries := 0
		got, err := withFreshPorts(t.Context(), e, "part", func(_ context.Context, _ *environment, p *ports.Chooser) (int, error) {
			tries++
			port, err := p.Next()
			require.NoError(t, err)
			if tries > 1 {
				return port, nil
			}
			// Where another process of the machine was faster, the port is taken too.
			if l, err := net.Listen("tcp4", loopback(port)); err == nil {
				t.Cleanup(func() { l.Close() })
			}
			return 0, errors.New("address already in use")
		})
		require.NoError(t, err)
		require.NotZero(t, got)
		require.Equal(t, 2, tries)
	})
	t.Run("another error", func(t *testing.T) {
		t.Parallel()
		tries := 0
		_, err := withFreshPorts(t.Context(), e, "part", func(_ context.Context, _ *environment, p *ports.Chooser) (int, error) {
			tries++
			_, err := p.Next()
			require.NoError(t, err)
			return 0, errors.New("broken")
		})
		require.ErrorContains(t, err, "start part: broken")
		require.Equal(t, 1, tries)
	})
}

// Postgres' shared memory outlives a SIGKILL, and a machine has few segments.
func TestStopFreesSharedMemoryOfKilledPostgres(t *testing.T) {
	stack, err := New(setup.Locate()).Start(t.Context(), infra.Spec{LogDir: t.TempDir(), Postgres: true})
	require.NoError(t, err)
	defer func() { require.NoError(t, stack.Stop(context.Background())) }()
	pg := stack.(*Stack).postgres
	require.NoError(t, pg.Kill(t.Context()))
	pid, err := os.ReadFile(filepath.Join(pg.data, "postmaster.pid"))
	require.NoError(t, err)
	segment := strings.Fields(strings.Split(string(pid), "\n")[6])[1]
	require.Contains(t, segments(t), segment)
	require.NoError(t, stack.Stop(t.Context()))
	require.NotContains(t, segments(t), segment)
}

// segments are the ids of all System V shared memory; see proc(5).
func segments(t *testing.T) []string {
	t.Helper()
	b, err := os.ReadFile("/proc/sysvipc/shm")
	require.NoError(t, err)
	var ids []string
	for line := range strings.Lines(string(b)) {
		ids = append(ids, strings.Fields(line)[1])
	}
	return ids
}
