// Package metrics holds the counters that notifyd shows at /metrics.
//
// It guarantees that each name and label stands in one place. It must not
// import any other package of the system.
package metrics

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// Set is every metric of one notifyd.
type Set struct {
	Registry *prometheus.Registry

	deliveries  *prometheus.CounterVec
	sends       *prometheus.CounterVec
	sendSeconds *prometheus.HistogramVec
	retries     *prometheus.CounterVec
	acks        *prometheus.CounterVec
	claims      *prometheus.CounterVec
	deadLetters *prometheus.CounterVec
	revived     *prometheus.CounterVec
	stops       *prometheus.CounterVec
	lanePaused  *prometheus.GaugeVec
	bridge      *prometheus.CounterVec
	campaigns   *prometheus.CounterVec
	rescues     *prometheus.CounterVec
	alerts      *prometheus.CounterVec
	waits       *prometheus.CounterVec
	reconciled  *prometheus.CounterVec
}

// New makes the metrics with a registry of their own, the process's and Go's
// included.
func New() *Set {
	s := &Set{Registry: prometheus.NewRegistry()}
	s.deliveries = s.counter("deliveries_total", "messages handed to a worker", "lane", "redelivered")
	s.claims = s.counter("claims_total", "claims by answer: won, settled, later", "lane", "answer")
	s.sends = s.counter("sends_total", "tries by outcome", "lane", "outcome")
	s.retries = s.counter("retry_publishes_total", "confirmed publishes to a delay tier", "tier")
	s.deadLetters = s.counter("dead_letters_total", "confirmed publishes to the dead-letter queue", "lane", "cause")
	s.revived = s.counter("dead_letters_revived_total", "dead letters whose mail was alive and was rung for again, by why they were there", "lane", "cause")
	s.acks = s.counter("acks_total", "acks by whether the session of the delivery was still there", "lane", "result")
	s.stops = s.counter("refused_settles_total", "settles that found the row held by somebody else", "lane")
	s.bridge = s.counter("bridge_events_total", "events read from Kafka by what became of them", "result")
	s.campaigns = s.counter("campaign_mails_total", "mails that campaigns asked for: new, known", "result")
	s.rescues = s.counter("sweeper_rescues_total", "rows that only the sweeper moved, by cause; each should be explained by a fault", "cause")
	s.alerts = s.counter("alerts_total", "alerts raised for the first time", "kind")
	s.reconciled = s.counter("reconciled_total", "looks at an UNKNOWN mail by result: found, absent, asked, open, moved-on, failed", "result")
	s.waits = s.counter("dependency_waits_total", "failed calls to a dependency that are repeated", "duty")
	s.sendSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: "notifyd", Name: "send_seconds", Help: "duration of one try",
		Buckets: []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30},
	}, []string{"lane"})
	s.lanePaused = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Namespace: "notifyd", Name: "lane_paused", Help: "1 while the mail server refuses the whole lane",
	}, []string{"lane"})
	s.Registry.MustRegister(s.sendSeconds, s.lanePaused,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return s
}

func (s *Set) counter(name, help string, labels ...string) *prometheus.CounterVec {
	c := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "notifyd", Name: name, Help: help}, labels)
	s.Registry.MustRegister(c)
	return c
}

// Delivery counts a message handed to a worker.
func (s *Set) Delivery(lane string, redelivered bool) {
	s.deliveries.WithLabelValues(lane, strconv.FormatBool(redelivered)).Inc()
}

// Claim counts the answer of the row.
func (s *Set) Claim(lane, answer string) { s.claims.WithLabelValues(lane, answer).Inc() }

// Send counts a try and its duration in seconds.
func (s *Set) Send(lane, outcome string, seconds float64) {
	s.sends.WithLabelValues(lane, outcome).Inc()
	s.sendSeconds.WithLabelValues(lane).Observe(seconds)
}

// RetryPublish counts a confirmed publish to a delay tier.
func (s *Set) RetryPublish(tier string) { s.retries.WithLabelValues(tier).Inc() }

// DeadLetter counts a confirmed publish to the dead-letter queue.
func (s *Set) DeadLetter(lane, cause string) { s.deadLetters.WithLabelValues(lane, cause).Inc() }

// LetterRevived counts a dead letter whose mail was alive.
func (s *Set) LetterRevived(lane, cause string) { s.revived.WithLabelValues(lane, cause).Inc() }

// Ack counts an ack; stale means that the session had ended.
func (s *Set) Ack(lane string, stale bool) {
	result := "ok"
	if stale {
		result = "stale"
	}
	s.acks.WithLabelValues(lane, result).Inc()
}

// RefusedSettle counts a settle that was not applied.
func (s *Set) RefusedSettle(lane string) { s.stops.WithLabelValues(lane).Inc() }

// LanePaused shows whether a lane is paused.
func (s *Set) LanePaused(lane string, paused bool) {
	v := 0.0
	if paused {
		v = 1
	}
	s.lanePaused.WithLabelValues(lane).Set(v)
}

// Bridge counts n events.
func (s *Set) Bridge(result string, n int) {
	if n > 0 {
		s.bridge.WithLabelValues(result).Add(float64(n))
	}
}

// Campaign counts n mails that a campaign asked for.
func (s *Set) Campaign(result string, n int) {
	if n > 0 {
		s.campaigns.WithLabelValues(result).Add(float64(n))
	}
}

// Rescue counts n rows that the sweeper moved.
func (s *Set) Rescue(cause string, n int) {
	if n > 0 {
		s.rescues.WithLabelValues(cause).Add(float64(n))
	}
}

// Alert counts an alert.
func (s *Set) Alert(kind string) { s.alerts.WithLabelValues(kind).Inc() }

// Reconciled counts a look at an UNKNOWN mail.
func (s *Set) Reconciled(result string) { s.reconciled.WithLabelValues(result).Inc() }

// Wait counts a failed call to a dependency.
func (s *Set) Wait(duty string) { s.waits.WithLabelValues(duty).Inc() }
