package reads

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// database runs statements, each within the timeout. Its errors are *problem.Error, or pgx.ErrNoRows.
type database struct {
	*pgxpool.Pool
	timeout time.Duration
}

// Query runs a statement that returns any number of rows.
func (d database) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	ctx, cancel := context.WithTimeout(ctx, d.timeout)
	result, err := d.Pool.Query(ctx, sql, args...)
	if err != nil {
		defer cancel()
		return nil, unavailable(err)
	}
	return rows{result, cancel}, nil
}

// QueryRow runs a statement that returns at most one row.
func (d database) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	ctx, cancel := context.WithTimeout(ctx, d.timeout)
	return row{d.Pool.QueryRow(ctx, sql, args...), cancel}
}

// row is the result of QueryRow.
type row struct {
	pgx.Row
	cancel context.CancelFunc
}

func (r row) Scan(dest ...any) error {
	defer r.cancel()
	err := r.Row.Scan(dest...)
	if errors.Is(err, pgx.ErrNoRows) {
		return err
	}
	return unavailable(err)
}

// rows is the result of Query.
type rows struct {
	pgx.Rows
	cancel context.CancelFunc
}

// Close reads the rows that are left.
func (r rows) Close() {
	r.Rows.Close()
	r.cancel()
}

func (r rows) Scan(dest ...any) error { return unavailable(r.Rows.Scan(dest...)) }

func (r rows) Err() error { return unavailable(r.Rows.Err()) }

// undefinedTable is Postgres's error code for a table that does not exist.
const undefinedTable = "42P01"

// unavailable converts an error: errors of an unavailable Postgres become UNAVAILABLE, all others INTERNAL.
func unavailable(err error) error {
	if err == nil {
		return nil
	}
	var refused *problem.Error
	if errors.As(err, &refused) {
		return err
	}
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		switch {
		case pg.Code == undefinedTable:
			return problem.New(problem.Unavailable, "", "the read models are not installed yet: the projector, which makes them, has not started").Because(err)
		case strings.HasPrefix(pg.Code, "08"), strings.HasPrefix(pg.Code, "53"), strings.HasPrefix(pg.Code, "57"):
		default:
			return problem.New(problem.Internal, "", "a read of Postgres failed; the server's log has the error").Because(err)
		}
	}
	return problem.New(problem.Unavailable, "", "Postgres does not answer; nothing was changed, try again").Because(err)
}
