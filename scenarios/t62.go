package scenarios

import (
	"math/rand/v2"
	"sync"
	"time"

	"mailproof/fakes/smtp"
	"mailproof/faults"
	"mailproof/history"
)

// killedWhileSending is T6.2: SIGKILL of the mail service while the server
// holds one of its sessions at each stage, and at random moments. The messages
// that it had taken and not acked must come again (AC3), and nothing that it
// did before it died may be done twice beyond what the policy allows.
func killedWhileSending() Scenario {
	return Scenario{
		Name:       "t6.2",
		Title:      "the mail service is killed while it sends",
		Proves:     []string{"AC3", "M6-10", "M6-16", "OB-04"},
		Cells:      []Cell{cellResend(), cellHold()},
		Floors:     history.Floors{Confirmed: 500, Faults: 2},
		Invariants: everyMail(),
		System:     fast(),
		// Each kill waits for a mail: on busy cores the kills take longer than the
		// 500 mails that the floor asks for.
		Load:       Load{Baseline: 30, Bookings: 2500, PerSecond: 18, UntilStruck: true},
		Expect:     50 * time.Second,
		Quiesce:    90 * time.Second,
		FaultNames: []string{"kill-while-held", "kill-at-random"},
		Faults: func(b *Bench) []faults.Fault {
			victim := b.Process("notifyd-1")
			one := new(sync.Mutex)
			r := b.Rand("kills")
			return []faults.Fault{
				faults.NewKillWhileHeld(b.Parts.Mail, victim, drawStrikes(r), drawGap(r, 200*time.Millisecond, time.Second), one),
				faults.NewKillAtRandom(victim, drawGaps(b.Rand("random kills"), 4, 2*time.Second, 7*time.Second), one),
			}
		},
	}
}

// drawStrikes is two kills at each stage of a session, three where the outcome
// hangs in the balance, in an order of the seed's.
func drawStrikes(r *rand.Rand) []faults.Strike {
	var strikes []faults.Strike
	add := func(n int, s faults.Strike) {
		for range n {
			strikes = append(strikes, s)
		}
	}
	add(2, faults.Strike{Stage: smtp.StageConnect})
	add(2, faults.Strike{Stage: smtp.StageEHLO})
	add(2, faults.Strike{Stage: smtp.StageMail})
	add(2, faults.Strike{Stage: smtp.StageRcpt})
	add(2, faults.Strike{Stage: smtp.StageData})
	add(2, faults.Strike{Stage: smtp.StageBody})
	add(2, faults.Strike{Stage: smtp.StageDot})
	add(2, faults.Strike{Stage: smtp.StageDot, Discard: true})
	add(3, faults.Strike{Stage: smtp.StageStored})
	add(2, faults.Strike{Stage: smtp.StageReplied})
	// All but one in the seed's order: the first must be at a stage that kept
	// connections pass.
	add(1, faults.Strike{Stage: smtp.StageDot})
	last := len(strikes) - 1
	r.Shuffle(last, func(i, j int) { strikes[i], strikes[j] = strikes[j], strikes[i] })
	strikes[0], strikes[last] = strikes[last], strikes[0]
	return strikes
}

// drawGap draws a pause between lo and hi at each call.
func drawGap(r *rand.Rand, lo, hi time.Duration) func() time.Duration {
	return func() time.Duration { return lo + time.Duration(r.Int64N(int64(hi-lo))) }
}

func drawGaps(r *rand.Rand, n int, lo, hi time.Duration) []time.Duration {
	gaps := make([]time.Duration, n)
	draw := drawGap(r, lo, hi)
	for i := range gaps {
		gaps[i] = draw()
	}
	return gaps
}
