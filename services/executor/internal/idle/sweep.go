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

// orphaner is implemented by providers that keep workspaces for longer than their sandboxes, by sandbox and not by
// session.
type orphaner interface {
	// Orphans removes the workspaces that have been without a sandbox for at least olderThan, and returns how many.
	Orphans(ctx context.Context, olderThan time.Duration) (removed int, err error)
}

// orphanAge is the time for which a workspace without a sandbox is kept, so that another sandbox of the session can
// continue with it. After that time a sandbox is filled from a snapshot instead.
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

// Sweep removes sandboxes of deleted sessions and those that are no longer their session's, and workspaces of deleted sessions. It ends idle
// sandboxes that their provider would end soon.
func (k *Keeper) Sweep(ctx context.Context) error {
	list, err := k.Provider.List(ctx)
	if err != nil {
		return err
	}
	for _, info := range list {
		if info.Labels.Session == "" {
			if err := k.Pool.Sweep(ctx, info); err != nil {
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
	if o, ok := k.Provider.(orphaner); ok {
		n, err := o.Orphans(ctx, orphanAge)
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
	return k.sweepKept(ctx, p)
}

// maintainSandbox stops an agent that still runs after its execution has ended, and ends an idle sandbox before its
// provider does. The next sweep tries again after an error.
func (k *Keeper) maintainSandbox(ctx context.Context, l *eventlog.SessionState, info sandbox.Info) {
	var err error
	switch {
	case !l.Run.IsIdle():
	case l.Run.Sandbox.Unstopped:
		if err = k.stopAgent(ctx, l); err != nil {
			err = fmt.Errorf("stop the agent of execution %s, which has ended: %w", l.Run.Execution, err)
		}
	case k.NearsEnd(l.Run.Sandbox) && l.DueWork() == run.NoWork:
		if err = k.endIdleSandbox(ctx, info, SyncMaxAge); err != nil {
			err = fmt.Errorf("end the sandbox before its provider does: %w", err)
		}
	}
	if err != nil && !errors.Is(err, run.ErrFenced) && !errors.Is(err, runlog.ErrChanged) {
		k.Logger.Warn("sweep: an idle sandbox could not be maintained", "sandbox", info.ID, "session", l.ID, "error", err)
	}
}

// parallelStops is the number of sandboxes that StopSandboxes ends at a time.
const parallelStops = 8

// StopSandboxes ends every sandbox of the engine, each with a snapshot first, so that nothing has to stay there. An execution that still runs in
// a sandbox loses it, and its workspace is kept. Streams to resting agents must be closed before.
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
			errs[i] = k.stopOne(ctx, info)
			return nil
		})
	}
	return errors.Join(append(errs, group.Wait())...)
}

// stopOne does the work of StopSandboxes for one sandbox.
func (k *Keeper) stopOne(ctx context.Context, info sandbox.Info) error {
	if info.Labels.Session == "" {
		return k.Sandboxes.Terminate(ctx, info.ID, true)
	}
	stored, _, err := k.giveUp(ctx, info, SyncStopped, "manual")
	if err != nil {
		k.Logger.Warn("the log does not say that a sandbox ended; the next turn will", "sandbox", info.ID, "session", info.Labels.Session, "error", err)
	}
	return k.Sandboxes.Terminate(ctx, info.ID, stored)
}

// giveUp takes a last snapshot of a sandbox in which nothing runs, and records in the log that the sandbox ends. sync
// is the reason of the snapshot, reason that of the end. stored reports whether the workspace is in the object store,
// so that it may be removed with the sandbox. epoch is that of the commit, or 0 if according to the log the sandbox has
// ended already or is in use.
func (k *Keeper) giveUp(ctx context.Context, info sandbox.Info, sync, reason string) (stored bool, epoch uint64, err error) {
	l, err := k.Sessions.Load(ctx, info.Labels.Tenant, info.Labels.Session, eventlog.LeaderOnly)
	if err != nil || l.Run.Sandbox.ID != info.ID || !l.Run.IsIdle() {
		return false, 0, err
	}
	var facts []events.Payload
	if !k.Sandboxes.KeepsWorkspaces() {
		synced, err := k.LastSnapshot(ctx, l, sync)
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

// sweepKept removes the kept workspaces of deleted sessions.
func (k *Keeper) sweepKept(ctx context.Context, p sandbox.WorkspaceKeeper) error {
	kept, err := p.Kept(ctx)
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
		if err := p.Wipe(ctx, labels); err != nil {
			return err
		}
	}
	return nil
}
