package scenarios

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"mailproof/fakes/script"
	"mailproof/fakes/smtp"
	"mailproof/history"
)

// pipelineStories are the experiments that the running system tells itself.
func pipelineStories() []labStory {
	return []labStory{
		{
			name: "lab-s0", what: "the server keeps the mail and gives no 250; the client tries again",
			want: "2 tries, 1 Message-ID, SENT", tell: tellS0,
		},
		{
			name: "lab-lock", what: "two relays; the one that holds the lock is killed",
			want: "t, f; t after the first is gone", tell: tellLock,
		},
		{
			name: "lab-batch", what: "five outbox rows, the broker refuses the third; then it can be published",
			want: "1 published, 2 published, 3 failed, 4 waits, 5 waits; then 1 2 3 4 5", tell: tellBatch,
		},
		{
			name: "lab-e1", what: "a confirmation's event is delivered once",
			want: "1 row, 1 copy", tell: tellDelivered(0, false), after: rowsAndCopies,
		},
		{
			name: "lab-e2", what: "the same event is delivered again",
			want: "1 row, 1 copy", tell: tellDelivered(4, false), after: rowsAndCopies,
		},
		{
			name: "lab-e3", what: "another event id comes with the same dedupe key",
			want: "1 row, 1 copy", tell: tellDelivered(4, true), after: rowsAndCopies,
		},
		{
			name: "lab-cancel-sending", what: "the cancel comes while the server holds the mail's dot",
			want: "1 copy, SENT", tell: tellHeldCancel(smtp.StageDot, false),
		},
		{
			name: "lab-flag", what: "the cancel comes while the mail is sent, and the server refuses it for now",
			want: "0 copies, CANCELLED", tell: tellHeldCancel(smtp.StageData, true),
		},
		{
			name: "lab-tomb", what: "the cancel's event comes before the confirmation's",
			want: "a tombstone without event id; the confirmation adds 0 rows; 0 copies", tell: tellTomb, after: afterTomb,
		},
	}
}

// repeater is a target that can put a booking's events on the topic by hand; the
// pipeline is one.
type repeater interface {
	Book(ctx context.Context, booking, recipient string) error
	RepeatConfirm(ctx context.Context, booking string, foreign bool) error
	CancelOvertakes(ctx context.Context, booking, recipient string) error
	MailTopic() string
}

// confirm books and confirms the story's booking, and records each try.
func (s *stage) confirm(ctx context.Context) error {
	return s.op(ctx, "confirm", func(ctx context.Context) history.OpOutcome {
		return s.Target.Confirm(ctx, s.booking.ID, s.booking.Recipient)
	})
}

func (s *stage) cancel(ctx context.Context) error {
	return s.op(ctx, "cancel", func(ctx context.Context) history.OpOutcome { return s.Target.Cancel(ctx, s.booking.ID) })
}

func (s *stage) op(ctx context.Context, name string, do func(context.Context) history.OpOutcome) error {
	return operate(ctx, s.Bench, s.booking, name, 1, history.Now(), do)
}

func (s *stage) key() string { return s.Target.Key(s.booking.ID, 1) }

// settled returns the state in which the story's mail ends.
func (s *stage) settled(ctx context.Context) (string, error) {
	return await(ctx, s, "the mail settles", "notify", `SELECT status FROM notifications WHERE dedupe_key = $1`, func(status string) bool {
		return status == "SENT" || status == "CANCELLED" || status == "DEAD" || status == "EXPIRED"
	}, s.key())
}

// tries are the rows of the ledger about the story's mail.
func (s *stage) tries() (tries, copies int, messageIDs map[string]bool) {
	messageIDs = map[string]bool{}
	for _, a := range s.Parts.Mail.Ledger() {
		if a.Key != s.key() {
			continue
		}
		tries++
		if a.Stored {
			copies++
		}
		messageIDs[a.MessageID] = true
	}
	return tries, copies, messageIDs
}

func (s *stage) rule(b smtp.Builder) error {
	_, err := s.Parts.Mail.AddRule(b.To(s.booking.Recipient).Rule())
	return err
}

func howMany(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

func tellS0(ctx context.Context, s *stage) (string, error) {
	if err := errors.Join(s.rule(smtp.On(smtp.StageStored, smtp.Drop).First(1)), s.confirm(ctx)); err != nil {
		return "", err
	}
	state, err := s.settled(ctx)
	tries, _, ids := s.tries()
	return fmt.Sprintf("%d tries, %s, %s", tries, howMany(len(ids), "Message-ID", "Message-IDs"), state), err
}

// tellHeldCancel cancels while the server holds the mail at a stage, and lets it
// go on when the row says that the cancel has come.
func tellHeldCancel(at script.Stage, refused bool) func(context.Context, *stage) (string, error) {
	return func(ctx context.Context, s *stage) (string, error) {
		if refused {
			if err := s.rule(smtp.On(smtp.StageDot, smtp.Reply).Code(451)); err != nil {
				return "", err
			}
		}
		err := errors.Join(s.rule(smtp.On(at, smtp.HoldUntilReleased).For(5*time.Second).Times(1)), s.confirm(ctx))
		if err != nil {
			return "", err
		}
		wait, cancel := context.WithTimeout(ctx, labBound)
		defer cancel()
		hold, err := s.Parts.Mail.AwaitHold(wait, func(h script.Hold) bool { return h.Recipient == s.booking.Recipient })
		if err != nil {
			return "", fmt.Errorf("its mail was not held: %w", err)
		}
		defer s.Parts.Mail.Release(hold.ID)
		if err := s.cancel(ctx); err != nil {
			return "", err
		}
		if _, err := await(ctx, s, "the cancel meets the mail while it is sent", "notify",
			`SELECT cancel_requested FROM notifications WHERE dedupe_key = $1 AND status = 'SENDING'`,
			func(asked bool) bool { return asked }, s.key()); err != nil {
			return "", err
		}
		s.Parts.Mail.Release(hold.ID)
		state, err := s.settled(ctx)
		_, copies, _ := s.tries()
		return howMany(copies, "copy", "copies") + ", " + state, err
	}
}

// relays of the booking database: who holds the lock, and how many there are.
const (
	holderSQL = `SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.granted AND a.datname = current_database() AND a.application_name LIKE 'outbox-relay %'`
	relaysSQL = `SELECT count(DISTINCT application_name) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'outbox-relay %'`
)

func tellLock(ctx context.Context, s *stage) (string, error) {
	first, err := await(ctx, s, "a relay holds the lock", "booking", holderSQL, func(string) bool { return true })
	if err != nil {
		return "", err
	}
	if _, err := await(ctx, s, "a second relay stands by", "booking", relaysSQL, func(n int) bool { return n == 2 }); err != nil {
		return "", err
	}
	name := strings.TrimPrefix(first, "outbox-relay ")
	p := s.Process(name)
	if p == nil {
		return "", fmt.Errorf("the lock is held by %q, which is no process of the target", name)
	}
	if err := p.Kill(ctx); err != nil {
		return "", err
	}
	second, err := await(ctx, s, "the second relay takes over", "booking", holderSQL, func(who string) bool { return who != first })
	if err = errors.Join(err, p.Restart(context.WithoutCancel(ctx))); err != nil {
		return "", err
	}
	if second == first {
		return "t, f; f after the first is gone", nil
	}
	return "t, f; t after the first is gone", nil
}

// tellBatch uses the mail service's outbox, whose relay is the same code: the
// listener on its topic takes note of records that are none of its own.
func tellBatch(ctx context.Context, s *stage) (string, error) {
	told, ok := s.Target.(repeater)
	if !ok {
		return "", errors.New("the target tells of no mails")
	}
	conn, err := s.database(ctx, "notify")
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	// A record of 1.2 MB is above what the topic takes.
	if _, err := conn.Exec(ctx, `INSERT INTO outbox (event_id, topic, key, event_type, payload)
SELECT gen_random_uuid(), $1, 'lab-batch', 'Lab' || n, jsonb_build_object('n', n, 'fill', CASE n WHEN 3 THEN repeat('x', 1200000) ELSE '' END)
FROM generate_series(1, 5) n ORDER BY n`, told.MailTopic()); err != nil {
		return "", err
	}
	const stateSQL = `SELECT string_agg(right(event_type, 1) || CASE
  WHEN published_at IS NOT NULL THEN ' published'
  WHEN attempts > 0 AND last_error <> '' THEN ' failed'
  ELSE ' waits' END, ', ' ORDER BY id) FROM outbox WHERE key = 'lab-batch'`
	first, err := await(ctx, s, "the third is refused", "notify", stateSQL, func(state string) bool { return strings.Contains(state, "3 failed") })
	if err != nil {
		return "", err
	}
	if _, err := conn.Exec(ctx, `UPDATE outbox SET payload = '{"n": 3}', next_attempt_at = NULL WHERE key = 'lab-batch' AND event_type = 'Lab3'`); err != nil {
		return "", err
	}
	order, err := await(ctx, s, "the rest is published", "notify",
		`SELECT coalesce(string_agg(right(event_type, 1), ' ' ORDER BY published_at, id) FILTER (WHERE published_at IS NOT NULL), '') FROM outbox WHERE key = 'lab-batch'`,
		func(order string) bool { return len(order) == len("1 2 3 4 5") })
	return first + "; then " + order, err
}

// tellDelivered confirms and puts the event on the topic so many times more.
func tellDelivered(more int, foreign bool) func(context.Context, *stage) (string, error) {
	return func(ctx context.Context, s *stage) (string, error) {
		topic, ok := s.Target.(repeater)
		if !ok {
			return "", errors.New("the target's events cannot be repeated")
		}
		if err := s.confirm(ctx); err != nil {
			return "", err
		}
		for range more {
			if err := topic.RepeatConfirm(ctx, s.booking.ID, foreign); err != nil {
				return "", err
			}
		}
		return "", nil
	}
}

func rowsAndCopies(ctx context.Context, s *stage) (string, error) {
	rows, err := read[int](ctx, s, "notify", `SELECT count(*) FROM notifications WHERE booking_id = $1`, s.booking.ID)
	_, copies, _ := s.tries()
	return howMany(rows, "row", "rows") + ", " + howMany(copies, "copy", "copies"), err
}

func tellTomb(ctx context.Context, s *stage) (string, error) {
	topic, ok := s.Target.(repeater)
	if !ok {
		return "", errors.New("the target's events cannot be forged")
	}
	if err := topic.Book(ctx, s.booking.ID, s.booking.Recipient); err != nil {
		return "", err
	}
	if err := topic.CancelOvertakes(ctx, s.booking.ID, s.booking.Recipient); err != nil {
		return "", err
	}
	if _, err := await(ctx, s, "the tombstone", "notify", `SELECT status FROM notifications WHERE dedupe_key = $1`,
		func(string) bool { return true }, s.key()); err != nil {
		return "", err
	}
	// The customer cancels too: a confirmed booking without a mail is a lost one.
	return "", errors.Join(s.confirm(ctx), s.cancel(ctx))
}

func afterTomb(ctx context.Context, s *stage) (string, error) {
	what, err := read[string](ctx, s, "notify", `SELECT string_agg(
  CASE WHEN status = 'CANCELLED' THEN 'a tombstone' ELSE status END || CASE WHEN event_id IS NULL THEN ' without event id' ELSE ' with an event id' END, ', ')
  || '; the confirmation adds ' || count(*) - 1 || ' rows' FROM notifications WHERE booking_id = $1`, s.booking.ID)
	_, copies, _ := s.tries()
	return what + "; " + howMany(copies, "copy", "copies"), err
}
