-- When the state that an alert is about was over. NULL: it is not, or nobody
-- looks after alerts of this kind.

-- +goose Up
ALTER TABLE alerts ADD COLUMN resolved_at timestamptz;
CREATE INDEX alerts_open ON alerts (kind, dedupe_key) WHERE resolved_at IS NULL;

-- +goose Down
DROP INDEX alerts_open;
ALTER TABLE alerts DROP COLUMN resolved_at;
