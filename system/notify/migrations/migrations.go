// Package migrations holds the tables that belong to notifyd alone: parked
// events, what people did about dead mails, and what the mail provider told of
// mails that it took. Notifications and alerts are package delivery's.
package migrations

import (
	"context"
	"embed"

	"github.com/jackc/pgx/v5/pgxpool"

	"mailproof/system/migrate"
)

//go:embed *.sql
var files embed.FS

var schema = migrate.Schema{
	Name: "notifyd", Files: files, Dir: ".",
	VersionTable: "goose_notify", Lock: 0x6e6f74696679, // "notify"
}

// Up brings the tables to the newest version. It may run on any state and from
// several processes at once; package delivery's tables must be there.
func Up(ctx context.Context, pool *pgxpool.Pool) error { return migrate.Up(ctx, pool, schema) }
