package scenarios

import (
	"time"

	"mailproof/faults"
	"mailproof/history"
)

// lostReply is T6.7: the server keeps the mail and the 250 is lost, by a closed
// connection, a reset, or silence until the sender's deadline; of an API over
// HTTP also by a proxy's 502. No client can
// know what became of the mail; the policy decides what it does about it.
func lostReply() Scenario {
	return Scenario{
		Name:       "t6.7",
		Title:      "the server keeps the mail, its 250 is lost",
		Proves:     []string{"OB-01", "OB-03", "OB-04", "OB-07", "M6-16"},
		Cells:      []Cell{cellSameKey(), cellHold(), cellResend(), cellSameKeyHTTP()},
		Floors:     history.Floors{Confirmed: 500, Faults: 1},
		Invariants: everyMail(),
		System:     fast(),
		Load:       Load{Baseline: 50, Bookings: 550, PerSecond: 60},
		// Every mail that was drawn must lose its answer before the fault is
		// healed.
		FaultsUntilSettled: true,
		Expect:             35 * time.Second,
		FaultNames:         []string{"lose-250"},
		Faults: func(b *Bench) []faults.Fault {
			target, ways := "smtp server", faults.OverSMTP()
			if b.Cell.HTTP {
				target, ways = "mail API", faults.OverHTTP()
			}
			return []faults.Fault{
				faults.NewLose250(b.Parts.Mail, target, faults.DrawLosses(b.Rand("lose-250"), recipients(b.Plan.Faults), 0.2, ways)),
			}
		},
	}
}
