package delivery

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"mailproof/system/contract"
)

// Counts of one mail type, for metrics.
type Counts struct {
	Waiting int64 // PENDING and FAILED
	Due     int64 // of those, the ones a worker could claim now
	// OldestDue is since when the longest waiting of those is due, by the
	// database's clock; 0 when there is none.
	OldestDue time.Duration
	Sending   int64
	// LeasesOver are SENDING rows past their lease.
	LeasesOver int64
	Unknown    int64
	// OldestUnknown is for how long the longest UNKNOWN one has been so.
	OldestUnknown time.Duration
	Dead          int64
	// Unstamped DEAD rows have no confirmed dead letter and alert yet.
	Unstamped int64
}

// sqlCounts reads partial indexes alone: it costs as much as there are rows that
// are not at rest.
const sqlCounts = `-- counts
SELECT
  (SELECT count(*) FROM notifications n WHERE n.type = $1 AND ` + waiting + `),
  (SELECT count(*) FROM notifications n WHERE n.type = $1 AND ` + waiting + ` AND ` + dueSince + ` <= ` + clock + `),
  coalesce(` + clock + ` - (SELECT ` + dueSince + ` FROM notifications n
    WHERE n.type = $1 AND ` + waiting + ` AND ` + dueSince + ` <= ` + clock + ` ORDER BY ` + dueSince + ` LIMIT 1), interval '0'),
  (SELECT count(*) FROM notifications n WHERE n.status = 'SENDING' AND n.type = $1),
  (SELECT count(*) FROM notifications n WHERE n.status = 'SENDING' AND n.type = $1 AND n.locked_until < ` + clock + `),
  (SELECT count(*) FROM notifications n WHERE n.status = 'UNKNOWN' AND n.type = $1),
  coalesce(` + clock + ` - (SELECT min(n.changed_at) FROM notifications n WHERE n.status = 'UNKNOWN' AND n.type = $1), interval '0'),
  (SELECT count(*) FROM notifications n WHERE n.status = 'DEAD' AND n.type = $1),
  (SELECT count(*) FROM notifications n WHERE n.status = 'DEAD' AND n.dlq_published_at IS NULL AND n.type = $1)`

// Count counts the rows of a type that are not at rest.
func (s *Store) Count(ctx context.Context, t contract.MailType) (Counts, error) {
	res, err := s.db.Query(ctx, sqlCounts, string(t))
	if err != nil {
		return Counts{}, fmt.Errorf("count %s: %w", t, err)
	}
	c, err := pgx.CollectExactlyOneRow(res, pgx.RowToStructByPos[Counts])
	if err != nil {
		return Counts{}, fmt.Errorf("count %s: %w", t, err)
	}
	return c, nil
}
