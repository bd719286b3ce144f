package provision

import (
	"context"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/idle"
	"github.com/spoolhq/spool/services/executor/internal/references"
)

const (
	// codeTenantSandboxes is the code of an execution that failed because its tenant has the maximum number of
	// sandboxes and all are in use.
	codeTenantSandboxes = "TENANT_SANDBOXES"
	// sandboxRoomTimeout is the maximum time for which an execution waits until its tenant may have another sandbox.
	sandboxRoomTimeout = time.Minute
	// roomPause is the interval at which an execution checks whether its tenant may have another sandbox.
	roomPause = 500 * time.Millisecond
)

// reserveSandbox reserves one of the sandboxes that the tenant may have on this engine. If the tenant has as many as it may have, its sandbox
// that has been idle for the longest is terminated. If none becomes free within roomTimeout, the error is a *references.Error, which ends
// the execution. Without an error the caller must call unreserve once the sandbox exists, or is not created after all.
func (p *preparation) reserveSandbox(ctx context.Context) (unreserve func(), err error) {
	most := p.MaxSandboxes(p.Session.Tenant)
	if most == 0 {
		return func() {}, nil
	}
	tenant, id := p.Session.Tenant, p.Session.ID
	err = p.unlessCancelled(ctx, func(ctx context.Context) error {
		late := time.NewTimer(sandboxRoomTimeout)
		defer late.Stop()
		for {
			if ok, err := p.Idle.Reserve(ctx, tenant, id, most); ok || err != nil {
				return err
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-late.C:
				return &references.Error{Code: codeTenantSandboxes, Err: fmt.Errorf("the tenant has %d sandboxes on this engine, which is its limit, and none of them could be ended in %s", most, sandboxRoomTimeout)}
			case <-time.After(roomPause):
			}
		}
	}, nil, nil)
	unreserve = func() { p.Idle.Unreserve(tenant, id) }
	if err != nil {
		unreserve() // the room may have been reserved when a control ended the wait
		return nil, err
	}
	return unreserve, nil
}

// retireSandbox terminates the session's sandbox after a last snapshot if it is older than the session's limit or near the end of its life at
// the provider. It does nothing if an execution may run in it. The caller creates another sandbox.
func (p *preparation) retireSandbox(ctx context.Context) error {
	sb, limit := p.Session.Run.Sandbox, p.Session.Life.Options.SandboxMaxAgeMs
	old := limit > 0 && !sb.ReadyAt.IsZero() && p.Now().Sub(sb.ReadyAt) > time.Duration(limit)*time.Millisecond || p.Idle.NearsEnd(sb)
	// An execution that was taken over may run in it.
	if !old || p.Session.Run.WasTakenOver() || sb.Engine != p.Engine {
		return nil
	}
	var synced *events.WorkspaceSynced
	l := p.Session
	err := p.unlessCancelled(ctx, func(ctx context.Context) (err error) {
		synced, err = p.Idle.LastSnapshot(ctx, l, idle.SyncMaxAge)
		return err
	}, nil, nil)
	if err != nil {
		return err
	}
	var facts []events.Payload
	if synced != nil {
		facts = append(facts, *synced)
	}
	if err := p.AppendFacts(ctx, append(facts, events.SandboxTerminated{SandboxID: sb.ID, Reason: idle.SyncMaxAge, Kept: synced == nil})...); err != nil {
		return err
	}
	p.Agents.Shutdown(ctx, p.Session.ID, p.Epoch)
	if err := p.Sandboxes.Terminate(ctx, sb.ID, synced != nil && !p.Sandboxes.KeepsWorkspaces()); err != nil {
		p.Log.Error("a sandbox was retired but could not be ended; the sweep will try again", "sandbox", sb.ID, "error", err)
	}
	return nil
}
