package metering_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/agents"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
	"github.com/spoolhq/spool/services/executor/internal/link"
	"github.com/spoolhq/spool/services/executor/internal/metering"
	"github.com/spoolhq/spool/services/executor/internal/references"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
	"github.com/spoolhq/spool/services/executor/internal/runlog/runlogtest"
)

// egress records registrations, and has lines.
type egress struct {
	err        error // of Register
	registered []api.Registration
	lines      []metering.JournalLine
	settled    bool // Lines waited for requests that are just ending
	acked      run.JournalPosition
}

func (e *egress) Register(_ context.Context, _ string, r api.Registration) (string, error) {
	if e.err != nil {
		return "", e.err
	}
	e.registered = append(e.registered, r)
	return "PEM", nil
}

func (e *egress) last() api.Registration { return e.registered[len(e.registered)-1] }

func (e *egress) Release(context.Context, string) error                  { return nil }
func (e *egress) OpenModelRequests(context.Context, string) (int, error) { return 3, nil }
func (e *egress) Lines(_ context.Context, _ string, _ run.JournalPosition, settled bool) ([]metering.JournalLine, error) {
	e.settled = settled
	return e.lines, nil
}

func (e *egress) Ack(_ context.Context, _ string, upTo run.JournalPosition) error {
	e.acked = upTo
	return nil
}

// tenants is a source of budgets that knows a single tenant.
type tenants struct {
	tenant budget.Tenant
	err    error
}

func (t *tenants) Get(context.Context, string) (budget.Tenant, error) { return t.tenant, t.err }

// newMeter returns the meter of a claimed execution whose sandbox is ready, and which may use 100 tokens and an MCP server.
func newMeter(t *testing.T, e *egress, b metering.Budgets) (*metering.Meter, *metering.Proxy, *runlog.Execution) {
	t.Helper()
	x := runlogtest.New(t).ClaimExecution()
	if err := x.AppendFacts(t.Context(), events.SandboxReady{SandboxID: "sbx_1", Provider: "fake", Engine: "here", Journal: "jnl_1"}); err != nil {
		t.Fatal(err)
	}
	p := &metering.Proxy{Engine: "here", Now: time.Now, Logger: slog.New(slog.DiscardHandler)}
	if e != nil {
		p.Egress = e
	}
	m := metering.New(p, b, x)
	m.SetResolved(&references.Resolved{
		ExecutionResolved: events.ExecutionResolved{Egress: []events.AllowedHost{{Entry: "example.com"}}},
		Definition: events.AgentSpec{
			Limits:     events.Limits{Tokens: 100},
			MCPServers: []events.MCPServer{{Name: "docs", Type: events.MCPTypeHTTP, URL: "https://docs.test", Headers: map[string]string{"Authorization": "Bearer s3cret"}}, {Name: "local", Type: events.MCPTypeDocker}},
		},
		Secrets: []string{"s3cret", "other"},
	})
	return m, p, x
}

// TestMeter_Register: the proxy learns the execution with its hosts, its budget, and its MCP servers with their secrets.
func TestMeter_Register(t *testing.T) {
	t.Parallel()
	e := &egress{}
	m, _, x := newMeter(t, e, nil)
	x.Session.Life.Options.Budget = events.Budget{CostUSD: 2}
	if err := m.Register(t.Context(), "sbx_1"); err != nil {
		t.Fatal(err)
	}
	r := e.last()
	if r.Execution != x.ID || r.Epoch != x.Epoch || !slices.Equal(r.Allow, []string{"example.com"}) || r.Token != "" || m.AuthorityCertificate() != "PEM" {
		t.Errorf("registration %+v, authority %q", r, m.AuthorityCertificate())
	}
	if len(r.Upstreams) != 1 || r.Upstreams[0].Name != "docs" || !slices.Equal(r.Upstreams[0].Secrets, []string{"s3cret"}) {
		t.Errorf("upstreams %+v", r.Upstreams)
	}
	if len(r.Budgets) != 2 || r.Budgets[0].Account != x.ID || r.Budgets[0].Limit.Tokens != 100 || r.Budgets[1].Limit.CostUSD != 2 {
		t.Errorf("budgets %+v", r.Budgets)
	}
}

// TestMeter_RegisterErrors: the turn acts on a lost sandbox, a later claim and an unavailable proxy in different ways.
func TestMeter_RegisterErrors(t *testing.T) {
	t.Parallel()
	away := &sandbox.Error{Code: sandbox.CodeEgressUnavailable, Message: "away"}
	for name, c := range map[string]struct{ err, want error }{
		"unknown sandbox":   {metering.ErrUnknownSandbox, agents.ErrLost},
		"later claim":       {link.ErrFenced, run.ErrFenced},
		"unavailable proxy": {away, away},
	} {
		m, _, _ := newMeter(t, &egress{err: c.err}, nil)
		if err := m.Register(t.Context(), "sbx_1"); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	m, _, _ := newMeter(t, &egress{}, &tenants{err: errors.New("not known yet")})
	if err := m.Register(t.Context(), "sbx_1"); err == nil {
		t.Error("registered without the tenant's budgets")
	}
}

// TestMeter_Unregister: the execution is taken off the proxy once, and only at the proxy of its engine.
func TestMeter_Unregister(t *testing.T) {
	t.Parallel()
	e := &egress{}
	m, _, x := newMeter(t, e, nil)
	if err := m.Register(t.Context(), "sbx_1"); err != nil {
		t.Fatal(err)
	}
	m.Unregister(t.Context())
	m.Unregister(t.Context())
	if len(e.registered) != 2 || e.last().Execution != "" || e.last().Session != x.Session.ID || len(e.last().Allow) != 1 {
		t.Errorf("registrations %+v", e.registered)
	}
	x.Session.Run.Sandbox.Engine = "there"
	other := &egress{}
	m = metering.New(&metering.Proxy{Egress: other, Engine: "here", Now: time.Now}, nil, x)
	if m.Unregister(t.Context()); len(other.registered) > 0 {
		t.Errorf("registrations for a sandbox of another engine: %+v", other.registered)
	}
}

// TestMeter_Exceeded: stored and unstored usage counts, and so do the proxy's refusals for this execution.
func TestMeter_Exceeded(t *testing.T) {
	t.Parallel()
	m, _, x := newMeter(t, &egress{}, nil)
	refused := func(execution string) events.Event {
		return events.Event{ExecutionID: execution, Data: events.EgressDenied{Code: "BUDGET_EXHAUSTED", Message: "no dollars are left"}}
	}
	called := func(tokens uint32) []events.Event {
		return m.EventsOfLines([]metering.JournalLine{{Execution: x.ID, Time: time.Now(), Data: events.ModelCalled{Journal: "jnl_proxy", Line: 1, Status: 200, Usage: events.Usage{InputTokens: tokens}}}})
	}
	for name, c := range map[string]struct {
		unstored []events.Event
		want     string
	}{
		"nothing":                     {nil, ""},
		"refusal":                     {[]events.Event{refused(x.ID)}, "no dollars are left"},
		"refusal of an earlier one":   {[]events.Event{refused("exe_before")}, ""},
		"fewer tokens than the limit": {called(99), ""},
		"as many tokens as the limit": {called(100), "the execution"},
	} {
		code, message := m.ExceededLimit(c.unstored)
		if (code == budget.CodeExceeded) != (c.want != "") || !strings.Contains(message, c.want) {
			t.Errorf("%s: %s %q", name, code, message)
		}
	}
}

// TestMeter_Changed: the proxy gets the tenant's budgets again when they have changed, and those last read apply after an error.
func TestMeter_Changed(t *testing.T) {
	t.Parallel()
	from, until := events.PeriodMonth.Bounds(time.Now())
	tenantBudget := func(tokens uint64) budget.Tenant {
		return budget.Tenant{Budgets: []budget.Budget{{Period: events.PeriodMonth, From: from, Until: until, Limit: events.Budget{Tokens: tokens}}}}
	}
	e, b := &egress{}, &tenants{tenant: tenantBudget(1000)}
	m, _, _ := newMeter(t, e, b)
	if err := m.Register(t.Context(), "sbx_1"); err != nil {
		t.Fatal(err)
	}
	if m.PendingChange("sbx_1") != nil {
		t.Error("a change directly after the registration")
	}
	b.tenant, b.err = tenantBudget(500), errors.New("away")
	if err := m.UpdateLimits(t.Context(), events.Budget{}); err == nil || m.PendingChange("sbx_1") != nil {
		t.Errorf("after a failed read: %v", err)
	}
	b.err = nil
	if err := m.UpdateLimits(t.Context(), events.Budget{}); err != nil {
		t.Fatal(err)
	}
	change := m.PendingChange("sbx_1")
	if change == nil {
		t.Fatal("no change")
	}
	if err := m.SendChange(t.Context(), change); err != nil {
		t.Fatal(err)
	}
	if list := e.last().Budgets; len(list) != 2 || list[1].Limit.Tokens != 500 {
		t.Errorf("budgets %+v", list)
	}
	if m.SetRegistered(change); m.PendingChange("sbx_1") != nil {
		t.Error("the change is registered, and still due")
	}
}

// TestMeter_Final: the execution is unregistered before the last lines are read, and only lines that apply are returned.
func TestMeter_Final(t *testing.T) {
	t.Parallel()
	e := &egress{lines: []metering.JournalLine{{Time: time.Now().Add(time.Hour), Data: events.ModelCalled{Journal: "jnl_proxy", Line: 1}}}}
	m, _, x := newMeter(t, e, nil)
	e.lines[0].Execution = x.ID
	list := m.FinishExecution(t.Context())
	if len(list) != 1 || list[0].ExecutionID != x.ID || list[0].Time.After(time.Now()) || !e.settled || len(e.registered) != 1 || e.last().Execution != "" {
		t.Errorf("events %+v, registrations %+v, settled %v", list, e.registered, e.settled)
	}
	if err := x.AppendEvents(t.Context(), list); err != nil {
		t.Fatal(err)
	}
	if list := m.FinishExecution(t.Context()); len(list) != 0 {
		t.Errorf("a line that the log has: %+v", list)
	}
}

// TestMeter_Forgot: a refused MCP server that is registered was forgotten; any other refusal is the agent's.
func TestMeter_Forgot(t *testing.T) {
	t.Parallel()
	m, _, _ := newMeter(t, &egress{}, nil)
	for host, want := range map[string]bool{"mcp/docs": true, "mcp/local": false, "mcp/unknown": false} {
		if got := m.HasForgottenServers([]metering.JournalLine{{Data: events.EgressDenied{Code: "UNKNOWN_SERVER", Host: host}}}); got != want {
			t.Errorf("%s: %v", host, got)
		}
	}
	if m.HasForgottenServers([]metering.JournalLine{{Data: events.EgressDenied{Code: "NOT_ALLOWED", Host: "mcp/docs"}}}) {
		t.Error("a host that is not allowed")
	}
}

// TestProxy_LastEvents: lines of an execution that has ended belong to the session, and are not older than its last claim.
func TestProxy_LastEvents(t *testing.T) {
	t.Parallel()
	e := &egress{lines: []metering.JournalLine{{Execution: "exe_1", Time: time.Now().Add(-time.Hour), Data: events.EgressDenied{Journal: "jnl_proxy", Line: 4}}, {Data: events.Error{}}}}
	_, p, x := newMeter(t, e, nil)
	list := p.UnstoredEvents(t.Context(), x.Session.Run)
	if len(list) != 1 || list[0].ExecutionID != "" || !list[0].Time.Equal(x.Session.Run.ClaimedAt) || list[0].ID != events.DeriveID(events.KindEvent, "jnl_proxy", "4") {
		t.Errorf("events %+v, claimed at %s", list, x.Session.Run.ClaimedAt)
	}
	p.Acknowledge(t.Context(), run.State{Egress: run.JournalPosition{Journal: "jnl_proxy", N: 4}})
	if e.acked.N != 4 {
		t.Errorf("acknowledged %+v", e.acked)
	}
}

// TestWithoutProxy: an engine without a proxy registers nothing and has no lines.
func TestWithoutProxy(t *testing.T) {
	t.Parallel()
	m, p, x := newMeter(t, nil, nil)
	m.Unregister(t.Context())
	n, err := p.OpenModelRequests(t.Context(), "sbx_1")
	lines, lerr := p.UnstoredLines(t.Context(), x.Session.Run)
	if err := errors.Join(err, lerr, m.Register(t.Context(), "sbx_1")); err != nil || n != 0 || len(lines) > 0 || m.PendingChange("sbx_1") != nil || len(m.FinishExecution(t.Context())) > 0 || len(p.UnstoredEvents(t.Context(), x.Session.Run)) > 0 {
		t.Errorf("%d open, lines %v, %v", n, lines, err)
	}
}
