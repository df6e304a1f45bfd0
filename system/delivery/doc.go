// Package delivery holds the row of one mail, its states, and one SQL statement
// per transition. The row decides; a message, a job or a sweep only says which
// row to look at.
//
// # The table
//
// W is a waiting row: PENDING, or FAILED after a try that failed. Each line is
// one statement in sql.go, one transition of the model in model_test.go, and
// carries the same name in both.
//
//	statement        from, guard                                          to
//	insert           absent                                               PENDING (EXPIRED when the event came too late)
//	claim            W, due, sendable                                     SENDING; token, attempts, unsettled +1
//	                 SENDING, lease over, resendable, sendable            SENDING; token, attempts, unsettled +1
//	accepted         SENDING, own token                                   SENT
//	accepted_late    W or UNKNOWN                                         SENT
//	                 SENDING by another                                   flag; its holder's settle makes it SENT
//	transient        SENDING, own token                                   unsettled -1; tries again: FAILED; else *end*
//	permanent        SENDING, own token                                   unsettled -1; *end*
//	ambiguous        SENDING, own token                                   hold, used up or cancel requested: UNKNOWN; else FAILED
//	*end*            unsettled > 0 / = 0, cancel requested / = 0          UNKNOWN / CANCELLED / DEAD, dead letter not stamped
//	lease_over       SENDING, lease over, not (resendable and sendable)   UNKNOWN (SENT if flagged)
//	cancel           absent                                               CANCELLED tombstone without event id
//	                 W with unsettled 0, DEAD                             CANCELLED
//	                 W with unsettled > 0                                 UNKNOWN, cancel requested
//	                 SENDING, UNKNOWN                                     cancel requested; answered when the attempt settles
//	                 SENT, EXPIRED, or a key of a newer generation        unchanged
//	cancel_booking   the booking's other keys                             as cancel
//	cancel_campaign  refused claim, campaign stopped                      as cancel
//	expire           W past expires_at                                    EXPIRED (UNKNOWN with unsettled > 0)
//	park             W, a channel that has no sender                      *end*
//	replay           DEAD, no cancel request                              PENDING; limit = attempts + N; token kept
//	found            UNKNOWN                                              SENT
//	proven_absent    UNKNOWN, the token that the proof covers             CANCELLED if requested, else PENDING; unsettled 0, limit ≥ attempts + 1
//	ask_again        UNKNOWN, own token, same-key, key alive, sendable      PENDING; limit ≥ attempts + 1; unsettled kept
//	send_again       SENT, EXPIRED or UNKNOWN, booking not cancelled      (its row stays) a PENDING row under "<key>:resend:<n>"
//	stamp_dlq        DEAD, the version whose letter was confirmed         stamped
//
// claim, store_mail, accepted, and the ends by cancel_campaign and expire of a
// row that waits, also stand as "…_group": the same guards and assignments for
// several rows, each with its own token ([Group]). A row that another
// transaction holds is left out there, and asked for alone.
//
// The words of the guards:
//
//	due         next_attempt_at and send_after have passed
//	sendable    attempts < limit, no cancel request, no late 250 flagged, not
//	            past expires_at, a channel with a sender, campaign not stopped
//	lease over  locked_until has passed, and the database has been up for
//	            longer than a lease
//	resendable  the type's policy is same-key or resend
//	own token   the row's token is the one that the claim gave
//
// unsettled counts the attempts whose outcome is not durably known. A claim
// adds one; a definite refusal by the token's holder takes it back; an
// ambiguous reply, a crash and a takeover leave it. It is what keeps DEAD,
// CANCELLED and EXPIRED true: none of them is reached while an attempt may
// still have delivered.
//
// # What it guarantees
//
// For a row whose workers check their lease before the final dot: at most one
// copy under hold; at most one for each key that the receiver deduplicates; at
// most one more than there are unsettled attempts under resend. No try starts
// while an earlier one is on record as accepted. No try starts after a cancel
// is on record. SENT means a copy exists; DEAD, CANCELLED and EXPIRED mean that
// none does and none will. No state is left without a way on, once someone
// looks (a doorbell, the sweeper, the reconciler).
//
// These are checked, for every policy, over all states that two workers, the
// receiver, the sweeper and the reconciler can reach in any order
// (search_test.go); each guard is shown to be needed by taking it away there
// (two stand behind another guard, and are taken away together with it); and
// the statements are compared with that model on a real Postgres
// (differential_test.go). Where the table meets the clock of a lease, a takeover
// after a restart of the database and the sweeper's grace, store_test.go looks.
//
// A store may write each end of a booking's mail as an event into an outbox
// table, in the transition's own statement (events.go).
//
// Only the database's clock is used. Package delivery imports system/contract and
// system/migrate and nothing else of this module; it knows neither brokers nor
// senders.
package delivery
