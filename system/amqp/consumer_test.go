package amqp

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func ids(n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprint("m", i)
	}
	return out
}

// collector is a handler that hands deliveries to the test.
type collector struct{ c chan *Delivery }

func newCollector() *collector { return &collector{c: make(chan *Delivery, 1000)} }

func (c *collector) next(t *testing.T) *Delivery {
	t.Helper()
	select {
	case d := <-c.c:
		return d
	case <-time.After(patience):
		require.FailNow(t, "no delivery")
		return nil
	}
}

// Collected acks reach the broker at the latest when the consumer stops, and none
// is written for a delivery that was not acked.
func TestStopWritesCollectedAcks(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	const n = 200
	b.put(q, ids(n)...)
	col := newCollector()
	stay := make(chan struct{})
	r := startConsumer(t, ConsumerConfig{
		Config: Config{URLs: []string{b.url}}, Queue: q, Consumers: 2, Prefetch: 20, Parallel: 4, AckWithin: time.Hour,
		Handle: func(_ context.Context, d *Delivery) {
			if d.MessageID == "m7" {
				<-stay
			}
			assert.NoError(t, d.Ack())
			col.c <- d
		},
	}, patience)
	seen := map[string]bool{}
	for range n - 1 {
		seen[col.next(t).MessageID] = true
	}
	require.Len(t, seen, n-1)
	r.stop()
	close(stay)
	require.NoError(t, <-r.done)
	require.Empty(t, b.leftover(q))
}

func TestConsumeAcksEverything(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	const n = 500
	b.put(q, ids(n)...)
	var mu sync.Mutex
	seen := map[string]int{}
	r := startConsumer(t, ConsumerConfig{
		Config: Config{URLs: []string{b.url}}, Queue: q, Consumers: 4, Prefetch: 10,
		Handle: func(_ context.Context, d *Delivery) {
			mu.Lock()
			seen[d.MessageID]++
			mu.Unlock()
			assert.NoError(t, d.Ack())
			assert.NoError(t, d.Ack(), "a second ack is not sent")
			assert.Equal(t, q, d.Queue)
			assert.Zero(t, d.DeliveryCount)
			assert.False(t, d.Redelivered)
		},
	}, time.Second)
	r.states.await(t, StateConnected)
	require.True(t, r.Connected())
	eventually(t, "all are handled", func() bool { mu.Lock(); defer mu.Unlock(); return len(seen) == n })
	r.stop()
	require.NoError(t, <-r.done)
	require.False(t, r.Connected())
	require.Empty(t, b.leftover(q), "nothing was left unacked")
	for id, times := range seen {
		require.Equal(t, 1, times, id)
	}
}

// M6-03: each consumer works on one delivery at a time and holds prefetch.
func TestConsumersTimesPrefetch(t *testing.T) {
	t.Parallel()
	for _, parallel := range []int{1, 3} {
		t.Run(fmt.Sprint("parallel", parallel), func(t *testing.T) {
			t.Parallel()
			b := connect(t)
			q := b.queue(nil)
			const n = 40
			b.put(q, ids(n)...)
			var now, most atomic.Int64
			gate := make(chan struct{})
			started := make(chan struct{}, n)
			r := startConsumer(t, ConsumerConfig{
				Config: Config{URLs: []string{b.url}}, Queue: q, Consumers: 2, Prefetch: 5, Parallel: parallel,
				Handle: func(_ context.Context, d *Delivery) {
					v := now.Add(1)
					for m := most.Load(); v > m && !most.CompareAndSwap(m, v); m = most.Load() {
					}
					started <- struct{}{}
					<-gate
					now.Add(-1)
					assert.NoError(t, d.Ack())
				},
			}, patience)
			for range 2 * parallel {
				<-started
			}
			eventually(t, "2 consumers hold 5 each", func() bool { return b.ready(q) == n-10 })
			require.Empty(t, started, "no handler beyond the bound")
			close(gate)
			eventually(t, "queue empty", func() bool { return len(started) == n-2*parallel })
			r.stop()
			require.NoError(t, <-r.done)
			require.LessOrEqual(t, most.Load(), int64(2*parallel))
		})
	}
}

// The finding that this package exists for: m1 acked, link cut, m2 and m3
// delivered again as tags 1 and 2, and the old handler of m2, whose tag was 2,
// acks. With amqp091-go's recovery m3 is gone, never processed, without an error.
func TestStaleAckTouchesNothing(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	b.put(q, "m1", "m2", "m3")
	px := newProxy(t, b.url)
	col := newCollector()
	release := make(chan struct{})
	r := startConsumer(t, ConsumerConfig{
		Config: Config{URLs: []string{px.url}}, Queue: q, Consumers: 1, Prefetch: 3, Parallel: 3,
		Handle: func(_ context.Context, d *Delivery) { col.c <- d; <-release },
	}, patience)
	r.states.await(t, StateConnected)
	old := map[string]*Delivery{}
	for range 3 {
		d := col.next(t)
		old[d.MessageID] = d
	}
	b.put(q, "m4") // waits for a place in the window
	require.Equal(t, 1, b.ready(q))
	require.NoError(t, old["m1"].Ack())
	eventually(t, "the broker has the ack of m1", func() bool { return b.ready(q) == 0 })

	px.cut()
	r.states.await(t, StateConnected)
	eventually(t, "the new session holds m2, m3, m4 as tags 1, 2, 3", func() bool { return b.ready(q) == 0 })
	require.ErrorIs(t, old["m2"].Ack(), ErrStaleSession)
	require.ErrorIs(t, old["m3"].Ack(), ErrStaleSession)

	close(release)
	for range 3 { // they come again, and are left unacked
		require.True(t, col.next(t).Redelivered)
	}
	r.stop()
	require.NoError(t, <-r.done)
	var left []string
	for _, d := range b.leftover(q) {
		left = append(left, d.MessageId)
	}
	require.ElementsMatch(t, []string{"m2", "m3", "m4"}, left)
}

func TestConsumerSurvivesCuts(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	const n = 300
	b.put(q, ids(n)...)
	px := newProxy(t, b.url)
	var mu sync.Mutex
	acked := map[string]bool{}
	step := make(chan struct{})
	r := startConsumer(t, ConsumerConfig{
		Config: Config{URLs: []string{px.url}}, Queue: q, Consumers: 3, Prefetch: 10,
		Handle: func(_ context.Context, d *Delivery) {
			<-step
			if err := d.Ack(); err != nil {
				assert.ErrorIs(t, err, ErrStaleSession)
				return
			}
			mu.Lock()
			acked[d.MessageID] = true
			mu.Unlock()
		},
	}, patience)
	for range 3 {
		r.states.await(t, StateConnected)
		for range 20 {
			step <- struct{}{}
		}
		px.cut()
		r.states.await(t, StateLost)
	}
	close(step)
	eventually(t, "all are handled", func() bool { mu.Lock(); defer mu.Unlock(); return len(acked) == n })
	r.stop()
	require.NoError(t, <-r.done)
	require.Empty(t, b.leftover(q))
}

func TestConsumerIsNotReadyWithoutABroker(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	px := newProxy(t, b.url)
	r := startConsumer(t, ConsumerConfig{
		Config: Config{URLs: []string{px.url}}, Queue: q, Consumers: 2, Prefetch: 1,
		Handle: func(_ context.Context, d *Delivery) { assert.NoError(t, d.Ack()) },
	}, time.Second)
	r.states.await(t, StateConnected)
	px.refuseNew(true)
	px.cut()
	r.states.await(t, StateLost)
	r.states.await(t, StateWaiting)
	require.False(t, r.Connected())
	px.refuseNew(false)
	r.states.await(t, StateConnected)
	require.True(t, r.Connected())
}

// A deleted queue makes the broker cancel the consumers; once it is back they
// consume again, on the same connection.
func TestCancelledConsumersComeBack(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	px := newProxy(t, b.url)
	col := newCollector()
	r := startConsumer(t, ConsumerConfig{
		Config: Config{URLs: []string{px.url}}, Queue: q, Consumers: 2, Prefetch: 5,
		Handle: func(_ context.Context, d *Delivery) { assert.NoError(t, d.Ack()); col.c <- d },
	}, time.Second)
	r.states.await(t, StateConnected)
	b.deleteQueue(q)
	r.states.await(t, StateLost)
	require.False(t, r.Connected())
	_, err := b.channel().QueueDeclare(q, true, false, false, false, map[string]any{"x-queue-type": "quorum"})
	require.NoError(t, err)
	r.states.await(t, StateConnected)
	b.put(q, "again")
	require.Equal(t, "again", col.next(t).MessageID)
	require.EqualValues(t, 1, px.opened.Load())
}

func TestStopGivesUnseenDeliveriesBackAtOnce(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	b.put(q, ids(10)...)
	col := newCollector()
	gate := make(chan struct{})
	r := startConsumer(t, ConsumerConfig{
		Config: Config{URLs: []string{b.url}}, Queue: q, Consumers: 1, Prefetch: 10,
		Handle: func(ctx context.Context, d *Delivery) {
			col.c <- d
			<-gate
			assert.NoError(t, ctx.Err(), "the drain is not over")
			assert.NoError(t, d.Ack(), "the session is kept for it")
		},
	}, patience)
	d := col.next(t)
	eventually(t, "all ten are out", func() bool { return b.ready(q) == 0 })
	r.stop()
	eventually(t, "nine are back while the handler still runs", func() bool { return b.ready(q) == 9 })
	close(gate)
	require.NoError(t, <-r.done)
	for _, left := range b.leftover(q) {
		require.NotEqual(t, d.MessageID, left.MessageId)
	}
}

func TestDrainEndsWithACancelledContext(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	b.put(q, "m")
	col := newCollector()
	cause := make(chan error, 1)
	r := startConsumer(t, ConsumerConfig{
		Config: Config{URLs: []string{b.url}}, Queue: q, Consumers: 1, Prefetch: 1,
		Handle: func(ctx context.Context, d *Delivery) { col.c <- d; <-ctx.Done(); cause <- ctx.Err() },
	}, 50*time.Millisecond)
	col.next(t)
	r.stop()
	require.NoError(t, <-r.done)
	require.ErrorIs(t, <-cause, context.Canceled)
	require.Len(t, b.leftover(q), 1, "not acked, so it comes again")
}

func TestDrainTellsOfHandlersThatDoNotReturn(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	b.put(q, "m")
	col := newCollector()
	gate := make(chan struct{})
	defer close(gate)
	r := startConsumer(t, ConsumerConfig{
		Config: Config{URLs: []string{b.url}}, Queue: q, Consumers: 1, Prefetch: 1,
		Handle: func(_ context.Context, d *Delivery) { col.c <- d; <-gate },
	}, 0)
	d := col.next(t)
	r.stop()
	require.ErrorContains(t, <-r.done, "handlers still running")
	require.ErrorIs(t, d.Ack(), ErrStaleSession)
}

// TRAP-M6-11: a branch that never acks.
func TestUnackedDeliveryComesAgainAfterTheGrace(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	b.put(q, "m")
	px := newProxy(t, b.url)
	col := newCollector()
	var calls atomic.Int64
	r := startConsumer(t, ConsumerConfig{
		Config: Config{URLs: []string{px.url}}, Queue: q, Consumers: 2, Prefetch: 1, UnackedGrace: 200 * time.Millisecond,
		Handle: func(_ context.Context, d *Delivery) {
			if calls.Add(1) > 1 {
				assert.NoError(t, d.Ack())
			}
			col.c <- d
		},
	}, time.Second)
	began := time.Now()
	require.False(t, col.next(t).Redelivered)
	second := col.next(t)
	require.GreaterOrEqual(t, time.Since(began), 200*time.Millisecond)
	require.True(t, second.Redelivered)
	require.EqualValues(t, 1, second.DeliveryCount)
	r.stop()
	require.NoError(t, <-r.done)
	require.Empty(t, b.leftover(q))
	require.EqualValues(t, 1, px.opened.Load(), "the other consumer's connection was left alone")
}

func TestConsumerRunsItsSetup(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := name("test.setup")
	t.Cleanup(func() { b.deleteQueue(q) })
	r := startConsumer(t, ConsumerConfig{
		Config: Config{URLs: []string{b.url}, Setup: func(_ context.Context, ch Declarer) error {
			_, err := ch.QueueDeclare(q, true, false, false, false, map[string]any{"x-queue-type": "quorum"})
			return err
		}},
		Queue: q, Consumers: 1, Prefetch: 1,
		Handle: func(context.Context, *Delivery) {},
	}, time.Second)
	r.states.await(t, StateConnected)
}

func TestRunRefusesAnUnusableConfiguration(t *testing.T) {
	t.Parallel()
	ok := ConsumerConfig{
		Config: Config{URLs: []string{"amqp://localhost"}}, Queue: "q", Consumers: 1, Prefetch: 1,
		Handle: func(context.Context, *Delivery) {},
	}
	for what, tc := range map[string]struct {
		change func(*ConsumerConfig)
		want   string
	}{
		"no queue":        {func(c *ConsumerConfig) { c.Queue = "" }, "no queue"},
		"no consumers":    {func(c *ConsumerConfig) { c.Consumers = 0 }, "0 consumers"},
		"no prefetch":     {func(c *ConsumerConfig) { c.Prefetch = 0 }, "prefetch 0"},
		"more in work":    {func(c *ConsumerConfig) { c.Parallel = 2 }, "2 parallel handlers"},
		"no handler":      {func(c *ConsumerConfig) { c.Handle = nil }, "no handler"},
		"no URL":          {func(c *ConsumerConfig) { c.URLs = nil }, "no URL"},
		"not an AMQP URL": {func(c *ConsumerConfig) { c.URLs = []string{"http://u:secret@h"} }, "URL 1 of 1"},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			cfg := ok
			tc.change(&cfg)
			err := NewConsumer(cfg).Run(t.Context(), 0)
			require.ErrorContains(t, err, tc.want)
			require.NotContains(t, err.Error(), "secret")
		})
	}
}

func TestDialTriesEachNode(t *testing.T) {
	t.Parallel()
	b := connect(t)
	gone := newProxy(t, b.url)
	gone.refuseNew(true)
	for range 5 { // whichever comes first
		d, err := newDialer(Config{URLs: []string{gone.url, b.url}, Heartbeat: time.Second}.withDefaults())
		require.NoError(t, err)
		l, err := d.dial(t.Context())
		require.NoError(t, err)
		l.close()
	}
	d, err := newDialer(Config{URLs: []string{"amqp://user:secret@127.0.0.1:1/"}}.withDefaults())
	require.NoError(t, err)
	_, err = d.dial(t.Context())
	require.ErrorContains(t, err, "127.0.0.1:1")
	require.NotContains(t, err.Error(), "secret")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = d.dial(ctx)
	require.ErrorIs(t, err, context.Canceled)

	silent := newProxy(t, b.url)
	silent.hold() // accepts, and says nothing
	d, err = newDialer(Config{URLs: []string{silent.url}}.withDefaults())
	require.NoError(t, err)
	ctx, cancel = context.WithCancel(t.Context())
	defer cancel()
	time.AfterFunc(50*time.Millisecond, cancel)
	began := time.Now()
	_, err = d.dial(ctx)
	require.ErrorIs(t, err, context.Canceled)
	require.Less(t, time.Since(began), handshakeTimeout)
}

func TestBackoffGrowsToItsCapAndIsJittered(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // wait returns at once; the growth is what counts
	var p backoff
	for want := backoffMin; want < backoffMax; want *= 2 {
		p.wait(ctx)
		require.Equal(t, want, p.d)
	}
	p.wait(ctx)
	p.wait(ctx)
	require.Equal(t, backoffMax, p.d)
	p.reset()
	p.wait(ctx)
	require.Equal(t, backoffMin, p.d)
}

func TestStatesTellOnlyChanges(t *testing.T) {
	t.Parallel()
	l := newStateLog()
	cfg := Config{OnState: l.on}.withDefaults()
	s := &states{cfg: cfg}
	s.set(StateWaiting, errors.New("a"))
	s.set(StateWaiting, errors.New("a"))
	s.set(StateWaiting, errors.New("b"))
	s.set(StateConnected, nil)
	s.set(StateConnected, nil)
	require.Equal(t, []State{StateWaiting, StateWaiting, StateConnected}, l.all())
}
