package socket

import "golang.org/x/sys/unix"

// Monotonic is CLOCK_MONOTONIC_RAW in nanoseconds: the same number in every
// process of this machine, which no clock adjustment bends.
func Monotonic() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_RAW, &ts); err != nil {
		return 0
	}
	return ts.Nano()
}
