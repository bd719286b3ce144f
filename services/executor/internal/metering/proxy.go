// Package metering charges executions to their budgets. It registers an execution and its budgets at the egress proxy, reads the
// journal in which the proxy records model requests and refused hosts, and reports which budget is used up.
package metering

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/agents"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
)

// EgressClient is the client of the egress proxy. It registers sandboxes, and reads the proxy's journal of each sandbox.
type EgressClient interface {
	// Register registers a sandbox, or replaces its registration; an empty token keeps the registered one. It returns
	// the certificate, in PEM, that verifies the proxy's certificates of the hosts with methods in r.Allow, "" if there
	// are none. It returns ErrUnknownSandbox for an unknown sandbox without a token, and link.ErrFenced for a low epoch.
	Register(ctx context.Context, sandbox string, r api.Registration) (authority string, err error)
	// Release ends a registration. It returns nil for an unknown sandbox.
	Release(ctx context.Context, sandbox string) error
	// OpenModelRequests returns the number of open model requests of a sandbox.
	OpenModelRequests(ctx context.Context, sandbox string) (int, error)
	// Lines returns the lines of the proxy's journal about a sandbox that follow a line. If settled is true, Lines
	// first waits until the lines of model requests that are about to end are in the journal.
	Lines(ctx context.Context, sandbox string, after run.JournalPosition, settled bool) ([]JournalLine, error)
	// Ack allows the proxy to drop lines that are in the log.
	Ack(ctx context.Context, sandbox string, upTo run.JournalPosition) error
}

// ErrUnknownSandbox is returned when a sandbox is registered without a token and the proxy has no token of the sandbox.
var ErrUnknownSandbox = errors.New("the egress proxy does not know the sandbox")

// A JournalLine is a line of the egress proxy's journal of a sandbox: a denial or a model call.
type JournalLine struct {
	Execution string
	Time      time.Time
	Data      events.Payload // EgressDenied or ModelCalled
}

// A Proxy registers sandboxes with the egress proxy and reads the proxy's journals. It is safe for concurrent use. If Egress is nil, the
// executor has no egress proxy and the methods do nothing.
type Proxy struct {
	Egress EgressClient
	Engine string // of this executor
	Now    func() time.Time
	Logger *slog.Logger
}

// RegisterNew implements sandboxes.Egress.
func (p *Proxy) RegisterNew(ctx context.Context, spec sandbox.Spec, allow []string, routes *[]string) error {
	_, err := p.Egress.Register(ctx, spec.ID, api.Registration{
		Token: spec.EgressToken, Tenant: spec.Labels.Tenant, Session: spec.Labels.Session, Epoch: spec.Labels.Epoch, Allow: allow, Routes: routes,
	})
	return err
}

// Release implements sandboxes.Egress.
func (p *Proxy) Release(ctx context.Context, sandbox string) error {
	return p.Egress.Release(ctx, sandbox)
}

// OpenModelRequests returns the number of model requests of a sandbox that the egress proxy has not answered yet.
func (p *Proxy) OpenModelRequests(ctx context.Context, sandbox string) (int, error) {
	if p.Egress == nil {
		return 0, nil
	}
	return p.Egress.OpenModelRequests(ctx, sandbox)
}

// UnstoredLines returns the lines of the egress proxy's journal of a session's sandbox that the log does not have. r is the state of the
// session's runs.
func (p *Proxy) UnstoredLines(ctx context.Context, r run.State) ([]JournalLine, error) {
	if p.Egress == nil {
		return nil, nil
	}
	return p.Egress.Lines(ctx, r.Sandbox.ID, r.Egress, false)
}

// UnstoredEvents returns the events in the egress proxy's journal of a session's sandbox that the log does not have. It is called before
// the sandbox is terminated. r is the state of the session's runs.
func (p *Proxy) UnstoredEvents(ctx context.Context, r run.State) []events.Event {
	if p.Egress == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, agents.StatusTimeout)
	defer cancel()
	lines, err := p.Egress.Lines(ctx, r.Sandbox.ID, r.Egress, true)
	if err != nil {
		p.Logger.Warn("the last lines of the egress proxy about a sandbox are lost", "sandbox", r.Sandbox.ID, "error", err)
	}
	return p.eventsOfLines(r, "", lines)
}

// eventsOfLines converts lines of the egress proxy's journal to events. The ids of the events do not depend on the executor. The proxy's
// clock may be wrong, so the times of the events are limited to the range from the last claim to now.
func (p *Proxy) eventsOfLines(r run.State, execution string, lines []JournalLine) []events.Event {
	now := p.Now()
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
			e.ID = events.DeriveID(events.KindEvent, d.Journal, fmt.Sprint(d.Line))
		case events.ModelCalled:
			e.ID = events.DeriveID(events.KindEvent, d.Journal, fmt.Sprint(d.Line))
		default:
			continue
		}
		out = append(out, e)
	}
	return out
}

// Acknowledge allows the egress proxy to remove the journal lines that the log has. After an error, the next call acknowledges the same
// lines again.
func (p *Proxy) Acknowledge(ctx context.Context, r run.State) {
	if p.Egress == nil || r.Egress.Journal == "" {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, agents.StatusTimeout)
	defer cancel()
	if err := p.Egress.Ack(ctx, r.Sandbox.ID, r.Egress); err != nil {
		p.Logger.Debug("the egress proxy's journal could not be acknowledged", "sandbox", r.Sandbox.ID, "error", err)
	}
}
