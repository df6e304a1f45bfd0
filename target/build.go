package target

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// Binaries are the programs of mailproof's own system.
type Binaries struct {
	Bookingd string
	Notifyd  string
}

// BuildConfig says how to build them.
type BuildConfig struct {
	// Root of the module; "" looks upwards from the working directory.
	Root string
	// Dir receives the binaries. Required.
	Dir string
	// Race builds with the race detector.
	Race bool
	// Tags of the build, such as "failpoint".
	Tags []string
	// Overlay is a "go build -overlay" file: a planted defect.
	Overlay string
}

// modulePath is the module that has the programs.
const modulePath = "mailproof"

// Build builds bookingd and notifyd. The compiler's cache makes a second call
// cheap.
func Build(ctx context.Context, c BuildConfig) (Binaries, error) {
	if c.Dir == "" {
		return Binaries{}, errors.New("build the system: no directory for the binaries")
	}
	dir, err := filepath.Abs(c.Dir)
	if err != nil {
		return Binaries{}, fmt.Errorf("build the system: %w", err)
	}
	root := c.Root
	if root == "" {
		if root, err = moduleRoot(); err != nil {
			return Binaries{}, fmt.Errorf("build the system: %w", err)
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return Binaries{}, fmt.Errorf("build the system: %w", err)
	}
	// An interrupted go command can leave its folder of half-built packages.
	half, err := os.MkdirTemp(dir, "half-built-")
	if err != nil {
		return Binaries{}, fmt.Errorf("build the system: %w", err)
	}
	defer os.RemoveAll(half)
	cmd := exec.CommandContext(ctx, "go", c.args(dir)...)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "GOTMPDIR="+half)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = giveUp
	if c.Race {
		cmd.Env = append(cmd.Env, "CGO_ENABLED=1")
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return Binaries{}, fmt.Errorf("build the system: go %s: %w\n%s", strings.Join(cmd.Args[1:], " "), err, out)
	}
	return in(dir), nil
}

// giveUp is how long an interrupted build may take to clean up.
const giveUp = 5 * time.Second

func (c BuildConfig) args(dir string) []string {
	args := []string{"build", "-o", dir + string(filepath.Separator)}
	if c.Race {
		args = append(args, "-race")
	}
	if len(c.Tags) > 0 {
		args = append(args, "-tags="+strings.Join(c.Tags, ","))
	}
	if c.Overlay != "" {
		args = append(args, "-overlay="+c.Overlay)
	}
	return append(args, "./system/cmd/bookingd", "./system/cmd/notifyd")
}

func in(dir string) Binaries {
	return Binaries{Bookingd: filepath.Join(dir, "bookingd"), Notifyd: filepath.Join(dir, "notifyd")}
}

// Beside returns the binaries that lie beside the running program, as "make
// build" leaves them; ok is false when one is missing.
func Beside() (b Binaries, ok bool) {
	self, err := os.Executable()
	if err != nil {
		return Binaries{}, false
	}
	b = in(filepath.Dir(self))
	for _, path := range []string{b.Bookingd, b.Notifyd} {
		if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() {
			return Binaries{}, false
		}
	}
	return b, true
}

// moduleRoot looks for the module's go.mod from the working directory upwards.
func moduleRoot() (string, error) {
	start, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for dir := start; ; dir = filepath.Dir(dir) {
		body, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(string(body), "module "+modulePath+"\n") {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("no source tree of module %s at or above %s", modulePath, start)
		}
	}
}
