-- Which bookings were cancelled, and up to which generation. A mail that was
-- SENT before its cancel came is left as it is, so its row cannot answer
-- whether it may be sent again.

-- +goose Up
CREATE TABLE cancelled_bookings (
    booking_id   text        PRIMARY KEY CHECK (booking_id <> ''),
    generation   integer     NOT NULL CHECK (generation >= 1),
    cancelled_at timestamptz NOT NULL DEFAULT statement_timestamp()
);
CREATE INDEX cancelled_bookings_age ON cancelled_bookings (cancelled_at);

-- +goose Down
DROP TABLE cancelled_bookings;
