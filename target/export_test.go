package target

import (
	"fmt"
	"os"
	"time"

	"mailproof/history"
)

// MakeOrphan starts a program that nobody guards, writes its pid to path and
// waits to be killed. The pid is written whole: the reader waits for the line's
// end.
func MakeOrphan(path string) int {
	p := &program{
		name: "sleeper", path: "/bin/sh", args: []string{"-c", `echo '{"msg":"ready"}'; exec sleep 600`}, log: path + ".log", ready: time.Minute,
		guard: func(int) error { return nil }, spawn: newSpawner(), tell: func(history.Process) {},
	}
	if _, err := p.fork(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if err := os.WriteFile(path, fmt.Appendf(nil, "%d\n", p.PID()), 0o644); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	select {}
}
