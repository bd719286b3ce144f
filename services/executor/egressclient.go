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

var _ metering.EgressClient = egressClient{}

// egressClient returns the client of the egress proxy that the settings name, the zero value if they name none.
func (c Config) egressClient(p sandbox.Provider) (egressClient, error) {
	if c.EgressAdmin != "" {
		return egressClient{api: api.NewClient(api.DialSocket(c.EgressAdmin))}, nil
	}
	engine, ok := p.(*docker.Provider)
	if !ok || !c.startsEgressProxy() {
		return egressClient{}, nil
	}
	e := c.egressConfig()
	proxy, err := docker.NewEgressProxy(engine, docker.EgressConfig{Image: c.EgressImage, Network: c.EgressNetwork, Env: map[string]string{
		"ANTHROPIC_API_KEY": e.AnthropicKey, "SPOOL_ANTHROPIC_BASE_URL": e.AnthropicBaseURL, "OPENAI_API_KEY": e.OpenAIKey,
		"SPOOL_OPENAI_BASE_URL": e.OpenAIBaseURL, "NVIDIA_API_KEY": e.NVIDIAKey, "SPOOL_NVIDIA_BASE_URL": e.NVIDIABaseURL,
	}})
	if err != nil {
		return egressClient{}, err
	}
	return egressClient{api: api.NewClient(proxy.Dial), proxy: proxy}, nil
}

// open starts the egress proxy if this executor has to start it. If the engine does not answer, open returns nil, and the first
// request to the proxy starts it later.
func (c egressClient) open(ctx context.Context, log *slog.Logger) error {
	if c.proxy == nil {
		return nil
	}
	err := c.proxy.EnsureRunning(ctx)
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

// egressRequestTimeout is the time limit of one request to the egress proxy. It keeps a proxy that does not answer from blocking a
// turn.
const egressRequestTimeout = 10 * time.Second

// Register registers a sandbox with the egress proxy, or replaces the sandbox's registration. It returns the certificate, in PEM,
// that the sandbox must trust, or "" if it needs none.
func (c egressClient) Register(ctx context.Context, sandbox string, r api.Registration) (authority string, err error) {
	ctx, cancel := context.WithTimeout(ctx, egressRequestTimeout)
	defer cancel()
	s, err := c.api.Register(ctx, sandbox, r)
	return s.Authority, c.wrapUnavailable(wrapRefusal(err))
}

// Release ends a sandbox's registration with the egress proxy and discards the proxy's journal of the sandbox. It returns nil for an
// unknown sandbox.
func (c egressClient) Release(ctx context.Context, sandbox string) error {
	ctx, cancel := context.WithTimeout(ctx, egressRequestTimeout)
	defer cancel()
	s, err := c.api.Release(ctx, sandbox)
	if err == nil {
		err = c.api.AckLines(ctx, sandbox, s.Journal, s.Last)
	}
	if err = wrapRefusal(err); errors.Is(err, metering.ErrUnknownSandbox) {
		return nil
	}
	return err
}

// OpenModelRequests returns the number of model requests of a sandbox that the egress proxy has not answered yet.
func (c egressClient) OpenModelRequests(ctx context.Context, sandbox string) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, egressRequestTimeout)
	defer cancel()
	s, err := c.api.State(ctx, sandbox)
	return s.OpenModelRequests, wrapRefusal(err)
}

// Lines returns the lines after the line after of the egress proxy's journal of a sandbox. If settled is set, the proxy first waits
// for open model requests that are about to end.
func (c egressClient) Lines(ctx context.Context, sandbox string, after run.JournalPosition, settled bool) ([]metering.JournalLine, error) {
	ctx, cancel := context.WithTimeout(ctx, egressRequestTimeout)
	defer cancel()
	lines, err := c.api.JournalLines(ctx, sandbox, after.Journal, after.N, settled)
	if err != nil {
		return nil, wrapRefusal(err)
	}
	var out []metering.JournalLine
	for _, l := range lines {
		out = append(out, metering.JournalLine{Execution: l.Execution, Time: l.Time, Data: events.DecodePayload(l.Type, l.Data)})
	}
	return out, nil
}

// Ack allows the egress proxy to remove the lines of a sandbox's journal up to and including upTo.
func (c egressClient) Ack(ctx context.Context, sandbox string, upTo run.JournalPosition) error {
	ctx, cancel := context.WithTimeout(ctx, egressRequestTimeout)
	defer cancel()
	return wrapRefusal(c.api.AckLines(ctx, sandbox, upTo.Journal, upTo.N))
}

// wrapUnavailable returns a *sandbox.Error with CodeEgressUnavailable that wraps err, if err means that the egress proxy does not
// answer. It returns a refusal of the proxy, an error of the engine and a cancellation unchanged.
func (c egressClient) wrapUnavailable(err error) error {
	var refused *api.Error
	var typed *sandbox.Error
	if err == nil || errors.As(err, &refused) || errors.As(err, &typed) || errors.Is(err, context.Canceled) {
		return err
	}
	name := "at egress-admin"
	if c.proxy != nil {
		name = c.proxy.ContainerName()
	}
	return &sandbox.Error{Code: sandbox.CodeEgressUnavailable, Err: err, Message: fmt.Sprintf(
		"the egress proxy %s does not answer, and without it a sandbox reaches no model: look at its log (%v)", name, err)}
}

// wrapRefusal wraps an error with which the egress proxy refused a request in metering.ErrUnknownSandbox or link.ErrFenced, which
// callers test for. It returns other errors unchanged.
func wrapRefusal(err error) error {
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
