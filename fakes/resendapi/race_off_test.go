//go:build !race

package resendapi

const raceEnabled = false
