package delivery

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// StopCampaign sets the flag that each claim of the campaign's mails reads
// (C-14). Mails already claimed go out. It may be repeated, and there is no way
// back: what was claimed since is CANCELLED.
func (s *Store) StopCampaign(ctx context.Context, campaignID string) error {
	if _, err := s.db.Exec(ctx, sqlStopCampaign, campaignID); err != nil {
		return fmt.Errorf("stop campaign %q: %w", campaignID, err)
	}
	return nil
}

// CampaignStopped is when the campaign was stopped; nil: it was not.
func (s *Store) CampaignStopped(ctx context.Context, campaignID string) (*time.Time, error) {
	res, err := s.db.Query(ctx, sqlCampaignStopped, campaignID)
	if err != nil {
		return nil, fmt.Errorf("campaign %q: %w", campaignID, err)
	}
	at, err := pgx.CollectRows(res, pgx.RowTo[time.Time])
	if err != nil {
		return nil, fmt.Errorf("campaign %q: %w", campaignID, err)
	}
	if len(at) == 0 {
		return nil, nil
	}
	return &at[0], nil
}

// CampaignState is a campaign as its rows show it. Times are the database's; nil
// where there is none yet.
type CampaignState struct {
	StoppedAt                   *time.Time
	Total                       int64
	Counts                      map[Status]int64 // of states that have rows
	FirstAccepted, LastAccepted *time.Time       // rows made
	FirstSent, LastSent         *time.Time
}

// Campaign counts a campaign's mails by state. Total is 0 for a campaign that
// nobody has sent yet.
func (s *Store) Campaign(ctx context.Context, campaignID string) (CampaignState, error) {
	c := CampaignState{Counts: map[Status]int64{}}
	var err error
	if c.StoppedAt, err = s.CampaignStopped(ctx, campaignID); err != nil {
		return c, err
	}
	res, err := s.db.Query(ctx, sqlCampaignState, campaignID)
	if err != nil {
		return c, fmt.Errorf("campaign %q: %w", campaignID, err)
	}
	var status Status
	var n int64
	var firstAccepted, lastAccepted time.Time
	var firstSent, lastSent *time.Time
	_, err = pgx.ForEachRow(res, []any{&status, &n, &firstAccepted, &lastAccepted, &firstSent, &lastSent}, func() error {
		c.Total += n
		c.Counts[status] = n
		c.FirstAccepted = earlier(c.FirstAccepted, &firstAccepted)
		c.LastAccepted = later(c.LastAccepted, &lastAccepted)
		c.FirstSent, c.LastSent = earlier(c.FirstSent, firstSent), later(c.LastSent, lastSent)
		return nil
	})
	if err != nil {
		return c, fmt.Errorf("campaign %q: %w", campaignID, err)
	}
	return c, nil
}

// earlier copies what it returns: the caller scans into the same place again.
func earlier(a, b *time.Time) *time.Time {
	if b == nil || a != nil && a.Before(*b) {
		return a
	}
	at := *b
	return &at
}

func later(a, b *time.Time) *time.Time {
	if b == nil || a != nil && a.After(*b) {
		return a
	}
	at := *b
	return &at
}
