package benchmarks

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	amqp091 "github.com/rabbitmq/amqp091-go"
	"golang.org/x/sync/errgroup"

	"mailproof/fakes/smtp"
	"mailproof/history"
)

const (
	// campaignBound is how long one campaign is waited for.
	campaignBound = 100 * time.Second
	// noteTime is left of a part's time to note what a campaign reached.
	noteTime = 5 * time.Second
	// insertBatch and claimBatch of the raw stages: the sizes at which Postgres'
	// cost per row has stopped to fall.
	insertBatch = 500
	claimBatch  = 50
	// publishWindow is how many messages are unconfirmed at once.
	publishWindow = 500
	// rawConsumers and rawPrefetch of the raw stage of RabbitMQ, rawSessions of
	// the mail server's: as the marketing lane ships.
	rawConsumers = 2
	rawPrefetch  = 50
	rawSessions  = 2
)

// marketingPart runs each raw stage alone, then whole campaigns.
func (r *runner) marketingPart(ctx context.Context) error {
	r.result.Marketing = &Marketing{Mails: r.size.flood}
	var errs []error
	for _, stage := range []func(context.Context, int) (RawStage, error){r.lab.rawPostgres, r.lab.rawRabbit, r.lab.rawSMTP} {
		s, err := stage(ctx, r.size.rawMails)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		r.say("marketing: raw stage %s, %s per second", s.Name, number(float64(s.Mails)/s.Seconds))
		r.result.Marketing.Raw = append(r.result.Marketing.Raw, s)
	}
	for i := range r.size.campaigns {
		r.say("marketing: a campaign of %d mails from the call to the last mail, %d of %d", r.size.flood, i+1, r.size.campaigns)
		if err := r.campaignRun(ctx); err != nil {
			errs = append(errs, err)
			break
		}
	}
	return errors.Join(errs...)
}

func (r *runner) campaignRun(ctx context.Context) error {
	s, err := r.lab.start(ctx, systemConfig{what: "marketing", env: noBucket()})
	if err != nil {
		return err
	}
	cpu := s.cpu()
	before, began := cpu.read(), history.Now()
	busy, all := cpuTicks()
	accepted, err := s.campaign(ctx, r.size.flood)
	if err != nil {
		return errors.Join(err, s.stop(ctx))
	}
	// A campaign that takes longer is measured by what has arrived.
	bounded, cancel := context.WithTimeout(ctx, within(ctx, campaignBound))
	defer cancel()
	err = await(bounded, settleEvery, func() (bool, error) { return s.mail.Totals().Stored >= int64(r.size.flood), nil })
	if ctx.Err() == nil {
		run := MarketingRun{
			AcceptSeconds: accepted.Seconds(), Seconds: time.Duration(history.Now() - began).Seconds(),
			Delivered: int(s.mail.Totals().Stored), CPU: cpu.since(before),
		}
		busyNow, allNow := cpuTicks()
		run.MachineBusy = 100 * float64(busyNow-busy) / float64(max(1, allNow-all))
		r.result.Marketing.Repeats = append(r.result.Marketing.Repeats, run)
		r.say("marketing: %s mails/s", number(float64(run.Delivered)/run.Seconds))
		err = nil
	}
	return errors.Join(err, s.stop(ctx))
}

// within is d, or less where ctx ends so soon that nothing could be noted after
// d.
func within(ctx context.Context, d time.Duration) time.Duration {
	if end, ok := ctx.Deadline(); ok {
		return min(d, time.Until(end)-noteTime)
	}
	return d
}

// timed runs one stage and measures its time and its parts' CPU time.
func (l *lab) timed(name, what string, mails int, do func() error) (RawStage, error) {
	cpu := l.cpu()
	before, began := cpu.read(), time.Now()
	if err := do(); err != nil {
		return RawStage{}, fmt.Errorf("raw stage %s: %w", name, err)
	}
	return RawStage{Name: name, What: what, Mails: mails, Seconds: time.Since(began).Seconds(), CPU: cpu.since(before)}, nil
}

// rawTables are as wide as the system's, with the one index that finds what
// waits.
const rawTables = `
CREATE TABLE raw_mails (
    id uuid PRIMARY KEY, dedupe_key text NOT NULL UNIQUE, recipient text NOT NULL, payload jsonb NOT NULL,
    state text NOT NULL, changed_at timestamptz NOT NULL DEFAULT statement_timestamp()
) WITH (fillfactor = 80);
CREATE INDEX ON raw_mails (changed_at) WHERE state = 'PENDING';
CREATE TABLE raw_bytes (id uuid PRIMARY KEY, mail bytea NOT NULL)`

const (
	rawInsert = `INSERT INTO raw_mails (id, dedupe_key, recipient, payload, state)
		SELECT id, key, key, jsonb_build_object('text', $3::text), 'PENDING' FROM unnest($1::uuid[], $2::text[]) AS t(id, key)
		ON CONFLICT DO NOTHING`
	rawUpdate = `UPDATE raw_mails SET state = $2, changed_at = statement_timestamp() WHERE id = ANY($1) RETURNING id, payload`
	rawStore  = `INSERT INTO raw_bytes SELECT unnest($1::uuid[]), $2`
)

// rawPostgres inserts rows in batches, claims them, stores their mails and marks
// them in batches, each batch committed.
func (l *lab) rawPostgres(ctx context.Context, n int) (RawStage, error) {
	conn, err := l.bareDatabase(ctx, l.name("raw"), rawTables)
	if err != nil {
		return RawStage{}, fmt.Errorf("raw stage Postgres: %w", err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }() // its work is done or failed
	ids := make([]uuid.UUID, n)
	keys := make([]string, n)
	for i := range ids {
		ids[i], keys[i] = uuid.New(), fmt.Sprintf("campaign:raw:%032d", i)
	}
	return l.timed(partPostgres, fmt.Sprintf("INSERT by %d; claim, mail's bytes and mark by %d; each statement committed", insertBatch, claimBatch), n,
		func() error { return rawRows(ctx, conn, ids, keys) })
}

func rawRows(ctx context.Context, conn *pgx.Conn, ids []uuid.UUID, keys []string) error {
	for from := 0; from < len(ids); from += insertBatch {
		to := min(from+insertBatch, len(ids))
		if _, err := conn.Exec(ctx, rawInsert, ids[from:to], keys[from:to], floorEvent); err != nil {
			return err
		}
	}
	for from := 0; from < len(ids); from += claimBatch {
		batch := ids[from:min(from+claimBatch, len(ids))]
		if _, err := conn.Exec(ctx, rawUpdate, batch, "SENDING"); err != nil {
			return err
		}
		if _, err := conn.Exec(ctx, rawStore, batch, []byte(floorMail)); err != nil {
			return err
		}
		if _, err := conn.Exec(ctx, rawUpdate, batch, "SENT"); err != nil {
			return err
		}
	}
	return nil
}

// rawRabbit publishes messages with a window of unconfirmed ones, and consumes
// and acks them meanwhile.
func (l *lab) rawRabbit(ctx context.Context, n int) (RawStage, error) {
	q, err := l.bareQueue(ctx, l.name("raw"))
	if err != nil {
		return RawStage{}, fmt.Errorf("raw stage RabbitMQ: %w", err)
	}
	s, err := l.timed(partRabbit, fmt.Sprintf("confirmed publish to a quorum queue, %d unconfirmed at most; %d consumers × prefetch %d, an ack each",
		publishWindow, rawConsumers, rawPrefetch), n, func() error {
		if err := q.consume(rawConsumers, rawPrefetch); err != nil {
			return err
		}
		g, ctx := errgroup.WithContext(ctx)
		g.Go(func() error { return q.fill(ctx, n) })
		g.Go(func() error {
			for range n {
				select {
				case d := <-q.deliveries:
					if err := d.Ack(false); err != nil {
						return err
					}
				case <-ctx.Done():
					return context.Cause(ctx)
				}
			}
			return nil
		})
		return g.Wait()
	})
	return s, errors.Join(err, q.close())
}

// fill publishes n messages and waits until each is confirmed.
func (q *bareQueue) fill(ctx context.Context, n int) error {
	var window []*amqp091.DeferredConfirmation
	settle := func(keep int) error {
		for len(window) > keep {
			ok, err := window[0].WaitContext(ctx)
			if err == nil && !ok {
				err = errors.New("the broker refused a message")
			}
			if err != nil {
				return err
			}
			window = window[1:]
		}
		return nil
	}
	for range n {
		c, err := q.start(ctx, []byte(floorEvent))
		if err != nil {
			return err
		}
		window = append(window, c)
		if err := settle(publishWindow - 1); err != nil {
			return err
		}
	}
	return settle(0)
}

// rawSMTP sends mails on kept connections to a mail server of its own.
func (l *lab) rawSMTP(ctx context.Context, n int) (RawStage, error) {
	server, err := smtp.Start(smtp.Options{Clock: history.Now})
	if err != nil {
		return RawStage{}, fmt.Errorf("raw stage SMTP: %w", err)
	}
	s, err := l.timed("SMTP", fmt.Sprintf("mails on %d kept connections", rawSessions), n, func() error {
		var g errgroup.Group
		for c := range rawSessions {
			g.Go(func() error { return rawMails(ctx, server.Addr(), c, n/rawSessions) })
		}
		return g.Wait()
	})
	return s, errors.Join(err, server.Close())
}

func rawMails(ctx context.Context, addr string, session, n int) error {
	conn, err := dialSMTP(addr)
	if err != nil {
		return err
	}
	for i := range n {
		if ctx.Err() != nil {
			return errors.Join(context.Cause(ctx), conn.close())
		}
		if err := conn.send(fmt.Sprintf("campaign:raw:%d-%d", session, i)); err != nil {
			return errors.Join(err, conn.close())
		}
	}
	return conn.close()
}
