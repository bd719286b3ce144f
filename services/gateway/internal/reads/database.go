package reads

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// database runs SQL statements. Its errors are *problem.Error, or pgx.ErrNoRows. A statement fails if the caller
// waits longer than the timeout for a row. The time in which the caller processes a row does not count: on a busy
// machine, large rows take seconds to decode, and would take as long in a second attempt.
type database struct {
	*pgxpool.Pool
	timeout time.Duration
}

// errTimeout is the cause of a statement that was cancelled because Postgres returned no row in time.
var errTimeout = errors.New("postgres returned no row within the timeout")

// Query runs a statement that returns any number of rows.
func (d database) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(d.timeout, func() { cancel(errTimeout) })
	defer timer.Stop()
	result, err := d.Pool.Query(ctx, sql, args...)
	r := &timedRows{result, ctx, cancel, timer, d.timeout}
	if err != nil {
		defer cancel(nil)
		return nil, r.convertError(err)
	}
	return r, nil
}

// QueryRow runs a statement that returns at most one row.
func (d database) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	ctx, cancel := context.WithTimeout(ctx, d.timeout)
	return timedRow{d.Pool.QueryRow(ctx, sql, args...), cancel}
}

// timedRow is the result of database.QueryRow: a row whose Scan converts errors to problems.
type timedRow struct {
	pgx.Row
	cancel context.CancelFunc
}

func (r timedRow) Scan(dest ...any) error {
	defer r.cancel()
	err := r.Row.Scan(dest...)
	if errors.Is(err, pgx.ErrNoRows) {
		return err
	}
	return readProblem(err)
}

// timedRows is the result of database.Query: rows whose Next fails if Postgres returns no row within the timeout.
type timedRows struct {
	pgx.Rows
	ctx     context.Context
	cancel  context.CancelCauseFunc
	timer   *time.Timer // cancels the statement; runs while the caller waits for Postgres
	timeout time.Duration
}

func (r *timedRows) Next() bool {
	r.timer.Reset(r.timeout)
	defer r.timer.Stop()
	return r.Rows.Next()
}

// Close ends the statement, after reading the rows that are left.
func (r *timedRows) Close() {
	r.timer.Reset(r.timeout)
	defer r.timer.Stop()
	r.Rows.Close()
	r.cancel(nil)
}

func (r *timedRows) Scan(dest ...any) error { return r.convertError(r.Rows.Scan(dest...)) }

func (r *timedRows) Err() error { return r.convertError(r.Rows.Err()) }

// convertError converts an error of the statement to a problem; see readProblem.
func (r *timedRows) convertError(err error) error {
	if err != nil && errors.Is(context.Cause(r.ctx), errTimeout) {
		err = fmt.Errorf("%w: %w", errTimeout, err)
	}
	return readProblem(err)
}

// undefinedTableCode is Postgres's error code for a table that does not exist.
const undefinedTableCode = "42P01"

// readProblem converts an error of a read from Postgres to a problem: UNAVAILABLE if Postgres is not available, and
// otherwise INTERNAL.
func readProblem(err error) error {
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
		case pg.Code == undefinedTableCode:
			return problem.New(problem.Unavailable, "", "the read models are not installed yet: the projector, which makes them, has not started").WithCause(err)
		case strings.HasPrefix(pg.Code, "08"), strings.HasPrefix(pg.Code, "53"), strings.HasPrefix(pg.Code, "57"):
		default:
			return problem.New(problem.Internal, "", "a read of Postgres failed; the server's log has the error").WithCause(err)
		}
	}
	return problem.New(problem.Unavailable, "", "Postgres does not answer; nothing was changed, try again").WithCause(err)
}
