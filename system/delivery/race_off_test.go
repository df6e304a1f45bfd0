//go:build !race

package delivery

const fewerAttempts = 0
