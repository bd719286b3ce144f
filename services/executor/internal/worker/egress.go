package worker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/agents"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
	"github.com/spoolhq/spool/services/executor/internal/link"
	"github.com/spoolhq/spool/services/executor/internal/sandboxes"
)

// Egress registers sandboxes at the egress proxy and reads its journal.
type Egress interface {
	// Register registers a sandbox, or replaces its registration; an empty token keeps the registered one. It returns
	// the certificate, in PEM, that verifies the proxy's certificates of the hosts with methods in r.Allow, "" if there
	// are none. It returns ErrUnknownSandbox for an unknown sandbox without a token, and link.ErrFenced for a low epoch.
	Register(ctx context.Context, sandbox string, r api.Registration) (authority string, err error)
	// Release ends a registration. An unknown sandbox is no error.
	Release(ctx context.Context, sandbox string) error
	// Open returns how many model requests are open.
	Open(ctx context.Context, sandbox string) (int, error)
	// Lines returns the lines of the proxy's journal about a sandbox after a line. With settled, Lines waits for those of model requests that are
	// just ending.
	Lines(ctx context.Context, sandbox string, after run.Line, settled bool) ([]EgressLine, error)
	// Ack allows the proxy to drop lines that are in the log.
	Ack(ctx context.Context, sandbox string, upTo run.Line) error
}

// ErrUnknownSandbox is returned for a sandbox without a token, whose token the proxy does not know.
var ErrUnknownSandbox = errors.New("the egress proxy does not know the sandbox")

// An EgressLine is a line of the proxy's journal.
type EgressLine struct {
	Execution string
	Time      time.Time
	Data      events.Payload // EgressDenied or ModelCalled
}

// register registers the sandbox of the turn at the egress proxy.
func (t *turn) register(ctx context.Context) error {
	if t.w.deps.Egress == nil {
		return nil
	}
	b, err := t.currentLimits(ctx, t.Session.Life)
	if err != nil {
		return err
	}
	t.limits = b
	err = t.w.sandboxes.Retry(ctx, t.agent.Sandbox, func() (err error) {
		t.authority, err = t.w.deps.Egress.Register(ctx, t.agent.Sandbox, t.registration())
		return err
	})
	switch {
	case sandboxes.Unavailable(err):
		return &sandboxError{id: t.agent.Sandbox, err: err, remains: true}
	case errors.Is(err, ErrUnknownSandbox):
		return fmt.Errorf("%w: %w", agents.ErrLost, err)
	case errors.Is(err, link.ErrFenced):
		return fmt.Errorf("%w: %w", run.ErrFenced, err)
	case err != nil:
		return fmt.Errorf("register %s at the egress proxy: %w", t.agent.Sandbox, err)
	}
	t.registered, t.unregistered = t.limits, false
	return nil
}

// unregister tells the egress proxy that the execution does not run any more. The proxy refuses model requests from then on: processes that
// outlive the turn could otherwise call models on the account of no execution.
func (t *turn) unregister(ctx context.Context) {
	sb := t.Session.Run.Sandbox
	if t.w.deps.Egress == nil || t.unregistered || sb.ID == "" || sb.Engine != t.w.cfg.Engine {
		return
	}
	r := api.Registration{
		Tenant: t.Session.Tenant, Session: t.Session.ID, Epoch: t.Epoch,
		Upstreams: t.upstreams(), Budgets: t.budgets(),
	}
	if t.resolved != nil {
		r.Allow = t.resolved.Allowlist()
	}
	ctx, cancel := context.WithTimeout(ctx, agents.StatusTimeout)
	defer cancel()
	switch _, err := t.w.deps.Egress.Register(ctx, sb.ID, r); {
	case err == nil:
		t.unregistered = true
	case errors.Is(err, ErrUnknownSandbox) || errors.Is(err, link.ErrFenced): // it is released, or belongs to another executor
	default:
		t.Log.Warn("the egress proxy was not told that the execution has ended: until the next turn its sandbox may call models", "sandbox", sb.ID, "error", err)
	}
}

// newSandboxes registers sandboxes that do not exist yet; it implements sandboxes.Egress.
type newSandboxes struct{ Egress }

func (e newSandboxes) RegisterNew(ctx context.Context, spec sandbox.Spec, allow []string, routes *[]string) error {
	_, err := e.Register(ctx, spec.ID, api.Registration{
		Token: spec.EgressToken, Tenant: spec.Labels.Tenant, Session: spec.Labels.Session, Epoch: spec.Labels.Epoch, Allow: allow, Routes: routes,
	})
	return err
}

// registration returns what the turn's sandbox may do at the egress proxy.
func (t *turn) registration() api.Registration {
	return api.Registration{
		Tenant: t.Session.Tenant, Session: t.Session.ID, Execution: t.ID, Epoch: t.Epoch, Allow: t.resolved.Allowlist(),
		Upstreams: t.upstreams(), Budgets: t.budgets(),
	}
}

// upstreams returns the MCP servers that the proxy reaches for the turn's sandbox.
func (t *turn) upstreams() []api.Upstream {
	if t.resolved == nil || t.w.deps.Egress == nil {
		return nil
	}
	var out []api.Upstream
	for _, m := range t.resolved.Definition.MCPServers {
		if m.Type == events.MCPHTTP {
			u := api.Upstream{Name: m.Name, URL: m.URL, Headers: m.Headers}
			said := strings.Join(slices.Collect(maps.Values(m.Headers)), "\n") + "\n" + m.URL
			for _, s := range t.resolved.Secrets {
				if strings.Contains(said, s) {
					u.Secrets = append(u.Secrets, s)
				}
			}
			out = append(out, u)
		}
	}
	return out
}

// codeUnknownServer is the code of a refused request for an MCP server that the proxy does not know.
const codeUnknownServer = "UNKNOWN_SERVER"

// proxyForgot reports whether the proxy refused an MCP server that was registered: it keeps them in memory only.
func (t *turn) proxyForgot(lines []EgressLine) bool {
	servers := t.upstreams()
	return slices.ContainsFunc(lines, func(l EgressLine) bool {
		d, ok := l.Data.(events.EgressDenied)
		return ok && d.Code == codeUnknownServer && slices.ContainsFunc(servers, func(u api.Upstream) bool { return d.Host == "mcp/"+u.Name })
	})
}

// finalEgressEvents returns what the egress proxy has journaled by the end of a turn, so that the log has the turn's use before its end.
func (f *follower) finalEgressEvents(ctx context.Context) []events.Event {
	if f.w.deps.Egress == nil {
		return nil
	}
	f.maintenance.awaitRegistration()
	f.unregister(ctx)
	ctx, cancel := context.WithTimeout(ctx, agents.StatusTimeout)
	defer cancel()
	lines, err := f.w.deps.Egress.Lines(ctx, f.Session.Run.Sandbox.ID, f.Session.Run.Egress, true)
	if err != nil {
		f.Log.Warn("the egress proxy's journal could not be read at the end of the turn; the next turn will", "error", err)
	}
	d, err := run.Decide(f.Session.Run, run.Record{Epoch: f.Epoch, Events: f.w.egressEvents(f.Session.Run, f.ID, lines)})
	if err != nil {
		return nil // fenced, which the end returns too
	}
	return d.Events
}

// lateEgressEvents returns what the egress proxy has journaled since the last turn, before the sandbox is given up.
func (w *Worker) lateEgressEvents(ctx context.Context, r run.State) []events.Event {
	if w.deps.Egress == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, agents.StatusTimeout)
	defer cancel()
	lines, err := w.deps.Egress.Lines(ctx, r.Sandbox.ID, r.Egress, true)
	if err != nil {
		w.deps.Logger.Warn("the last lines of the egress proxy about a sandbox are lost", "sandbox", r.Sandbox.ID, "error", err)
	}
	return w.egressEvents(r, "", lines)
}

// egressEvents returns lines of the proxy as events. The ids do not depend on the executor. The proxy's clock may be wrong: no event is older than
// the last claim or in the future.
func (w *Worker) egressEvents(r run.State, execution string, lines []EgressLine) []events.Event {
	now := w.deps.Now()
	var out []events.Event
	for _, l := range lines {
		at := l.Time
		if at.Before(r.ClaimedAt) {
			at = r.ClaimedAt
		}
		if at.After(now) {
			at = now
		}
		e := events.Event{Time: at.UTC(), Source: events.FromServer, ConversationID: events.MainConversation, Data: l.Data}
		if l.Execution == execution {
			e.ExecutionID = execution
		}
		switch d := l.Data.(type) {
		case events.EgressDenied:
			e.ID = events.Derive(events.KindEvent, d.Journal, fmt.Sprint(d.Line))
		case events.ModelCalled:
			e.ID = events.Derive(events.KindEvent, d.Journal, fmt.Sprint(d.Line))
		default:
			continue
		}
		out = append(out, e)
	}
	return out
}

// acknowledgeEgress allows the proxy to drop the lines that the log holds. After an error a later call does.
func (w *Worker) acknowledgeEgress(ctx context.Context, r run.State) {
	if w.deps.Egress == nil || r.Egress.Journal == "" {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, agents.StatusTimeout)
	defer cancel()
	if err := w.deps.Egress.Ack(ctx, r.Sandbox.ID, r.Egress); err != nil {
		w.deps.Logger.Debug("the egress proxy's journal could not be acknowledged", "sandbox", r.Sandbox.ID, "error", err)
	}
}
