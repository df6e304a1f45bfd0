package scenarios

import (
	"fmt"
	"time"

	"mailproof/faults"
	"mailproof/history"
	"mailproof/verify"
)

// wokenWorker is a worker that stands still past its lease between DATA and the
// final dot, while another takes its mail over: when it wakes, the mail is no
// longer its to send. Without a look at the lease right before the dot it sends
// in about two of three such cases, deadline or not.
func wokenWorker() Scenario {
	s := Scenario{
		Name:       "lab-woken-worker",
		Title:      "a worker stands still past its lease and wakes before the dot",
		Proves:     []string{"OB-02", "OB-04", "TRAP-1-3"},
		Cells:      []Cell{cellResend()},
		Floors:     history.Floors{Confirmed: 500, Faults: 1},
		Invariants: everyMail(),
		System:     fast(),
		Load:       Load{Baseline: 20, Bookings: 520, PerSecond: 15},
		Expect:     50 * time.Second,
		Quiesce:    90 * time.Second,
		FaultNames: []string{"pause-while-held"},
		Judge:      judgeDots,
	}
	s.System.MailServices = 2
	s.System.SendDeadline, s.System.Lease = time.Second, 2*time.Second
	// The stopped process keeps its message: only the sweeper can hand the mail
	// to the other one, and it must do so before the stop is over.
	s.System.SweepGrace = 500 * time.Millisecond
	s.Faults = func(b *Bench) []faults.Fault {
		// Eight wakenings: each alone lets a missing check slip by in one of three.
		return []faults.Fault{faults.NewPauseWhileHeld(b.Parts.Mail, b.Process("notifyd-1"), 8, s.System.Lease+500*time.Millisecond,
			drawGap(b.Rand("pauses"), 200*time.Millisecond, time.Second))}
	}
	return s
}

// dotSlack absorbs the way of the dot from the sender's last look at its clock
// into the server's ledger, on a busy machine. It is far below what a stop goes
// past the lease.
const dotSlack = 300 * time.Millisecond

// judgeDots wants every final dot within the lease of the claim under which it
// was sent. The end of the lease is the row's own, as the log has it.
func judgeDots(h *history.History, own *ownFindings) {
	const name = "dot-within-lease"
	columns := verify.DefaultColumns().Mails
	type lease struct{ from, until int64 }
	leases := map[string][]lease{}
	for _, ch := range h.Changes {
		if ch.Table != columns.Table || ch.New[columns.Status] != "SENDING" || ch.New[columns.Token] == ch.Old[columns.Token] {
			continue
		}
		until, err := time.Parse("2006-01-02 15:04:05.999999999-07", ch.New[columns.LockedUntil])
		if err != nil {
			own.find(verify.HarnessError, name, ch.New[columns.Key], fmt.Sprintf("column %s: %v", columns.LockedUntil, err))
			return
		}
		leases[ch.New[columns.Key]] = append(leases[ch.New[columns.Key]], lease{ch.At, h.Meta.At + until.Sub(h.Meta.Wall).Nanoseconds()})
	}
	looked := 0
	own.check(name, "A worker writes the final dot only while it holds the mail's lease.", 0)
	for _, a := range h.Attempts {
		if a.DotAt == 0 {
			continue
		}
		looked++
		// The claim of this attempt is the latest before its first byte.
		var held lease
		for _, l := range leases[a.Key] {
			if l.from <= a.From+int64(dotSlack) && l.from > held.from {
				held = l
			}
		}
		if late := time.Duration(a.DotAt - held.until); held.until > 0 && late > dotSlack {
			own.find(verify.Fail, name, a.Key, fmt.Sprintf("attempt %d of %s wrote its dot %s after its lease was over", a.ID, a.Client, late.Round(time.Millisecond)))
		}
	}
	own.checked[len(own.checked)-1].Looked = looked
	if len(leases) == 0 {
		own.find(verify.Invalid, name, "", "the log holds no claim of any mail")
	}
}
