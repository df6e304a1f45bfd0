package dlq

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/google/uuid"

	"mailproof/system/contract"
	"mailproof/system/delivery"
	"mailproof/system/failpoint"
	"mailproof/system/notify/doorbell"
	"mailproof/system/notify/logging"
)

// Crash points: doorbell rung → letter removed.
const (
	fpLetterRung    = "letters.after-ring"
	fpLetterRemoved = "letters.after-remove"
)

// Letter is one message of the dead-letter queue: a pointer to a row.
type Letter struct {
	Body []byte
	// Death is why the broker itself put it there ("delivery_limit"), "" for a
	// letter that a worker wrote.
	Death string
	// Remove acks it. One whose ack is lost comes back, and is judged again.
	Remove func() error
}

// Queue opens the dead-letter queue.
type Queue interface {
	// Open begins a pass over what is in the queue now.
	Open(ctx context.Context) (Pass, error)
	// Count is how many letters wait.
	Count(ctx context.Context) (int, error)
}

// Pass gets letters, each once, and holds all of them until Close: only then
// does the broker get back those that were not removed. A process that dies
// closes it too. So no letter is copied, and none is lost. A held letter is a
// pointer of about a kilobyte.
type Pass interface {
	Next(ctx context.Context) (l Letter, ok bool, err error)
	Close() error
}

// Rows reads rows and the discards of people.
type Rows interface {
	ByIDs(ctx context.Context, ids []uuid.UUID) ([]delivery.Row, error)
	CountDead(ctx context.Context) (int, error)
}

// Discards says at which version a row was discarded.
type Discards interface {
	Discarded(ctx context.Context, ids []uuid.UUID) (map[uuid.UUID]int64, error)
}

// LetterCounter counts letters whose mail was alive, by why they were there.
type LetterCounter interface{ LetterRevived(lane, cause string) }

// Tally is what a pass found, by letters.
type Tally struct {
	Removed     int `json:"removed"`     // their row needs no letter any more
	Republished int `json:"republished"` // their row was alive: a doorbell was rung in their place
	Kept        int `json:"kept"`        // their row is DEAD
	Unreadable  int `json:"unreadable"`  // no row: kept for people
}

// Cleaner keeps the dead-letter queue true to the table: a letter stays while its
// row is DEAD, one letter for each row.
//
//   - A row that is alive gets a doorbell, confirmed, and then its letter is
//     removed: the broker gave the message up at its delivery limit while the
//     mail was still to be sent, or a replay died before it rang.
//   - A letter of a row that is settled otherwise, or that a person discarded,
//     is removed, and so is a second letter of the same row.
//   - A letter without a row stays.
//
// The row is read after its letter was got: a row that dies again meanwhile gets
// a letter of its own, behind this one.
type Cleaner struct {
	Queue    Queue
	Rows     Rows
	Discards Discards
	Ring     doorbell.Ringer
	Count    LetterCounter
	Log      *slog.Logger
}

// chunk is how many letters are judged with one question to the database.
const chunk = 100

// Tidy makes one pass. rung are rows whose doorbell the caller has just rung:
// they need none from here.
func (c Cleaner) Tidy(ctx context.Context, rung map[uuid.UUID]bool) (tally Tally, err error) {
	pass, err := c.Queue.Open(ctx)
	if err != nil {
		return tally, err
	}
	defer func() {
		if closeErr := pass.Close(); err == nil {
			err = closeErr
		}
	}()
	kept := map[uuid.UUID]bool{}
	for {
		letters, err := next(ctx, pass)
		if err != nil || len(letters) == 0 {
			return tally, err
		}
		if err := c.judge(ctx, letters, rung, kept, &tally); err != nil {
			return tally, err
		}
	}
}

func next(ctx context.Context, pass Pass) ([]Letter, error) {
	var out []Letter
	for len(out) < chunk {
		l, ok, err := pass.Next(ctx)
		if err != nil {
			return nil, err
		}
		if !ok {
			break
		}
		out = append(out, l)
	}
	return out, nil
}

func (c Cleaner) judge(ctx context.Context, letters []Letter, rung, kept map[uuid.UUID]bool, tally *Tally) error {
	ids := make([]uuid.UUID, len(letters))
	for i, l := range letters {
		ids[i] = idOf(l.Body)
	}
	found, err := c.Rows.ByIDs(ctx, ids)
	if err != nil {
		return err
	}
	rows := make(map[uuid.UUID]delivery.Row, len(found))
	for _, r := range found {
		rows[r.ID] = r
	}
	discarded, err := c.Discards.Discarded(ctx, ids)
	if err != nil {
		return err
	}
	for i, l := range letters {
		row, ok := rows[ids[i]]
		if !ok {
			tally.Unreadable++
			continue
		}
		discardedAt, gone := discarded[row.ID]
		switch {
		case row.Status == delivery.Dead && !kept[row.ID] && (!gone || discardedAt != row.Version):
			kept[row.ID] = true
			tally.Kept++
			continue
		case !row.Status.Settled() && !rung[row.ID]:
			if err := c.revive(ctx, l, row); err != nil {
				return err
			}
			tally.Republished++
		default:
			tally.Removed++
		}
		if err := l.Remove(); err != nil {
			return fmt.Errorf("remove the letter of %s: %w", row.DedupeKey, err)
		}
		failpoint.At(fpLetterRemoved)
	}
	return nil
}

// idOf is the nil id for a body that cannot be read, which no row has.
func idOf(body []byte) uuid.UUID {
	m, err := contract.DecodeMessage(body)
	if err != nil {
		return uuid.Nil
	}
	id, err := uuid.Parse(m.NotificationID)
	if err != nil {
		return uuid.Nil
	}
	return id
}

func (c Cleaner) revive(ctx context.Context, l Letter, row delivery.Row) error {
	if err := c.Ring.Ring(ctx, doorbell.Main(doorbell.Of(row))); err != nil {
		return err
	}
	failpoint.At(fpLetterRung)
	cause := l.Death
	if cause == "" {
		cause = "replayed"
	}
	c.Count.LetterRevived(row.Type.Lane(), cause)
	c.Log.Warn("a dead letter's mail is alive: its doorbell was rung again", logging.DedupeKey, row.DedupeKey,
		logging.Attempts, row.Attempts, "cause", cause, "state", string(row.Status))
	return nil
}

// Seen is what a round of [Cleaner.Watch] left behind.
type Seen struct {
	Letters int // in the queue
	Dead    int // rows
}

// Unseen makes the first round look at every letter.
func Unseen() Seen { return Seen{Letters: -1, Dead: -1} }

// Watch tidies whenever the number of letters or of DEAD rows is another than the
// last round left behind. The rows count too: a replay that died before it came
// to its letter, and whose mail was sent all the same, leaves the queue as it
// was. Nothing changed costs one question to the broker and one to the database.
func (c Cleaner) Watch(ctx context.Context, seen Seen) (Seen, error) {
	// Rows first: one that dies after this question is noticed by the next round.
	dead, err := c.Rows.CountDead(ctx)
	if err != nil {
		return seen, err
	}
	n, err := c.Queue.Count(ctx)
	if err != nil || seen == (Seen{Letters: n, Dead: dead}) {
		return seen, err
	}
	t, err := c.Tidy(ctx, nil)
	if err != nil {
		return Unseen(), err
	}
	return Seen{Letters: t.Kept + t.Unreadable, Dead: dead}, nil
}
