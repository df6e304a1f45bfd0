package delivery

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"mailproof/system/contract"
)

// BenchmarkAgainstRawUpdate runs a claim, a settle and a plain UPDATE by
// primary key one after the other, so that whatever else the machine does slows
// all of them: the ratios are the result. The server runs without fsync here,
// so that the statements are what counts.
func BenchmarkAgainstRawUpdate(b *testing.B) { againstRawUpdate(b, "") }

// BenchmarkWithEvents is the same with the event of each settle.
func BenchmarkWithEvents(b *testing.B) { againstRawUpdate(b, "mail.events") }

func againstRawUpdate(b *testing.B, topic string) {
	s, ids := benchStore(b)
	if topic != "" {
		pool := s.db.(*pgxpool.Pool)
		withOutbox(b, pool)
		cfg := s.cfg
		cfg.Events = topic
		s = New(pool, cfg)
	}
	half := len(ids) / 2
	var claim, settle, raw time.Duration
	for i := 0; b.Loop(); i++ {
		if i%half == 0 {
			b.StopTimer()
			reset(b, s)
			b.StartTimer()
		}
		mine, other := ids[i%half], ids[half+i%half]
		begin := time.Now()
		c, err := s.Claim(b.Context(), mine)
		if err != nil || c.Row == nil {
			b.Fatal("claim refused: ", err)
		}
		claimed := time.Now()
		if out, err := s.Accepted(b.Context(), mine, c.Token, "p"); err != nil || !out.Applied {
			b.Fatal("accepted refused: ", err)
		}
		settled := time.Now()
		if _, err := s.db.Exec(b.Context(), `UPDATE notifications SET status = 'FAILED', attempts = attempts + 1, version = version + 1
			WHERE id = $1`, other); err != nil {
			b.Fatal(err)
		}
		claim, settle, raw = claim+claimed.Sub(begin), settle+settled.Sub(claimed), raw+time.Since(settled)
	}
	b.ReportMetric(float64(claim)/float64(raw), "claim/raw")
	b.ReportMetric(float64(settle)/float64(raw), "settle/raw")
	b.ReportMetric(float64(raw)/float64(b.N), "raw-ns")
}

// BenchmarkInsert measures one row of a batch of a hundred.
func BenchmarkInsert(b *testing.B) {
	s, _ := benchStore(b)
	n := 0
	for b.Loop() {
		rows := make([]NewRow, 100)
		for i := range rows {
			rows[i] = ticket(fmt.Sprintf("new-%d", n))
			n++
		}
		if _, err := s.Insert(b.Context(), rows); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n), "ns/row")
}

func reset(b *testing.B, s *Store) {
	b.Helper()
	_, err := s.db.Exec(b.Context(), `UPDATE notifications SET status = 'PENDING', attempts = 0, locked_until = NULL, sent_at = NULL`)
	require.NoError(b, err)
	_, err = s.db.Exec(b.Context(), `VACUUM notifications`)
	require.NoError(b, err)
}

func benchStore(b *testing.B) (*Store, []uuid.UUID) {
	b.Helper()
	name := fmt.Sprintf("b%d", server.created.Add(1))
	require.NoError(b, server.exec(b.Context(), "CREATE DATABASE "+name+" TEMPLATE "+template))
	pool, err := pgxpool.New(b.Context(), server.URL(name))
	require.NoError(b, err)
	b.Cleanup(pool.Close)
	s := New(pool, testConfig(Resend))
	rows := make([]NewRow, 2000)
	for i := range rows {
		rows[i] = ticket(fmt.Sprint(i))
		rows[i].Type = contract.TicketConfirmation
	}
	made, err := s.Insert(b.Context(), rows)
	require.NoError(b, err)
	ids := make([]uuid.UUID, len(made))
	for i, m := range made {
		ids[i] = m.ID
	}
	return s, ids
}
