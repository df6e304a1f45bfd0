package history

import (
	"cmp"
	"slices"
	"sort"
	"time"

	"golang.org/x/sys/unix"
)

// Now is the time base of every record: nanoseconds of CLOCK_MONOTONIC_RAW.
// All processes of one machine share it, and no clock adjustment bends it
// (CLOCK_MONOTONIC is slewed by NTP). It returns 0 only where the kernel has no
// such clock; a zero time is refused by the recorder.
func Now() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_RAW, &ts); err != nil {
		return 0
	}
	return ts.Nano()
}

// clockPair is one instant on both clocks.
type clockPair struct {
	mono int64
	wall int64 // nanoseconds since 1970
}

func (h *History) pairClocks() {
	add := func(mono int64, wall time.Time) {
		if mono > 0 && !wall.IsZero() {
			h.pairs = append(h.pairs, clockPair{mono, wall.UnixNano()})
		}
	}
	if h.Meta != nil {
		add(h.Meta.At, h.Meta.Wall)
	}
	for _, p := range h.Phases {
		add(p.At, p.Wall)
	}
	for _, p := range h.Processes {
		add(p.At, p.Wall)
	}
	if h.Final != nil {
		add(h.Final.At, h.Final.Wall)
	}
	slices.SortStableFunc(h.pairs, func(a, b clockPair) int { return cmp.Compare(a.mono, b.mono) })
	for i := 1; i < len(h.pairs); i++ {
		a, b := h.pairs[i-1], h.pairs[i]
		if jump := time.Duration((b.wall - a.wall) - (b.mono - a.mono)); jump.Abs() > h.jump.Abs() {
			h.jump = jump
		}
	}
	// Where the wall clock was set back, only what follows the jump can still
	// be told apart.
	h.pairs = slices.CompactFunc(h.pairs, func(a, b clockPair) bool { return b.wall <= a.wall || b.mono <= a.mono })
}

// ClockJump is the most by which the wall clock went ahead of the monotonic one
// between two pairs of readings, negative where it was set back. What NTP does to
// a clock in the minutes of a run is some ten milliseconds; after a jump nobody
// can place a commit on the run's time base, see [History.Monotonic].
func (h *History) ClockJump() time.Duration { return h.jump }

// Monotonic places an instant of the wall clock, a commit's for example, on the
// run's time base. Two clocks drift apart by some ten milliseconds in an hour,
// more while NTP corrects one of them, so the nearest pairs recorded before and
// after the instant are used. It returns 0 for a history without any pair.
func (h *History) Monotonic(wall time.Time) int64 {
	n := len(h.pairs)
	if n == 0 {
		return 0
	}
	w := wall.UnixNano()
	i := sort.Search(n, func(i int) bool { return h.pairs[i].wall > w })
	if i == 0 {
		return h.pairs[0].mono + w - h.pairs[0].wall
	}
	before := h.pairs[i-1]
	if i == n {
		return before.mono + w - before.wall
	}
	after := h.pairs[i]
	rate := float64(after.mono-before.mono) / float64(after.wall-before.wall)
	return before.mono + int64(float64(w-before.wall)*rate)
}
