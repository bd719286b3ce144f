package idle

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
)

// orphanRemover is implemented by providers that keep the workspace of a sandbox after its end, stored by the sandbox's id and not by the
// session.
type orphanRemover interface {
	// RemoveOrphans removes the workspaces that no sandbox has used for at least olderThan, and returns their number.
	RemoveOrphans(ctx context.Context, olderThan time.Duration) (removed int, err error)
}

// orphanAge is the time for which a workspace without a sandbox is kept. Until then the next sandbox of the session can take the workspace
// over; later ones are filled from a snapshot.
const orphanAge = 24 * time.Hour

// Run calls Sweep at once and then regularly until ctx ends.
func (k *Keeper) Run(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		if err := k.Sweep(ctx); err != nil && ctx.Err() == nil {
			k.Logger.Warn("the sweep failed, the next one will continue", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Sweep removes the sandboxes and workspaces of deleted sessions, and sandboxes that their session does not use any more. It also ends idle
// sandboxes that their provider would end soon.
func (k *Keeper) Sweep(ctx context.Context) error {
	list, err := k.Provider.List(ctx)
	if err != nil {
		return err
	}
	for _, info := range list {
		if info.Labels.Session == "" {
			if err := k.Pool.SweepSandbox(ctx, info); err != nil {
				return err
			}
			continue
		}
		// The log is read after the list: it names a sandbox before that exists.
		l, err := k.Sessions.Load(ctx, info.Labels.Tenant, info.Labels.Session, eventlog.LeaderOnly)
		if err != nil {
			return err
		}
		deleted := l.Life.Status == session.Deleted
		if l.Run.Sandbox.ID == info.ID && !(deleted && l.Run.IsIdle()) {
			k.maintainSandbox(ctx, l, info)
			continue
		}
		k.Logger.Info("sweep: a sandbox is over", "sandbox", info.ID, "session", l.ID)
		if err := k.Sandboxes.Terminate(ctx, info.ID, deleted); err != nil {
			return err
		}
	}
	if o, ok := k.Provider.(orphanRemover); ok {
		n, err := o.RemoveOrphans(ctx, orphanAge)
		if n > 0 {
			k.Logger.Info("sweep: workspaces without a sandbox were removed", "count", n)
		}
		if err != nil {
			return err
		}
	}
	p, ok := k.Provider.(sandbox.WorkspaceKeeper)
	if !ok {
		return nil
	}
	return k.sweepKeptWorkspaces(ctx, p)
}

// maintainSandbox stops an agent that still runs although its execution has ended, and ends an idle sandbox before its provider does. It
// logs errors; the next sweep tries again.
func (k *Keeper) maintainSandbox(ctx context.Context, l *eventlog.SessionState, info sandbox.Info) {
	var err error
	switch {
	case !l.Run.IsIdle():
	case l.Run.Sandbox.Unstopped:
		if err = k.stopAgent(ctx, l); err != nil {
			err = fmt.Errorf("stop the agent of execution %s, which has ended: %w", l.Run.Execution, err)
		}
	case k.NearsEndOfLife(l.Run.Sandbox) && l.DueWork() == run.NoWork:
		if err = k.endIdleSandbox(ctx, info, SyncReasonMaxAge); err != nil {
			err = fmt.Errorf("end the sandbox before its provider does: %w", err)
		}
	}
	if err != nil && !errors.Is(err, run.ErrFenced) && !errors.Is(err, runlog.ErrChanged) {
		k.Logger.Warn("sweep: an idle sandbox could not be maintained", "sandbox", info.ID, "session", l.ID, "error", err)
	}
}

// parallelStops is the number of sandboxes that StopSandboxes ends at the same time.
const parallelStops = 8

// StopSandboxes takes a snapshot of every sandbox of the engine and ends it, so that nothing stays on the engine. An execution that still
// runs loses its sandbox, whose workspace is kept. The streams to resting agents must be closed before.
func (k *Keeper) StopSandboxes(ctx context.Context) error {
	list, err := k.Provider.List(ctx)
	if err != nil {
		return err
	}
	var group errgroup.Group
	group.SetLimit(parallelStops)
	errs := make([]error, len(list))
	for i, info := range list {
		group.Go(func() error {
			errs[i] = k.stopSandbox(ctx, info)
			return nil
		})
	}
	return errors.Join(append(errs, group.Wait())...)
}

// stopSandbox takes a snapshot of one sandbox and ends it, for StopSandboxes.
func (k *Keeper) stopSandbox(ctx context.Context, info sandbox.Info) error {
	if info.Labels.Session == "" {
		return k.Sandboxes.Terminate(ctx, info.ID, true)
	}
	stored, _, err := k.snapshotAndRecordEnd(ctx, info, SyncReasonStopped, "manual")
	if err != nil {
		k.Logger.Warn("the log does not say that a sandbox ended; the next turn will", "sandbox", info.ID, "session", info.Labels.Session, "error", err)
	}
	return k.Sandboxes.Terminate(ctx, info.ID, stored)
}

// snapshotAndRecordEnd takes a last snapshot of a sandbox in which nothing runs, and records in the log that the sandbox ends. sync is the
// recorded reason of the snapshot, reason that of the end. stored is true if the workspace is in the object store, so that it may be
// removed with the sandbox. epoch is that of the commit, or 0 if the log says that the sandbox has ended or is in use.
func (k *Keeper) snapshotAndRecordEnd(ctx context.Context, info sandbox.Info, sync, reason string) (stored bool, epoch uint64, err error) {
	l, err := k.Sessions.Load(ctx, info.Labels.Tenant, info.Labels.Session, eventlog.LeaderOnly)
	if err != nil || l.Run.Sandbox.ID != info.ID || !l.Run.IsIdle() {
		return false, 0, err
	}
	var facts []events.Payload
	if !k.Sandboxes.KeepsWorkspaces() {
		synced, err := k.TakeLastSnapshot(ctx, l, sync)
		if err != nil {
			k.Logger.Warn("no snapshot before a sandbox ended: its workspace stays on the engine", "sandbox", info.ID, "session", l.ID, "error", err)
		}
		if synced != nil {
			facts, stored = append(facts, *synced), true
		}
	}
	err = k.Runs.AppendFacts(ctx, l, append(facts, events.SandboxTerminated{SandboxID: info.ID, Reason: reason, Kept: !stored})...)
	return stored && err == nil, l.Run.Epoch + 1, err
}

// sweepKeptWorkspaces removes the workspaces of deleted sessions from a provider that keeps workspaces by session.
func (k *Keeper) sweepKeptWorkspaces(ctx context.Context, p sandbox.WorkspaceKeeper) error {
	kept, err := p.ListWorkspaces(ctx)
	if err != nil {
		return err
	}
	for _, labels := range kept {
		l, err := k.Sessions.Load(ctx, labels.Tenant, labels.Session, eventlog.LeaderOnly)
		if err != nil {
			return err
		}
		if l.Life.Status != session.Deleted || l.Run.Sandbox.ID != "" {
			continue
		}
		if err := p.RemoveWorkspace(ctx, labels); err != nil {
			return err
		}
	}
	return nil
}
