// Command growthbench shows how the tables of notifyd grow under a steady load:
// dead rows, sizes of tables and indexes, and how many updates were heap-only.
//
//	go run ./system/delivery/growthbench -rows 1000000 -rate 150 -for 5m
//
// It starts a Postgres of its own and makes two databases with the same rows:
// one with autovacuum's defaults for every table, one as the migrations leave
// it. Both get the same load at the same time, through the store's own
// statements and a real relay: mails are inserted, stamped, claimed, rendered,
// and settled (one in ten after a refusal, one in fifty is cancelled, one in two
// hundred dies), and the retention takes away as many rows as come, so that the
// number of rows stays. Nothing is judged: the figures are for a person.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kfake"
	"golang.org/x/sync/errgroup"

	"mailproof/system/contract"
	"mailproof/system/delivery"
	"mailproof/system/outbox"
	"mailproof/system/outbox/outboxtest"
)

type options struct {
	rows  int
	rate  int
	run   time.Duration
	every time.Duration
}

func main() {
	var o options
	flag.IntVar(&o.rows, "rows", 1_000_000, "rows at rest at the start")
	flag.IntVar(&o.rate, "rate", 150, "new mails per second and database")
	flag.DurationVar(&o.run, "for", 5*time.Minute, "how long the load runs")
	flag.DurationVar(&o.every, "every", 15*time.Second, "time between two samples")
	flag.Parse()
	if err := bench(context.Background(), o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "growthbench:", err)
		os.Exit(1)
	}
}

// settings of the two databases.
var settings = []struct{ name, reset string }{
	{"defaults", `
ALTER TABLE notifications RESET (fillfactor, autovacuum_vacuum_scale_factor, autovacuum_vacuum_threshold,
  autovacuum_vacuum_insert_scale_factor, autovacuum_vacuum_insert_threshold, autovacuum_vacuum_cost_delay, autovacuum_analyze_scale_factor);
ALTER TABLE notification_mails RESET (autovacuum_vacuum_scale_factor, autovacuum_vacuum_threshold,
  autovacuum_vacuum_insert_scale_factor, autovacuum_vacuum_insert_threshold, autovacuum_vacuum_cost_delay);
ALTER TABLE outbox RESET (autovacuum_vacuum_scale_factor, autovacuum_vacuum_threshold,
  autovacuum_vacuum_insert_scale_factor, autovacuum_vacuum_insert_threshold);`},
	{"migrated", ""},
}

func bench(ctx context.Context, o options, w io.Writer) (err error) {
	server, err := outboxtest.Start()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()
	broker, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(3, topic))
	if err != nil {
		return fmt.Errorf("kfake: %w", err)
	}
	defer broker.Close()

	g, ctx := errgroup.WithContext(ctx)
	out := make([]strings.Builder, len(settings))
	for i, s := range settings {
		url, err := prepare(ctx, server, s.name, s.reset, o)
		if err != nil {
			return fmt.Errorf("database %s: %w", s.name, err)
		}
		g.Go(func() error {
			if err := load(ctx, url, broker.ListenAddrs(), o, &out[i]); err != nil {
				return fmt.Errorf("database %s: %w", s.name, err)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for i, s := range settings {
		if _, err := fmt.Fprintf(w, "### %s\n\n%s\n", s.name, out[i].String()); err != nil {
			return err
		}
	}
	return nil
}

const topic = "mail.events"

func prepare(ctx context.Context, server *outboxtest.Postgres, name, reset string, o options) (string, error) {
	if err := execute(ctx, server.URL("postgres"), "CREATE DATABASE "+name); err != nil {
		return "", err
	}
	url := server.URL(name)
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return "", err
	}
	defer pool.Close()
	if err := delivery.Migrate(ctx, pool); err != nil {
		return "", err
	}
	if err := outbox.Migrate(ctx, url); err != nil {
		return "", err
	}
	for _, sql := range []string{reset, fmt.Sprintf(fillMails, o.rows, o.rate), fillBytes, fmt.Sprintf(fillOutbox, o.rows, o.rate)} {
		if sql == "" {
			continue
		}
		if err := execute(ctx, url, sql); err != nil {
			return "", err
		}
	}
	return url, execute(ctx, url, "VACUUM ANALYZE")
}

// The rows at rest are as old as if they had come at the same rate, with the same
// kinds of keys: ids and event ids in the order of time, bookings at random. Else
// the indexes would grow by the change from one kind to the other.
const (
	timeOrdered = `encode(overlay(uuid_send(gen_random_uuid()) PLACING substring(int8send((extract(epoch FROM at) * 1000)::bigint) FROM 3) FROM 1 FOR 6), 'hex')::uuid`

	fillMails = `INSERT INTO notifications (id, dedupe_key, booking_id, event_id, type, channel, recipient, payload, status, generation,
  attempts, attempt_limit, token, published_at, first_claimed_at, provider_msg_id, created_at, changed_at, sent_at)
SELECT ` + timeOrdered + `, 'ticket:' || b, b, (` + timeOrdered + `)::text, 'TICKET_CONFIRMATION', 'EMAIL', 'guest' || i || '@example.test',
  '{"bookingId": "b", "event": "Final", "seats": ["A-1", "A-2"]}', 'SENT', 1, 1, 4, 1, at, at, 'id', at, at, at
FROM generate_series(%[1]d, 1, -1) AS i, LATERAL (SELECT now() - i * interval '1 second' / %[2]d AS at, gen_random_uuid()::text AS b) AS s`
	fillBytes = `INSERT INTO notification_mails (notification_id, mail, created_at)
SELECT id, convert_to(repeat(md5(id::text), 20), 'UTF8'), created_at FROM notifications ORDER BY created_at`
	fillOutbox = `INSERT INTO outbox (event_id, topic, key, event_type, payload, created_at, published_at)
SELECT ` + timeOrdered + `, 'mail.events', gen_random_uuid()::text, 'EmailSent', '{"event_type": "EmailSent", "dedupe_key": "ticket:old"}', at, at
FROM generate_series(%[1]d, 1, -1) AS i, LATERAL (SELECT now() - i * interval '1 second' / %[2]d AS at) AS s`
)

func execute(ctx context.Context, url, sql string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, sql)
	return errors.Join(err, conn.Close(ctx))
}

func load(ctx context.Context, url string, brokers []string, o options, w io.Writer) error {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return err
	}
	cfg.MaxConns = 12
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer pool.Close()
	keep := time.Duration(o.rows/o.rate) * time.Second
	relay, err := outbox.NewRelay(outbox.Config{DatabaseURL: url, Brokers: brokers, Retention: keep, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	store := delivery.New(pool, delivery.Config{
		Lease: 45 * time.Second, RetryDelays: []time.Duration{time.Second}, MaxAttempts: 4, Events: topic,
		Policies: map[contract.MailType]delivery.Policy{contract.TicketConfirmation: delivery.Resend},
	})
	ctx, stop := context.WithTimeout(ctx, o.run)
	defer stop()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return relay.Run(ctx) })
	g.Go(func() error { return arrivals(ctx, store, o.rate) })
	g.Go(func() error { return retention(ctx, store, keep) })
	g.Go(func() error { return sample(ctx, pool, o.every, w) })
	return g.Wait()
}

// arrivals makes a batch each 100 ms, as the bridge does, and works each mail
// off by a worker of its own.
func arrivals(ctx context.Context, store *delivery.Store, rate int) error {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	var workers sync.WaitGroup
	defer workers.Wait()
	free := make(chan struct{}, 8)
	for n := 0; ; {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		rows := make([]delivery.NewRow, rate/10)
		for i := range rows {
			n++
			id, event := uuid.NewString(), uuid.Must(uuid.NewV7()).String()
			rows[i] = delivery.NewRow{
				DedupeKey: "ticket:" + id, BookingID: id, EventID: event, Type: contract.TicketConfirmation,
				Channel: contract.Email, Recipient: id + "@example.test", Generation: 1,
				Payload: []byte(`{"bookingId": "b", "event": "Final", "seats": ["A-1", "A-2"]}`),
			}
		}
		made, err := store.Insert(ctx, rows)
		if err != nil {
			return ended(ctx, err)
		}
		ids := make([]uuid.UUID, len(made))
		for i, m := range made {
			ids[i] = m.ID
		}
		if err := store.StampPublished(ctx, ids); err != nil {
			return ended(ctx, err)
		}
		for i, id := range ids {
			select {
			case <-ctx.Done():
				return nil
			case free <- struct{}{}:
			}
			nth, row := n-len(ids)+i, rows[i]
			workers.Go(func() {
				defer func() { <-free }()
				if err := live(ctx, store, id, row, nth); ended(ctx, err) != nil {
					fmt.Fprintln(os.Stderr, "growthbench:", err)
				}
			})
		}
	}
}

// live is the life of the nth mail.
func live(ctx context.Context, s *delivery.Store, id uuid.UUID, row delivery.NewRow, nth int) error {
	if nth%50 == 0 {
		_, err := s.Cancel(ctx, delivery.CancelRequest{BookingID: row.BookingID, DedupeKey: row.DedupeKey, Generation: 1})
		return err
	}
	c, err := s.Claim(ctx, id)
	if err != nil || c.Row == nil {
		return err
	}
	if _, err := s.StoreRendered(ctx, id, c.Row.Token, make([]byte, 640)); err != nil {
		return err
	}
	if nth%200 == 1 {
		_, err := s.Permanent(ctx, id, c.Row.Token, delivery.Refusal{Err: "550 5.1.1 no such user"})
		return err
	}
	if nth%10 == 2 {
		soon := time.Millisecond
		if _, err := s.Transient(ctx, id, c.Row.Token, delivery.Refusal{Err: "451", RetryAfter: soon}); err != nil {
			return err
		}
		for c.Row = nil; c.Row == nil; {
			time.Sleep(max(c.Wait, soon)) // it is due by the clock
			if c, err = s.Claim(ctx, id); err != nil {
				return err
			}
		}
	}
	_, err = s.Accepted(ctx, id, c.Row.Token, "provider-id")
	return err
}

func retention(ctx context.Context, s *delivery.Store, keep time.Duration) error {
	for {
		n, err := s.DeleteAtRest(ctx, keep, 500)
		if err != nil {
			return ended(ctx, err)
		}
		if n == 500 {
			continue
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(5 * time.Second):
		}
	}
}

// ended hides errors of the end of the run.
func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

const sampleSQL = `
SELECT s.n_live_tup, s.n_dead_tup, s.n_tup_upd, s.n_tup_hot_upd, s.autovacuum_count,
  pg_table_size(s.relid), pg_indexes_size(s.relid),
  coalesce((SELECT sum(pg_relation_size(i.indexrelid)) FROM pg_index i WHERE i.indrelid = s.relid AND i.indpred IS NOT NULL
    AND pg_get_expr(i.indpred, i.indrelid) !~ 'SENT|booking_id'), 0)
FROM pg_stat_user_tables s WHERE s.relname = $1`

func sample(ctx context.Context, pool *pgxpool.Pool, every time.Duration, w io.Writer) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	begin := time.Now()
	fmt.Fprintln(w, "| table | after | live rows | dead rows | updates | of them heap-only | vacuums | table | all indexes | indexes over states that pass |")
	fmt.Fprintln(w, "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
	for {
		for _, table := range []string{"notifications", "notification_mails", "outbox"} {
			var live, dead, updates, hot, vacuums, size, indexes, small int64
			err := pool.QueryRow(ctx, sampleSQL, table).Scan(&live, &dead, &updates, &hot, &vacuums, &size, &indexes, &small)
			if err != nil {
				return ended(ctx, err)
			}
			share := 0.0
			if updates > 0 {
				share = 100 * float64(hot) / float64(updates)
			}
			fmt.Fprintf(w, "| %s | %d s | %d | %d | %d | %.0f %% | %d | %.1f MB | %.1f MB | %.2f MB |\n", table, int(time.Since(begin).Seconds()),
				live, dead, updates, share, vacuums, mb(size), mb(indexes), mb(small))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func mb(bytes int64) float64 { return float64(bytes) / (1 << 20) }
