package idle

import (
	"context"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// ReasonTenantLimit is the reason for the end of an idle sandbox that was ended to make room for another sandbox of
// its tenant.
const ReasonTenantLimit = "tenant_limit"

// Unreserve ends the reservation of a session, if there is one. It is called when the sandbox exists, or will not be
// created.
func (k *Keeper) Unreserve(tenant, id string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if delete(k.reserved[tenant], id); len(k.reserved[tenant]) == 0 {
		delete(k.reserved, tenant)
	}
}

// Reserve reserves room for a session's sandbox, and reports whether there was room: most is the maximum number of
// sandboxes of the tenant on this engine. Without room, Reserve ends the sandbox that has been idle for the longest.
// If it returns true, the caller must call Unreserve.
func (k *Keeper) Reserve(ctx context.Context, tenant, id string, most int) (ok bool, err error) {
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
	return false, k.endIdlest(ctx, others)
}

// endIdlest ends the sandbox that has been idle for the longest, if any of them is idle.
func (k *Keeper) endIdlest(ctx context.Context, list []sandbox.Info) error {
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

// endIdleSandbox ends a sandbox with a snapshot first, unless it is in use by now.
func (k *Keeper) endIdleSandbox(ctx context.Context, info sandbox.Info, reason string) error {
	// Until the sandbox has ended, jobs of its session are returned to the queue.
	s, _ := k.Handling.Begin(info.Labels.Session, 0)
	if s == nil {
		return nil
	}
	defer k.Handling.Abandon(info.Labels.Session, s)
	l, err := k.Sessions.Load(ctx, info.Labels.Tenant, info.Labels.Session, eventlog.LeaderOnly)
	if err != nil {
		return err
	}
	if err := k.CheckUnused(ctx, l); err != nil {
		return nil // another executor works on it
	}
	stored, epoch, err := k.giveUp(ctx, info, reason, reason)
	if err != nil || epoch == 0 {
		k.Logger.Debug("a sandbox that was idle is in use", "sandbox", info.ID, "session", info.Labels.Session, "error", err)
		return nil
	}
	k.Agents.Shutdown(ctx, info.Labels.Session, epoch)
	k.Logger.Info("an idle sandbox ends", "reason", reason, "sandbox", info.ID, "session", info.Labels.Session, "tenant", info.Labels.Tenant)
	return k.Sandboxes.Terminate(ctx, info.ID, stored)
}
