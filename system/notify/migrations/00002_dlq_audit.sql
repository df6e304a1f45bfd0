-- +goose Up
-- What people did about dead mails, and why. A discard counts for the version
-- of the row that it names: a mail that dies again is a new case.
CREATE TABLE dlq_audit (
    id              bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    action          text        NOT NULL CHECK (action IN ('replay', 'discard', 'send-again')),
    notification_id uuid        NOT NULL,
    dedupe_key      text        NOT NULL,
    row_version     bigint      NOT NULL,
    actor           text        NOT NULL CHECK (actor <> ''),
    reason          text        NOT NULL,
    at              timestamptz NOT NULL DEFAULT statement_timestamp()
);
CREATE INDEX dlq_audit_notification ON dlq_audit (notification_id, id);
CREATE UNIQUE INDEX dlq_audit_discards ON dlq_audit (notification_id, row_version) WHERE action = 'discard';

-- +goose Down
DROP TABLE dlq_audit;
