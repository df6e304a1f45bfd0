//go:build race

package resendapi

const raceEnabled = true
