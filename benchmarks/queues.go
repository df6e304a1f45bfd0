package benchmarks

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync/atomic"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"mailproof/history"
	"mailproof/loadgen"
)

// queuesPart measures one queue's throughput for each pair of settings, bare
// consumers and the system's workers in turn.
func (r *runner) queuesPart(ctx context.Context) error {
	out := &Queues{}
	r.result.Queues = out
	q, err := r.lab.bareQueue(ctx, r.lab.name("bare"))
	if err != nil {
		return err
	}
	err = r.queueCells(ctx, q, out)
	return errors.Join(err, q.close())
}

func (r *runner) queueCells(ctx context.Context, q *bareQueue, out *Queues) error {
	for _, consumers := range r.size.consumers {
		for _, prefetch := range r.size.prefetch {
			r.say("queues: prefetch %d, %d consumers", prefetch, consumers)
			cell := QueueCell{Prefetch: prefetch, Consumers: consumers}
			for range r.size.bareRepeats {
				rate, err := q.bareRate(ctx, consumers, prefetch, r.size.bareMessages, r.size.bareFor)
				if err != nil {
					return err
				}
				cell.Bare = append(cell.Bare, rate)
			}
			rate, err := r.workerRate(ctx, consumers, prefetch)
			if err != nil {
				return err
			}
			cell.Worker = append(cell.Worker, rate)
			out.Cells = append(out.Cells, cell)
		}
	}
	return nil
}

// bareRate fills the queue to n messages and consumes for d.
func (q *bareQueue) bareRate(ctx context.Context, consumers, prefetch, n int, d time.Duration) (float64, error) {
	left, err := q.out.QueueDeclarePassive(q.name, true, false, false, false, nil)
	if err != nil {
		return 0, err
	}
	if err := q.fill(ctx, max(0, n-left.Messages)); err != nil {
		return 0, err
	}
	var acked, last atomic.Int64
	failed := make(chan error, consumers)
	var conns []*amqp091.Connection
	defer func() {
		for _, c := range conns {
			_ = c.Close() // what it held unacked goes back to the queue
		}
	}()
	began := history.Now()
	for range consumers {
		conn, err := amqp091.Dial(q.url)
		if err != nil {
			return 0, err
		}
		conns = append(conns, conn)
		in, err := consumeOn(conn, q.name, prefetch)
		if err != nil {
			return 0, err
		}
		go func() {
			for m := range in {
				if err := m.Ack(false); err != nil {
					failed <- err
					return
				}
				acked.Add(1)
				last.Store(history.Now())
			}
		}()
	}
	bounded, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	err = await(bounded, 10*time.Millisecond, func() (bool, error) {
		select {
		case err := <-failed:
			return false, err
		default:
			return acked.Load() >= int64(n), nil
		}
	})
	if err != nil && bounded.Err() == nil {
		return 0, err
	}
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	return float64(acked.Load()) / time.Duration(max(1, last.Load()-began)).Seconds(), nil
}

func consumeOn(conn *amqp091.Connection, queue string, prefetch int) (<-chan amqp091.Delivery, error) {
	ch, err := conn.Channel()
	if err != nil {
		return nil, err
	}
	if err := ch.Qos(prefetch, 0, false); err != nil {
		return nil, err
	}
	return ch.Consume(queue, "", false, false, false, false, nil)
}

// workerRate queues marketing mails while the mail server holds the lane, lets
// it go and counts what arrives.
func (r *runner) workerRate(ctx context.Context, consumers, prefetch int) (float64, error) {
	env := patientEnv()
	maps.Copy(env, noBucket())
	maps.Copy(env, map[string]string{
		"NOTIFYD_MARKETING_CONSUMERS": fmt.Sprint(consumers), "NOTIFYD_MARKETING_PREFETCH": fmt.Sprint(prefetch),
	})
	s, err := r.lab.start(ctx, systemConfig{what: "queue", env: env})
	if err != nil {
		return 0, err
	}
	rate, err := r.drainHeld(ctx, s)
	return rate, errors.Join(err, s.stop(ctx))
}

func (r *runner) drainHeld(ctx context.Context, s *system) (float64, error) {
	release, err := s.holdMarketing()
	if err != nil {
		return 0, err
	}
	n := r.size.workerMails
	if _, err := s.campaign(ctx, n); err != nil {
		release()
		return 0, err
	}
	from := release()
	until := from + int64(r.size.workerFor)
	for s.mail.Totals().Stored < int64(n) && history.Now() < until {
		if !loadgen.Wait(ctx, settleEvery) {
			return 0, context.Cause(ctx)
		}
	}
	until = min(until, history.Now())
	s.readLedger()
	if len(s.marketing) >= n {
		until = s.marketing[len(s.marketing)-1]
	}
	return perSecond(s.marketing, from, until), nil
}
