package outbox

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
)

//go:embed migrations/*.sql
var migrations embed.FS

// versionTable keeps the versions of this package's tables apart from those of
// the service whose database it lives in.
const versionTable = "outbox_goose_version"

// Migrate brings table outbox of the database at url up to date. Several
// processes may call it at once; an advisory lock makes them take turns.
func Migrate(ctx context.Context, url string) (err error) {
	db, err := sql.Open("pgx", url)
	if err != nil {
		return fmt.Errorf("migrate outbox: %w", err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()

	dir, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return fmt.Errorf("migrate outbox: %w", err)
	}
	locker, err := lock.NewPostgresSessionLocker()
	if err != nil {
		return fmt.Errorf("migrate outbox: %w", err)
	}
	p, err := goose.NewProvider(goose.DialectPostgres, db, dir,
		goose.WithTableName(versionTable), goose.WithSessionLocker(locker))
	if err != nil {
		return fmt.Errorf("migrate outbox: %w", err)
	}
	if _, err := p.Up(ctx); err != nil {
		return fmt.Errorf("migrate outbox: %w", err)
	}
	return nil
}
