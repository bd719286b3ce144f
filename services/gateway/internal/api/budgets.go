package api

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/commands"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// SetBudget replaces a tenant's budget for a period. Like RemoveBudget, it returns when the services that enforce the budget have received it.
func (s *Server) SetBudget(ctx context.Context, r *spoolv1.SetBudgetRequest) (*spoolv1.SetBudgetResponse, error) {
	limit, err := parseBudget("budget", r.GetBudget())
	if err != nil {
		return nil, err
	}
	if limit == (events.Budget{}) {
		return nil, problem.Invalid("budget", "the budget has no limit: set turns, tokens, costUsd or timeMs, or remove the budget")
	}
	period := events.Period(r.GetPeriod())
	tenant, position, err := s.changeBudget(ctx, r.GetTenant(), period, limit, command.TypeSetBudget, command.SetBudget{Period: period, Budget: limit})
	return &spoolv1.SetBudgetResponse{Tenant: tenant, Period: string(period), Position: position}, err
}

// RemoveBudget removes a tenant's budget for a period.
func (s *Server) RemoveBudget(ctx context.Context, r *spoolv1.RemoveBudgetRequest) (*spoolv1.RemoveBudgetResponse, error) {
	period := events.Period(r.GetPeriod())
	tenant, position, err := s.changeBudget(ctx, r.GetTenant(), period, events.Budget{}, command.TypeRemoveBudget, command.RemoveBudget{Period: period})
	return &spoolv1.RemoveBudgetResponse{Tenant: tenant, Period: string(period), Position: position}, err
}

// enforcementTimeout bounds the wait for the services that enforce a budget or limits to receive a change.
const enforcementTimeout = 5 * time.Second

// changeBudget sends a command that changes a tenant's budget to limit, and blocks until the services that enforce
// budgets have received it. It returns the tenant and the position of the change in the log. Only the root key may
// change a budget, because a tenant must not raise its own. The problem READ_MODEL_BEHIND means that the change is in
// the log, but is not in effect everywhere yet.
func (s *Server) changeBudget(ctx context.Context, tenant string, period events.Period, limit events.Budget, t command.Type, body any) (owner, position string, err error) {
	p, err := auth.From(ctx)
	if err != nil {
		return "", "", err
	}
	if owner, err = keyTenant(p, tenant); err != nil {
		return "", "", err
	}
	if !p.Admin {
		return "", "", problem.New(problem.Forbidden, "", "budgets of tenants are set with the root key")
	}
	if err := checkBudgetPeriod(period); err != nil {
		return "", "", err
	}
	about := events.BudgetSubject(owner, period).ID
	a, err := s.Send.Send(ctx, commands.Request{Type: t, Principal: p, Tenant: owner, About: about, Body: body})
	if err != nil {
		return "", "", err
	}
	awaitCtx, cancel := context.WithTimeout(ctx, enforcementTimeout)
	defer cancel()
	if err := errors.Join(s.Reads.AwaitMinPosition(ctx, about, a.Position), s.AwaitBudget(awaitCtx, owner, period, limit)); err != nil {
		return "", "", problem.New(problem.ReadModelBehind, "", "the change is in the log, but services may use the former budget for a moment, and lists show it until the projector has caught up; list the budgets to see when").WithCause(err)
	}
	return owner, a.Position, nil
}

// checkBudgetPeriod returns a problem unless p is a period for which a budget can be set.
func checkBudgetPeriod(p events.Period) error {
	if events.CheckPeriod("period", p) != nil {
		return problem.Invalid("period", "%.64q is not day, month or total", p)
	}
	return nil
}

// ListBudgets lists a tenant's budgets and the usage of each.
func (s *Server) ListBudgets(ctx context.Context, r *spoolv1.ListBudgetsRequest) (*spoolv1.ListBudgetsResponse, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	tenant, err := keyTenant(p, r.GetTenant())
	if err != nil {
		return nil, err
	}
	list, err := s.Reads.Budgets(ctx, tenant, s.Now())
	return &spoolv1.ListBudgetsResponse{Budgets: list}, err
}

// parseBudget converts a budget of a request to one of the log; nil means no budget.
func parseBudget(field string, b *spoolv1.Budget) (events.Budget, error) {
	out := events.Budget{Turns: b.GetTurns(), CostUSD: b.GetCostUsd()}
	if err := convertWholeNumbers(field, []wholeNumberField{{"tokens", b.GetTokens(), &out.Tokens}, {"timeMs", b.GetTimeMs(), &out.TimeMs}}); err != nil {
		return out, err
	}
	return out, commandProblem(command.CheckBudget(field, out))
}

// wholeNumberField is a request field that must be a whole number.
type wholeNumberField struct {
	name string
	from float64
	to   *uint64
}

// convertWholeNumbers converts request fields that must be whole numbers. field is the name of the message that
// contains them, for the error about one that is no whole number.
func convertWholeNumbers(field string, list []wholeNumberField) error {
	for _, f := range list {
		const most = 1 << 53 // the largest whole number that a JSON number holds exactly
		if f.from < 0 || f.from > most || f.from != math.Trunc(f.from) {
			return problem.Invalid(field+"."+f.name, "%v is not a whole number from 0 to %d", f.from, int64(most))
		}
		*f.to = uint64(f.from)
	}
	return nil
}
