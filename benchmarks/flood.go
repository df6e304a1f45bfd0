package benchmarks

import (
	"context"
	"fmt"
	"slices"
	"time"

	"mailproof/fakes/smtp"
	"mailproof/history"
	"mailproof/target"
)

// campaignDomain is that of all recipients of marketing mails.
const campaignDomain = "@campaign.test"

// patientEnv gives a mail that is held at the server while a flood is queued time
// enough: it changes limits, no path.
func patientEnv() map[string]string {
	return map[string]string{"NOTIFYD_SEND_DEADLINE": "90s", "NOTIFYD_LEASE": "120s", "NOTIFYD_LEASE_MARGIN": "10s"}
}

// campaign calls for n marketing mails and returns when the system has taken
// them over.
func (s *system) campaign(ctx context.Context, n int) (time.Duration, error) {
	began := history.Now()
	result, outcome, err := s.CampaignWhy(ctx, target.CampaignRequest{ID: "flood", Recipients: func(yield func(string) bool) {
		for i := range n {
			if !yield(fmt.Sprintf("reader%06d%s", i, campaignDomain)) {
				return
			}
		}
	}})
	if err != nil {
		return 0, err
	}
	if outcome != history.OpOK || result.New != n {
		return 0, fmt.Errorf("a campaign of %d mails: outcome %s, %d new", n, outcome, result.New)
	}
	return time.Duration(history.Now() - began), nil
}

// holdMarketing makes the mail server keep every session of the marketing lane
// waiting, so that a whole campaign can be queued before the first of its mails
// goes. The returned function lets them go, from one moment on.
func (s *system) holdMarketing() (release func() int64, err error) {
	id, err := s.mail.AddRule(smtp.On(smtp.StageRcpt, smtp.HoldUntilReleased).To("*" + campaignDomain).Rule())
	if err != nil {
		return nil, err
	}
	return func() int64 {
		s.mail.RemoveRule(id)
		at := history.Now()
		s.mail.ReleaseAll()
		return at
	}, nil
}

// queueFlood queues n marketing mails behind a mail server that holds them. The
// returned function lets them go and says when.
func (s *system) queueFlood(ctx context.Context, n int) (release func() int64, err error) {
	release, err = s.holdMarketing()
	if err != nil {
		return nil, err
	}
	if _, err := s.campaign(ctx, n); err != nil {
		release()
		return nil, err
	}
	return release, nil
}

// queueOverTime is how many of n mails wait, from a moment on, at most points
// many points.
func queueOverTime(n int, delivered []int64, from, to int64, points int) []QueuePoint {
	sorted := slices.Sorted(slices.Values(delivered))
	out := make([]QueuePoint, 0, points+1)
	for i := range points + 1 {
		at := from + (to-from)*int64(i)/int64(points)
		gone, _ := slices.BinarySearch(sorted, at+1)
		out = append(out, QueuePoint{AtMicros: (at - from) / 1000, Waiting: n - gone})
	}
	return out
}

// perSecond is the rate of those delivered between two moments.
func perSecond(delivered []int64, from, to int64) float64 {
	n := 0
	for _, at := range delivered {
		if at > from && at <= to {
			n++
		}
	}
	if to <= from {
		return 0
	}
	return float64(n) / time.Duration(to-from).Seconds()
}
