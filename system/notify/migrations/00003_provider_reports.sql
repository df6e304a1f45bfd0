-- +goose Up
-- What the mail provider told of mails that it had taken: that they came back, or
-- that the recipient complained. The row itself stays SENT. A repetition of an
-- event is the same row; a report goes when its mail's row does.
CREATE TABLE provider_reports (
    notification_id uuid        NOT NULL REFERENCES notifications (id) ON DELETE CASCADE,
    event           text        NOT NULL CHECK (event <> ''),
    provider_id     text        NOT NULL,
    reason          text        NOT NULL,
    told_at         timestamptz NOT NULL DEFAULT statement_timestamp(),
    PRIMARY KEY (notification_id, event)
);

-- +goose Down
DROP TABLE provider_reports;
