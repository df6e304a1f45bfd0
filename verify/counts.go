package verify

import (
	"cmp"
	"math"
	"slices"

	"mailproof/history"
)

// Counts of mails, by what became of them: of those that bookings asked for, and
// apart from them of those that campaigns did.
type Counts struct {
	Confirmed  int `json:"confirmed"` // asked for, and acknowledged
	Delivered  int `json:"delivered"`
	Duplicates int `json:"duplicates"` // copies beyond the first
	Lost       int `json:"lost"`
	Unknown    int `json:"unknown"`
	Dead       int `json:"dead"`
	Cancelled  int `json:"cancelled"`
	Expired    int `json:"expired,omitempty"`

	Campaign *Counts `json:"campaign,omitempty"` // nil without a campaign
}

func countMails(e *Evidence) Counts {
	var c, campaign Counts
	e.mails(func(m *Mail) {
		if m.Campaign == "" {
			c.add(e, m)
			return
		}
		campaign.add(e, m)
		c.Campaign = &campaign
	})
	return c
}

func (c *Counts) add(e *Evidence, m *Mail) {
	if m.Confirmed() {
		c.Confirmed++
	}
	stored := 0
	for _, a := range m.Attempts {
		if a.Stored {
			stored++
		}
	}
	if stored > 0 {
		c.Delivered++
		c.Duplicates += stored - 1
	}
	if lost, _ := e.lost(m); lost {
		c.Lost++
	}
	switch m.State() {
	case unknown:
		c.Unknown++
	case dead:
		c.Dead++
	case cancelled:
		c.Cancelled++
	case expired:
		c.Expired++
	}
}

// Latency from the intended time of the confirmation to the first stored copy,
// in milliseconds, over all confirmed mails of bookings that were not cancelled.
// One that
// was not delivered counts as +Inf, written as -1, so that it cannot be left
// out of a percentile.
type Latency struct {
	N   int     `json:"n"`
	P50 float64 `json:"p50"`
	P95 float64 `json:"p95"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

func latency(e *Evidence) Latency {
	return LatencyBetween(e, math.MinInt64, math.MaxInt64)
}

// LatencyBetween is the latency of the mails whose confirmation was intended in
// [from, to), both on the run's time base.
func LatencyBetween(e *Evidence, from, to int64) Latency {
	var samples []float64
	e.mails(func(m *Mail) {
		o := m.request()
		if m.Campaign != "" || o == nil || o.Outcome != history.OpOK || o.Intended < from || o.Intended >= to {
			return
		}
		if !m.Delivered() && m.MayBeCancelled() {
			return
		}
		samples = append(samples, delay(m, o))
	})
	slices.SortFunc(samples, cmp.Compare[float64])
	return Latency{
		N: len(samples), P50: percentile(samples, 0.50), P95: percentile(samples, 0.95),
		P99: percentile(samples, 0.99), Max: percentile(samples, 1),
	}
}

func delay(m *Mail, o *history.Op) float64 {
	first := int64(math.MaxInt64)
	for _, a := range m.Attempts {
		if a.Stored {
			first = min(first, a.DotAt)
		}
	}
	if first == math.MaxInt64 {
		return math.Inf(1)
	}
	return float64(first-o.Intended) / 1e6
}

// percentile is the smallest sample that at least the share p of all samples
// does not exceed (nearest rank, no interpolation), -1 for +Inf, 0 without
// samples.
func percentile(sorted []float64, p float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	rank := max(int(math.Ceil(p*float64(len(sorted)))), 1)
	v := sorted[rank-1]
	if math.IsInf(v, 1) {
		return -1
	}
	return v
}
