package scenarios

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"mailproof/faults"
	"mailproof/history"
	"mailproof/target"
	"mailproof/verify"
)

const (
	faultMajority  = "rabbitmq-majority-killed"
	faultCampaigns = "campaigns-wait"

	// The API takes throttleLimit requests within throttleWindow and asks who is
	// one too many to come again after as long: longer than the first delay
	// between tries, so that a system which keeps to its own delays is seen.
	throttleLimit  = 150
	throttleWindow = 3 * time.Second

	// lastingMails are marketing without an end, handed over before the outage;
	// staleMails are handed over while the broker is away, and are worth sending
	// for staleAfter: by the time it is back nobody wants them.
	lastingMails = 330
	staleMails   = 300
	staleAfter   = 6 * time.Second
	// drainRate is marketing's token bucket, mails per second: far below what the
	// API takes, so that tickets find room, and so low that the campaign lasts for
	// a minute: a busy machine has that long for the tickets.
	drainRate = 5
	// backlogFloor tickets, and as many marketing mails, are to wait when the
	// broker is back. The outage lasts until outageTickets do.
	backlogFloor  = 200
	outageTickets = 200
)

const (
	lastingCampaign = "spring"
	staleCampaign   = "tonight"
)

// brokerOutage is CASE-2, 20 minutes of outage in short form: RabbitMQ loses its
// majority while bookings go on and a campaign waits, and a second campaign is
// asked for that is over before the broker is back. Then all that has piled up
// wants to leave at once, and the mail API says 429. Nothing is repaired by hand:
// the backlog drains as the API asks for, tickets first, and stale marketing is
// laid aside.
func brokerOutage() Scenario {
	s := Scenario{
		Name:               "case-2",
		Title:              "RabbitMQ is away at peak; the backlog drains under 429, tickets first, stale marketing is not sent",
		Proves:             []string{"CASE-2", "OB-10", "OB-11", "M6-01", "M6-17"},
		Cells:              []Cell{cellSameKeyHTTP()},
		Floors:             history.Floors{Confirmed: 500, Faults: 3},
		Invariants:         append(everyMail(), "throttle-is-honoured", "expiry-is-honoured"),
		System:             fast(),
		Load:               Load{Baseline: 20, Bookings: 4000, PerSecond: 25, UntilStruck: true},
		FaultNames:         []string{faults.ThrottleName, faultCampaigns, faultMajority},
		FaultsUntilSettled: true,
		Quiesce:            4 * time.Minute,
		Expect:             120 * time.Second,
		Judge:              judgeBrokerOutage,
		Exclusive:          true,
	}
	s.System.RetryDelays = []time.Duration{time.Second, throttleWindow, 2 * throttleWindow}
	// Longer than marketing waits for its turn.
	s.System.SweepGrace = 90 * time.Second
	s.System.WatchReadiness = true
	s.System.Env = map[string]string{
		"NOTIFYD_MARKETING_RATE":     fmt.Sprint(drainRate),
		"NOTIFYD_MARKETING_PREFETCH": "10",
		// As many as tickets have. Its bucket holds as many tokens at most, so that
		// much marketing may leave at once.
		"NOTIFYD_MARKETING_PARALLEL": "4",
	}
	s.Faults = func(b *Bench) []faults.Fault {
		w := newWaiting(b)
		all := []faults.Fault{&faults.Throttle{Server: b.Parts.Mail, Limit: throttleLimit, Window: throttleWindow}, w}
		return append(all, b.inTurn(faults.MajorityKilled(b.cluster(), w.meanwhile))...)
	}
	return s
}

// waiting are the two campaigns, as a fault: they stand in the tickets' way.
type waiting struct {
	bench          *Bench
	lasting, stale *marketing

	// askStale hands the second campaign over, nil where the first was not. It
	// outlives the outage's own strike: its answer may come some time after that.
	askStale func(expires time.Time) error
	handing  sync.WaitGroup
	mu       sync.Mutex
	taken    map[string]target.CampaignResult
	failed   error
}

func newWaiting(b *Bench) *waiting {
	return &waiting{
		bench: b, taken: map[string]target.CampaignResult{},
		lasting: newMarketing(b, lastingCampaign, "reader", lastingMails),
		stale:   newMarketing(b, staleCampaign, "guest-list", staleMails),
	}
}

func (*waiting) Name() string       { return faultCampaigns }
func (*waiting) Target() string     { return "campaign" }
func (w *waiting) Available() error { return w.lasting.available() }

// Inject hands over the campaign that waits through the outage.
func (w *waiting) Inject(ctx context.Context) error {
	w.askStale = func(expires time.Time) error { return w.handOver(ctx, w.stale, expires) }
	return w.handOver(ctx, w.lasting, time.Time{})
}

func (w *waiting) handOver(ctx context.Context, m *marketing, expires time.Time) error {
	result, err := m.handOver(ctx, expires)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.taken[m.id] = result
	return err
}

// meanwhile is what happens while the broker is away: the second campaign is
// handed over, which is acknowledged only once there is a broker again. It returns
// when that campaign's time is over and enough tickets wait, or after goneBound:
// whether they did is judged from the evidence.
func (w *waiting) meanwhile(ctx context.Context) error {
	expires := time.Now().Add(staleAfter)
	if w.askStale != nil {
		w.handing.Go(func() {
			err := w.askStale(expires)
			w.mu.Lock()
			defer w.mu.Unlock()
			w.failed = err
		})
	}
	for end := time.Now().Add(goneBound); time.Now().Before(end); {
		if time.Now().After(expires) && w.piledUp(ctx) {
			return nil
		}
		if !pause(ctx, restPoll) {
			return ctx.Err()
		}
	}
	return nil
}

// piledUp reports whether enough tickets wait, and every mail of the second
// campaign has its row.
func (w *waiting) piledUp(ctx context.Context) bool {
	pending, err := w.bench.Target.Pending(ctx)
	if err != nil {
		return false
	}
	tickets := 0
	for what := range pending {
		if !strings.HasPrefix(what, "campaign:") {
			tickets++
		}
	}
	if tickets < outageTickets || w.askStale == nil {
		return tickets >= outageTickets
	}
	state, err := w.stale.target.CampaignState(ctx, w.stale.id)
	return err == nil && state.Total == staleMails
}

// Heal waits for the answer to the second hand-over.
func (w *waiting) Heal(context.Context) error {
	w.handing.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.failed
}

// Witness wants the far side to have seen mails of the lasting campaign: what the
// system says of its campaigns is no evidence.
func (w *waiting) Witness(context.Context) (faults.Witness, error) {
	seen := w.lasting.delivered()
	if seen == 0 {
		return faults.Witness{}, nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	before, during := w.taken[lastingCampaign], w.taken[staleCampaign]
	return faults.Witness{
		Text: fmt.Sprintf("%d marketing mails were accepted before the outage, %d reached the mail API; %d were accepted that were asked for during it, %d did",
			before.New+before.Known, seen, during.New+during.Known, w.stale.delivered()),
		Count: before.New + before.Known,
	}, nil
}

// backlog is what waited when the broker was back: for each mail of each kind when
// it was delivered, in order. What never was is nothing-lost's to find.
type backlog struct {
	resumed            int64
	tickets, marketing []int64
	all                int // tickets, delivered or not
}

func judgeBrokerOutage(h *history.History, own *ownFindings) {
	i := slices.IndexFunc(h.Faults, func(f history.Fault) bool {
		return f.Name == faultMajority && f.Outcome == history.Installed && f.Witness != ""
	})
	if i < 0 {
		return // assurance says so
	}
	outage := h.Faults[i]
	// The other two are in place all the while.
	alone := *h
	alone.Faults = []history.Fault{outage}
	judgeParts(faultMajority)(&alone, own)

	e := verify.NewEvidence(h, verify.DefaultColumns())
	b := backlogOf(h, e, outage)
	judgePiledUp(e, b, own)
	judgeUrgentFirst(b, own)
	judgeStale(h, e, b, own)
}

// backlogOf takes the first delivery after the longest silence of the outage for
// the moment from which the backlog drains: that the cluster was whole again is
// known seconds later.
func backlogOf(h *history.History, e *verify.Evidence, outage history.Fault) backlog {
	var b backlog
	b.resumed = resumedAt(deliveries(h), outage)
	for _, key := range e.Keys {
		m := e.Mails[key]
		at := deliveredAt(m)
		if at < b.resumed || !askedBy(m, b.resumed) {
			continue
		}
		switch m.Campaign {
		case "":
			if b.all++; at < math.MaxInt64 {
				b.tickets = append(b.tickets, at)
			}
		case lastingCampaign:
			b.marketing = append(b.marketing, at)
		}
	}
	slices.Sort(b.tickets)
	slices.Sort(b.marketing)
	return b
}

// resumedAt is the end of the longest silence that lies in the fault's time or
// begins in it; 0 if nothing was delivered after it began.
func resumedAt(delivered []int64, f history.Fault) (at int64) {
	longest, last := int64(0), f.Start
	for _, t := range delivered {
		if t <= f.Start {
			continue
		}
		if last < f.End && t-last > longest {
			longest, at = t-last, t
		}
		last = t
	}
	return at
}

// deliveredAt is when the first copy of a mail was kept; never is the end of time.
func deliveredAt(m *verify.Mail) int64 {
	at := int64(math.MaxInt64)
	for _, a := range m.Attempts {
		if a.Stored {
			at = min(at, a.DotAt)
		}
	}
	return at
}

// askedBy reports a request for the mail that was acknowledged by then.
func askedBy(m *verify.Mail, by int64) bool {
	return slices.ContainsFunc(m.Ops, func(o *history.Op) bool {
		return (o.Name == "confirm" || o.Name == "campaign") && o.Outcome == history.OpOK && o.Return <= by
	})
}

// judgePiledUp wants something to drain, and the mail API to hold it up.
func judgePiledUp(e *verify.Evidence, b backlog, own *ownFindings) {
	const name = "backlog-is-there"
	own.check(name, fmt.Sprintf("When the broker is back at least %d tickets and as many marketing mails wait, and the mail API answers 429 to tickets.", backlogFloor), b.all+len(b.marketing))
	var throttled [2]int // of tickets, of marketing
	accepted := 0
	for _, key := range e.Keys {
		m := e.Mails[key]
		for _, a := range m.Attempts {
			switch {
			case a.Stored:
				accepted++
			case strings.HasPrefix(a.Reply, "429") && m.Campaign == "":
				throttled[0]++
			case strings.HasPrefix(a.Reply, "429"):
				throttled[1]++
			}
		}
	}
	own.measure("tickets that waited when the broker was back", float64(b.all), "", "")
	own.measure("marketing mails that waited with them", float64(len(b.marketing)), "", "")
	own.measure("tries of tickets answered 429", float64(throttled[0]), "", "")
	own.measure("tries of marketing mails answered 429", float64(throttled[1]), "", "")
	own.measure("429 per mail accepted", float64(throttled[0]+throttled[1])/float64(max(accepted, 1)), "", "")
	switch {
	case b.all < backlogFloor || len(b.marketing) < backlogFloor:
		own.find(verify.Invalid, name, "", fmt.Sprintf("%d tickets and %d marketing mails waited when the broker was back, the floor is %d", b.all, len(b.marketing), backlogFloor))
	case throttled[0] == 0:
		own.find(verify.Invalid, name, "", "no try of a ticket was answered 429")
	}
}

// judgeUrgentFirst is about order alone: whatever the machine's speed, no ticket
// of the backlog waits behind the marketing that waited beside it.
func judgeUrgentFirst(b backlog, own *ownFindings) {
	const name = "urgent-first"
	own.check(name, "When the last ticket of the backlog is delivered, more than half of the marketing that waited with it still waits (OB-11, CASE-2).", len(b.tickets))
	if len(b.tickets) == 0 || len(b.marketing) == 0 {
		return
	}
	last, middle := b.tickets[len(b.tickets)-1], b.tickets[len(b.tickets)/2]
	before := func(t int64) int { n, _ := slices.BinarySearch(b.marketing, t); return n }
	share := func(t int64) float64 { return 100 * float64(before(t)) / float64(len(b.marketing)) }
	own.measure("tickets of the backlog delivered after", time.Duration(last-b.resumed).Seconds(), "s", "from the first delivery after the outage")
	if end := b.marketing[len(b.marketing)-1]; end < math.MaxInt64 {
		own.measure("marketing of the backlog delivered after", time.Duration(end-b.resumed).Seconds(), "s", fmt.Sprintf("the bucket allows %d/s", drainRate))
	}
	own.measure("marketing ahead of the last ticket", share(last), "%", "of the marketing that waited with it")
	own.measure("marketing ahead of the middle ticket", share(middle), "%", "")
	if ahead := before(last); 2*ahead >= len(b.marketing) {
		own.find(verify.Fail, name, "", fmt.Sprintf("%d of %d marketing mails of the backlog were delivered before the last of %d tickets, %d before the middle one",
			ahead, len(b.marketing), len(b.tickets), before(middle)))
	}
}

// judgeStale wants every mail laid aside whose time was over before the broker was
// back, and none of them sent.
func judgeStale(h *history.History, e *verify.Evidence, b backlog, own *ownFindings) {
	const name = "stale-is-laid-aside"
	var asked *history.Op
	for i := range h.Ops {
		if o := &h.Ops[i]; o.Name == "campaign" && o.Campaign != nil && o.Campaign.ID == staleCampaign {
			asked = o
		}
	}
	own.check(name, "Marketing whose time was over before the broker was back ends EXPIRED and unsent (CASE-2).", staleMails)
	switch {
	case asked == nil || asked.Outcome != history.OpOK:
		own.find(verify.Invalid, name, "", "the campaign of the outage was never acknowledged")
		return
	case h.Monotonic(asked.Campaign.ExpiresAt) >= b.resumed:
		own.find(verify.Invalid, name, "", "the broker was back before the campaign's time was over")
		return
	}
	laid := 0
	for _, key := range asked.Campaign.Keys {
		switch m := e.Mails[key]; {
		case m.Delivered():
			own.find(verify.Fail, name, key, "it was delivered, and its time had been over before the broker was back")
		case m.State() != "expired":
			own.find(verify.Fail, name, key, fmt.Sprintf("its time was over before the broker was back, and its state is %q", m.State()))
		default:
			laid++
		}
	}
	own.measure("stale marketing mails laid aside", float64(laid), "", fmt.Sprintf("of %d", len(asked.Campaign.Keys)))
}
