package amqp

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func messages(exchange, key string, n int) []Message {
	out := make([]Message, n)
	for i := range out {
		out[i] = Message{Exchange: exchange, RoutingKey: key, ID: fmt.Sprint("m", i), Headers: map[string]any{"x-attempt": int64(i)}, Body: []byte(`{}`)}
	}
	return out
}

func TestPublishConfirmsInOrder(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	p, _ := startPublisher(t, Config{URLs: []string{b.url}})

	const n = window + 500 // more than fits into the window
	for i, err := range p.Publish(t.Context(), messages("", q, n)) {
		require.NoError(t, err, "message %d", i)
	}

	got := b.take(q)
	require.Len(t, got, n)
	for i, d := range got {
		require.Equal(t, fmt.Sprint("m", i), d.MessageId)
		require.Equal(t, uint8(amqp091.Persistent), d.DeliveryMode)
		require.Equal(t, int64(i), d.Headers["x-attempt"])
	}
}

func TestPublishUnroutable(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	p, _ := startPublisher(t, Config{URLs: []string{b.url}})

	// The same message id everywhere: a return must still find its message.
	var msgs []Message
	for i := range 1000 {
		m := Message{RoutingKey: q, ID: "same", Body: []byte("x")}
		if i%3 == 0 {
			m.RoutingKey = "no.such.queue"
		}
		msgs = append(msgs, m)
	}
	for i, err := range p.Publish(t.Context(), msgs) {
		if i%3 == 0 {
			require.ErrorIs(t, err, ErrUnroutable, "message %d", i)
			require.ErrorContains(t, err, "NO_ROUTE")
		} else {
			require.NoError(t, err, "message %d", i)
		}
	}
	require.Len(t, b.take(q), 666)
}

func TestPublishRefusedByFullQueue(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(amqp091.Table{"x-max-length": int64(1), "x-overflow": "reject-publish"})
	p, _ := startPublisher(t, Config{URLs: []string{b.url}})

	// The limit is soft by a few messages; in the end the queue refuses.
	eventually(t, "the full queue refuses", func() bool {
		return errors.Is(p.Publish(t.Context(), messages("", q, 1))[0], ErrRefused)
	})
}

// A channel that has asked a dying leader refuses for ever; here a full queue
// stands for it. The publisher asks over another channel, and goes on where the
// queue takes messages again.
func TestRefusalsThatLastEndTheSession(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(amqp091.Table{"x-max-length": int64(1), "x-overflow": "reject-publish"})
	p, st := startPublisher(t, Config{URLs: []string{b.url}})
	st.await(t, StateConnected)

	eventually(t, "another session", func() bool {
		_ = p.Publish(t.Context(), messages("", q, 1))
		return slices.Contains(st.all(), StateLost)
	})
	b.take(q)
	eventually(t, "the emptied queue takes a message", func() bool {
		return p.Publish(t.Context(), messages("", q, 1))[0] == nil
	})
}

// A nack is told from a lost confirm, and a header that cannot be encoded
// spoils its own message only.
func TestPublishBadHeaderSpoilsOnlyItsMessage(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	p, st := startPublisher(t, Config{URLs: []string{b.url}})

	msgs := messages("", q, 3)
	msgs[1].Headers["bad"] = struct{}{}
	errs := p.Publish(t.Context(), msgs)
	require.NoError(t, errs[0])
	require.ErrorIs(t, errs[1], ErrNotSent)
	require.NoError(t, errs[2])
	require.Equal(t, []State{StateConnected}, st.all())
	require.Len(t, b.take(q), 2)
}

// brokers.md: of 2,000 publishes on a cut link 576 were stored and reported
// false. Here the broker's answers are held back, so that every message is in
// doubt, and then the link is cut.
func TestCutLinkLeavesPublishesUnknownNotRefused(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	px := newProxy(t, b.url)
	p, st := startPublisher(t, Config{URLs: []string{px.url}})
	st.await(t, StateConnected)
	require.NoError(t, p.Publish(t.Context(), messages("", q, 1))[0])

	px.hold()
	const n = 500
	result := make(chan []error)
	go func() { result <- p.Publish(t.Context(), messages("", q, n)) }()
	eventually(t, "the broker has stored them", func() bool { return b.ready(q) == n+1 })
	px.cut()
	px.release()

	for i, err := range <-result {
		require.ErrorIs(t, err, ErrUnconfirmed, "message %d", i)
		require.NotErrorIs(t, err, ErrRefused)
		require.ErrorContains(t, err, "closed")
	}
	st.await(t, StateLost)
	st.await(t, StateConnected)
	require.NoError(t, p.Publish(t.Context(), messages("", q, 1))[0], "the next session works")
	require.Len(t, b.take(q), n+2, "nothing that was written is written again")
}

// What a lost session left unwritten goes out over the next one, within the same
// call; nothing is stored twice.
func TestPublishGoesOnOverTheNextSession(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	px := newProxy(t, b.url)
	p, st := startPublisher(t, Config{URLs: []string{px.url}})
	st.await(t, StateConnected)

	px.hold()
	const n = 3 * window // two thirds cannot be written before a confirm comes
	result := make(chan []error)
	go func() { result <- p.Publish(t.Context(), messages("", q, n)) }()
	eventually(t, "the window is full", func() bool { return b.ready(q) == window })
	px.cut()
	px.release()

	unknown := 0
	for i, err := range <-result {
		if err != nil {
			require.ErrorIs(t, err, ErrUnconfirmed, "message %d", i)
			unknown++
		}
	}
	require.Equal(t, window, unknown)
	require.Len(t, b.take(q), n)
}

func TestConfirmTimeoutEndsOnlyTheWait(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	px := newProxy(t, b.url)
	p, st := startPublisher(t, Config{URLs: []string{px.url}, ConfirmTimeout: 300 * time.Millisecond})
	st.await(t, StateConnected)

	px.hold()
	for _, err := range p.Publish(t.Context(), messages("", q, 3)) {
		require.ErrorIs(t, err, ErrUnconfirmed)
		require.ErrorContains(t, err, "no confirm within 300ms")
	}
	px.release()
	// The late confirms free their places; unroutable ones leave nothing behind.
	require.NoError(t, p.Publish(t.Context(), messages("", q, 1))[0])
	require.Equal(t, []State{StateConnected}, st.all(), "the session lives on")
	require.EqualValues(t, 1, px.opened.Load())
	eventually(t, "the window is empty", func() bool {
		s, err := p.session(t.Context())
		require.NoError(t, err)
		s.reap()
		return len(s.slots) == 0
	})
}

func TestPublishContextEndsWhileUnconfirmed(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	px := newProxy(t, b.url)
	p, st := startPublisher(t, Config{URLs: []string{px.url}})
	st.await(t, StateConnected)
	px.hold()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	err := p.Publish(ctx, messages("", q, 1))[0]
	require.ErrorIs(t, err, ErrUnconfirmed)
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

// Half a window of publishes that nobody waits for any more is a session that
// confirms nothing: it is given up.
func TestSessionThatConfirmsNothingIsGivenUp(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	px := newProxy(t, b.url)
	p, st := startPublisher(t, Config{URLs: []string{px.url}, ConfirmTimeout: 300 * time.Millisecond})
	st.await(t, StateConnected)
	px.hold()
	for _, err := range p.Publish(t.Context(), messages("", q, window/2)) {
		require.ErrorIs(t, err, ErrUnconfirmed)
	}
	st.await(t, StateLost)
	px.release()
	st.await(t, StateConnected)
	require.NoError(t, p.Publish(t.Context(), messages("", q, 1))[0])
}

func TestPublishWaitsForABroker(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	px := newProxy(t, b.url)
	px.refuseNew(true)
	p, st := startPublisher(t, Config{URLs: []string{px.url}})
	st.await(t, StateWaiting)

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err := p.Publish(ctx, messages("", q, 1))[0]
	require.ErrorIs(t, err, ErrNotSent)
	require.ErrorIs(t, err, context.DeadlineExceeded)

	result := make(chan []error)
	go func() { result <- p.Publish(t.Context(), messages("", q, 1)) }()
	px.refuseNew(false)
	require.NoError(t, (<-result)[0])
}

func TestPublishAfterTheEnd(t *testing.T) {
	t.Parallel()
	b := connect(t)
	p := NewPublisher(Config{URLs: []string{b.url}})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, p.Run(ctx))
	require.ErrorIs(t, p.Publish(t.Context(), messages("", "q", 1))[0], ErrNotSent)
	require.False(t, p.Connected())
}

// The broker closes the channel of a publish to an exchange that is not there.
func TestMissingExchangeCostsTheSessionNotTheProcess(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	p, st := startPublisher(t, Config{URLs: []string{b.url}})
	err := p.Publish(t.Context(), messages("no.such.exchange", q, 1))[0]
	require.ErrorIs(t, err, ErrUnconfirmed)
	require.ErrorContains(t, err, "no exchange 'no.such.exchange'")
	st.await(t, StateLost)
	require.NoError(t, p.Publish(t.Context(), messages("", q, 1))[0])
}

func TestBlockedConnectionHoldsPublishersBack(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	px := newProxy(t, b.url)
	p, st := startPublisher(t, Config{URLs: []string{px.url}})
	st.await(t, StateConnected)

	px.inject(method(10, 60, append([]byte{6}, "memory"...)...)) // connection.blocked
	st.await(t, StateBlocked)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, p.Publish(ctx, messages("", q, 1))[0], ErrNotSent)
	require.Zero(t, b.ready(q))

	px.inject(method(10, 61)) // connection.unblocked
	st.await(t, StateUnblocked)
	require.NoError(t, p.Publish(t.Context(), messages("", q, 1))[0])
}

func TestConcurrentPublishersKeepTheirOrder(t *testing.T) {
	t.Parallel()
	b := connect(t)
	p, _ := startPublisher(t, Config{URLs: []string{b.url}})
	var wg sync.WaitGroup
	for range 8 {
		q := b.queue(nil)
		wg.Go(func() {
			for range 5 {
				for _, err := range p.Publish(t.Context(), messages("", q, 300)) {
					assert.NoError(t, err)
				}
			}
		})
		t.Cleanup(func() {
			got := b.take(q)
			require.Len(t, got, 1500)
			for i, d := range got {
				require.Equal(t, fmt.Sprint("m", i%300), d.MessageId)
			}
		})
	}
	wg.Wait()
}

func TestSetupErrorIsToldAndTriedAgain(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	var mu sync.Mutex
	calls := 0
	p, st := startPublisher(t, Config{URLs: []string{b.url}, Setup: func(context.Context, Declarer) error {
		mu.Lock()
		defer mu.Unlock()
		calls++
		if calls == 1 {
			return errors.New("not yet")
		}
		return nil
	}})
	st.await(t, StateWaiting)
	require.ErrorContains(t, st.errs[0], "setup: not yet")
	require.NoError(t, p.Publish(t.Context(), messages("", q, 1))[0])
}

func TestOwnHeadersDropsWhatTheBrokerWrote(t *testing.T) {
	t.Parallel()
	got := ownHeaders(map[string]any{
		"x-attempt": int64(2), "x-death": "d", "x-first-death-queue": "q", "x-last-death-reason": "r", "x-delivery-count": int64(1),
	})
	require.Equal(t, amqp091.Table{"x-attempt": int64(2)}, got)
}

// A link that goes silent without closing is given up after three heartbeats.
func TestSilentLinkIsGivenUp(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	px := newProxy(t, b.url)
	p, st := startPublisher(t, Config{URLs: []string{px.url}, Heartbeat: time.Second})
	st.await(t, StateConnected)
	px.hold()
	err := p.Publish(t.Context(), messages("", q, 1))[0] // long before the confirm timeout
	require.ErrorIs(t, err, ErrUnconfirmed)
	require.ErrorContains(t, err, "connection closed")
	st.await(t, StateLost)
	px.release()
	st.await(t, StateConnected)
}

// However the link breaks, the answers add up: what is confirmed is stored, what
// was not sent is not, and nothing is stored twice.
func TestAnswersAddUpWhileLinksBreak(t *testing.T) {
	t.Parallel()
	b := connect(t)
	q := b.queue(nil)
	px := newProxy(t, b.url)
	p, st := startPublisher(t, Config{URLs: []string{px.url}})
	st.await(t, StateConnected)

	const callers, rounds, batch = 4, 10, 100
	var mu sync.Mutex
	answers := make(map[string]error)
	var wg sync.WaitGroup
	for c := range callers {
		wg.Go(func() {
			for r := range rounds {
				msgs := messages("", q, batch)
				for i := range msgs {
					msgs[i].ID = fmt.Sprintf("%d.%d.%d", c, r, i)
				}
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				errs := p.Publish(ctx, msgs)
				cancel()
				mu.Lock()
				for i, err := range errs {
					answers[msgs[i].ID] = err
				}
				if r%3 == c%3 {
					px.cut()
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	require.Len(t, answers, callers*rounds*batch)

	stored := make(map[string]int)
	for _, d := range b.take(q) {
		stored[d.MessageId]++
	}
	unknown := 0
	for id, err := range answers {
		require.LessOrEqual(t, stored[id], 1, "%s: written twice", id)
		switch {
		case err == nil:
			require.Equal(t, 1, stored[id], "%s: confirmed and not there", id)
		case errors.Is(err, ErrNotSent):
			require.Zero(t, stored[id], "%s: said not to be sent", id)
		default:
			require.ErrorIs(t, err, ErrUnconfirmed)
			unknown++
		}
	}
	t.Logf("%d answers, %d unknown, over %d links", len(answers), unknown, px.opened.Load())
}
