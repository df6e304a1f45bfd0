package benchmarks

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// Names of the parts whose CPU time is told apart.
const (
	partPostgres = "Postgres"
	partRabbit   = "RabbitMQ"
	partKafka    = "Kafka"
	partNotifyd  = "notifyd"
	partBookingd = "bookingd"
	// partSelf is this process: the mail server (the fake), the load and the
	// readers of evidence, or the bare clients.
	partSelf = "mail server and clients"
)

// clockTick is the unit of CPU times in /proc: USER_HZ is 100 on every Linux
// that Go runs on.
const clockTick = 10 * time.Millisecond

// cpuClock reads the CPU time of parts, each the sum over a tree of processes.
// Postgres starts a process per connection: one that has ended counts through
// its parent, which waited for it.
type cpuClock struct{ roots map[string][]int }

// reading of a cpuClock, seconds by part.
type reading map[string]float64

func (c cpuClock) read() reading {
	table := processTable()
	out := reading{}
	for part, pids := range c.roots {
		for _, pid := range pids {
			out[part] += table.tree(pid).Seconds()
		}
	}
	self := table.own[os.Getpid()]
	out[partSelf] = self.alive.Seconds()
	return out
}

// since is what each part used after an earlier reading.
func (c cpuClock) since(before reading) map[string]float64 {
	now := c.read()
	out := map[string]float64{}
	for part, seconds := range now {
		out[part] = max(0, seconds-before[part])
	}
	return out
}

type procTable struct {
	own      map[int]procTime
	children map[int][]int
}

type procTime struct{ alive, reaped time.Duration }

// tree is the CPU time of a process, of its descendants, and of those of them
// that have ended and were waited for.
func (t procTable) tree(pid int) time.Duration {
	sum := t.own[pid].alive + t.own[pid].reaped
	for _, child := range t.children[pid] {
		sum += t.tree(child)
	}
	return sum
}

// processTable reads /proc once. Processes that end meanwhile are left out.
func processTable() procTable {
	t := procTable{own: map[int]procTime{}, children: map[int][]int{}}
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return t
	}
	for _, path := range stats {
		body, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		pid, parent, times, err := parseStat(body)
		if err != nil {
			continue
		}
		t.own[pid] = times
		t.children[parent] = append(t.children[parent], pid)
	}
	return t
}

// parseStat reads what is needed of /proc/<pid>/stat (proc(5)): fields count
// from the last parenthesis, since the name in them may hold spaces.
func parseStat(body []byte) (pid, parent int, times procTime, err error) {
	head, _, ok := bytes.Cut(body, []byte(" "))
	end := bytes.LastIndexByte(body, ')')
	if !ok || end < 0 {
		return 0, 0, times, fmt.Errorf("no process status: %.40q", body)
	}
	fields := bytes.Fields(body[end+1:])
	if len(fields) < 15 {
		return 0, 0, times, fmt.Errorf("process status of %d fields", len(fields))
	}
	if pid, err = strconv.Atoi(string(head)); err != nil {
		return 0, 0, times, err
	}
	if parent, err = strconv.Atoi(string(fields[1])); err != nil {
		return 0, 0, times, err
	}
	var ticks [4]int64 // utime, stime, cutime, cstime
	for i := range ticks {
		if ticks[i], err = strconv.ParseInt(string(fields[11+i]), 10, 64); err != nil {
			return 0, 0, times, err
		}
	}
	times.alive = time.Duration(ticks[0]+ticks[1]) * clockTick
	times.reaped = time.Duration(ticks[2]+ticks[3]) * clockTick
	return pid, parent, times, nil
}

// with adds parts to a clock.
func (c cpuClock) with(parts map[string][]int) cpuClock {
	roots := maps.Clone(c.roots)
	maps.Copy(roots, parts)
	return cpuClock{roots}
}

// sumCPU of all parts.
func sumCPU(cpu map[string]float64) float64 {
	var sum float64
	for _, s := range cpu {
		sum += s
	}
	return sum
}
