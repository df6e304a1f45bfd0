package booking

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"mailproof/system/contract"
)

func TestDecide(t *testing.T) {
	t.Parallel()
	const conflicts = "conflict"
	nothing := func() *step { return nil }
	confirm := func(g int) func() *step {
		return func() *step { return &step{Confirmed, g, contract.BookingConfirmed} }
	}
	cancel := func(g int) func() *step {
		return func() *step { return &step{Cancelled, g, contract.BookingCancelled} }
	}
	reopen := func(g int) func() *step {
		return func() *step { return &step{Confirmed, g, contract.BookingReopened} }
	}
	for _, c := range []struct {
		name       string
		status     Status
		generation int
		op         Op
		seen       int
		want       func() *step
		err        string
	}{
		{"confirm a new one", New, 1, Confirm, 0, confirm(1), ""},
		{"confirm again", Confirmed, 1, Confirm, 0, nothing, ""},
		{"confirm a cancelled one", Cancelled, 1, Confirm, 0, nil, conflicts},
		{"confirm, late, after a reopen", Confirmed, 2, Confirm, 1, nil, conflicts},
		{"confirm a generation to come", New, 1, Confirm, 2, nil, conflicts},
		{"cancel a new one", New, 1, Cancel, 0, cancel(1), ""},
		{"cancel a confirmed one", Confirmed, 3, Cancel, 0, cancel(3), ""},
		{"cancel again", Cancelled, 1, Cancel, 0, nothing, ""},
		{"cancel again, late, after a reopen", Confirmed, 2, Cancel, 1, nothing, ""},
		{"cancel the reopened one", Confirmed, 2, Cancel, 2, cancel(2), ""},
		{"cancel a generation to come", Confirmed, 1, Cancel, 2, nil, conflicts},
		{"reopen", Cancelled, 1, Reopen, 0, reopen(2), ""},
		{"reopen what was seen", Cancelled, 2, Reopen, 2, reopen(3), ""},
		{"reopen again", Confirmed, 2, Reopen, 0, nothing, ""},
		{"reopen again, late", Cancelled, 2, Reopen, 1, nothing, ""},
		{"reopen a new one", New, 1, Reopen, 0, nil, conflicts},
		{"reopen one never cancelled", Confirmed, 1, Reopen, 0, nil, conflicts},
		{"reopen the one that is open", Confirmed, 2, Reopen, 2, nil, conflicts},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			got, err := decide(Booking{Status: c.status, Generation: c.generation}, c.op, c.seen)
			if c.err == conflicts {
				var conflict *ConflictError
				require.ErrorAs(t, err, &conflict)
				return
			}
			require.NoError(t, err)
			require.Equal(t, c.want(), got)
		})
	}
}

// Whatever clients ask in whatever order: a repeat changes nothing, generations
// rise by reopening only, and each generation is cancelled at most once.
func TestDecideProperties(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		b := Booking{Status: New, Generation: 1}
		cancelled := map[int]bool{}
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			op := rapid.SampledFrom([]Op{Confirm, Cancel, Reopen}).Draw(t, "op")
			seen := rapid.IntRange(0, b.Generation).Draw(t, "seen")
			s, err := decide(b, op, seen)
			if err != nil || s == nil {
				continue
			}
			before := b
			b.Status, b.Generation = s.status, s.generation
			switch op {
			case Reopen:
				require.Equal(t, before.Generation+1, b.Generation)
			case Cancel:
				require.False(t, cancelled[b.Generation])
				cancelled[b.Generation] = true
				fallthrough
			default:
				require.Equal(t, before.Generation, b.Generation)
			}
			again, err := decide(b, op, seen)
			require.Nil(t, again, "the repeat of %s with seen %d changed something", op, seen)
			if seen == 0 {
				require.NoError(t, err, "the repeat of %s is refused", op)
			}
		}
	})
}

func TestValidate(t *testing.T) {
	t.Parallel()
	good := Request{ID: "b-1", Recipient: "not-an-address", Seats: []string{"A1"}, Amount: "120.50", Currency: "EUR", Locale: "de-CH"}
	require.NoError(t, good.Validate(), "whether an address is good is not checked here")
	for field, change := range map[string]func(*Request){
		"id":        func(r *Request) { r.ID = "a:v2" },
		"id ":       func(r *Request) { r.ID = strings.Repeat("x", 101) },
		"recipient": func(r *Request) { r.Recipient = "  " },
		// A line break would become a header of its own.
		"recipient ": func(r *Request) { r.Recipient = "a@example.test\r\nBcc: b@example.test" },
		"name":       func(r *Request) { r.Name = "nul\x00" },
		"event":      func(r *Request) { r.Event = strings.Repeat("x", 501) },
		"locale":     func(r *Request) { r.Locale = "\xff" },
		"seats":      func(r *Request) { r.Seats = make([]string, 101) },
		"seats ":     func(r *Request) { r.Seats = []string{"A\n1"} },
		"amount":     func(r *Request) { r.Amount = "12,5" },
		"currency":   func(r *Request) { r.Currency = "" },
		"currency ":  func(r *Request) { r.Currency = "eur" },
	} {
		r := good
		change(&r)
		var invalid *InvalidError
		require.ErrorAs(t, r.Validate(), &invalid, field)
		require.Equal(t, strings.TrimSpace(field), invalid.Field)
	}
}

// Two bookings never share a key, whatever their ids and generations.
func TestKeysDoNotCollide(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		id := rapid.StringMatching(`[a-z0-9:v._-]{1,6}`)
		a, b := id.Draw(t, "a"), id.Draw(t, "b")
		ga, gb := rapid.IntRange(1, 3).Draw(t, "ga"), rapid.IntRange(1, 3).Draw(t, "gb")
		if !ValidID(a) || !ValidID(b) || a == b && ga == gb {
			return
		}
		require.NotEqual(t, contract.TicketKey(a, ga), contract.TicketKey(b, gb))
	})
}
