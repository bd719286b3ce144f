package executor

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"strings"
	"time"

	hosts "github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/docker"
	"github.com/spoolhq/spool/services/executor/internal/egress"
	"github.com/spoolhq/spool/services/executor/internal/link"
	"github.com/spoolhq/spool/services/executor/internal/worker"
)

// wayOut is the egress proxy as the holder uses it.
type wayOut struct {
	client *egress.Client
	proxy  *docker.EgressProxy // nil for one that others run
}

var _ worker.Egress = wayOut{}

// whatever is an epoch above all: the log has decided, and the proxy follows.
const whatever = math.MaxInt64

// startsEgress tells whether the proxy is a container that executors start.
func (c Config) startsEgress() bool { return c.Sandbox == Docker && c.EgressImage != "" }

// checkEgress checks the settings of the egress proxy: of one that runs already, or of one that is to be started.
func (c Config) checkEgress() error {
	if c.Sandbox == Modal {
		_, err := c.remoteEgress()
		return err
	}
	switch {
	case c.EgressServer != "" || c.EgressAuthority != "":
		return fmt.Errorf("egress-server, egress-authority: they are for sandbox %s, and sandbox is %s: leave them empty", Modal, c.Sandbox)
	case (c.EgressAdmin == "") != (c.EgressSockets == ""):
		return errors.New("egress-admin and egress-sockets: set both, or neither")
	case !c.startsEgress():
		return nil
	case c.EgressAdmin != "":
		return errors.New("egress-image: egress-admin and egress-sockets are of a proxy that runs already: set either it or them")
	case c.EgressNetwork == "none" || strings.HasPrefix(c.EgressNetwork, "container:"):
		return fmt.Errorf("egress-network: %q leads nowhere, and no sandbox would reach a model: name a network of the engine", c.EgressNetwork)
	}
	return c.egress().Check()
}

// remoteEgress is how sandboxes on other machines reach the egress proxy.
type remoteEgress struct {
	Server    string // host:port
	Authority string // certificates in PEM form
}

// remoteEgress checks the settings of sandboxes on other machines, and reads the authority.
func (c Config) remoteEgress() (remoteEgress, error) {
	server, err := hosts.ParseTarget(c.EgressServer, 0)
	switch {
	case c.EgressServer == "":
		return remoteEgress{}, fmt.Errorf("egress-server: it is empty, and %s sandboxes reach models by it alone: set the host and port of the egress proxy's TLS listener", Modal)
	case err != nil:
		return remoteEgress{}, fmt.Errorf("egress-server: it is not a host and a port like proxy.example.com:7443: %w", err)
	case server.Host.Addr.IsUnspecified():
		return remoteEgress{}, fmt.Errorf("egress-server: no sandbox can connect to %s: set the address by which the internet reaches the egress proxy", server)
	case c.EgressAuthority == "":
		return remoteEgress{}, errors.New("egress-authority: it is empty: set the PEM file of the authority that signed the certificate of egress-server")
	case c.EgressAdmin == "":
		return remoteEgress{}, fmt.Errorf("egress-admin: it is empty, and no %s sandbox could be registered: set the admin socket of the egress proxy", Modal)
	case c.EgressSockets != "" || c.EgressImage != "":
		return remoteEgress{}, fmt.Errorf("egress-sockets, egress-image: they are for sandbox %s: leave them empty", Docker)
	}
	text, err := os.ReadFile(c.EgressAuthority)
	if err != nil {
		return remoteEgress{}, fmt.Errorf("egress-authority: %w", err)
	}
	if !x509.NewCertPool().AppendCertsFromPEM(text) {
		return remoteEgress{}, fmt.Errorf("egress-authority: %s has no certificate in PEM form", c.EgressAuthority)
	}
	return remoteEgress{server.String(), string(text)}, nil
}

// egress gives the proxy's settings: it has the keys, sandboxes have not.
func (c Config) egress() egress.Config {
	nvidia := c.NVIDIABaseURL
	if nvidia == nvidiaURL { // it knows that itself, and then also that without a key there is no use in it
		nvidia = ""
	}
	return egress.Config{
		AnthropicKey: c.AnthropicKey, AnthropicBaseURL: c.AnthropicBaseURL, OpenAIKey: c.OpenAIKey, OpenAIBaseURL: c.OpenAIBaseURL,
		NVIDIAKey: c.NVIDIAKey, NVIDIABaseURL: nvidia,
	}
}

// wayOut is the way out that the settings name; without a client where there is none.
func (c Config) wayOut(p sandbox.Provider) (wayOut, error) {
	if c.EgressAdmin != "" {
		return wayOut{client: egress.NewClient(egress.DialSocket(c.EgressAdmin))}, nil
	}
	engine, ok := p.(*docker.Provider)
	if !ok || !c.startsEgress() {
		return wayOut{}, nil
	}
	e := c.egress()
	proxy, err := docker.NewEgressProxy(engine, docker.EgressConfig{Image: c.EgressImage, Network: c.EgressNetwork, Env: map[string]string{
		"ANTHROPIC_API_KEY": e.AnthropicKey, "SPOOL_ANTHROPIC_BASE_URL": e.AnthropicBaseURL, "OPENAI_API_KEY": e.OpenAIKey,
		"SPOOL_OPENAI_BASE_URL": e.OpenAIBaseURL, "NVIDIA_API_KEY": e.NVIDIAKey, "SPOOL_NVIDIA_BASE_URL": e.NVIDIABaseURL,
	}})
	if err != nil {
		return wayOut{}, err
	}
	return wayOut{client: egress.NewClient(proxy.Dial), proxy: proxy}, nil
}

// open starts the proxy where it is this executor's to start. While the engine
// is away it is left to those who need the proxy to try again.
func (w wayOut) open(ctx context.Context, log *slog.Logger) error {
	if w.proxy == nil {
		return nil
	}
	err := w.proxy.Ensure(ctx)
	var typed *sandbox.Error
	if errors.As(err, &typed) && typed.Code == sandbox.CodeEngineUnavailable {
		log.Warn("the engine's egress proxy is started once the engine answers", "error", err)
		return nil
	}
	return err
}

// close lets go of idle connections.
func (w wayOut) close() {
	if w.client != nil {
		w.client.Close()
	}
}

// answerWithin bounds a question to the proxy: a turn must not stand still with it.
const answerWithin = 10 * time.Second

// Register registers a sandbox or renews its registration, and returns the certificate for the sandbox to trust.
func (w wayOut) Register(ctx context.Context, g worker.Grant) (authority string, err error) {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	r := egress.Registration{
		Token: g.Token, Tenant: g.Tenant, Session: g.Session, Execution: g.Execution, Epoch: g.Epoch, Allow: append([]string{}, g.Allow...),
		Routes: g.Routes,
	}
	for _, u := range g.Upstreams {
		r.Upstreams = append(r.Upstreams, egress.Upstream(u))
	}
	for _, b := range g.Budgets {
		r.Budgets = append(r.Budgets, egress.Budget(b))
	}
	s, err := w.client.Register(ctx, g.Sandbox, r)
	return s.Authority, w.reached(meaning(err))
}

// Release shuts a sandbox's way out, and forgets what was journaled.
func (w wayOut) Release(ctx context.Context, sandbox string) error {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	s, err := w.client.Release(ctx, sandbox, whatever)
	if err == nil {
		err = w.client.Ack(ctx, sandbox, s.Journal, s.Last, whatever)
	}
	if err = meaning(err); errors.Is(err, worker.ErrUnknownSandbox) {
		return nil
	}
	return err
}

// Open is how many requests to models are under way.
func (w wayOut) Open(ctx context.Context, sandbox string) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	s, err := w.client.State(ctx, sandbox)
	return s.OpenModelRequests, meaning(err)
}

// Lines gives what was journaled about a sandbox after a line.
func (w wayOut) Lines(ctx context.Context, sandbox string, after run.Line, settled bool) ([]worker.EgressLine, error) {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	lines, err := w.client.Lines(ctx, sandbox, after.Journal, after.N, settled)
	if err != nil {
		return nil, meaning(err)
	}
	var out []worker.EgressLine
	for _, l := range lines {
		data := events.DecodePayload(l.Type, l.Data)
		out = append(out, worker.EgressLine{Execution: l.Execution, Time: l.Time, Data: data})
	}
	return out, nil
}

// Ack lets the proxy forget lines.
func (w wayOut) Ack(ctx context.Context, sandbox string, upTo run.Line) error {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	return meaning(w.client.Ack(ctx, sandbox, upTo.Journal, upTo.N, whatever))
}

// reached gives an error of the way to the proxy its code. What the proxy
// itself refused, or an engine that is away, keeps its own.
func (w wayOut) reached(err error) error {
	var refused *egress.Error
	var typed *sandbox.Error
	if err == nil || errors.As(err, &refused) || errors.As(err, &typed) || errors.Is(err, context.Canceled) {
		return err
	}
	name := "that egress-admin names"
	if w.proxy != nil {
		name = w.proxy.Name()
	}
	return &sandbox.Error{Code: sandbox.CodeEgressUnavailable, Err: err, Message: fmt.Sprintf(
		"the egress proxy %s does not answer, and without it a sandbox reaches no model: look at its log (%v)", name, err)}
}

func meaning(err error) error {
	var refused *egress.Error
	if !errors.As(err, &refused) {
		return err
	}
	switch refused.Code {
	case egress.CodeNotFound:
		return fmt.Errorf("%w: %w", worker.ErrUnknownSandbox, err)
	case egress.CodeFenced:
		return fmt.Errorf("%w: %w", link.ErrFenced, err)
	}
	return err
}
