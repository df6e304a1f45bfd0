package guardian

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// identity names a process for good: a pid is used again, the pair of pid and
// start time (clock ticks since boot) is not.
type identity struct {
	pid   int
	start uint64
}

// stat is what /proc/<pid>/stat says, as far as it is needed.
type stat struct {
	identity
	state   byte // R, S, D, T, Z …
	ppid    int
	session int
	threads int
}

// dead says that the process runs no more and only waits to be reaped. While
// other threads than the first are still ending it holds its files and ports.
func (s stat) dead() bool { return s.state == 'X' || s.state == 'Z' && s.threads <= 1 }

// parseStat reads proc(5) /proc/<pid>/stat. The name of the program stands in
// brackets and may hold spaces and brackets, so fields count from the last one.
func parseStat(b []byte) (stat, error) {
	open, end := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if open < 0 || end < open {
		return stat{}, fmt.Errorf("no program name in %q", b)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b[:open])))
	if err != nil {
		return stat{}, fmt.Errorf("pid: %w", err)
	}
	const (
		state, ppid, session, threads, start = 0, 1, 3, 17, 19 // fields after the name
	)
	fields := strings.Fields(string(b[end+1:]))
	if len(fields) <= start {
		return stat{}, fmt.Errorf("%d fields after the program name, want more than %d", len(fields), start)
	}
	s := stat{identity: identity{pid: pid}, state: fields[state][0]}
	if s.ppid, err = strconv.Atoi(fields[ppid]); err != nil {
		return stat{}, fmt.Errorf("ppid: %w", err)
	}
	if s.session, err = strconv.Atoi(fields[session]); err != nil {
		return stat{}, fmt.Errorf("session: %w", err)
	}
	if s.threads, err = strconv.Atoi(fields[threads]); err != nil {
		return stat{}, fmt.Errorf("number of threads: %w", err)
	}
	if s.start, err = strconv.ParseUint(fields[start], 10, 64); err != nil {
		return stat{}, fmt.Errorf("start time: %w", err)
	}
	return s, nil
}

// look reads the state of one process; ok is false when there is none.
func look(pid int) (s stat, ok bool, err error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
		return stat{}, false, nil
	}
	if err != nil {
		return stat{}, false, fmt.Errorf("look at process %d: %w", pid, err)
	}
	s, err = parseStat(b)
	if err != nil {
		return stat{}, false, fmt.Errorf("look at process %d: %w", pid, err)
	}
	return s, true, nil
}

// table is every process of the machine at about one moment.
type table map[int]stat

func lookAtAll() (table, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	t := make(table, len(entries))
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue // not a process
		}
		s, ok, err := look(pid)
		if err != nil {
			return nil, err
		}
		if ok {
			t[pid] = s
		}
	}
	return t, nil
}

// has reports whether exactly this process still runs.
func (t table) has(id identity) bool {
	s, ok := t[id.pid]
	return ok && s.start == id.start && !s.dead()
}

// family adds to members every process, dead ones too, that descends from a
// member, or shares the session of a member that leads one.
func (t table) family(members map[identity]bool) {
	for grown := true; grown; {
		grown = false
		for _, s := range t {
			if members[s.identity] {
				continue
			}
			if t.isMember(members, s.ppid, s.start) || t.isMember(members, s.session, s.start) {
				members[s.identity] = true
				grown = true
			}
		}
	}
}

// isMember reports whether pid is a member, and older than a process that
// started at born: a younger one is another process that got the same pid.
func (t table) isMember(members map[identity]bool, pid int, born uint64) bool {
	s, ok := t[pid]
	return ok && members[s.identity] && s.start <= born
}

// signalFamily sends sig to every root and all that descend from them, again
// and again until done says that each member has taken it. Roots come first:
// a server that is gone or stopped starts no more children.
func signalFamily(sig syscall.Signal, done func(stat) bool, roots ...identity) error {
	members := make(map[identity]bool)
	for _, r := range roots {
		members[r] = true
	}
	sent := make(map[identity]bool)
	send := func(id identity) {
		if sent[id] && sig != syscall.SIGKILL {
			return
		}
		sent[id] = true
		_ = syscall.Kill(id.pid, sig) // ESRCH: gone since the look, which is what the next look will say
	}
	deadline := time.Now().Add(bound)
	for {
		t, err := lookAtAll()
		if err != nil {
			return err
		}
		t.family(members)
		left := 0
		for _, r := range roots {
			if t.has(r) && !done(t[r.pid]) {
				send(r)
			}
		}
		for id := range members {
			if t.has(id) && !done(t[id.pid]) {
				left++
				send(id)
			}
		}
		if left == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d processes have not taken %v after %v", left, sig, bound)
		}
		time.Sleep(poll)
	}
}

// never is for SIGKILL: only being gone counts.
func never(stat) bool { return false }

func stopped(s stat) bool { return s.state == 'T' || s.state == 't' }

func notStopped(s stat) bool { return !stopped(s) }
