package delivery

import (
	"context"
	"embed"
	"fmt"
	"io/fs"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

//go:embed migrations/*.sql
var migrationFiles embed.FS

const (
	migrationTable = "goose_delivery"
	// migrationLock is this package's own advisory lock, so that it neither
	// waits for nor blocks the migrations of another package.
	migrationLock int64 = 0x64656c6976657279 // "delivery"
)

// Migrate brings the schema of pool's database to the newest version. Any
// number of processes may call it at once: a session's advisory lock lets one
// run while the others wait (at most a minute) and then find nothing to do.
// The lock lives on one connection for the whole run, so pool must not go
// through a transaction pooler.
func Migrate(ctx context.Context, pool *pgxpool.Pool) error {
	files, err := fs.Sub(migrationFiles, "migrations")
	if err != nil {
		return fmt.Errorf("delivery migrations: %w", err)
	}
	locker, err := lock.NewPostgresSessionLocker(
		lock.WithLockID(migrationLock),
		lock.WithLockTimeout(1, 60),
	)
	if err != nil {
		return fmt.Errorf("delivery migrations: lock: %w", err)
	}
	db := stdlib.OpenDBFromPool(pool)
	defer db.Close() // the pool stays open

	provider, err := goose.NewProvider(goose.DialectPostgres, db, files,
		goose.WithTableName(migrationTable),
		goose.WithSessionLocker(locker),
		goose.WithDisableGlobalRegistry(true),
		goose.WithLogger(goose.NopLogger()),
	)
	if err != nil {
		return fmt.Errorf("delivery migrations: %w", err)
	}
	if _, err := provider.Up(ctx); err != nil {
		return fmt.Errorf("delivery migrations: %w", err)
	}
	return nil
}
