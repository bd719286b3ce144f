package reads

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/retry"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// The backlog is the part of the log that the read models do not contain yet. A gateway searches it before it answers
// that a session or execution does not exist, because the creation may have been accepted while no projector was
// running.

// Log reads single commits of the log.
type Log interface {
	// Next returns the first commit after a position whose subject matches a NATS filter, as known to the shard's
	// leader. Seq is 0 if there is none.
	Next(ctx context.Context, after eventlog.Position, filter string) (eventlog.Head, error)
}

// checkpoints holds, for each projector group, the position up to which the group has folded the log.
type checkpoints []eventlog.Position

// backlogSearch searches the backlog, which is the part of the log that the projector has not folded yet, for a session
// or an execution. after is the end of the folded part. It returns the session, or "" if there is none.
type backlogSearch func(ctx context.Context, after checkpoints) (session string, err error)

// readOrSearch runs a read, possibly twice. If the read finds nothing, readOrSearch searches the backlog and returns the
// session that it finds there. "" means that the result of the read is final.
func (s *Store) readOrSearch(ctx context.Context, in backlogSearch, read func() error) (session string, err error) {
	if err := read(); !isMissing(err) {
		return "", err
	}
	// The checkpoints are read before the second read: what that read does not find was not folded yet, so it comes
	// after the checkpoints.
	after, err := s.checkpoints(ctx)
	if err != nil {
		return "", err
	}
	missing := read()
	if !isMissing(missing) {
		return "", missing
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.FreshWait)
	defer cancel()
	if session, err = in(ctx, after); err != nil || session != "" {
		return session, err
	}
	return "", missing
}

// isMissing reports whether an error means that something does not exist and was not deleted.
func isMissing(err error) bool {
	var p *problem.Error
	var deleted errDeleted
	return errors.As(err, &p) && p.Status() == 404 && !errors.As(err, &deleted)
}

// awaitRead runs a read, and repeats it for a limited time while the backlog contains what the read did not find, so that
// a client finds a session that it has just created. It returns READ_MODEL_BEHIND if the time is over.
func (s *Store) awaitRead(ctx context.Context, in backlogSearch, read func() error) error {
	deadline := time.NewTimer(s.cfg.FreshWait)
	defer deadline.Stop()
	session, err := s.readOrSearch(ctx, in, read)
	if session == "" {
		return err
	}
	pauses := retry.NewDoubling(10*time.Millisecond, 100*time.Millisecond)
	for {
		select {
		case <-ctx.Done():
			return problem.From(ctx.Err())
		case <-deadline.C:
			return errBehind()
		case <-time.After(pauses.NextBackOff()):
		}
		if err := read(); !isMissing(err) {
			return err
		}
	}
}

// errBehind returns READ_MODEL_BEHIND.
func errBehind() error {
	return problem.New(problem.ReadModelBehind, "", "the log is ahead of the read models, which do not contain this yet; nothing is lost, try again")
}

// checkpoints returns the positions of all groups. It returns an error while a group is being folded from the log's
// beginning.
func (s *Store) checkpoints(ctx context.Context) (list checkpoints, err error) {
	rows, err := s.queries.Checkpoints(ctx)
	if err != nil {
		return nil, err
	}
	list = make(checkpoints, s.cfg.Partitions.Groups())
	if len(rows) < len(list) {
		return nil, errFolding() // the projector has not created its groups yet
	}
	for _, r := range rows {
		if int(r.Grp) >= len(list) {
			continue
		}
		if !r.CaughtUp {
			return list, errFolding()
		}
		list[r.Grp] = eventlog.Position{Shard: int(r.Shard), Seq: uint64(max(r.Position, 0))}
	}
	return list, nil
}

// errFolding returns the error while the read models are being folded from the log's beginning.
func errFolding() error {
	return problem.New(problem.Unavailable, "", "the read models are being folded from the log and do not contain it yet; try again")
}

// searchSession returns a search for a commit of a session.
func (s *Store) searchSession(tenant, session string) backlogSearch {
	return func(ctx context.Context, after checkpoints) (string, error) {
		head, err := s.next(ctx, after[s.cfg.Partitions.Group(session)], s.cfg.Partitions.Subject(events.LifeOf(tenant, session)))
		if err != nil || head.Seq == 0 {
			return "", err
		}
		return session, nil
	}
}

// searchExecution returns a search for a tenant's execution.
func (s *Store) searchExecution(tenant, execution string) backlogSearch {
	return func(ctx context.Context, after checkpoints) (string, error) {
		for partition := range s.cfg.Partitions.Count() {
			session, err := s.searchPartition(ctx, after[s.cfg.Partitions.GroupOf(partition)], topology.TenantLifeFilter(partition, tenant), execution)
			if err != nil || session != "" {
				return session, err
			}
		}
		return "", nil
	}
}

// searchPartition searches the commits of a partition after a position for an execution.
func (s *Store) searchPartition(ctx context.Context, at eventlog.Position, filter, execution string) (session string, err error) {
	for {
		head, err := s.next(ctx, at, filter)
		if err != nil || head.Seq == 0 {
			return "", err
		}
		list, err := head.Commit.Decode()
		if err != nil {
			return "", problem.From(err)
		}
		for _, e := range list {
			if e.ExecutionID == execution {
				return head.Subject.ID, nil
			}
		}
		at.Seq = head.Seq
	}
}

// next returns the first commit after a position whose subject matches the filter; see Log.Next. It returns READ_MODEL_BEHIND if the
// backlog is too long to be read in time.
func (s *Store) next(ctx context.Context, after eventlog.Position, filter string) (eventlog.Head, error) {
	if ctx.Err() != nil {
		return eventlog.Head{}, errBehind()
	}
	head, err := s.cfg.Log.Next(ctx, after, filter)
	if err != nil {
		return head, problem.New(problem.Unavailable, "", "NATS does not answer; nothing was changed, try again").WithCause(err)
	}
	return head, nil
}

// ExecutionSession returns the session of a tenant's execution, also if only the log contains the execution yet.
func (s *Store) ExecutionSession(ctx context.Context, tenant, execution string) (session string, err error) {
	inLog, err := s.readOrSearch(ctx, s.searchExecution(tenant, execution), func() (err error) {
		session, err = s.queries.ExecutionSession(ctx, tenant, execution)
		if errors.Is(err, pgx.ErrNoRows) {
			return errNoExecution()
		}
		return err
	})
	if inLog != "" {
		session = inLog
	}
	return session, err
}

// Status returns the status of a tenant's session, or "" if only the log contains the session yet.
func (s *Store) Status(ctx context.Context, tenant, session string) (status string, err error) {
	_, err = s.readOrSearch(ctx, s.searchSession(tenant, session), func() (err error) {
		status, err = s.queries.SessionStatus(ctx, tenant, session)
		if errors.Is(err, pgx.ErrNoRows) {
			return s.missingSessionError(ctx, tenant, session)
		}
		return err
	})
	return status, err
}

// Visible returns SESSION_NOT_FOUND unless a tenant's session belongs to one of the agents; no agents mean all. It
// also finds sessions that only the log contains yet.
func (s *Store) Visible(ctx context.Context, tenant, session string, agents []string) error {
	if len(agents) == 0 {
		return nil
	}
	var agent string
	_, err := s.readOrSearch(ctx, s.searchAgent(tenant, session, &agent), func() (err error) {
		agent, err = s.queries.SessionAgent(ctx, tenant, session)
		if errors.Is(err, pgx.ErrNoRows) {
			return s.missingSessionError(ctx, tenant, session)
		}
		return err
	})
	if err == nil && !events.AllowsAgent(agents, agent) {
		return problem.NoSuchSession()
	}
	return err
}

// searchAgent returns a search for the creation of a session. It sets agent to the session's agent.
func (s *Store) searchAgent(tenant, session string, agent *string) backlogSearch {
	return func(ctx context.Context, after checkpoints) (string, error) {
		head, err := s.next(ctx, after[s.cfg.Partitions.Group(session)], s.cfg.Partitions.Subject(events.LifeOf(tenant, session)))
		if err != nil || head.Seq == 0 {
			return "", err
		}
		list, err := head.Commit.Decode()
		if err != nil {
			return "", problem.From(err)
		}
		for _, e := range list {
			if created, ok := e.Data.(events.SessionCreated); ok {
				*agent = created.Agent
				return session, nil
			}
		}
		return "", nil
	}
}

// VisibleExecution calls Visible for the session of an execution and returns the session. It returns
// EXECUTION_NOT_FOUND if the session is not visible.
func (s *Store) VisibleExecution(ctx context.Context, tenant, execution string, agents []string) (session string, err error) {
	if session, err = s.ExecutionSession(ctx, tenant, execution); err != nil {
		return "", err
	}
	err = s.Visible(ctx, tenant, session, agents)
	if isMissing(err) {
		return "", errNoExecution()
	}
	return session, err
}

// errNoExecution returns EXECUTION_NOT_FOUND.
func errNoExecution() error {
	return problem.New(problem.ExecutionNotFound, "", "there is no such execution")
}
