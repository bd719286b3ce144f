package command

import (
	"context"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/events"
)

// handleLimits sets or removes a tenant's limits.
func (h *Handler) handleLimits(ctx context.Context, c command.Command) (command.Answer, error) {
	subject := events.LimitsSubject(c.Tenant)
	if c.Type == command.TypeRemoveLimits {
		notFound := &command.Error{Code: "LIMITS_NOT_FOUND", Field: "tenant", Detail: "the tenant has no limits of its own"}
		return h.appendTenantEvent(ctx, c, subject, events.TenantLimitsRemoved{Tenant: c.Tenant}, notFound)
	}
	var b command.SetLimits
	if err := decodeBody(c, &b); err != nil {
		return command.Answer{}, err
	}
	if err := command.CheckTenantLimits("limits", b.Limits); err != nil {
		return command.Answer{}, err
	}
	return h.appendTenantEvent(ctx, c, subject, events.TenantLimitsSet{Tenant: c.Tenant, Limits: b.Limits}, nil)
}
