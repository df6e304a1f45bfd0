package setup

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// fakeMachine is a machine whose apt is a function of the test; everything else
// that is run, mv, rm, mkdir, is real and happens below a temporary root.
func fakeMachine(t *testing.T, apt func(root string) error) (*machine, *[]string) {
	t.Helper()
	root := t.TempDir()
	for _, dir := range []string{"/usr/sbin", "/etc"} {
		require.NoError(t, os.MkdirAll(root+dir, 0o755))
	}
	var ran []string
	m := &machine{root: root, debian: true, isRoot: true}
	m.exec = func(ctx context.Context, out io.Writer, argv ...string) error {
		line := strings.Join(argv, " ")
		ran = append(ran, line)
		switch {
		case strings.Contains(line, "apt-get update"):
			return nil
		case strings.Contains(line, "apt-get install"):
			return apt(root)
		case strings.HasPrefix(line, "dpkg-query"), strings.Contains(line, "systemctl"):
			return nil
		}
		return execute(ctx, out, argv...)
	}
	return m, &ran
}

func files(t *testing.T, root string) []string {
	t.Helper()
	var all []string
	require.NoError(t, filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
		all = append(all, strings.TrimPrefix(path, root))
		return err
	}))
	return all
}

func TestInstallKeepsServicesDownAndLeavesNothing(t *testing.T) {
	t.Parallel()
	for name, failure := range map[string]error{"success": nil, "failure": errors.New("no network")} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, ran := fakeMachine(t, func(root string) error {
				policy, err := os.ReadFile(root + policyFile)
				require.NoError(t, err)
				require.Equal(t, policyText, string(policy))
				info, err := os.Stat(root + policyFile)
				require.NoError(t, err)
				require.Equal(t, os.FileMode(0o755), info.Mode().Perm())
				cluster, err := os.ReadFile(root + clusterDir + "/" + clusterFile)
				require.NoError(t, err)
				require.Contains(t, string(cluster), "create_main_cluster = false")
				return failure
			})
			before := files(t, m.root)
			i := &installation{machine: m, out: io.Discard}
			require.ErrorIs(t, i.install(t.Context(), []string{"postgresql"}), failure)
			require.Equal(t, before, files(t, m.root))
			install := (*ran)[slices.IndexFunc(*ran, func(s string) bool { return strings.Contains(s, "apt-get install") })]
			require.Contains(t, install, "--no-install-recommends")
			require.Contains(t, install, "--no-upgrade")
		})
	}
}

func TestInstallPutsForeignPolicyBack(t *testing.T) {
	t.Parallel()
	const theirs = "#!/bin/sh\nexit 0\n"
	m, _ := fakeMachine(t, func(string) error { return errors.New("broken") })
	require.NoError(t, os.WriteFile(m.root+policyFile, []byte(theirs), 0o750))
	i := &installation{machine: m, out: io.Discard}
	require.ErrorContains(t, i.install(t.Context(), []string{"postgresql"}), "broken")
	got, err := os.ReadFile(m.root + policyFile)
	require.NoError(t, err)
	require.Equal(t, theirs, string(got))
	info, err := os.Stat(m.root + policyFile)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o750), info.Mode().Perm())
	require.NoFileExists(t, m.root+savedName)
}

// A run that was killed between putting its files in place and taking them away
// is cleaned up by the next.
func TestInstallCleansUpAfterOneThatWasKilled(t *testing.T) {
	t.Parallel()
	const theirs = "#!/bin/sh\nexit 0\n"
	m, _ := fakeMachine(t, func(string) error { return nil })
	require.NoError(t, os.WriteFile(m.root+savedName, []byte(theirs), 0o750))
	require.NoError(t, os.WriteFile(m.root+policyFile, []byte(policyText), 0o755))
	require.NoError(t, os.MkdirAll(m.root+clusterDir, 0o755))
	require.NoError(t, os.WriteFile(m.root+clusterDir+"/"+clusterFile, []byte(clusterText), 0o644))
	i := &installation{machine: m, out: io.Discard}
	require.NoError(t, i.install(t.Context(), []string{"postgresql"}))
	got, err := os.ReadFile(m.root + policyFile)
	require.NoError(t, err)
	require.Equal(t, theirs, string(got))
	require.NoFileExists(t, m.root+savedName)
	require.NoFileExists(t, m.root+clusterDir+"/"+clusterFile)
}

func TestInstallUsesSudo(t *testing.T) {
	t.Parallel()
	var ran []string
	m := &machine{root: t.TempDir(), debian: true}
	m.exec = func(_ context.Context, _ io.Writer, argv ...string) error {
		ran = append(ran, strings.Join(argv, " "))
		return nil
	}
	i := &installation{machine: m, sudo: true, out: io.Discard}
	require.NoError(t, i.install(t.Context(), []string{"maven"}))
	for _, line := range ran {
		if strings.HasPrefix(line, "dpkg") { // only asks
			continue
		}
		require.True(t, strings.HasPrefix(line, "sudo -n "), line)
	}
}

func TestMeasure(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		says           string
		download, disk float64
	}{
		"megabytes":         {"Need to get 181 MB of archives.\nAfter this operation, 629 MB of additional disk space will be used.\n", 181, 629},
		"partly downloaded": {"Need to get 239 kB/12.5 MB of archives.\nAfter this operation, 1,024 kB of additional disk space will be used.\n", 12.5, 1.024},
		"all downloaded":    {"Need to get 0 B/3 MB of archives.\nAfter this operation, 2 GB of additional disk space will be used.\n", 3, 2000},
		"frees space":       {"Need to get 5 MB of archives.\nAfter this operation, 2 GB disk space will be freed.\n", 5, -1},
		"no lists":          {"E: Unable to locate package postgresql\n", -1, -1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := &machine{debian: true}
			m.exec = func(_ context.Context, out io.Writer, argv ...string) error {
				require.Contains(t, argv, "--assume-no", "measuring must not install")
				_, err := io.WriteString(out, tt.says)
				return errors.Join(err, errors.New("exit status 1"))
			}
			download, disk := m.measure(t.Context(), []string{"postgresql"})
			require.InDelta(t, tt.download, download, 1e-9)
			require.InDelta(t, tt.disk, disk, 1e-9)
		})
	}
}

func TestPlan(t *testing.T) {
	t.Parallel()
	m := &machine{debian: true, isRoot: true}
	m.exec = func(context.Context, io.Writer, ...string) error { return nil }
	items := check(t.Context(), Paths{})
	p := m.plan(t.Context(), items)
	require.Equal(t, []string{"postgresql", "rabbitmq-server", "default-jre-headless", "maven"}, p.Packages)
	require.True(t, p.FetchJars)
	require.False(t, p.OnlyOptional())
	require.Empty(t, p.Refused)
	for _, pkg := range p.Packages {
		require.Contains(t, p.String(), pkg)
		require.Contains(t, strings.Join(p.Commands, "\n"), pkg)
	}
	require.NotContains(t, strings.Join(p.Commands, "\n"), "sudo", "a root without sudo must be able to type them")
	require.Contains(t, p.Commands[len(p.Commands)-1], os.Args[0]+" setup")

	t.Run("nothing missing", func(t *testing.T) {
		t.Parallel()
		require.True(t, m.plan(t.Context(), []Item{{Name: Postgres, Found: true}}).Empty())
	})
	t.Run("jars alone need no rights", func(t *testing.T) {
		t.Parallel()
		nobody := &machine{debian: true, exec: func(context.Context, io.Writer, ...string) error { return errors.New("no") }}
		p := nobody.plan(t.Context(), []Item{{Name: KafkaJars, Optional: true}})
		require.Empty(t, p.Refused)
		require.True(t, p.FetchJars)
		require.Empty(t, p.Packages)
		require.True(t, p.OnlyOptional())
	})
	t.Run("no rights", func(t *testing.T) {
		t.Parallel()
		nobody := &machine{debian: true, exec: func(context.Context, io.Writer, ...string) error { return errors.New("no") }}
		p := nobody.plan(t.Context(), items)
		require.Contains(t, p.Refused, "root")
		require.Contains(t, strings.Join(p.Commands, "\n"), "sudo apt-get install")
	})
	t.Run("another system", func(t *testing.T) {
		t.Parallel()
		other := &machine{isRoot: true}
		p := other.plan(t.Context(), items)
		require.Contains(t, p.Refused, "Debian")
		require.NotContains(t, strings.Join(p.Commands, "\n"), "apt-get")
	})
}

// A run may go on without what is optional, and must say so.
func TestLeave(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	optional := Plan{Missing: []Item{{Name: Java, Optional: true}}, Commands: []string{"install it"}}
	require.NoError(t, optional.leave(&out, "declined"))
	require.Contains(t, out.String(), "kfake")
	require.Contains(t, out.String(), "install it")

	needed := Plan{Missing: []Item{{Name: Postgres}, {Name: Java, Optional: true}}, Commands: []string{"install it"}}
	err := needed.leave(io.Discard, "declined")
	require.ErrorIs(t, err, ErrMissing)
	require.ErrorContains(t, err, "install it")
}

func TestAgreed(t *testing.T) {
	for name, tt := range map[string]struct {
		yes     bool
		env, is string
		want    answer
	}{
		"nobody to ask": {want: unasked},
		"option":        {yes: true, want: agreed},
		"YES=1":         {env: "YES", is: "1", want: agreed},
		"CI=true":       {env: "CI", is: "true", want: agreed},
		"YES=0":         {env: "YES", is: "0", want: unasked},
		"CI=false":      {env: "CI", is: "false", want: unasked},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("YES", "")
			t.Setenv("CI", "")
			if tt.env != "" {
				t.Setenv(tt.env, tt.is)
			}
			// Input that is no terminal is not read, whatever it says.
			o := Options{Yes: tt.yes, In: strings.NewReader("y\n"), Out: io.Discard}
			require.Equal(t, tt.want, o.agreed())
		})
	}
}

func TestLocatePostgresTakesNewest(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for _, v := range []string{"9.6", "13", "15", "17", "18"} {
		bin := filepath.Join(root, v, "bin")
		require.NoError(t, os.MkdirAll(bin, 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(bin, "initdb"), nil, 0o755))
		if v != "18" { // client tools alone are no server
			require.NoError(t, os.WriteFile(filepath.Join(bin, "postgres"), nil, 0o755))
		}
	}
	dir, major := locatePostgres(root)
	require.Equal(t, filepath.Join(root, "17", "bin"), dir)
	require.Equal(t, 17, major)
}

func TestKafkaList(t *testing.T) {
	t.Parallel()
	jars := wantedJars()
	require.NotEmpty(t, jars)
	var names []string
	for _, j := range jars {
		require.Len(t, j.sum, 64, j.name)
		names = append(names, j.name)
	}
	require.Contains(t, names, "kafka_2.13-"+KafkaVersion+".jar")
	require.Contains(t, string(kafkaPOM), "<version>"+KafkaVersion+"</version>")
}

// Whoever looks into the cache sees all jars or takes it for empty.
func TestKafkaCache(t *testing.T) {
	t.Parallel()
	fill := func(t *testing.T, dir string) {
		t.Helper()
		require.NoError(t, os.MkdirAll(filepath.Join(dir, "lib"), 0o755))
		for _, j := range wantedJars() {
			require.NoError(t, os.WriteFile(filepath.Join(dir, "lib", j.name), nil, 0o644))
		}
		require.NoError(t, os.WriteFile(filepath.Join(dir, listName), []byte(kafkaJars), 0o644))
	}
	t.Run("contents are checked", func(t *testing.T) {
		t.Parallel()
		dir := t.TempDir()
		fill(t, dir)
		require.ErrorContains(t, verify(filepath.Join(dir, "lib")), "SHA-256")
	})
	t.Run("a missing jar", func(t *testing.T) {
		t.Parallel()
		dir := t.TempDir()
		fill(t, dir)
		require.True(t, kafkaComplete(dir))
		require.NoError(t, os.Remove(filepath.Join(dir, "lib", wantedJars()[0].name)))
		require.False(t, kafkaComplete(dir))
	})
	t.Run("a list of another release", func(t *testing.T) {
		t.Parallel()
		dir := t.TempDir()
		fill(t, dir)
		require.NoError(t, os.WriteFile(filepath.Join(dir, listName), []byte("other"), 0o644))
		require.False(t, kafkaComplete(dir))
	})
	t.Run("published over a broken one", func(t *testing.T) {
		t.Parallel()
		parent := t.TempDir()
		filled, dir := filepath.Join(parent, "filling"), filepath.Join(parent, "kafka")
		fill(t, filled)
		require.NoError(t, os.MkdirAll(filepath.Join(dir, "lib"), 0o755))
		require.NoError(t, publish(filled, dir))
		require.True(t, kafkaComplete(dir))
	})
	t.Run("another process was faster", func(t *testing.T) {
		t.Parallel()
		parent := t.TempDir()
		filled, dir := filepath.Join(parent, "filling"), filepath.Join(parent, "kafka")
		fill(t, filled)
		fill(t, dir)
		require.NoError(t, publish(filled, dir))
		require.True(t, kafkaComplete(dir))
		require.True(t, kafkaComplete(filled), "left for its owner to remove")
	})
}
