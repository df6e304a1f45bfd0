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
	webhooks    *prometheus.CounterVec
	reports     *prometheus.CounterVec
	throttles   *prometheus.CounterVec
	held        *prometheus.CounterVec
	amqp        *prometheus.CounterVec
	failures    *prometheus.CounterVec
	inFlight    *prometheus.GaugeVec
	connected   *prometheus.GaugeVec
	holdSeconds *prometheus.HistogramVec
	mailSeconds *prometheus.HistogramVec
	limits      *prometheus.GaugeVec
	sampled     map[string]*prometheus.GaugeVec
}

// tail are the buckets of what the lease is derived from, in seconds: fine
// where a send's deadline and a lease lie, and beyond both, since measured times
// exceed configured ones (OB-02). The p99.9 read from them is off by the width
// of one bucket at most.
var tail = []float64{
	.005, .01, .025, .05, .1, .25, .5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 7.5, 10, 12.5, 15, 17.5, 20, 22.5, 25, 27.5,
	30, 32.5, 35, 37.5, 40, 42.5, 45, 50, 60, 90, 120,
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
	s.webhooks = s.counter("webhooks_total", "requests of the mail provider by result: found, known, bounced, not-yet, ignored, refused, failed, conflict", "result")
	s.reports = s.counter("provider_reports_total", "mails that the provider took and then told more of, each once by event: bounced, complained, failed, suppressed", "lane", "event")
	s.reconciled = s.counter("reconciled_total", "looks at an UNKNOWN mail by result: found, absent, asked, open, moved-on, failed", "result")
	s.waits = s.counter("dependency_waits_total", "failed calls to a dependency that are repeated", "duty")
	s.sendSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: "notifyd", Name: "send_seconds", Help: "duration of one try", Buckets: tail,
	}, []string{"lane"})
	s.holdSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: "notifyd", Name: "hold_seconds",
		Help:    "from before a claim to after its settle: what the lease must cover; its p99.9 belongs well below notifyd_limit_seconds{limit=\"lease\"}",
		Buckets: tail,
	}, []string{"lane"})
	s.mailSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: "notifyd", Name: "mail_seconds", Help: "from the row of a mail to SENT",
		Buckets: []float64{.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 600, 1800, 3600, 21600, 86400},
	}, []string{"lane"})
	s.throttles = s.counter("throttles_total", "tries that the server put off without a refusal (429): they cost no attempt", "lane")
	s.held = s.counter("rate_limit_wait_seconds_total", "time that workers waited for the lane's own token bucket", "lane")
	s.amqp = s.counter("amqp_state_changes_total", "changes of a link's state: waiting, connected, lost, blocked, unblocked; connected beyond the first is a reconnect", "link", "state")
	s.failures = s.counter("sample_failures_total", "samples that could not be taken; their gauges are absent meanwhile", "source")
	s.lanePaused = s.gauge("lane_paused", "1 while the mail server refuses the whole lane", "lane")
	s.inFlight = s.gauge("sends_in_flight", "tries that are being made", "lane")
	s.connected = s.gauge("amqp_connected", "1 while a link has a session and is not blocked", "link")
	s.limits = s.gauge("limit_seconds", "configured limits: lease, send_deadline", "limit")
	s.sampled = map[string]*prometheus.GaugeVec{}
	for name, help := range map[string]string{
		MailsWaiting: "rows PENDING or FAILED", MailsDue: "waiting rows that are due now",
		OldestDue: "since when the longest waiting due row is due", MailsSending: "rows SENDING",
		LeasesOver: "rows SENDING past their lease", MailsUnknown: "rows UNKNOWN", OldestUnknown: "age of the oldest UNKNOWN row",
		MailsDead: "rows DEAD, discarded ones included", DeadUnstamped: "DEAD rows without a confirmed dead letter and alert",
	} {
		s.sampled[name] = s.gauge(name, help, "lane")
	}
	s.sampled[ParkedEvents] = s.gauge(ParkedEvents, "events in the table parked_events")
	s.sampled[QueueMessages] = s.gauge(QueueMessages, "messages that wait for a consumer; prefetched ones are not counted", "queue")
	s.sampled[QueueConsumers] = s.gauge(QueueConsumers, "consumers of a queue, of all processes", "queue")
	s.sampled[KafkaLag] = s.gauge(KafkaLag, "events that the bridge's group has not committed", "partition")
	s.Registry.MustRegister(s.sendSeconds, s.holdSeconds, s.mailSeconds,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return s
}

func (s *Set) counter(name, help string, labels ...string) *prometheus.CounterVec {
	c := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "notifyd", Name: name, Help: help}, labels)
	s.Registry.MustRegister(c)
	return c
}

// Start shows a lane's counters at zero, before anything happened: the first
// event of a counter that was not there is no increase to Prometheus.
func (s *Set) Start(lane string, tiers []string) {
	for _, t := range tiers {
		s.retries.WithLabelValues(t)
	}
	for _, redelivered := range []string{"false", "true"} {
		s.deliveries.WithLabelValues(lane, redelivered)
	}
	for _, answer := range []string{"won", "settled", "later"} {
		s.claims.WithLabelValues(lane, answer)
	}
	for _, outcome := range []string{"accepted", "transient", "permanent", "ambiguous", "lane-refused"} {
		s.sends.WithLabelValues(lane, outcome)
	}
	for _, result := range []string{"ok", "stale"} {
		s.acks.WithLabelValues(lane, result)
	}
	for _, cause := range []string{"dead", "unreadable"} {
		s.deadLetters.WithLabelValues(lane, cause)
	}
	s.revived.WithLabelValues(lane, "delivery_limit")
	for _, c := range []*prometheus.CounterVec{s.stops, s.throttles, s.held} {
		c.WithLabelValues(lane)
	}
	for _, h := range []*prometheus.HistogramVec{s.sendSeconds, s.holdSeconds, s.mailSeconds} {
		h.WithLabelValues(lane)
	}
	s.inFlight.WithLabelValues(lane)
	s.lanePaused.WithLabelValues(lane)
}

// StartWebhooks shows at zero what the provider's webhooks count.
func (s *Set) StartWebhooks(lanes, results, events []string) {
	for _, r := range results {
		s.webhooks.WithLabelValues(r)
	}
	for _, lane := range lanes {
		for _, e := range events {
			s.reports.WithLabelValues(lane, e)
		}
	}
}

// StartCounters shows the other counters at zero. The values are the labels that
// the parts use; one that is missing here appears with its first event.
func (s *Set) StartCounters(causes, kinds []string) {
	for _, c := range causes {
		s.rescues.WithLabelValues(c)
	}
	for _, k := range kinds {
		s.alerts.WithLabelValues(k)
	}
	for _, r := range []string{"inserted", "duplicate", "published", "stale", "parked", "cancelled"} {
		s.bridge.WithLabelValues(r)
	}
	for _, r := range []string{"found", "absent", "asked", "open", "moved-on", "failed"} {
		s.reconciled.WithLabelValues(r)
	}
	s.waits.WithLabelValues("claim")
	for _, source := range []string{"database", "rabbitmq", "kafka"} {
		s.failures.WithLabelValues(source)
	}
}

// The gauges that are sampled. Those of mails have the label lane.
const (
	MailsWaiting   = "mails_waiting"
	MailsDue       = "mails_due"
	OldestDue      = "oldest_due_seconds"
	MailsSending   = "mails_sending"
	LeasesOver     = "leases_over"
	MailsUnknown   = "mails_unknown"
	OldestUnknown  = "oldest_unknown_seconds"
	MailsDead      = "mails_dead"
	DeadUnstamped  = "dead_unstamped"
	ParkedEvents   = "parked_events"
	QueueMessages  = "queue_messages"
	QueueConsumers = "queue_consumers"
	KafkaLag       = "kafka_lag_events"
)

func (s *Set) gauge(name, help string, labels ...string) *prometheus.GaugeVec {
	g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: "notifyd", Name: name, Help: help}, labels)
	s.Registry.MustRegister(g)
	return g
}

// Sample sets a sampled gauge; labels are the values of its labels.
func (s *Set) Sample(name string, v float64, labels ...string) {
	s.sampled[name].WithLabelValues(labels...).Set(v)
}

// SampleFailed counts a sample that could not be taken and takes its gauges
// away: what is not known must not be shown as it once was.
func (s *Set) SampleFailed(source string, gauges ...string) {
	s.failures.WithLabelValues(source).Inc()
	for _, g := range gauges {
		s.sampled[g].Reset()
	}
}

// Limit shows a configured limit.
func (s *Set) Limit(limit string, seconds float64) { s.limits.WithLabelValues(limit).Set(seconds) }

// Begin counts a try that is being made until the returned func is called.
func (s *Set) Begin(lane string) (end func()) {
	g := s.inFlight.WithLabelValues(lane)
	g.Inc()
	return g.Dec
}

// Held observes for how many seconds a worker held a row.
func (s *Set) Held(lane string, seconds float64) {
	s.holdSeconds.WithLabelValues(lane).Observe(seconds)
}

// Sent observes the seconds between a mail's row and its SENT.
func (s *Set) Sent(lane string, seconds float64) {
	s.mailSeconds.WithLabelValues(lane).Observe(seconds)
}

// Throttled counts a try that the server put off.
func (s *Set) Throttled(lane string) { s.throttles.WithLabelValues(lane).Inc() }

// RateLimited adds the seconds that a worker waited for its lane's token bucket.
func (s *Set) RateLimited(lane string, seconds float64) { s.held.WithLabelValues(lane).Add(seconds) }

// StartLink shows a link's states at zero, and the link as not connected.
func (s *Set) StartLink(link string, states ...string) {
	for _, st := range states {
		s.amqp.WithLabelValues(link, st)
	}
	s.connected.WithLabelValues(link)
}

// AMQP notes a link's change of state.
func (s *Set) AMQP(link, state string) {
	s.amqp.WithLabelValues(link, state).Inc()
	up := 0.0
	if state == "connected" || state == "unblocked" {
		up = 1
	}
	s.connected.WithLabelValues(link).Set(up)
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

// Webhook counts a request of the mail provider.
func (s *Set) Webhook(result string) { s.webhooks.WithLabelValues(result).Inc() }

// ProviderReport counts a mail that came back, or that its recipient complained
// of.
func (s *Set) ProviderReport(lane, event string) { s.reports.WithLabelValues(lane, event).Inc() }

// Wait counts a failed call to a dependency.
func (s *Set) Wait(duty string) { s.waits.WithLabelValues(duty).Inc() }
