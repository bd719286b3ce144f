package eventlog

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"strconv"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
)

// Sessions loads and appends to both subjects of a session.
type Sessions struct{ Log Log }

// SessionState is the state of a session, and the heads of its two subjects, life and run.
type SessionState struct {
	Tenant, ID string
	LifeHead   Head
	Life       session.State
	RunHead    Head
	Run        run.State
}

// RunView returns the part of the run state on which the session's life depends.
func (l *SessionState) RunView() session.RunView { return l.Run.RunView(&l.Life) }

// DueWork returns the work that the session requires from an executor.
func (l *SessionState) DueWork() run.Work { return run.DueWork(&l.Life, &l.Run) }

// Load returns the state of a session, with one direct get per subject. A session that does not exist has Life.Status
// session.None.
func (s Sessions) Load(ctx context.Context, tenant, id string, f Freshness) (*SessionState, error) {
	l := &SessionState{Tenant: tenant, ID: id}
	var err error
	// The run head is read first. Life is then at least as new as run, so that an older life never hides an
	// execution that run already shows as active.
	if l.RunHead, err = s.Log.Last(ctx, events.RunSubject(tenant, id), f); err != nil {
		return l, fmt.Errorf("load runs of %s: %w", id, err)
	}
	if l.LifeHead, err = s.Log.Last(ctx, events.LifeSubject(tenant, id), f); err != nil {
		return l, fmt.Errorf("load life of %s: %w", id, err)
	}
	if l.Run, err = s.loadRunState(ctx, l.RunHead); err != nil {
		return l, err
	}
	l.Life, err = s.loadLifeState(ctx, l.LifeHead)
	return l, err
}

// loadLifeState returns the life state that the head of a session's life stores. If the head has no state of the
// current version, loadLifeState folds the subject up to the head.
func (s Sessions) loadLifeState(ctx context.Context, h Head) (session.State, error) {
	var st session.State
	if h.Seq == 0 {
		return st, nil
	}
	if decodeState(h.Commit.State, session.StateVersion, &st) {
		return st.WithCommitSeq(h.Seq), nil
	}
	st = session.State{}
	for rec, err := range s.subjectCommits(ctx, h) {
		if err != nil {
			return st, err
		}
		st = session.Fold(st, cmp.Or(rec.Commit.Command, rec.Commit.ID), rec.Events).WithCommitSeq(rec.Position.Seq)
	}
	return st, nil
}

// loadRunState returns the run state that the head of a session's runs stores, or folds the subject as loadLifeState
// does.
func (s Sessions) loadRunState(ctx context.Context, h Head) (run.State, error) {
	var st run.State
	if h.Seq == 0 {
		return st, nil
	}
	if decodeState(h.Commit.State, run.StateVersion, &st) {
		return st.WithCommitSeq(h.Seq), nil
	}
	st = run.State{}
	for rec, err := range s.subjectCommits(ctx, h) {
		if err != nil {
			return st, err
		}
		st = run.Fold(st, rec.Commit.Epoch, rec.Events).WithCommitSeq(rec.Position.Seq)
	}
	return st, nil
}

// decodeState decodes the stored state raw into a value. It reports whether raw is a state of the given version.
func decodeState(raw json.RawMessage, version int, into any) bool {
	var v struct {
		V int `json:"v"`
	}
	return len(raw) > 0 && json.Unmarshal(raw, &v) == nil && v.V == version && json.Unmarshal(raw, into) == nil
}

// subjectCommits yields a subject's commits up to its head.
func (s Sessions) subjectCommits(ctx context.Context, h Head) func(func(Record, error) bool) {
	return commitsUpTo(ctx, s.Log, h)
}

// commitsUpTo yields a subject's commits up to its head.
func commitsUpTo(ctx context.Context, l Log, h Head) func(func(Record, error) bool) {
	shard := Position{Shard: h.Subject.Partition() % l.Shards()}
	return func(yield func(Record, error) bool) {
		for rec, err := range l.Read(ctx, shard, Filter{Subject: h.Subject}) {
			if err == nil && rec.Position.Seq > h.Seq {
				return
			}
			if !yield(rec, err) || err != nil {
				return
			}
		}
	}
}

// CommandSeq returns the stream sequence of the commit that carried out a command, and whether there is such a commit.
// It reads the session's life only if the state may no longer remember the command: for a late retry, or for a command
// from a gateway whose clock is behind.
func (s Sessions) CommandSeq(ctx context.Context, l *SessionState, command string) (at uint64, done bool, err error) {
	if at, done = l.Life.CommandSeq(command); done || !l.Life.MayHaveDropped(command) {
		return at, done, nil
	}
	return findCommit(ctx, s.Log, l.LifeHead, session.CommitID(command))
}

// AppendLife appends events to the session's life. The id of the commit is derived from the command.
func (s Sessions) AppendLife(ctx context.Context, l *SessionState, actor events.Actor, command string, list []events.Event) error {
	draft := events.Draft{ID: session.CommitID(command), Actor: actor, Events: list}
	if events.CheckID("", events.KindCommand, command) == nil {
		draft.Command = command
	}
	next := session.Fold(l.Life, cmp.Or(draft.Command, draft.ID), list)
	draft.State = next
	head, err := s.Log.Append(ctx, l.LifeHead, draft)
	if err != nil {
		return err
	}
	l.LifeHead, l.Life = head, next.WithCommitSeq(head.Seq)
	return nil
}

// AppendRun appends a decision to the session's runs under the given commit id. A decision that does not fit into
// one commit is stored in several, in order, as run.Decision.Split defines; the last commit has the id. Even if
// AppendRun fails, l is the state after the last stored commit, from which the caller must decide again.
func (s Sessions) AppendRun(ctx context.Context, l *SessionState, actor events.Actor, id string, d run.Decision) error {
	parts, err := d.Split()
	if err != nil {
		return fmt.Errorf("split a commit of %s: %w", l.ID, err)
	}
	for i, part := range parts {
		commit := id
		if i < len(parts)-1 {
			commit = events.DeriveID(events.KindCommit, id, "part", strconv.Itoa(i))
		}
		if err := s.AppendRunPart(ctx, l, actor, commit, part); err != nil {
			return err
		}
	}
	return nil
}

// AppendRunPart appends one of the decisions that run.Decision.Split returned, in one commit with the given id. It
// returns ErrTooLarge if the decision does not fit.
func (s Sessions) AppendRunPart(ctx context.Context, l *SessionState, actor events.Actor, id string, d run.Decision) error {
	next := run.Fold(l.Run, d.Epoch, d.Events)
	head, err := s.Log.Append(ctx, l.RunHead, events.Draft{ID: id, Actor: actor, Epoch: d.Epoch, Events: d.Events, State: next})
	if err != nil {
		return err
	}
	l.RunHead, l.Run = head, next.WithCommitSeq(head.Seq)
	return nil
}

// AcceptedMessage returns the message_accepted event with the query of an execution.
func (s Sessions) AcceptedMessage(ctx context.Context, l *SessionState, ref session.QueryRef) (events.MessageAccepted, error) {
	rec, err := s.Log.CommitAt(ctx, s.Position(l.ID, ref.Message))
	if err != nil {
		return events.MessageAccepted{}, fmt.Errorf("message of %s: %w", ref.ExecutionID, err)
	}
	for _, e := range rec.Events {
		if m, ok := e.Data.(events.MessageAccepted); ok && e.ExecutionID == ref.ExecutionID {
			return m, nil
		}
	}
	return events.MessageAccepted{}, fmt.Errorf("message of %s at %s: %w", ref.ExecutionID, rec.Position, ErrNotFound)
}

// ActiveEvents yields the events of the active execution in the session's runs, in order, up to the head of l.
func (s Sessions) ActiveEvents(ctx context.Context, l *SessionState) iter.Seq2[events.Event, error] {
	active := l.Life.Active
	after := s.Position(l.ID, max(active.Message, l.Run.Resolved.At)) // the agent starts after both
	return func(yield func(events.Event, error) bool) {
		if active.ExecutionID == "" || l.RunHead.Seq <= after.Seq {
			return
		}
		for rec, err := range s.Log.Read(ctx, after, Filter{Subject: events.RunSubject(l.Tenant, l.ID)}) {
			if err != nil {
				yield(events.Event{}, fmt.Errorf("events of %s: %w", active.ExecutionID, err))
				return
			}
			if rec.Position.Seq > l.RunHead.Seq {
				return
			}
			for _, e := range rec.Events {
				if e.ExecutionID == active.ExecutionID && !yield(e, nil) {
					return
				}
			}
		}
	}
}

// OpenBlocks returns open blocks of a session's runs as they were started, by id, so that the caller can complete them.
func (s Sessions) OpenBlocks(ctx context.Context, session string, list []run.OpenBlock) (map[string]events.Block, error) {
	blocks := map[string]events.Block{}
	for _, open := range list {
		rec, err := s.Log.CommitAt(ctx, s.Position(session, open.At))
		if errors.Is(err, ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("open block %s: %w", open.ID, err)
		}
		for _, e := range rec.Events {
			if b, ok := e.Data.(events.BlockStart); ok && b.Block.ID == open.ID {
				blocks[open.ID] = b.Block
			}
		}
	}
	return blocks, nil
}

// Position returns the position of a commit of a session, by the stream sequence that the session's state contains.
func (s Sessions) Position(session string, seq uint64) Position {
	return Position{Shard: events.Partition(session) % s.Log.Shards(), Seq: seq}
}

// ApprovalDecision reads a decision on an approval request from the session's life.
func (s Sessions) ApprovalDecision(ctx context.Context, l *SessionState, d session.DecidedApproval) (events.ApprovalDecided, error) {
	rec, err := s.Log.CommitAt(ctx, s.Position(l.ID, d.At))
	if err != nil {
		return events.ApprovalDecided{}, fmt.Errorf("decision on %s: %w", d.ApprovalID, err)
	}
	for _, e := range rec.Events {
		if p, ok := e.Data.(events.ApprovalDecided); ok && p.ApprovalID == d.ApprovalID {
			return p, nil
		}
	}
	return events.ApprovalDecided{}, fmt.Errorf("decision on %s: commit %d does not contain it", d.ApprovalID, d.At)
}

// FileChangeEvents reads the file_put and file_removed events of the given file changes from the log, in order.
func (s Sessions) FileChangeEvents(ctx context.Context, l *SessionState, list []session.FileChange) ([]events.Event, error) {
	var out []events.Event
	for _, c := range list {
		rec, err := s.Log.CommitAt(ctx, s.Position(l.ID, c.At))
		if err != nil {
			return nil, fmt.Errorf("file change %d of %s: %w", c.N, l.ID, err)
		}
		for _, e := range rec.Events {
			switch d := e.Data.(type) {
			case events.FilePut:
				if d.N == c.N {
					out = append(out, e)
				}
			case events.FileRemoved:
				if d.N == c.N {
					out = append(out, e)
				}
			}
		}
	}
	return out, nil
}
