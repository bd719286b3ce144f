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
	SyncReasonTurn      = "turn"
	SyncReasonInterval  = "interval"
	SyncReasonRequested = "requested"
	SyncReasonMaxAge    = "max_age"
	SyncReasonStopped   = "stopped"
)

// SyncWorkspace applies the requested file changes to the session's workspace and takes a snapshot, while no execution runs. It returns
// runlog.ErrChanged if other work becomes due meanwhile; a turn also applies the file changes and ends with a snapshot.
func (k *Keeper) SyncWorkspace(ctx context.Context, l *eventlog.SessionState, s *handling.Session) error {
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
		if err := k.recordSyncStart(ctx, l); err != nil {
			return err
		}
	}
	box, err := k.attachSandbox(ctx, l)
	if err != nil {
		return err
	}
	work, stop := k.InterruptibleContext(ctx, topology.SessionRef{Tenant: l.Tenant, Session: l.ID}, s, InterruptsSnapshot)
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

// recordSyncStart records in the log that this executor works on the session's sandbox, before it writes to the workspace. Like a claim,
// the record raises the epoch: a claim that was decided earlier is refused, and an executor that claims the session's runs later knows
// which executor to ask.
func (k *Keeper) recordSyncStart(ctx context.Context, l *eventlog.SessionState) error {
	started := events.WorkspaceSyncStarted{SandboxID: l.Run.Sandbox.ID, Executor: k.Executor}
	d, err := k.Runs.Decide(l.Run, run.RecordEvents{Epoch: l.Run.Epoch + 1, Events: k.Runs.NewEvents("", started)})
	if err != nil {
		return runlog.ErrChanged
	}
	return k.Runs.AppendDecision(ctx, l, d)
}

// syncContents applies the requested file changes to the workspace and takes a snapshot. It returns the events that record both.
func (k *Keeper) syncContents(ctx context.Context, l *eventlog.SessionState, box sandbox.Sandbox) ([]events.Payload, error) {
	var facts []events.Payload
	if from := contents.RestoreSources(l); len(from) > 0 { // the turn that created the sandbox ended before it could fill it
		restored, err := k.Contents.RestoreWorkspace(ctx, l, box, from)
		if err != nil {
			return nil, err
		}
		facts = append(facts, restored)
	}
	done, err := k.Contents.ApplyFileChanges(ctx, l, box)
	if err != nil {
		return nil, err
	}
	if done != nil {
		facts = append(facts, *done)
		next := *l
		next.Run.Applied = done.N
		l = &next
	}
	synced, err := k.Contents.TakeSnapshot(ctx, l, box, SyncReasonRequested)
	if err != nil {
		return nil, err
	}
	return append(facts, synced), nil
}

// attachSandbox returns the session's sandbox. It stops an agent that still runs there, and starts the sandbox again if it has stopped, to
// reach its workspace. In that case a resting agent is gone, which the next turn finds out.
func (k *Keeper) attachSandbox(ctx context.Context, l *eventlog.SessionState) (sandbox.Sandbox, error) {
	sb := l.Run.Sandbox
	if err := k.Sandboxes.Resume(ctx, sb.ID); err != nil {
		return nil, err
	}
	if sb.Unstopped {
		ref := topology.SessionRef{Tenant: l.Tenant, Session: l.ID}
		if err := k.Dialer.StopAgent(ctx, sb, ref, l.Run.Epoch); err != nil {
			return nil, fmt.Errorf("stop the agent of an execution that has ended: %w", err)
		}
	}
	box, err := k.Provider.Attach(ctx, sb.ID)
	if errors.Is(err, sandbox.ErrNotFound) {
		box, err = k.Provider.Create(ctx, k.SandboxSpec(l, sb.ID))
	}
	if err != nil {
		return nil, fmt.Errorf("find sandbox %s: %w", sb.ID, err)
	}
	return box, nil
}

// SandboxSpec returns the spec of a session's sandbox that gets the given id.
func (k *Keeper) SandboxSpec(l *eventlog.SessionState, id string) sandbox.Spec {
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

// TakeLastSnapshot takes the last snapshot of a sandbox before the sandbox ends, and returns the event that records it, or nil if no
// snapshot is needed.
func (k *Keeper) TakeLastSnapshot(ctx context.Context, l *eventlog.SessionState, reason string) (*events.WorkspaceSynced, error) {
	if k.Store == nil || l.Life.Status == session.Deleted || l.Run.Sandbox.Journal == "" || len(contents.RestoreSources(l)) > 0 {
		return nil, nil // an unfilled workspace has no content beyond the last snapshot
	}
	box, err := k.attachSandbox(ctx, l)
	if err != nil {
		return nil, err
	}
	s, err := k.Contents.TakeFullSnapshot(ctx, l, box, reason)
	if err != nil {
		return nil, err
	}
	return &s, nil
}
