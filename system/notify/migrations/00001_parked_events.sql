-- +goose Up
-- An event that nobody here can read. The body is part of the identity, since
-- offsets start again when a topic is made anew.
CREATE TABLE parked_events (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic       text        NOT NULL,
    partition   integer     NOT NULL,
    "offset"    bigint      NOT NULL,
    record_key  bytea,
    body        bytea,
    body_digest text        NOT NULL,
    reason      text        NOT NULL,
    parked_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (topic, partition, "offset", body_digest)
);

-- +goose Down
DROP TABLE parked_events;
