package scenarios

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"mailproof/faults"
	"mailproof/history"
	"mailproof/verify"
)

// wakenings are the strikes of lab-woken-worker: what a worker that does not
// look at its clock does when it wakes is a race between its timers and its
// socket, so one strike proves nothing.
const wakenings = 8

// wokenWorker is a worker that stands still past its lease between DATA and the
// final dot (a long collection, a frozen virtual machine) while another takes
// its mail over and delivers it. When it wakes, the 354 lies in its socket and
// the mail is no longer its to send.
func wokenWorker() Scenario {
	s := Scenario{
		Name:       "lab-woken-worker",
		Title:      "a worker stands still past its lease and wakes before the dot",
		Proves:     []string{"OB-02", "OB-04", "TRAP-1-3"},
		Cells:      []Cell{cellResend()},
		Floors:     history.Floors{Confirmed: 500, Faults: 1},
		Invariants: everyMail(),
		System:     fast(),
		// Longer than the strikes take on a busy machine: each needs a session to
		// hold, and stands still for 4 s, seldom for 10.
		Load:       Load{Baseline: 20, Bookings: 520, PerSecond: 7},
		Expect:     90 * time.Second,
		Quiesce:    90 * time.Second,
		FaultNames: []string{faultWoken},
		Judge:      judgeWoken,
	}
	s.System.MailServices = 2
	s.System.SendDeadline, s.System.Lease = time.Second, 2*time.Second
	// The stopped process keeps its message: only the sweeper hands its mails to
	// the other one. Half of its doorbells go to the stopped process too (whose
	// consumers have room until the broker misses their heartbeats, after 10 s), so
	// it rings soon and often. Each rescue here is explained by a stop.
	s.System.SweepEvery, s.System.SweepGrace = 250*time.Millisecond, 200*time.Millisecond
	s.Faults = func(b *Bench) []faults.Fault {
		// Asleep for so long past the lease that a late dot cannot be taken for one
		// that was slow on a busy machine.
		asleep := s.System.Lease + 2*time.Second
		return []faults.Fault{faults.NewPauseWhileHeld(b.Parts.Mail, b.Process("notifyd-1"), wakenings, asleep,
			drawGap(b.Rand("pauses"), 200*time.Millisecond, time.Second))}
	}
	return s
}

const faultWoken = "pause-while-held"

// judgeWoken wants one copy of each mail whose first worker was woken after
// another had delivered it. at-most-one would excuse a second copy here: its
// sender was stopped past its lease.
func judgeWoken(h *history.History, own *ownFindings) {
	const name = "woken-sends-nothing"
	struck := map[string]int{} // key → copies
	for _, f := range h.Faults {
		if f.Name != faultWoken {
			continue
		}
		for _, key := range f.Keys {
			struck[key] = 0
		}
	}
	for _, a := range h.Attempts {
		if _, ok := struck[a.Key]; ok && a.Stored {
			struck[a.Key]++
		}
	}
	own.check(name, "A worker that was woken after another had delivered its mail closes the session without the dot: one copy each.", len(struck))
	if len(struck) < wakenings {
		own.find(verify.Invalid, name, "", fmt.Sprintf("%d mails of %d planned had a worker that was woken", len(struck), wakenings))
	}
	for _, key := range slices.Sorted(maps.Keys(struck)) {
		if copies := struck[key]; copies != 1 {
			own.find(verify.Fail, name, key, fmt.Sprintf("%d copies were kept; its first worker was woken when the mail had been delivered", copies))
		}
	}
}
