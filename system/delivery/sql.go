package delivery

// Every statement of the store. Each row of the table in the package comment
// is one of them, under the same name; the name is the statement's first line,
// so that it can be read in pg_stat_activity and in the server's log.
//
// Rules that all of them keep:
//   - one conditional statement decides; what a refused one should answer is
//     looked up afterwards, never before (C-09);
//   - only the database's clock counts. statement_timestamp() is the earliest
//     moment that the statement can claim for itself: a statement that waited
//     for a lock sees a lease as longer than it is, never as shorter;
//   - a transition raises version and sets changed_at; token only ever rises,
//     and only in a claim.

// Conditions, written once.
const (
	clock = `statement_timestamp()`

	waiting = `n.status IN ('PENDING', 'FAILED')`

	due = `(coalesce(n.next_attempt_at <= ` + clock + `, true) AND coalesce(n.send_after <= ` + clock + `, true))`

	// dueSince is the expression of the index notifications_waiting.
	dueSince = `coalesce(greatest(n.next_attempt_at, n.send_after), n.created_at)`

	pastExpiry = `coalesce(n.expires_at <= ` + clock + `, false)`

	stopped = `EXISTS (SELECT FROM stopped_campaigns c WHERE c.campaign_id = n.campaign_id)`

	// sendable is what a first claim and a takeover both ask. late_accepted:
	// a row that knows of a 250 needs no further try.
	sendable = `n.attempts < n.attempt_limit
  AND NOT n.cancel_requested
  AND NOT n.late_accepted
  AND n.channel = 'EMAIL'
  AND NOT ` + pastExpiry + `
  AND NOT ` + stopped

	// leaseOver, with the lease as $2. The database must also have been up for
	// longer than a lease: while it was down no worker could settle, and a
	// worker that holds a 250 gets that time back before anyone sends again.
	leaseOver = `(n.status = 'SENDING' AND n.locked_until < ` + clock + `
  AND pg_postmaster_start_time() + $2::interval < ` + clock + `)`

	// resendable, with the types whose policy is same-key or resend as $3.
	resendable = `n.type = ANY($3::text[])`

	cancellable = `(n.status IN ('PENDING', 'FAILED', 'DEAD')
  OR (n.status IN ('SENDING', 'UNKNOWN') AND NOT n.cancel_requested))`
)

// Assignments, written once.
const (
	transition = `version = n.version + 1, changed_at = ` + clock

	// flagged: the row was accepted under an earlier token while this one was
	// held, so its holder's settle makes it SENT whatever it brings.
	flaggedSent = `sent_at = CASE WHEN n.late_accepted THEN ` + clock + ` END,
  provider_msg_id = CASE WHEN n.late_accepted THEN n.late_provider_id ELSE n.provider_msg_id END`

	setCancelled = `status = CASE
    WHEN n.status = 'DEAD' OR ` + waiting + ` AND n.unsettled = 0 THEN 'CANCELLED'
    WHEN ` + waiting + ` THEN 'UNKNOWN'
    ELSE n.status END,
  cancel_requested = true,
  next_attempt_at = NULL,
  ` + transition

	setExpired = `status = CASE WHEN n.unsettled > 0 THEN 'UNKNOWN' ELSE 'EXPIRED' END,
  next_attempt_at = NULL,
  ` + transition

	setLeaseOver = `status = CASE WHEN n.late_accepted THEN 'SENT' ELSE 'UNKNOWN' END,
  ` + flaggedSent + `,
  locked_until = NULL,
  last_error = coalesce(n.last_error, 'lease over, outcome not known'),
  ` + transition

	setClaimed = `status = 'SENDING',
  attempts = n.attempts + 1,
  token = n.token + 1,
  unsettled = n.unsettled + 1,
  locked_until = ` + clock + ` + $2::interval,
  next_attempt_at = NULL,
  first_claimed_at = coalesce(n.first_claimed_at, ` + clock + `),
  rescues = 0,
  rescued_at = NULL,
  ` + transition
)

// The columns in the order of Row.dest.
const (
	columns = `n.id, n.dedupe_key, n.booking_id, n.campaign_id, n.event_id, n.type, n.channel, n.recipient, n.payload,
  n.status, n.generation, n.attempts, n.attempt_limit, n.token, n.unsettled,
  n.cancel_requested, n.late_accepted, n.late_provider_id,
  n.locked_until, n.next_attempt_at, n.send_after, n.expires_at, n.published_at, n.dlq_published_at,
  n.first_claimed_at, n.provider_msg_id, n.last_error, n.rescues, n.created_at, n.changed_at, n.sent_at, n.version`

	mailColumn = `(SELECT m.mail FROM notification_mails m WHERE m.notification_id = n.id)`

	// waitColumn: until the row is due.
	waitColumn = `coalesce(greatest(n.next_attempt_at, n.send_after) - ` + clock + `, interval '0')`
)

// sqlInsert: absent → PENDING (EXPIRED for an event that came too late).
// Ordered by key, so that two batches cannot wait for each other crosswise.
const sqlInsert = `-- insert
INSERT INTO notifications AS n
  (id, dedupe_key, booking_id, campaign_id, event_id, type, channel, recipient, payload,
   status, generation, attempt_limit, send_after, expires_at)
SELECT u.id, u.dedupe_key, u.booking_id, u.campaign_id, u.event_id, u.type, u.channel, u.recipient, u.payload::jsonb,
   CASE WHEN u.stale THEN 'EXPIRED' ELSE 'PENDING' END, u.generation, $1, u.send_after, u.expires_at
FROM unnest($2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[],
   $10::text[], $11::bool[], $12::int[], $13::timestamptz[], $14::timestamptz[])
  AS u(id, dedupe_key, booking_id, campaign_id, event_id, type, channel, recipient,
   payload, stale, generation, send_after, expires_at)
ORDER BY u.dedupe_key
ON CONFLICT DO NOTHING
RETURNING n.id`

// sqlInsertLook finds what stood in the way of an insert: the key (another
// event for the same intent) or the event id (the same event again).
const sqlInsertLook = `-- insert_look
SELECT ` + columns + `
FROM notifications n
WHERE n.dedupe_key = ANY($1::text[]) OR n.event_id = ANY($2::text[])`

const sqlStampPublished = `-- stamp_published
UPDATE notifications n SET published_at = ` + clock + `
WHERE n.id = ANY($1::uuid[]) AND n.published_at IS NULL`

// sqlClaim: W when due, or SENDING past its lease, → SENDING.
const sqlClaim = `-- claim
UPDATE notifications n SET ` + setClaimed + `
WHERE n.id = $1
  AND ` + sendable + `
  AND (` + waiting + ` AND ` + due + `
    OR ` + leaseOver + ` AND ` + resendable + `)
RETURNING ` + columns + `, ` + mailColumn

// sqlClaimBatch is claim for a lane without a broker (A1-05): due rows in
// order, then leases that are over; rows that another transaction holds are
// left to it.
const sqlClaimBatch = `-- claim_batch
WITH due AS (
  SELECT n.id FROM notifications n
  WHERE n.type = $4 AND ` + waiting + ` AND ` + dueSince + ` <= ` + clock + ` AND ` + due + ` AND ` + sendable + `
  ORDER BY ` + dueSince + `
  LIMIT $1 FOR UPDATE SKIP LOCKED
), over AS (
  SELECT n.id FROM notifications n
  WHERE n.type = $4 AND ` + leaseOver + ` AND ` + resendable + ` AND ` + sendable + `
  ORDER BY n.locked_until
  LIMIT $1 FOR UPDATE SKIP LOCKED
), picked AS (
  SELECT id FROM due UNION ALL SELECT id FROM over LIMIT $1
)
UPDATE notifications n SET ` + setClaimed + `
FROM picked WHERE n.id = picked.id
RETURNING ` + columns + `, ` + mailColumn

// sqlClaimGroup is claim for several rows that workers ask for in the same
// moment (see [Group]). A row that another transaction holds is left out: a
// statement that never waits can wait for nobody crosswise.
const sqlClaimGroup = `-- claim_group
WITH asked AS (
  SELECT n.id FROM unnest($1::uuid[]) AS u(id)
  JOIN notifications n ON n.id = u.id
  WHERE ` + sendable + `
    AND (` + waiting + ` AND ` + due + `
      OR ` + leaseOver + ` AND ` + resendable + `)
  FOR UPDATE OF n SKIP LOCKED
)
UPDATE notifications n SET ` + setClaimed + `
FROM asked WHERE n.id = asked.id
RETURNING ` + columns + `, ` + mailColumn

// sqlClaimLook says why a claim was refused, so that the answer is the right
// one and a row that nobody may claim does not wait for ever.
const sqlClaimLook = `-- claim_look
SELECT ` + columns + `,
  CASE
    WHEN ` + waiting + ` AND ` + stopped + ` OR ` + leaseOver + ` AND NOT n.cancel_requested AND ` + stopped + ` THEN 'stopped'
    WHEN ` + waiting + ` AND ` + pastExpiry + ` THEN 'expired'
    WHEN ` + waiting + ` AND n.channel <> 'EMAIL' THEN 'unsupported'
    WHEN ` + leaseOver + ` AND NOT (` + resendable + ` AND ` + sendable + `) THEN 'lease over'
    WHEN ` + waiting + ` OR n.status = 'SENDING' THEN 'wait'
    ELSE 'settled'
  END,
  CASE WHEN n.status = 'SENDING'
    THEN greatest(n.locked_until, pg_postmaster_start_time() + $2::interval) - ` + clock + `
    ELSE ` + waitColumn + `
  END
FROM notifications n
WHERE n.id = $1`

// sqlStoreMail keeps the first bytes that a holder of the row rendered.
const sqlStoreMail = `-- store_mail
INSERT INTO notification_mails AS m (notification_id, mail)
SELECT n.id, $3 FROM notifications n
WHERE n.id = $1 AND n.status = 'SENDING' AND n.token = $2
ON CONFLICT (notification_id) DO NOTHING
RETURNING m.mail`

// sqlStoreMailGroup is store_mail for several rows, each with its own token.
// Ordered, so that two holders of the same rows cannot wait for each other
// crosswise.
const sqlStoreMailGroup = `-- store_mail_group
INSERT INTO notification_mails AS m (notification_id, mail)
SELECT n.id, u.mail
FROM unnest($1::uuid[], $2::bigint[], $3::bytea[]) AS u(id, token, mail)
JOIN notifications n ON n.id = u.id
WHERE n.status = 'SENDING' AND n.token = u.token
ORDER BY n.id
ON CONFLICT (notification_id) DO NOTHING
RETURNING m.notification_id`

const sqlStoreMailLook = `-- store_mail_look
SELECT m.mail FROM notifications n
JOIN notification_mails m ON m.notification_id = n.id
WHERE n.id = $1 AND n.status = 'SENDING' AND n.token = $2`

// sqlAccepted: SENDING, own token → SENT.
const sqlAccepted = `-- accepted
UPDATE notifications n SET
  status = 'SENT',
  provider_msg_id = $3,
  sent_at = ` + clock + `,
  locked_until = NULL,
  ` + transition + `
WHERE n.id = $1 AND n.status = 'SENDING' AND n.token = $2
RETURNING ` + columns + `, ` + waitColumn

// sqlAcceptedGroup is accepted for several rows, each with its own token.
const sqlAcceptedGroup = `-- accepted_group
WITH held AS (
  SELECT n.id, u.provider_msg_id
  FROM unnest($1::uuid[], $2::bigint[], $3::text[]) AS u(id, token, provider_msg_id)
  JOIN notifications n ON n.id = u.id
  WHERE n.status = 'SENDING' AND n.token = u.token
  FOR UPDATE OF n SKIP LOCKED
)
UPDATE notifications n SET
  status = 'SENT',
  provider_msg_id = held.provider_msg_id,
  sent_at = ` + clock + `,
  locked_until = NULL,
  ` + transition + `
FROM held WHERE n.id = held.id
RETURNING ` + columns + `, ` + waitColumn

// sqlAcceptedLate: the token moved on. W, UNKNOWN → SENT; SENDING by another →
// flag. One statement for both, since the row may pass from one to the other
// between two.
const sqlAcceptedLate = `-- accepted_late
UPDATE notifications n SET
  status = CASE WHEN n.status = 'SENDING' THEN n.status ELSE 'SENT' END,
  late_accepted = n.status = 'SENDING',
  late_provider_id = CASE WHEN n.status = 'SENDING' THEN $3 END,
  provider_msg_id = CASE WHEN n.status = 'SENDING' THEN n.provider_msg_id ELSE $3 END,
  sent_at = CASE WHEN n.status <> 'SENDING' THEN ` + clock + ` END,
  next_attempt_at = NULL,
  ` + transition + `
WHERE n.id = $1
  AND ((n.status IN ('PENDING', 'FAILED', 'UNKNOWN') AND n.token >= $2)
    OR (n.status = 'SENDING' AND n.token > $2 AND NOT n.late_accepted))
RETURNING ` + columns + `, ` + waitColumn

// triesAgain: a throttle or a refusal of the lane ($3) costs no attempt.
const triesAgain = `(NOT n.cancel_requested AND ($3 OR n.attempts < n.attempt_limit))`

// sqlTransient: SENDING, own token → FAILED, or *end*.
const sqlTransient = `-- transient
UPDATE notifications n SET
  unsettled = n.unsettled - 1,
  attempts = n.attempts - CASE WHEN $3 THEN 1 ELSE 0 END,
  status = CASE
    WHEN n.late_accepted THEN 'SENT'
    WHEN ` + triesAgain + ` THEN 'FAILED'
    WHEN n.unsettled > 1 THEN 'UNKNOWN'
    WHEN n.cancel_requested THEN 'CANCELLED'
    ELSE 'DEAD' END,
  next_attempt_at = CASE WHEN NOT n.late_accepted AND ` + triesAgain + ` THEN ` + clock + ` + coalesce($4::interval,
    ($5::interval[])[least(greatest(n.attempts - CASE WHEN $3 THEN 1 ELSE 0 END, 1), cardinality($5::interval[]))]) END,
  ` + flaggedSent + `,
  locked_until = NULL,
  dlq_published_at = NULL,
  last_error = $6,
  ` + transition + `
WHERE n.id = $1 AND n.status = 'SENDING' AND n.token = $2
RETURNING ` + columns + `, ` + waitColumn

// sqlPermanent: SENDING, own token → *end*.
const sqlPermanent = `-- permanent
UPDATE notifications n SET
  unsettled = n.unsettled - 1,
  status = CASE
    WHEN n.late_accepted THEN 'SENT'
    WHEN n.unsettled > 1 THEN 'UNKNOWN'
    WHEN n.cancel_requested THEN 'CANCELLED'
    ELSE 'DEAD' END,
  ` + flaggedSent + `,
  locked_until = NULL,
  dlq_published_at = NULL,
  last_error = $3,
  ` + transition + `
WHERE n.id = $1 AND n.status = 'SENDING' AND n.token = $2
RETURNING ` + columns + `, ` + waitColumn

// staysOpen: hold, used up or cancel requested; $3 as in resendable.
const staysOpen = `(NOT ` + resendable + ` OR n.attempts >= n.attempt_limit OR n.cancel_requested)`

// sqlAmbiguous: SENDING, own token → FAILED or UNKNOWN. unsettled stays.
const sqlAmbiguous = `-- ambiguous
UPDATE notifications n SET
  status = CASE
    WHEN n.late_accepted THEN 'SENT'
    WHEN ` + staysOpen + ` THEN 'UNKNOWN'
    ELSE 'FAILED' END,
  next_attempt_at = CASE WHEN NOT n.late_accepted AND NOT ` + staysOpen + ` THEN ` + clock + ` +
    ($4::interval[])[least(greatest(n.attempts, 1), cardinality($4::interval[]))] END,
  ` + flaggedSent + `,
  locked_until = NULL,
  last_error = $5,
  ` + transition + `
WHERE n.id = $1 AND n.status = 'SENDING' AND n.token = $2
RETURNING ` + columns + `, ` + waitColumn

// sqlLeaseOver: SENDING past its lease that nobody may claim → UNKNOWN, or
// SENT when a late 250 was flagged.
const sqlLeaseOver = `-- lease_over
UPDATE notifications n SET ` + setLeaseOver + `
WHERE n.id = $1 AND ` + leaseOver + ` AND NOT (` + resendable + ` AND ` + sendable + `)
RETURNING ` + columns

const sqlLeaseOverBatch = `-- lease_over_batch
WITH over AS (
  SELECT n.id FROM notifications n
  WHERE ` + leaseOver + ` AND NOT (` + resendable + ` AND ` + sendable + `)
  ORDER BY n.locked_until
  LIMIT $1 FOR UPDATE SKIP LOCKED
)
UPDATE notifications n SET ` + setLeaseOver + `
FROM over WHERE n.id = over.id
RETURNING ` + columns

// sqlCancel: one statement for every state of the named key (C-07); an absent
// one leaves a tombstone without an event id. A cancel that is older than the
// key's generation changes nothing.
const sqlCancel = `-- cancel
INSERT INTO notifications AS n
  (id, dedupe_key, booking_id, event_id, type, channel, recipient, payload, status, generation, attempt_limit, cancel_requested)
VALUES ($1, $2, $3, NULL, $4, $5, $6, '{}', 'CANCELLED', $7, $8, true)
ON CONFLICT (dedupe_key) DO UPDATE SET ` + setCancelled + `
WHERE n.generation <= EXCLUDED.generation AND ` + cancellable + `
RETURNING ` + columns

// sqlNoteCancel remembers the cancelled booking itself.
const sqlNoteCancel = `-- note_cancel
INSERT INTO cancelled_bookings AS c (booking_id, generation) VALUES ($1, $2)
ON CONFLICT (booking_id) DO UPDATE SET generation = greatest(c.generation, EXCLUDED.generation), cancelled_at = ` + clock

// sqlCancelBooking is cancel for the booking's other mails (C-04).
const sqlCancelBooking = `-- cancel_booking
UPDATE notifications n SET ` + setCancelled + `
WHERE n.booking_id = $1 AND n.booking_id <> '' AND n.generation <= $2 AND n.dedupe_key <> $3 AND ` + cancellable + `
RETURNING ` + columns

// sqlCancelCampaign is cancel by the flag of the row's campaign (C-14), for a
// row that a claim was refused for.
const sqlCancelCampaign = `-- cancel_campaign
UPDATE notifications n SET ` + setCancelled + `
WHERE n.id = $1 AND ` + stopped + ` AND (` + waiting + ` OR ` + leaseOver + ` AND NOT n.cancel_requested)
RETURNING ` + columns

// sqlCancelCampaignGroup is cancel_campaign for the waiting ones of several rows.
const sqlCancelCampaignGroup = `-- cancel_campaign_group
WITH asked AS (
  SELECT n.id FROM notifications n
  WHERE n.id = ANY($1::uuid[]) AND ` + waiting + ` AND ` + stopped + `
  FOR UPDATE SKIP LOCKED
)
UPDATE notifications n SET ` + setCancelled + `
FROM asked WHERE n.id = asked.id
RETURNING ` + columns

const sqlStopCampaign = `-- stop_campaign
INSERT INTO stopped_campaigns (campaign_id) VALUES ($1) ON CONFLICT DO NOTHING`

const sqlCampaignStopped = `-- campaign_stopped
SELECT c.stopped_at FROM stopped_campaigns c WHERE c.campaign_id = $1`

const sqlCampaignState = `-- campaign_state
SELECT n.status, count(*), min(n.created_at), max(n.created_at), min(n.sent_at), max(n.sent_at)
FROM notifications n WHERE n.campaign_id = $1 GROUP BY n.status`

// sqlExpire: W past expires_at → EXPIRED, or UNKNOWN when a try is unsettled.
const sqlExpire = `-- expire
UPDATE notifications n SET ` + setExpired + `
WHERE n.id = $1 AND ` + waiting + ` AND ` + pastExpiry + `
RETURNING ` + columns

// sqlExpireGroup is expire for several rows.
const sqlExpireGroup = `-- expire_group
WITH asked AS (
  SELECT n.id FROM notifications n
  WHERE n.id = ANY($1::uuid[]) AND ` + waiting + ` AND ` + pastExpiry + `
  FOR UPDATE SKIP LOCKED
)
UPDATE notifications n SET ` + setExpired + `
FROM asked WHERE n.id = asked.id
RETURNING ` + columns

const sqlExpireBatch = `-- expire_batch
WITH old AS (
  SELECT n.id FROM notifications n
  WHERE ` + waiting + ` AND n.expires_at <= ` + clock + `
  ORDER BY n.expires_at
  LIMIT $1 FOR UPDATE SKIP LOCKED
)
UPDATE notifications n SET ` + setExpired + `
FROM old WHERE n.id = old.id
RETURNING ` + columns

// sqlPark: W → *end* without a try, for a channel that has no sender.
const sqlPark = `-- park
UPDATE notifications n SET
  status = CASE WHEN n.unsettled > 0 THEN 'UNKNOWN' WHEN n.cancel_requested THEN 'CANCELLED' ELSE 'DEAD' END,
  next_attempt_at = NULL,
  dlq_published_at = NULL,
  last_error = $2,
  ` + transition + `
WHERE n.id = $1 AND ` + waiting + `
RETURNING ` + columns + `, ` + waitColumn

// sqlReplay: DEAD, no cancel request → PENDING. The token is kept: an old
// worker must not be taken for the new one.
const sqlReplay = `-- replay
UPDATE notifications n SET
  status = 'PENDING',
  attempt_limit = n.attempts + $2,
  next_attempt_at = ` + clock + `,
  ` + transition + `
WHERE n.id = $1 AND n.status = 'DEAD' AND NOT n.cancel_requested
RETURNING ` + columns + `, ` + waitColumn

// sqlFound: UNKNOWN → SENT.
const sqlFound = `-- found
UPDATE notifications n SET
  status = 'SENT',
  provider_msg_id = $2,
  sent_at = ` + clock + `,
  ` + transition + `
WHERE n.id = $1 AND n.status = 'UNKNOWN'
RETURNING ` + columns + `, ` + waitColumn

// sqlProvenAbsent: UNKNOWN → CANCELLED if a cancel was requested, else PENDING
// with at least one more try. Only for the attempts that the proof covers: the
// row may have been tried again, and be UNKNOWN again, since it was made.
const sqlProvenAbsent = `-- proven_absent
UPDATE notifications n SET
  status = CASE WHEN n.cancel_requested THEN 'CANCELLED' ELSE 'PENDING' END,
  unsettled = 0,
  attempt_limit = greatest(n.attempt_limit, n.attempts + 1),
  next_attempt_at = CASE WHEN NOT n.cancel_requested THEN ` + clock + ` END,
  ` + transition + `
WHERE n.id = $1 AND n.status = 'UNKNOWN' AND n.token = $2
RETURNING ` + columns + `, ` + waitColumn

// sqlAskAgain: UNKNOWN under a key that the receiver still remembers ($4 after
// the first claim) → PENDING with at least one more try. unsettled stays: nothing
// is proven, the next try asks under the same key. The guards are a claim's.
const sqlAskAgain = `-- ask_again
UPDATE notifications n SET
  status = 'PENDING',
  attempt_limit = greatest(n.attempt_limit, n.attempts + 1),
  next_attempt_at = ` + clock + `,
  ` + transition + `
WHERE n.id = $1 AND n.status = 'UNKNOWN' AND n.token = $2
  AND n.type = ANY($3::text[])
  AND NOT n.cancel_requested
  AND n.channel = 'EMAIL'
  AND NOT ` + pastExpiry + `
  AND NOT ` + stopped + `
  AND coalesce(n.first_claimed_at + $4::interval > ` + clock + `, false)
RETURNING ` + columns + `, ` + waitColumn

// sqlOverdue counts a rescue for rows whose doorbell is lost. The grace ($2)
// doubles with each rescue, at most 1024-fold.
const sqlOverdue = `-- overdue
WITH late AS (
  SELECT n.id FROM notifications n
  WHERE n.type = $3 AND ` + waiting + ` AND ` + dueSince + ` <= ` + clock + ` - $2::interval
    AND greatest(` + dueSince + `, n.rescued_at) <= ` + clock + ` - $2::interval * power(2, least(n.rescues, 10))
    AND NOT ` + pastExpiry + `
  ORDER BY ` + dueSince + `
  LIMIT $1 FOR UPDATE SKIP LOCKED
)
UPDATE notifications n SET rescues = n.rescues + 1, rescued_at = ` + clock + `
FROM late WHERE n.id = late.id
RETURNING ` + columns

// sqlOverdueLease is overdue for leases that a worker may take over.
const sqlOverdueLease = `-- overdue_lease
WITH late AS (
  SELECT n.id FROM notifications n
  WHERE n.type = $5 AND ` + leaseOver + ` AND ` + resendable + ` AND ` + sendable + `
    AND greatest(n.locked_until, n.rescued_at) <= ` + clock + ` - $4::interval * power(2, least(n.rescues, 10))
  ORDER BY n.locked_until
  LIMIT $1 FOR UPDATE SKIP LOCKED
)
UPDATE notifications n SET rescues = n.rescues + 1, rescued_at = ` + clock + `
FROM late WHERE n.id = late.id
RETURNING ` + columns

const sqlCountDue = `-- count_due
SELECT count(*) FROM notifications n
WHERE n.type = $1 AND ` + waiting + ` AND ` + dueSince + ` <= ` + clock

const sqlUnstamped = `-- unstamped
SELECT ` + columns + ` FROM notifications n
WHERE n.status = 'DEAD' AND n.dlq_published_at IS NULL AND n.changed_at <= ` + clock + ` - $1::interval
ORDER BY n.changed_at
LIMIT $2`

// sqlStampDLQ stamps only the death whose letter was confirmed: a row that was
// replayed and died again meanwhile has a newer version and needs a letter of
// its own.
const sqlStampDLQ = `-- stamp_dlq
UPDATE notifications n SET dlq_published_at = ` + clock + `
FROM unnest($1::uuid[], $2::bigint[]) AS u(id, version)
WHERE n.id = u.id AND n.version = u.version AND n.status = 'DEAD' AND n.dlq_published_at IS NULL`

const sqlListDead = `-- list_dead
SELECT ` + columns + ` FROM notifications n
WHERE n.status = 'DEAD' AND (n.changed_at, n.id) > ($1, $2)
ORDER BY n.changed_at, n.id
LIMIT $3`

const sqlListUnknown = `-- list_unknown
SELECT ` + columns + ` FROM notifications n
WHERE n.status = 'UNKNOWN' AND (n.changed_at, n.id) > ($1, $2)
ORDER BY n.changed_at, n.id
LIMIT $3`

// sqlDeleteAtRest removes rows that need nobody any more. DEAD and UNKNOWN
// rows stay: they wait for a person. ARRAY, because the planner takes an unknown
// LIMIT for a large share of the table and would join by reading all of it.
const sqlDeleteAtRest = `-- delete_at_rest
WITH old AS (
  SELECT n.id FROM notifications n
  WHERE n.status IN ('SENT', 'CANCELLED', 'EXPIRED') AND n.changed_at < ` + clock + ` - $1::interval
  ORDER BY n.changed_at
  LIMIT $2 FOR UPDATE SKIP LOCKED
), mails AS (
  DELETE FROM notification_mails m WHERE m.notification_id = ANY(ARRAY(SELECT id FROM old))
)
DELETE FROM notifications n WHERE n.id = ANY(ARRAY(SELECT id FROM old))`

// sqlDeleteCancels forgets cancelled bookings, as old as the tombstones.
const sqlDeleteCancels = `-- delete_cancels
DELETE FROM cancelled_bookings c WHERE c.booking_id = ANY(ARRAY(
  SELECT o.booking_id FROM cancelled_bookings o WHERE o.cancelled_at < ` + clock + ` - $1::interval
  ORDER BY o.cancelled_at LIMIT $2 FOR UPDATE SKIP LOCKED))`

// sqlRaiseAlert: without an incident of its own ($4) an alert about a row is
// one per version of the row.
const sqlRaiseAlert = `-- raise_alert
INSERT INTO alerts AS a (kind, dedupe_key, incident, details)
SELECT $1, $2, coalesce($4::text, (SELECT 'version ' || n.version FROM notifications n WHERE n.dedupe_key = $2), ''), $3
ON CONFLICT (kind, dedupe_key, incident) DO NOTHING
RETURNING a.id`

const sqlGet = `-- get
SELECT ` + columns + `, ` + mailColumn + ` FROM notifications n WHERE n.id = $1`

const sqlGetByKey = `-- get_by_key
SELECT ` + columns + `, ` + mailColumn + ` FROM notifications n WHERE n.dedupe_key = $1`
