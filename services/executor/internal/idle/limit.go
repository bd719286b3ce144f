package idle

import (
	"context"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// ReasonTenantLimit is the recorded reason for the end of an idle sandbox that was terminated so that its tenant can have
// another sandbox.
const ReasonTenantLimit = "tenant_limit"

// UnreserveSandbox ends the reservation that ReserveSandbox made for the session id, if there is one. It is called when the
// session's sandbox exists, or will not be created.
func (k *Keeper) UnreserveSandbox(tenant, id string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if delete(k.reserved[tenant], id); len(k.reserved[tenant]) == 0 {
		delete(k.reserved, tenant)
	}
}

// ReserveSandbox reserves one of the sandboxes that a tenant may have on this engine for the session id, and reports
// whether one was free. most is the tenant's maximum. If none was free, ReserveSandbox terminates the tenant's sandbox that
// has been idle for the longest. If it returns true, the caller must call UnreserveSandbox.
func (k *Keeper) ReserveSandbox(ctx context.Context, tenant, id string, most int) (ok bool, err error) {
	list, err := k.Provider.List(ctx)
	if err != nil {
		return false, err
	}
	var others []sandbox.Info
	k.mu.Lock()
	reserved := k.reserved[tenant]
	for _, info := range list {
		if info.Labels.Tenant == tenant && info.Labels.Session != "" && info.Labels.Session != id && !reserved[info.Labels.Session] {
			others = append(others, info)
		}
	}
	if ok = len(others)+len(reserved) < most; ok {
		if reserved == nil {
			reserved = map[string]bool{}
			k.reserved[tenant] = reserved
		}
		reserved[id] = true
	}
	k.mu.Unlock()
	if ok {
		return true, nil
	}
	return false, k.endLongestIdle(ctx, others)
}

// endLongestIdle terminates the sandbox in list that has been idle for the longest. It does nothing if none is idle.
func (k *Keeper) endLongestIdle(ctx context.Context, list []sandbox.Info) error {
	var idlest sandbox.Info
	var since time.Time
	for _, info := range list {
		l, err := k.Sessions.Load(ctx, info.Labels.Tenant, info.Labels.Session, eventlog.LeaderOnly)
		if err != nil {
			return err
		}
		idle := l.Run.IsIdle() && l.DueWork() == run.NoWork && l.Run.Sandbox.ID == info.ID
		if idle && (idlest.ID == "" || l.Run.EndedAt.Before(since)) {
			idlest, since = info, l.Run.EndedAt
		}
	}
	if idlest.ID == "" {
		return nil
	}
	return k.endIdleSandbox(ctx, idlest, ReasonTenantLimit)
}

// endIdleSandbox takes a last snapshot of an idle sandbox and terminates it. It does nothing if the sandbox is in use
// again.
func (k *Keeper) endIdleSandbox(ctx context.Context, info sandbox.Info, reason string) error {
	// Until the sandbox has ended, jobs of its session are returned to the queue.
	s, _ := k.Handling.BeginHandling(info.Labels.Session, 0)
	if s == nil {
		return nil
	}
	defer k.Handling.AbandonHandling(info.Labels.Session, s)
	l, err := k.Sessions.Load(ctx, info.Labels.Tenant, info.Labels.Session, eventlog.LeaderOnly)
	if err != nil {
		return err
	}
	if err := k.CheckUnused(ctx, l); err != nil {
		k.Logger.Debug("a sandbox that was idle may be in use", "sandbox", info.ID, "session", info.Labels.Session, "error", err)
		return nil
	}
	stored, epoch, err := k.snapshotAndRecordEnd(ctx, info, reason, reason)
	if err != nil || epoch == 0 {
		k.Logger.Debug("a sandbox that was idle is in use", "sandbox", info.ID, "session", info.Labels.Session, "error", err)
		return nil
	}
	k.Agents.ShutdownRunner(ctx, info.Labels.Session, epoch)
	k.Logger.Info("an idle sandbox ends", "reason", reason, "sandbox", info.ID, "session", info.Labels.Session, "tenant", info.Labels.Tenant)
	return k.Sandboxes.Terminate(ctx, info.ID, stored)
}
