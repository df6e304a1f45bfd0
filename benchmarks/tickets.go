package benchmarks

import (
	"context"
	"fmt"
	"time"

	"mailproof/fakes/ledger"
	"mailproof/history"
	"mailproof/loadgen"
)

const (
	// ticketTimeout bounds one request of a client.
	ticketTimeout = 10 * time.Second
	// settleEvery is how often the ledger is asked whether all mails are there.
	settleEvery = 50 * time.Millisecond
	// sentEvery is how often the rows are asked once all mails are there.
	sentEvery = 100 * time.Millisecond
)

// ticketRun is what is known of a stretch of tickets.
type ticketRun struct {
	tickets  schedule
	keys     []string
	intended []int64 // on the run's clock
	answered []int64 // when the client had its answer, 0 if it had none
	notMade  int

	mails map[string]ledger.Attempt // key → the try that was kept
	sent  map[string]int64          // key → when the row became SENT
}

// book makes the bookings that will be confirmed.
func book(ctx context.Context, s *system, all schedule) error {
	for _, t := range all {
		bounded, cancel := context.WithTimeout(ctx, ticketTimeout)
		err := s.Book(bounded, t.Op.booking, t.Op.recipient)
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

// keysOf are the dedupe keys of the tickets' mails.
func keysOf(s *system, all schedule) []string {
	keys := make([]string, len(all))
	for i, t := range all {
		keys[i] = s.Key(t.Op.booking, 1)
	}
	return keys
}

// confirm confirms each booking at its intended time and returns when every
// client has its answer.
func confirm(ctx context.Context, s *system, all schedule) *ticketRun {
	r := &ticketRun{
		tickets: all, keys: keysOf(s, all), intended: make([]int64, len(all)), answered: make([]int64, len(all)),
	}
	start := history.Now()
	for i, t := range all {
		r.intended[i] = start + int64(t.At)
	}
	driver := loadgen.Driver{Clock: history.Now}
	loadgen.Drive(ctx, &driver, start, all, func(ctx context.Context, t ticket, _ int64) {
		ctx, cancel := context.WithTimeout(ctx, ticketTimeout)
		defer cancel()
		if outcome, _ := s.ConfirmBooked(ctx, t.booking); outcome == history.OpOK {
			r.answered[t.i] = history.Now()
		}
	})
	r.notMade = len(all) - int(driver.Tally().Made)
	return r
}

// await waits until the mail server has kept a mail of every ticket and each
// row says SENT, at most until ctx ends; then it takes what is there.
func (r *ticketRun) await(ctx context.Context, s *system, clock *wallClock) error {
	_ = await(ctx, settleEvery, func() (bool, error) { return r.arrived(s), nil }) // what is missing counts as infinite
	sent := func() (bool, error) {
		times, err := s.SentAt(context.WithoutCancel(ctx), r.keys)
		if err != nil {
			return false, err
		}
		r.sent = make(map[string]int64, len(r.keys))
		for _, k := range r.keys {
			if at, ok := times[k]; ok {
				r.sent[k] = clock.mono(at)
			}
		}
		return len(r.sent) >= len(r.mails), nil
	}
	if err := await(ctx, sentEvery, sent); err != nil && ctx.Err() == nil {
		return fmt.Errorf("times of SENT: %w", err)
	}
	return nil
}

func (r *ticketRun) arrived(s *system) bool {
	s.readLedger()
	r.mails = make(map[string]ledger.Attempt, len(r.keys))
	for _, k := range r.keys {
		if a, ok := s.kept[k]; ok {
			r.mails[k] = a
		}
	}
	return len(r.mails) >= len(r.keys)-r.notMade
}

// end of the stretch: when the last of its mails was kept, at the earliest the
// last intended time.
func (r *ticketRun) end() int64 {
	to := r.intended[len(r.intended)-1]
	for _, a := range r.mails {
		to = max(to, a.StoredAt)
	}
	return to
}

// samples from the intended times to those that end gives; 0 is missing.
func (r *ticketRun) samples(end func(i int) int64) Samples {
	var s Samples
	for i := range r.tickets {
		if to := end(i); to > 0 {
			s.add(time.Duration(to - r.intended[i]))
		} else {
			s.Missing++
		}
	}
	return s
}

// latency of the stretch.
func (r *ticketRun) latency() LatencyRepeat {
	out := LatencyRepeat{NotMade: r.notMade}
	out.Accepted = r.samples(func(i int) int64 { return r.mails[r.keys[i]].StoredAt })
	out.Sent = r.samples(func(i int) int64 { return r.sent[r.keys[i]] })
	for i, k := range r.keys {
		if _, ok := r.mails[k]; ok {
			out.Intended = append(out.Intended, (r.intended[i]-r.intended[0]+int64(r.tickets[0].At))/1000)
		}
	}
	return out
}

// wallClock places instants of the wall clock on the run's clock. Both were read
// together at its start and are read again now: the wall clock may be slewed
// meanwhile.
type wallClock struct{ pairs []history.Record }

func newWallClock() *wallClock {
	c := &wallClock{}
	c.mark()
	return c
}

// mark notes one instant on both clocks.
func (c *wallClock) mark() {
	c.pairs = append(c.pairs, history.Record{
		T: history.Now(), Kind: history.KindPhase, Phase: &history.Phase{Name: "clock", Wall: time.Now()},
	})
}

func (c *wallClock) mono(wall time.Time) int64 {
	return history.FromRecords(c.pairs).Monotonic(wall)
}
