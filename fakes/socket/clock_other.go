//go:build !linux

package socket

import "time"

var processStart = time.Now()

// Monotonic counts from the start of the process: comparable inside it only.
func Monotonic() int64 { return int64(time.Since(processStart)) }
