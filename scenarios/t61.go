package scenarios

import (
	"time"

	"mailproof/faults"
	"mailproof/history"
)

// duplicateEvents is T6.1: each event arrives five times, byte for byte, and
// once more from another producer under another event_id, with the same dedupe
// key (AC1, LAB-E1…E3).
func duplicateEvents() Scenario {
	return Scenario{
		Name:       "t6.1",
		Title:      "each event arrives five times, and once from a stranger",
		Proves:     []string{"AC1", "A2-08", "A2-10", "LAB-E1", "LAB-E2", "LAB-E3"},
		Cells:      []Cell{cellResend()},
		Floors:     history.Floors{Confirmed: 500, Faults: 2},
		Invariants: everyMail(),
		System:     fast(),
		Load:       Load{Baseline: 20, Bookings: 530, PerSecond: 60},
		// The last events leave the outbox after the last confirmation: they must
		// be doubled too.
		FaultsUntilSettled: true,
		Expect:             30 * time.Second,
		FaultNames:         []string{"duplicate-records", "foreign-duplicate"},
		Faults: func(b *Bench) []faults.Fault {
			return []faults.Fault{
				&faults.DuplicateRecords{Brokers: b.Parts.Brokers, Topic: b.Parts.Topic, Copies: 4},
				&faults.ForeignDuplicate{Brokers: b.Parts.Brokers, Topic: b.Parts.Topic, Member: "event_id"},
			}
		},
	}
}
