//go:build race

package delivery

// fewerAttempts makes the search smaller where the race detector makes it ten
// times slower; it has one goroutine for each search and nothing to race with.
const fewerAttempts = 1
