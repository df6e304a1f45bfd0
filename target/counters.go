package target

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	// scrapeEvery is how often counters are read, so that a SIGKILL takes at
	// most this much of them away.
	scrapeEvery   = time.Second
	scrapeTimeout = 700 * time.Millisecond
)

// counters adds up the counters of processes that lose them when they are
// killed. What a process counted after its last scrape is lost: after a kill
// every sum is a lower bound.
type counters struct {
	http *http.Client

	mu   sync.Mutex
	last map[*life]map[string]float64
}

func newCounters() *counters {
	return &counters{
		http: &http.Client{Timeout: scrapeTimeout, Transport: &http.Transport{MaxIdleConnsPerHost: 1}},
		last: map[*life]map[string]float64{},
	}
}

// run scrapes until ctx ends.
func (c *counters) run(ctx context.Context, programs []*program) {
	tick := time.NewTicker(scrapeEvery)
	defer tick.Stop()
	defer c.http.CloseIdleConnections()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for _, p := range programs {
			_ = c.scrape(ctx, p) // killed or stopped: the figures before count
		}
	}
}

// scrape reads one process's counters.
func (c *counters) scrape(ctx context.Context, p *program) error {
	l, addr := p.current(), p.addr()
	if addr == "" {
		return nil
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/metrics", nil)
	if err != nil {
		return fmt.Errorf("counters of %s: %w", p.name, err)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return fmt.Errorf("counters of %s: %w", p.name, err)
	}
	defer func() { _ = resp.Body.Close() }() // only read
	values, err := parseCounters(resp.Body)
	if err != nil {
		return fmt.Errorf("counters of %s: %w", p.name, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last[l] = values
	return nil
}

// sum over all processes and lives.
func (c *counters) sum() map[string]float64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := map[string]float64{}
	for values := range maps.Values(c.last) {
		for name, v := range values {
			out[name] += v
		}
	}
	return out
}

// parseCounters reads the counters of the system (names that end in _total and
// begin with a service's name) from Prometheus' text format. The key is the
// sample as it is printed: name and labels.
func parseCounters(r io.Reader) (map[string]float64, error) {
	out := map[string]float64{}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		line := lines.Text()
		i := strings.LastIndexByte(line, ' ')
		if i < 0 || strings.HasPrefix(line, "#") {
			continue
		}
		name, _, _ := strings.Cut(line[:i], "{")
		if !strings.HasSuffix(name, "_total") || strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") {
			continue
		}
		v, err := strconv.ParseFloat(line[i+1:], 64)
		if err != nil {
			return nil, fmt.Errorf("sample %q: %w", line, err)
		}
		out[line[:i]] = v
	}
	return out, lines.Err()
}
