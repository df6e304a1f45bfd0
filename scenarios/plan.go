package scenarios

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/google/uuid"
)

// Booking is one arrival of the workload.
type Booking struct {
	ID        string
	Recipient string // of its own: one mail per recipient
	// At is the intended time of the confirmation, from the start of its phase.
	At time.Duration
}

// Plan is the whole workload of a cell, drawn before it starts.
type Plan struct {
	Baseline []Booking
	Faults   []Booking
}

// drawPlan draws arrivals with exponential gaps. It depends on the seed, the
// scenario and the load only, so that all policies of a scenario see the same
// workload.
func drawPlan(seed uint64, scenario string, l Load) Plan {
	r := rng(seed, scenario, "workload")
	return Plan{
		Baseline: drawArrivals(r, l.Baseline, l.PerSecond, "base"),
		Faults:   drawArrivals(r, l.Bookings, l.PerSecond, "guest"),
	}
}

func drawArrivals(r *rand.Rand, n int, perSecond float64, who string) []Booking {
	arrivals := make([]Booking, n)
	var at time.Duration
	for i := range arrivals {
		at += time.Duration(r.ExpFloat64() / perSecond * float64(time.Second))
		arrivals[i] = Booking{
			ID:        drawUUID(r),
			Recipient: fmt.Sprintf("%s%04d@customers.test", who, i+1),
			At:        at,
		}
	}
	return arrivals
}

// drawUUID makes a version 4 UUID from r.
func drawUUID(r *rand.Rand) string {
	var id uuid.UUID
	for i := range id {
		id[i] = byte(r.Uint32())
	}
	id[6] = id[6]&0x0f | 0x40
	id[8] = id[8]&0x3f | 0x80
	return id.String()
}

// recipients of the bookings, in order of arrival.
func recipients(bookings []Booking) []string {
	all := make([]string, len(bookings))
	for i, b := range bookings {
		all[i] = b.Recipient
	}
	return all
}

// span is the time from the start of the phase to its last arrival.
func span(bookings []Booking) time.Duration {
	if len(bookings) == 0 {
		return 0
	}
	return bookings[len(bookings)-1].At
}
