package idle

import (
	"context"
	"errors"
	"fmt"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor/internal/contents"
	"github.com/spoolhq/spool/services/executor/internal/handling"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
)

// Reasons of workspace_synced.
const (
	SyncTurn      = "turn"
	SyncInterval  = "interval"
	SyncRequested = "requested"
	SyncMaxAge    = "max_age"
	SyncStopped   = "stopped"
)

// Sync applies the file changes of a session and takes a snapshot. It returns runlog.ErrChanged if something else becomes due
// meanwhile: a turn applies file changes itself, and ends with a snapshot.
func (k *Keeper) Sync(ctx context.Context, l *eventlog.SessionState, s *handling.Session) error {
	if k.Store == nil {
		return nil
	}
	if err := k.CheckReachable(l.Run.Sandbox); err != nil {
		return err
	}
	if err := k.CheckUnused(ctx, l); err != nil {
		return err
	}
	release, err := k.Permits.Acquire(ctx, l.Tenant)
	if err != nil {
		return err
	}
	defer release()
	bus.ReleaseSlot(ctx)
	k.Handling.SetSyncing(s, true)
	defer k.Handling.SetSyncing(s, false)
	if len(l.Life.ChangesAfter(l.Run.Applied)) > 0 {
		if err := k.announce(ctx, l); err != nil {
			return err
		}
	}
	box, err := k.attach(ctx, l)
	if err != nil {
		return err
	}
	work, stop := k.Interruptible(ctx, topology.SessionRef{Tenant: l.Tenant, Session: l.ID}, s, DelayedBySnapshot)
	defer stop()
	facts, err := k.syncContents(work, l, box)
	if err != nil && work.Err() != nil && ctx.Err() == nil {
		return runlog.ErrChanged
	}
	if err != nil {
		return err
	}
	return k.Runs.AppendFacts(ctx, l, facts...)
}

// announce records, before the workspace is written to, that this executor works on it. Like a claim the commit raises the epoch: a claim
// that was decided before it is refused, and the executor that claims the session's runs later knows which executor to ask.
func (k *Keeper) announce(ctx context.Context, l *eventlog.SessionState) error {
	started := events.WorkspaceSyncStarted{SandboxID: l.Run.Sandbox.ID, Executor: k.Executor}
	d, err := k.Runs.Decide(l.Run, run.RecordEvents{Epoch: l.Run.Epoch + 1, Events: k.Runs.Events("", started)})
	if err != nil {
		return runlog.ErrChanged
	}
	return k.Runs.Append(ctx, l, d)
}

// syncContents applies the file changes and takes a snapshot. It returns the events that record them.
func (k *Keeper) syncContents(ctx context.Context, l *eventlog.SessionState, box sandbox.Sandbox) ([]events.Payload, error) {
	var facts []events.Payload
	if from := contents.Sources(l); len(from) > 0 { // the turn that created the sandbox ended before it could fill it
		restored, err := k.Contents.Restore(ctx, l, box, from)
		if err != nil {
			return nil, err
		}
		facts = append(facts, restored)
	}
	done, err := k.Contents.Apply(ctx, l, box)
	if err != nil {
		return nil, err
	}
	if done != nil {
		facts = append(facts, *done)
		next := *l
		next.Run.Applied = done.N
		l = &next
	}
	synced, err := k.Contents.Snapshot(ctx, l, box, SyncRequested)
	if err != nil {
		return nil, err
	}
	return append(facts, synced), nil
}

// attach returns a session's sandbox. It stops an agent that still runs in the sandbox, and creates a sandbox that has
// ended again, for the contents of its workspace. A resting agent may be gone with it, which the next turn finds out.
func (k *Keeper) attach(ctx context.Context, l *eventlog.SessionState) (sandbox.Sandbox, error) {
	sb := l.Run.Sandbox
	if err := k.Sandboxes.Resume(ctx, sb.ID); err != nil {
		return nil, err
	}
	if sb.Unstopped {
		ref := topology.SessionRef{Tenant: l.Tenant, Session: l.ID}
		if err := k.Dialer.Stop(ctx, sb, ref, l.Run.Epoch); err != nil {
			return nil, fmt.Errorf("stop the agent of an execution that has ended: %w", err)
		}
	}
	box, err := k.Provider.Attach(ctx, sb.ID)
	if errors.Is(err, sandbox.ErrNotFound) {
		box, err = k.Provider.Create(ctx, k.Spec(l, sb.ID))
	}
	if err != nil {
		return nil, fmt.Errorf("find sandbox %s: %w", sb.ID, err)
	}
	return box, nil
}

// Spec returns the spec of a session's sandbox with an id.
func (k *Keeper) Spec(l *eventlog.SessionState, id string) sandbox.Spec {
	spec := sandbox.Spec{
		ID: id, Image: l.Life.Options.Image, HostPath: l.Life.Options.HostPath,
		Labels: sandbox.Labels{Tenant: l.Tenant, Session: l.ID, Engine: k.Engine, Epoch: l.Run.Epoch},
	}
	if l.Run.Lost.Engine == k.Engine {
		spec.Workspace = l.Run.Lost.Workspace
	}
	if sb := l.Run.Sandbox; sb.ID == id && sb.Workspace != "" && sb.Workspace != id {
		spec.Workspace = sb.Workspace
	}
	return spec
}

// LastSnapshot takes the snapshot before a sandbox is given up, and returns the event that records it; nil if none is needed.
func (k *Keeper) LastSnapshot(ctx context.Context, l *eventlog.SessionState, reason string) (*events.WorkspaceSynced, error) {
	if k.Store == nil || l.Life.Status == session.Deleted || l.Run.Sandbox.Journal == "" || len(contents.Sources(l)) > 0 {
		return nil, nil // an unfilled workspace has no content beyond the last snapshot
	}
	box, err := k.attach(ctx, l)
	if err != nil {
		return nil, err
	}
	s, err := k.Contents.FullSnapshot(ctx, l, box, reason)
	if err != nil {
		return nil, err
	}
	return &s, nil
}
