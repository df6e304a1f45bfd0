package benchmarks

import (
	"strings"
	"time"
)

// Names of the layouts.
const (
	layoutIdle     = "idle"
	layoutSplit    = "split"
	layoutNoBucket = "no-bucket"
	layoutOnePool  = "one-pool"
	layoutOneQueue = "one-queue"

	// The same where the mail server takes time for each mail.
	slow              = "slow-"
	layoutSlowIdle    = slow + layoutIdle
	layoutSlowSplit   = slow + layoutSplit
	layoutSlowOnePool = slow + layoutOnePool
)

const (
	// slowMail is what the slow mail server takes for a mail, from the final dot
	// to its 250.
	slowMail = 200 * time.Millisecond
	// slowParallel marketing mails are at work side by side there, in each of two
	// consumers: who sends to such a server needs many connections. Together they
	// reach 250 mails/s, far below what two cores do, so that what a ticket waits
	// for is a connection and not the machine.
	slowParallel = 25
	// marketingConsumers of the lane as it ships.
	marketingConsumers = 2
)

// noBucket takes the marketing lane's token bucket away.
func noBucket() map[string]string { return map[string]string{"NOTIFYD_MARKETING_RATE": "0"} }

// layoutLabel is a layout's name in a plot, whose title tells the mail server.
func layoutLabel(name string) string {
	switch name = strings.TrimPrefix(name, slow); name {
	case layoutNoBucket:
		return "split, no bucket"
	case layoutOnePool:
		return "one pool"
	case layoutOneQueue:
		return "one queue, one pool"
	default:
		return name
	}
}

// layout by its name, nil when it was not measured.
func (l *Latency) layout(name string) *Layout {
	if l == nil {
		return nil
	}
	for i := range l.Layouts {
		if l.Layouts[i].Name == name && len(l.Layouts[i].Repeats) > 0 {
			return &l.Layouts[i]
		}
	}
	return nil
}

// idle reports that no marketing was there.
func (l *Layout) idle() bool { return l.Name == layoutIdle || l.Name == layoutSlowIdle }

// idleOf is the idle layout beside the same mail server, nil when it was not
// measured.
func (l *Latency) idleOf(lay Layout) *Layout {
	if lay.MailMillis > 0 {
		return l.layout(layoutSlowIdle)
	}
	return l.layout(layoutIdle)
}

// byServer tells the layouts whose mail server answers at once from those whose
// mail server takes time.
func (l *Latency) byServer() (atOnce, inTime []Layout) {
	for _, lay := range l.Layouts {
		if lay.MailMillis > 0 {
			inTime = append(inTime, lay)
		} else {
			atOnce = append(atOnce, lay)
		}
	}
	return atOnce, inTime
}

func (l *Layout) accepted() []Samples {
	out := make([]Samples, len(l.Repeats))
	for i, r := range l.Repeats {
		out[i] = r.Accepted
	}
	return out
}

func (l *Layout) sent() []Samples {
	out := make([]Samples, len(l.Repeats))
	for i, r := range l.Repeats {
		out[i] = r.Sent
	}
	return out
}
