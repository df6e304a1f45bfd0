-- The row of one mail, and what belongs to it. The state machine is drawn in
-- the package comment of system/delivery; the columns are explained there too.

-- +goose Up
CREATE TABLE notifications (
    id               uuid        PRIMARY KEY,
    dedupe_key       text        NOT NULL CHECK (dedupe_key <> ''),
    booking_id       text        NOT NULL,
    campaign_id      text,
    event_id         text        CHECK (event_id <> ''),  -- NULL on tombstones: a cancel's event makes no mail
    type             text        NOT NULL CHECK (type IN ('TICKET_CONFIRMATION', 'MARKETING')),
    channel          text        NOT NULL CHECK (channel IN ('EMAIL', 'SMS')),
    recipient        text        NOT NULL,
    payload          jsonb       NOT NULL,
    status           text        NOT NULL CHECK (status IN
                       ('PENDING', 'SENDING', 'SENT', 'FAILED', 'UNKNOWN', 'DEAD', 'CANCELLED', 'EXPIRED')),
    generation       integer     NOT NULL CHECK (generation >= 1),
    attempts         integer     NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    attempt_limit    integer     NOT NULL CHECK (attempt_limit >= 0),
    token            bigint      NOT NULL DEFAULT 0 CHECK (token >= 0),
    unsettled        integer     NOT NULL DEFAULT 0 CHECK (unsettled >= 0),
    cancel_requested boolean     NOT NULL DEFAULT false,
    late_accepted    boolean     NOT NULL DEFAULT false,  -- a late 250 arrived while another held the row
    late_provider_id text,
    locked_until     timestamptz,
    next_attempt_at  timestamptz,
    send_after       timestamptz,
    expires_at       timestamptz,
    published_at     timestamptz,
    dlq_published_at timestamptz,
    first_claimed_at timestamptz,
    provider_msg_id  text,
    last_error       text,
    rescues          integer     NOT NULL DEFAULT 0 CHECK (rescues >= 0),
    rescued_at       timestamptz,
    created_at       timestamptz NOT NULL DEFAULT statement_timestamp(),
    changed_at       timestamptz NOT NULL DEFAULT statement_timestamp(),  -- of the last transition
    sent_at          timestamptz,
    version          bigint      NOT NULL DEFAULT 1 CHECK (version >= 1),

    CONSTRAINT notifications_dedupe_key UNIQUE (dedupe_key),
    CONSTRAINT notifications_event_id   UNIQUE (event_id),
    CONSTRAINT sending_has_a_lease      CHECK ((status = 'SENDING') = (locked_until IS NOT NULL)),
    CONSTRAINT sent_has_a_time          CHECK ((status = 'SENT') = (sent_at IS NOT NULL)),
    CONSTRAINT no_event_is_a_tombstone  CHECK (event_id IS NOT NULL OR status = 'CANCELLED')
) WITH (
    -- Each transition changes a column that a partial index names, so no update
    -- is heap-only; the free space keeps the new version near the old one.
    fillfactor = 80,
    -- A row is updated three times in its ordinary life: vacuum by a fixed
    -- number of dead rows, not by a share of a table that keeps its keys.
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0,
    autovacuum_vacuum_insert_threshold = 20000,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0.02
);

-- Old and new values of each transition stand in the WAL: the evidence that an
-- observer reads through a logical slot.
ALTER TABLE notifications REPLICA IDENTITY FULL;

-- One index per question that is asked of many rows.
CREATE INDEX notifications_waiting ON notifications
    (type, (coalesce(greatest(next_attempt_at, send_after), created_at)))
    WHERE status IN ('PENDING', 'FAILED');
CREATE INDEX notifications_leases ON notifications (locked_until)
    WHERE status = 'SENDING';
CREATE INDEX notifications_expiring ON notifications (expires_at)
    WHERE status IN ('PENDING', 'FAILED') AND expires_at IS NOT NULL;
CREATE INDEX notifications_unstamped ON notifications (changed_at)
    WHERE status = 'DEAD' AND dlq_published_at IS NULL;
CREATE INDEX notifications_dead ON notifications (changed_at, id)
    WHERE status = 'DEAD';
CREATE INDEX notifications_unknown ON notifications (changed_at, id)
    WHERE status = 'UNKNOWN';
CREATE INDEX notifications_at_rest ON notifications (changed_at)
    WHERE status IN ('SENT', 'CANCELLED', 'EXPIRED');
CREATE INDEX notifications_booking ON notifications (booking_id, generation)
    WHERE booking_id <> '';

-- The bytes of a mail, written once. They have a table of their own because
-- REPLICA IDENTITY FULL would write them to the WAL with each transition.
CREATE TABLE notification_mails (
    notification_id uuid        PRIMARY KEY,
    mail            bytea       NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT statement_timestamp()
);

-- Campaigns that were stopped. The flag is read at each claim, so that one row
-- stops a hundred thousand mails.
CREATE TABLE stopped_campaigns (
    campaign_id text        PRIMARY KEY CHECK (campaign_id <> ''),
    stopped_at  timestamptz NOT NULL DEFAULT statement_timestamp()
);

-- What a person must look at. The incident makes a repeated alert harmless and
-- a second death of the same mail a second alert.
CREATE TABLE alerts (
    id         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind       text        NOT NULL CHECK (kind <> ''),
    dedupe_key text        NOT NULL,
    incident   text        NOT NULL,
    details    text        NOT NULL,
    created_at timestamptz NOT NULL DEFAULT statement_timestamp(),

    CONSTRAINT alerts_incident UNIQUE (kind, dedupe_key, incident)
);

-- +goose Down
DROP TABLE alerts;
DROP TABLE stopped_campaigns;
DROP TABLE notification_mails;
DROP TABLE notifications;
