package scenarios

import (
	"context"
	"fmt"
	"math"
	"strings"
	"sync"
	"time"

	"mailproof/faults"
	"mailproof/history"
	"mailproof/loadgen"
	"mailproof/verify"
)

const (
	faultFlood = "flood"

	// floodMails is AC6's flood.
	floodMails = 50_000
	// floodAccepted is what the hand-over of them takes at most on two cores that do
	// nothing else; it is reported. A slower machine has its flood later, and the
	// tickets are measured from then on: only one that takes floodTooLate is none
	// to measure on.
	floodAccepted = 10 * time.Second
	floodTooLate  = time.Minute
	// ac6 is the bound on the tickets' p95.
	ac6 = 5 * time.Second
	// floodSamples is the least number of tickets on either side that a p95 is
	// taken of.
	floodSamples = 100
	// providerTime is how long the mail server works on each mail: a slow
	// provider, so that a connection is worth 10 mails a second and pools matter.
	providerTime = 100 * time.Millisecond
	// Workers of each lane, each with a connection of its own, and the token
	// bucket of marketing. The tickets' eight connections are worth 80 mails a
	// second, four times the load. If 64 marketing workers queued for the same
	// ones, the tickets' share would be worth 9, half the load.
	ticketWorkers    = 8
	marketingWorkers = 64
	marketingRate    = 100
	// floodWaits is how many marketing mails must wait at every moment at which
	// tickets are measured: AC6 says 50,000, and some are sent meanwhile.
	floodWaits = 35_000
	// ticketsLeft is how long the last tickets may take before the campaign is
	// stopped all the same.
	ticketsLeft = 20 * time.Second
)

// flood is T6.6: tickets alone, then tickets beside 50,000 marketing mails that
// were handed over in one call (AC6). Then the campaign is stopped by its flag,
// which must lay the rest of it aside unsent (C-14): to send them all would take
// minutes at the provider's pace and show nothing more.
func flood() Scenario {
	s := Scenario{
		Name:       "t6.6",
		Title:      "tickets beside 50,000 marketing mails",
		Proves:     []string{"AC6", "M6-01", "M6-12", "M6-17", "OB-11", "C-14", "TRAP-M6-4", "TRAP-M6-6"},
		Cells:      []Cell{cellResend()},
		Floors:     history.Floors{Confirmed: 600, Faults: 1},
		Invariants: append(everyMail(), "cancel-is-honoured", "stop-is-honoured"),
		System:     fast(),
		Load:       Load{Baseline: 150, Bookings: 500, PerSecond: 20, Cancels: 50},
		FaultNames: []string{faultFlood},
		Quiesce:    2 * time.Minute,
		Expect:     100 * time.Second,
		Judge:      judgeFlood,
	}
	s.System.SendDeadline, s.System.Lease = 5*time.Second, 8*time.Second
	// Longer than the backlog lasts.
	s.System.SweepGrace = 5 * time.Minute
	s.System.ServiceTime, s.System.Connections = providerTime, ticketWorkers+marketingWorkers
	s.System.Env = map[string]string{
		"NOTIFYD_TICKET_CONSUMERS":    fmt.Sprint(ticketWorkers),
		"NOTIFYD_MARKETING_CONSUMERS": fmt.Sprint(marketingWorkers),
		"NOTIFYD_MARKETING_PREFETCH":  "10",
		"NOTIFYD_MARKETING_RATE":      fmt.Sprint(marketingRate),
	}
	s.Faults = func(b *Bench) []faults.Fault {
		return []faults.Fault{&flooding{marketing: newMarketing(b, "flood", "reader", floodMails)}}
	}
	return s
}

// flooding is the campaign, as a fault: it strikes the tickets.
type flooding struct {
	*marketing

	mu       sync.Mutex
	accepted int
}

func (*flooding) Name() string       { return faultFlood }
func (*flooding) Target() string     { return "campaign" }
func (f *flooding) Available() error { return f.available() }

// Inject hands the campaign over.
func (f *flooding) Inject(ctx context.Context) error {
	result, err := f.handOver(ctx, time.Time{})
	if err != nil {
		return err
	}
	f.mu.Lock()
	f.accepted = result.New + result.Known
	f.mu.Unlock()
	f.readDepths(ctx)
	return nil
}

// Heal waits for the last tickets, and stops the campaign.
func (f *flooding) Heal(ctx context.Context) error {
	defer f.doneReading()
	for deadline := time.Now().Add(ticketsLeft); time.Now().Before(deadline) && f.ticketsPending(ctx) && pause(ctx, restPoll); {
	}
	return f.stop(ctx)
}

func (f *flooding) ticketsPending(ctx context.Context) bool {
	pending, err := f.bench.Target.Pending(ctx)
	if err != nil {
		return true
	}
	for what := range pending {
		if !strings.HasPrefix(what, "campaign:") {
			return true
		}
	}
	return false
}

// Witness wants the far side to have seen mails of it: what the system says of
// its own campaign is no evidence.
func (f *flooding) Witness(context.Context) (faults.Witness, error) {
	seen := f.delivered()
	if seen == 0 {
		return faults.Witness{}, nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return faults.Witness{Text: fmt.Sprintf("%d marketing mails were accepted, %d reached the mail server", f.accepted, seen), Count: f.accepted}, nil
}

// lanes are the latencies of tickets over one stretch of a run.
type lanes struct {
	accepted, sent *loadgen.Latency
}

func judgeFlood(h *history.History, own *ownFindings) {
	e := verify.NewEvidence(h, verify.DefaultColumns())
	asked, stopped := floodOps(h)
	judgeHandOver(h, asked, own)
	if asked == nil || stopped == nil {
		return
	}
	from, _, ok := h.Phase("baseline")
	if !ok {
		return
	}
	idle := ticketLatency(own, from, asked.Call)
	flooded := ticketLatency(own, asked.Return, math.MaxInt64)
	judgeTickets(idle, flooded, own)
	judgeBacklog(h, e, asked.Return, stopped.Call, own)
	measureCampaign(h, e, asked, stopped, own)
}

// floodOps are the acknowledged hand-over and the acknowledged stop.
func floodOps(h *history.History) (asked, stopped *history.Op) {
	for i := range h.Ops {
		switch o := &h.Ops[i]; {
		case o.Outcome != history.OpOK:
		case o.Name == "campaign":
			asked = o
		case o.Name == "stop":
			stopped = o
		}
	}
	return asked, stopped
}

const floodAcceptedInvariant = "flood-is-accepted"

// judgeHandOver wants the whole campaign taken, and tells how long that took from
// the first call on. That the flood is there while tickets are measured is judged
// by its queue.
func judgeHandOver(h *history.History, asked *history.Op, own *ownFindings) {
	own.check(floodAcceptedInvariant, fmt.Sprintf("%d marketing mails are handed over as one campaign, and every one is taken.", floodMails), 1)
	if asked == nil {
		own.find(verify.Invalid, floodAcceptedInvariant, "", "no campaign was acknowledged")
		return
	}
	calls, first := 0, asked.Call
	for i := range h.Ops {
		if o := &h.Ops[i]; o.Name == "campaign" {
			calls++
			first = min(first, o.Call)
		}
	}
	took := time.Duration(asked.Return - first)
	own.measure("hand-over of the campaign", took.Seconds(), "s", fmt.Sprintf("%d mails, %d calls; %s is asked of a machine that does nothing else", len(asked.Campaign.Keys), calls, floodAccepted))
	// A call that is repeated finds what the one before it had brought.
	switch n := asked.Campaign.New + asked.Campaign.Known; {
	case n != floodMails:
		own.find(verify.Fail, floodAcceptedInvariant, "", fmt.Sprintf("%d mails were handed over, and the system says that it took %d", floodMails, n))
	case took > floodTooLate:
		own.find(verify.Invalid, floodAcceptedInvariant, "", fmt.Sprintf("the hand-over took %s: this machine makes no flood", loadgen.Text(took)))
	}
}

const ac6Invariant = "ticket-latency"

// judgeTickets is AC6: CONFIRMED to SENT. Its bound is absolute, so a machine
// that misses it without the flood cannot tell.
func judgeTickets(idle, flooded lanes, own *ownFindings) {
	own.check(ac6Invariant, fmt.Sprintf("Beside %d marketing mails the p95 of a ticket from the intended time of its confirmation to SENT is below %s (AC6).", floodMails, ac6), int(idle.sent.N()+flooded.sent.N()))
	for _, m := range []struct {
		name string
		of   *loadgen.Latency
	}{
		{"tickets alone, to SENT", idle.sent},
		{"tickets in the flood, to SENT", flooded.sent},
		{"tickets alone, to accepted", idle.accepted},
		{"tickets in the flood, to accepted", flooded.accepted},
	} {
		own.measureLatency(m.name, m.of)
	}
	before, beside := idle.sent.Quantile(0.95), flooded.sent.Quantile(0.95)
	switch {
	case min(idle.sent.N(), flooded.sent.N()) < floodSamples:
		own.find(verify.Invalid, ac6Invariant, "", fmt.Sprintf("%d tickets alone and %d in the flood: too few for a p95, the floor is %d", idle.sent.N(), flooded.sent.N(), floodSamples))
	case before >= ac6:
		own.find(verify.Invalid, ac6Invariant, "", fmt.Sprintf("the p95 is %s with tickets alone: this machine cannot tell", loadgen.Text(before)))
	case beside >= ac6:
		own.find(verify.Fail, ac6Invariant, "", fmt.Sprintf("the p95 of %d tickets is %s beside the flood, and was %s alone", flooded.sent.N(), loadgen.Text(beside), loadgen.Text(before)))
	}
}

const backlogInvariant = "flood-is-there"

// depthGap is the longest stretch without a reading of the queue.
const depthGap = 5 * time.Second

// judgeBacklog wants marketing mails waiting all the while that tickets were
// measured, by the broker's word and by the rows. A flood that had run off would
// leave tickets alone again.
func judgeBacklog(h *history.History, e *verify.Evidence, from, to int64, own *ownFindings) {
	least, readings, gap := math.MaxInt, 0, int64(0)
	last := from
	for _, d := range h.Depths {
		if !strings.HasSuffix(d.Queue, ".marketing") || d.At < from || d.At > to {
			continue
		}
		readings++
		least, gap, last = min(least, d.Ready), max(gap, d.At-last), d.At
	}
	gap = max(gap, to-last)
	own.check(backlogInvariant, "While tickets are measured marketing mails wait: in the queue at each reading, and in the rows at each moment.", readings)
	rows := leastWaiting(e, from, to)
	if readings > 0 {
		own.measure("marketing queue, shortest", float64(least), "messages", fmt.Sprintf("%d readings", readings))
	}
	own.measure("marketing rows not yet claimed, fewest", float64(rows), "", "")
	switch {
	case readings == 0 || time.Duration(gap) > depthGap:
		own.find(verify.Invalid, backlogInvariant, "", fmt.Sprintf("the marketing queue was not read for %s", time.Duration(gap).Round(time.Millisecond)))
	case least < floodWaits:
		own.find(verify.Invalid, backlogInvariant, "", fmt.Sprintf("the marketing queue held %d messages while tickets were measured, the floor is %d: that is no flood of %d", least, floodWaits, floodMails))
	case rows <= 0:
		own.find(verify.Invalid, backlogInvariant, "", "every marketing mail had been claimed while tickets were measured")
	}
}

// leastWaiting is the smallest number of campaign mails that waited for their
// first claim at any moment of [from, to], by the log of their rows.
func leastWaiting(e *verify.Evidence, from, to int64) int {
	waiting, left := 0, []int64{}
	for _, key := range e.Keys {
		m := e.Mails[key]
		if m.Campaign == "" || len(m.Moves) == 0 {
			continue
		}
		leaves := int64(math.MaxInt64)
		for i := range m.Moves {
			if m.Moves[i].To != "PENDING" {
				leaves = m.Moves[i].At
				break
			}
		}
		if m.Moves[0].At <= from && leaves > from {
			waiting++
			if leaves <= to {
				left = append(left, leaves)
			}
		}
	}
	return waiting - len(left) // none arrive after the hand-over
}

// measureCampaign says what became of the campaign.
func measureCampaign(h *history.History, e *verify.Evidence, asked, stopped *history.Op, own *ownFindings) {
	states, late := map[string]int{}, 0
	beside := 0
	for _, key := range asked.Campaign.Keys {
		m := e.Mails[key]
		states[m.State()]++
		for _, a := range m.Attempts {
			if a.Stored && a.DotAt > stopped.Return {
				late++
			}
			if a.Stored && a.DotAt > asked.Return && a.DotAt <= stopped.Call {
				beside++
			}
		}
	}
	span := float64(stopped.Call-asked.Return) / 1e9
	pace := float64(beside) / span
	own.measure("marketing mails sent beside the tickets", pace, "/s", fmt.Sprintf("the bucket allows %d", marketingRate))
	judgePace(pace, beside, own)
	own.measure("marketing mails sent", float64(states["sent"]), "", "")
	own.measure("marketing mails laid aside by the stop", float64(states["cancelled"]), "", "")
	own.measure("marketing mails under way at the stop", float64(late), "", "claimed before it, sent after it")
	if at := restedAt(e, stopped.Return); at > 0 {
		own.measure("the rest laid aside", float64(states["cancelled"])/(float64(at-stopped.Return)/1e9), "/s", "")
	}
}

const (
	paceInvariant = "flood-flows"
	// paceOver is how far above its bucket the lane may be: what the bucket holds
	// at first, over the shortest stretch that is measured.
	paceOver = 1.2
	// paceUnder is the share of its bucket that the lane must send, at least: one
	// that stands still leaves the tickets alone.
	paceUnder = 0.3
)

// judgePace wants the marketing lane at work beside the tickets, and within its
// bucket (M6-17). A lane that hardly sends, or one that knows no bucket, is not the
// one that the tickets are said to be fast beside.
func judgePace(pace float64, sent int, own *ownFindings) {
	own.check(paceInvariant, fmt.Sprintf("Beside the tickets marketing mails are sent, at no more than the %d a second that their bucket allows (M6-17).", marketingRate), sent)
	switch {
	case pace > paceOver*marketingRate:
		own.find(verify.Fail, paceInvariant, "", fmt.Sprintf("%.0f marketing mails a second were sent, the bucket allows %d", pace, marketingRate))
	case pace < paceUnder*marketingRate:
		own.find(verify.Invalid, paceInvariant, "", fmt.Sprintf("%.1f marketing mails a second were sent, and the bucket allows %d: tickets were measured beside a lane that hardly moved", pace, marketingRate))
	}
}

// restedAt is when the last campaign mail was settled, 0 if none was after from.
func restedAt(e *verify.Evidence, from int64) (at int64) {
	for _, m := range e.Mails {
		if m.Campaign == "" {
			continue
		}
		for i := range m.Moves {
			if t := m.Moves[i].At; t > from {
				at = max(at, t)
			}
		}
	}
	return at
}
