package benchmarks

import (
	"fmt"
	"strings"
	"time"
)

// What an estimate assumes of two idle cores. A machine that is slower takes
// longer; [size] bounds what happens then.
const (
	partsStart = 15 * time.Second // Postgres, three RabbitMQ nodes and Kafka
	buildTime  = 6 * time.Second  // of a layout that does not ship
	// systemTime is the start and the stop of one system, databases and queues
	// included, and floorTime the same for the serial floor.
	systemTime = 2500 * time.Millisecond
	floorTime  = time.Second
	// drainRate of marketing mails, and intakeRate of a campaign, per second.
	drainRate  = 900
	intakeRate = 5000
	// slowestDrain, per second, is what a bound allows for.
	slowestDrain = 250
	rawTime      = 12 * time.Second // of all raw stages
	refillTime   = time.Second      // of a bare queue
)

// sent is how long n arrivals take.
func (s size) sent(n int) time.Duration {
	return time.Duration(float64(n) / s.ticketRate * float64(time.Second))
}

// mails is how long n mails take at a rate per second.
func mails(n int, perSecond float64) time.Duration {
	return time.Duration(float64(n) / perSecond * float64(time.Second))
}

func (s size) hopsTime() time.Duration {
	one := floorTime + s.sent(s.idleTickets) + systemTime + s.sent(warmUp+s.idleTickets)
	flooded := systemTime + s.sent(warmUp+s.floodTickets) + mails(s.flood, intakeRate)
	return time.Duration(s.repeats)*one + time.Duration(s.floodedHops)*flooded
}

func (s size) deadTime() time.Duration {
	sum := systemTime + idleStretch + s.sent(s.deadTickets)/2
	for _, d := range s.deadDelays {
		sum += d
	}
	return sum
}

func (s size) latencyTime() time.Duration {
	var sum time.Duration
	built := map[string]bool{"": true}
	for _, v := range s.variants() {
		if !built[v.mutant] {
			built[v.mutant] = true
			sum += buildTime
		}
		sum += time.Duration(v.repeats) * v.expect(s)
	}
	return sum
}

// expect is how long one repeat of a layout takes.
func (v variant) expect(s size) time.Duration {
	sum := systemTime + s.sent(warmUp+s.floodTickets) + mails(v.flood, intakeRate)
	if v.idle != "" {
		sum += s.sent(s.idleTickets)
	}
	if v.behind {
		sum += mails(v.flood, drainRate) - s.sent(s.floodTickets)
	}
	return sum
}

// bound is how long the last ticket of a layout is waited for, from the last
// confirmation on.
func (v variant) bound(s size) time.Duration {
	if v.behind {
		return max(s.ticketBound, mails(v.flood, slowestDrain))
	}
	return s.ticketBound
}

func (s size) marketingTime() time.Duration {
	return rawTime + time.Duration(s.campaigns)*(systemTime+mails(s.flood, drainRate))
}

func (s size) queuesTime() time.Duration {
	cell := time.Duration(s.bareRepeats)*(refillTime+s.bareFor) + systemTime + mails(s.workerMails, intakeRate) + s.workerFor
	return time.Duration(len(s.prefetch)*len(s.consumers)) * cell
}

// estimate says how long the chosen parts take, in one line: "about 12m40s on
// two idle cores: 15s to start, hops 2m5s, …".
func estimate(s size, chosen []part) string {
	var sum time.Duration
	var words []string
	for _, p := range chosen {
		if !p.saved && sum == 0 {
			sum = partsStart
			words = append(words, fmt.Sprintf("%s to start", partsStart))
		}
		if d := p.expect(s); d > 0 {
			sum += d
			words = append(words, fmt.Sprintf("%s %s", p.name, d.Round(time.Second)))
		}
	}
	if sum == 0 {
		return "nothing is measured that takes time"
	}
	return fmt.Sprintf("about %s on two idle cores: %s; ended after %s", sum.Round(time.Second), strings.Join(words, ", "), s.runBound)
}
