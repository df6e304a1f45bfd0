package target

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"mailproof/history"
)

const (
	// readyEvery is how often each process is asked whether it is ready.
	readyEvery = 200 * time.Millisecond
	// readyTimeout of one question: longer than the services give a part that
	// does not answer.
	readyTimeout = 5 * time.Second
)

// readiness asks the processes for /readyz and remembers the last answers.
type readiness struct {
	http *http.Client
	// tell hears of each change of an answer.
	tell func(history.Process)

	mu   sync.Mutex
	last map[string]readyAnswer // by process
}

// readyAnswer is what one life of a process said last: "" is ready.
type readyAnswer struct {
	pid int
	why string
}

func newReadiness(tell func(history.Process)) *readiness {
	return &readiness{
		http: &http.Client{Timeout: readyTimeout, Transport: &http.Transport{MaxIdleConnsPerHost: 2}},
		tell: tell, last: map[string]readyAnswer{},
	}
}

// run asks until ctx ends, each process by itself: one that is slow to answer
// must not hide another.
func (r *readiness) run(ctx context.Context, programs []*program) {
	var all sync.WaitGroup
	defer r.http.CloseIdleConnections()
	defer all.Wait()
	for _, p := range programs {
		all.Go(func() {
			tick := time.NewTicker(readyEvery)
			defer tick.Stop()
			for {
				r.look(ctx, p)
				select {
				case <-ctx.Done():
					return
				case <-tick.C:
				}
			}
		})
	}
}

// look asks one process. One that does not run, or does not answer, says
// nothing: its life is told elsewhere.
func (r *readiness) look(ctx context.Context, p *program) {
	addr, pid := p.addr(), p.PID()
	if addr == "" || pid == 0 {
		return
	}
	why, err := r.ask(ctx, addr)
	if err != nil || p.PID() != pid {
		return
	}
	r.mu.Lock()
	old, known := r.last[p.name]
	r.last[p.name] = readyAnswer{pid, why}
	r.mu.Unlock()
	switch {
	case known && old.pid == pid && sameParts(old.why, why):
	case why == "":
		r.tell(history.Process{Name: p.name, PID: pid, Event: "ready", Detail: "readyz", Wall: time.Now()})
	default:
		r.tell(history.Process{Name: p.name, PID: pid, Event: "unready", Detail: why, Wall: time.Now()})
	}
}

// sameParts reports whether two answers name the same parts: the words of an
// error change with every port that a client dials from.
func sameParts(a, b string) bool {
	names := func(why string) string {
		var parts []string
		for _, line := range strings.Split(why, "; ") {
			name, _, _ := strings.Cut(line, ": ")
			parts = append(parts, name)
		}
		return strings.Join(parts, ";")
	}
	return names(a) == names(b)
}

// ask returns "" or the reasons that the answer names.
func (r *readiness) ask(ctx context.Context, addr string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/readyz", nil)
	if err != nil {
		return "", fmt.Errorf("readiness: %w", err)
	}
	resp, err := r.http.Do(req)
	if err != nil {
		return "", fmt.Errorf("readiness: %w", err)
	}
	defer func() { _ = resp.Body.Close() }() // only read
	if resp.StatusCode == http.StatusOK {
		return "", nil
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxLine))
	if err != nil {
		return "", fmt.Errorf("readiness: %w", err)
	}
	return reasons(body), nil
}

// reasons are the parts of an answer that are not "ok".
func reasons(body []byte) string {
	var parts map[string]string
	if json.Unmarshal(body, &parts) != nil {
		return "not ready: " + strings.TrimSpace(string(body))
	}
	var why []string
	for _, name := range slices.Sorted(maps.Keys(parts)) {
		if parts[name] != "ok" && name != "status" {
			why = append(why, name+": "+parts[name])
		}
	}
	if len(why) == 0 {
		return "not ready"
	}
	return strings.Join(why, "; ")
}

// Unready says of each process that runs why it is not ready, as of its last
// answer; it is empty when all are. Only a pipeline with WatchReadiness knows.
func (p *Pipeline) Unready() map[string]string {
	out := map[string]string{}
	if p.readiness == nil {
		return out
	}
	p.readiness.mu.Lock()
	defer p.readiness.mu.Unlock()
	for _, prog := range p.programs {
		switch pid, last := prog.PID(), p.readiness.last[prog.name]; {
		case pid == 0:
			out[prog.name] = "it does not run"
		case last.pid != pid:
			out[prog.name] = "it has not answered yet"
		case last.why != "":
			out[prog.name] = last.why
		}
	}
	return out
}
