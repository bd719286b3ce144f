package holder

import (
	"context"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/sandbox"
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
func (h *Holder) tenantSandboxes(tenant string) int {
	if h.d.Budgets != nil {
		if own := h.d.Budgets.Limits(tenant).Sandboxes; own > 0 {
			return int(own)
		}
	}
	return h.cfg.TenantSandboxes
}

// room makes room for the session's sandbox among those of its tenant on this engine: past the limit the sandbox that has
// been idle for the longest ends. The caller must call made once the sandbox exists, or is not to be.
func (t *turn) room(ctx context.Context) (made func(), err error) {
	most := t.h.tenantSandboxes(t.l.Tenant)
	if most == 0 {
		return func() {}, nil
	}
	tenant, id := t.l.Tenant, t.l.ID
	err = t.whileWanted(ctx, func(ctx context.Context) error {
		late := time.NewTimer(roomWithin)
		defer late.Stop()
		for {
			if ok, err := t.h.reserveSandbox(ctx, tenant, id, most); ok || err != nil {
				return err
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-late.C:
				return &unresolved{codeTenantSandboxes, fmt.Errorf("the tenant has %d sandboxes on this engine, the most that it may, and none of them could be ended in %s", most, roomWithin)}
			case <-time.After(roomEvery):
			}
		}
	})
	return func() { t.h.sandboxMade(tenant, id) }, err
}

// sandboxMade ends what reserveSandbox began.
func (h *Holder) sandboxMade(tenant, id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if delete(h.making[tenant], id); len(h.making[tenant]) == 0 {
		delete(h.making, tenant)
	}
}

// reserveSandbox reports whether a session may have a sandbox beside the others of its tenant. If not, it ends one that is idle.
func (h *Holder) reserveSandbox(ctx context.Context, tenant, id string, most int) (ok bool, err error) {
	list, err := h.d.Sandbox.List(ctx)
	if err != nil {
		return false, err
	}
	var others []sandbox.Info
	h.mu.Lock()
	making := h.making[tenant]
	for _, info := range list {
		if info.Labels.Tenant == tenant && info.Labels.Session != "" && info.Labels.Session != id && !making[info.Labels.Session] {
			others = append(others, info)
		}
	}
	if ok = len(others)+len(making) < most; ok {
		if making == nil {
			making = map[string]bool{}
			h.making[tenant] = making
		}
		making[id] = true
	}
	h.mu.Unlock()
	if ok {
		return true, nil
	}
	return false, h.endIdlest(ctx, others)
}

// endIdlest ends the one of these sandboxes that has been idle for the longest, if one is.
func (h *Holder) endIdlest(ctx context.Context, list []sandbox.Info) error {
	var idlest sandbox.Info
	var since time.Time
	for _, info := range list {
		l, err := h.d.Sessions.Load(ctx, info.Labels.Tenant, info.Labels.Session, eventlog.Leader)
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
	return h.endIdle(ctx, idlest, endedForRoom)
}

// endIdle ends a sandbox in which nothing runs, with a snapshot first, unless it is in use by now.
func (h *Holder) endIdle(ctx context.Context, info sandbox.Info, reason string) error {
	// While it ends, jobs of its session are given back.
	b, _ := h.handling.take(info.Labels.Session, job{}, func() bool { return false })
	if b == nil {
		return nil
	}
	defer h.handling.drop(info.Labels.Session, b)
	l, err := h.d.Sessions.Load(ctx, info.Labels.Tenant, info.Labels.Session, eventlog.Leader)
	if err != nil {
		return err
	}
	if err := h.mayUse(ctx, l); err != nil {
		return nil // another executor works on it
	}
	stored, epoch, err := h.giveUp(ctx, info, reason, reason)
	if err != nil || epoch == 0 {
		h.d.Logger.Debug("a sandbox that was idle is in use", "sandbox", info.ID, "session", info.Labels.Session, "error", err)
		return nil
	}
	h.shutdown(ctx, info.Labels.Session, epoch)
	h.d.Logger.Info("an idle sandbox ends", "reason", reason, "sandbox", info.ID, "session", info.Labels.Session, "tenant", info.Labels.Tenant)
	return h.terminate(ctx, info.ID, stored)
}
