// Package ports chooses free TCP ports on loopback.
package ports

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
)

// Chooser chooses free TCP ports on loopback, each once.
//
// They lie below the range out of which the kernel takes source ports. A server
// that is killed must find its port free when it comes back; inside that range
// a client that dials the dead server may be given that very port, and even
// connect to itself.
type Chooser struct {
	chosen []int
}

const (
	lowestPort = 10000
	portTries  = 200
)

// Next is a port that nobody listens on.
func (p *Chooser) Next() (int, error) {
	low := lowestSourcePort()
	for range portTries {
		port := lowestPort + rand.IntN(low-lowestPort)
		if isFree(port) && !p.has(port) {
			p.chosen = append(p.chosen, port)
			return port, nil
		}
	}
	return 0, fmt.Errorf("no free port on loopback between %d and %d after %d tries", lowestPort, low, portTries)
}

func (p *Chooser) has(port int) bool {
	for _, c := range p.chosen {
		if c == port {
			return true
		}
	}
	return false
}

// Taken reports whether somebody else holds one of the chosen ports; to be
// asked after the server that was to use them is gone.
func (p *Chooser) Taken() bool {
	for _, c := range p.chosen {
		if !isFree(c) {
			return true
		}
	}
	return false
}

func isFree(port int) bool {
	l, err := net.Listen("tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return false
	}
	return l.Close() == nil
}

// lowestSourcePort reads ip(7) ip_local_port_range.
func lowestSourcePort() int {
	const fallback = 32768 // Linux' default
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return fallback
	}
	var low, high int
	if _, err := fmt.Sscan(string(b), &low, &high); err != nil || low < lowestPort+1000 {
		return fallback
	}
	return low
}
