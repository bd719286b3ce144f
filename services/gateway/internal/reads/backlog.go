package reads

import (
	"context"
	"errors"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// The backlog is the part of the log that the read models do not hold yet. A gateway looks into it before it answers
// that a session or an execution does not exist: its creation may have been accepted while no projector ran.

// Log reads single commits of the log.
type Log interface {
	// Next returns the first commit after a position whose subject matches a filter of NATS, as the shard's leader
	// knows it; Seq 0 means that there is none.
	Next(ctx context.Context, after eventlog.Position, filter string) (eventlog.Head, error)
}

// checkpoints are the positions up to which the projector groups have folded the log, by group.
type checkpoints [topology.ProjectorGroups]eventlog.Position

// search looks for something in the backlog, and returns the session that it is, or is of; "" means that it is not there.
type search func(ctx context.Context, after checkpoints) (session string, err error)

// find runs a read, which may run twice. If the read does not find what it looks for, find looks into the backlog,
// and returns the session there. "" means that the read's error, or success, is the answer.
func (s *Store) find(ctx context.Context, in search, read func() error) (session string, err error) {
	if err := read(); !missed(err) {
		return "", err
	}
	// The checkpoints come before the second read: what that does not find is not folded, and so lies after them.
	after, err := s.checkpoints(ctx)
	if err != nil {
		return "", err
	}
	missing := read()
	if !missed(missing) {
		return "", missing
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.FreshWait)
	defer cancel()
	if session, err = in(ctx, after); err != nil || session != "" {
		return session, err
	}
	return "", missing
}

// missed reports whether an error means that something is not there, and was not deleted.
func missed(err error) bool {
	var p *problem.Error
	var deleted errDeleted
	return errors.As(err, &p) && p.Status() == 404 && !errors.As(err, &deleted)
}

// await runs a read. It reads again for a moment while the backlog holds what the read looks for: whoever has just created a
// session finds it. READ_MODEL_BEHIND means that the moment was too short.
func (s *Store) await(ctx context.Context, in search, read func() error) error {
	deadline := time.NewTimer(s.cfg.FreshWait)
	defer deadline.Stop()
	session, err := s.find(ctx, in, read)
	if session == "" {
		return err
	}
	wait := 10 * time.Millisecond
	for {
		select {
		case <-ctx.Done():
			return problem.From(ctx.Err())
		case <-deadline.C:
			return behind()
		case <-time.After(wait):
			wait = min(2*wait, 100*time.Millisecond)
		}
		if err := read(); !missed(err) {
			return err
		}
	}
}

func behind() error {
	return problem.New(problem.ReadModelBehind, "", "the log is ahead of the read models, which do not hold this yet; nothing is lost, try again")
}

// checkpoints reads the positions of all groups. While a group is folded from the log's beginning it is an error.
func (s *Store) checkpoints(ctx context.Context) (list checkpoints, err error) {
	err = s.rows(ctx, func(r row) error {
		var group, shard int
		var position int64
		var caughtUp bool
		if err := r.Scan(&group, &shard, &position, &caughtUp); err != nil {
			return err
		}
		if !caughtUp {
			return folding()
		}
		list[group] = eventlog.Position{Shard: shard, Seq: uint64(max(position, 0))}
		return nil
	}, "SELECT grp, shard, position, caught_up FROM checkpoints")
	return list, err
}

func folding() error {
	return problem.New(problem.Unavailable, "", "the read models are being folded from the log and do not hold it yet; try again")
}

// sessionIn looks for a commit of a session.
func (s *Store) sessionIn(tenant, session string) search {
	return func(ctx context.Context, after checkpoints) (string, error) {
		head, err := s.next(ctx, after[readmodel.Group(session)], events.LifeOf(tenant, session).String())
		if err != nil || head.Seq == 0 {
			return "", err
		}
		return session, nil
	}
}

// executionIn looks for a tenant's execution.
func (s *Store) executionIn(tenant, execution string) search {
	return func(ctx context.Context, after checkpoints) (string, error) {
		for partition := range events.Partitions {
			session, err := s.executionInPartition(ctx, after[topology.GroupOf(partition)], topology.TenantLifeFilter(partition, tenant), execution)
			if err != nil || session != "" {
				return session, err
			}
		}
		return "", nil
	}
}

func (s *Store) executionInPartition(ctx context.Context, at eventlog.Position, filter, execution string) (session string, err error) {
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

// next reads the log. READ_MODEL_BEHIND means that the backlog is too long to be read in time.
func (s *Store) next(ctx context.Context, after eventlog.Position, filter string) (eventlog.Head, error) {
	if ctx.Err() != nil {
		return eventlog.Head{}, behind()
	}
	head, err := s.cfg.Log.Next(ctx, after, filter)
	if err != nil {
		return head, problem.New(problem.Unavailable, "", "NATS does not answer; nothing was changed, try again").Because(err)
	}
	return head, nil
}

// SessionOf returns the session of a tenant's execution, also while only the log holds the execution.
func (s *Store) SessionOf(ctx context.Context, tenant, execution string) (session string, err error) {
	inLog, err := s.find(ctx, s.executionIn(tenant, execution), func() error {
		found, err := s.one(ctx, []any{&session}, "SELECT session FROM executions WHERE tenant = $1 AND id = $2", tenant, execution)
		if err == nil && !found {
			return noExecution()
		}
		return err
	})
	if inLog != "" {
		session = inLog
	}
	return session, err
}

// Status returns the status of a tenant's session; "" if only the log holds the session.
func (s *Store) Status(ctx context.Context, tenant, session string) (status string, err error) {
	_, err = s.find(ctx, s.sessionIn(tenant, session), func() error {
		found, err := s.one(ctx, []any{&status}, "SELECT status FROM sessions WHERE tenant = $1 AND id = $2", tenant, session)
		if err == nil && !found {
			return s.missing(ctx, tenant, session)
		}
		return err
	})
	return status, err
}

// Visible returns SESSION_NOT_FOUND unless a tenant's session is of one of the agents; no agents mean all of them. The session may be
// one that only the log holds.
func (s *Store) Visible(ctx context.Context, tenant, session string, agents []string) error {
	if len(agents) == 0 {
		return nil
	}
	var agent string
	_, err := s.find(ctx, s.agentIn(tenant, session, &agent), func() error {
		found, err := s.one(ctx, []any{&agent}, "SELECT agent FROM sessions WHERE tenant = $1 AND id = $2", tenant, session)
		if err == nil && !found {
			return s.missing(ctx, tenant, session)
		}
		return err
	})
	if err == nil && !events.AllowsAgent(agents, agent) {
		return problem.NoSuchSession()
	}
	return err
}

// agentIn looks for the creation of a session, and sets agent to the session's.
func (s *Store) agentIn(tenant, session string, agent *string) search {
	return func(ctx context.Context, after checkpoints) (string, error) {
		head, err := s.next(ctx, after[readmodel.Group(session)], events.LifeOf(tenant, session).String())
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

// VisibleExecution is Visible for the session of an execution, which it returns; EXECUTION_NOT_FOUND if it is not visible.
func (s *Store) VisibleExecution(ctx context.Context, tenant, execution string, agents []string) (session string, err error) {
	if session, err = s.SessionOf(ctx, tenant, execution); err != nil {
		return "", err
	}
	err = s.Visible(ctx, tenant, session, agents)
	if missed(err) {
		return "", noExecution()
	}
	return session, err
}

func noExecution() error {
	return problem.New(problem.ExecutionNotFound, "", "there is no such execution")
}
