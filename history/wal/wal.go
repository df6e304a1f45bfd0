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
	// Every is the time between two polls, default 2 s. It bounds how much log
	// the slot holds back; each poll costs the server the decoding of what was
	// written since it last logged its running transactions, up to 15 s of log.
	Every time.Duration
	// Chunk is how many changes one poll asks for, default 20,000. A
	// transaction is never cut in two, so a poll may bring more.
	Chunk int
	// Sink is given each change, from one goroutine at a time. Its error ends
	// the collector.
	Sink func(history.Change) error
}

const (
	defaultEvery = 2 * time.Second
	defaultChunk = 20_000
	// queryLimit bounds one query: a server that was stopped with SIGSTOP never
	// answers on the connection that it had.
	queryLimit = 30 * time.Second
	retryEvery = 200 * time.Millisecond
)

// Stats of a collector.
type Stats struct {
	Transactions int64 // with changes in the followed tables
	Changes      int64
	Repeated     int64 // transactions that came again after a crash, and were left out
	Reconnects   int64
}

// Collector reads one database's log.
type Collector struct {
	cfg      Config
	slot     string
	printed  map[string]string // table as test_decoding prints it → as configured
	prefixes []string          // of the lines to read

	cancel context.CancelFunc
	done   chan struct{}

	conn    *pgx.Conn
	order   int64
	lastLSN string // of the last commit given to the sink
	last    lsn
	failed  error // for good: the evidence is not whole

	mu    sync.Mutex
	stats Stats
}

// Start makes the slot and returns: every transaction that commits from now on
// is seen. It waits for the transactions that are open at that moment.
func Start(ctx context.Context, cfg Config) (*Collector, error) {
	if cfg.Sink == nil || len(cfg.Tables) == 0 || cfg.Database == "" {
		return nil, errors.New("wal: database, tables and sink must be set")
	}
	if cfg.Every <= 0 {
		cfg.Every = defaultEvery
	}
	if cfg.Chunk <= 0 {
		cfg.Chunk = defaultChunk
	}
	c := &Collector{cfg: cfg, slot: slotName(cfg.Database), printed: map[string]string{}, done: make(chan struct{})}
	if err := c.prepare(ctx); err != nil {
		return nil, fmt.Errorf("wal of %s: %w", cfg.Database, errors.Join(err, c.disconnect()))
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

func (c *Collector) prepare(ctx context.Context) error {
	if err := c.connect(ctx); err != nil {
		return err
	}
	for _, table := range c.cfg.Tables {
		schema, name, ok := strings.Cut(table, ".")
		if !ok {
			return fmt.Errorf("table %q is not schema-qualified", table)
		}
		var printed string
		if err := c.conn.QueryRow(ctx, "SELECT format('%I.%I', $1::text, $2::text)", schema, name).Scan(&printed); err != nil {
			return fmt.Errorf("table %s: %w", table, err)
		}
		c.printed[printed] = table
		c.prefixes = append(c.prefixes, "table "+printed+":")
	}
	if _, err := c.conn.Exec(ctx, "SELECT pg_create_logical_replication_slot($1, 'test_decoding')", c.slot); err != nil {
		return fmt.Errorf("create slot: %w", err)
	}
	return nil
}

// connect opens the connection unless it is open. Its settings decide how
// values are printed.
func (c *Collector) connect(ctx context.Context) error {
	if c.conn != nil && !c.conn.IsClosed() {
		return nil
	}
	cfg, err := pgx.ParseConfig(c.cfg.URL)
	if err != nil {
		return fmt.Errorf("url: %w", err)
	}
	for name, value := range map[string]string{
		"application_name": "mailproof-wal", "timezone": "UTC", "datestyle": "ISO", "intervalstyle": "iso_8601", "bytea_output": "hex",
	} {
		cfg.RuntimeParams[name] = value
	}
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	c.conn = conn
	return nil
}

func (c *Collector) disconnect() error {
	if c.conn == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	err := c.conn.Close(ctx)
	c.conn = nil
	return err
}

func (c *Collector) run(ctx context.Context) {
	defer close(c.done)
	wait := time.NewTimer(0)
	defer wait.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-wait.C:
		}
		n, err := c.poll(ctx)
		switch {
		case c.failed != nil:
			return
		case err != nil:
			wait.Reset(retryEvery)
		case n >= c.cfg.Chunk:
			wait.Reset(0)
		default:
			wait.Reset(c.cfg.Every)
		}
	}
}

// poll reads one chunk, hands it to the sink, and lets the slot forget it. n is
// the number of lines that were read. An error is passing unless c.failed is
// set: it leaves the slot where it was.
func (c *Collector) poll(ctx context.Context) (n int, err error) {
	ctx, cancel := context.WithTimeout(ctx, queryLimit)
	defer cancel()
	defer func() {
		if err != nil {
			c.count(func(s *Stats) { s.Reconnects++ })
			_ = c.disconnect() // the next poll starts from a fresh connection
		}
	}()
	if err := c.connect(ctx); err != nil {
		return 0, err
	}
	n, err = c.peek(ctx)
	if err != nil || c.lastLSN == "" || n == 0 {
		return n, c.judge(err)
	}
	if _, err := c.conn.Exec(ctx, "SELECT pg_replication_slot_advance($1, $2::text::pg_lsn)", c.slot, c.lastLSN); err != nil {
		return n, c.judge(fmt.Errorf("advance slot: %w", err))
	}
	return n, nil
}

// judge tells errors that pass from those that mean that changes are missing.
func (c *Collector) judge(err error) error {
	var pgErr *pgconn.PgError
	gone := errors.As(err, &pgErr) && (pgErr.Code == "42704" || pgErr.Code == "55000") // no such slot; it was invalidated
	if gone || errors.Is(err, errSyntax) || errors.Is(err, errSink) {
		c.failed = err
	}
	return err
}

var errSink = errors.New("sink")

const peekSQL = `SELECT lsn::text, data
FROM pg_logical_slot_peek_changes($1, NULL, $2, 'include-xids', 'on', 'include-timestamp', 'on', 'skip-empty-xacts', 'on')
WHERE data LIKE 'BEGIN %' OR data LIKE 'COMMIT %' OR EXISTS (SELECT FROM unnest($3::text[]) p WHERE starts_with(data, p))`

func (c *Collector) peek(ctx context.Context) (n int, err error) {
	rows, err := c.conn.Query(ctx, peekSQL, c.slot, c.cfg.Chunk, c.prefixes)
	if err != nil {
		return 0, fmt.Errorf("read slot: %w", err)
	}
	defer rows.Close()
	var t transaction
	for rows.Next() {
		var position, line string
		if err := rows.Scan(&position, &line); err != nil {
			return n, fmt.Errorf("read slot: %w", err)
		}
		n++
		if err := c.line(&t, position, line); err != nil {
			return n, err
		}
	}
	if err := rows.Err(); err != nil {
		return n, fmt.Errorf("read slot: %w", err)
	}
	return n, nil
}

// transaction is one that is being read.
type transaction struct {
	xid     uint64
	changes []history.Change
}

func (c *Collector) line(t *transaction, position, line string) error {
	switch {
	case strings.HasPrefix(line, "BEGIN "):
		xid, err := parseBegin(line)
		t.xid, t.changes = xid, t.changes[:0]
		return err
	case strings.HasPrefix(line, "COMMIT "):
		at, err := parseCommit(line)
		if err != nil {
			return err
		}
		return c.commit(t, position, at)
	}
	r, err := parseRow(line, c.drops)
	if err != nil || r.op == "TRUNCATE" {
		return err
	}
	t.changes = append(t.changes, history.Change{
		Database: c.cfg.Database, Table: c.printed[r.table], Op: r.op, XID: t.xid, LSN: position, Old: r.old, New: r.new,
	})
	return nil
}

func (c *Collector) drops(column string) bool { return slices.Contains(c.cfg.Drop, column) }

// commit hands a transaction to the sink, unless it did so before a crash took
// the slot back.
func (c *Collector) commit(t *transaction, position string, at time.Time) error {
	p, err := parseLSN(position)
	if err != nil {
		return err
	}
	if p <= c.last {
		c.count(func(s *Stats) { s.Repeated++ })
		return nil
	}
	for _, change := range t.changes {
		c.order++
		change.Order, change.CommitAt = c.order, at
		if err := c.cfg.Sink(change); err != nil {
			return fmt.Errorf("%w: %w", errSink, err)
		}
	}
	c.last, c.lastLSN = p, position
	if len(t.changes) > 0 {
		c.count(func(s *Stats) { s.Transactions++; s.Changes += int64(len(t.changes)) })
	}
	return nil
}

// lsn is a position in the log.
type lsn uint64

func parseLSN(text string) (lsn, error) {
	var high, low uint32
	if n, err := fmt.Sscanf(text, "%X/%X", &high, &low); n != 2 || err != nil {
		return 0, fmt.Errorf("%w: position %q", errSyntax, text)
	}
	return lsn(high)<<32 | lsn(low), nil
}

func (c *Collector) count(f func(*Stats)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f(&c.stats)
}

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
	c.cancel()
	<-c.done
	err := c.drain(ctx)
	return wrap(c.cfg.Database, errors.Join(err, c.dropSlot(ctx), c.disconnect()))
}

func wrap(database string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("wal of %s: %w", database, err)
}

// drain polls until a poll brings nothing: peek reads up to the last record
// that is flushed when it starts, so every earlier commit has been read then.
func (c *Collector) drain(ctx context.Context) error {
	return c.retry(ctx, "drain", func() (done bool, err error) {
		n, err := c.poll(ctx)
		return n == 0, err
	})
}

func (c *Collector) dropSlot(ctx context.Context) error {
	return c.retry(ctx, "drop slot", func() (done bool, err error) {
		if err := c.connect(ctx); err != nil {
			return false, err
		}
		// Only if it is there: the answer to an earlier drop may have been lost.
		_, err = c.conn.Exec(ctx, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = $1", c.slot)
		if err != nil {
			_ = c.disconnect()
		}
		return true, err
	})
}

// retry repeats f until it is done, ctx ends, or the collector failed for good.
func (c *Collector) retry(ctx context.Context, what string, f func() (done bool, err error)) error {
	for {
		done, err := f()
		switch {
		case c.failed != nil && what == "drain":
			return c.failed
		case err == nil && done:
			return nil
		case err == nil:
			continue
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w (last error: %w)", what, context.Cause(ctx), err)
		case <-time.After(retryEvery):
		}
	}
}
