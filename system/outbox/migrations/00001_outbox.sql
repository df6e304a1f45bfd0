-- +goose Up
CREATE TABLE outbox (
    id              bigserial   PRIMARY KEY,
    event_id        uuid        NOT NULL UNIQUE,
    topic           text        NOT NULL,
    key             text        NOT NULL,
    event_type      text        NOT NULL,
    payload         jsonb       NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT now(),
    published_at    timestamptz,
    attempts        integer     NOT NULL DEFAULT 0,
    rejections      integer     NOT NULL DEFAULT 0,
    last_error      text,
    next_attempt_at timestamptz,
    dead_at         timestamptz,
    alerted_at      timestamptz
);

COMMENT ON COLUMN outbox.event_id IS 'UUIDv7, made when the row is written, so that a second publish carries the same one';
COMMENT ON COLUMN outbox.key IS 'partition key: events of one key are published in the order of their ids';
COMMENT ON COLUMN outbox.attempts IS 'publishes that failed, whatever the cause';
COMMENT ON COLUMN outbox.rejections IS 'failures that were this record''s own; only they lead to dead_at';

-- Small whatever the table's size: published rows leave it.
CREATE INDEX outbox_unpublished ON outbox (id) WHERE published_at IS NULL AND dead_at IS NULL;
CREATE INDEX outbox_dead ON outbox (id) WHERE dead_at IS NOT NULL;

-- Every change of a row can be read with its old values from the write-ahead log.
ALTER TABLE outbox REPLICA IDENTITY FULL;

-- Each row is written once and updated once: vacuum by count, not by share of
-- a table that grows until retention sets in.
ALTER TABLE outbox SET (
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0,
    autovacuum_vacuum_insert_threshold = 20000
);

-- +goose Down
DROP TABLE outbox;
