package booking

import (
	"context"
	"embed"

	"mailproof/system/migrate"
	"mailproof/system/outbox"
)

//go:embed migrations/*.sql
var migrations embed.FS

var schema = migrate.Schema{
	Name: "bookings", Files: migrations, Dir: "migrations",
	VersionTable: "booking_goose_version", Lock: 0x626f6f6b696e67, // "booking"
}

// Migrate brings the tables of the booking service, its outbox included, up to
// date. Several processes may call it at once.
func Migrate(ctx context.Context, url string) error {
	if err := outbox.Migrate(ctx, url); err != nil {
		return err
	}
	return migrate.UpURL(ctx, url, schema)
}
