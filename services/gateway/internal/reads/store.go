// Package reads is what a gateway reads from the read models in Postgres. Every
// read is of one tenant: what is another's is not there. Where rows and a tip
// must agree they come by one statement.
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

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// Config of a Store; zero fields mean the defaults, but for Log.
type Config struct {
	Timeout   time.Duration // of one statement; 0 means 5 s
	FreshWait time.Duration // how long a read waits for what the log holds and the read models do not hold yet; 0 means 3 s
	Log       Log           // required
}

// Store reads. Its errors are *problem.Error.
type Store struct {
	pool *pgxpool.Pool
	cfg  Config
}

// New makes a Store on a pool of readmodel.Open.
func New(pool *pgxpool.Pool, cfg Config) *Store {
	if cfg.Timeout == 0 {
		cfg.Timeout = 5 * time.Second
	}
	if cfg.FreshWait == 0 {
		cfg.FreshWait = 3 * time.Second
	}
	return &Store{pool, cfg}
}

// Check reports an error unless Postgres answers and holds the read models.
func (s *Store) Check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	return readmodel.Check(ctx, s.pool)
}

// rows runs a statement and gives each row to scan.
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

// one runs a statement that gives at most one row; found says whether it did.
func (s *Store) one(ctx context.Context, dest []any, sql string, args ...any) (found bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	err = s.pool.QueryRow(ctx, sql, args...).Scan(dest...)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	return err == nil, unavailable(err)
}

// undefinedTable is Postgres's code for a table that is not there.
const undefinedTable = "42P01"

// unavailable says which fault is Postgres's, to be waited out, and which is ours.
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
			return problem.New(problem.Internal, "", "a read of Postgres failed; the server's log says how").Because(err)
		}
	}
	return problem.New(problem.Unavailable, "", "Postgres does not answer; nothing was changed, try again").Because(err)
}

// missing is the answer for a session that the read models do not hold.
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

// errDeleted is a session that was there: to wait for it is no use.
type errDeleted struct{ error }

func (e errDeleted) Unwrap() error { return e.error }

// MintedAt is the time in an id that was minted by events.NewID.
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

// CheckSession reports an INVALID_REQUEST unless s is a session id.
func CheckSession(s string) error { return checkID("sessionId", events.KindSession, s) }

// CheckExecution reports an INVALID_REQUEST unless s is an execution id.
func CheckExecution(s string) error { return checkID("executionId", events.KindExecution, s) }

// CheckKey reports an INVALID_REQUEST unless s is the id of a key.
func CheckKey(s string) error { return checkID("keyId", events.KindKey, s) }

func checkID(field string, kind events.Kind, s string) error {
	if events.CheckID(field, kind, s) == nil {
		return nil
	}
	if len(s) > 64 {
		s = s[:64] + "…"
	}
	return problem.Invalid(field, "%s is no such id: it is %s_ and 26 characters of 0-9 and A-Z without I, L, O and U", fmt.Sprintf("%+q", s), kind)
}

// row is what a statement gives, one at a time.
type row = pgx.Rows
