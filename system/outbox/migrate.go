package outbox

import (
	"context"
	"embed"

	"mailproof/system/migrate"
)

//go:embed migrations/*.sql
var migrations embed.FS

var schema = migrate.Schema{
	Name: "outbox", Files: migrations, Dir: "migrations",
	VersionTable: "outbox_goose_version", Lock: 0x6f7574626f78, // "outbox"
}

// Migrate brings table outbox of the database at url up to date. Several
// processes may call it at once.
func Migrate(ctx context.Context, url string) error { return migrate.UpURL(ctx, url, schema) }
