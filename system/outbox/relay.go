package outbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"mailproof/system/failpoint"
)

// Crash points between two steps: read → produced → acknowledged → marked, and
// the end of an event that the broker refuses: dead → alert → stamp.
const (
	fpBeforeProduce = "outbox.before-produce"
	fpAfterProduce  = "outbox.after-produce"
	fpBeforeMark    = "outbox.before-mark"
	fpAfterMark     = "outbox.after-mark"
	fpAfterDead     = "outbox.after-dead"
	fpAfterAlert    = "outbox.after-alert"
)

const (
	// lingerFor is how long the producer collects records of one partition.
	lingerFor = time.Millisecond
	// markEvery is how often the acknowledged prefix is marked while the rest
	// of the batch is waited for.
	markEvery = 250 * time.Millisecond
	// housekeeping is how often dead events without an alert and rows past
	// their retention are looked for.
	housekeeping = 30 * time.Second
	// reconnectAfter is the wait after a session that could not be opened or
	// was lost.
	reconnectAfter = 500 * time.Millisecond
	// brokerCheck is how often a broker that failed is asked whether it is back.
	brokerCheck = 500 * time.Millisecond
)

// Relay publishes the outbox of one database. Of several relays one leads, the
// others stand by.
type Relay struct {
	cfg     Config
	leading atomic.Bool
	m       counters
	// beforeMark is called between acknowledgement and mark; tests end a relay
	// there. An error ends the term without marking.
	beforeMark func() error
}

// NewRelay checks cfg and makes a relay. Run starts it.
func NewRelay(cfg Config) (*Relay, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if err := kgo.ValidateOpts(producerOpts(&cfg)...); err != nil {
		return nil, fmt.Errorf("outbox relay: producer: %w", err)
	}
	return &Relay{cfg: cfg, beforeMark: func() error { return nil }}, nil
}

// Leading reports whether this relay holds the lock, as far as it knows.
func (r *Relay) Leading() bool { return r.leading.Load() }

// Run relays, or stands by, until ctx ends. Then it waits at most Drain for the
// acknowledgements of its last batch, marks them and gives the lock back. It
// returns nil after ctx ended, or an error that no waiting can repair.
func (r *Relay) Run(ctx context.Context) error {
	for failures := 1; ctx.Err() == nil; failures++ {
		err := r.term(ctx)
		if r.leading.Swap(false) {
			failures = 1 // it had a session
		}
		if errors.Is(err, errPooled) {
			return err
		}
		if err == nil || ctx.Err() != nil {
			continue
		}
		r.m.lost.Add(1)
		// The 1st, 2nd, 4th, 8th … in a row: a database that is away for an hour
		// must not fill the log.
		if failures&(failures-1) == 0 {
			r.cfg.Log.WarnContext(ctx, "outbox relay has no session", "relay", r.cfg.Instance, "failures", failures, "err", err)
		}
		sleep(ctx, reconnectAfter)
	}
	return nil
}

// term is one life of the session: stand by, lead, lose it.
func (r *Relay) term(ctx context.Context) error {
	s, err := openSession(ctx, &r.cfg)
	if err != nil {
		return err
	}
	defer s.close()

	if err := r.standBy(ctx, s); err != nil || ctx.Err() != nil {
		return err
	}
	r.leading.Store(true)
	r.cfg.Log.InfoContext(ctx, "outbox relay leads", "relay", r.cfg.Instance)
	return r.lead(ctx, s)
}

// standBy returns once the session holds the lock, or ctx has ended.
func (r *Relay) standBy(ctx context.Context, s *session) error {
	for ctx.Err() == nil {
		ok, err := s.tryLock(ctx)
		if err != nil || ok {
			return err
		}
		sleep(ctx, r.cfg.StandbyInterval)
	}
	return nil
}

// lead publishes until ctx ends or the session is lost.
func (r *Relay) lead(ctx context.Context, s *session) error {
	if err := s.listen(ctx); err != nil {
		return err
	}
	client, err := kgo.NewClient(producerOpts(&r.cfg)...)
	if err != nil {
		return fmt.Errorf("outbox producer: %w", err)
	}
	// What is still buffered when the lock is gone must not be sent.
	defer client.Close()

	l := &leader{Relay: r, s: s, client: client}
	for ctx.Err() == nil {
		if err := l.step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// leader is the state of one term.
type leader struct {
	*Relay
	s      *session
	client *kgo.Client
	// alone is how many rows from the head on are produced one by one, because
	// a batch with them was refused and nobody knows for whose sake.
	alone int
	// kept is when housekeeping was last done.
	kept time.Time
}

// step handles one batch, or waits for one.
func (l *leader) step(ctx context.Context) error {
	if time.Since(l.kept) > housekeeping {
		if err := l.keepHouse(ctx); err != nil {
			return err
		}
	}
	rows, err := l.s.unpublished(ctx)
	if err != nil {
		return err
	}
	if len(rows) == 0 {
		l.alone = 0
		return l.s.await(ctx, l.cfg.PollInterval)
	}
	if wait := rows[0].wait; wait > 0 {
		return l.s.pause(ctx, wait)
	}
	rows = l.cut(rows)
	if l.s.silent() > l.cfg.SessionTimeout/2 {
		return nil // stopped since the batch was read: read it again, if the lock is still ours
	}
	return l.publish(ctx, rows)
}

// cut decides how much of the batch is produced together. A row that was
// refused before goes alone, so that nothing suffers with it; the batch ends
// before a row in backoff.
func (l *leader) cut(rows []row) []row {
	if l.alone > 0 || rows[0].rejections > 0 {
		l.alone = max(l.alone-1, 0)
		return rows[:1]
	}
	for i := range rows {
		if rows[i].rejections > 0 {
			return rows[:i]
		}
	}
	return rows
}

// publish produces rows pipelined, marks the acknowledged prefix, also when a
// later one failed, and notes the first failure.
func (l *leader) publish(ctx context.Context, rows []row) error {
	failpoint.At(fpBeforeProduce)
	b := l.produce(rows)
	failpoint.At(fpAfterProduce)
	if err := l.collect(ctx, b); err != nil {
		return err
	}
	if b.prefix == b.sent {
		return nil // everything that was produced is marked
	}
	return l.fail(ctx, b.rows[b.prefix], b.err, b.sent)
}

// batch is what is in flight.
type batch struct {
	rows []row
	sent int // rows[:sent] were produced
	acks chan ack
	done []bool
	// prefix: rows[:prefix] are acknowledged and marked.
	prefix int
	// first is the lowest index that failed, err its error.
	first int
	err   error
}

type ack struct {
	i   int
	err error
}

// produce hands the rows to the producer in order, and stops as soon as one of
// them is known to have failed: what follows may belong to the same key.
func (l *leader) produce(rows []row) *batch {
	b := &batch{rows: rows, acks: make(chan ack, len(rows)), done: make([]bool, len(rows)), first: len(rows)}
	var failed atomic.Bool
	for i := range rows {
		if failed.Load() {
			break
		}
		// The records' context does not end with the relay's: a record given up
		// in flight is a duplicate for nothing.
		l.client.Produce(context.Background(), rows[i].record(), func(_ *kgo.Record, err error) {
			if err != nil {
				failed.Store(true)
			}
			b.acks <- ack{i, err}
		})
		b.sent++
	}
	return b
}

// collect waits for every acknowledgement and marks the prefix as it grows, so
// that one slow record does not make those before it be published again.
func (l *leader) collect(ctx context.Context, b *batch) error {
	tick := time.NewTicker(min(markEvery, l.cfg.PingInterval))
	defer tick.Stop()
	var drained <-chan time.Time
	stop := ctx.Done()
	for got := 0; got < b.sent; {
		select {
		case a := <-b.acks:
			got++
			b.note(a)
			l.m.note(a.err)
			if a.err == nil {
				l.logPublished(ctx, b.rows[a.i])
			}
		case <-tick.C:
			if err := l.advance(ctx, b); err != nil {
				return err
			}
		case <-stop:
			stop, drained = nil, time.After(l.cfg.Drain)
		case <-drained:
			if err := l.advance(ctx, b); err != nil {
				return err
			}
			return fmt.Errorf("outbox relay: stopped with %d records not acknowledged within %v", b.sent-got, l.cfg.Drain)
		}
	}
	return l.advance(ctx, b)
}

// logPublished names what a payload says of its mail, where it says it (OB-13).
func (l *leader) logPublished(ctx context.Context, r row) {
	if !l.cfg.Log.Enabled(ctx, slog.LevelInfo) {
		return
	}
	var p struct {
		DedupeKey  string `json:"dedupe_key"`
		Attempts   *int   `json:"attempts"`
		ProviderID string `json:"provider_id"`
	}
	attrs := []slog.Attr{slog.String("event_id", r.eventID.String()), slog.String("event_type", r.eventType), slog.String("topic", r.topic)}
	if json.Unmarshal(r.payload, &p) == nil && p.DedupeKey != "" { // another payload has no mail to name
		attrs = append(attrs, slog.String("dedupe_key", p.DedupeKey))
		if p.Attempts != nil {
			attrs = append(attrs, slog.Int("attempts", *p.Attempts), slog.String("provider_id", p.ProviderID))
		}
	}
	l.cfg.Log.LogAttrs(ctx, slog.LevelInfo, "event published", attrs...)
}

func (b *batch) note(a ack) {
	switch {
	case a.err == nil:
		b.done[a.i] = true
	case a.i < b.first:
		b.first, b.err = a.i, a.err
	}
}

// advance marks what was acknowledged without a gap, or keeps the session alive.
func (l *leader) advance(ctx context.Context, b *batch) error {
	end := b.prefix
	for end < b.sent && b.done[end] {
		end++
	}
	if end == b.prefix {
		if l.s.silent() < l.cfg.PingInterval {
			return nil
		}
		return l.s.ping(ctx)
	}
	failpoint.At(fpBeforeMark)
	if err := l.beforeMark(); err != nil {
		return err
	}
	if err := l.s.mark(ctx, b.rows[b.prefix:end]); err != nil {
		return err
	}
	b.prefix = end
	failpoint.At(fpAfterMark)
	return nil
}

// fail notes what became of the first record that was not published.
func (l *leader) fail(ctx context.Context, r row, cause error, sent int) error {
	log := l.cfg.Log.With("event_id", r.eventID, "key", r.key, "attempts", r.attempts+1, "err", cause)
	if !ownFault(cause) {
		log.WarnContext(ctx, "event not published, the broker failed")
		if err := l.s.failed(ctx, r, cause); err != nil {
			return err
		}
		return l.awaitBroker(ctx, backoff(l.cfg.BackoffUnit, r.attempts+1))
	}
	if sent > 1 {
		// The broker refuses whole batches; whose fault it was shows when each
		// goes alone.
		log.WarnContext(ctx, "batch refused, its events go one by one", "batch", sent)
		l.alone = sent
		return nil
	}
	log.WarnContext(ctx, "event refused by the broker", "rejections", r.rejections+1)
	dead, err := l.s.rejected(ctx, r, cause)
	if err != nil || !dead {
		return err
	}
	failpoint.At(fpAfterDead)
	return l.alertDead(ctx)
}

// awaitBroker waits one backoff unit, and on until the broker answers, at most
// limit: the backoff is for the broker's sake, and a broker that is back must
// not be waited for.
func (l *leader) awaitBroker(ctx context.Context, limit time.Duration) error {
	end := time.Now().Add(limit)
	if err := l.s.pause(ctx, min(l.cfg.BackoffUnit, limit)); err != nil {
		return err
	}
	for ctx.Err() == nil && time.Now().Before(end) {
		ping, cancel := context.WithTimeout(ctx, l.cfg.PingInterval)
		err := l.client.Ping(ping)
		cancel()
		if err == nil {
			return nil
		}
		if err := l.s.pause(ctx, brokerCheck); err != nil {
			return err
		}
	}
	return nil
}

func (l *leader) keepHouse(ctx context.Context) error {
	if err := l.alertDead(ctx); err != nil {
		return err
	}
	n, err := l.s.purge(ctx)
	if err != nil {
		return err
	}
	// A full batch means that there is more: the next step goes on with it. So
	// two rows are purged for each that is published, whatever the load, and
	// publishing waits for one batch at most.
	if n < purgeBatch {
		l.kept = time.Now()
	}
	return nil
}

// alertDead tells of dead events that nobody was told of. The stamp comes after
// the alert: a crash between the two repeats it.
func (l *leader) alertDead(ctx context.Context) error {
	dead, err := l.s.unalerted(ctx)
	if err != nil {
		return err
	}
	for _, d := range dead {
		if err := l.cfg.OnDead(ctx, d); err != nil {
			l.cfg.Log.ErrorContext(ctx, "alert of a dead event failed, it will be repeated", "event_id", d.EventID, "err", err)
			continue
		}
		failpoint.At(fpAfterAlert)
		if err := l.s.alerted(ctx, d); err != nil {
			return err
		}
	}
	return nil
}
