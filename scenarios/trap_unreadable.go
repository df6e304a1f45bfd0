package scenarios

import (
	"fmt"
	"time"

	"mailproof/faults"
	"mailproof/history"
	"mailproof/verify"
)

// unreadableEvents is TRAP-2-5 and TRAP-2-6: among the events arrive some that
// nobody here can read. Each is parked with an alert, and its partition goes on
// (A2-12). An event of the known version with members that nobody knows is read
// as it stands (A2-09); it asks for nothing here, since its key is taken.
func unreadableEvents() Scenario {
	return Scenario{
		Name:       "trap-unreadable",
		Title:      "events that nobody can read arrive among the others, in every partition",
		Proves:     []string{"A2-12", "TRAP-2-5", "TRAP-2-6"},
		Cells:      []Cell{cellResend()},
		Floors:     history.Floors{Confirmed: 500, Faults: 1},
		Invariants: everyMail(),
		System:     fast(),
		Load:       Load{Baseline: 20, Bookings: 530, PerSecond: 60},
		FaultNames: []string{"unreadable-records"},
		Faults: func(b *Bench) []faults.Fault {
			return []faults.Fault{&faults.UnreadableRecords{
				Brokers: b.Parts.Brokers, Topic: b.Parts.Topic, Bodies: unreadable(), Every: 120 * time.Millisecond, Count: unreadableCount,
			}}
		},
		Expect: 20 * time.Second,
		Judge:  judgeUnreadable,
	}
}

const unreadableCount = 60

// unreadable bodies, each of which some consumer has died of.
func unreadable() [][]byte {
	return [][]byte{
		[]byte(`not JSON at all`),
		{},
		{0xff, 0xfe, 0x00},
		[]byte(`null`), []byte(`[]`), []byte(`{}`),
		[]byte(`{"event_id":"e","event_type":"BookingConfirmed","version":99,"booking_id":"b","generation":1,"dedupe_key":"ticket:b","data":{"recipient":"a@example.test"}}`),
		[]byte(`{"event_id":"e2","event_type":"BookingTeleported","version":1,"booking_id":"b","generation":1,"dedupe_key":"ticket:b","data":{}}`),
		[]byte(`{"event_id":"e3","event_type":"BookingConfirmed","version":1,"booking_id":"b","generation":1,"dedupe_key":"ticket:b","data":{`),
	}
}

func judgeUnreadable(h *history.History, own *ownFindings) {
	const name = "parked-and-alerted"
	own.check(name, "Each record that nobody can read is alerted, once, and named by its place in the topic.", unreadableCount)
	seen := map[string]int{}
	for _, a := range h.Final.Alerts {
		if a.Kind == "event-parked" {
			seen[a.Key]++
		}
	}
	if len(seen) != unreadableCount {
		own.find(verify.Fail, name, "", fmt.Sprintf("%d of %d unreadable records have an alert", len(seen), unreadableCount))
	}
	for place, n := range seen {
		if n > 1 {
			own.find(verify.Fail, name, "", fmt.Sprintf("the record at %s was alerted %d times", place, n))
		}
	}
}
