package worker

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

// orphaner is a provider whose workspaces can outlive their sandboxes.
type orphaner interface {
	// Orphans removes the workspaces that no sandbox has had for so long.
	Orphans(ctx context.Context, olderThan time.Duration) (removed int, err error)
}

// orphanAge is how long a workspace waits for a sandbox that takes it over. A
// snapshot of it is in the object store by then.
const orphanAge = 24 * time.Hour

// Sweeps sweeps at once and then regularly until ctx ends.
func (w *Worker) Sweeps(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		if err := w.Sweep(ctx); err != nil && ctx.Err() == nil {
			w.d.Logger.Warn("the sweep could not finish, the next one will go on", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Sweep removes what the log says is over: sandboxes of deleted sessions, those
// that are no longer their session's, and workspaces of deleted sessions. It ends
// idle sandboxes that their provider would end soon.
func (w *Worker) Sweep(ctx context.Context) error {
	list, err := w.d.Sandbox.List(ctx)
	if err != nil {
		return err
	}
	for _, info := range list {
		if info.Labels.Session == "" {
			if err := w.pool.Sweep(ctx, info); err != nil {
				return err
			}
			continue
		}
		// Read after it was listed: the log knows of a sandbox before it exists.
		l, err := w.d.Sessions.Load(ctx, info.Labels.Tenant, info.Labels.Session, eventlog.Leader)
		if err != nil {
			return err
		}
		deleted := l.Life.Status == session.Deleted
		if l.Run.Sandbox.ID == info.ID && !(deleted && l.Run.Over()) {
			w.sweepPresent(ctx, l, info)
			continue
		}
		w.d.Logger.Info("sweep: a sandbox is over", "sandbox", info.ID, "session", l.ID)
		if err := w.sandboxes.Terminate(ctx, info.ID, deleted); err != nil {
			return err
		}
	}
	if o, ok := w.d.Sandbox.(orphaner); ok {
		n, err := o.Orphans(ctx, orphanAge)
		if n > 0 {
			w.d.Logger.Info("sweep: workspaces without a sandbox were removed", "count", n)
		}
		if err != nil {
			return err
		}
	}
	k, ok := w.d.Sandbox.(sandbox.Keeper)
	if !ok {
		return nil
	}
	return w.sweepKept(ctx, k)
}

// sweepPresent looks after a session's present sandbox while nothing runs in it. What fails is tried again by the next sweep.
func (w *Worker) sweepPresent(ctx context.Context, l eventlog.Loaded, info sandbox.Info) {
	var err error
	switch {
	case !l.Run.Over():
	case l.Run.Sandbox.Unstopped:
		if err = w.stopAtRest(ctx, l); err != nil {
			err = fmt.Errorf("stop the agent of execution %s, which has ended: %w", l.Run.Execution, err)
		}
	case w.nearsEnd(l.Run.Sandbox) && l.Due() == run.Nothing:
		if err = w.endIdle(ctx, info, syncMaxAge); err != nil {
			err = fmt.Errorf("end the sandbox before its provider does: %w", err)
		}
	}
	if err != nil && !errors.Is(err, run.ErrFenced) && !errors.Is(err, runlog.ErrChanged) {
		w.d.Logger.Warn("sweep: a sandbox at rest could not be looked after", "sandbox", info.ID, "session", l.ID, "error", err)
	}
}

// stopAtOnce is how many sandboxes are ended at a time.
const stopAtOnce = 8

// StopSandboxes ends every sandbox of the engine, each with a snapshot first, so
// that nothing of it need stay there. An execution that still runs in one finds
// it lost when it is taken up again, and its workspace kept. Close comes before.
func (w *Worker) StopSandboxes(ctx context.Context) error {
	list, err := w.d.Sandbox.List(ctx)
	if err != nil {
		return err
	}
	var group errgroup.Group
	group.SetLimit(stopAtOnce)
	errs := make([]error, len(list))
	for i, info := range list {
		group.Go(func() error {
			errs[i] = w.stopOne(ctx, info)
			return nil
		})
	}
	return errors.Join(append(errs, group.Wait())...)
}

func (w *Worker) stopOne(ctx context.Context, info sandbox.Info) error {
	if info.Labels.Session == "" {
		return w.sandboxes.Terminate(ctx, info.ID, true)
	}
	stored, _, err := w.giveUp(ctx, info, syncStopped, "manual")
	if err != nil {
		w.d.Logger.Warn("the log does not say that a sandbox ended; the next turn will", "sandbox", info.ID, "session", info.Labels.Session, "error", err)
	}
	return w.sandboxes.Terminate(ctx, info.ID, stored)
}

// giveUp tells the log that a sandbox in which nothing runs is ended, and
// whether its workspace is stored, so that it may go with it. The epoch is that of
// the commit, 0 if the log says already that the sandbox is over, or in use.
func (w *Worker) giveUp(ctx context.Context, info sandbox.Info, sync, reason string) (stored bool, epoch uint64, err error) {
	l, err := w.d.Sessions.Load(ctx, info.Labels.Tenant, info.Labels.Session, eventlog.Leader)
	if err != nil || l.Run.Sandbox.ID != info.ID || !l.Run.Over() {
		return false, 0, err
	}
	var facts []events.Payload
	if !w.sandboxes.KeepsWorkspaces() {
		synced, err := w.last(ctx, l, sync)
		if err != nil {
			w.d.Logger.Warn("no snapshot before a sandbox ended: its workspace stays on the engine", "sandbox", info.ID, "session", l.ID, "error", err)
		}
		if synced != nil {
			facts, stored = append(facts, *synced), true
		}
	}
	err = w.runlog.AppendFacts(ctx, l, append(facts, events.SandboxTerminated{SandboxID: info.ID, Reason: reason, Kept: !stored})...)
	return stored && err == nil, l.Run.Epoch + 1, err
}

func (w *Worker) sweepKept(ctx context.Context, k sandbox.Keeper) error {
	kept, err := k.Kept(ctx)
	if err != nil {
		return err
	}
	for _, labels := range kept {
		l, err := w.d.Sessions.Load(ctx, labels.Tenant, labels.Session, eventlog.Leader)
		if err != nil {
			return err
		}
		if l.Life.Status != session.Deleted || l.Run.Sandbox.ID != "" {
			continue
		}
		if err := k.Wipe(ctx, labels); err != nil {
			return err
		}
	}
	return nil
}
