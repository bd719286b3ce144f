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

// CommitLog reads single commits of the log.
type CommitLog interface {
	// Next returns the first commit after a position whose subject matches a NATS filter, as known to the shard's
	// leader. Seq is 0 if there is none.
	NextHead(ctx context.Context, after eventlog.Position, filter string) (eventlog.Head, error)
}

// checkpoints holds, for each projector group, the position up to which the group has folded the log.
type checkpoints []eventlog.Position

// backlogSearch searches the backlog, which is the part of the log that the projector has not folded yet, for a session
// or an execution. after is the end of the folded part. It returns the session, or "" if there is none.
type backlogSearch func(ctx context.Context, after checkpoints) (session string, err error)

// readOrSearchBacklog runs a read, and runs it again if it finds nothing. If it still finds nothing,
// readOrSearchBacklog searches the backlog and returns the session that the search found. The session "" means that
// err is the final result of the read.
func (s *Store) readOrSearchBacklog(ctx context.Context, search backlogSearch, read func() error) (session string, err error) {
	if err := read(); !isNotFound(err) {
		return "", err
	}
	// The checkpoints are read before the second read: what that read does not find was not folded yet, so it comes
	// after the checkpoints.
	after, err := s.readCheckpoints(ctx)
	if err != nil {
		return "", err
	}
	missing := read()
	if !isNotFound(missing) {
		return "", missing
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.FreshWait)
	defer cancel()
	if session, err = search(ctx, after); err != nil || session != "" {
		return session, err
	}
	return "", missing
}

// isNotFound reports whether an error means that something does not exist and did not exist before.
func isNotFound(err error) bool {
	var p *problem.Error
	var deleted errSessionDeleted
	return errors.As(err, &p) && p.Status() == 404 && !errors.As(err, &deleted)
}

// awaitRead runs a read, and repeats it for a limited time while the backlog contains what the read did not find, so
// that a client finds a session that it has just created. After that time it returns READ_MODEL_BEHIND.
func (s *Store) awaitRead(ctx context.Context, search backlogSearch, read func() error) error {
	deadline := time.NewTimer(s.cfg.FreshWait)
	defer deadline.Stop()
	session, err := s.readOrSearchBacklog(ctx, search, read)
	if session == "" {
		return err
	}
	pauses := retry.NewDoubling(10*time.Millisecond, 100*time.Millisecond)
	for {
		select {
		case <-ctx.Done():
			return problem.From(ctx.Err())
		case <-deadline.C:
			return errReadModelsBehind()
		case <-time.After(pauses.NextBackOff()):
		}
		if err := read(); !isNotFound(err) {
			return err
		}
	}
}

// errReadModelsBehind returns the problem READ_MODEL_BEHIND.
func errReadModelsBehind() error {
	return problem.New(problem.ReadModelBehind, "", "the log is ahead of the read models, which do not contain this yet; nothing is lost, try again")
}

// readCheckpoints returns the position up to which each projector group has folded the log. It returns an error while
// a group is being folded from the log's beginning.
func (s *Store) readCheckpoints(ctx context.Context) (list checkpoints, err error) {
	rows, err := s.queries.Checkpoints(ctx)
	if err != nil {
		return nil, err
	}
	list = make(checkpoints, s.cfg.Partitions.GroupCount())
	if len(rows) < len(list) {
		return nil, errReadModelsFolding() // the projector has not created its groups yet
	}
	for _, r := range rows {
		if int(r.Grp) >= len(list) {
			continue
		}
		if !r.CaughtUp {
			return list, errReadModelsFolding()
		}
		list[r.Grp] = eventlog.Position{Shard: int(r.Shard), Seq: uint64(max(r.Position, 0))}
	}
	return list, nil
}

// errReadModelsFolding returns the problem UNAVAILABLE for a read while the read models are being folded from the
// log's beginning.
func errReadModelsFolding() error {
	return problem.New(problem.Unavailable, "", "the read models are being folded from the log and do not contain it yet; try again")
}

// sessionSearch returns a search of the backlog for a commit of a session.
func (s *Store) sessionSearch(tenant, session string) backlogSearch {
	return func(ctx context.Context, after checkpoints) (string, error) {
		head, err := s.nextCommit(ctx, after[s.cfg.Partitions.GroupOfID(session)], s.cfg.Partitions.Subject(events.LifeSubject(tenant, session)))
		if err != nil || head.Seq == 0 {
			return "", err
		}
		return session, nil
	}
}

// executionSearch returns a search of the backlog for a tenant's execution.
func (s *Store) executionSearch(tenant, execution string) backlogSearch {
	return func(ctx context.Context, after checkpoints) (string, error) {
		for partition := range s.cfg.Partitions.PartitionCount() {
			session, err := s.searchPartition(ctx, after[s.cfg.Partitions.GroupOfPartition(partition)], topology.TenantLifeFilter(partition, tenant), execution)
			if err != nil || session != "" {
				return session, err
			}
		}
		return "", nil
	}
}

// searchPartition searches the commits of a partition after a position for an execution, and returns the session of
// the execution, or "" if it finds none.
func (s *Store) searchPartition(ctx context.Context, at eventlog.Position, filter, execution string) (session string, err error) {
	for {
		head, err := s.nextCommit(ctx, at, filter)
		if err != nil || head.Seq == 0 {
			return "", err
		}
		list, err := head.Commit.DecodeEvents()
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

// nextCommit returns the first commit after a position whose subject matches a NATS filter, as CommitLog.Next does.
// It returns READ_MODEL_BEHIND if the backlog is too long to be read in time.
func (s *Store) nextCommit(ctx context.Context, after eventlog.Position, filter string) (eventlog.Head, error) {
	if ctx.Err() != nil {
		return eventlog.Head{}, errReadModelsBehind()
	}
	head, err := s.cfg.Log.NextHead(ctx, after, filter)
	if err != nil {
		return head, problem.New(problem.Unavailable, "", "NATS does not answer; nothing was changed, try again").WithCause(err)
	}
	return head, nil
}

// ExecutionSession returns the session of a tenant's execution, also if only the log contains the execution yet.
func (s *Store) ExecutionSession(ctx context.Context, tenant, execution string) (session string, err error) {
	inLog, err := s.readOrSearchBacklog(ctx, s.executionSearch(tenant, execution), func() (err error) {
		session, err = s.queries.ExecutionSession(ctx, tenant, execution)
		if errors.Is(err, pgx.ErrNoRows) {
			return errExecutionNotFound()
		}
		return err
	})
	if inLog != "" {
		session = inLog
	}
	return session, err
}

// SessionStatus returns the status of a tenant's session, or "" if only the log contains the session yet.
func (s *Store) SessionStatus(ctx context.Context, tenant, session string) (status string, err error) {
	_, err = s.readOrSearchBacklog(ctx, s.sessionSearch(tenant, session), func() (err error) {
		status, err = s.queries.SessionStatus(ctx, tenant, session)
		if errors.Is(err, pgx.ErrNoRows) {
			return s.missingSessionError(ctx, tenant, session)
		}
		return err
	})
	return status, err
}

// CheckVisible returns SESSION_NOT_FOUND unless a tenant's session belongs to one of the agents; no agents mean all. It
// also finds sessions that only the log contains yet.
func (s *Store) CheckVisible(ctx context.Context, tenant, session string, agents []string) error {
	if len(agents) == 0 {
		return nil
	}
	var agent string
	_, err := s.readOrSearchBacklog(ctx, s.sessionAgentSearch(tenant, session, &agent), func() (err error) {
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

// sessionAgentSearch returns a search of the backlog for the creation of a session. The search sets agent to the
// session's agent.
func (s *Store) sessionAgentSearch(tenant, session string, agent *string) backlogSearch {
	return func(ctx context.Context, after checkpoints) (string, error) {
		head, err := s.nextCommit(ctx, after[s.cfg.Partitions.GroupOfID(session)], s.cfg.Partitions.Subject(events.LifeSubject(tenant, session)))
		if err != nil || head.Seq == 0 {
			return "", err
		}
		list, err := head.Commit.DecodeEvents()
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

// CheckVisibleExecution returns the session of a tenant's execution, or EXECUTION_NOT_FOUND unless the session
// belongs to one of the agents; no agents mean all.
func (s *Store) CheckVisibleExecution(ctx context.Context, tenant, execution string, agents []string) (session string, err error) {
	if session, err = s.ExecutionSession(ctx, tenant, execution); err != nil {
		return "", err
	}
	err = s.CheckVisible(ctx, tenant, session, agents)
	if isNotFound(err) {
		return "", errExecutionNotFound()
	}
	return session, err
}

// errExecutionNotFound returns the problem EXECUTION_NOT_FOUND.
func errExecutionNotFound() error {
	return problem.New(problem.ExecutionNotFound, "", "there is no such execution")
}
