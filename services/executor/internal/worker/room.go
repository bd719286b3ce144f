package worker

import (
	"context"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/idle"
	"github.com/spoolhq/spool/services/executor/internal/references"
)

const (
	// codeTenantSandboxes is the code of an execution for which its tenant had no room for a sandbox.
	codeTenantSandboxes = "TENANT_SANDBOXES"
	// roomTimeout bounds how long an execution waits for room.
	roomTimeout = time.Minute
	// roomPause is the pause between two tries to get room.
	roomPause = 500 * time.Millisecond
)

// tenantSandboxes returns how many sandboxes a tenant may have on this engine; 0 is no limit.
func (w *Worker) tenantSandboxes(tenant string) int {
	if w.deps.Budgets != nil {
		if own := w.deps.Budgets.Limits(tenant).Sandboxes; own > 0 {
			return int(own)
		}
	}
	return w.cfg.TenantSandboxes
}

// reserveSandbox reserves room for the session's sandbox among those of its tenant on this engine. If there is none, the sandbox that has been
// idle for the longest ends. The caller must call done once the sandbox exists, or is not created after all.
func (t *turn) reserveSandbox(ctx context.Context) (done func(), err error) {
	most := t.w.tenantSandboxes(t.Session.Tenant)
	if most == 0 {
		return func() {}, nil
	}
	tenant, id := t.Session.Tenant, t.Session.ID
	err = t.unlessCancelled(ctx, func(ctx context.Context) error {
		late := time.NewTimer(roomTimeout)
		defer late.Stop()
		for {
			if ok, err := t.w.idle.Reserve(ctx, tenant, id, most); ok || err != nil {
				return err
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-late.C:
				return &references.Error{Code: codeTenantSandboxes, Err: fmt.Errorf("the tenant has %d sandboxes on this engine, the most that it may, and none of them could be ended in %s", most, roomTimeout)}
			case <-time.After(roomPause):
			}
		}
	})
	return func() { t.w.idle.Unreserve(tenant, id) }, err
}

// retireSandbox ends a sandbox that is too old, between two turns.
func (t *turn) retireSandbox(ctx context.Context) error {
	sb, limit := t.Session.Run.Sandbox, t.Session.Life.Options.SandboxMaxAgeMs
	old := limit > 0 && !sb.ReadyAt.IsZero() && t.w.deps.Now().Sub(sb.ReadyAt) > time.Duration(limit)*time.Millisecond || t.w.idle.NearsEnd(sb)
	// An execution that was taken over may run in it.
	if !old || t.Session.Run.TakenOver() || sb.Engine != t.w.cfg.Engine {
		return nil
	}
	var synced *events.WorkspaceSynced
	l := t.Session
	err := t.unlessCancelled(ctx, func(ctx context.Context) (err error) {
		synced, err = t.w.idle.LastSnapshot(ctx, l, idle.SyncMaxAge)
		return err
	})
	if err != nil {
		return err
	}
	var facts []events.Payload
	if synced != nil {
		facts = append(facts, *synced)
	}
	if err := t.AppendFacts(ctx, append(facts, events.SandboxTerminated{SandboxID: sb.ID, Reason: idle.SyncMaxAge, Kept: synced == nil})...); err != nil {
		return err
	}
	t.w.agents.Shutdown(ctx, t.Session.ID, t.Epoch)
	if err := t.w.sandboxes.Terminate(ctx, sb.ID, synced != nil && !t.w.sandboxes.KeepsWorkspaces()); err != nil {
		t.Log.Error("a sandbox was retired but could not be ended; the sweep will try again", "sandbox", sb.ID, "error", err)
	}
	return nil
}
