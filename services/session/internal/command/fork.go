package command

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/definition"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/fork"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/retry"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace"
)

const (
	// codeCursorAhead is the code of the refusal of a fork at an event that the session does not have yet.
	codeCursorAhead = "CURSOR_AHEAD"

	// snapshotWaitTimeout is the maximum time for which a fork waits for the snapshot after the end of an execution.
	// snapshotPollInterval is the interval at which the fork checks for it.
	snapshotWaitTimeout  = 5 * time.Second
	snapshotPollInterval = 200 * time.Millisecond
)

// forkCommandBuilder returns the builder for a command that forks a session. It reads the parent only if the fork does
// not exist yet, so that a repeated command is answered even after the parent was deleted.
func (h *Handler) forkCommandBuilder(ctx context.Context, c command.Command) (sessionCommandBuilder, error) {
	var b command.ForkSession
	if err := decodeBody(c, &b); err != nil {
		return nil, err
	}
	if err := checkFork(b); err != nil {
		return nil, err
	}
	var made session.ForkSession
	var err error
	read := false
	return func(l *eventlog.SessionState, base session.CommandBase) (session.Command, error) {
		if !read && l.Life.Status == session.None {
			made, err = h.initialFork(ctx, c, b)
			read = true
		}
		made.CommandBase = base
		return made, err
	}, nil
}

// previewFork answers where the fork that a command asks for would begin. It appends nothing.
func (h *Handler) previewFork(ctx context.Context, c command.Command, b command.ForkSession) (command.Answer, error) {
	if err := checkFork(b); err != nil {
		return command.Answer{}, err
	}
	made, err := h.initialFork(ctx, c, b)
	return command.Answer{Forked: &made.Forked}, err
}

// checkFork returns an error for an invalid field of a fork.
func checkFork(b command.ForkSession) error {
	if err := events.CheckID("sessionId", events.KindSession, b.Parent); err != nil {
		return invalidFieldError("sessionId", err.Error())
	}
	return checkMetadata(b.Metadata)
}

// initialFork reads the parent session and returns the state with which the fork begins.
func (h *Handler) initialFork(ctx context.Context, c command.Command, b command.ForkSession) (session.ForkSession, error) {
	parent, err := h.loadParent(ctx, c, b.Parent)
	if err != nil {
		return session.ForkSession{}, err
	}
	if parent.Life.Options.HostPath != "" {
		return session.ForkSession{}, &command.Error{Code: codeHostPathUnsupported, Field: "sessionId", Detail: "the session works in a folder of the server's machine, of which a fork would have no copy of its own: create a session with a copy of the folder (spool run --copy)"}
	}
	cut, err := h.findCut(ctx, parent, b.At)
	if err != nil {
		return session.ForkSession{}, err
	}
	out := session.ForkSession{Create: cut.Created, Forked: cut.Forked, Changes: cut.Changes}
	out.Forked.Parent = b.Parent
	switch {
	case out.Forked.Conversation == events.ForkConversationLost && !b.AllowConversationLoss && !b.Preview:
		return out, &command.Error{
			Code: command.CodeConversationLost, Field: "sessionId",
			Detail: "the agent cannot continue its conversation in another process, so the fork would not know it: set allowConversationLoss (spool fork --allow-conversation-loss) to fork with a new conversation",
		}
	case out.Forked.Conversation == events.ForkConversationContinued && out.Create.Architecture == definition.ACP && !isIsolated(out.Create.Provider):
		out.Forked.Conversation = events.ForkConversationUnverified // the fork's workspace is in another folder
	}
	if b.Metadata != nil {
		out.Create.Metadata = b.Metadata
	}
	if err := h.replaceForkAgent(ctx, c, b.Agent, &out.Create); err != nil {
		return out, err
	}
	if err := h.checkForkSnapshots(ctx, c.Tenant, out.Forked); err != nil {
		return out, err
	}
	if err := h.dropLostUploads(ctx, &out); err != nil {
		return out, err
	}
	// The parent may have been deleted meanwhile. If it is deleted after this check, the janitor erases it only after
	// its grace, when the fork is in the log.
	_, err = h.loadParent(ctx, c, b.Parent)
	return out, err
}

// loadParent loads the session that a command forks.
func (h *Handler) loadParent(ctx context.Context, c command.Command, id string) (*eventlog.SessionState, error) {
	l, err := h.cfg.Sessions.Load(ctx, c.Tenant, id, eventlog.LeaderOnly)
	if err != nil {
		return l, err
	}
	if l.Life.Status == session.None || l.Life.Status == session.Deleted || !events.AllowsAgent(c.Agents, l.Life.Agent) {
		return l, &command.Error{Code: session.CodeNotFound, Field: "sessionId", Detail: "there is no such session"}
	}
	return l, nil
}

// findCut returns the position in the parent's history at which a fork begins: after the event with the seq at, or
// after the last event if at is nil. If the snapshot after the end of an execution is being taken, findCut waits for
// it.
func (h *Handler) findCut(ctx context.Context, parent *eventlog.SessionState, at *uint32) (fork.ForkPoint, error) {
	asked := fork.LastEvent
	if at != nil {
		asked = *at
	}
	until := time.Now().Add(snapshotWaitTimeout)
	walk, last, err := h.walkParent(ctx, parent, asked)
	for {
		if err != nil {
			return fork.ForkPoint{}, fmt.Errorf("read session %s: %w", parent.ID, err)
		}
		cut, refusal := walk.ForkPoint()
		if refusal == nil && at != nil && *at > cut.Forked.Asked {
			refusal = &fork.SeqAheadError{LastSeq: cut.Forked.Asked} // the client sent the number that means the last event
		}
		if refusal != nil {
			return cut, forkPointError(refusal)
		}
		if !cut.Waits || parent.Run.Sandbox.ID == "" || time.Now().After(until) {
			return cut, nil
		}
		if retry.Pause(ctx, snapshotPollInterval) != nil {
			return cut, ctx.Err()
		}
		last, err = h.readParent(ctx, parent, walk, last, nil)
	}
}

// walkParent reads as much of the parent's log as a fork at the seq asked needs. It begins where an earlier fork of the
// same session stopped reading.
func (h *Handler) walkParent(ctx context.Context, parent *eventlog.SessionState, asked uint32) (*fork.Finder, eventlog.NumberedEvent, error) {
	known, err := h.walks.acquireEntry(ctx, topology.SessionRef{Tenant: parent.Tenant, Session: parent.ID})
	if err != nil {
		return nil, eventlog.NumberedEvent{}, err
	}
	defer known.release()
	walk, last := known.resumeWalk(asked)
	last, err = h.readParent(ctx, parent, walk, last, func(at eventlog.NumberedEvent, whole bool) {
		if at.Seq <= asked {
			known.addMark(walk, at, whole)
		}
	})
	return walk, last, err
}

// readParent adds the parent's events after last to a walk, until later events have no effect on the fork. It calls
// keep after each complete commit, unless keep is nil.
func (h *Handler) readParent(ctx context.Context, parent *eventlog.SessionState, walk *fork.Finder, last eventlog.NumberedEvent, keep func(at eventlog.NumberedEvent, whole bool)) (eventlog.NumberedEvent, error) {
	for e, err := range eventlog.SessionEventsAfter(ctx, h.cfg.Sessions.Log, parent.Tenant, parent.ID, last) {
		if err != nil {
			return last, err
		}
		if keep != nil && last.Seq > 0 && e.Position != last.Position {
			keep(last, false)
		}
		walk.Add(e.Seq, e.Event)
		if last = e; walk.IsSettled() {
			return last, nil
		}
	}
	if keep != nil && last.Seq > 0 {
		keep(last, true)
	}
	return last, nil
}

// forkPointError converts an error of a fork.Walk, such as an event at which the session cannot be forked, to the
// refusal of the fork.
func forkPointError(err error) error {
	var ahead *fork.SeqAheadError
	switch {
	case errors.As(err, &ahead):
		return &command.Error{Code: codeCursorAhead, Field: "at", Detail: ahead.Error(), Tip: &ahead.LastSeq}
	case errors.Is(err, fork.ErrSeqZero):
		return invalidFieldError("at", err.Error())
	}
	return &command.Error{Code: session.CodeNotFound, Field: "sessionId", Detail: err.Error()}
}

// replaceForkAgent sets the agent of a fork to another version of the parent's agent, or to another agent of the same
// architecture. The fork keeps the options of the parent. Another agent gets its default instance.
func (h *Handler) replaceForkAgent(ctx context.Context, c command.Command, name string, out *events.SessionCreated) error {
	if !slices.Contains(h.cfg.Providers, out.Provider) {
		return invalidFieldError("sessionId", fmt.Sprintf("the session's sandboxes are of provider %.64q, which this installation does not offer; it offers %s", out.Provider, strings.Join(h.cfg.Providers, ", ")))
	}
	if name == "" {
		return nil
	}
	before := *out
	out.Agent, out.AgentVersion, out.AgentRef = "", "", events.Reference{}
	agent, err := h.pinAgent(ctx, c, command.CreateSession{Agent: name}, out)
	if err != nil {
		return err
	}
	if _, err := resolveArchitecture(before.Architecture, agent); err != nil {
		return invalidFieldError("agent", fmt.Sprintf("the agent is made for %s, and the session is of %s: the conversation can be continued by an agent of the same architecture only", agent.Architecture, before.Architecture))
	}
	if agent != nil && agent.Limits.Turns > 0 && !definition.EnforcesTurnLimit(out.Architecture) && !isIsolated(out.Provider) {
		return invalidFieldError("agent", fmt.Sprintf("limits.turns of an agent of architecture %s needs the egress proxy of the providers docker and modal; the session's provider %s has none", out.Architecture, out.Provider))
	}
	if err := h.checkSessionImages(out.Provider, out.Options.Image, agent); err != nil {
		return err
	}
	if out.AgentRef.WithoutVersion() == before.AgentRef.WithoutVersion() {
		return nil
	}
	out.Instance = events.Reference{}
	return h.setDefaultInstance(ctx, c, out)
}

// checkForkSnapshots refuses a fork if the snapshots with which it begins are no longer in the object store, or cannot
// be read.
func (h *Handler) checkForkSnapshots(ctx context.Context, tenant string, f events.SessionForked) error {
	needed := [][2]string{{f.FilesOwner(), f.Snapshot}}
	if f.Records != f.Snapshot || f.RecordsOwner() != f.FilesOwner() {
		needed = append(needed, [2]string{f.RecordsOwner(), f.Records})
	}
	for _, s := range needed {
		if s[1] == "" {
			continue
		}
		err := h.checkSnapshotObjects(ctx, tenant, s[0], s[1])
		var corrupt *workspace.CorruptError
		if errors.Is(err, workspace.ErrNotFound) || errors.As(err, &corrupt) {
			return &command.Error{Code: command.CodeSnapshotGone, Field: "at", Detail: fmt.Sprintf("the fork would begin with snapshot %s of session %s, which is not kept any more or cannot be read: fork at a later event", s[1], s[0])}
		}
		if err != nil {
			return fmt.Errorf("look for snapshot %s of %s: %w", s[1], s[0], err)
		}
	}
	return nil
}

// dropLostUploads removes from a fork the files that clients uploaded after the snapshot and that the object store no
// longer has, because the janitor removes such files when a later snapshot contains them. The fork records that these
// files are missing.
func (h *Handler) dropLostUploads(ctx context.Context, out *session.ForkSession) error {
	var lost []string
	kept := make([]events.Payload, 0, len(out.Changes))
	for _, change := range out.Changes {
		put, ok := change.(events.FilePut)
		if ok {
			store, err := h.cfg.Snapshots(ctx)
			if err != nil {
				return err
			}
			has, err := store.Has(ctx, put.Object)
			if err != nil {
				return fmt.Errorf("look for %s: %w", put.Object, err)
			}
			if !has {
				lost = append(lost, put.Path)
				continue
			}
		}
		kept = append(kept, change)
	}
	if out.Changes = kept; len(lost) > 0 {
		reason := fmt.Sprintf("%d files that were put in after the snapshot are not kept any more, the first is %q", len(lost), lost[0])
		if out.Forked.Reason != "" {
			reason = out.Forked.Reason + "; " + reason
		}
		out.Forked.Reason = reason
	}
	return nil
}

// checkSnapshotObjects reads the manifest of the snapshot id of the session of, and checks that all objects of the
// snapshot exist.
func (h *Handler) checkSnapshotObjects(ctx context.Context, tenant, of, id string) error {
	store, err := h.cfg.Snapshots(ctx)
	if err != nil {
		return err
	}
	h.manifest.Lock()
	m, err := workspace.Open(ctx, store, tenant, of, id)
	var objects []string
	if err == nil {
		objects = m.Objects()
	}
	h.manifest.Unlock()
	if err != nil {
		return err
	}
	for _, name := range objects {
		has, err := store.Has(ctx, name)
		if err != nil {
			return err
		}
		if !has {
			return fmt.Errorf("object %s: %w", name, workspace.ErrNotFound)
		}
	}
	return nil
}

// forkPoint returns the position at which the fork that a command creates begins, or nil for other commands.
func forkPoint(c command.Command, l *eventlog.SessionState) *events.SessionForked {
	if c.Type != command.TypeForkSession {
		return nil
	}
	return l.Life.Fork
}
