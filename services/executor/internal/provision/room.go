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
	// codeTenantSandboxes is the code of an execution that failed because its tenant already has the maximum number of sandboxes, all of which
	// are in use.
	codeTenantSandboxes = "TENANT_SANDBOXES"
	// sandboxRoomTimeout is the maximum time for which an execution waits until its tenant may have another sandbox.
	sandboxRoomTimeout = time.Minute
	// sandboxRoomInterval is the interval at which an execution checks whether its tenant may have another sandbox.
	sandboxRoomInterval = 500 * time.Millisecond
)

// reserveSandbox reserves one of the sandboxes that the tenant may have on this engine. If the tenant has its maximum number,
// reserveSandbox terminates its sandbox that has been idle for the longest, or waits until one ends. After sandboxRoomTimeout the error is
// a *references.Error, which ends the execution. Without an error the caller must call unreserve when the sandbox exists or will not be
// created.
func (p *sandboxPreparation) reserveSandbox(ctx context.Context) (unreserve func(), err error) {
	most := p.MaxSandboxes(p.Session.Tenant)
	if most == 0 {
		return func() {}, nil
	}
	tenant, id, wait := p.Session.Tenant, p.Session.ID, p.NewWait(p.Session)
	err = p.unlessCancelled(ctx, func(ctx context.Context) error {
		defer p.Waits.End(wait.Execution)
		late := time.NewTimer(sandboxRoomTimeout)
		defer late.Stop()
		for {
			if ok, err := p.Idle.ReserveSandbox(ctx, tenant, id, most); ok || err != nil {
				return err
			}
			p.Waits.Begin(wait)
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-late.C:
				return &references.Error{Code: codeTenantSandboxes, Err: fmt.Errorf("the tenant has %d sandboxes on this engine, which is its limit, and none of them could be ended in %s", most, sandboxRoomTimeout)}
			case <-time.After(sandboxRoomInterval):
			}
		}
	}, nil, nil)
	unreserve = func() { p.Idle.UnreserveSandbox(tenant, id) }
	if err != nil {
		unreserve() // the room may have been reserved when a control ended the wait
		return nil, err
	}
	return unreserve, nil
}

// retireSandbox takes a last snapshot of the session's sandbox and terminates it, if the sandbox is older than the session allows or the
// provider will soon end it. It does nothing if an execution may be running in the sandbox. The caller then creates another sandbox.
func (p *sandboxPreparation) retireSandbox(ctx context.Context) error {
	sb, limit := p.Session.Run.Sandbox, p.Session.Life.Options.SandboxMaxAgeMs
	old := limit > 0 && !sb.ReadyAt.IsZero() && p.Now().Sub(sb.ReadyAt) > time.Duration(limit)*time.Millisecond || p.Idle.NearsEndOfLife(sb)
	// An execution that was taken over may run in it.
	if !old || p.Session.Run.WasTakenOver() || sb.Engine != p.Engine {
		return nil
	}
	var synced *events.WorkspaceSynced
	l := p.Session
	err := p.unlessCancelled(ctx, func(ctx context.Context) (err error) {
		synced, err = p.Idle.TakeLastSnapshot(ctx, l, idle.SyncReasonMaxAge)
		return err
	}, nil, nil)
	if err != nil {
		return err
	}
	var facts []events.Payload
	if synced != nil {
		facts = append(facts, *synced)
	}
	if err := p.AppendFacts(ctx, append(facts, events.SandboxTerminated{SandboxID: sb.ID, Reason: idle.SyncReasonMaxAge, Kept: synced == nil})...); err != nil {
		return err
	}
	p.Agents.ShutdownRunner(ctx, p.Session.ID, p.Epoch)
	if err := p.Sandboxes.Terminate(ctx, sb.ID, synced != nil && !p.Sandboxes.KeepsWorkspaces()); err != nil {
		p.Log.Error("a sandbox was retired but could not be ended; the sweep will try again", "sandbox", sb.ID, "error", err)
	}
	return nil
}
