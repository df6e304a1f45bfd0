package scenarios

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/history"
	"mailproof/loadgen"
	"mailproof/verify"
)

// floodRun is a run of t6.6 in evidence: tickets alone, a campaign, tickets
// beside it, the stop.
type floodRun struct {
	idle, flooded time.Duration // of each ticket, to SENT
	idleN         int           // 0: as many as there must be
	lost          int           // tickets of the flood that are never sent
	handOver      time.Duration
	beside        int   // mails of the campaign that are sent beside the tickets; 0: as the bucket allows, -1: none
	took          int   // mails that the system says it took; 0: all
	repeated      bool  // the first call's answer was lost
	drained       bool  // every marketing mail is claimed before the stop
	depths        []int // readings, evenly over the flood; nil: some
}

const floodWall = int64(2_000_000_000) // seconds since 1970 at monotonic 0

func (f floodRun) history() *history.History {
	b := floodBuilder{}
	b.add(history.Record{T: 1, Kind: history.KindMeta, Meta: &history.Meta{
		Scenario: "t6.6", Policy: "resend", Server: "plain", Wall: time.Unix(floodWall, 1), Lease: 8 * time.Second, MaxAttempts: 4,
	}})
	b.phase(time.Second, "baseline")
	n := f.idleN
	if n == 0 {
		n = floodSamples
	}
	for i := range n {
		b.ticket(fmt.Sprintf("idle%d", i), 2*time.Second, f.idle)
	}
	b.phase(9*time.Second, "faults")
	asked := 10 * time.Second
	if f.repeated {
		b.op(asked-time.Second, time.Millisecond, &history.Op{Name: "campaign", Key: "campaign:flood", Campaign: &history.Campaign{ID: "flood", Keys: []string{"campaign:flood:0"}, Recipients: []string{"r0@x.test"}}})
		b.records[len(b.records)-1].Op.Outcome = history.OpUnknown
	}
	begun, stop := asked+f.handOver, asked+f.handOver+30*time.Second
	sent := f.beside
	if sent == 0 {
		sent = int(marketingRate * (stop - begun).Seconds())
	}
	b.campaign(asked, f.handOver, f.took, max(sent, 0))
	if f.repeated {
		c := b.records[len(b.records)-1].Op.Campaign
		c.New, c.Known = 20_000, c.New-20_000
	}
	for i := range max(sent, 0) {
		b.attempt(fmt.Sprintf("campaign:flood:%d", 3+i), begun+time.Duration(i+1)*(stop-begun)/time.Duration(sent+1), time.Millisecond)
	}
	for i := range floodSamples {
		took := f.flooded
		if i < f.lost {
			took = loadgen.Never
		}
		b.ticket(fmt.Sprintf("flood%d", i), begun+time.Second, took)
	}
	leaves := stop + time.Second
	if f.drained {
		leaves = stop - 2*time.Second
	}
	for i := range 3 {
		b.mail(fmt.Sprintf("campaign:flood:%d", i), asked+time.Second, leaves)
	}
	depths := f.depths
	if depths == nil {
		depths = slices.Repeat([]int{40_000}, 30)
	}
	for i, ready := range depths {
		b.add(history.Record{T: int64(begun) + int64(i+1)*int64(stop-begun)/int64(len(depths)+1), Kind: history.KindDepth, Depth: &history.Depth{Queue: "q.notify.marketing", Ready: ready}})
	}
	b.op(stop, time.Millisecond, &history.Op{Name: "stop", Key: "campaign:flood", Campaign: &history.Campaign{ID: "flood"}})
	b.add(history.Record{T: int64(stop + time.Minute), Kind: history.KindFinal, Final: &history.Final{Wall: time.Unix(floodWall, int64(stop+time.Minute))}})
	return history.FromRecords(b.records)
}

type floodBuilder struct {
	records []history.Record
	order   int64
}

func (b *floodBuilder) add(r history.Record) { b.records = append(b.records, r) }

func (b *floodBuilder) phase(at time.Duration, name string) {
	b.add(history.Record{T: int64(at), Kind: history.KindPhase, Phase: &history.Phase{Name: name}})
}

func (b *floodBuilder) op(at, took time.Duration, o *history.Op) {
	o.Intended, o.Call, o.Return, o.Outcome = int64(at), int64(at), int64(at+took), history.OpOK
	b.add(history.Record{T: o.Return, Kind: history.KindOp, Op: o})
}

func (b *floodBuilder) change(key, status string, at time.Duration) {
	b.order++
	op := "UPDATE"
	if status == "PENDING" {
		op = "INSERT"
	}
	b.add(history.Record{T: int64(at), Kind: history.KindChange, Change: &history.Change{
		Database: "notify", Table: "public.notifications", Op: op, Order: b.order, CommitAt: time.Unix(floodWall, int64(at)),
		New: map[string]string{"id": key, "dedupe_key": key, "status": status},
	}})
}

func (b *floodBuilder) ticket(id string, at, took time.Duration) {
	key := "ticket:" + id
	b.op(at, time.Millisecond, &history.Op{Name: "confirm", Booking: id, Key: key, Recipient: id + "@x.test"})
	b.change(key, "PENDING", at)
	if took == loadgen.Never {
		return
	}
	b.change(key, "SENT", at+took)
	b.attempt(key, at, took)
}

func (b *floodBuilder) attempt(key string, at, took time.Duration) {
	b.add(history.Record{T: int64(at + took), Kind: history.KindAttempt, Attempt: &history.Attempt{
		Key: key, Transport: "smtp", From: int64(at), DotAt: int64(at), To: int64(at + took/2), Stored: true, ReplyWritten: true, Reply: "250 ok",
	}})
}

func (b *floodBuilder) mail(key string, from, leaves time.Duration) {
	b.change(key, "PENDING", from)
	b.change(key, "CANCELLED", leaves)
}

func (b *floodBuilder) campaign(at, took time.Duration, accepted, sent int) {
	c := &history.Campaign{ID: "flood", New: floodMails}
	if accepted > 0 {
		c.New = accepted
	}
	for i := range 3 + sent {
		c.Keys = append(c.Keys, fmt.Sprintf("campaign:flood:%d", i))
		c.Recipients = append(c.Recipients, fmt.Sprintf("r%d@x.test", i))
	}
	b.op(at, took, &history.Op{Name: "campaign", Key: "campaign:flood", Campaign: c})
}

func TestFloodIsJudgedByTicketsAndByItsBeingThere(t *testing.T) {
	t.Parallel()
	good := floodRun{idle: 80 * time.Millisecond, flooded: 120 * time.Millisecond, handOver: 6 * time.Second}
	for _, c := range []struct {
		name    string
		change  func(f *floodRun)
		verdict verify.Verdict
		says    string
	}{
		{"as it must be", func(*floodRun) {}, verify.Pass, ""},
		{"tickets behind marketing", func(f *floodRun) { f.flooded = 6 * time.Second }, verify.Fail, "ticket-latency: the p95 of 100 tickets is 6s beside the flood, and was 80"},
		{"every tenth ticket never sent", func(f *floodRun) { f.lost = 10 }, verify.Fail, "ticket-latency: the p95 of 100 tickets is ∞"},
		{"a machine that cannot tell", func(f *floodRun) { f.idle, f.flooded = 5*time.Second, 7*time.Second }, verify.Invalid, "ticket-latency: the p95 is 5s with tickets alone"},
		{"too few tickets", func(f *floodRun) { f.idleN = 99 }, verify.Invalid, "ticket-latency: 99 tickets alone"},
		{"hand-over too slow", func(f *floodRun) { f.handOver = 61 * time.Second }, verify.Invalid, "flood-is-accepted: the hand-over took 1m1s"},
		{"taken by the second call", func(f *floodRun) { f.repeated = true }, verify.Pass, ""},
		{"two calls, too slow together", func(f *floodRun) { f.repeated, f.handOver = true, 59500*time.Millisecond }, verify.Invalid, "flood-is-accepted: the hand-over took 1m0.5s"},
		{"mails left out", func(f *floodRun) { f.took = 49_999 }, verify.Fail, "flood-is-accepted: 50000 mails were handed over, and the system says that it took 49999"},
		{"queue ran empty", func(f *floodRun) { f.depths = append(slices.Repeat([]int{40_000}, 20), 0, 40_000) }, verify.Invalid, "flood-is-there: the marketing queue held 0 messages"},
		{"a flood of one", func(f *floodRun) { f.depths = slices.Repeat([]int{1}, 30) }, verify.Invalid, "flood-is-there: the marketing queue held 1 messages while tickets were measured, the floor is 35000"},
		{"a lane that stands still", func(f *floodRun) { f.beside = -1 }, verify.Invalid, "flood-flows: 0.0 marketing mails a second"},
		{"a lane that sends one mail in two seconds", func(f *floodRun) { f.beside = 15 }, verify.Invalid, "flood-flows: 0.5 marketing mails a second"},
		{"a lane without a bucket", func(f *floodRun) { f.beside = 15_000 }, verify.Fail, "flood-flows: 500 marketing mails a second were sent, the bucket allows 100"},
		{"queue not read", func(f *floodRun) { f.depths = []int{} }, verify.Invalid, "flood-is-there: the marketing queue was not read for 30s"},
		{"queue read too rarely", func(f *floodRun) { f.depths = []int{40_000, 40_000, 40_000} }, verify.Invalid, "flood-is-there: the marketing queue was not read for 7.5s"},
		{"every mail claimed before", func(f *floodRun) { f.drained = true }, verify.Invalid, "flood-is-there: every marketing mail had been claimed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := good
			c.change(&f)
			h := f.history()
			require.Empty(t, h.Problems)
			own := ownFindings{samples: samplesOf(verify.NewEvidence(h, verify.DefaultColumns()))}
			judgeFlood(h, &own)
			got := verify.Pass
			for _, finding := range own.Findings {
				got = verify.Worse(got, finding.Verdict)
				require.Contains(t, finding.Invariant+": "+finding.Text, c.says)
			}
			require.Equal(t, c.verdict, got, "%v", own.Findings)
			require.Len(t, own.checked, 4)
			if c.says == "" {
				require.Empty(t, own.Findings)
			}
		})
	}
}

// Without its campaign the run has no flood, whatever the tickets did.
func TestNoCampaignIsNoFlood(t *testing.T) {
	t.Parallel()
	var own ownFindings
	judgeFlood(history.FromRecords([]history.Record{{T: 1, Kind: history.KindPhase, Phase: &history.Phase{Name: "baseline"}}}), &own)
	require.Len(t, own.Findings, 1)
	require.Equal(t, verify.Invalid, own.Findings[0].Verdict)
}

func TestSamplesAreTakenFromTheEvidence(t *testing.T) {
	t.Parallel()
	h := floodRun{idle: 80 * time.Millisecond, flooded: 120 * time.Millisecond, lost: 1, handOver: time.Second, beside: -1}.history()
	byKey := map[string]loadgen.Sample{}
	for _, s := range samplesOf(verify.NewEvidence(h, verify.DefaultColumns())) {
		byKey[s.Key] = s
	}
	require.Len(t, byKey, 200, "a campaign mail that was stopped is nobody's latency")
	one := byKey["ticket:idle0"]
	require.Equal(t, "ticket", one.Kind)
	require.Equal(t, 40*time.Millisecond, one.Since(one.Accepted))
	require.InDelta(t, 80*time.Millisecond, one.Since(one.Sent), float64(time.Millisecond))
	require.Equal(t, loadgen.Never, byKey["ticket:flood0"].Since(byKey["ticket:flood0"].Sent))
}
