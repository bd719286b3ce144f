package api

import (
	"context"
	"errors"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/commands"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// SetLimits replaces the limits that are set for a tenant. Like RemoveLimits, it returns when the services that
// enforce the limits have received them.
func (s *Server) SetLimits(ctx context.Context, r *spoolv1.SetLimitsRequest) (*spoolv1.SetLimitsResponse, error) {
	l, err := tenantLimits("limits", r.GetLimits())
	if err != nil {
		return nil, err
	}
	tenant, position, err := s.changeLimits(ctx, r.GetTenant(), l, command.TypeSetLimits, command.SetLimits{Limits: l})
	return &spoolv1.SetLimitsResponse{Tenant: tenant, Position: position}, err
}

// RemoveLimits removes the limits that are set for a tenant, so that the default limits apply to the tenant.
func (s *Server) RemoveLimits(ctx context.Context, r *spoolv1.RemoveLimitsRequest) (*spoolv1.RemoveLimitsResponse, error) {
	tenant, position, err := s.changeLimits(ctx, r.GetTenant(), events.TenantLimits{}, command.TypeRemoveLimits, nil)
	return &spoolv1.RemoveLimitsResponse{Tenant: tenant, Position: position}, err
}

// changeLimits sends a command that changes a tenant's limits to l, and blocks until the services that enforce limits
// have received them. It returns the tenant and the position of the change in the log. Only the root key may change
// limits, because a tenant must not raise its own.
func (s *Server) changeLimits(ctx context.Context, tenant string, l events.TenantLimits, t command.Type, body any) (owner, position string, err error) {
	p, err := auth.From(ctx)
	if err != nil {
		return "", "", err
	}
	if owner, err = keyTenant(p, tenant); err != nil {
		return "", "", err
	}
	if !p.Admin {
		return "", "", problem.New(problem.Forbidden, "", "limits of tenants are set with the root key")
	}
	about := events.LimitsSubject(owner).ID
	a, err := s.Send.Send(ctx, commands.Request{Type: t, Principal: p, Tenant: owner, About: about, Body: body})
	if err != nil {
		return "", "", err
	}
	awaitCtx, cancel := context.WithTimeout(ctx, enforcementTimeout)
	defer cancel()
	if err := errors.Join(s.Reads.AwaitMinPosition(ctx, about, a.Position), s.AwaitLimits(awaitCtx, owner, l)); err != nil {
		return "", "", problem.New(problem.ReadModelBehind, "", "the change is in the log, but services may use the former limits for a moment, and reads show them until the projector has caught up; get the limits to see when").WithCause(err)
	}
	return owner, a.Position, nil
}

// GetLimits returns a tenant's own limits and its present use.
func (s *Server) GetLimits(ctx context.Context, r *spoolv1.GetLimitsRequest) (*spoolv1.GetLimitsResponse, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	tenant, err := keyTenant(p, r.GetTenant())
	if err != nil {
		return nil, err
	}
	own, used, err := s.Reads.Limits(ctx, tenant, s.Now())
	return &spoolv1.GetLimitsResponse{Tenant: tenant, Limits: own, Used: used}, err
}

// tenantLimits converts the limits of a request to those of the log; field is the name of the limits in the request.
func tenantLimits(field string, l *spoolv1.TenantLimits) (events.TenantLimits, error) {
	out := events.TenantLimits{
		Slots: l.GetSlots(), Sandboxes: l.GetSandboxes(), Sessions: l.GetSessions(), Streams: l.GetStreams(),
		RequestsPerSecond: l.GetRequestsPerSecond(), RequestBurst: l.GetRequestBurst(), Keys: l.GetKeys(),
	}
	err := convertWholeNumbers(field, []wholeNumberField{
		{"eventsPerDay", l.GetEventsPerDay(), &out.EventsPerDay},
		{"eventBytesPerDay", l.GetEventBytesPerDay(), &out.EventBytesPerDay},
		{"storageBytes", l.GetStorageBytes(), &out.StorageBytes},
	})
	if err != nil {
		return out, err
	}
	return out, commandProblem(command.CheckTenantLimits(field, out))
}
