package worker

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
	syncTurn     = "turn"
	syncInterval = "interval"
	syncAsked    = "requested"
	syncMaxAge   = "max_age"
	syncStopped  = "stopped"
)

// sync does what is due to a sandbox at rest: file changes, then a snapshot. It returns runlog.ErrChanged when something else is
// due meanwhile: a turn puts the file changes in itself, and ends with a snapshot.
func (w *Worker) sync(ctx context.Context, l eventlog.Loaded, b *handling.Session) error {
	if w.d.Workspaces == nil {
		return nil
	}
	if err := w.reachable(l.Run.Sandbox); err != nil {
		return err
	}
	if err := w.mayUse(ctx, l); err != nil {
		return err
	}
	release, err := w.upkeep.Acquire(ctx, l.Tenant)
	if err != nil {
		return err
	}
	defer release()
	bus.ReleaseSlot(ctx)
	w.handling.SetSyncing(b, true)
	defer w.handling.SetSyncing(b, false)
	if len(l.Life.After(l.Run.Applied)) > 0 {
		if err := w.announce(ctx, &l); err != nil {
			return err
		}
	}
	box, err := w.revive(ctx, l)
	if err != nil {
		return err
	}
	work, stop := w.interruptible(ctx, topology.SessionRef{Tenant: l.Tenant, Session: l.ID}, b, delayedBySnapshot)
	defer stop()
	facts, err := w.syncAt(work, l, box)
	if err != nil && work.Err() != nil && ctx.Err() == nil {
		return runlog.ErrChanged
	}
	if err != nil {
		return err
	}
	return w.runlog.AppendFacts(ctx, l, facts...)
}

// announce says in the log, before the workspace is written to, that this executor does so. The commit takes part in the
// order of claims: one that was decided before it is refused, and whoever claims the session's runs later knows whom to ask.
func (w *Worker) announce(ctx context.Context, l *eventlog.Loaded) error {
	started := events.WorkspaceSyncStarted{SandboxID: l.Run.Sandbox.ID, Executor: w.cfg.Executor}
	d, err := w.runlog.Decide(l.Run, run.Record{Epoch: l.Run.Epoch + 1, Events: w.runlog.Events("", started)})
	if err != nil {
		return runlog.ErrChanged
	}
	return w.runlog.Append(ctx, l, d)
}

// syncAt puts file changes into a sandbox at rest and takes a snapshot; it returns the events that say so.
func (w *Worker) syncAt(ctx context.Context, l eventlog.Loaded, box sandbox.Sandbox) ([]events.Payload, error) {
	var facts []events.Payload
	if from := contents.Sources(l); len(from) > 0 { // a turn made the sandbox, and was ended before it could fill it
		restored, err := w.contents.Restore(ctx, l, box, from)
		if err != nil {
			return nil, err
		}
		facts = append(facts, restored)
	}
	done, err := w.contents.Apply(ctx, l, box)
	if err != nil {
		return nil, err
	}
	if done != nil {
		facts = append(facts, *done)
		l.Run.Applied = done.N
	}
	synced, err := w.contents.Snapshot(ctx, l, box, syncAsked)
	if err != nil {
		return nil, err
	}
	return append(facts, synced), nil
}

// revive finds a session's sandbox, and starts it again if it has ended, for
// what is in its workspace. A warm agent may be gone with it: the next turn tells.
func (w *Worker) revive(ctx context.Context, l eventlog.Loaded) (sandbox.Sandbox, error) {
	sb := l.Run.Sandbox
	if err := w.sandboxes.Resume(ctx, sb.ID); err != nil {
		return nil, err
	}
	if sb.Unstopped {
		ref := topology.SessionRef{Tenant: l.Tenant, Session: l.ID}
		if err := w.dialer.Stop(ctx, sb, ref, l.Run.Epoch); err != nil {
			return nil, fmt.Errorf("stop the agent of an execution that has ended: %w", err)
		}
	}
	box, err := w.d.Sandbox.Attach(ctx, sb.ID)
	if errors.Is(err, sandbox.ErrNotFound) {
		box, err = w.d.Sandbox.Create(ctx, w.spec(l, sb.ID))
	}
	if err != nil {
		return nil, fmt.Errorf("find sandbox %s: %w", sb.ID, err)
	}
	return box, nil
}

// spec is what a session's sandbox is made from.
func (w *Worker) spec(l eventlog.Loaded, id string) sandbox.Spec {
	spec := sandbox.Spec{
		ID: id, Image: l.Life.Options.Image, HostPath: l.Life.Options.HostPath,
		Labels: sandbox.Labels{Tenant: l.Tenant, Session: l.ID, Engine: w.cfg.Engine, Epoch: l.Run.Epoch},
	}
	if l.Run.Lost.Engine == w.cfg.Engine {
		spec.Workspace = l.Run.Lost.Workspace
	}
	if sb := l.Run.Sandbox; sb.ID == id && sb.Workspace != "" && sb.Workspace != id {
		spec.Workspace = sb.Workspace
	}
	return spec
}

// last takes the snapshot before a sandbox is given up; nil where none is wanted.
func (w *Worker) last(ctx context.Context, l eventlog.Loaded, reason string) (*events.WorkspaceSynced, error) {
	if w.d.Workspaces == nil || l.Life.Status == session.Deleted || l.Run.Sandbox.Journal == "" || len(contents.Sources(l)) > 0 {
		return nil, nil // of a workspace that was not filled, the snapshot that is there is the last
	}
	box, err := w.revive(ctx, l)
	if err != nil {
		return nil, err
	}
	s, err := w.contents.Snapshot(ctx, l, box, reason)
	if err != nil {
		return nil, err
	}
	return &s, nil
}
