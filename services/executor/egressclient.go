package executor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/docker"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
	"github.com/spoolhq/spool/services/executor/internal/link"
	"github.com/spoolhq/spool/services/executor/internal/metering"
)

// egressClient is the executor's client of the egress proxy. The zero value means that there is no proxy.
type egressClient struct {
	api   *api.Client         // nil without a proxy
	proxy *docker.EgressProxy // the container that this executor starts; nil for a proxy that runs already
}

var _ metering.Egress = egressClient{}

// egressClient returns the client of the egress proxy that the settings name, the zero value if they name none.
func (c Config) egressClient(p sandbox.Provider) (egressClient, error) {
	if c.EgressAdmin != "" {
		return egressClient{api: api.NewClient(api.DialSocket(c.EgressAdmin))}, nil
	}
	engine, ok := p.(*docker.Provider)
	if !ok || !c.startsEgress() {
		return egressClient{}, nil
	}
	e := c.egress()
	proxy, err := docker.NewEgressProxy(engine, docker.EgressConfig{Image: c.EgressImage, Network: c.EgressNetwork, Env: map[string]string{
		"ANTHROPIC_API_KEY": e.AnthropicKey, "SPOOL_ANTHROPIC_BASE_URL": e.AnthropicBaseURL, "OPENAI_API_KEY": e.OpenAIKey,
		"SPOOL_OPENAI_BASE_URL": e.OpenAIBaseURL, "NVIDIA_API_KEY": e.NVIDIAKey, "SPOOL_NVIDIA_BASE_URL": e.NVIDIABaseURL,
	}})
	if err != nil {
		return egressClient{}, err
	}
	return egressClient{api: api.NewClient(proxy.Dial), proxy: proxy}, nil
}

// open starts the egress proxy if this executor has to start it. If the engine does not answer, open returns nil, and
// the first request to the proxy starts it later.
func (c egressClient) open(ctx context.Context, log *slog.Logger) error {
	if c.proxy == nil {
		return nil
	}
	err := c.proxy.Ensure(ctx)
	var typed *sandbox.Error
	if errors.As(err, &typed) && typed.Code == sandbox.CodeEngineUnavailable {
		log.Warn("the egress proxy is started later: the engine does not answer", "error", err)
		return nil
	}
	return err
}

// close closes idle connections to the proxy.
func (c egressClient) close() {
	if c.api != nil {
		c.api.Close()
	}
}

// answerWithin is the time limit of a request to the egress proxy, so that a proxy that does not respond does not block
// a turn.
const answerWithin = 10 * time.Second

// Register registers a sandbox with the proxy, or replaces its registration. It returns the certificate, in PEM, that
// the sandbox must trust; "" for none.
func (c egressClient) Register(ctx context.Context, sandbox string, r api.Registration) (authority string, err error) {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	s, err := c.api.Register(ctx, sandbox, r)
	return s.Authority, c.withCode(sentinel(err))
}

// Release releases a sandbox and discards its journal. It returns nil for an unknown sandbox.
func (c egressClient) Release(ctx context.Context, sandbox string) error {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	s, err := c.api.Release(ctx, sandbox)
	if err == nil {
		err = c.api.Ack(ctx, sandbox, s.Journal, s.Last)
	}
	if err = sentinel(err); errors.Is(err, metering.ErrUnknownSandbox) {
		return nil
	}
	return err
}

// OpenModelRequests returns the number of open model requests of a sandbox.
func (c egressClient) OpenModelRequests(ctx context.Context, sandbox string) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	s, err := c.api.State(ctx, sandbox)
	return s.OpenModelRequests, sentinel(err)
}

// Lines returns the lines of a sandbox's journal that follow after. If settled is set, it first waits until no model request
// of the sandbox is open.
func (c egressClient) Lines(ctx context.Context, sandbox string, after run.JournalPosition, settled bool) ([]metering.Line, error) {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	lines, err := c.api.Lines(ctx, sandbox, after.Journal, after.N, settled)
	if err != nil {
		return nil, sentinel(err)
	}
	var out []metering.Line
	for _, l := range lines {
		out = append(out, metering.Line{Execution: l.Execution, Time: l.Time, Data: events.DecodePayload(l.Type, l.Data)})
	}
	return out, nil
}

// Ack allows the proxy to remove the lines of a journal up to a line.
func (c egressClient) Ack(ctx context.Context, sandbox string, upTo run.JournalPosition) error {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	return sentinel(c.api.Ack(ctx, sandbox, upTo.Journal, upTo.N))
}

// withCode wraps an error of the connection to the proxy into a *sandbox.Error of CodeEgressUnavailable. A refusal of the
// proxy, an error of the engine and a cancellation are returned as they are.
func (c egressClient) withCode(err error) error {
	var refused *api.Error
	var typed *sandbox.Error
	if err == nil || errors.As(err, &refused) || errors.As(err, &typed) || errors.Is(err, context.Canceled) {
		return err
	}
	name := "at egress-admin"
	if c.proxy != nil {
		name = c.proxy.Name()
	}
	return &sandbox.Error{Code: sandbox.CodeEgressUnavailable, Err: err, Message: fmt.Sprintf(
		"the egress proxy %s does not answer, and without it a sandbox reaches no model: look at its log (%v)", name, err)}
}

// sentinel wraps refusals of the proxy into the errors that the executor tests for: metering.ErrUnknownSandbox and link.ErrFenced.
func sentinel(err error) error {
	var refused *api.Error
	if !errors.As(err, &refused) {
		return err
	}
	switch refused.Code {
	case api.CodeNotFound:
		return fmt.Errorf("%w: %w", metering.ErrUnknownSandbox, err)
	case api.CodeFenced:
		return fmt.Errorf("%w: %w", link.ErrFenced, err)
	}
	return err
}
