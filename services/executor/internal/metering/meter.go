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

// A Meter makes the egress proxy charge the model usage of one execution to its budgets, and checks the budgets. Only the goroutine of
// the execution's turn uses it, except for SendChange.
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

// New returns the Meter of an execution. b may be nil if tenants have no budgets.
func New(p *Proxy, b Budgets, x *runlog.Execution) *Meter {
	return &Meter{proxy: p, budgets: b, execution: x}
}

// SetResolved sets the resolved references of the execution. Before that, the execution has no budget of its own, and
// no MCP servers.
func (m *Meter) SetResolved(r *references.Resolved) { m.resolved = r }

// AuthorityCertificate returns the certificate, in PEM, with which the sandbox verifies the proxy's certificates; "" if it needs none.
func (m *Meter) AuthorityCertificate() string { return m.authority }

// UpdateLimits reads the budgets and limits of the execution's tenant again, and sets the budget of its session. After an error the
// earlier limits stay in force.
func (m *Meter) UpdateLimits(ctx context.Context, session events.Budget) error {
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
			return budget.CodeExceeded, d.Message
		}
		s = run.Evolve(s, e)
	}
	return m.usage.ExceededLimit(m.chargedExecution(), m.limits, s, m.proxy.Now())
}

// chargedExecution returns the execution with the budget of its agent's definition. The budget limits the turns only if the egress
// proxy, and not the agent, counts model requests.
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

// Register registers the execution's sandbox with the egress proxy, with the present limits. The error wraps agents.ErrLost if the
// proxy does not know the sandbox, and run.ErrFenced if another executor has claimed the session's runs.
func (m *Meter) Register(ctx context.Context, sandbox string) error {
	if m.proxy.Egress == nil {
		return nil
	}
	if err := m.UpdateLimits(ctx, m.execution.Session.Life.Options.Budget); err != nil {
		return err
	}
	authority, err := m.proxy.Egress.Register(ctx, sandbox, m.newRegistration())
	switch {
	case sandboxes.IsUnavailable(err):
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

// Unregister reports the end of the execution to the egress proxy. From then on the proxy refuses model requests from the sandbox,
// whose processes may outlive the turn, because no execution would be charged for them.
func (m *Meter) Unregister(ctx context.Context) {
	sb := m.execution.Session.Run.Sandbox
	if m.proxy.Egress == nil || m.unregistered || sb.ID == "" || sb.Engine != m.proxy.Engine {
		return
	}
	r := m.newRegistration()
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

// newRegistration returns what the execution's sandbox may reach through the egress proxy, and the budgets that it is charged to.
func (m *Meter) newRegistration() api.Registration {
	x := m.execution
	r := api.Registration{
		Tenant: x.Session.Tenant, Session: x.Session.ID, Execution: x.ID, Epoch: x.Epoch, Upstreams: m.mcpServers(),
		Budgets: m.usage.Budgets(m.chargedExecution(), m.limits, x.Session.Run, m.proxy.Now()),
	}
	if m.resolved != nil {
		r.Allow = m.resolved.Allowlist()
	}
	return r
}

// mcpServers returns the MCP servers that the execution's sandbox reaches through the egress proxy.
func (m *Meter) mcpServers() []api.MCPServer {
	if m.resolved == nil {
		return nil
	}
	var out []api.MCPServer
	for _, s := range m.resolved.Definition.MCPServers {
		if s.Type != events.MCPTypeHTTP {
			continue
		}
		u := api.MCPServer{Name: s.Name, URL: s.URL, Headers: s.Headers}
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

// A RegistrationChange is a changed registration of the sandbox that the egress proxy does not have yet.
type RegistrationChange struct {
	sandbox      string
	registration api.Registration
	limits       budgets.Limits
}

// PendingChange returns the registration to send to the egress proxy if a budget or a tenant's usage by other executions has changed
// since the last registration, and nil otherwise.
func (m *Meter) PendingChange(sandbox string) *RegistrationChange {
	if m.proxy.Egress == nil || m.registered.SameBudgets(m.limits) {
		return nil
	}
	return &RegistrationChange{sandbox: sandbox, registration: m.newRegistration(), limits: m.limits}
}

// SendChange sends a RegistrationChange to the egress proxy. Unlike the other methods it may run in another goroutine.
func (m *Meter) SendChange(ctx context.Context, c *RegistrationChange) error {
	_, err := m.proxy.Egress.Register(ctx, c.sandbox, c.registration)
	return err
}

// SetRegistered records that the egress proxy has received a RegistrationChange.
func (m *Meter) SetRegistered(c *RegistrationChange) { m.registered = c.limits }

// EventsOfLines returns lines of the egress proxy's journal as events of the execution.
func (m *Meter) EventsOfLines(lines []JournalLine) []events.Event {
	return m.proxy.eventsOfLines(m.execution.Session.Run, m.execution.ID, lines)
}

// HasForgottenServers reports whether lines of the egress proxy's journal show that the proxy has lost the sandbox's MCP servers in a
// restart: it refused a request for a server that was registered.
func (m *Meter) HasForgottenServers(lines []JournalLine) bool {
	servers := m.mcpServers()
	return slices.ContainsFunc(lines, func(l JournalLine) bool {
		d, ok := l.Data.(events.EgressDenied)
		return ok && d.Code == codeUnknownServer && slices.ContainsFunc(servers, func(u api.MCPServer) bool { return d.Host == "mcp/"+u.Name })
	})
}

// FinishExecution unregisters the execution at the egress proxy, and returns the events that the proxy has recorded, so that the log
// has the usage of the execution before the execution's end.
func (m *Meter) FinishExecution(ctx context.Context) []events.Event {
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
	d, err := run.Decide(s, run.RecordEvents{Epoch: m.execution.Epoch, Events: m.EventsOfLines(lines)})
	if err != nil {
		return nil // fenced, which the end returns too
	}
	return d.Events
}
