// Package provision makes a session's sandbox ready for an execution: it finds or creates the sandbox, registers it at the egress
// proxy, starts the MCP servers next to it, and loads skills and workspace into it.
package provision

import (
	"context"
	"errors"
	"time"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/waiting"
	"github.com/spoolhq/spool/services/executor/internal/agents"
	"github.com/spoolhq/spool/services/executor/internal/contents"
	"github.com/spoolhq/spool/services/executor/internal/idle"
	"github.com/spoolhq/spool/services/executor/internal/metering"
	"github.com/spoolhq/spool/services/executor/internal/openblocks"
	"github.com/spoolhq/spool/services/executor/internal/permits"
	"github.com/spoolhq/spool/services/executor/internal/pool"
	"github.com/spoolhq/spool/services/executor/internal/references"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
	"github.com/spoolhq/spool/services/executor/internal/sandboxes"
)

// Registries are the hosts, and the routes of the egress proxy, that a sandbox may use while dependencies are installed in it.
type Registries struct {
	Hosts  []string // entries of an allowlist
	Routes []string // of the egress proxy
}

// WaitRecorder records the waits of executions.
type WaitRecorder interface {
	// Begin records that an execution waits, until End is called.
	Begin(e waiting.Entry)
	// End records that an execution no longer waits.
	End(execution string)
}

// Config configures a Provisioner. Every field is required.
type Config struct {
	ProviderName string                  // name of the sandbox provider
	Engine       string                  // the engine on which this executor creates sandboxes
	Beat         time.Duration           // interval at which controls are read during a wait
	Registries   Registries              // hosts that a sandbox may reach while dependencies are installed
	Proxied      bool                    // sandboxes reach the network through the egress proxy only
	MaxSandboxes func(tenant string) int // returns the maximum number of sandboxes of a tenant on this engine; 0 means no limit

	Provider   sandbox.Provider
	Sandboxes  *sandboxes.Manager
	Dialer     *agents.Dialer
	Agents     *agents.Registry
	Pool       *pool.Pool
	Idle       *idle.Keeper
	Contents   *contents.Manager // without a Store, workspaces stay as they are
	OpenBlocks *openblocks.Reader
	Waits      WaitRecorder

	// NewWait returns the entry for a wait of the active execution of a session that begins now, because the tenant has its maximum
	// number of sandboxes.
	NewWait func(l *eventlog.SessionState) waiting.Entry

	NewID  func() (string, error) // returns the id of a new sandbox
	Pooled func()                 // is called when a sandbox was taken from the pool
	Now    func() time.Time
}

// A Provisioner creates, finds and prepares the sandboxes of executions. It is safe for concurrent use.
type Provisioner struct{ Config }

// New returns a Provisioner.
func New(cfg Config) *Provisioner { return &Provisioner{cfg} }

// A Request is an execution that needs its session's sandbox.
type Request struct {
	*runlog.Execution
	Resolved *references.Resolved
	Meter    *metering.Meter
	Changed  <-chan struct{} // signalled when the session has a new fact
}

// ReadySandbox is a sandbox that is ready for an execution, with an open stream to its runner.
type ReadySandbox struct {
	Agent   *agents.Agent // in use under the execution's epoch
	Sockets []string      // of the MCP servers in containers, in their order
}

// ErrCancelled is returned when a control stopped the execution before its sandbox was ready.
var ErrCancelled = errors.New("the execution is cancelled")

// An Error is the failure to create or to prepare a sandbox.
type Error struct {
	SandboxID string
	Err       error
	Remains   bool // the sandbox still exists, and the next turn may use it
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// Code returns the code with which the execution fails.
func (e *Error) Code() string {
	var typed *sandbox.Error
	if errors.As(e.Err, &typed) {
		return typed.Code
	}
	return sandbox.CodeSandboxFailed
}

// A sandboxPreparation creates or finds the sandbox of one Request and prepares it for the execution. It runs in the goroutine of the
// execution's turn.
type sandboxPreparation struct {
	*Provisioner
	Request
	agent   *agents.Agent // nil until there is one
	sockets []string
}

// Attach returns the session's sandbox, ready for the execution, with an open stream to its runner. It uses the stream of the resting
// agent, opens a new stream to the same runner, or creates a sandbox. If the sandbox is lost, Attach replaces it, unless the execution has
// begun to run in it.
//
// An error that is an *Error or a *references.Error ends the execution. Other errors wrap ErrCancelled, permits.ErrStopping,
// agents.ErrLost or run.ErrFenced. The caller must close the returned Agent, also if there is an error.
func (p *Provisioner) Attach(ctx context.Context, r Request) (ReadySandbox, error) {
	prep := &sandboxPreparation{Provisioner: p, Request: r}
	err := prep.attach(ctx)
	return ReadySandbox{prep.agent, prep.sockets}, err
}

// attach finds or creates the sandbox, opens the stream to its runner, and prepares it, as Provisioner.Attach describes. It
// sets p.agent, and p.sockets to the sockets of the MCP servers in containers, also if it returns an error.
func (p *sandboxPreparation) attach(ctx context.Context) error {
	a, err := p.findAgent(ctx)
	if err == nil {
		err = p.prepareSandbox(ctx, a)
	}
	if !errors.Is(err, agents.ErrLost) {
		return err
	}
	p.closeStream()
	if p.Session.Run.Phase == run.Running || p.Session.Run.Phase == run.Waiting {
		return err // the attempt died with the sandbox
	}
	if err := p.replaceSandbox(ctx); err != nil {
		return err
	}
	if a, err = p.createSandbox(ctx); err != nil {
		return err
	}
	return p.prepareSandbox(ctx, a)
}

// prepareSandbox sets p.agent, registers the agent's sandbox at the egress proxy, starts its MCP servers, and loads skills and workspace
// into it.
func (p *sandboxPreparation) prepareSandbox(ctx context.Context, a *agents.Agent) error {
	p.agent = a
	p.Agents.AddWorking(a, p.Epoch)
	if err := p.registerSandbox(ctx); err != nil {
		return err
	}
	if err := p.startServers(ctx); err != nil {
		return err
	}
	if err := p.loadSkills(ctx); err != nil {
		return err
	}
	return p.fillWorkspace(ctx)
}

// closeStream closes the stream to the agent's runner. The agent continues to run.
func (p *sandboxPreparation) closeStream() {
	if p.agent != nil {
		p.Agents.Remove(p.agent)
		p.agent.Link.Close()
		p.agent = nil
	}
}

// registerSandbox registers the sandbox with the egress proxy. While the proxy does not answer, registerSandbox tries again, as
// sandboxes.Manager.RetryWhileUnavailable does. If the proxy still does not answer then, it returns an *Error.
func (p *sandboxPreparation) registerSandbox(ctx context.Context) error {
	err := p.Sandboxes.RetryWhileUnavailable(ctx, p.agent.Sandbox, func() error { return p.Meter.Register(ctx, p.agent.Sandbox) })
	if sandboxes.IsUnavailable(err) {
		return &Error{SandboxID: p.agent.Sandbox, Err: err, Remains: true}
	}
	return err
}

// unlessCancelled runs work, which may take long, in another goroutine, and returns its error. It cancels the context of work and returns
// ErrCancelled if a control stops the execution, or permits.ErrStopping if this executor stops. work must not use the execution. If work
// needs code to run in the turn's goroutine, it sends to notice, and unlessCancelled calls handle with the received value, also if work
// has ended by then. notice may be nil.
func (p *sandboxPreparation) unlessCancelled(ctx context.Context, work func(context.Context) error, notice <-chan time.Time, handle func(time.Time) error) error {
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- work(inner) }()
	stop := func(err error) error {
		cancel()
		<-done
		return err
	}
	tick := time.NewTicker(p.Beat)
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			select {
			case sent := <-notice: // both channels were ready
				if failed := handle(sent); failed != nil {
					return failed
				}
			default:
			}
			return err
		case sent := <-notice:
			if err := handle(sent); err != nil {
				return stop(err)
			}
			continue
		case <-bus.Draining(ctx):
			return stop(permits.ErrStopping)
		case <-p.Changed:
		case <-tick.C:
		}
		if err := p.ReloadLife(ctx); err != nil {
			return stop(err)
		}
		if p.Control().N > 0 {
			return stop(ErrCancelled)
		}
	}
}
