package delivery

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// Many workers at once, each with its own row: all of them get what they would
// alone, whoever else is in the statement.
func TestGroupAnswersEachWorker(t *testing.T) {
	t.Parallel()
	b := newBench(t, Resend)
	g := NewGroup(b.Store, time.Minute, manyWorkers)
	const rows = 300
	ids := make([]uuid.UUID, rows)
	for i := range ids {
		ids[i] = b.ticket(fmt.Sprint(i))
	}
	for i := range ids {
		if i%3 == 1 {
			b.claim(ids[i]) // held by somebody else
		}
	}
	var workers errgroup.Group
	for i, id := range ids {
		workers.Go(func() error {
			c, err := g.Claim(t.Context(), id)
			if err != nil {
				return err
			}
			if won := c.Row != nil; won != (i%3 != 1) {
				return fmt.Errorf("row %d: won %t", i, won)
			}
			if c.Row == nil {
				if c.Wait <= 0 {
					return fmt.Errorf("row %d: a refused claim waits for %s", i, c.Wait)
				}
				_, err = g.StoreRendered(t.Context(), id, c.Token+1, []byte("mine"))
				if err == nil {
					return fmt.Errorf("row %d: stored without holding it", i)
				}
				return nil
			}
			stored, err := g.StoreRendered(t.Context(), id, c.Token, fmt.Append(nil, "mail ", i))
			if err != nil || string(stored) != fmt.Sprint("mail ", i) {
				return fmt.Errorf("row %d: stored %q: %w", i, stored, err)
			}
			// Stored once, the same ever after (OB-03).
			stored, err = g.StoreRendered(t.Context(), id, c.Token, []byte("another"))
			if err != nil || string(stored) != fmt.Sprint("mail ", i) {
				return fmt.Errorf("row %d: stored again %q: %w", i, stored, err)
			}
			out, err := g.Accepted(t.Context(), id, c.Token, fmt.Sprint("p", i))
			if err != nil || !out.Applied || out.Row.Status != Sent || *out.Row.ProviderMsgID != fmt.Sprint("p", i) {
				return fmt.Errorf("row %d: accepted %+v: %w", i, out, err)
			}
			return nil
		})
	}
	require.NoError(t, workers.Wait())
	_, err := g.Claim(t.Context(), uuid.New())
	require.ErrorIs(t, err, ErrNoRow)
}

// failing is a database that refuses one statement.
type failing struct {
	DB
	name string
}

func (f failing) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if strings.HasPrefix(sql, "-- "+f.name+"\n") {
		return nil, errors.New("canceling statement due to statement timeout")
	}
	return f.DB.Query(ctx, sql, args...)
}

// A claim that was won is committed: its worker must hear of it, also when the
// statements that end the other rows fail. Otherwise nobody would hold the row,
// and a mail that must not double would become UNKNOWN without ever being sent.
func TestGroupKeepsWhatItWon(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"cancel_campaign_group", "expire_group"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, Hold)
			s := *b.Store
			s.db = failing{b.pool, name}
			free, taken := b.ticket("free"), b.ticket("taken")
			b.claim(taken)
			claims, err := s.claimGroup(t.Context(), []uuid.UUID{taken, free})
			require.NoError(t, err)
			require.Nil(t, claims[0], "to be asked for alone")
			require.NotNil(t, claims[1])
			require.NotNil(t, claims[1].Row)
		})
	}
}

// C-14, OB-11: the mails of a stopped campaign, and those whose time is over, are
// ended in the claim's own turn.
func TestGroupEndsWhatMayNotBeSent(t *testing.T) {
	t.Parallel()
	b := newBench(t, Hold)
	g := NewGroup(b.Store, time.Minute, 1)
	want := map[uuid.UUID]Status{}
	past := time.Now().Add(-time.Minute)
	for i := range 90 {
		row := ticket(fmt.Sprint(i))
		status := Sending
		switch i % 3 {
		case 1:
			row.CampaignID, status = "spring", Cancelled
		case 2:
			row.ExpiresAt, status = &past, Expired
		}
		want[b.insert(row)[0].ID] = status
	}
	require.NoError(t, b.StopCampaign(t.Context(), "spring"))
	var workers errgroup.Group
	for id, status := range want {
		workers.Go(func() error {
			c, err := g.Claim(t.Context(), id)
			if err != nil || c.Status != status || (c.Row != nil) != (status == Sending) || c.Wait != 0 {
				return fmt.Errorf("want %s: %+v: %w", status, c, err)
			}
			return nil
		})
	}
	require.NoError(t, workers.Wait())
	for id, status := range want {
		require.Equal(t, status, b.get(id).Status)
	}
}
