package delivery

import (
	"context"
	"embed"

	"github.com/jackc/pgx/v5/pgxpool"

	"mailproof/system/migrate"
)

//go:embed migrations/*.sql
var migrationFiles embed.FS

var schema = migrate.Schema{
	Name: "delivery", Files: migrationFiles, Dir: "migrations",
	VersionTable: "goose_delivery", Lock: 0x64656c6976657279, // "delivery"
}

// Migrate brings the schema of pool's database to the newest version. Any number
// of processes may call it at once. pool must not go through a transaction
// pooler.
func Migrate(ctx context.Context, pool *pgxpool.Pool) error {
	return migrate.Up(ctx, pool, schema)
}
