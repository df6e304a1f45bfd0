package booking

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver that goose needs
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"

	"mailproof/system/outbox"
)

//go:embed migrations/*.sql
var migrations embed.FS

const versionTable = "booking_goose_version"

// Migrate brings the tables of the booking service, its outbox included, up to
// date. Several processes may call it at once.
func Migrate(ctx context.Context, url string) (err error) {
	if err := outbox.Migrate(ctx, url); err != nil {
		return err
	}
	db, err := sql.Open("pgx", url)
	if err != nil {
		return fmt.Errorf("migrate bookings: %w", err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()

	dir, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return fmt.Errorf("migrate bookings: %w", err)
	}
	locker, err := lock.NewPostgresSessionLocker()
	if err != nil {
		return fmt.Errorf("migrate bookings: %w", err)
	}
	p, err := goose.NewProvider(goose.DialectPostgres, db, dir,
		goose.WithTableName(versionTable), goose.WithSessionLocker(locker))
	if err != nil {
		return fmt.Errorf("migrate bookings: %w", err)
	}
	if _, err := p.Up(ctx); err != nil {
		return fmt.Errorf("migrate bookings: %w", err)
	}
	return nil
}
