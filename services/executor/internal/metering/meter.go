package metering

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/definition"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/services/executor/internal/agents"
	"github.com/spoolhq/spool/services/executor/internal/budgets"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
	"github.com/spoolhq/spool/services/executor/internal/link"
	"github.com/spoolhq/spool/services/executor/internal/references"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
	"github.com/spoolhq/spool/services/executor/internal/sandboxes"
)

// Budgets reads the budgets of tenants, and their usage.
type Budgets interface {
	// Of returns the budgets and limits of a tenant, and the usage of all its sessions.
	Get(ctx context.Context, tenant string) (budget.Tenant, error)
}

// Codes of the proxy's refusals.
const (
	codeModelRefused  = "BUDGET_EXHAUSTED" // of a model request: a budget is used up
	codeUnknownServer = "UNKNOWN_SERVER"   // of a request for an MCP server that the proxy does not know
)

// A Meter makes the egress proxy charge the usage of one execution to its budgets, and checks the budgets. Only the
// goroutine of the execution's turn uses it, except for Send.
type Meter struct {
	proxy     *Proxy
	budgets   Budgets // nil: no tenant has a budget
	execution *runlog.Execution
	resolved  *references.Resolved // nil until SetResolved

	limits       budgets.Limits // as last read
	registered   budgets.Limits // as last registered at the proxy
	unregistered bool           // the proxy knows that the execution does not run any more
	usage        budgets.Tracker
	authority    string // PEM: the certificate that the proxy returned when the sandbox was last registered
}

// New returns the Meter of an execution. b may be nil.
func New(p *Proxy, b Budgets, x *runlog.Execution) *Meter {
	return &Meter{proxy: p, budgets: b, execution: x}
}

// SetResolved sets the resolved references of the execution. Before that, the execution has no budget of its own, and
// no MCP servers.
func (m *Meter) SetResolved(r *references.Resolved) { m.resolved = r }

// Authority returns the certificate, in PEM, with which the sandbox verifies the proxy's certificates; "" if it needs none.
func (m *Meter) Authority() string { return m.authority }

// Update reads the limits of the execution again. After an error, the limits that were read last stay in force.
func (m *Meter) Update(ctx context.Context, session events.Budget) error {
	l := budgets.Limits{Session: session}
	if m.budgets != nil {
		var err error
		if l.Tenant, err = m.budgets.Get(ctx, m.execution.Session.Tenant); err != nil {
			return err
		}
	}
	m.limits = l
	return nil
}

// ExceededLimit returns the code and the message of the first budget or limit that the usage of the execution, including
// that of unstored events, exhausts. It returns "" if there is none.
func (m *Meter) ExceededLimit(unstored []events.Event) (code, message string) {
	s := m.execution.Session.Run
	for _, e := range unstored {
		if d, ok := e.Data.(events.EgressDenied); ok && d.Code == codeModelRefused && e.ExecutionID == m.execution.ID {
			return budgets.CodeExceeded, d.Message
		}
		s = run.Evolve(s, e)
	}
	return m.usage.ExceededLimit(m.chargedExecution(), m.limits, s, m.proxy.Now())
}

// chargedExecution returns the execution with its own budget. The budget limits turns only if the agent does not count its
// model requests, and the proxy counts them.
func (m *Meter) chargedExecution() budgets.Execution {
	x := m.execution
	e := budgets.Execution{Tenant: x.Session.Tenant, Session: x.Session.ID, ID: x.ID}
	if m.resolved == nil {
		return e
	}
	l := m.resolved.Definition.Limits
	e.Own = events.Budget{Tokens: uint64(l.Tokens), CostUSD: l.BudgetUSD}
	if m.proxy.Egress != nil && !definition.EnforcesTurnLimit(x.Session.Life.Architecture) {
		e.Own.Turns = l.Turns
	}
	return e
}

// Register registers the execution's sandbox at the proxy, with the limits that apply now. The error wraps agents.ErrLost if the proxy
// does not know the sandbox, and run.ErrFenced if another executor has claimed the session's runs.
func (m *Meter) Register(ctx context.Context, sandbox string) error {
	if m.proxy.Egress == nil {
		return nil
	}
	if err := m.Update(ctx, m.execution.Session.Life.Options.Budget); err != nil {
		return err
	}
	authority, err := m.proxy.Egress.Register(ctx, sandbox, m.registration())
	switch {
	case sandboxes.Unavailable(err):
		return err
	case errors.Is(err, ErrUnknownSandbox):
		return fmt.Errorf("%w: %w", agents.ErrLost, err)
	case errors.Is(err, link.ErrFenced):
		return fmt.Errorf("%w: %w", run.ErrFenced, err)
	case err != nil:
		return fmt.Errorf("register %s at the egress proxy: %w", sandbox, err)
	}
	m.authority, m.registered, m.unregistered = authority, m.limits, false
	return nil
}

// Unregister tells the proxy that the execution has ended. From then on the proxy refuses model requests of the
// sandbox, because no execution would be charged for them: processes may outlive the turn.
func (m *Meter) Unregister(ctx context.Context) {
	sb := m.execution.Session.Run.Sandbox
	if m.proxy.Egress == nil || m.unregistered || sb.ID == "" || sb.Engine != m.proxy.Engine {
		return
	}
	r := m.registration()
	r.Execution = ""
	ctx, cancel := context.WithTimeout(ctx, agents.StatusTimeout)
	defer cancel()
	switch _, err := m.proxy.Egress.Register(ctx, sb.ID, r); {
	case err == nil:
		m.unregistered = true
	case errors.Is(err, ErrUnknownSandbox) || errors.Is(err, link.ErrFenced): // it is released, or belongs to another executor
	default:
		m.execution.Log.Warn("the execution could not be unregistered at the egress proxy: its sandbox may call models until the next turn", "sandbox", sb.ID, "error", err)
	}
}

// registration returns the rights that the execution's sandbox has at the proxy.
func (m *Meter) registration() api.Registration {
	x := m.execution
	r := api.Registration{
		Tenant: x.Session.Tenant, Session: x.Session.ID, Execution: x.ID, Epoch: x.Epoch, Upstreams: m.upstreams(),
		Budgets: m.usage.Budgets(m.chargedExecution(), m.limits, x.Session.Run, m.proxy.Now()),
	}
	if m.resolved != nil {
		r.Allow = m.resolved.Allowlist()
	}
	return r
}

// upstreams returns the MCP servers that the proxy reaches for the execution's sandbox.
func (m *Meter) upstreams() []api.Upstream {
	if m.resolved == nil {
		return nil
	}
	var out []api.Upstream
	for _, s := range m.resolved.Definition.MCPServers {
		if s.Type != events.MCPHTTP {
			continue
		}
		u := api.Upstream{Name: s.Name, URL: s.URL, Headers: s.Headers}
		texts := strings.Join(slices.Collect(maps.Values(s.Headers)), "\n") + "\n" + s.URL
		for _, secret := range m.resolved.Secrets {
			if strings.Contains(texts, secret) {
				u.Secrets = append(u.Secrets, secret)
			}
		}
		out = append(out, u)
	}
	return out
}

// A Change is a registration of the sandbox that the egress proxy does not have yet.
type Change struct {
	sandbox      string
	registration api.Registration
	limits       budgets.Limits
}

// Changed returns the registration to send if a budget has changed, or if other executions have used a part of a
// tenant's budget since the last registration. It returns nil if the proxy has the present values.
func (m *Meter) Changed(sandbox string) *Change {
	if m.proxy.Egress == nil || m.registered.SameBudgets(m.limits) {
		return nil
	}
	return &Change{sandbox: sandbox, registration: m.registration(), limits: m.limits}
}

// Send sends a Change to the egress proxy. It may run in another goroutine than the other methods.
func (m *Meter) Send(ctx context.Context, c *Change) error {
	_, err := m.proxy.Egress.Register(ctx, c.sandbox, c.registration)
	return err
}

// SetRegistered records that the egress proxy has received a Change of the budgets.
func (m *Meter) SetRegistered(c *Change) { m.registered = c.limits }

// Events returns lines of the egress proxy's journal as events of the execution.
func (m *Meter) Events(lines []Line) []events.Event {
	return m.proxy.events(m.execution.Session.Run, m.execution.ID, lines)
}

// Forgot reports whether the lines show that the egress proxy has forgotten the MCP servers of the sandbox, because it
// was restarted: it refused a request for one that was registered.
func (m *Meter) Forgot(lines []Line) bool {
	servers := m.upstreams()
	return slices.ContainsFunc(lines, func(l Line) bool {
		d, ok := l.Data.(events.EgressDenied)
		return ok && d.Code == codeUnknownServer && slices.ContainsFunc(servers, func(u api.Upstream) bool { return d.Host == "mcp/"+u.Name })
	})
}

// Final unregisters the execution and returns the events that the proxy has recorded until then, so that the log has
// the usage of the execution before its end.
func (m *Meter) Final(ctx context.Context) []events.Event {
	if m.proxy.Egress == nil {
		return nil
	}
	m.Unregister(ctx)
	ctx, cancel := context.WithTimeout(ctx, agents.StatusTimeout)
	defer cancel()
	s := m.execution.Session.Run
	lines, err := m.proxy.Egress.Lines(ctx, s.Sandbox.ID, s.Egress, true)
	if err != nil {
		m.execution.Log.Warn("the egress proxy's journal could not be read at the end of the turn; the next turn will", "error", err)
	}
	d, err := run.Decide(s, run.Record{Epoch: m.execution.Epoch, Events: m.Events(lines)})
	if err != nil {
		return nil // fenced, which the end returns too
	}
	return d.Events
}
