package dlq

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	amqp091 "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"mailproof/system/amqp"
	"mailproof/system/contract"
	"mailproof/system/delivery"
	"mailproof/system/notify/doorbell"
	"mailproof/system/notify/patience"
)

// desk is a queue and a table in memory.
type desk struct {
	letters   []Letter // in the queue
	rows      map[uuid.UUID]delivery.Row
	discarded map[uuid.UUID]int64
	removed   []int // indexes of letters
	rung      []uuid.UUID
	revived   map[string]int
	failRing  bool
	passes    int
	closed    int
	at        int
}

func (d *desk) Open(context.Context) (Pass, error) { d.passes++; d.at = 0; return d, nil }
func (d *desk) Count(context.Context) (int, error) { return len(d.letters), nil }
func (d *desk) Close() error                       { d.closed++; return nil }

func (d *desk) Next(context.Context) (Letter, bool, error) {
	if d.at == len(d.letters) {
		return Letter{}, false, nil
	}
	i := d.at
	d.at++
	l := d.letters[i]
	l.Remove = func() error { d.removed = append(d.removed, i); return nil }
	return l, true, nil
}

func (d *desk) CountDead(context.Context) (int, error) {
	n := 0
	for _, r := range d.rows {
		if r.Status == delivery.Dead {
			n++
		}
	}
	return n, nil
}

func (d *desk) ByIDs(_ context.Context, ids []uuid.UUID) ([]delivery.Row, error) {
	var out []delivery.Row
	for id, r := range d.rows {
		if slices.Contains(ids, id) {
			out = append(out, r)
		}
	}
	return out, nil
}

func (d *desk) Discarded(context.Context, []uuid.UUID) (map[uuid.UUID]int64, error) {
	return d.discarded, nil
}

func (d *desk) Publish(_ context.Context, msgs []amqp.Message) []error {
	out := make([]error, len(msgs))
	for i, m := range msgs {
		if d.failRing {
			out[i] = errors.New("away")
			continue
		}
		d.rung = append(d.rung, idOf(m.Body))
	}
	return out
}

func (d *desk) LetterRevived(_, cause string) { d.revived[cause]++ }
func (d *desk) Wait(string)                   {}

func newDesk() *desk {
	return &desk{rows: map[uuid.UUID]delivery.Row{}, discarded: map[uuid.UUID]int64{}, revived: map[string]int{}}
}

func (d *desk) cleaner() Cleaner {
	log := slog.New(slog.DiscardHandler)
	quick := patience.Backoff{First: time.Microsecond, Max: time.Microsecond}
	return Cleaner{Queue: d, Rows: d, Discards: d, Count: d, Log: log, Ring: doorbell.Ringer{Publisher: d, Backoff: quick, Log: log, Count: d}}
}

// letter puts a letter of a row in a state into the queue.
func (d *desk) letter(status delivery.Status, death string) uuid.UUID {
	id := uuid.New()
	d.rows[id] = delivery.Row{ID: id, Status: status, Version: 3, Type: contract.TicketConfirmation, DedupeKey: id.String()}
	d.again(id, death)
	return id
}

func (d *desk) again(id uuid.UUID, death string) {
	body, _ := json.Marshal(contract.Message{NotificationID: id.String()})
	d.letters = append(d.letters, Letter{Body: body, Death: death})
}

func TestALetterStaysWhileItsRowIsDead(t *testing.T) {
	t.Parallel()
	d := newDesk()
	dead := d.letter(delivery.Dead, "")
	d.letter(delivery.Sent, "")
	d.letter(delivery.Cancelled, "delivery_limit")
	live := d.letter(delivery.Failed, "delivery_limit")
	replayed := d.letter(delivery.Pending, "")
	d.again(dead, "") // a second letter of the same death
	d.again(uuid.New(), "")
	d.letters = append(d.letters, Letter{Body: []byte("not a message")})
	given := d.letter(delivery.Dead, "")
	d.discarded[given] = 3
	diedAgain := d.letter(delivery.Dead, "")
	d.discarded[diedAgain] = 1 // of an earlier death

	tally, err := d.cleaner().Tidy(t.Context(), nil)
	require.NoError(t, err)
	require.Equal(t, Tally{Removed: 4, Republished: 2, Kept: 2, Unreadable: 2}, tally)
	require.Equal(t, []int{1, 2, 3, 4, 5, 8}, d.removed)
	require.Equal(t, []uuid.UUID{live, replayed}, d.rung)
	require.Equal(t, map[string]int{"delivery_limit": 1, "replayed": 1}, d.revived)
	require.Equal(t, 1, d.closed)
}

func TestARowJustRungForIsNotRungAgain(t *testing.T) {
	t.Parallel()
	d := newDesk()
	id := d.letter(delivery.Pending, "")
	tally, err := d.cleaner().Tidy(t.Context(), map[uuid.UUID]bool{id: true})
	require.NoError(t, err)
	require.Equal(t, Tally{Removed: 1}, tally)
	require.Empty(t, d.rung)
}

// The doorbell is confirmed before the letter goes: while RabbitMQ refuses it
// the letter stays, and the pass is closed.
func TestNoLetterGoesBeforeItsDoorbell(t *testing.T) {
	t.Parallel()
	d := newDesk()
	d.letter(delivery.Pending, "")
	d.failRing = true
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := d.cleaner().Tidy(ctx, nil)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Empty(t, d.removed)
	require.Equal(t, 1, d.closed)
}

func TestAnUnchangedQueueIsNotOpened(t *testing.T) {
	t.Parallel()
	d := newDesk()
	d.letter(delivery.Dead, "")
	seen, err := d.cleaner().Watch(t.Context(), Unseen())
	require.NoError(t, err)
	require.Equal(t, Seen{Letters: 1, Dead: 1}, seen)
	seen, err = d.cleaner().Watch(t.Context(), seen)
	require.NoError(t, err)
	require.Equal(t, 1, d.passes)
	d.letter(delivery.Sent, "")
	_, err = d.cleaner().Watch(t.Context(), seen)
	require.NoError(t, err)
	require.Equal(t, 2, d.passes)
}

// A replay died after it had moved the row, and somebody rang for it: the mail is
// SENT, its letter lies in the queue, and the queue is as long as it was.
func TestALetterOfAMailThatWasReplayedIsNoticed(t *testing.T) {
	t.Parallel()
	d := newDesk()
	id := d.letter(delivery.Dead, "")
	seen, err := d.cleaner().Watch(t.Context(), Unseen())
	require.NoError(t, err)
	row := d.rows[id]
	row.Status = delivery.Sent
	d.rows[id] = row
	seen, err = d.cleaner().Watch(t.Context(), seen)
	require.NoError(t, err)
	require.Equal(t, Seen{}, seen)
	require.Equal(t, []int{0}, d.removed)
}

// Whatever letters there are: a DEAD row that had one keeps exactly one, no row
// that waits loses its letter without a doorbell, and no settled one keeps any.
func TestTidyingAnyQueue(t *testing.T) {
	t.Parallel()
	states := []delivery.Status{
		delivery.Pending, delivery.Failed, delivery.Sending, delivery.Sent, delivery.Dead,
		delivery.Unknown, delivery.Cancelled, delivery.Expired,
	}
	rapid.Check(t, func(t *rapid.T) {
		d := newDesk()
		var ids []uuid.UUID
		for range rapid.IntRange(0, 2*chunk+5).Draw(t, "letters") {
			if len(ids) > 0 && rapid.IntRange(0, 3).Draw(t, "again") == 0 {
				d.again(rapid.SampledFrom(ids).Draw(t, "row"), "")
				continue
			}
			ids = append(ids, d.letter(rapid.SampledFrom(states).Draw(t, "state"), ""))
		}
		if _, err := d.cleaner().Tidy(context.Background(), nil); err != nil {
			t.Fatal(err)
		}
		left := map[uuid.UUID]int{}
		for i, l := range d.letters {
			if !slices.Contains(d.removed, i) {
				left[idOf(l.Body)]++
			}
		}
		for id, r := range d.rows {
			want := 0
			if r.Status == delivery.Dead {
				want = 1
			}
			if left[id] != want {
				t.Fatalf("%s row has %d letters left", r.Status, left[id])
			}
			if !r.Status.Settled() && !slices.Contains(d.rung, id) {
				t.Fatalf("%s row lost its letter and got no doorbell", r.Status)
			}
		}
	})
}

func TestDeathIsTheBrokersNewest(t *testing.T) {
	t.Parallel()
	require.Empty(t, death(nil))
	require.Empty(t, death(amqp091.Table{"x-death": "nonsense"}))
	require.Equal(t, "delivery_limit", death(amqp091.Table{"x-death": []any{
		amqp091.Table{"reason": "delivery_limit"}, amqp091.Table{"reason": "expired"},
	}}))
}
