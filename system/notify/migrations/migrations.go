// Package migrations holds the table that belongs to notifyd alone: parked
// events. Notifications and alerts are package delivery's, with a version table
// of their own, so that each can grow without the other.
//
// It guarantees that [Up] may run on any state and from several processes at
// once. It must not import any other package of the system.
package migrations

import (
	"context"
	"embed"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

//go:embed *.sql
var files embed.FS

// VersionTable is where goose notes what has run.
const VersionTable = "goose_notify"

// lockID is this package's own advisory lock.
const lockID int64 = 0x6e6f74696679 // "notify"

// Up brings the tables to the newest version.
func Up(ctx context.Context, pool *pgxpool.Pool) error {
	db := stdlib.OpenDBFromPool(pool)
	defer db.Close()
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockID(lockID), lock.WithLockTimeout(1, 60))
	if err != nil {
		return fmt.Errorf("migrations: lock: %w", err)
	}
	p, err := goose.NewProvider(goose.DialectPostgres, db, files,
		goose.WithTableName(VersionTable), goose.WithSessionLocker(locker),
		goose.WithDisableGlobalRegistry(true), goose.WithLogger(goose.NopLogger()))
	if err != nil {
		return fmt.Errorf("migrations: %w", err)
	}
	if _, err := p.Up(ctx); err != nil {
		return fmt.Errorf("migrations: %w", err)
	}
	return nil
}
