// Package booking keeps bookings and tells other services what happens to them.
//
// Each transition locks the booking's row, changes it and writes one event to
// the outbox in the same transaction: both are committed or neither. Since the
// lock is held while the event is inserted, events of one booking have ids in
// the order of their commits, and the relay publishes them in that order.
//
//	        create            confirm
//	(none) ───────▶ NEW ───────────────────▶ CONFIRMED      BookingConfirmed
//	                 │                        │     ▲
//	                 │ cancel          cancel │     │ reopen: generation + 1
//	                 ▼                        ▼     │
//	                 └───────────────▶ CANCELLED ───┘       BookingCancelled,
//	                                                        BookingReopened
//
// Every operation may be repeated, by a client that never saw the answer: it
// changes nothing the second time and answers with the booking as it is. A
// repeat that arrives so late that the booking has moved on is told apart by the
// generation that the client has seen, if the client names it: without it a late
// repeat of "cancel" would cancel the reopened booking.
//
// What cannot be known is said: when the answer to COMMIT was lost the error is
// [ErrOutcomeUnknown], never "failed". The client repeats.
//
// Crash points: before COMMIT nothing happened; after COMMIT, with the answer
// lost, everything did and the repeat finds it; a doorbell that was not rung
// costs the relay one poll.
//
// Recipients are not checked beyond being there: whether an address is good is
// the mail service's to find out (AC5).
//
// Package booking imports contract and outbox, and must never import anything
// that sends mail.
package booking
