package wal

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// The part of Postgres' streaming replication protocol that a reader needs
// (PostgreSQL documentation, "Streaming Replication Protocol").

const (
	// feedbackEvery is how often the position is confirmed. The server ends a
	// session that it has not heard of for wal_sender_timeout (60 s).
	feedbackEvery = time.Second
	// silence is when a server that sends nothing, no keepalive either, is given
	// up: it was stopped, or the connection is dead without a word. The server
	// asks for a sign of life after half of wal_sender_timeout, and answers the
	// feedback's own request at once.
	silence = 20 * time.Second
	// dialLimit bounds one try to connect.
	dialLimit = 10 * time.Second
)

// lsn is a position in the log.
type lsn uint64

func (p lsn) String() string { return fmt.Sprintf("%X/%X", uint32(p>>32), uint32(p)) }

// stream reads from the slot until the end mark (nil), or an error.
func (c *Collector) stream(ctx context.Context) error {
	conn, err := c.openStream(ctx)
	if err != nil {
		return err
	}
	defer closeSoon(conn.Close)
	heard, told := time.Now(), time.Now()
	for {
		if time.Since(told) >= feedbackEvery {
			if err := c.feedback(conn); err != nil {
				return err
			}
			told = time.Now()
		}
		data, err := receive(ctx, conn, told.Add(feedbackEvery))
		switch {
		case err == nil:
			heard = time.Now()
		case ctx.Err() == nil && pgconn.Timeout(err) && time.Since(heard) < silence:
			continue
		default:
			return fmt.Errorf("stream: %w", err)
		}
		end, err := c.message(data)
		if err != nil || end {
			return errors.Join(err, c.feedback(conn))
		}
	}
}

// openStream connects a session of its own. Its settings decide how values are
// printed.
func (c *Collector) openStream(ctx context.Context) (*pgconn.PgConn, error) {
	cfg, err := pgconn.ParseConfig(c.cfg.URL)
	if err != nil {
		return nil, fmt.Errorf("url: %w", err)
	}
	for name, value := range map[string]string{
		"replication": "database", "application_name": "mailproof-wal",
		"timezone": "UTC", "datestyle": "ISO", "intervalstyle": "iso_8601", "bytea_output": "hex",
	} {
		cfg.RuntimeParams[name] = value
	}
	dialling, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	conn, err := pgconn.ConnectConfig(dialling, cfg)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	if err := c.startStream(dialling, conn); err != nil {
		closeSoon(conn.Close)
		return nil, err
	}
	return conn, nil
}

// startStream begins where the slot stands: 0/0 is before any position.
func (c *Collector) startStream(ctx context.Context, conn *pgconn.PgConn) error {
	conn.Frontend().SendQuery(&pgproto3.Query{String: "START_REPLICATION SLOT " + c.slot +
		` LOGICAL 0/0 ("include-xids" 'on', "include-timestamp" 'on', "skip-empty-xacts" 'on')`})
	if err := conn.Frontend().Flush(); err != nil {
		return fmt.Errorf("start replication: %w", err)
	}
	for {
		msg, err := conn.ReceiveMessage(ctx)
		if err != nil {
			return fmt.Errorf("start replication: %w", err)
		}
		switch msg := msg.(type) {
		case *pgproto3.CopyBothResponse:
			return nil
		case *pgproto3.ErrorResponse:
			return fmt.Errorf("start replication: %w", pgconn.ErrorResponseToPgError(msg))
		}
	}
}

// receive waits for the next piece of the stream until the deadline.
func receive(ctx context.Context, conn *pgconn.PgConn, deadline time.Time) ([]byte, error) {
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	for {
		msg, err := conn.ReceiveMessage(ctx)
		if err != nil {
			return nil, err
		}
		switch msg := msg.(type) {
		case *pgproto3.CopyData:
			return msg.Data, nil
		case *pgproto3.ErrorResponse:
			return nil, pgconn.ErrorResponseToPgError(msg)
		case *pgproto3.CopyDone, *pgproto3.CommandComplete:
			return nil, errors.New("the server ended the stream")
		}
	}
}

// Kinds of messages inside the stream, by their first byte, and the length of
// what stands before the payload.
const (
	kindData      = 'w' // position, end of the log, time; then the payload
	kindKeepalive = 'k' // end of what was sent, time, whether an answer is asked for
	dataHeader    = 1 + 8 + 8 + 8
	keepaliveSize = 1 + 8 + 8 + 1
)

func (c *Collector) message(data []byte) (end bool, err error) {
	switch {
	case len(data) >= dataHeader && data[0] == kindData:
		return c.line(lsn(binary.BigEndian.Uint64(data[1:])), string(data[dataHeader:]))
	case len(data) >= keepaliveSize && data[0] == kindKeepalive:
		// All commits up to here have been sent, and so been read: the slot may
		// let go of what other databases wrote.
		c.seen = max(c.seen, lsn(binary.BigEndian.Uint64(data[1:])))
		return false, nil
	default:
		return false, fmt.Errorf("%w: a message of the stream that starts with %.20q", errSyntax, data)
	}
}

// postgresEpoch is where the protocol's microseconds start.
var postgresEpoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// feedback confirms what the sink has, and asks for an answer, so that a server
// that is silent can be told from one that is gone.
func (c *Collector) feedback(conn *pgconn.PgConn) error {
	msg := []byte{'r'}
	for range 3 { // written, flushed, applied
		msg = binary.BigEndian.AppendUint64(msg, uint64(c.seen))
	}
	msg = binary.BigEndian.AppendUint64(msg, uint64(time.Since(postgresEpoch).Microseconds()))
	msg = append(msg, 1)
	conn.Frontend().Send(&pgproto3.CopyData{Data: msg})
	if err := conn.Frontend().Flush(); err != nil {
		return fmt.Errorf("feedback: %w", err)
	}
	return nil
}
