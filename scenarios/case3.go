package scenarios

import (
	"fmt"
	"time"

	"mailproof/faults"
	"mailproof/history"
	"mailproof/verify"
)

// rewoundOffsets is CASE-3: the bridge's offsets are reset to the beginning, and
// every event of the run comes again, hundreds of them after their mail was
// sent. None may be sent again.
func rewoundOffsets() Scenario {
	return Scenario{
		Name:       "case-3",
		Title:      "Kafka offsets are reset to the beginning: every event comes again",
		Proves:     []string{"CASE-3", "A2-10", "A2-13", "TRAP-2-3"},
		Cells:      []Cell{cellHold()}, // no copy beyond the first has an excuse here
		Floors:     history.Floors{Confirmed: 500, Faults: 1},
		Invariants: everyMail(),
		System:     fast(),
		Load:       Load{Baseline: 20, Bookings: 520, PerSecond: 30},
		FaultNames: []string{"rewind"},
		Faults: func(b *Bench) []faults.Fault {
			// Late in the load, so that most mails have been sent, and while some
			// are still being made.
			return []faults.Fault{faults.NewRewind(b.Parts.Brokers, b.Parts.Topic, b.Process("notifyd-1"), 12*time.Second)}
		},
		Expect:  40 * time.Second,
		Quiesce: 90 * time.Second,
		Judge:   judgeRewound,
	}
}

const duplicatesCounter = `notifyd_bridge_events_total{result="duplicate"}`

// judgeRewound wants most of what came again to be known as such by the system.
func judgeRewound(h *history.History, own *ownFindings) {
	const name = "absorbed"
	again := 0
	for _, f := range h.Faults {
		if f.Name == "rewind" {
			again = f.Count
		}
	}
	absorbed := h.Final.Counters[duplicatesCounter]
	own.check(name, "An event that comes again is found by its key and changes nothing.", again)
	own.measure("events that came again", float64(again), "", "")
	own.measure("of those, told apart as duplicates", absorbed, "", "")
	switch {
	case again < 200:
		own.find(verify.Invalid, name, "", fmt.Sprintf("only %d events came again, the floor is 200", again))
	case absorbed < float64(again):
		own.find(verify.Fail, name, "", fmt.Sprintf("%d events came again, %.0f were found to be duplicates", again, absorbed))
	}
}
