package scenarios

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"mailproof/faults"
	"mailproof/history"
	"mailproof/verify"
)

const faultDrained = "terminated-while-sending"

// shutdown asks the services to end while they work. An end that was asked for
// loses nothing and costs nothing: the mails at work are finished, no mail is
// tried once more for its sake. Only a second signal is a crash.
func shutdown() Scenario {
	s := partScenario("part-shutdown", "the services are asked to end while mails are at work; once more, at once",
		faultDrained, "terminated-twice", "bookingd-terminated")
	s.Proves = []string{"M6-10", "A2-03"}
	s.Exclusive = false // the services are the cell's own
	// A session is held for as long as it takes to see that the process waits.
	s.System.SendDeadline, s.System.Lease = 6*time.Second, 9*time.Second
	parts := judgeParts()
	s.Judge = func(h *history.History, own *ownFindings) {
		parts(h, own)
		judgeDrained(h, own)
	}
	s.Faults = func(b *Bench) []faults.Fault {
		notifyd, bookingd := b.stoppable("notifyd-1"), b.stoppable("bookingd-1")
		if notifyd == nil || bookingd == nil {
			return b.impossible(s.FaultNames, "the target's processes cannot be asked to end")
		}
		return b.inTurn(
			faults.Drained(b.Parts.Mail, notifyd, 3),
			faults.StoppedAtOnce(b.Parts.Mail, notifyd),
			faults.Ended("bookingd-terminated", bookingd),
		)
	}
	return s
}

// lateParts starts the services before anything that they need.
func lateParts() Scenario {
	const before = "started-before-parts"
	s := partScenario("part-late-start", "the services are started before Postgres, RabbitMQ and Kafka", before)
	s.Proves = []string{"A2-03", "A2-10"}
	s.Judge = judgeParts(before)
	s.Faults = func(b *Bench) []faults.Fault {
		var all []faults.Stoppable
		for _, p := range b.Target.Processes() {
			stoppable := b.stoppable(p.Name())
			if stoppable == nil {
				return b.impossible(s.FaultNames, "the target's processes cannot be asked to end")
			}
			all = append(all, stoppable)
		}
		return b.inTurn(faults.StartedBefore(b.Parts.Stack, all, b.Unready, func(process string) []string {
			if strings.HasPrefix(process, mailService) {
				return []string{"database", "RabbitMQ", "Kafka", "consumers"}
			}
			return []string{"database"} // the outbox waits for the rest
		}))
	}
	return s
}

func (b *Bench) stoppable(name string) faults.Stoppable {
	p, _ := b.Process(name).(faults.Stoppable)
	return p
}

// impossible makes faults that say why they are skipped.
func (b *Bench) impossible(names []string, why string) []faults.Fault {
	acts := make([]faults.Act, len(names))
	for i, name := range names {
		acts[i] = faults.Act{Title: name, Possible: errors.New(why)}
	}
	return b.inTurn(acts...)
}

// judgeDrained wants one try of each mail that was at work when its process was
// asked to end.
func judgeDrained(h *history.History, own *ownFindings) {
	const name = "drained-costs-no-try"
	tries := map[string]int{}
	for _, f := range h.Faults {
		if f.Name == faultDrained {
			for _, key := range f.Keys {
				tries[key] = 0
			}
		}
	}
	for _, a := range h.Attempts {
		if _, ok := tries[a.Key]; ok {
			tries[a.Key]++
		}
	}
	own.check(name, "A mail that is at work when its process is asked to end is finished, and not tried again.", len(tries))
	if len(tries) == 0 {
		own.find(verify.Invalid, name, "", "no mail was at work when its process was asked to end")
	}
	for key, n := range tries {
		if n != 1 {
			own.find(verify.Fail, name, key, fmt.Sprintf("it was at work when its process was asked to end, and was tried %d times", n))
		}
	}
}
