package delivery

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// A store with Config.Events writes what became of a booking's mail into table
// outbox, in the very statement that moved the row: both are committed or
// neither, and since the row is locked meanwhile, the events of a key have ids
// in the order of its versions. Whoever runs the relay publishes them (A2-14).
//
//	SENT                          EmailSent, or EmailCancelTooLate when a cancel had been asked for
//	CANCELLED                     EmailCancelled, tombstones included
//	DEAD, EXPIRED                 EmailFailed
//	SENT, and a cancel comes      EmailCancelTooLate, of the same version
//	SENT, and it came back        EmailBounced, of the same version
//
// UNKNOWN says nothing: there is nothing to say yet. Mails without a booking
// have nobody who waits for their events.

// mailEventID is made from the row, so that the same transition told twice (a
// cancel that is delivered again) is one event. It has the shape of a UUIDv7 of
// the row's time, for the index's sake.
const mailEventID = `encode(overlay(uuid_send(m.id) PLACING substring(decode(md5(m.version || ' ' || m.told), 'hex') FROM 1 FOR 7) FROM 10), 'hex')::uuid`

// writeEvents, with the source of rows m and the topic.
const writeEvents = `INSERT INTO outbox (event_id, topic, key, event_type, payload)
SELECT ` + mailEventID + `, '%[2]s', m.booking_id, m.told, jsonb_build_object(
  'event_id', ` + mailEventID + `, 'event_type', m.told, 'schema', 1, 'version', m.version, 'occurred_at', m.changed_at,
  'dedupe_key', m.dedupe_key, 'booking_id', m.booking_id, 'generation', m.generation,
  'attempts', m.attempts, 'provider_id', coalesce(m.provider_msg_id, ''))
FROM (%[1]s) m
ON CONFLICT (event_id) DO NOTHING`

const movedAtAnEnd = `SELECT n.*, CASE n.status
    WHEN 'CANCELLED' THEN 'EmailCancelled'
    WHEN 'SENT' THEN CASE WHEN n.cancel_requested THEN 'EmailCancelTooLate' ELSE 'EmailSent' END
    ELSE 'EmailFailed' END AS told
  FROM moved n WHERE n.status IN ('SENT', 'CANCELLED', 'DEAD', 'EXPIRED') AND n.booking_id <> ''`

const sentBeforeCancel = `SELECT n.*, 'EmailCancelTooLate' AS told
  FROM notifications n WHERE n.booking_id = $1 AND n.generation <= $2 AND n.status = 'SENT' AND n.booking_id <> ''`

// transitions that can end a mail's life.
func transitions() []string {
	return []string{
		sqlAccepted, sqlAcceptedLate, sqlTransient, sqlPermanent, sqlAmbiguous, sqlLeaseOver, sqlLeaseOverBatch,
		sqlAcceptedGroup, sqlCancelCampaignGroup, sqlExpireGroup,
		sqlCancel, sqlCancelBooking, sqlCancelCampaign, sqlExpire, sqlExpireBatch, sqlPark, sqlFound, sqlProvenAbsent,
	}
}

// tellingStatements maps each statement to the one that also writes the event.
func tellingStatements(topic string) map[string]string {
	told := map[string]string{}
	if topic == "" {
		return told
	}
	for _, sql := range transitions() {
		told[sql] = telling(sql, topic, "*")
	}
	// An insert gives back the ids alone.
	told[sqlInsert] = telling(strings.Replace(sqlInsert, "RETURNING n.id", "RETURNING "+columns, 1), topic, "id")
	return told
}

// telling keeps the statement's name on its first line.
func telling(sql, topic, answer string) string {
	name, body, _ := strings.Cut(sql, "\n")
	return name + "\nWITH moved AS (\n" + body + "\n), told AS (\n" + fmt.Sprintf(writeEvents, movedAtAnEnd, topic) +
		"\n)\nSELECT " + answer + " FROM moved"
}

// cancelTooLate tells of mails that were SENT before their cancel came. SENT is
// final, so this may stand in a statement of its own: a crash before it brings
// the cancel back, and a repetition makes no second event (C-09).
func cancelTooLate(topic string) string {
	if topic == "" {
		return ""
	}
	return "-- cancel_too_late\n" + fmt.Sprintf(writeEvents, sentBeforeCancel, topic)
}

const bouncedAfterSent = `SELECT n.*, 'EmailBounced' AS told
  FROM notifications n WHERE n.dedupe_key = $1 AND n.status = 'SENT' AND n.booking_id <> ''`

// bounced tells of a mail that came back after it was SENT, as cancelTooLate
// does: a provider that says it twice makes one event.
func bounced(topic string) string {
	if topic == "" {
		return ""
	}
	return "-- bounced\n" + fmt.Sprintf(writeEvents, bouncedAfterSent, topic)
}

// topicPattern is what Kafka takes; it also keeps the topic fit for a literal.
var topicPattern = regexp.MustCompile(`^[A-Za-z0-9._-]{1,249}$`)

// ValidateEvents checks the topic of the mail events alone.
func (c Config) ValidateEvents() error {
	topic := c.Events
	if topic != "" && !topicPattern.MatchString(topic) {
		return errors.New("topic of the mail events must match " + topicPattern.String())
	}
	return nil
}
