-- +goose Up
CREATE TABLE bookings (
    id         text        PRIMARY KEY,
    status     text        NOT NULL CHECK (status IN ('NEW', 'CONFIRMED', 'CANCELLED')),
    generation integer     NOT NULL DEFAULT 1 CHECK (generation >= 1),
    recipient  text        NOT NULL CHECK (recipient <> ''),
    name       text        NOT NULL DEFAULT '',
    locale     text        NOT NULL DEFAULT '',
    event      text        NOT NULL DEFAULT '',
    seats      text[]      NOT NULL DEFAULT '{}',
    amount     text        NOT NULL DEFAULT '',
    currency   text        NOT NULL DEFAULT '',
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now()
);

COMMENT ON COLUMN bookings.generation IS 'one more after each reopen: a reopened booking gets a mail of its own';

-- Every change of a row can be read with its old values from the write-ahead log.
ALTER TABLE bookings REPLICA IDENTITY FULL;

-- No index covers a column that changes, and pages keep room: updates are HOT.
ALTER TABLE bookings SET (fillfactor = 80);

-- +goose Down
DROP TABLE bookings;
