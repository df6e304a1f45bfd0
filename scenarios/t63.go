package scenarios

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"mailproof/faults"
	"mailproof/history"
	"mailproof/verify"
)

// maxCPU is AC8's bound on the mail service while the server takes nothing,
// percent of one core.
const maxCPU = 30

// smtpDown is T6.3: 451 at RCPT for every mail. Each mail is tried exactly N
// times at the configured delays, then it is DEAD, in the dead-letter queue,
// and alerted (AC4); meanwhile nothing spins (AC8).
func smtpDown(d Draw) Scenario {
	s := Scenario{
		Name:               "t6.3",
		Title:              "the server takes no mail",
		Proves:             []string{"AC4", "AC8", "M6-04", "M6-10", "M6-15"},
		Cells:              []Cell{cellResend()},
		Floors:             history.Floors{Confirmed: 500, Faults: 1},
		Invariants:         everyMail(),
		System:             fast(),
		Load:               Load{Bookings: 520, PerSecond: 40},
		Expect:             45 * time.Second,
		FaultsUntilSettled: true,
		MeasureCPU:         true,
		Judge:              judgeSMTPDown,
		FaultNames:         []string{"refuse-rcpt"},
		Faults: func(b *Bench) []faults.Fault {
			return []faults.Fault{&faults.RefuseRcpt{Server: b.Parts.Mail}}
		},
	}
	if d.RealDelays {
		s.System.RetryDelays = realDelays()
		s.Quiesce, s.Expect = 10*time.Minute, 8*time.Minute
		// On busy cores the broker ends a delay of minutes some seconds late.
		s.System.SweepGrace = time.Minute
	}
	return s
}

// judgeSMTPDown judges AC4 and AC8 on the evidence: the number of tries, and
// what the mail service cost while it could do nothing.
func judgeSMTPDown(h *history.History, own *ownFindings) {
	judgeTries(h, own)
	judgeCPU(h, own)
	judgeDeliveries(h, own)
	tries := len(h.Attempts)
	if mails := len(h.Final.Rows); mails > 0 {
		own.measure("tries per mail", float64(tries)/float64(mails), "", fmt.Sprintf("%d configured", h.Meta.MaxAttempts))
	}
}

// judgeTries wants exactly N tries of each mail: fewer would give up early, more
// would be a loop (AC4).
func judgeTries(h *history.History, own *ownFindings) {
	const name = "exact-tries"
	tries := map[string]int{}
	for _, a := range h.Attempts {
		tries[a.Key]++
	}
	confirmed := map[string]bool{}
	for _, op := range h.Ops {
		if op.Outcome == history.OpOK {
			confirmed[op.Key] = true
		}
	}
	own.check(name, "Each mail is tried exactly as often as configured before it is given up (AC4).", len(confirmed))
	for _, key := range slices.Sorted(maps.Keys(confirmed)) {
		if n := tries[key]; n != h.Meta.MaxAttempts {
			own.find(verify.Fail, name, key, fmt.Sprintf("the server saw %d tries, %d are configured", n, h.Meta.MaxAttempts))
		}
	}
}

const (
	noHotLoop   = "no-hot-loop"
	mailService = "notifyd"
	idleCPU     = mailService + " CPU, idle"
	downCPU     = mailService + " CPU, server down"
)

// judgeCPU holds the mail service to AC8's bound over the faults phase. When the
// machine misses it without any traffic, the figure says nothing.
func judgeCPU(h *history.History, own *ownFindings) {
	used := cpuPercent(h.Final.Usage, mailService)
	own.check(noHotLoop, fmt.Sprintf("With the server down the mail service uses less than %d %% of a core, and each message is delivered once per try (AC8).", maxCPU), measuredProcesses(h.Final.Usage, mailService))
	own.measure(downCPU, used, "%", fmt.Sprintf("of one core; AC8 allows %d %%", maxCPU))
	idle, ok := own.measured(idleCPU)
	switch {
	case !ok || !measuredAll(h, mailService):
		own.find(verify.Invalid, noHotLoop, "", "the CPU time of "+mailService+" was not measured over the faults phase")
	case idle >= maxCPU:
		own.find(verify.Invalid, noHotLoop, "", fmt.Sprintf(
			"%s used %.1f %% of a core when idle: this machine cannot tell", mailService, idle))
	case used >= maxCPU:
		own.find(verify.Fail, noHotLoop, "", fmt.Sprintf(
			"%s used %.1f %% of a core with the server down, %.1f %% when idle", mailService, used, idle))
	}
}

// measuredProcesses counts those of a name whose CPU time was taken.
func measuredProcesses(usage map[string]history.Usage, prefix string) int {
	n := 0
	for name := range usage {
		n += btoi(strings.HasPrefix(name, prefix))
	}
	return n
}

// measuredAll reports that the CPU time of every process of a name was taken over
// the faults phase, and that none of them ended within it: the time of one that
// died and was replaced went with it, and a service that crashes all the while
// would be the most frugal of all.
func measuredAll(h *history.History, prefix string) bool {
	n := measuredProcesses(h.Final.Usage, prefix)
	from, _, begun := h.Phase("faults")
	to, _, healed := h.Phase("heal")
	if begun && healed {
		for _, p := range h.Processes {
			if strings.HasPrefix(p.Name, prefix) && p.At >= from && p.At < to && (p.Event == "exited" || p.Event == "killed" || p.Event == "started") {
				return false
			}
		}
	}
	return n > 0
}

// judgeDeliveries compares what the broker handed out with the tries: a message
// that is requeued at once comes hundreds of times per try.
func judgeDeliveries(h *history.History, own *ownFindings) {
	const slack = 1.1 // a doorbell too many does no harm, a loop is far beyond
	var all, again float64
	for name, n := range h.Final.Counters {
		if !strings.Contains(name, "deliveries_total") {
			continue
		}
		all += n
		if strings.Contains(name, `redelivered="true"`) {
			again += n
		}
	}
	mails, tries := float64(len(h.Final.Rows)), float64(len(h.Attempts))
	if all == 0 || mails == 0 {
		own.find(verify.Invalid, noHotLoop, "", "the system counted no deliveries")
		return
	}
	own.measure("deliveries per mail", all/mails, "", "by the broker, first ones and those after each delay")
	own.measure("redeliveries per mail", again/mails, "", "of one message, marked as such by the broker")
	if all > tries*slack {
		own.find(verify.Fail, noHotLoop, "", fmt.Sprintf("the broker delivered %.0f messages for %.0f tries", all, tries))
	}
}
