-- The mails of a campaign are counted by state, index only.

-- +goose Up
CREATE INDEX notifications_campaign ON notifications (campaign_id, status)
    WHERE campaign_id IS NOT NULL;

-- +goose Down
DROP INDEX notifications_campaign;
