// Package migrate brings the tables of one package of the system to their newest
// version. Each package that owns tables has its own migrations, version table
// and lock, so that each can grow without the others and services can share a
// database or not.
//
// It guarantees that any number of processes may migrate at once: a session's
// advisory lock lets one run while the others wait, at most a minute, and then
// find nothing to do. It must not import any other package of the system.
package migrate

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

// Schema is the tables of one package.
type Schema struct {
	// Name is for errors.
	Name string
	// Files has the migrations as *.sql in its folder Dir.
	Files fs.FS
	Dir   string
	// VersionTable is where goose notes what has run.
	VersionTable string
	// Lock is the key of the advisory lock, the package's own.
	Lock int64
}

// Up migrates the database of a pool, which stays open. The lock lives on one
// connection for the whole run, so the pool must not go through a transaction
// pooler.
func Up(ctx context.Context, pool *pgxpool.Pool, s Schema) error {
	db := stdlib.OpenDBFromPool(pool)
	return s.wrap(errors.Join(s.up(ctx, db), db.Close()))
}

// UpURL is [Up] over a connection of its own: a pool's limits (statement_timeout)
// do not hold.
func UpURL(ctx context.Context, url string, s Schema) error {
	db, err := sql.Open("pgx", url)
	if err != nil {
		return s.wrap(err)
	}
	return s.wrap(errors.Join(s.up(ctx, db), db.Close()))
}

func (s Schema) wrap(err error) error {
	if err != nil {
		return fmt.Errorf("migrate %s: %w", s.Name, err)
	}
	return nil
}

func (s Schema) up(ctx context.Context, db *sql.DB) error {
	files, err := fs.Sub(s.Files, s.Dir)
	if err != nil {
		return err
	}
	// Asked for once a second, 60 times.
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockID(s.Lock), lock.WithLockTimeout(1, 60))
	if err != nil {
		return err
	}
	p, err := goose.NewProvider(goose.DialectPostgres, db, files,
		goose.WithTableName(s.VersionTable), goose.WithSessionLocker(locker),
		goose.WithDisableGlobalRegistry(true), goose.WithLogger(goose.NopLogger()))
	if err != nil {
		return err
	}
	_, err = p.Up(ctx)
	return err
}
