package delivery

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// Group is a store for the workers of a busy lane: what several of them ask for
// in the same moment becomes one statement, and so one commit (claim,
// store_mail, accepted). Each row keeps its own guard, and a row that the
// statement did not take is asked for alone, by the statement of [Store], which
// answers why. A worker that meets no crowd gets that one at once.
//
// It widens no window: a worker still holds one row, from a claim that it asked
// for to a settle of its own. What may be in doubt after a crash is at most one
// mail per worker, as without it.
type Group struct {
	*Store
	claims  combiner[uuid.UUID, Claim]
	stores  combiner[storing, []byte]
	accepts combiner[accepting, Outcome]
}

type storing struct {
	id    uuid.UUID
	token int64
	mail  []byte
}

type accepting struct {
	id         uuid.UUID
	token      int64
	providerID string
}

const (
	// groupMost bounds a statement: beyond it the rows cost what they cost alone.
	groupMost = 64
	// groupFlights are the statements of a kind under way at once.
	groupFlights = 2
	// With few workers a second statement begins at once: were there but one, they
	// would be slower in groups than each for itself, since one statement would
	// wait for the log while nobody works on the next. Many keep both busy with
	// larger groups, and then a row costs less: with 32 mails at work a quarter
	// less CPU of Postgres. The second one is there all the same, so that a
	// statement that waits for a lock holds up a crowd and not the lane.
	manyWorkers = 16
	groupCrowd  = 8
)

// NewGroup makes a group of s for so many workers, whose calls take at most
// timeout each.
func NewGroup(s *Store, timeout time.Duration, workers int) *Group {
	g := &Group{Store: s}
	crowd := 1
	if workers >= manyWorkers {
		crowd = groupCrowd
	}
	g.claims = combiner[uuid.UUID, Claim]{
		most: groupMost, flights: groupFlights, crowd: crowd, timeout: timeout, id: func(id uuid.UUID) uuid.UUID { return id },
		several: s.claimGroup, one: s.Claim,
	}
	g.stores = combiner[storing, []byte]{
		most: groupMost, flights: groupFlights, crowd: crowd, timeout: timeout, id: func(q storing) uuid.UUID { return q.id },
		several: s.storeGroup,
		one: func(ctx context.Context, q storing) ([]byte, error) {
			return s.StoreRendered(ctx, q.id, q.token, q.mail)
		},
	}
	g.accepts = combiner[accepting, Outcome]{
		most: groupMost, flights: groupFlights, crowd: crowd, timeout: timeout, id: func(q accepting) uuid.UUID { return q.id },
		several: s.acceptedGroup,
		one: func(ctx context.Context, q accepting) (Outcome, error) {
			return s.Accepted(ctx, q.id, q.token, q.providerID)
		},
	}
	return g
}

// Claim is [Store.Claim].
func (g *Group) Claim(ctx context.Context, id uuid.UUID) (Claim, error) { return g.claims.ask(ctx, id) }

// StoreRendered is [Store.StoreRendered].
func (g *Group) StoreRendered(ctx context.Context, id uuid.UUID, token int64, mail []byte) ([]byte, error) {
	return g.stores.ask(ctx, storing{id: id, token: token, mail: mail})
}

// Accepted is [Store.Accepted].
func (g *Group) Accepted(ctx context.Context, id uuid.UUID, token int64, providerID string) (Outcome, error) {
	return g.accepts.ask(ctx, accepting{id: id, token: token, providerID: providerID})
}

// claimGroup claims those of the rows that may be. Of the others it settles
// those that a stopped campaign or their time ends: 50,000 of them must not cost
// four statements each.
func (s *Store) claimGroup(ctx context.Context, ids []uuid.UUID) ([]*Claim, error) {
	out := make([]*Claim, len(ids))
	left := map[uuid.UUID]int{}
	for i, id := range ids {
		left[id] = i
	}
	won, err := s.group(ctx, scanWithMail, sqlClaimGroup, ids, s.cfg.Lease, s.resendable)
	if err != nil {
		return nil, fmt.Errorf("claim %d rows: %w", len(ids), err)
	}
	for _, r := range won {
		c := s.won(r)
		out[left[r.ID]] = &c
		delete(left, r.ID)
	}
	for _, sql := range []string{sqlCancelCampaignGroup, sqlExpireGroup} {
		if len(left) == 0 {
			break
		}
		ended, err := s.group(ctx, scanRow, s.statement(sql), keys(left))
		if err != nil {
			// What was won is committed, and its workers must hear of it: nobody
			// else holds those rows. The others, asked for alone, hear the error.
			break
		}
		for _, r := range ended {
			out[left[r.ID]] = &Claim{Status: r.Status, Token: r.Token, Attempts: r.Attempts}
			delete(left, r.ID)
		}
	}
	return out, nil
}

func keys(m map[uuid.UUID]int) []uuid.UUID {
	out := make([]uuid.UUID, 0, len(m))
	for id := range m {
		out = append(out, id)
	}
	return out
}

func (s *Store) group(ctx context.Context, scan pgx.RowToFunc[Row], sql string, args ...any) ([]Row, error) {
	res, err := s.db.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(res, scan)
}

func (s *Store) storeGroup(ctx context.Context, asked []storing) ([]*[]byte, error) {
	ids, tokens, mails := make([]uuid.UUID, len(asked)), make([]int64, len(asked)), make([][]byte, len(asked))
	at := map[uuid.UUID]int{}
	for i, q := range asked {
		ids[i], tokens[i], mails[i], at[q.id] = q.id, q.token, q.mail, i
	}
	res, err := s.db.Query(ctx, sqlStoreMailGroup, ids, tokens, mails)
	if err != nil {
		return nil, fmt.Errorf("store %d mails: %w", len(asked), err)
	}
	stored, err := pgx.CollectRows(res, pgx.RowTo[uuid.UUID])
	if err != nil {
		return nil, fmt.Errorf("store %d mails: %w", len(asked), err)
	}
	out := make([]*[]byte, len(asked))
	for _, id := range stored {
		i := at[id]
		out[i] = &asked[i].mail
	}
	return out, nil
}

func (s *Store) acceptedGroup(ctx context.Context, asked []accepting) ([]*Outcome, error) {
	ids, tokens, providers := make([]uuid.UUID, len(asked)), make([]int64, len(asked)), make([]string, len(asked))
	at := map[uuid.UUID]int{}
	for i, q := range asked {
		ids[i], tokens[i], providers[i], at[q.id] = q.id, q.token, q.providerID, i
	}
	res, err := s.db.Query(ctx, s.statement(sqlAcceptedGroup), ids, tokens, providers)
	if err != nil {
		return nil, fmt.Errorf("accepted %d mails: %w", len(asked), err)
	}
	settled, err := pgx.CollectRows(res, scanOutcome)
	if err != nil {
		return nil, fmt.Errorf("accepted %d mails: %w", len(asked), err)
	}
	out := make([]*Outcome, len(asked))
	for i := range settled {
		out[at[settled[i].Row.ID]] = &settled[i]
	}
	return out, nil
}
