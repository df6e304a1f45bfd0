// Package observe holds the metrics that both services export in the same way:
// how a pool of database connections is used, and how far a consumer group is
// behind its topic.
//
// It guarantees that what cannot be read is absent, never zero: an alert on the
// absence is possible, an alert on a wrong zero is not. It must not import any
// other package of the system.
package observe

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// pool reads a pool's own counters at each scrape; it asks no database.
type pool struct {
	stat                           func() *pgxpool.Stat
	connections, waits, waitSecond *prometheus.Desc
}

// Pool exports how a database pool is used, under names that begin with prefix
// ("notifyd_"); name is the value of the label "pool", which tells the pools of
// one process apart:
//
//	<prefix>db_connections{pool,state}       acquired, idle, constructing, max
//	<prefix>db_pool_waits_total{pool}        acquisitions that found no idle connection
//	<prefix>db_pool_wait_seconds_total{pool} time that those waited, all together
func Pool(prefix, name string, stat func() *pgxpool.Stat) prometheus.Collector {
	which := prometheus.Labels{"pool": name}
	return &pool{
		stat: stat,
		connections: prometheus.NewDesc(prefix+"db_connections",
			"Database connections by pool and state: acquired, idle, constructing; max is the bound.", []string{"state"}, which),
		waits: prometheus.NewDesc(prefix+"db_pool_waits_total", "Acquisitions that found no idle connection.", nil, which),
		waitSecond: prometheus.NewDesc(prefix+"db_pool_wait_seconds_total",
			"Time that acquisitions waited because no connection was idle.", nil, which),
	}
}

// Describe implements prometheus.Collector.
func (p *pool) Describe(ch chan<- *prometheus.Desc) {
	ch <- p.connections
	ch <- p.waits
	ch <- p.waitSecond
}

// Collect implements prometheus.Collector.
func (p *pool) Collect(ch chan<- prometheus.Metric) {
	s := p.stat()
	for state, n := range map[string]int32{
		"acquired": s.AcquiredConns(), "idle": s.IdleConns(), "constructing": s.ConstructingConns(), "max": s.MaxConns(),
	} {
		ch <- prometheus.MustNewConstMetric(p.connections, prometheus.GaugeValue, float64(n), state)
	}
	ch <- prometheus.MustNewConstMetric(p.waits, prometheus.CounterValue, float64(s.EmptyAcquireCount()))
	ch <- prometheus.MustNewConstMetric(p.waitSecond, prometheus.CounterValue, s.EmptyAcquireWaitTime().Seconds())
}

// Lag asks Kafka how far a group is behind. It holds a connection of its own
// from the first question on.
type Lag struct {
	Brokers []string
	Group   string
	Topic   string
	// ClientID names the asker in Kafka's tools.
	ClientID string

	client *kgo.Client
}

// Ask returns the number of records of each partition that the group has not
// committed. A partition without a commit counts whole: the group would start
// at its beginning. It is not for use by several goroutines at once.
func (l *Lag) Ask(ctx context.Context) (map[int32]int64, error) {
	if l.client == nil {
		client, err := kgo.NewClient(kgo.SeedBrokers(l.Brokers...), kgo.ClientID(l.ClientID), kgo.MetadataMinAge(time.Second))
		if err != nil {
			return nil, fmt.Errorf("lag of %s: %w", l.Group, err)
		}
		l.client = client
	}
	admin := kadm.NewClient(l.client)
	commits, err := admin.FetchOffsetsForTopics(ctx, l.Group, l.Topic)
	// A group that nobody ever joined has no commits.
	if err != nil && !errors.Is(err, kerr.GroupIDNotFound) {
		return nil, fmt.Errorf("lag of %s: commits: %w", l.Group, err)
	}
	begins, err := admin.ListStartOffsets(ctx, l.Topic)
	if err != nil {
		return nil, fmt.Errorf("lag of %s: starts of %s: %w", l.Group, l.Topic, err)
	}
	ends, err := admin.ListEndOffsets(ctx, l.Topic)
	if err != nil {
		return nil, fmt.Errorf("lag of %s: ends of %s: %w", l.Group, l.Topic, err)
	}
	if err := ends.Error(); err != nil {
		return nil, fmt.Errorf("lag of %s: ends of %s: %w", l.Group, l.Topic, err)
	}
	lag := map[int32]int64{}
	ends.Each(func(end kadm.ListedOffset) {
		at := int64(0)
		if begin, ok := begins.Lookup(l.Topic, end.Partition); ok {
			at = begin.Offset
		}
		if c, ok := commits.Lookup(l.Topic, end.Partition); ok && c.At > at {
			at = c.At
		}
		lag[end.Partition] = max(end.Offset-at, 0)
	})
	return lag, nil
}

// Close ends the connection.
func (l *Lag) Close() {
	if l.client != nil {
		l.client.Close()
	}
}
