package amqp

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// fakeChannel is a channel as RabbitMQ keeps it: deliveries in order, and an ack of a
// tag that is not unacked ends the channel (406, "unknown delivery tag").
type fakeChannel struct {
	unacked []uint64
	last    uint64
	frames  int
}

func (b *fakeChannel) deliver() uint64 {
	b.last++
	b.unacked = append(b.unacked, b.last)
	return b.last
}

func (b *fakeChannel) ack(tag uint64, multiple bool) error {
	b.frames++
	at := slices.Index(b.unacked, tag)
	if at < 0 {
		return errors.New("unknown delivery tag")
	}
	from := at
	if multiple {
		from = 0
	}
	b.unacked = slices.Delete(b.unacked, from, at+1)
	return nil
}

// Whatever the order in which handlers end, and whenever the time is over: the
// broker never hears of a delivery that is in work, nor twice of any, and after
// a flush has heard of all that are settled.
func TestCollectedAcksAreExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := &fakeChannel{}
		prefetch := rapid.IntRange(1, 60).Draw(t, "prefetch")
		parallel := rapid.IntRange(1, prefetch).Draw(t, "parallel")
		a := newAcks(ConsumerConfig{Prefetch: prefetch, Parallel: parallel, AckWithin: time.Hour}, b.ack)
		var inWork []uint64
		settled := map[uint64]bool{}
		t.Repeat(map[string]func(*rapid.T){
			"deliver": func(t *rapid.T) {
				if len(b.unacked) == prefetch || len(inWork) == parallel {
					t.Skip("no place")
				}
				inWork = append(inWork, b.deliver())
			},
			"settle": func(t *rapid.T) {
				if len(inWork) == 0 {
					t.Skip("nothing in work")
				}
				i := rapid.IntRange(0, len(inWork)-1).Draw(t, "which")
				tag := inWork[i]
				inWork = slices.Delete(inWork, i, i+1)
				settled[tag] = true
				require.NoError(t, a.add(tag))
			},
			"the time is over": func(t *rapid.T) {
				require.NoError(t, a.flush())
				require.ElementsMatch(t, inWork, b.unacked, "what the broker still holds is what is in work")
			},
			"": func(t *rapid.T) {
				for _, tag := range inWork {
					require.Contains(t, b.unacked, tag, "a delivery in work was acked")
				}
				held := 0
				for _, tag := range b.unacked {
					if settled[tag] {
						held++
					}
				}
				require.LessOrEqual(t, held, max(0, (prefetch-parallel)/2-1), "acks held back")
			},
		})
	})
}

func TestCollectedAcksAreOneFrame(t *testing.T) {
	b := &fakeChannel{}
	a := newAcks(ConsumerConfig{Prefetch: 50, Parallel: 10, AckWithin: time.Hour}, b.ack)
	for range 100 {
		b.deliver()
	}
	for tag := uint64(1); tag <= 100; tag++ {
		require.NoError(t, a.add(tag))
	}
	require.Equal(t, 5, b.frames, "20 at a time")
	require.Empty(t, b.unacked)
}

// One slow mail must not keep the prefetch window taken by those settled behind
// it.
func TestAcksBehindASlowDeliveryAreWritten(t *testing.T) {
	b := &fakeChannel{}
	a := newAcks(ConsumerConfig{Prefetch: 8, Parallel: 2, AckWithin: time.Hour}, b.ack)
	slow := b.deliver()
	for range 3 {
		require.NoError(t, a.add(b.deliver()))
	}
	require.Equal(t, []uint64{slow}, b.unacked)
	require.NoError(t, a.add(slow))
	require.NoError(t, a.flush())
	require.Empty(t, b.unacked)
	require.NoError(t, a.add(b.deliver()))
	require.NoError(t, a.flush(), "the floor has passed the tags that were acked alone")
	frames := b.frames
	for range 3 {
		require.NoError(t, a.add(b.deliver()))
	}
	require.Equal(t, frames+1, b.frames, "one slow delivery does not end the collecting")
	require.Empty(t, a.alone, "nothing is remembered for ever")
}

func TestWithoutATimeAcksAreWrittenAtOnce(t *testing.T) {
	b := &fakeChannel{}
	a := newAcks(ConsumerConfig{Prefetch: 50, Parallel: 1}, b.ack)
	require.NoError(t, a.add(b.deliver()))
	require.Empty(t, b.unacked)
}

func TestCollectedAcksAreWrittenWhenTheTimeIsOver(t *testing.T) {
	written := make(chan uint64, 1)
	a := newAcks(ConsumerConfig{Prefetch: 50, Parallel: 1, AckWithin: time.Millisecond}, func(tag uint64, _ bool) error {
		written <- tag
		return nil
	})
	require.NoError(t, a.add(1))
	select {
	case tag := <-written:
		require.EqualValues(t, 1, tag)
	case <-time.After(patience):
		t.Fatal("the ack was not written")
	}
}

// After a write has failed the session is over for every later ack.
func TestAFailedAckEndsTheSession(t *testing.T) {
	broken := errors.New("connection reset")
	a := newAcks(ConsumerConfig{Prefetch: 50, Parallel: 1, AckWithin: time.Hour}, func(uint64, bool) error { return broken })
	require.NoError(t, a.add(1), "collected")
	err := a.flush()
	require.ErrorIs(t, err, ErrStaleSession)
	require.ErrorIs(t, err, broken)
	require.ErrorIs(t, a.add(2), ErrStaleSession)
}
