package outbox

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
)

// counters of one relay.
type counters struct {
	published, failed, rejected, lost atomic.Int64
}

func (c *counters) note(err error) {
	switch {
	case err == nil:
		c.published.Add(1)
	case ownFault(err):
		c.rejected.Add(1)
	default:
		c.failed.Add(1)
	}
}

// Backlog is what the outbox still holds (A2-06).
type Backlog struct {
	Unpublished int64
	// OldestAge of the unpublished ones; 0 when there are none. Alert when it
	// passes one minute.
	OldestAge time.Duration
	// Dead events. Alert when it rises.
	Dead int64
}

const backlogSQL = `
SELECT u.n, coalesce((extract(epoch FROM clock_timestamp() - u.oldest) * 1000000)::bigint, 0), d.n
FROM (SELECT count(*) AS n, min(created_at) AS oldest FROM outbox WHERE published_at IS NULL AND dead_at IS NULL) u,
     (SELECT count(*) AS n FROM outbox WHERE dead_at IS NOT NULL) d`

// Querier is the part of a pool that reading needs.
type Querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// ReadBacklog counts what is left to publish.
func ReadBacklog(ctx context.Context, q Querier) (Backlog, error) {
	var b Backlog
	var micros int64
	err := q.QueryRow(ctx, backlogSQL).Scan(&b.Unpublished, &micros, &b.Dead)
	b.OldestAge = time.Duration(micros) * time.Microsecond
	return b, err
}

// collector reads the backlog at each scrape.
type collector struct {
	q     Querier
	relay *Relay // nil where none runs

	unpublished, oldest, dead, leading, records, lost *prometheus.Desc
}

// scrapeTimeout bounds the query of one scrape.
const scrapeTimeout = 2 * time.Second

// NewCollector exports the backlog of the database behind q and, when relay is
// not nil, what it did.
func NewCollector(q Querier, relay *Relay) prometheus.Collector {
	return &collector{
		q: q, relay: relay,
		unpublished: prometheus.NewDesc("outbox_unpublished", "Committed events that are not published.", nil, nil),
		oldest: prometheus.NewDesc("outbox_oldest_unpublished_seconds",
			"Age of the oldest unpublished event; alert above 60.", nil, nil),
		dead:    prometheus.NewDesc("outbox_dead", "Events given up after repeated refusals; alert when it rises.", nil, nil),
		leading: prometheus.NewDesc("outbox_relay_leading", "1 where this process's relay holds the lock.", nil, nil),
		records: prometheus.NewDesc("outbox_relay_records_total",
			"Records produced by this process's relay, by result.", []string{"result"}, nil),
		lost: prometheus.NewDesc("outbox_relay_sessions_lost_total",
			"Database sessions, and with them the lock, that this process's relay lost or could not open.", nil, nil),
	}
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.unpublished, c.oldest, c.dead, c.leading, c.records, c.lost} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. When the database does not answer
// the backlog is reported as an error of the scrape, not as zero.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	b, err := ReadBacklog(ctx, c.q)
	if err != nil {
		ch <- prometheus.NewInvalidMetric(c.unpublished, err)
	} else {
		ch <- prometheus.MustNewConstMetric(c.unpublished, prometheus.GaugeValue, float64(b.Unpublished))
		ch <- prometheus.MustNewConstMetric(c.oldest, prometheus.GaugeValue, b.OldestAge.Seconds())
		ch <- prometheus.MustNewConstMetric(c.dead, prometheus.GaugeValue, float64(b.Dead))
	}
	if c.relay == nil {
		return
	}
	leading := 0.0
	if c.relay.Leading() {
		leading = 1
	}
	ch <- prometheus.MustNewConstMetric(c.leading, prometheus.GaugeValue, leading)
	ch <- prometheus.MustNewConstMetric(c.lost, prometheus.CounterValue, float64(c.relay.m.lost.Load()))
	for result, n := range map[string]*atomic.Int64{
		"published": &c.relay.m.published, "failed": &c.relay.m.failed, "rejected": &c.relay.m.rejected,
	} {
		ch <- prometheus.MustNewConstMetric(c.records, prometheus.CounterValue, float64(n.Load()), result)
	}
}
