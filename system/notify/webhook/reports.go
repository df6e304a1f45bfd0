package webhook

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"mailproof/system/notify/logging"
)

// Report is what the provider told of a mail that it had taken.
type Report struct {
	// Event is the provider's word without "email.": one of [Events].
	Event      string `json:"event"`
	ProviderID string `json:"provider_id"`
	// Reason in the provider's words, empty where it gave none. It may name an
	// address.
	Reason string    `json:"reason,omitempty"`
	ToldAt time.Time `json:"told_at"` // by the database's clock
}

// DB is the part of a pool that [Reports] needs.
type DB interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Reports keeps reports in table provider_reports.
type Reports struct{ DB DB }

const (
	writeReport = `-- write_report
INSERT INTO provider_reports (notification_id, event, provider_id, reason)
VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING`

	reportsOf = `-- reports_of
SELECT event, provider_id, reason, told_at FROM provider_reports
WHERE notification_id = $1 ORDER BY told_at, event`

	// Only mails that came back have reports: few, beside those of a campaign.
	reportsOfCampaign = `-- reports_of_campaign
SELECT r.event, count(*) FROM provider_reports r JOIN notifications n ON n.id = r.notification_id
WHERE n.campaign_id = $1 GROUP BY r.event`
)

// maxReason bounds a reason, in bytes.
const maxReason = 1000

// Write keeps a report of a mail; false: it was told before.
func (s Reports) Write(ctx context.Context, mail uuid.UUID, r Report) (bool, error) {
	tag, err := s.DB.Exec(ctx, writeReport, mail, r.Event, r.ProviderID, logging.Plain(r.Reason, maxReason))
	if err != nil {
		return false, fmt.Errorf("report %s of mail %s: %w", r.Event, mail, err)
	}
	return tag.RowsAffected() == 1, nil
}

// Of lists the reports of a mail, the oldest first.
func (s Reports) Of(ctx context.Context, mail uuid.UUID) ([]Report, error) {
	res, err := s.DB.Query(ctx, reportsOf, mail)
	if err != nil {
		return nil, fmt.Errorf("reports of mail %s: %w", mail, err)
	}
	out, err := pgx.CollectRows(res, pgx.RowToStructByPos[Report])
	if err != nil {
		return nil, fmt.Errorf("reports of mail %s: %w", mail, err)
	}
	return out, nil
}

// OfCampaign counts the reports of a campaign's mails by event.
func (s Reports) OfCampaign(ctx context.Context, campaignID string) (map[string]int64, error) {
	res, err := s.DB.Query(ctx, reportsOfCampaign, campaignID)
	if err != nil {
		return nil, fmt.Errorf("reports of campaign %q: %w", campaignID, err)
	}
	counts := map[string]int64{}
	var event string
	var n int64
	_, err = pgx.ForEachRow(res, []any{&event, &n}, func() error { counts[event] = n; return nil })
	if err != nil {
		return nil, fmt.Errorf("reports of campaign %q: %w", campaignID, err)
	}
	return counts, nil
}
