-- +goose Up
-- The mail service may hear from its provider that a mail came back.
ALTER TABLE booking_mails DROP CONSTRAINT booking_mails_event_type_check;
ALTER TABLE booking_mails ADD CONSTRAINT booking_mails_event_type_check
    CHECK (event_type IN ('EmailSent', 'EmailFailed', 'EmailCancelled', 'EmailCancelTooLate', 'EmailBounced'));

-- +goose Down
DELETE FROM booking_mails WHERE event_type = 'EmailBounced';
ALTER TABLE booking_mails DROP CONSTRAINT booking_mails_event_type_check;
ALTER TABLE booking_mails ADD CONSTRAINT booking_mails_event_type_check
    CHECK (event_type IN ('EmailSent', 'EmailFailed', 'EmailCancelled', 'EmailCancelTooLate'));
