// Package benchmarks measures the notification system on real parts and writes
// the document docs/benchmarks/m06-notification.md (M6-13).
//
// What it guarantees:
//
//   - Every figure of the system stands beside its raw floor: the same work done
//     by bare clients on the same parts in the same run. What is compared is the
//     ratio of the two; an absolute time says something about one machine on one
//     day and is never asserted.
//   - Raw samples are kept. [Result] is written as JSON after each part, so that
//     a part that fails, or an interrupt, loses nothing that was measured
//     before; Markdown and plots are made from that JSON alone ([Render]).
//   - A mail that did not arrive has an infinite latency and stays in its sample.
//   - Latency counts from the intended time of an arrival (open loop): a system
//     that stalls cannot make its own figures better by keeping clients waiting.
//
// The parts of a run are listed in parts.go, one line each. What a figure is
// taken from (commit times of the write-ahead log, the mail server's ledger,
// columns of the row, /proc) stands in the document beside it.
//
// It knows the system under test through package target alone.
package benchmarks
