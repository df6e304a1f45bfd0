package wal

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"mailproof/history"
)

// Config of a collector.
type Config struct {
	// Database as the changes name it.
	Database string
	// URL of that database, for a superuser (or a role with REPLICATION).
	URL string
	// Tables to follow, schema-qualified; one that does not exist yet is
	// followed once it does. For values before a change the table needs
	// REPLICA IDENTITY FULL.
	Tables []string
	// Drop names columns whose values are replaced by their length and hash:
	// whole mails, for example.
	Drop []string
	// Identity is the column by whose value the rows of a followed table are told
	// apart, "id" for one. Where it is given and a table has it, each row is
	// written down whole once, and of later changes what they changed
	// ([history.Change.Delta]). "" writes every row whole.
	Identity string
	// Sink is given each change, from one goroutine at a time. Its error ends
	// the collector.
	Sink func(history.Change) error
}

// retryEvery is the wait before Postgres is asked again after an error.
const retryEvery = 200 * time.Millisecond

// Stats of a collector.
type Stats struct {
	Transactions int64 // with changes in the followed tables
	Changes      int64
	Repeated     int64 // transactions that came again after a crash, and were left out
	Reconnects   int64
}

// Collector reads one database's log.
type Collector struct {
	cfg     Config
	slot    string
	printed map[string]string // table as test_decoding prints it → as configured

	cancel context.CancelFunc
	done   chan struct{} // closed when the reader has ended

	// Of the reader; others look at failed after done.
	tx     transaction
	order  int64
	last   lsn                  // of the last commit that the sink has
	seen   lsn                  // everything up to here has been read
	whole  map[rowName]struct{} // rows that the sink has been given whole
	failed error                // for good: the evidence is not whole

	mu    sync.Mutex
	stats Stats
}

// Start makes the slot and returns: every transaction that commits from now on
// is seen. It waits for the transactions that are open at that moment.
func Start(ctx context.Context, cfg Config) (*Collector, error) {
	if cfg.Sink == nil || len(cfg.Tables) == 0 || cfg.Database == "" {
		return nil, errors.New("wal: database, tables and sink must be set")
	}
	c := &Collector{cfg: cfg, slot: slotName(cfg.Database), printed: map[string]string{}, done: make(chan struct{}), whole: map[rowName]struct{}{}}
	if err := c.ask(ctx, c.prepare); err != nil {
		return nil, c.wrap(err)
	}
	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	c.cancel = cancel
	go c.run(running)
	return c, nil
}

// slotName is unique among the runs on one server.
func slotName(database string) string {
	var tail [6]byte
	rand.Read(tail[:]) // never fails
	clean := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '_' {
			return r
		}
		return '_'
	}, strings.ToLower(database))
	return fmt.Sprintf("mailproof_%.32s_%s", clean, hex.EncodeToString(tail[:]))
}

func (c *Collector) prepare(ctx context.Context, conn *pgx.Conn) error {
	for _, table := range c.cfg.Tables {
		schema, name, ok := strings.Cut(table, ".")
		if !ok {
			return fmt.Errorf("table %q is not schema-qualified", table)
		}
		var printed string
		if err := conn.QueryRow(ctx, "SELECT format('%I.%I', $1::text, $2::text)", schema, name).Scan(&printed); err != nil {
			return fmt.Errorf("table %s: %w", table, err)
		}
		c.printed[printed] = table
	}
	if _, err := conn.Exec(ctx, "SELECT pg_create_logical_replication_slot($1, 'test_decoding')", c.slot); err != nil {
		return fmt.Errorf("create slot: %w", err)
	}
	return nil
}

// ask runs f on an ordinary connection of its own.
func (c *Collector) ask(ctx context.Context, f func(context.Context, *pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, c.cfg.URL)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer closeSoon(conn.Close)
	return f(ctx, conn)
}

// closeSoon closes a connection without waiting for a server that may have been
// stopped.
func closeSoon(close func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = close(ctx) // whatever was asked has been answered
}

func (c *Collector) wrap(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("wal of %s: %w", c.cfg.Database, err)
}

// run streams until the end mark has been read, ctx ends, or the evidence is
// known to be broken. Every other error is Postgres' absence, and passes.
func (c *Collector) run(ctx context.Context) {
	defer close(c.done)
	for {
		err := c.stream(ctx)
		if err == nil || ctx.Err() != nil {
			return
		}
		if final(err) {
			c.failed = err
			return
		}
		c.count(func(s *Stats) { s.Reconnects++ })
		select {
		case <-ctx.Done():
			return
		case <-time.After(retryEvery):
		}
	}
}

var errSink = errors.New("sink")

// final tells the errors that mean that changes are missing: the slot is gone
// or was invalidated, a line that cannot be read, a sink that takes no more.
func final(err error) bool {
	if errors.Is(err, errSyntax) || errors.Is(err, errSink) {
		return true
	}
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && (pgErr.Code == "42704" || pgErr.Code == "55000")
}

// transaction is one that is being read.
type transaction struct {
	xid     uint64
	changes []history.Change
}

const markPrefix = "message: "

// line takes in one line of test_decoding. end is true for the end mark.
func (c *Collector) line(at lsn, line string) (end bool, err error) {
	switch {
	case strings.HasPrefix(line, "BEGIN "):
		c.tx.changes = c.tx.changes[:0]
		c.tx.xid, err = parseBegin(line)
		return false, err
	case strings.HasPrefix(line, "COMMIT "):
		return false, c.commit(at, line)
	case strings.HasPrefix(line, markPrefix):
		return strings.Contains(line, " prefix: "+c.slot+","), nil
	}
	if !c.follows(line) {
		return false, nil
	}
	r, err := parseRow(line, c.drops)
	if err != nil || r.op == "TRUNCATE" {
		return false, err
	}
	c.tx.changes = append(c.tx.changes, history.Change{
		Database: c.cfg.Database, Table: c.printed[r.table], Op: r.op, XID: c.tx.xid, LSN: at.String(), Old: r.old, New: r.new,
	})
	return false, nil
}

// follows reports a line of a followed table, before it is read as a whole: the
// others may hold whole mails.
func (c *Collector) follows(line string) bool {
	rest, ok := strings.CutPrefix(line, "table ")
	if !ok {
		return false
	}
	for printed := range c.printed {
		if after, ok := strings.CutPrefix(rest, printed); ok && strings.HasPrefix(after, ": ") {
			return true
		}
	}
	return false
}

func (c *Collector) drops(column string) bool { return slices.Contains(c.cfg.Drop, column) }

// commit hands a transaction to the sink, unless it did so before a crash took
// the slot back.
func (c *Collector) commit(at lsn, line string) error {
	when, err := parseCommit(line)
	if err != nil {
		return err
	}
	if at <= c.last {
		c.count(func(s *Stats) { s.Repeated++ })
		return nil
	}
	for _, change := range c.tx.changes {
		c.order++
		change.Order, change.CommitAt = c.order, when
		c.shorten(&change)
		if err := c.cfg.Sink(change); err != nil {
			return fmt.Errorf("%w: %w", errSink, err)
		}
	}
	c.last, c.seen = at, max(c.seen, at)
	if n := len(c.tx.changes); n > 0 {
		c.count(func(s *Stats) { s.Transactions++; s.Changes += int64(n) })
	}
	return nil
}

type rowName struct{ table, id string }

// shorten leaves out of a change what the sink has been told before.
func (c *Collector) shorten(change *history.Change) {
	if c.cfg.Identity == "" {
		return
	}
	id, ok := change.New[c.cfg.Identity]
	if change.Op == "DELETE" {
		id, ok = change.Old[c.cfg.Identity]
	}
	if !ok {
		return
	}
	change.Row = id
	name := rowName{change.Table, id}
	_, known := c.whole[name]
	switch {
	case change.Op == "DELETE":
		delete(c.whole, name)
	case change.Op == "UPDATE" && known && change.Old != nil:
		change.Delta = true
		for column, v := range change.Old {
			if now, still := change.New[column]; still && now == v {
				delete(change.Old, column)
				delete(change.New, column)
			}
		}
	default:
		c.whole[name] = struct{}{}
	}
}

func (c *Collector) count(f func(*Stats)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f(&c.stats)
}

// Database is the name under which its changes are recorded.
func (c *Collector) Database() string { return c.cfg.Database }

// Stats of the collector so far.
func (c *Collector) Stats() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stats
}

// Stop reads what was committed up to now, drops the slot and ends the
// collector. While Postgres cannot be reached it waits, until ctx ends. An
// error means that the evidence is not whole, or that the slot may be left.
func (c *Collector) Stop(ctx context.Context) error {
	err := c.retry(ctx, "write the end mark", c.mark)
	if err == nil {
		select {
		case <-c.done:
			err = c.failed
		case <-ctx.Done():
			err = fmt.Errorf("read up to the end mark: %w", context.Cause(ctx))
		}
	}
	c.cancel()
	<-c.done
	return c.wrap(errors.Join(err, c.retry(ctx, "drop slot", c.dropSlot)))
}

// mark writes the end mark in a transaction of its own, so that it is flushed
// and comes in commit order.
func (c *Collector) mark(ctx context.Context, conn *pgx.Conn) error {
	_, err := conn.Exec(ctx, "SELECT pg_logical_emit_message(true, $1, 'end')", c.slot)
	return err
}

// dropSlot drops the slot if it is there: the answer to an earlier drop may
// have been lost.
func (c *Collector) dropSlot(ctx context.Context, conn *pgx.Conn) error {
	_, err := conn.Exec(ctx, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = $1", c.slot)
	return err
}

// retry asks until there is an answer or ctx ends.
func (c *Collector) retry(ctx context.Context, what string, f func(context.Context, *pgx.Conn) error) error {
	for {
		err := c.ask(ctx, f)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w (last error: %w)", what, context.Cause(ctx), err)
		case <-time.After(retryEvery):
		}
	}
}
