//go:build !failpoint

// Package failpoint names the crash points between two steps of the system and,
// in a build with the tag "failpoint", stops or kills the process at one of
// them.
//
// In a release build [At] is empty and inlined: neither the call nor the name
// of the point is in the binary. In a tagged build points are armed by the
// environment, several separated by ";":
//
//	FAILPOINTS="worker.after-claim=kill@3;bridge.after-insert=sleep:2s"
//
// kill ends the process with SIGKILL, stop halts it with SIGSTOP until somebody
// continues it, sleep:<duration> waits. "@n" acts at the n-th passage only; the
// default is the first.
//
// "@path" instead of a list reads the list from that file at each passage, so
// that a running process can be armed and disarmed; passages are counted anew
// when the file says something new. Before it acts, a point writes the line
//
//	<name> <action> <passage> <process id>
//
// into the named pipe path.hits: the witness that it was reached.
//
// Package failpoint imports nothing of this module.
package failpoint

import (
	"errors"
	"os"
)

// EnvVar is the variable that arms points.
const EnvVar = "FAILPOINTS"

// ErrRelease is returned by [Check] when points are armed that this binary does
// not have: a test that arms them would otherwise prove nothing.
var ErrRelease = errors.New(EnvVar + " is set but the binary was built without the tag failpoint")

// At marks a crash point.
func At(string) {}

// Check reports whether the environment asks for something that this build
// cannot do.
func Check() error {
	if os.Getenv(EnvVar) != "" {
		return ErrRelease
	}
	return nil
}
