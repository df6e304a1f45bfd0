//go:build race

package main

// raceFlags build the binary with the race detector when the tests have it.
func raceFlags() []string { return []string{"-race"} }
