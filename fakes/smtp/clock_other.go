//go:build !linux

package smtp

import "time"

var processStart = time.Now()

// monotonicRaw counts from the start of the process: comparable inside it only.
func monotonicRaw() int64 { return int64(time.Since(processStart)) }
