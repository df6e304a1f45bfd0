package scenarios

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"mailproof/history"
	"mailproof/target"
)

// campaigner is a target that takes campaigns; the pipeline is one.
type campaigner interface {
	CampaignWhy(ctx context.Context, c target.CampaignRequest) (target.CampaignResult, history.OpOutcome, error)
	StopCampaign(ctx context.Context, id string) history.OpOutcome
	CampaignState(ctx context.Context, id string) (target.CampaignCounts, error)
	CampaignKey(id, recipient string) string
	Depths() *target.Depths
	MarketingQueue() string
}

const (
	// handOverTimeout bounds one call for a whole campaign.
	handOverTimeout = time.Minute
	// depthEvery is how often the broker is asked for the depth of its queues.
	depthEvery = 500 * time.Millisecond
)

// marketing is one campaign's client: it hands the mails over, stops the
// campaign, and reads meanwhile how many messages wait.
type marketing struct {
	bench      *Bench
	target     campaigner // nil: the target takes none
	id         string
	recipients []string
	keys       []string
	pace       time.Duration // that a call takes at least; 0: as fast as it goes

	stopReading context.CancelFunc
	reading     sync.WaitGroup
}

// newMarketing draws a campaign of n recipients. prefix is the beginning of their
// addresses.
func newMarketing(b *Bench, id, prefix string, n int) *marketing {
	m := &marketing{bench: b, id: id, stopReading: func() {}}
	m.target, _ = b.Target.(campaigner)
	if m.target == nil {
		return m
	}
	m.recipients, m.keys = make([]string, n), make([]string, n)
	for i := range n {
		m.recipients[i] = fmt.Sprintf("%s%06d@subscribers.test", prefix, i+1)
		m.keys[i] = m.target.CampaignKey(id, m.recipients[i])
	}
	return m
}

func (m *marketing) available() error {
	if m.target == nil {
		return errors.New("the target takes no campaigns")
	}
	return nil
}

// handOver asks for all mails in one call, until it is acknowledged. A call of
// unknown outcome is repeated with the same recipients.
func (m *marketing) handOver(ctx context.Context, expires time.Time) (target.CampaignResult, error) {
	var why error
	for range maxTries {
		var result target.CampaignResult
		outcome := m.op(ctx, "campaign", &history.Campaign{ID: m.id, Recipients: m.recipients, Keys: m.keys, ExpiresAt: expires}, func(ctx context.Context, c *history.Campaign) history.OpOutcome {
			var outcome history.OpOutcome
			result, outcome, why = m.target.CampaignWhy(ctx, target.CampaignRequest{
				ID: m.id, ExpiresAt: expires, Recipients: m.paced(ctx),
			})
			c.New, c.Known = result.New, result.Known
			return outcome
		})
		if outcome == history.OpOK {
			return result, nil
		}
		if !pause(ctx, tryAgain) {
			return result, ctx.Err()
		}
	}
	return target.CampaignResult{}, fmt.Errorf("campaign %s was not acknowledged in %d calls: %w", m.id, maxTries, why)
}

// stop sets the campaign's flag, until that is acknowledged.
func (m *marketing) stop(ctx context.Context) error {
	for range maxTries {
		outcome := m.op(ctx, "stop", &history.Campaign{ID: m.id}, func(ctx context.Context, _ *history.Campaign) history.OpOutcome {
			return m.target.StopCampaign(ctx, m.id)
		})
		if outcome == history.OpOK {
			return nil
		}
		if !pause(ctx, tryAgain) {
			return ctx.Err()
		}
	}
	return fmt.Errorf("the stop of campaign %s was not acknowledged in %d calls", m.id, maxTries)
}

func (m *marketing) op(ctx context.Context, name string, c *history.Campaign, do func(context.Context, *history.Campaign) history.OpOutcome) history.OpOutcome {
	ctx, cancel := context.WithTimeout(ctx, handOverTimeout)
	defer cancel()
	call := history.Now()
	outcome := do(ctx, c)
	returned := history.Now()
	m.bench.Record(history.Record{T: returned, Kind: history.KindOp, Op: &history.Op{
		Name: name, Key: "campaign:" + m.id, Intended: call, Call: call, Return: returned, Outcome: outcome, Campaign: c,
	}})
	return outcome
}

// delivered counts the campaign's mails that the far side has kept.
func (m *marketing) delivered() (n int) {
	ours := make(map[string]bool, len(m.keys))
	for _, key := range m.keys {
		ours[key] = true
	}
	for _, a := range m.bench.Parts.Mail.Ledger() {
		if a.Stored && ours[a.Key] {
			n++
		}
	}
	return n
}

// readDepths records how many messages wait in the queues, until doneReading. A
// broker that does not answer leaves a gap.
func (m *marketing) readDepths(ctx context.Context) {
	ctx, m.stopReading = context.WithCancel(context.WithoutCancel(ctx))
	m.reading.Go(func() {
		gauge := m.target.Depths()
		defer gauge.Close()
		for pause(ctx, depthEvery) {
			depths, err := gauge.Read(ctx)
			if err != nil {
				continue
			}
			t := history.Now()
			for queue, ready := range depths {
				m.bench.Record(history.Record{T: t, Kind: history.KindDepth, Depth: &history.Depth{Queue: queue, Ready: ready}})
			}
		}
	})
}

func (m *marketing) doneReading() {
	m.stopReading()
	m.reading.Wait()
}
