package setup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
)

// What is put in place for the time of an installation. A run that was killed
// in between leaves it; the next one recognises and removes it.
const (
	// policyFile is asked by the packages' scripts whether they may start their
	// service; see invoke-rc.d(8).
	policyFile = "/usr/sbin/policy-rc.d"
	policyText = "#!/bin/sh\n# mailproof: temporary, keeps new services from starting\nexit 101\n"
	savedName  = policyFile + ".before-mailproof"
	// clusterDir is read by the script that makes a cluster for a new Postgres.
	clusterDir  = "/etc/postgresql-common/createcluster.d"
	clusterFile = "mailproof.conf"
	clusterText = "# mailproof: temporary, see pg_createcluster(8)\ncreate_main_cluster = false\n"
)

// installation is one use of apt.
type installation struct {
	*machine
	sudo bool
	out  io.Writer
}

// privileged runs a command with the rights to install.
func (i *installation) privileged(ctx context.Context, out io.Writer, argv ...string) error {
	if i.sudo {
		argv = append([]string{"sudo", "-n"}, argv...)
	}
	return i.exec(ctx, out, argv...)
}

// install installs packages, starts and enables none of their services, and
// leaves nothing else behind. Once dpkg is at work a signal is heeded only after
// it has finished and everything is back in its place.
func (i *installation) install(ctx context.Context, packages []string) (err error) {
	if err := i.privileged(ctx, i.out, "apt-get", "update", "-q"); err != nil {
		return err
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	working := context.WithoutCancel(ctx)
	before := i.installed(working)
	undo, err := i.keepServicesDown(working)
	defer func() { err = errors.Join(err, undo(working)) }()
	if err != nil {
		return err
	}
	apt := append([]string{
		"env", "DEBIAN_FRONTEND=noninteractive", "NEEDRESTART_SUSPEND=1",
		"apt-get", "install", "-q", "-y", "--no-install-recommends", "--no-upgrade",
	}, packages...)
	if err := i.privileged(working, i.out, apt...); err != nil {
		return err
	}
	if err := i.disableNew(working, before); err != nil {
		return err
	}
	select {
	case s := <-signals:
		return fmt.Errorf("stopped by %v after the installation", s)
	default:
		return ctx.Err()
	}
}

// keepServicesDown puts both files in place. The undo is valid, and needed, also
// when an error is returned.
func (i *installation) keepServicesDown(ctx context.Context) (undo func(context.Context) error, err error) {
	var steps []func(context.Context) error
	undo = func(ctx context.Context) error {
		var errs []error
		for _, step := range slices.Backward(steps) {
			errs = append(errs, step(ctx))
		}
		return errors.Join(errs...)
	}
	if i.foreign(policyFile, policyText) {
		if err := i.privileged(ctx, i.out, "mv", i.root+policyFile, i.root+savedName); err != nil {
			return undo, err
		}
	}
	steps = append(steps, i.restorePolicy)
	if err := i.write(ctx, policyFile, policyText, "755"); err != nil {
		return undo, err
	}
	if !isDir(i.root + clusterDir) {
		parents := missingParents(i.root + clusterDir)
		steps = append(steps, func(ctx context.Context) error {
			// Package postgresql-common may own one of them by now; a directory
			// that is not empty stays.
			return i.privileged(ctx, i.out, append([]string{"rmdir", "--ignore-fail-on-non-empty"}, parents...)...)
		})
		if err := i.privileged(ctx, i.out, "mkdir", "-p", i.root+clusterDir); err != nil {
			return undo, err
		}
	}
	file := clusterDir + "/" + clusterFile
	steps = append(steps, func(ctx context.Context) error { return i.privileged(ctx, i.out, "rm", "-f", i.root+file) })
	return undo, i.write(ctx, file, clusterText, "644")
}

// foreign reports whether path exists and is not what mailproof left there.
func (i *installation) foreign(path, ours string) bool {
	b, err := os.ReadFile(i.root + path)
	if errors.Is(err, os.ErrNotExist) {
		return false
	}
	return err != nil || string(b) != ours
}

// restorePolicy removes the policy and puts back the one that was there, in this
// run or in one before that was killed.
func (i *installation) restorePolicy(ctx context.Context) error {
	if err := i.privileged(ctx, i.out, "rm", "-f", i.root+policyFile); err != nil {
		return err
	}
	if _, err := os.Lstat(i.root + savedName); err != nil {
		return nil // there was none
	}
	return i.privileged(ctx, i.out, "mv", i.root+savedName, i.root+policyFile)
}

// write puts a file in place through install(1), which works with sudo.
func (i *installation) write(ctx context.Context, path, text, mode string) error {
	tmp, err := os.CreateTemp("", "mailproof-setup-")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.WriteString(text)
	if err := errors.Join(err, tmp.Close()); err != nil {
		return err
	}
	return i.privileged(ctx, i.out, "install", "-m", mode, tmp.Name(), i.root+path)
}

// missingParents lists dir and those above it that do not exist, lowest first.
func missingParents(dir string) []string {
	var missing []string
	for d := dir; !isDir(d); d = filepath.Dir(d) {
		missing = append(missing, d)
	}
	return missing
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// installed lists the installed packages.
func (i *installation) installed(ctx context.Context) map[string]bool {
	packages := make(map[string]bool)
	for line := range strings.Lines(i.text(ctx, "dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n")) {
		if name, ok := strings.CutSuffix(strings.TrimSpace(line), " installed"); ok {
			packages[name] = true
		}
	}
	return packages
}

var unitFile = regexp.MustCompile(`(?m)/systemd/system/([^/@\n]+\.(?:service|socket|timer))$`)

// disableNew takes back what the scripts of new packages do even when their
// service may not start: they enable it, so it would start at the next boot.
func (i *installation) disableNew(ctx context.Context, before map[string]bool) error {
	// Without systemd, in a container, the links are made all the same, for a
	// systemd that might come.
	disable := []string{"systemctl", "--quiet", "disable"}
	if lookPath("systemctl") == "" {
		// It serves packages' scripts, and refuses where it sees none.
		disable = []string{"env", "DPKG_MAINTSCRIPT_PACKAGE=mailproof", "deb-systemd-helper", "disable"}
	}
	var units []string
	for name := range i.installed(ctx) {
		if before[name] {
			continue
		}
		for _, m := range unitFile.FindAllStringSubmatch(i.text(ctx, "dpkg", "-L", name), -1) {
			units = append(units, m[1])
		}
	}
	if len(units) == 0 {
		return nil
	}
	slices.Sort(units)
	return i.privileged(ctx, i.out, append(disable, units...)...)
}
