-- Bytes of mails come and go as rows do: vacuum by a fixed number of dead rows,
-- as table notifications has it. By the default a fifth of the table could be
-- dead before anybody looks, and with the bytes that is the larger table.

-- +goose Up
ALTER TABLE notification_mails SET (
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0,
    autovacuum_vacuum_insert_threshold = 20000,
    autovacuum_vacuum_cost_delay = 0
);

-- +goose Down
ALTER TABLE notification_mails RESET (
    autovacuum_vacuum_scale_factor,
    autovacuum_vacuum_threshold,
    autovacuum_vacuum_insert_scale_factor,
    autovacuum_vacuum_insert_threshold,
    autovacuum_vacuum_cost_delay
);
