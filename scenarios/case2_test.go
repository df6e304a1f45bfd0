package scenarios

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/history"
	"mailproof/verify"
)

// outageRun is the golden good history of case-2: RabbitMQ is away from second 10
// to 20. 250 tickets were confirmed meanwhile and are delivered within five seconds
// of the return, 250 marketing mails that were there before within fifty; a second
// campaign's time was over at second 18.
type outageRun struct {
	tickets, marketing, stale []history.Attempt
	staleState                string
	staleEnds                 int64
	throttled                 bool
	faults                    []history.Fault
}

func goodOutage() *outageRun {
	r := &outageRun{staleState: "expired", staleEnds: 18 * sec, throttled: true, faults: []history.Fault{{
		Name: faultMajority, Target: "RabbitMQ", Start: 10 * sec, End: 20 * sec, Outcome: history.Installed, Witness: "seen", Count: 2,
	}}}
	for i := range int64(250) {
		r.tickets = append(r.tickets, storedAt(fmt.Sprintf("ticket:b%d", i), 20*sec+i*sec/50))
		r.marketing = append(r.marketing, storedAt(fmt.Sprintf("campaign:spring:%d", i), 20*sec+i*sec/5))
	}
	return r
}

func storedAt(key string, at int64) history.Attempt {
	return history.Attempt{Transport: "resend", Key: key, From: at, DotAt: at, To: at, Stored: true, ReplyWritten: true, Reply: "200"}
}

// history tells it as a run would have left it.
func (r *outageRun) history() *history.History {
	wall := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	at := func(t int64) time.Time { return wall.Add(time.Duration(t - sec)) }
	records := []history.Record{{T: sec, Kind: history.KindMeta, Meta: &history.Meta{Scenario: "case-2", Policy: "same-key", Server: "deduplicating", Wall: wall}}}
	final := &history.Final{Counters: map[string]float64{}}
	op := func(o history.Op) {
		records = append(records, history.Record{T: o.Return, Kind: history.KindOp, Op: &o})
	}
	process := func(t int64, event string) {
		records = append(records, history.Record{T: t, Kind: history.KindProcess, Process: &history.Process{Name: "notifyd-1", Event: event, Wall: at(t)}})
	}
	for i, event := range []string{"started", "ready", "unready", "ready"} {
		process([]int64{sec, 2 * sec, 11 * sec, 20 * sec}[i], event)
	}
	for i, a := range r.tickets {
		t := 10*sec + int64(i+1)*9*sec/int64(len(r.tickets))
		op(history.Op{Name: "confirm", Booking: a.Key[7:], Key: a.Key, Recipient: a.Key + "@x.test", Intended: t, Call: t, Return: t + 1, Outcome: history.OpOK})
	}
	campaign := func(id string, t, until int64, ends time.Time, keys []string) {
		c := &history.Campaign{ID: id, ExpiresAt: ends, Keys: keys}
		for _, k := range keys {
			c.Recipients = append(c.Recipients, k+"@x.test")
		}
		op(history.Op{Name: "campaign", Key: "campaign:" + id, Intended: t, Call: t, Return: until, Outcome: history.OpOK, Campaign: c})
	}
	var lasting, stale []string
	for _, a := range r.marketing {
		lasting = append(lasting, a.Key)
	}
	for i := range 3 {
		stale = append(stale, fmt.Sprintf("campaign:tonight:%d", i))
		final.Rows = append(final.Rows, history.MailState{Key: stale[i], State: r.staleState})
	}
	campaign(lastingCampaign, 8*sec, 9*sec, time.Time{}, lasting)
	campaign(staleCampaign, 12*sec, 21*sec, at(r.staleEnds), stale)
	all := append(append([]history.Attempt{storedAt("campaign:spring:0", 9*sec+1)}, r.tickets...), append(r.marketing[1:], r.stale...)...)
	if r.throttled {
		refused := storedAt(r.tickets[0].Key, 20*sec+1)
		refused.Stored, refused.Reply, refused.RetryAfter = false, "429 rate_limit_exceeded", 3*time.Second
		all = append(all, refused)
	}
	for _, a := range all {
		records = append(records, history.Record{T: a.To, Kind: history.KindAttempt, Attempt: &a})
	}
	for _, f := range r.faults {
		records = append(records, history.Record{T: f.End, Kind: history.KindFault, Fault: &f})
	}
	return history.FromRecords(append(records, history.Record{T: 90 * sec, Kind: history.KindFinal, Final: final}))
}

func TestBrokerOutageIsJudged(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		edit    func(r *outageRun)
		verdict verify.Verdict
		found   string // invariant
		text    string
	}{
		"good": {edit: func(*outageRun) {}},
		"half of the marketing came first": {
			edit: func(r *outageRun) { r.tickets[249] = storedAt(r.tickets[249].Key, 46*sec) }, verdict: verify.Fail,
			found: "urgent-first", text: "129 of 249 marketing mails of the backlog were delivered before the last of 250 tickets, 12 before the middle one",
		},
		"one queue, in the order of arrival": {
			edit: func(r *outageRun) {
				for i := range r.tickets {
					r.tickets[i] = storedAt(r.tickets[i].Key, 71*sec+int64(i))
				}
			}, verdict: verify.Fail, found: "urgent-first", text: "249 of 249",
		},
		"a slow machine is in order too": {
			edit: func(r *outageRun) {
				for i := range r.tickets {
					slow := func(a history.Attempt) history.Attempt { return storedAt(a.Key, 20*sec+2*(a.DotAt-20*sec)) }
					r.tickets[i], r.marketing[i] = slow(r.tickets[i]), slow(r.marketing[i])
				}
			},
		},
		"too few tickets waited": {
			edit: func(r *outageRun) { r.tickets = r.tickets[:150] }, verdict: verify.Invalid,
			found: "backlog-is-there", text: "150 tickets and 249 marketing mails waited",
		},
		"too little marketing waited": {
			edit: func(r *outageRun) { r.marketing = r.marketing[:150] }, verdict: verify.Invalid,
			found: "backlog-is-there", text: "250 tickets and 149 marketing mails waited",
		},
		"nothing was throttled": {
			edit: func(r *outageRun) { r.throttled = false }, verdict: verify.Invalid, found: "backlog-is-there", text: "no try of a ticket was answered 429",
		},
		"stale marketing was sent": {
			edit:    func(r *outageRun) { r.stale = []history.Attempt{storedAt("campaign:tonight:1", 30*sec)} },
			verdict: verify.Fail, found: "stale-is-laid-aside", text: "it was delivered",
		},
		"stale marketing waits on": {
			edit: func(r *outageRun) { r.staleState = "pending" }, verdict: verify.Fail, found: "stale-is-laid-aside", text: `its state is "pending"`,
		},
		"the outage was too short": {
			edit: func(r *outageRun) { r.staleEnds = 25 * sec }, verdict: verify.Invalid, found: "stale-is-laid-aside", text: "before the campaign's time was over",
		},
		"no outage: assurance finds that": {edit: func(r *outageRun) { r.faults[0].Witness = "" }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := goodOutage()
			c.edit(r)
			h := r.history()
			require.Empty(t, h.Problems)
			var own ownFindings
			judgeBrokerOutage(h, &own)
			if c.verdict == "" {
				require.Empty(t, own.Findings)
				return
			}
			require.NotEmpty(t, own.Findings)
			require.Equal(t, c.found, own.Findings[0].Invariant)
			require.Equal(t, c.verdict, own.Findings[0].Verdict)
			require.Contains(t, own.Findings[0].Text, c.text)
		})
	}
}

// The backlog drains from the first delivery after the outage's silence, whenever
// the cluster is known to be whole again.
func TestTheBacklogDrainsFromTheEndOfTheSilence(t *testing.T) {
	t.Parallel()
	outage := history.Fault{Start: 10, End: 20}
	for name, c := range map[string]struct {
		delivered []int64
		want      int64
	}{
		"what was on its way still arrives":  {[]int64{8, 11, 12, 17, 18, 22}, 17},
		"nothing before it was whole":        {[]int64{8, 25, 40}, 25},
		"a silence that begins in it counts": {[]int64{8, 16, 19, 50, 90}, 50},
		"a silence that began later is none": {[]int64{8, 16, 21, 90}, 16},
		"nothing came any more":              {[]int64{8, 9}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, c.want, resumedAt(c.delivered, outage))
		})
	}
}
