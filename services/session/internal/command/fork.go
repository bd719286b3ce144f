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
	codeCursorAhead = "CURSOR_AHEAD"

	// snapshotWait is the time for which a fork waits for the snapshot after the end of an execution, and snapshotPoll is the
	// interval of its checks.
	snapshotWait = 5 * time.Second
	snapshotPoll = 200 * time.Millisecond
)

// forkBuilder returns the builder of a fork. It reads the parent only if the fork does not exist yet: a repeated
// command is also answered after the parent was deleted.
func (h *Handler) forkBuilder(ctx context.Context, c command.Command) (builder, error) {
	var b command.ForkSession
	if err := decode(c, &b); err != nil {
		return nil, err
	}
	if err := events.CheckID("sessionId", events.KindSession, b.Parent); err != nil {
		return nil, invalid("sessionId", err.Error())
	}
	if err := checkMetadata(b.Metadata); err != nil {
		return nil, err
	}
	var made session.Fork
	var err error
	read := false
	return func(l *eventlog.Loaded, base session.Base) (session.Command, error) {
		if !read && l.Life.Status == session.None {
			made, err = h.initialFork(ctx, c, b)
			read = true
		}
		made.Base = base
		return made, err
	}, nil
}

// initialFork reads the parent and returns the initial state of the fork.
func (h *Handler) initialFork(ctx context.Context, c command.Command, b command.ForkSession) (session.Fork, error) {
	parent, err := h.parent(ctx, c, b.Parent)
	if err != nil {
		return session.Fork{}, err
	}
	if parent.Life.Options.HostPath != "" {
		return session.Fork{}, &command.Error{Code: codeHostPathUnsupported, Field: "sessionId", Detail: "the session works in a folder of the server's machine, of which a fork would have no copy of its own: create a session with a copy of the folder (spool run --copy)"}
	}
	cut, err := h.findCut(ctx, parent, b.At)
	if err != nil {
		return session.Fork{}, err
	}
	out := session.Fork{Create: cut.Created, Forked: cut.Forked, Changes: cut.Changes}
	out.Forked.Parent = b.Parent
	if b.Metadata != nil {
		out.Create.Metadata = b.Metadata
	}
	if err := h.forkAgent(ctx, c, b.Agent, &out.Create); err != nil {
		return out, err
	}
	if err := h.checkSnapshots(ctx, c.Tenant, out.Forked); err != nil {
		return out, err
	}
	if err := h.dropLostChanges(ctx, &out); err != nil {
		return out, err
	}
	// The parent may have been deleted meanwhile. If it is deleted after this check, the janitor erases it only after
	// its grace, when the fork is in the log.
	_, err = h.parent(ctx, c, b.Parent)
	return out, err
}

// parent loads the session that is forked.
func (h *Handler) parent(ctx context.Context, c command.Command, id string) (*eventlog.Loaded, error) {
	l, err := h.cfg.Sessions.Load(ctx, c.Tenant, id, eventlog.Leader)
	if err != nil {
		return l, err
	}
	if l.Life.Status == session.None || l.Life.Status == session.Deleted || !events.AllowsAgent(c.Agents, l.Life.Agent) {
		return l, &command.Error{Code: session.CodeNotFound, Field: "sessionId", Detail: "there is no such session"}
	}
	return l, nil
}

// findCut finds where the parent can be forked. If the snapshot after the end of an execution is being taken, findCut
// waits for it.
func (h *Handler) findCut(ctx context.Context, parent *eventlog.Loaded, at *uint32) (fork.Cut, error) {
	asked := fork.Last
	if at != nil {
		asked = *at
	}
	until := time.Now().Add(snapshotWait)
	walk, last, err := h.walkParent(ctx, parent, asked)
	for {
		if err != nil {
			return fork.Cut{}, fmt.Errorf("read session %s: %w", parent.ID, err)
		}
		cut, refusal := walk.Cut()
		if refusal == nil && at != nil && *at > cut.Forked.Asked {
			refusal = &fork.AheadError{LastSeq: cut.Forked.Asked} // the client sent the number that means the last event
		}
		if refusal != nil {
			return cut, cutError(refusal)
		}
		if !cut.Waits || parent.Run.Sandbox.ID == "" || time.Now().After(until) {
			return cut, nil
		}
		if retry.Pause(ctx, snapshotPoll) != nil {
			return cut, ctx.Err()
		}
		last, err = h.readParent(ctx, parent, walk, last, nil)
	}
}

// walkParent reads the parent's log as far as a fork at a seq needs it, starting where an earlier fork stopped reading.
func (h *Handler) walkParent(ctx context.Context, parent *eventlog.Loaded, asked uint32) (*fork.Walk, eventlog.Numbered, error) {
	known, err := h.walks.acquire(ctx, topology.SessionRef{Tenant: parent.Tenant, Session: parent.ID})
	if err != nil {
		return nil, eventlog.Numbered{}, err
	}
	defer known.release()
	walk, last := known.walk(asked)
	last, err = h.readParent(ctx, parent, walk, last, func(at eventlog.Numbered, whole bool) {
		if at.Seq <= asked {
			known.keep(walk, at, whole)
		}
	})
	return walk, last, err
}

// readParent adds the parent's events after a seq to a walk until later events have no effect on the fork. keep, unless nil,
// is called after each complete commit.
func (h *Handler) readParent(ctx context.Context, parent *eventlog.Loaded, walk *fork.Walk, last eventlog.Numbered, keep func(at eventlog.Numbered, whole bool)) (eventlog.Numbered, error) {
	for e, err := range eventlog.SessionAfter(ctx, h.cfg.Sessions.Log, parent.Tenant, parent.ID, last) {
		if err != nil {
			return last, err
		}
		if keep != nil && last.Seq > 0 && e.Position != last.Position {
			keep(last, false)
		}
		walk.Add(e.Seq, e.Event)
		if last = e; walk.Settled() {
			return last, nil
		}
	}
	if keep != nil && last.Seq > 0 {
		keep(last, true)
	}
	return last, nil
}

// cutError converts an error of a fork.Walk to the refusal of the fork.
func cutError(err error) error {
	var ahead *fork.AheadError
	switch {
	case errors.As(err, &ahead):
		return &command.Error{Code: codeCursorAhead, Field: "at", Detail: ahead.Error(), Tip: &ahead.LastSeq}
	case errors.Is(err, fork.ErrSeqZero):
		return invalid("at", err.Error())
	}
	return &command.Error{Code: session.CodeNotFound, Field: "sessionId", Detail: err.Error()}
}

// forkAgent replaces the parent's agent by another version, or by another agent of the same architecture. The options
// are those of the parent, which are resolved already. If the agent is another one, the session gets its default
// instance.
func (h *Handler) forkAgent(ctx context.Context, c command.Command, name string, out *events.SessionCreated) error {
	if !slices.Contains(h.cfg.Providers, out.Provider) {
		return invalid("sessionId", fmt.Sprintf("the session's sandboxes are of provider %.64q, which this installation does not offer; it offers %s", out.Provider, strings.Join(h.cfg.Providers, ", ")))
	}
	if name == "" {
		return nil
	}
	before := *out
	out.Agent, out.AgentVersion, out.AgentRef = "", "", events.Reference{}
	agent, err := h.pin(ctx, c, command.CreateSession{Agent: name}, out)
	if err != nil {
		return err
	}
	if _, err := resolveArchitecture(before.Architecture, agent); err != nil {
		return invalid("agent", fmt.Sprintf("the agent is made for %s, and the session is of %s: the conversation can be continued by an agent of the same architecture only", agent.Architecture, before.Architecture))
	}
	if agent != nil && agent.Limits.Turns > 0 && !definition.EnforcesTurnLimit(out.Architecture) && !isIsolated(out.Provider) {
		return invalid("agent", fmt.Sprintf("the agent has limits.turns, which for architecture %s the egress proxy of the providers docker and modal holds to; the session's provider %s has none", out.Architecture, out.Provider))
	}
	if err := h.checkSessionImages(out.Provider, out.Options.Image, agent); err != nil {
		return err
	}
	if out.AgentRef.Bare() == before.AgentRef.Bare() {
		return nil
	}
	out.Instance = events.Reference{}
	return h.setDefaultInstance(ctx, c, out)
}

// checkSnapshots refuses a fork if its snapshots are no longer in the object store, or cannot be read.
func (h *Handler) checkSnapshots(ctx context.Context, tenant string, f events.SessionForked) error {
	needed := [][2]string{{f.Files(), f.Snapshot}}
	if f.Records != f.Snapshot || f.State() != f.Files() {
		needed = append(needed, [2]string{f.State(), f.Records})
	}
	for _, s := range needed {
		if s[1] == "" {
			continue
		}
		err := h.checkSnapshot(ctx, tenant, s[0], s[1])
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

// dropLostChanges leaves out files that clients uploaded between the snapshot and the point of the fork, if the object
// store no longer has them: the janitor removes them when a later snapshot contains them. The fork records that they
// are missing.
func (h *Handler) dropLostChanges(ctx context.Context, out *session.Fork) error {
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

// checkSnapshot reads a snapshot's manifest and checks that all objects of the snapshot exist.
func (h *Handler) checkSnapshot(ctx context.Context, tenant, of, id string) error {
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

// forkPoint returns the point where the fork of a command begins, or nil for other commands.
func forkPoint(c command.Command, l *eventlog.Loaded) *events.SessionForked {
	if c.Type != command.TypeForkSession {
		return nil
	}
	return l.Life.Fork
}
