// Package reads reads the read models in Postgres. Every read is restricted to one tenant; rows of other tenants are
// treated as not existing. Rows and a tip that must be consistent are read in one statement.
package reads

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// Config configures a Store. Log is required; other zero fields mean the defaults.
type Config struct {
	Timeout   time.Duration // timeout of one statement; 0 means 5 s
	FreshWait time.Duration // how long a read waits for something that only the log contains yet; 0 means 3 s
	Log       Log           // required
}

// Store reads the read models. Its errors are *problem.Error.
type Store struct {
	pool *pgxpool.Pool
	cfg  Config
}

// New returns a Store that uses a pool of readmodel.Open.
func New(pool *pgxpool.Pool, cfg Config) *Store {
	if cfg.Timeout == 0 {
		cfg.Timeout = 5 * time.Second
	}
	if cfg.FreshWait == 0 {
		cfg.FreshWait = 3 * time.Second
	}
	return &Store{pool, cfg}
}

// Check returns an error unless Postgres responds and has the read models.
func (s *Store) Check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	return readmodel.Check(ctx, s.pool)
}

// rows runs a statement and calls scan for each row.
func (s *Store) rows(ctx context.Context, scan func(pgx.Rows) error, sql string, args ...any) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	rows, err := s.pool.Query(ctx, sql, args...)
	if err != nil {
		return unavailable(err)
	}
	defer rows.Close()
	for rows.Next() {
		if err := scan(rows); err != nil {
			return unavailable(err)
		}
	}
	return unavailable(rows.Err())
}

// one runs a statement that returns at most one row, and reports whether there was one.
func (s *Store) one(ctx context.Context, dest []any, sql string, args ...any) (found bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	err = s.pool.QueryRow(ctx, sql, args...).Scan(dest...)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	return err == nil, unavailable(err)
}

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

// missing returns the error for a session that the read models do not contain.
func (s *Store) missing(ctx context.Context, tenant, session string) error {
	var caughtUp, deleted bool
	_, err := s.one(ctx, []any{&caughtUp, &deleted}, `
		SELECT caught_up, EXISTS (SELECT FROM deleted_sessions WHERE tenant = $2 AND id = $3) FROM checkpoints WHERE grp = $1`,
		readmodel.Group(session), tenant, session)
	switch {
	case err != nil:
		return err
	case deleted:
		return errDeleted{problem.NoSuchSession()}
	case !caughtUp:
		return folding()
	}
	return problem.NoSuchSession()
}

// errDeleted is returned for a session that was deleted, so that waiting for it is pointless.
type errDeleted struct{ error }

func (e errDeleted) Unwrap() error { return e.error }

// MintedAt returns the time in an id that events.NewID generated.
func MintedAt(id string) (time.Time, bool) {
	const alphabet = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
	_, ulid, ok := strings.Cut(id, "_")
	if !ok || len(ulid) < 10 {
		return time.Time{}, false
	}
	var ms int64
	for _, c := range ulid[:10] {
		v := strings.IndexRune(alphabet, c)
		if v < 0 {
			return time.Time{}, false
		}
		ms = ms<<5 | int64(v)
	}
	return time.UnixMilli(ms), true
}

// CheckSession returns INVALID_REQUEST unless s is a session id.
func CheckSession(s string) error { return checkID("sessionId", events.KindSession, s) }

// CheckExecution returns INVALID_REQUEST unless s is an execution id.
func CheckExecution(s string) error { return checkID("executionId", events.KindExecution, s) }

// CheckKey returns INVALID_REQUEST unless s is the id of a key.
func CheckKey(s string) error { return checkID("keyId", events.KindKey, s) }

func checkID(field string, kind events.Kind, s string) error {
	if events.CheckID(field, kind, s) == nil {
		return nil
	}
	return problem.Invalid(field, "%+q is not a valid id: it must be %s_ and 26 characters of 0-9 and A-Z without I, L, O and U", truncate.Text(s, 64), kind)
}

// row is a row of a statement's result.
type row = pgx.Rows
