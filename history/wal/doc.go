// Package wal turns Postgres' write-ahead log into evidence: every committed
// change of the followed tables, in commit order, with the values before and
// after (as far as the table's replica identity logs them). It needs nothing
// of the system under test but a superuser's URL and wal_level = logical.
//
// It guarantees that a change committed between [Start] and [Collector.Stop]
// reaches the sink exactly once, also when Postgres is killed with SIGKILL or
// stopped in between, and that the log is kept for about a second only.
//
// How: a logical slot with the plug-in test_decoding, which every Postgres
// brings along, is streamed over the replication protocol, and its position is
// confirmed once the changes are with the sink. (The SQL functions would decode
// the last seconds of log anew at each poll, and pg_logical_slot_get_changes
// moves the slot although its answer may never arrive.) A slot's position is
// written to disk by checkpoints alone, so after a crash it can go back: what
// comes again is known by the log position of its commit, and left out.
//
// The end is a message that Stop writes into the log itself: what was committed
// before it comes before it.
//
// Package wal must not know the schema of any system.
package wal
