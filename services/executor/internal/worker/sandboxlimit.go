package worker

import (
	"context"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/handling"
	"github.com/spoolhq/spool/services/executor/internal/references"
)

const (
	// codeTenantSandboxes is of an execution for which there was no room among its tenant's sandboxes.
	codeTenantSandboxes = "TENANT_SANDBOXES"
	// endedForRoom is why a sandbox ended that gave way to another one of its tenant.
	endedForRoom = "tenant_limit"
	// roomWithin bounds how long an execution waits for room.
	roomWithin = time.Minute
	// roomEvery is the pause before room is looked for again.
	roomEvery = 500 * time.Millisecond
)

// tenantSandboxes returns how many sandboxes a tenant may have on this engine; 0 is no limit.
func (w *Worker) tenantSandboxes(tenant string) int {
	if w.d.Budgets != nil {
		if own := w.d.Budgets.Limits(tenant).Sandboxes; own > 0 {
			return int(own)
		}
	}
	return w.cfg.TenantSandboxes
}

// room makes room for the session's sandbox among those of its tenant on this engine: past the limit the sandbox that has
// been idle for the longest ends. The caller must call made once the sandbox exists, or is not to be.
func (t *turn) room(ctx context.Context) (made func(), err error) {
	most := t.w.tenantSandboxes(t.l.Tenant)
	if most == 0 {
		return func() {}, nil
	}
	tenant, id := t.l.Tenant, t.l.ID
	err = t.whileWanted(ctx, func(ctx context.Context) error {
		late := time.NewTimer(roomWithin)
		defer late.Stop()
		for {
			if ok, err := t.w.reserveSandbox(ctx, tenant, id, most); ok || err != nil {
				return err
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-late.C:
				return &references.Error{Code: codeTenantSandboxes, Err: fmt.Errorf("the tenant has %d sandboxes on this engine, the most that it may, and none of them could be ended in %s", most, roomWithin)}
			case <-time.After(roomEvery):
			}
		}
	})
	return func() { t.w.sandboxMade(tenant, id) }, err
}

// sandboxMade ends what reserveSandbox began.
func (w *Worker) sandboxMade(tenant, id string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if delete(w.making[tenant], id); len(w.making[tenant]) == 0 {
		delete(w.making, tenant)
	}
}

// reserveSandbox reports whether a session may have a sandbox beside the others of its tenant. If not, it ends one that is idle.
func (w *Worker) reserveSandbox(ctx context.Context, tenant, id string, most int) (ok bool, err error) {
	list, err := w.d.Sandbox.List(ctx)
	if err != nil {
		return false, err
	}
	var others []sandbox.Info
	w.mu.Lock()
	making := w.making[tenant]
	for _, info := range list {
		if info.Labels.Tenant == tenant && info.Labels.Session != "" && info.Labels.Session != id && !making[info.Labels.Session] {
			others = append(others, info)
		}
	}
	if ok = len(others)+len(making) < most; ok {
		if making == nil {
			making = map[string]bool{}
			w.making[tenant] = making
		}
		making[id] = true
	}
	w.mu.Unlock()
	if ok {
		return true, nil
	}
	return false, w.endIdlest(ctx, others)
}

// endIdlest ends the one of these sandboxes that has been idle for the longest, if one is.
func (w *Worker) endIdlest(ctx context.Context, list []sandbox.Info) error {
	var idlest sandbox.Info
	var since time.Time
	for _, info := range list {
		l, err := w.d.Sessions.Load(ctx, info.Labels.Tenant, info.Labels.Session, eventlog.Leader)
		if err != nil {
			return err
		}
		idle := l.Run.Over() && l.Due() == run.Nothing && l.Run.Sandbox.ID == info.ID
		if idle && (idlest.ID == "" || l.Run.EndedAt.Before(since)) {
			idlest, since = info, l.Run.EndedAt
		}
	}
	if idlest.ID == "" {
		return nil
	}
	return w.endIdle(ctx, idlest, endedForRoom)
}

// endIdle ends a sandbox in which nothing runs, with a snapshot first, unless it is in use by now.
func (w *Worker) endIdle(ctx context.Context, info sandbox.Info, reason string) error {
	// While it ends, jobs of its session are given back.
	b, _ := w.handling.Begin(info.Labels.Session, handling.Job{}, func() bool { return false })
	if b == nil {
		return nil
	}
	defer w.handling.Abandon(info.Labels.Session, b)
	l, err := w.d.Sessions.Load(ctx, info.Labels.Tenant, info.Labels.Session, eventlog.Leader)
	if err != nil {
		return err
	}
	if err := w.mayUse(ctx, l); err != nil {
		return nil // another executor works on it
	}
	stored, epoch, err := w.giveUp(ctx, info, reason, reason)
	if err != nil || epoch == 0 {
		w.d.Logger.Debug("a sandbox that was idle is in use", "sandbox", info.ID, "session", info.Labels.Session, "error", err)
		return nil
	}
	w.agents.Shutdown(ctx, info.Labels.Session, epoch)
	w.d.Logger.Info("an idle sandbox ends", "reason", reason, "sandbox", info.ID, "session", info.Labels.Session, "tenant", info.Labels.Tenant)
	return w.sandboxes.Terminate(ctx, info.ID, stored)
}
