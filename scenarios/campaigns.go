package scenarios

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"
	"time"

	"mailproof/fakes/smtp"
	"mailproof/faults"
	"mailproof/history"
	"mailproof/target"
	"mailproof/verify"
)

const (
	faultTwoCallers = "two-callers"

	campaignReaders = 4000
	// campaignCall is how long one call's body takes to be written at least: longer
	// than the gaps between the kills, so that each of the first calls is cut off.
	campaignCall = 6 * time.Second
	// campaignKills are made while the campaign is taken in and sent.
	campaignKills = 5
)

// campaigns is a campaign that nobody stops, to its last mail: two callers hand the
// same readers over at once, each in its own order and spelling, in calls that the
// mail service is killed under; some readers do not exist, some are taken later.
// Each has one row and at most one mail, and none is lost: what holds for tickets
// holds for marketing.
func campaigns() Scenario {
	s := Scenario{
		Name:       "campaigns",
		Title:      "two callers hand one campaign over while the mail service is killed",
		Proves:     []string{"AC3", "M6-01", "M6-16", "C-14"},
		Cells:      []Cell{cellResend()},
		Floors:     history.Floors{Confirmed: 500, Faults: 3},
		Invariants: append(everyMail(), "stop-is-honoured"),
		System:     fast(),
		Load:       Load{Baseline: 20, Bookings: 520, PerSecond: 25},
		// A reader who does not exist must meet the server that says so.
		FaultsUntilSettled: true,
		FaultNames:         []string{"refusals", "kill-at-random", faultTwoCallers},
		Quiesce:            2 * time.Minute,
		Expect:             55 * time.Second,
		Judge:              judgeCampaigns,
	}
	// A campaign's backlog lasts for longer than a ticket's.
	s.System.SweepGrace = time.Minute
	s.System.ServiceTime = 10 * time.Millisecond
	// A letter that was published by a worker that died before it could say so is
	// there twice until the service compares letters and rows.
	s.System.LettersEvery = time.Second
	s.Faults = func(b *Bench) []faults.Fault {
		refusals := &faults.Refusals{Server: b.Parts.Mail}
		for _, f := range readerFates() {
			if f.code != 0 {
				refusals.All = append(refusals.All, faults.Refusal{Name: f.name, Rule: f.rule()})
			}
		}
		kills := faults.NewKillAtRandom(b.Process("notifyd-1"), drawGaps(b.Rand("kills"), campaignKills, 2*time.Second, 5*time.Second), new(sync.Mutex))
		return []faults.Fault{refusals, kills, newTwoCallers(b)}
	}
	return s
}

// readerFates are what readers of the campaign meet, by the beginning of their
// addresses, as fates are of tickets.
func readerFates() []fate {
	return []fate{
		{name: "gone", share: 2, stage: smtp.StageRcpt, code: 550, enhanced: "5.1.1"},
		{name: "later", share: 3, stage: smtp.StageRcpt, code: 451, enhanced: "4.7.1", times: 1},
		{name: "reader", share: 35},
	}
}

// twoCallers are the callers, as a fault: it is over when both were acknowledged.
type twoCallers struct {
	bench   *Bench
	callers []*marketing
	done    chan struct{}
	stop    context.CancelFunc

	mu  sync.Mutex
	got []target.CampaignResult
	err error
}

var _ faults.Campaign = (*twoCallers)(nil)

func newTwoCallers(b *Bench) *twoCallers {
	first := newMarketing(b, "spring", "reader", 0)
	second := newMarketing(b, "spring", "reader", 0)
	c := &twoCallers{bench: b, callers: []*marketing{first, second}, done: make(chan struct{}), stop: func() {}}
	if first.target == nil {
		return c
	}
	var deal []string
	for _, f := range readerFates() {
		deal = append(deal, slices.Repeat([]string{f.name}, f.share)...)
	}
	for i := range campaignReaders {
		first.add(fmt.Sprintf("%s%05d@subscribers.test", deal[i%len(deal)], i+1))
	}
	for _, to := range slices.Backward(first.recipients) {
		second.add(strings.Replace(to, "@subscribers.test", "@SUBSCRIBERS.test", 1))
	}
	// Each list names its first hundred twice, in another spelling.
	for _, m := range c.callers {
		for _, to := range m.recipients[:100] {
			m.add(strings.Replace(to, "@subscribers.test", "@Subscribers.TEST", 1))
		}
	}
	for _, m := range c.callers {
		m.pace = campaignCall
	}
	return c
}

// add puts a reader on the list.
func (m *marketing) add(to string) {
	m.recipients = append(m.recipients, to)
	m.keys = append(m.keys, m.target.CampaignKey(m.id, to))
}

// paced yields the readers over m.pace, in a hundred steps.
func (m *marketing) paced(ctx context.Context) iter.Seq[string] {
	if m.pace == 0 {
		return slices.Values(m.recipients)
	}
	const steps = 100
	return func(yield func(string) bool) {
		for part := range slices.Chunk(m.recipients, max(len(m.recipients)/steps, 1)) {
			for _, to := range part {
				if !yield(to) {
					return
				}
			}
			if !pause(ctx, m.pace/steps) {
				return
			}
		}
	}
}

func (*twoCallers) Name() string            { return faultTwoCallers }
func (*twoCallers) Target() string          { return "campaign" }
func (c *twoCallers) Available() error      { return c.callers[0].available() }
func (c *twoCallers) Done() <-chan struct{} { return c.done }

func (c *twoCallers) Progress() (struck, of int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.got), len(c.callers)
}

// Inject sends both off.
func (c *twoCallers) Inject(ctx context.Context) error {
	ctx, c.stop = context.WithCancel(context.WithoutCancel(ctx))
	var both sync.WaitGroup
	for _, m := range c.callers {
		both.Go(func() {
			got, err := m.handOver(ctx, time.Time{})
			c.mu.Lock()
			defer c.mu.Unlock()
			if err != nil {
				c.err = errors.Join(c.err, err)
				return
			}
			c.got = append(c.got, got)
		})
	}
	go func() { both.Wait(); close(c.done) }()
	return nil
}

// Heal ends callers who are still at it.
func (c *twoCallers) Heal(context.Context) error {
	c.stop()
	return nil
}

// Witness wants both acknowledged, and mails of the campaign at the far side.
func (c *twoCallers) Witness(context.Context) (faults.Witness, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil || len(c.got) < len(c.callers) {
		return faults.Witness{}, cmp.Or(c.err, fmt.Errorf("%d of %d callers were acknowledged", len(c.got), len(c.callers)))
	}
	stored := 0
	for _, a := range c.bench.Parts.Mail.Ledger() {
		if a.Stored && strings.HasPrefix(a.Key, "campaign:") {
			stored++
		}
	}
	if stored == 0 {
		return faults.Witness{}, nil
	}
	return faults.Witness{Text: fmt.Sprintf("%d lines in two calls for %d readers, %d mails kept by the mail server",
		len(c.callers[0].recipients)+len(c.callers[1].recipients), campaignReaders, stored), Count: stored}, nil
}

const (
	everyReader = "every-reader-once"
	cutOff      = "calls-are-cut-off"
)

// judgeCampaigns judges from the evidence what became of each reader.
func judgeCampaigns(h *history.History, own *ownFindings) {
	e := verify.NewEvidence(h, verify.DefaultColumns())
	mails := 0
	for _, key := range e.Keys {
		mails += btoi(e.Mails[key].Campaign != "")
	}
	own.check(everyReader, "Each reader of the campaign, however often and in whatever spelling he is listed, has one row; he got the mail, or it is DEAD since the server knows no such person, or UNKNOWN since its worker was killed.", mails)
	if mails != campaignReaders {
		own.find(verify.Invalid, everyReader, "", fmt.Sprintf("%d readers were asked for, not %d", mails, campaignReaders))
	}
	ends := map[string]int{}
	for _, key := range e.Keys {
		if m := e.Mails[key]; m.Campaign != "" {
			ends[m.State()]++
			judgeReader(m, own)
		}
	}
	for _, state := range []string{"sent", "dead", "unknown"} {
		own.measure("readers "+state, float64(ends[state]), "", "")
	}
	judgeCutOff(h, own)
}

func judgeReader(m *verify.Mail, own *ownFindings) {
	breach := func(format string, args ...any) {
		own.find(verify.Fail, everyReader, m.Key, fmt.Sprintf(format, args...))
	}
	if len(m.Rows) != 1 {
		breach("it has %d rows", len(m.Rows))
		return
	}
	gone := strings.HasPrefix(strings.ToLower(recipientOf(m)), "gone")
	switch state := m.State(); {
	case gone && state == "sent", !gone && state == "dead":
		breach("its reader is %s, and its state is %s", recipientOf(m), state)
	case state != "sent" && state != "dead" && state != "unknown":
		breach("its state is %q, and nobody stopped the campaign", state)
	}
}

// judgeCutOff wants the mail service killed under a call: else nothing shows what
// such a call leaves.
func judgeCutOff(h *history.History, own *ownFindings) {
	calls, cut := 0, 0
	for i := range h.Ops {
		if o := &h.Ops[i]; o.Name == "campaign" {
			calls++
			cut += btoi(slices.ContainsFunc(h.Processes, func(p history.Process) bool {
				return p.Event == "killed" && p.At >= o.Call && p.At <= o.Return
			}))
		}
	}
	own.check(cutOff, "The mail service is killed while calls for the campaign are open.", calls)
	own.measure("calls for the campaign", float64(calls), "", fmt.Sprintf("%d of them cut off by a kill", cut))
	if cut == 0 {
		own.find(verify.Invalid, cutOff, "", fmt.Sprintf("none of %d calls was open when the mail service was killed", calls))
	}
}
