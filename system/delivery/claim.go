package delivery

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"mailproof/system/contract"
)

// Claim is the answer to a worker that asks for a row.
type Claim struct {
	// Row is set when the claim was won: the caller holds the row until
	// LeaseLeft has passed since the call was made.
	Row       *Row
	LeaseLeft time.Duration
	// Otherwise Status is the row's state and Wait the time until asking again
	// makes sense: zero when the row is settled.
	Status Status
	Wait   time.Duration
	// Token and Attempts of the row as it is, for the log.
	Token    int64
	Attempts int
}

// claimRounds bounds how often a claim looks again when the row changed
// between the refusal and the look.
const claimRounds = 5

// minWait keeps a refused claim from answering "at once": the caller would
// publish to no tier and spin.
const minWait = time.Millisecond

// Claim takes the row for one attempt if it is due and nobody else holds it,
// and answers what the row waits for otherwise. A row that nobody may ever
// claim is brought to its end here: expired, parked, stopped with its
// campaign, or UNKNOWN after a lease that is over.
func (s *Store) Claim(ctx context.Context, id uuid.UUID) (Claim, error) {
	var last Claim
	for range claimRounds {
		won, err := s.one(ctx, sqlClaim, id, s.cfg.Lease, s.resendable)
		if err == nil {
			return s.won(won), nil
		}
		if !errors.Is(err, ErrNoRow) {
			return Claim{}, wrapID("claim", id, err)
		}
		answer, done, err := s.lookAtClaim(ctx, id)
		if err != nil {
			return Claim{}, wrapID("claim refused", id, err)
		}
		if done {
			return answer, nil
		}
		last = answer
	}
	last.Wait = max(last.Wait, minWait)
	return last, nil
}

// ClaimBatch takes up to limit rows of one type: due ones in order, then those
// whose lease is over. Rows that another transaction holds are passed over
// without waiting (A1-05).
func (s *Store) ClaimBatch(ctx context.Context, t contract.MailType, limit int) ([]Claim, error) {
	res, err := s.db.Query(ctx, sqlClaimBatch, limit, s.cfg.Lease, s.resendable, string(t))
	if err != nil {
		return nil, fmt.Errorf("claim %d of %s: %w", limit, t, err)
	}
	rows, err := pgx.CollectRows(res, scanWithMail)
	if err != nil {
		return nil, fmt.Errorf("claim %d of %s: %w", limit, t, err)
	}
	claims := make([]Claim, len(rows))
	for i, r := range rows {
		claims[i] = s.won(r)
	}
	return claims, nil
}

func (s *Store) won(r Row) Claim {
	return Claim{Row: &r, LeaseLeft: s.cfg.Lease, Status: r.Status, Token: r.Token, Attempts: r.Attempts}
}

// lookAtClaim answers for a refused claim. done is false when the row can be
// asked again at once.
func (s *Store) lookAtClaim(ctx context.Context, id uuid.UUID) (answer Claim, done bool, err error) {
	res, err := s.db.Query(ctx, sqlClaimLook, id, s.cfg.Lease, s.resendable)
	if err != nil {
		return Claim{}, false, err
	}
	var row Row
	var verdict string
	var wait time.Duration
	_, err = pgx.CollectExactlyOneRow(res, func(r pgx.CollectableRow) (struct{}, error) {
		return struct{}{}, r.Scan(append(row.dest(), &verdict, &wait)...)
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return Claim{}, false, ErrNoRow
	}
	if err != nil {
		return Claim{}, false, err
	}
	answer = Claim{Status: row.Status, Token: row.Token, Attempts: row.Attempts}
	switch verdict {
	case "settled":
		return answer, true, nil
	case "wait":
		answer.Wait = wait
		return answer, wait > 0, nil
	}
	// Each of these is conditional again: when it is refused, the next round
	// sees why.
	switch verdict {
	case "stopped":
		_, err = s.rows(ctx, sqlCancelCampaign, id, s.cfg.Lease)
	case "expired":
		_, err = s.rows(ctx, sqlExpire, id)
	case "unsupported":
		_, err = s.Park(ctx, id, fmt.Sprintf("channel %s is not supported", row.Channel))
	case "lease over":
		_, err = s.rows(ctx, sqlLeaseOver, id, s.cfg.Lease, s.resendable)
	default:
		err = fmt.Errorf("verdict %q is not known", verdict)
	}
	return answer, false, err
}
