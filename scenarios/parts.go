package scenarios

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"mailproof/faults"
	"mailproof/history"
	"mailproof/verify"
)

const (
	// ticketQueue is the queue of the mails that every scenario sends.
	ticketQueue = "q.notify.ticket"
	// healedBound is how long the system may take to be ready and deliver again
	// once a part is whole. A new AMQP channel was seen to wait for 70 s where a
	// queue's leader had stopped without a word.
	healedBound = 90 * time.Second
	healedPoll  = 100 * time.Millisecond
	// outage is how long a part stays broken: longer than the pauses after which
	// clients look for it again.
	outage = 3 * time.Second
)

// partScenario is what the scenarios about parts have in common: tickets arrive
// at a steady pace until the last part was struck and is whole again.
func partScenario(name, title string, faultNames ...string) Scenario {
	s := Scenario{
		Name: name, Title: title,
		Cells:      []Cell{cellResend()},
		Floors:     history.Floors{Confirmed: 500, Faults: len(faultNames)},
		Invariants: everyMail(),
		System:     fast(),
		Load:       Load{Baseline: 20, Bookings: 6000, PerSecond: 25, UntilStruck: true},
		Quiesce:    90 * time.Second,
		Expect:     60 * time.Second,
		FaultNames: faultNames,
		Judge:      judgeParts(),
		Exclusive:  true,
	}
	s.System.WatchReadiness = true
	return s
}

// cluster is the cell's RabbitMQ.
func (b *Bench) cluster() faults.Cluster {
	return faults.Cluster{RabbitMQ: b.Parts.Stack.RabbitMQ(), Vhost: b.Parts.Vhost, Queue: ticketQueue}
}

// inTurn strikes one act after the other, each when the system has got over the
// one before.
func (b *Bench) inTurn(acts ...faults.Act) []faults.Fault {
	return faults.InTurn(history.Now, b.awaitHealed, acts...)
}

// awaitHealed waits until every process is ready and a mail is delivered that
// was not when it was called, at most healedBound: what does not heal is the
// judge's to find, from the evidence.
func (b *Bench) awaitHealed(ctx context.Context) error {
	before := b.Stored()
	for end := time.Now().Add(healedBound); time.Now().Before(end); {
		if b.Stored() > before && (b.Unready == nil || len(b.Unready()) == 0) {
			return nil
		}
		if !pause(ctx, healedPoll) {
			return ctx.Err()
		}
	}
	return nil
}

// judgeParts judges what only scenarios about parts are about: that each fault
// struck under load and was got over by the processes as they ran, without a
// restart. red names the faults that must have turned a readiness red.
func judgeParts(red ...string) func(*history.History, *ownFindings) {
	return func(h *history.History, own *ownFindings) {
		judgeUnderLoad(h, own)
		judgeHealing(h, own)
		judgeReadiness(h, own, red)
		measureParts(h, own)
	}
}

// judgeUnderLoad wants arrivals while each fault was in place.
func judgeUnderLoad(h *history.History, own *ownFindings) {
	for _, f := range struckParts(h) {
		during := slices.ContainsFunc(h.Ops, func(op history.Op) bool {
			return op.Intended >= f.Start-int64(time.Second) && op.Intended <= f.End+int64(time.Second)
		})
		if !during {
			own.find(verify.Invalid, "struck-under-load", "", fmt.Sprintf("nothing was confirmed while %s struck %s", f.Name, f.Target))
		}
	}
}

// judgeHealing wants a delivery after each fault, and before the next one or
// within healedBound, by processes that were started once.
func judgeHealing(h *history.History, own *ownFindings) {
	const name = "heals-by-itself"
	struck := struckParts(h)
	own.check(name, "When a part is whole again the system delivers again, and nobody has started its processes anew.", len(struck))
	delivered := deliveries(h)
	for i, f := range struck {
		until := f.End + int64(healedBound)
		if i+1 < len(struck) {
			until = struck[i+1].Start
		}
		if _, ok := firstIn(delivered, f.End, until); !ok {
			own.find(verify.Fail, name, "", fmt.Sprintf("%s struck %s until %s; nothing was delivered for %.1f s after that",
				f.Name, f.Target, sinceStart(h, f.End), time.Duration(until-f.End).Seconds()))
		}
	}
	starts := map[string]int{}
	for _, p := range h.Processes {
		if h.Final != nil && p.At > h.Final.At {
			continue // the run is over, and the system is being stopped
		}
		switch {
		case p.Event == "started" && !struckProcess(struck, p.Name):
			if starts[p.Name]++; starts[p.Name] > 1 {
				own.find(verify.Fail, name, "", fmt.Sprintf("%s was started again at %s", p.Name, sinceStart(h, p.At)))
			}
		case p.Event == "exited" && !struckProcess(struck, p.Name):
			own.find(verify.Fail, name, "", fmt.Sprintf("%s ended by itself at %s: %s", p.Name, sinceStart(h, p.At), p.Detail))
		}
	}
}

func struckProcess(struck []history.Fault, name string) bool {
	return slices.ContainsFunc(struck, func(f history.Fault) bool { return strings.Contains(f.Target, name) })
}

// judgeReadiness wants every process ready at the end, and those faults seen
// that take away what a process needs.
func judgeReadiness(h *history.History, own *ownFindings, red []string) {
	const name = "readiness-tells"
	last := map[string]history.Process{}
	looked := 0
	for _, p := range h.Processes {
		if p.Event == "ready" || p.Event == "unready" {
			last[p.Name] = p
			looked++
		}
	}
	own.check(name, "Readiness turns red while a process cannot do its work, and green again when it can.", looked)
	for process, p := range last {
		if p.Event == "unready" {
			own.find(verify.Fail, name, "", fmt.Sprintf("%s was not ready at the end: %s", process, p.Detail))
		}
	}
	for _, f := range struckParts(h) {
		if !slices.Contains(red, f.Name) {
			continue
		}
		seen := slices.ContainsFunc(h.Processes, func(p history.Process) bool {
			return p.Event == "unready" && p.At >= f.Start && p.At <= f.End+int64(time.Second)
		})
		if !seen {
			own.find(verify.Fail, name, "", fmt.Sprintf("every process said it was ready while %s struck %s", f.Name, f.Target))
		}
	}
}

// measureParts writes the figures of the document: the longest gap without a
// delivery around each fault, what came again, and what had to be rescued.
func measureParts(h *history.History, own *ownFindings) {
	struck, delivered := struckParts(h), deliveries(h)
	for i, f := range struck {
		until := h.End
		if i+1 < len(struck) {
			until = struck[i+1].Start
		}
		own.measure("longest gap without a delivery, "+f.Name, longestGap(delivered, f.Start, until).Seconds(), "s",
			fmt.Sprintf("the part was broken for %.1f s", time.Duration(f.End-f.Start).Seconds()))
		if at, ok := firstIn(delivered, f.End, until); ok {
			own.measure("first delivery after "+f.Name, time.Duration(at-f.End).Seconds(), "s", "from when the part was whole")
		}
	}
	var again, rescued float64
	if h.Final == nil {
		return
	}
	for counter, n := range h.Final.Counters {
		if strings.Contains(counter, "deliveries_total") && strings.Contains(counter, `redelivered="true"`) {
			again += n
		}
		if strings.Contains(counter, "rescue") && n > 0 {
			rescued += n
			own.measure("rescued: "+counter, n, "", "")
		}
	}
	own.measure("events in the topic more than once", float64(topicRepeats(h)), "", "published again since an answer did not come")
	own.measure("redeliveries", again, "", "marked as such by the broker")
	own.measure("rescued by the sweeper", rescued, "", "")
}

// topicRepeats counts the records of the topic that repeat an event.
func topicRepeats(h *history.History) (n int) {
	seen := map[string]bool{}
	for _, r := range h.Final.Topic {
		if seen[r.EventID] {
			n++
		}
		seen[r.EventID] = true
	}
	return n
}

// struckParts are the faults that took hold, in the order in which they did.
func struckParts(h *history.History) []history.Fault {
	var struck []history.Fault
	for _, f := range h.Faults {
		if f.Outcome == history.Installed && f.Witness != "" {
			struck = append(struck, f)
		}
	}
	slices.SortFunc(struck, func(a, b history.Fault) int { return int(min(1, max(-1, a.Start-b.Start))) })
	return struck
}

// deliveries are the times at which copies were kept, in order.
func deliveries(h *history.History) []int64 {
	var at []int64
	for _, a := range h.Attempts {
		if a.Stored {
			at = append(at, a.DotAt)
		}
	}
	slices.Sort(at)
	return at
}

func firstIn(times []int64, from, to int64) (int64, bool) {
	i, _ := slices.BinarySearch(times, from)
	if i < len(times) && times[i] <= to {
		return times[i], true
	}
	return 0, false
}

// longestGap between two deliveries, as far as it lies between from and until: a
// gap that reaches into the time of the next fault is that one's.
func longestGap(delivered []int64, from, until int64) time.Duration {
	var longest int64
	for i := 1; i < len(delivered); i++ {
		longest = max(longest, min(delivered[i], until)-max(delivered[i-1], from))
	}
	return time.Duration(longest)
}

func sinceStart(h *history.History, t int64) string {
	return fmt.Sprintf("%.1f s", time.Duration(t-h.Start).Seconds())
}
