package target

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"mailproof/history"
)

// Mark is where a measurement of usage begins.
type Mark struct {
	at    time.Time
	lives map[*life]float64 // CPU seconds so far
}

// Mark begins a measurement of what the processes use.
func (p *Pipeline) Mark() Mark {
	m := Mark{at: time.Now(), lives: map[*life]float64{}}
	for _, prog := range p.programs {
		if l := prog.current(); l != nil {
			m.lives[l] = l.cpu()
		}
	}
	return m
}

// Since is what each process used since the mark, lives that ended in between
// not counted but for the latest: the kernel keeps no figures of the dead that
// were replaced.
func (p *Pipeline) Since(m Mark) map[string]history.Usage {
	out := map[string]history.Usage{}
	for _, prog := range p.programs {
		l := prog.current()
		if l == nil {
			continue
		}
		out[prog.name] = history.Usage{
			CPUSeconds:  l.cpu() - m.lives[l],
			WallSeconds: time.Since(m.at).Seconds(),
			MaxRSSBytes: l.peak(),
		}
	}
	return out
}

// cpu is user and system time of this life so far, in seconds.
func (l *life) cpu() float64 {
	if !l.running() {
		s := l.cmd.ProcessState
		return (s.UserTime() + s.SystemTime()).Seconds()
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", l.cmd.Process.Pid))
	if err != nil {
		return 0
	}
	// utime and stime are fields 14 and 15, the 12th and 13th after the name.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) < 13 {
		return 0
	}
	const ticksPerSecond = 100 // USER_HZ, fixed on Linux
	var ticks float64
	for _, f := range fields[11:13] {
		n, err := strconv.ParseFloat(f, 64)
		if err != nil {
			return 0
		}
		ticks += n
	}
	return ticks / ticksPerSecond
}

// peak is the largest resident set of a running life, in bytes; 0 if unknown.
func (l *life) peak() int64 {
	if !l.running() {
		return 0
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", l.cmd.Process.Pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
			if err != nil {
				return 0
			}
			return kb << 10
		}
	}
	return 0
}
