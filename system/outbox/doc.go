// Package outbox publishes events to Kafka exactly when the transaction that
// caused them was committed, at least once, in order per key.
//
// [Write] inserts the event into table outbox inside the caller's transaction:
// both are there or neither. The [Relay] reads unpublished rows in the order of
// their ids, produces them with acks=all and marks what the broker acknowledged.
//
// # What is guaranteed
//
//   - A committed event is published, or it stays visible: unpublished (its age
//     is a metric) or dead (dead_at, alerted). Only failures that are the
//     record's own lead to dead; an unreachable broker never does.
//   - A published event can be published again, with the same event_id: the
//     consumer deduplicates (requirement A2-08). No broker transaction is used.
//   - Events of one key are first published in the order of their ids, if their
//     writers held a lock on the aggregate while they inserted: then ids and
//     commits agree per key. Between keys ids and commits do not agree, and so a
//     row is found by its status, never by a watermark on ids: a transaction
//     with a lower id may commit after a higher one was published.
//
// # One relay
//
// The relay holds a session-level advisory lock on a direct connection of its
// own, and reads each batch through that very session: without the lock there is
// no batch. The server ends a session that is silent for [Config].SessionTimeout
// and so a relay that is stopped (SIGSTOP, a frozen machine) or cut off loses the
// lock and another takes over. The one that wakes up finds its session gone
// before its next batch. What it had in flight when it was stopped may still
// reach the broker late, as a duplicate.
//
// # Crash points
//
//	written, not committed      neither the row nor what caused it exists
//	committed, not rung         found by polling
//	read, not produced          read again
//	produced, not acknowledged  produced again: a duplicate, or the first copy
//	acknowledged, not marked    produced again: a duplicate with the same event_id
//	marked                      done
//	dead, not alerted           alerted by whoever leads next, perhaps twice
//
// No transaction is open while the network is waited for (TRAP-2-8).
//
// Package outbox imports nothing of this module but failpoint and migrate: booking
// and notify both use it.
package outbox
