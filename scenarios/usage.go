package scenarios

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"mailproof/history"
	"mailproof/target"
)

// clockTick is the unit of CPU times in /proc: USER_HZ is 100 on every Linux
// that Go runs on.
const clockTick = 10 * time.Millisecond

// usageMeter measures what processes consume over a stretch of time. A process
// that was replaced meanwhile is left out: its figures are gone with it.
type usageMeter struct {
	at    time.Time
	cpu   map[int]time.Duration // pid → CPU time at begin
	names map[int]string
	last  map[string]history.Usage
}

func (m *usageMeter) begin(processes []target.Process) {
	m.at = time.Now()
	m.cpu, m.names = map[int]time.Duration{}, map[int]string{}
	for _, p := range processes {
		if cpu, err := cpuTime(p.PID()); err == nil {
			m.cpu[p.PID()], m.names[p.PID()] = cpu, p.Name()
		}
	}
}

func (m *usageMeter) end() {
	wall := time.Since(m.at)
	m.last = map[string]history.Usage{}
	for pid, before := range m.cpu {
		after, err := cpuTime(pid)
		if err != nil {
			continue
		}
		m.last[m.names[pid]] = history.Usage{
			CPUSeconds: (after - before).Seconds(), WallSeconds: wall.Seconds(), MaxRSSBytes: peakMemory(pid),
		}
	}
}

func (m *usageMeter) result() map[string]history.Usage { return m.last }

// percent of one core that all processes whose name begins with prefix used
// since begin.
func (m *usageMeter) percent(prefix string) float64 {
	m.end()
	return cpuPercent(m.last, prefix)
}

func cpuPercent(usage map[string]history.Usage, prefix string) float64 {
	var cpu, wall float64
	for name, u := range usage {
		if strings.HasPrefix(name, prefix) {
			cpu += u.CPUSeconds
			wall = max(wall, u.WallSeconds)
		}
	}
	if wall == 0 {
		return 0
	}
	return 100 * cpu / wall
}

// cpuTime is user and system time of a process so far, from /proc/<pid>/stat.
func cpuTime(pid int) (time.Duration, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, fmt.Errorf("CPU time of process %d: %w", pid, err)
	}
	// The command name in parentheses may hold spaces: fields count from its
	// last parenthesis; utime and stime are the 12th and 13th after it.
	_, after, ok := bytes.Cut(stat[bytes.LastIndexByte(stat, ')'):], []byte(" "))
	fields := bytes.Fields(after)
	if !ok || len(fields) < 13 {
		return 0, fmt.Errorf("CPU time of process %d: /proc/%d/stat is cut short", pid, pid)
	}
	var ticks int64
	for _, f := range fields[11:13] {
		n, err := strconv.ParseInt(string(f), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("CPU time of process %d: %w", pid, err)
		}
		ticks += n
	}
	return time.Duration(ticks) * clockTick, nil
}

// peakMemory is the largest resident size of a process so far, 0 if unknown.
func peakMemory(pid int) int64 {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(status)) {
		value, ok := strings.CutPrefix(line, "VmHWM:")
		if !ok {
			continue
		}
		kb, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")), 10, 64)
		if err != nil {
			return 0
		}
		return kb << 10
	}
	return 0
}
