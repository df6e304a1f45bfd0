//go:build failpoint

// Package failpoint, tagged build: see failpoint.go.
package failpoint

import (
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// EnvVar is the variable that arms points.
const EnvVar = "FAILPOINTS"

type action struct {
	verb  string
	pause time.Duration
	at    int // the passage that acts, from 1
}

// table is read from the environment once. It is global since a point must cost
// its caller nothing but a name, and it exists in tagged builds only.
var table = sync.OnceValues(func() (map[string]action, error) { return parse(os.Getenv(EnvVar)) })

var passages = struct {
	sync.Mutex
	n map[string]int
}{n: map[string]int{}}

// At marks a crash point and does what the environment armed it with.
func At(name string) {
	armed, err := table()
	if err != nil {
		return // Check has told
	}
	a, ok := armed[name]
	if !ok {
		return
	}
	passages.Lock()
	passages.n[name]++
	n := passages.n[name]
	passages.Unlock()
	if n != a.at {
		return
	}
	a.do(name)
}

// Check reports whether the environment can be read.
func Check() error {
	_, err := table()
	return err
}

func (a action) do(name string) {
	// One line on stderr is the witness that the point was reached.
	fmt.Fprintf(os.Stderr, "failpoint %s: %s at passage %d\n", name, a.verb, a.at)
	switch a.verb {
	case "kill":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // the signal is on its way: nothing after the point may run
	case "stop":
		// The calling thread may run on for a moment after the signal is sent;
		// only being continued proves that it was stopped.
		continued := make(chan os.Signal, 1)
		signal.Notify(continued, syscall.SIGCONT)
		defer signal.Stop(continued)
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		<-continued
	case "sleep":
		time.Sleep(a.pause)
	}
}

func parse(s string) (map[string]action, error) {
	out := map[string]action{}
	for _, part := range strings.Split(s, ";") {
		part = strings.TrimSpace(part)
		if part == "" {
			continue
		}
		name, what, ok := strings.Cut(part, "=")
		if !ok || name == "" {
			return nil, fmt.Errorf("%s: %q is not name=action", EnvVar, part)
		}
		a, err := parseAction(what)
		if err != nil {
			return nil, fmt.Errorf("%s: %s: %w", EnvVar, name, err)
		}
		out[name] = a
	}
	return out, nil
}

func parseAction(what string) (action, error) {
	a := action{at: 1}
	verb, count, counted := strings.Cut(what, "@")
	if counted {
		n, err := strconv.Atoi(count)
		if err != nil || n < 1 {
			return a, fmt.Errorf("passage %q is not a number from 1 on", count)
		}
		a.at = n
	}
	verb, arg, _ := strings.Cut(verb, ":")
	a.verb = verb
	switch verb {
	case "kill", "stop":
		if arg != "" {
			return a, fmt.Errorf("%s takes no argument", verb)
		}
		return a, nil
	case "sleep":
		d, err := time.ParseDuration(arg)
		if err != nil {
			return a, fmt.Errorf("sleep: %w", err)
		}
		a.pause = d
		return a, nil
	default:
		return a, fmt.Errorf("action %q is not kill, stop or sleep:<duration>", verb)
	}
}
