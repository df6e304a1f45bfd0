package history

import "golang.org/x/sys/unix"

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
