// Package loadgen makes load as customers do: whether or not the system keeps
// up. Arrivals are drawn up front from a seed, made at their intended times,
// and each latency counts from the intended time, not from the moment at which
// a busy client got round to the call. A system that stalls for ten seconds is
// then seen to have stalled for every customer who came in those seconds
// (coordinated omission hides all but one of them).
//
// Guarantees:
//
//   - The same seed gives the same schedule: [Draw] uses nothing else.
//   - An arrival is made at its time or later, never earlier. One that could
//     not be made is counted; [Tally.Shortfall] names the limit, so that the
//     generator's own bounds cannot pass for the system's.
//   - What was never delivered has the latency [Never]. It cannot be left out
//     of a percentile: a p95 over 10 % of undelivered mails is ∞.
//
// Package loadgen knows no system, no transport and no evidence.
package loadgen
