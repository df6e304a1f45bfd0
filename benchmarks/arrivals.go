package benchmarks

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/google/uuid"

	"mailproof/loadgen"
)

// warmUp arrivals before those that are counted: connections are made, caches
// filled.
const warmUp = 10

// rng is the stream of random numbers for one purpose: adding a purpose changes
// no other.
func rng(seed uint64, purpose string) *rand.Rand {
	h := uint64(14695981039346656037) // FNV-1a
	for i := range len(purpose) {
		h = (h ^ uint64(purpose[i])) * 1099511628211
	}
	return rand.New(rand.NewPCG(seed, h))
}

// ticket is one booking that is to be confirmed.
type ticket struct {
	i                  int // in its schedule
	booking, recipient string
}

type schedule []loadgen.Arrival[ticket]

// drawTickets draws a schedule of tickets, each with a booking and a recipient
// of its own; who names the recipients.
func drawTickets(seed uint64, who string, n int, perSecond float64) (schedule, error) {
	r := rng(seed, who)
	return loadgen.Draw(loadgen.Poisson{N: n, PerSecond: perSecond}, r, func(i int, _ time.Duration) ticket {
		return ticket{i: i, booking: drawUUID(r), recipient: fmt.Sprintf("%s-%05d@customers.test", who, i+1)}
	})
}

// drawUUID makes a version 4 UUID from r.
func drawUUID(r *rand.Rand) string {
	var id uuid.UUID
	for b := range id {
		id[b] = byte(r.Uint32())
	}
	id[6] = id[6]&0x0f | 0x40
	id[8] = id[8]&0x3f | 0x80
	return id.String()
}
