// Package wal turns Postgres' write-ahead log into evidence: every committed
// change of the followed tables, in commit order, with the values before and
// after (as far as the table's replica identity logs them). It needs nothing
// of the system under test but a superuser's URL and wal_level = logical.
//
// It guarantees that a change committed between [Start] and [Collector.Stop]
// reaches the sink exactly once, also when Postgres is killed with SIGKILL in
// between, and that the log is not kept for longer than a few polls.
//
// How: a logical slot with the plug-in test_decoding, which every Postgres
// brings along, is read with pg_logical_slot_peek_changes, and only advanced
// once the changes are with the sink. pg_logical_slot_get_changes would advance
// the slot although its answer may never arrive. A slot's position is written
// to disk by checkpoints alone, so after a crash it can go back: what comes
// again is known by the log position of its commit, and left out.
//
// Package wal must not know the schema of any system.
package wal
