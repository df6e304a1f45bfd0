package scenarios

import (
	"fmt"
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
		FaultNames:         []string{"refuse-rcpt"},
		Faults: func(b *Bench) []faults.Fault {
			return []faults.Fault{&faults.RefuseRcpt{Server: b.Parts.Mail}}
		},
	}
	if d.RealDelays {
		s.System.RetryDelays = []time.Duration{10 * time.Second, time.Minute, 5 * time.Minute}
		s.Quiesce, s.Expect = 10*time.Minute, 8*time.Minute
	}
	return s
}

// judgeCPU holds the mail service to AC8's bound over the faults phase. When the
// machine misses it without any traffic, the figure says nothing.
func (x *cellRun) judgeCPU(final history.Final) {
	const service = "notifyd"
	used := cpuPercent(final.Usage, service)
	x.own.measure(service+" CPU, server down", used, "%", fmt.Sprintf("of one core; AC8 allows %d %%", maxCPU))
	idle, ok := x.own.measured(service + " CPU, idle")
	switch {
	case !ok || len(final.Usage) == 0:
		x.own.find(verify.Invalid, "no-hot-loop", "", "the CPU time of "+service+" is measured over the faults phase; it was not")
	case idle >= maxCPU:
		x.own.find(verify.Invalid, "no-hot-loop", "", fmt.Sprintf(
			"%s uses less than %d %% of a core with the server down; it used %.1f %% even when idle, so this machine cannot tell", service, maxCPU, idle))
	case used >= maxCPU:
		x.own.find(verify.Fail, "no-hot-loop", "", fmt.Sprintf(
			"%s uses less than %d %% of a core with the server down (AC8); it used %.1f %%, idle %.1f %%", service, maxCPU, used, idle))
	}
}
