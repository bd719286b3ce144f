package gateway_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway"
)

// setBudget writes the row of a budget and publishes it, like the session service and the projector.
func (w *world) setBudget(tenant string, b command.SetBudget) {
	w.t.Helper()
	_, err := w.pool.Exec(context.Background(), `INSERT INTO tenant_budgets (tenant, period, grp, turns, tokens, cost_usd, time_ms, set_at, removed)
		VALUES ($1, $2, 0, $3, $4, $5, $6, now(), false) ON CONFLICT (tenant, period) DO UPDATE SET turns = $3, tokens = $4, cost_usd = $5, time_ms = $6`,
		tenant, b.Period, b.Budget.Turns, b.Budget.Tokens, b.Budget.CostUSD, b.Budget.TimeMs)
	if err != nil {
		w.t.Error(err)
	}
	w.publishBudgets(tenant, budget.Budget{Period: b.Period, Limit: b.Budget})
}

// publishBudgets publishes a tenant's budgets to the services.
func (w *world) publishBudgets(tenant string, list ...budget.Budget) {
	w.t.Helper()
	w.publishTenant(tenant, budget.Tenant{Budgets: list})
}

// publishTenant publishes a tenant's limits and budgets to the services.
func (w *world) publishTenant(tenant string, t budget.Tenant) {
	w.t.Helper()
	if w.budgetsUnpublished.Load() {
		return
	}
	kv, err := w.js.KeyValue(context.Background(), topology.BucketBudgets)
	if err != nil {
		w.t.Error(err)
		return
	}
	body, err := json.Marshal(t)
	if err == nil {
		_, err = kv.Put(context.Background(), tenant, body)
	}
	if err != nil {
		w.t.Error(err)
	}
}

// addUsage adds a row of a tenant's usage on a day.
func (w *world) addUsage(tenant, day, group string, s events.BudgetUsage) {
	w.t.Helper()
	_, err := w.pool.Exec(context.Background(), "INSERT INTO tenant_usage (tenant, id, grp, day, turns, tokens, cost_usd, time_ms) VALUES ($1, $2 || '/' || $3, 0, $2, $4, $5, $6, $7)",
		tenant, day, group, s.Turns, s.Tokens, s.CostUSD, s.TimeMs)
	if err != nil {
		w.t.Error(err)
	}
}

// TestBudgets_AreSetWithTheRootKey tests that only the root key can set budgets, and that a tenant sees its own budgets with their usage.
func TestBudgets_AreSetWithTheRootKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root})
	admin := g.withKey(root)
	acme := g.withKey(admin.do("POST", "/api/keys", `{"name":"a","tenant":"acme"}`).want(t, 201).text("key"))

	admin.do("PUT", "/api/budgets/month", `{"tenant":"acme","budget":{"turns":3,"tokens":1000,"costUsd":0.5,"timeMs":9007199254740992}}`).want(t, 200)
	admin.do("PUT", "/api/budgets/total", `{"tenant":"acme","budget":{"tokens":50}}`).want(t, 200)
	now := time.Now()
	month, until := events.PeriodMonth.Bounds(now)
	w.addUsage("acme", now.UTC().Format(time.DateOnly), "0", events.BudgetUsage{Turns: 1, Tokens: 20, CostUSD: 0.25, TimeMs: 7})
	w.addUsage("acme", now.UTC().Format(time.DateOnly), "5", events.BudgetUsage{Tokens: 10, CostUSD: 0.125})
	w.addUsage("acme", "2020-01-31", "0", events.BudgetUsage{Tokens: 20})
	w.addUsage("other", now.UTC().Format(time.DateOnly), "0", events.BudgetUsage{Tokens: 5000})
	for _, who := range []*served{acme, admin} {
		path := "/api/budgets"
		if who == admin {
			path += "?tenant=acme"
		}
		a := who.get(path).want(t, 200)
		if got := a.text("budgets", "0", "period") + " " + a.text("budgets", "0", "from") + " " + a.text("budgets", "0", "until") + " " + a.text("budgets", "0", "exceeded"); got != "month "+month+" "+until.Format(time.RFC3339)+" " {
			t.Errorf("got %s", got)
		}
		for path, want := range map[string]float64{
			"budgets.0.budget.turns": 3, "budgets.0.budget.tokens": 1000, "budgets.0.budget.costUsd": 0.5, "budgets.0.budget.timeMs": 1 << 53,
			"budgets.0.spent.turns": 1, "budgets.0.spent.tokens": 30, "budgets.0.spent.costUsd": 0.375, "budgets.0.spent.timeMs": 7, "budgets.1.spent.tokens": 50,
		} {
			if got := a.number(strings.Split(path, ".")...); got != want {
				t.Errorf("%s: %v, want %v", path, got, want)
			}
		}
		if got := a.text("budgets", "1", "exceeded"); got != "tenant acme has used 50 tokens, and its budget is 50" {
			t.Errorf("exceeded: %q", got)
		}
	}

	for name, c := range map[string]struct {
		who                *served
		method, path, body string
		status             int
		code, field        string
	}{
		"a tenant's own key":      {acme, "PUT", "/api/budgets/month", `{"budget":{"tokens":5}}`, 403, "FORBIDDEN", ""},
		"a tenant removes":        {acme, "DELETE", "/api/budgets/month", "", 403, "FORBIDDEN", ""},
		"another's":               {acme, "GET", "/api/budgets?tenant=other", "", 403, "FORBIDDEN", "tenant"},
		"no period":               {admin, "PUT", "/api/budgets/week", `{"budget":{"tokens":5}}`, 400, "INVALID_REQUEST", "period"},
		"no bound":                {admin, "PUT", "/api/budgets/day", `{"budget":{}}`, 400, "INVALID_REQUEST", "budget"},
		"half a token":            {admin, "PUT", "/api/budgets/day", `{"budget":{"tokens":0.5}}`, 400, "INVALID_REQUEST", "budget.tokens"},
		"time that is negative":   {admin, "PUT", "/api/budgets/day", `{"budget":{"timeMs":-1}}`, 400, "INVALID_REQUEST", "budget.timeMs"},
		"dollars that are fewer":  {admin, "PUT", "/api/budgets/day", `{"budget":{"costUsd":-0.1}}`, 400, "INVALID_REQUEST", "budget.costUsd"},
		"too many tokens":         {admin, "PUT", "/api/budgets/day", `{"budget":{"tokens":9007199254740994}}`, 400, "INVALID_REQUEST", "budget.tokens"},
		"a tenant of no name":     {admin, "PUT", "/api/budgets/day", `{"tenant":"a b","budget":{"tokens":5}}`, 400, "INVALID_REQUEST", "tenant"},
		"none to remove":          {admin, "DELETE", "/api/budgets/day?tenant=acme", "", 404, "BUDGET_NOT_FOUND", "period"},
		"a session's, of dollars": {acme, "POST", "/api/sessions", `{"sessionOptions":{"budget":{"costUsd":-1}}}`, 400, "INVALID_REQUEST", "sessionOptions.budget.costUsd"},
		"a session's, of tokens":  {acme, "POST", "/api/sessions", `{"sessionOptions":{"budget":{"tokens":1.5}}}`, 400, "INVALID_REQUEST", "sessionOptions.budget.tokens"},
	} {
		t.Run(name, func(t *testing.T) {
			c.who.do(c.method, c.path, c.body).wantProblem(t, c.status, c.code, c.field)
		})
	}
	_, err := spoolv1.NewBudgetsClient(g.conn()).SetBudget(acme.context(t.Context()), &spoolv1.SetBudgetRequest{Period: "day", Budget: &spoolv1.Budget{Turns: 1}})
	wantCode(t, err, codes.PermissionDenied, "FORBIDDEN", "")

	admin.do("DELETE", "/api/budgets/total?tenant=acme", "").want(t, 200)
	// If the services do not receive the budget, the answer says so.
	w.budgetsUnpublished.Store(true)
	admin.do("PUT", "/api/budgets/day", `{"tenant":"acme","budget":{"turns":9}}`).wantProblem(t, 503, "READ_MODEL_BEHIND", "")
	w.budgetsUnpublished.Store(false)
	admin.do("DELETE", "/api/budgets/day?tenant=acme", "").want(t, 200)
	if a := acme.get("/api/budgets").want(t, 200); a.text("budgets", "1", "period") != "" {
		t.Errorf("the budget still exists: %s", a.body)
	}

	// A session's own budget is returned unchanged.
	id := acme.do("POST", "/api/sessions", `{"sessionOptions":{"budget":{"turns":2,"tokens":70,"costUsd":0.5,"timeMs":3}}}`).want(t, 201).text("sessionId")
	if a := acme.get("/api/sessions/"+id).want(t, 200); a.number("sessionOptions", "budget", "tokens") != 70 || a.number("sessionOptions", "budget", "costUsd") != 0.5 || a.number("sessionOptions", "budget", "turns") != 2 || a.number("sessionOptions", "budget", "timeMs") != 3 {
		t.Errorf("the session has %s", a.body)
	}
}
