package delivery

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// Many workers on few rows, on a real Postgres, with crashes, leases that are
// cut short, lost replies, settles that are repeated, cancels and a reconciler
// all at once. Nothing here is a model: what the mail server kept is compared
// with what the rows say, and an audit trigger has seen each change.
func TestWorkersSideBySide(t *testing.T) {
	t.Parallel()
	for _, policy := range []Policy{Resend, Hold} {
		t.Run(string(policy), func(t *testing.T) {
			t.Parallel()
			newTurmoil(t, policy).run()
		})
		t.Run(string(policy)+" in groups", func(t *testing.T) {
			t.Parallel()
			w := newTurmoil(t, policy)
			w.group = NewGroup(w.Store, time.Minute, 1)
			w.run()
		})
	}
}

const (
	turmoilRows    = 200
	turmoilWorkers = 12
	turmoilTurns   = 150 // of each worker
	turmoilLease   = time.Second
)

type turmoil struct {
	bench
	policy Policy
	group  *Group // nil: each statement is one worker's
	ids    []uuid.UUID

	mu   sync.Mutex
	mail map[uuid.UUID]*mailRecord
}

// mailRecord is what the outside knows of one mail.
type mailRecord struct {
	booking   string
	active    int // workers that may be in an attempt
	copies    int
	faulty    map[int64]bool // attempts that a fault left unsettled, by token
	tokens    map[int64]int  // how often each was given
	cancelled bool
}

func newTurmoil(t *testing.T, policy Policy) *turmoil {
	b := newBench(t, policy)
	cfg := testConfig(policy)
	cfg.Lease, cfg.MaxAttempts = turmoilLease, 4
	cfg.RetryDelays = []time.Duration{time.Millisecond}
	b.Store = New(b.pool, cfg)
	b.exec(`
CREATE TABLE audit (id bigint GENERATED ALWAYS AS IDENTITY, key text,
  old_status text, new_status text, old_token bigint, new_token bigint, old_version bigint, new_version bigint);
CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  INSERT INTO audit (key, old_status, new_status, old_token, new_token, old_version, new_version)
  VALUES (NEW.dedupe_key, OLD.status, NEW.status, OLD.token, NEW.token, OLD.version, NEW.version);
  RETURN NEW;
END $$;
CREATE TRIGGER audit BEFORE UPDATE ON notifications FOR EACH ROW EXECUTE FUNCTION audit();`)
	w := &turmoil{bench: b, policy: policy, mail: map[uuid.UUID]*mailRecord{}}
	for i := range turmoilRows {
		booking := fmt.Sprintf("b%d", i)
		id := b.ticket(booking)
		w.ids = append(w.ids, id)
		w.mail[id] = &mailRecord{booking: booking, faulty: map[int64]bool{}, tokens: map[int64]int{}}
	}
	return w
}

// Claim and Accepted go through the group, if there is one.
func (w *turmoil) Claim(ctx context.Context, id uuid.UUID) (Claim, error) {
	if w.group != nil {
		return w.group.Claim(ctx, id)
	}
	return w.Store.Claim(ctx, id)
}

func (w *turmoil) Accepted(ctx context.Context, id uuid.UUID, token int64, providerID string) (Outcome, error) {
	if w.group != nil {
		return w.group.Accepted(ctx, id, token, providerID)
	}
	return w.Store.Accepted(ctx, id, token, providerID)
}

func (w *turmoil) run() {
	seed := rand.Uint64()
	w.t.Logf("seed %d", seed)
	ctx, stop := context.WithCancel(w.t.Context())
	defer stop()
	var others errgroup.Group
	for i, disturb := range []func(context.Context, *rand.Rand) error{w.cutLease, w.cancelOne, w.sweep, w.reconcile} {
		rng := rand.New(rand.NewPCG(seed, uint64(i)))
		others.Go(func() error {
			for ctx.Err() == nil {
				// Not under ctx: a cancel whose answer is thrown away could not
				// be checked.
				if err := disturb(w.t.Context(), rng); err != nil {
					return err
				}
			}
			return nil
		})
	}
	var workers errgroup.Group
	for i := range turmoilWorkers {
		rng := rand.New(rand.NewPCG(seed, uint64(100+i)))
		workers.Go(func() error {
			for range turmoilTurns {
				if err := w.attempt(ctx, rng, w.ids[rng.IntN(len(w.ids))], true); err != nil {
					return err
				}
			}
			return nil
		})
	}
	require.NoError(w.t, workers.Wait())
	stop()
	require.NoError(w.t, others.Wait())
	w.settleAll(rand.New(rand.NewPCG(seed, 1000)))
	w.checkRows()
	w.checkAudit()
}

// attempt is one turn of a worker. Its lease is its own clock's, from before
// the claim was asked for.
func (w *turmoil) attempt(ctx context.Context, rng *rand.Rand, id uuid.UUID, faults bool) error {
	w.note(id, func(m *mailRecord) { m.active++ })
	defer w.note(id, func(m *mailRecord) { m.active-- })
	begin := time.Now()
	c, err := w.Claim(ctx, id)
	if err != nil || c.Row == nil {
		return err
	}
	token := c.Token
	w.note(id, func(m *mailRecord) { m.tokens[token]++ })
	// Stopped past its lease, by whatever made this machine slow.
	defer func() {
		if time.Since(begin) >= turmoilLease {
			w.fault(id, token)
		}
	}()
	if faults && rng.IntN(10) == 0 {
		w.fault(id, token)
		return nil // crashed before the dot
	}
	reply := replies[rng.IntN(len(replies))]
	if !faults {
		reply = "250"
	}
	if !w.dot(id, token, begin, reply) {
		reply = "451" // past its lease: closed without sending
	}
	if faults && rng.IntN(10) == 0 {
		w.fault(id, token)
		return nil // crashed before the settle
	}
	for range 1 + rng.IntN(2) { // the answer may be lost, and the settle repeated
		if err := w.settle(ctx, id, token, reply); err != nil {
			return err
		}
	}
	return nil
}

var replies = []string{"250", "250", "250", "451", "451", "550", "lost after storing", "lost without storing"}

// dot checks the lease right before the mail is the server's, in one step, and
// reports whether it was sent.
func (w *turmoil) dot(id uuid.UUID, token int64, begin time.Time, reply string) (sent bool) {
	w.note(id, func(m *mailRecord) {
		if m.faulty[token] || time.Since(begin) >= turmoilLease {
			return
		}
		sent = true
		switch reply {
		case "lost after storing":
			m.faulty[token] = true
			m.copies++
		case "lost without storing":
			m.faulty[token] = true
		case "250":
			m.copies++
		}
	})
	return sent
}

func (w *turmoil) settle(ctx context.Context, id uuid.UUID, token int64, reply string) error {
	var err error
	switch reply {
	case "250":
		_, err = w.Accepted(ctx, id, token, "p")
	case "451":
		_, err = w.Transient(ctx, id, token, Refusal{Err: reply})
	case "550":
		_, err = w.Permanent(ctx, id, token, Refusal{Err: reply})
	default:
		_, err = w.Ambiguous(ctx, id, token, reply)
	}
	return err
}

// cutLease ends a lease early, as a pause of its worker would.
func (w *turmoil) cutLease(ctx context.Context, rng *rand.Rand) error {
	id := w.ids[rng.IntN(len(w.ids))]
	var token int64
	w.note(id, func(m *mailRecord) {
		for t := range m.tokens {
			token = max(token, t)
		}
	})
	if token == 0 {
		return nil
	}
	w.fault(id, token)
	_, err := w.pool.Exec(ctx, `UPDATE notifications SET locked_until = now() - interval '1 second'
		WHERE id = $1 AND token = $2 AND status = 'SENDING'`, id, token)
	return err
}

func (w *turmoil) cancelOne(ctx context.Context, rng *rand.Rand) error {
	if rng.IntN(10) != 0 {
		_, err := w.Expire(ctx, 10)
		return err
	}
	id := w.ids[rng.IntN(len(w.ids))]
	c, err := w.Cancel(ctx, cancelOf(w.mail[id].booking, 1))
	if err != nil {
		return err
	}
	w.note(id, func(m *mailRecord) { m.cancelled = m.cancelled || c.Changed })
	return nil
}

func (w *turmoil) sweep(ctx context.Context, _ *rand.Rand) error {
	_, err := w.LeaseOver(ctx, 5)
	return err
}

// reconcile has proof of absence when nobody is in an attempt any more.
func (w *turmoil) reconcile(ctx context.Context, _ *rand.Rand) error {
	rows, err := w.UnknownRows(ctx, After{}, 5)
	for _, r := range rows {
		found, absent := false, false
		w.note(r.ID, func(m *mailRecord) { found, absent = m.copies > 0, m.copies == 0 && m.active == 0 })
		switch {
		case found:
			_, err = w.Found(ctx, r.ID, "p")
		case absent:
			_, err = w.ProvenAbsent(ctx, r.ID, r.Token)
		}
		if err != nil {
			return err
		}
	}
	return err
}

// settleAll ends the faults and brings each row to rest.
func (w *turmoil) settleAll(rng *rand.Rand) {
	ctx := w.t.Context()
	for _, id := range w.ids {
		if r := w.get(id); r.Status == Sending {
			w.fault(id, r.Token)
			w.leaseRunsOut(id)
		}
	}
	require.Eventually(w.t, func() bool {
		open := 0
		for _, id := range w.ids {
			status := w.get(id).Status
			if status.Settled() && status != Unknown {
				continue
			}
			open++
			require.NoError(w.t, w.attempt(ctx, rng, id, false))
		}
		require.NoError(w.t, w.sweep(ctx, rng))
		require.NoError(w.t, w.reconcile(ctx, rng))
		return open == 0
	}, 20*time.Second, 5*time.Millisecond, "some rows do not come to rest")
}

func (w *turmoil) checkRows() {
	t := w.t
	counts, doubled, faulty := map[Status]int{}, 0, 0
	for _, id := range w.ids {
		r, m := w.get(id), w.mail[id]
		counts[r.Status]++
		doubled += max(m.copies-1, 0)
		faulty += len(m.faulty)
		switch r.Status {
		case Sent:
			require.Positive(t, m.copies, "%s is SENT without a copy", r.DedupeKey)
		case Dead, Cancelled:
			require.Zero(t, m.copies, "%s is %s with a copy", r.DedupeKey, r.Status)
		}
		require.Equal(t, m.cancelled && r.Status != Sent, r.Status == Cancelled, "%s: %s, cancelled %t", r.DedupeKey, r.Status, m.cancelled)
		allowed := 1 + len(m.faulty)
		if w.policy == Hold {
			allowed = 1
		}
		require.LessOrEqual(t, m.copies, allowed, "%s: copies", r.DedupeKey)
		for token := int64(1); token <= r.Token; token++ {
			require.LessOrEqual(t, m.tokens[token], 1, "%s: token %d was given twice", r.DedupeKey, token)
		}
	}
	t.Logf("%v, %d unsettled attempts, %d second copies", counts, faulty, doubled)
	for _, status := range []Status{Sent, Dead, Cancelled} {
		require.Positive(t, counts[status], "no row came to be %s", status)
	}
	require.Positive(t, faulty)
}

func (w *turmoil) checkAudit() {
	var changes, wrong int
	err := w.pool.QueryRow(w.t.Context(), `
SELECT count(*), count(*) FILTER (WHERE NOT (
  (new_token = old_token OR new_token = old_token + 1 AND new_status = 'SENDING' AND new_version = old_version + 1)
  AND (new_version = old_version + 1 OR new_version = old_version AND new_status = old_status)
  AND (new_status = old_status OR old_status NOT IN ('SENT', 'CANCELLED', 'EXPIRED'))))
FROM audit`).Scan(&changes, &wrong)
	require.NoError(w.t, err)
	require.Zero(w.t, wrong, "changes that no statement of the table makes")
	require.Greater(w.t, changes, 3*turmoilRows)
	w.t.Logf("%d changes seen by the audit trigger", changes)
}

func (w *turmoil) note(id uuid.UUID, f func(*mailRecord)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f(w.mail[id])
}

func (w *turmoil) fault(id uuid.UUID, token int64) {
	w.note(id, func(m *mailRecord) { m.faulty[token] = true })
}
