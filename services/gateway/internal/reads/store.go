// Package reads reads the read models in Postgres. Every read is restricted to one tenant; rows of other tenants are
// treated as not existing. Rows and a tip that must be consistent are read in one statement.
package reads

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads/queries"
)

// Config configures a Store. Log is required; other zero fields mean the defaults.
type Config struct {
	Timeout   time.Duration // maximum time that a read waits for Postgres to return a row; 0 means 5 s
	FreshWait time.Duration // maximum time that a read waits for data that only the log contains yet; 0 means 3 s
	Log       CommitLog     // required
	// Partitions describes the distribution of ids over the projector's groups.
	Partitions events.Partitioning
}

// Store reads the read models. Its errors are *problem.Error.
type Store struct {
	db      database
	queries *queries.Queries
	cfg     Config

	storedRows []string
}

// New returns a Store that reads from a pool of connections, which readmodel.Open has opened.
func New(pool *pgxpool.Pool, cfg Config) *Store {
	if cfg.Timeout == 0 {
		cfg.Timeout = 5 * time.Second
	}
	if cfg.FreshWait == 0 {
		cfg.FreshWait = 3 * time.Second
	}
	db := database{pool, cfg.Timeout}
	return &Store{db: db, queries: queries.New(db), cfg: cfg, storedRows: storedUsageIDs(cfg.Partitions.GroupCount())}
}

// CheckReady returns an error unless Postgres responds and has the read models.
func (s *Store) CheckReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	return readmodel.CheckMigrated(ctx, s.db.Pool)
}

// queryRows runs a statement and calls scan for each row before it reads the next one. Reads whose rows together may be large
// use it; all others are in package queries.
func (s *Store) queryRows(ctx context.Context, scan func(pgx.Rows) error, sql string, args ...any) error {
	result, err := s.db.Query(ctx, sql, args...)
	if err != nil {
		return err
	}
	defer result.Close()
	for result.Next() {
		if err := scan(result); err != nil {
			return readProblem(err)
		}
	}
	return result.Err()
}

// groupOf returns the projector group that folds the session or catalogue entry id.
func (s *Store) groupOf(id string) int16 { return int16(s.cfg.Partitions.GroupOfID(id)) } //nolint:gosec // at most 64 groups

// groupCheckpoint returns the checkpoint of the projector group that folds the session or catalogue entry id.
func (s *Store) groupCheckpoint(ctx context.Context, id string) (queries.CheckpointRow, error) {
	r, err := s.queries.Checkpoint(ctx, s.groupOf(id))
	if errors.Is(err, pgx.ErrNoRows) { // nothing was folded
		return queries.CheckpointRow{}, nil
	}
	return r, err
}

// missingSessionError returns the error for a session that the read models do not contain.
func (s *Store) missingSessionError(ctx context.Context, tenant, session string) error {
	r, err := s.queries.MissingSession(ctx, queries.MissingSessionParams{Tenant: tenant, Session: session, Grp: s.groupOf(session)})
	switch {
	case err != nil && !errors.Is(err, pgx.ErrNoRows):
		return err
	case r.Deleted:
		return errSessionDeleted{problem.NoSuchSession()}
	case !r.CaughtUp:
		return errReadModelsFolding()
	}
	return problem.NoSuchSession()
}

// errSessionDeleted is returned for a session that was deleted: a read need not be repeated until the session appears.
type errSessionDeleted struct{ error }

func (e errSessionDeleted) Unwrap() error { return e.error }

// CheckSessionID returns INVALID_REQUEST unless s is a session id.
func CheckSessionID(s string) error { return checkID("sessionId", events.KindSession, s) }

// CheckExecutionID returns INVALID_REQUEST unless s is an execution id.
func CheckExecutionID(s string) error { return checkID("executionId", events.KindExecution, s) }

// CheckApprovalID returns INVALID_REQUEST unless s is the id of an approval request.
func CheckApprovalID(s string) error { return checkID("approvalId", events.KindApproval, s) }

// CheckKeyID returns INVALID_REQUEST unless s is the id of a key.
func CheckKeyID(s string) error { return checkID("keyId", events.KindKey, s) }

// checkID returns INVALID_REQUEST for the field unless s is an id of the kind.
func checkID(field string, kind events.IDKind, s string) error {
	if events.CheckID(field, kind, s) == nil {
		return nil
	}
	return problem.Invalid(field, "%+q is not a valid id: it must be %s_ and 26 characters of 0-9 and A-Z without I, L, O and U", truncate.Text(s, 64), kind)
}
