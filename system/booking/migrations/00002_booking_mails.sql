-- +goose Up
-- What the mail service told of each mail: the newest event of each key.
CREATE TABLE booking_mails (
    dedupe_key  text        PRIMARY KEY,
    booking_id  text        NOT NULL,
    generation  integer     NOT NULL,
    event_type  text        NOT NULL CHECK (event_type IN ('EmailSent', 'EmailFailed', 'EmailCancelled', 'EmailCancelTooLate')),
    version     bigint      NOT NULL CHECK (version >= 1),
    occurred_at timestamptz NOT NULL,
    heard_at    timestamptz NOT NULL DEFAULT now()
);

COMMENT ON COLUMN booking_mails.version IS 'of the mail in the mail service: an event with a lower one comes too late to count';

-- +goose Down
DROP TABLE booking_mails;
