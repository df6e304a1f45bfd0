package scenarios

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/google/uuid"

	"mailproof/loadgen"
)

// Booking is one customer of the workload.
type Booking struct {
	ID        string
	Recipient string // of its own: one mail per recipient
	// At is the intended time of the confirmation, from the start of its phase.
	At time.Duration
	// CancelAfter is how long after At the customer means to cancel; 0: never.
	CancelAfter time.Duration
}

// Plan is the whole workload of a cell, drawn before it starts.
type Plan struct {
	Baseline []Booking
	Faults   []Booking
}

// drawPlan draws arrivals with exponential gaps. It depends on the seed, the
// scenario and the load only, so that all policies of a scenario see the same
// workload.
func drawPlan(seed uint64, scenario string, l Load) (Plan, error) {
	r := rng(seed, scenario, "workload")
	baseline, err := drawBookings(r, l.Baseline, l.PerSecond, "base")
	if err != nil {
		return Plan{}, err
	}
	bookings, err := drawBookings(r, l.Bookings, l.PerSecond, "guest")
	if err != nil {
		return Plan{}, err
	}
	drawCancels(rng(seed, scenario, "workload cancels"), bookings, l.Cancels)
	return Plan{Baseline: baseline, Faults: bookings}, nil
}

func drawBookings(r *rand.Rand, n int, perSecond float64, who string) ([]Booking, error) {
	arrivals, err := loadgen.Draw(loadgen.Poisson{N: n, PerSecond: perSecond}, r, func(i int, at time.Duration) Booking {
		return Booking{ID: drawUUID(r), Recipient: fmt.Sprintf("%s%04d@customers.test", who, i+1), At: at}
	})
	if err != nil {
		return nil, err
	}
	bookings := make([]Booking, len(arrivals))
	for i, a := range arrivals {
		bookings[i] = a.Op
	}
	return bookings, nil
}

// cancelWithin is the time after a confirmation in which a customer of the
// workload cancels, if at all: from the moment of the confirmation, when the
// mail is on its way, to well after it has arrived.
const cancelWithin = 2 * time.Second

// drawCancels lets n of the bookings be cancelled.
func drawCancels(r *rand.Rand, bookings []Booking, n int) {
	for _, i := range r.Perm(len(bookings))[:min(n, len(bookings))] {
		// Squared, so that half of them come within the first half second.
		u := r.Float64()
		bookings[i].CancelAfter = max(time.Duration(u*u*float64(cancelWithin)), time.Millisecond)
	}
}

// action is one operation of the workload.
type action struct {
	Booking
	cancel bool
}

// schedule is what the bookings' customers do, in order of time.
func schedule(bookings []Booking) []loadgen.Arrival[action] {
	arrivals := make([]loadgen.Arrival[action], 0, len(bookings))
	for _, b := range bookings {
		arrivals = append(arrivals, loadgen.Arrival[action]{At: b.At, Op: action{Booking: b}})
		if b.CancelAfter > 0 {
			arrivals = append(arrivals, loadgen.Arrival[action]{At: b.At + b.CancelAfter, Op: action{Booking: b, cancel: true}})
		}
	}
	slices.SortStableFunc(arrivals, func(a, b loadgen.Arrival[action]) int { return cmp.Compare(a.At, b.At) })
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
