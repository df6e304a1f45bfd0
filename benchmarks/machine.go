package benchmarks

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Machine is what the figures were taken on.
type Machine struct {
	CPU         string  `json:"cpu"`
	Cores       int     `json:"cores"`
	MemoryBytes int64   `json:"memory_bytes"`
	Kernel      string  `json:"kernel"`
	System      string  `json:"system"`
	Go          string  `json:"go"`
	Filesystem  string  `json:"filesystem"` // of the parts' data
	LoadAtStart float64 `json:"load_at_start"`
	// BusyPercent is the share of all cores that was used over a second before
	// anything was started.
	BusyPercent float64 `json:"busy_percent"`
	// Fsync is one 8 KiB write and fdatasync at the end of a file, as Postgres
	// flushes its log, each.
	Fsync Samples `json:"fsync"`
}

// idleLimit is the share of all cores in use above which a machine is called
// busy.
const idleLimit = 10.0

// Busy reports whether something else was running when the run began.
func (m Machine) Busy() bool { return m.BusyPercent > idleLimit }

// fsyncs that are timed.
const fsyncs = 200

// inspectMachine looks at the machine before anything is started.
func inspectMachine() (Machine, error) {
	m := Machine{
		CPU: cpuModel(), Cores: runtime.NumCPU(), Kernel: kernel(), System: systemName(), Go: runtime.Version(),
		MemoryBytes: memoryBytes(), LoadAtStart: loadAverage(), Filesystem: filesystem(os.TempDir()),
	}
	m.BusyPercent = busyPercent(time.Second)
	var err error
	m.Fsync, err = measureFsync()
	return m, err
}

func cpuModel() string { return procField("/proc/cpuinfo", "model name") }

// procField is the value of the first "name : value" line.
func procField(path, name string) string {
	f, err := os.Open(path)
	if err != nil {
		return "unknown"
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		key, value, ok := strings.Cut(lines.Text(), ":")
		if ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return "unknown"
}

func memoryBytes() int64 {
	kb, err := strconv.ParseInt(strings.TrimSuffix(procField("/proc/meminfo", "MemTotal"), " kB"), 10, 64)
	if err != nil {
		return 0
	}
	return kb << 10
}

func kernel() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Sysname[:]) + " " + unix.ByteSliceToString(u.Release[:])
}

func systemName() string {
	body, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return runtime.GOOS
	}
	for line := range strings.Lines(string(body)) {
		if v, ok := strings.CutPrefix(line, "PRETTY_NAME="); ok {
			return strings.Trim(strings.TrimSpace(v), `"`)
		}
	}
	return runtime.GOOS
}

// filesystem names the type behind a folder; its magic number where it is none
// of the usual ones.
func filesystem(dir string) string {
	var s unix.Statfs_t
	if unix.Statfs(dir, &s) != nil {
		return "unknown"
	}
	known := map[int64]string{
		unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs", unix.BTRFS_SUPER_MAGIC: "btrfs",
		unix.TMPFS_MAGIC: "tmpfs", unix.OVERLAYFS_SUPER_MAGIC: "overlayfs",
	}
	if name, ok := known[s.Type]; ok {
		return name
	}
	return fmt.Sprintf("%#x", s.Type)
}

// loadAverage over the last minute.
func loadAverage() float64 {
	body, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(body), " ")
	v, err := strconv.ParseFloat(first, 64)
	if err != nil {
		return 0
	}
	return v
}

// busyPercent is the share of all cores that was not idle over d.
func busyPercent(d time.Duration) float64 {
	busy0, all0 := cpuTicks()
	time.Sleep(d) // the stretch that is measured
	busy1, all1 := cpuTicks()
	if all1 == all0 {
		return 0
	}
	return 100 * float64(busy1-busy0) / float64(all1-all0)
}

// cpuTicks of all cores since the machine was started; waiting for a disk
// counts as idle.
func cpuTicks() (busy, all int64) {
	body, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, 0
	}
	line, _, _ := strings.Cut(string(body), "\n")
	for i, f := range strings.Fields(line)[1:] {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil || i > 7 { // guest times are in user and nice already
			break
		}
		all += n
		if i != 3 && i != 4 { // idle, iowait
			busy += n
		}
	}
	return busy, all
}

func measureFsync() (s Samples, err error) {
	f, err := os.CreateTemp("", "mailproof-fsync-")
	if err != nil {
		return s, fmt.Errorf("fsync rate: %w", err)
	}
	defer func() { _ = os.Remove(f.Name()) }()
	defer func() { _ = f.Close() }() // nothing of it is kept
	page := make([]byte, 8<<10)
	for range fsyncs {
		began := time.Now()
		if _, err := f.Write(page); err != nil {
			return s, fmt.Errorf("fsync rate: %w", err)
		}
		if err := unix.Fdatasync(int(f.Fd())); err != nil {
			return s, fmt.Errorf("fsync rate: %w", err)
		}
		s.add(time.Since(began))
	}
	return s, nil
}
