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

// hitsSuffix names the pipe beside an orders file into which each action is
// told before it is taken.
const hitsSuffix = ".hits"

type action struct {
	verb  string
	pause time.Duration
	at    int // the passage that acts, from 1
}

// table is read from the environment once. It is global since a point must cost
// its caller nothing but a name, and it exists in tagged builds only.
var table = sync.OnceValues(func() (map[string]action, error) { return parse(os.Getenv(EnvVar)) })

// passages are counted from the moment that a point was armed: new orders begin
// a new count.
var passages = struct {
	sync.Mutex
	orders string
	n      map[string]int
}{n: map[string]int{}}

// At marks a crash point and does what it was armed with.
func At(name string) {
	orders, hits := os.Getenv(EnvVar), ""
	armed, err := table()
	if path, ok := strings.CutPrefix(orders, "@"); ok {
		orders, hits = read(path), path+hitsSuffix
		armed, err = parse(orders)
	}
	if err != nil {
		return // Check has told of the environment; a file is somebody's to write well
	}
	n := count(orders, name)
	if a, ok := armed[name]; ok && n == a.at {
		a.do(name, hits)
	}
}

// count is which passage of the point under these orders this is, from 1. It is
// asked at every passage, so that orders that come again after others count anew.
func count(orders, name string) int {
	passages.Lock()
	defer passages.Unlock()
	if orders != passages.orders {
		passages.orders, passages.n = orders, map[string]int{}
	}
	passages.n[name]++
	return passages.n[name]
}

// read is what the file orders now; one that is not there orders nothing.
func read(path string) string {
	body, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(body))
}

// Check reports whether the environment can be read.
func Check() error {
	if strings.HasPrefix(os.Getenv(EnvVar), "@") {
		return nil
	}
	_, err := table()
	return err
}

// tell writes the witness that the point was reached: a line on stderr and,
// where somebody arms by file, into the pipe. It is written before the action,
// after which nothing of this process can be relied upon.
func (a action) tell(name, hits string) {
	fmt.Fprintf(os.Stderr, "failpoint %s: %s at passage %d\n", name, a.verb, a.at)
	if hits == "" {
		return
	}
	// Without a reader the open fails at once, and the harness sees no hit.
	pipe, err := os.OpenFile(hits, os.O_WRONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		fmt.Fprintf(os.Stderr, "failpoint %s: nobody hears of it: %v\n", name, err)
		return
	}
	defer pipe.Close()
	fmt.Fprintf(pipe, "%s %s %d %d\n", name, a.verb, a.at, os.Getpid())
}

func (a action) do(name, hits string) {
	a.tell(name, hits)
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
