package delivery

import (
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"mailproof/system/contract"
	"mailproof/system/plans"
)

// A session that has run its statements on a table of a few rows does not read the
// whole table once it has grown: with the settings of plans.Steady it never does,
// without them it does, or this test would show nothing.
func TestPlansOfASmallTableAreGoodForALargeOne(t *testing.T) {
	t.Parallel()
	require.Zero(t, scansAfterGrowth(t, true))
	require.NotZero(t, scansAfterGrowth(t, false))
}

// scansAfterGrowth counts the sequential scans of a group's statements in a
// session that has planned them before the table grew.
func scansAfterGrowth(t *testing.T, steady bool) (scans int64) {
	t.Helper()
	b := newBench(t, Hold)
	// No ANALYZE may come to help.
	for _, table := range []string{"notifications", "notification_mails"} {
		_, err := b.pool.Exec(t.Context(), "ALTER TABLE "+table+" SET (autovacuum_enabled = false)")
		require.NoError(t, err)
	}
	cfg := b.pool.Config()
	cfg.MaxConns = 1
	if steady {
		plans.Steady(cfg.ConnConfig.RuntimeParams)
	}
	session, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	defer session.Close()

	add := func(from, to int) []uuid.UUID {
		rows := make([]NewRow, 0, to-from)
		for i := from; i < to; i++ {
			key := contract.CampaignKey("grown", fmt.Sprint(i))
			rows = append(rows, NewRow{
				DedupeKey: key, EventID: key, CampaignID: "grown", Type: contract.Marketing, Channel: contract.Email,
				Recipient: "a@example.com", Payload: []byte(`{}`), Generation: 1,
			})
		}
		found, err := b.Insert(t.Context(), rows)
		require.NoError(t, err)
		ids := make([]uuid.UUID, len(found))
		for i, f := range found {
			ids[i] = f.ID
		}
		return ids
	}
	// life is what a lane does with a group, taken back: the rows can be used
	// again.
	life := func(ids []uuid.UUID) {
		tx, err := session.Begin(t.Context())
		require.NoError(t, err)
		defer func() { require.NoError(t, tx.Rollback(t.Context())) }()
		s := New(session, testConfig(Hold)).On(tx)
		require.NoError(t, s.StampPublished(t.Context(), ids))
		claims, err := s.claimGroup(t.Context(), ids)
		require.NoError(t, err)
		stores, accepts := make([]storing, len(ids)), make([]accepting, len(ids))
		for i, c := range claims {
			require.NotNil(t, c)
			require.NotNil(t, c.Row)
			stores[i] = storing{id: ids[i], token: c.Token, mail: []byte("mail")}
			accepts[i] = accepting{id: ids[i], token: c.Token, providerID: "250"}
		}
		_, err = s.storeGroup(t.Context(), stores)
		require.NoError(t, err)
		_, err = s.acceptedGroup(t.Context(), accepts)
		require.NoError(t, err)
		res, err := tx.Query(t.Context(),
			`SELECT seq_scan FROM pg_stat_xact_user_tables WHERE relname IN ('notifications', 'notification_mails')`)
		require.NoError(t, err)
		seen, err := pgx.CollectRows(res, pgx.RowTo[int64])
		require.NoError(t, err)
		require.Len(t, seen, 2)
		scans = seen[0] + seen[1]
	}
	few := add(0, 4)
	for range 10 { // from the sixth time on a plan is kept
		life(few)
	}
	for from := 4; from < 10_000; from += 500 {
		add(from, from+500)
	}
	life(few)
	return scans
}
