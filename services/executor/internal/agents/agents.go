// Package agents opens streams to the runners of sandboxes, and keeps the agents warm whose session has nothing to do.
package agents

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/retry"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor/internal/link"
	"github.com/spoolhq/spool/services/executor/internal/sandboxes"
)

// ErrLost is returned when a sandbox, its runner or the runner's journal is gone.
var ErrLost = errors.New("the sandbox is lost")

// StatusTimeout is the time limit of a status request to a runner.
const StatusTimeout = 2 * time.Second

// stopTimeout is the maximum time that StopAgent waits for the end of an agent.
const stopTimeout = 30 * time.Second

// An Agent is an open stream from this executor to a runner, with what is known about the runner's agent process. Only one
// goroutine at a time may use it.
type Agent struct {
	Session topology.SessionRef
	Sandbox string
	Journal string
	Link    *link.Link
	Hello   *runner.Hello // nil once a turn has run over this stream
	Last    uint64        // number of the last journal line that was read

	// Guarded by Registry.mu.
	resting    bool
	used       time.Time // start of the rest
	memory     uint64    // bytes of the agent and its processes
	epoch      uint64
	checked    time.Time     // time of the last health check
	checkEvery time.Duration // interval of health checks; 0 means none
}

// IsAlive reports whether the stream to the runner is open.
func (a *Agent) IsAlive() bool {
	select {
	case <-a.Link.Done():
		return false
	default:
		return true
	}
}

// MayBeRunning reports whether the runner may already be running the execution: its status names it, or its journal has entries
// after line n, the last one in the log.
func (a *Agent) MayBeRunning(execution string, n uint64) bool {
	return a.Hello != nil && (a.Hello.Status.ExecutionID == execution || a.Hello.Last > n)
}

// StopOther kills the execution that the runner runs, unless that is the given execution, and returns when its processes have
// ended. With execution "" it kills any execution. The error wraps run.ErrFenced if another executor has claimed the session's
// runs since.
func (a *Agent) StopOther(ctx context.Context, execution string) error {
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	if a.Hello == nil || a.Hello.Status.ExecutionID == execution || a.Hello.Status.ExecutionID == "" {
		return nil
	}
	r, err := a.Link.Call(ctx, runner.Command{Op: runner.OpKill, Epoch: a.epoch})
	switch {
	case errors.Is(err, link.ErrFenced):
		return fmt.Errorf("%w: %w", run.ErrFenced, err)
	case err != nil:
		return err
	case r.Status == nil || r.Status.ExecutionID != "":
		return fmt.Errorf("the runner of sandbox %s still runs %s after a kill", a.Sandbox, a.Hello.Status.ExecutionID)
	}
	a.Hello.Status = *r.Status
	return nil
}

// A Dialer opens streams to runners on one engine. It is safe for concurrent use.
type Dialer struct {
	Sandboxes sandbox.Provider
	Provider  string        // name of the provider
	Engine    string        // engine of this executor
	Patience  time.Duration // maximum time that Dial waits for an unavailable engine
	Logger    *slog.Logger
}

// Open opens a stream to the runner of a sandbox.
func (d *Dialer) Open(ctx context.Context, box sandbox.Sandbox, ref topology.SessionRef, attach runner.Attach) (*Agent, error) {
	l, err := link.Open(ctx, box, attach, d.Logger)
	if err != nil {
		return nil, err
	}
	hello := l.Hello()
	return &Agent{Session: ref, Sandbox: box.ID(), Journal: hello.Journal, Link: l, Hello: &hello, Last: attach.After, epoch: attach.Epoch}, nil
}

// dialRetryPauses are the pauses between the attempts to connect to a runner that must exist according to the log.
var dialRetryPauses = []time.Duration{50 * time.Millisecond, 200 * time.Millisecond, time.Second}

// Dial opens a stream to the runner of a session's sandbox. It retries while the engine is unavailable. The error wraps ErrLost
// if the runner or its journal is gone, and link.ErrFenced if the runner obeys a later epoch.
func (d *Dialer) Dial(ctx context.Context, sb run.Sandbox, ref topology.SessionRef, attach runner.Attach) (*Agent, error) {
	began := time.Now()
	for i := 0; ; i++ {
		a, err := d.DialOnce(ctx, sb, ref, attach)
		if err == nil || errors.Is(err, ErrLost) || errors.Is(err, link.ErrFenced) || ctx.Err() != nil {
			return a, err
		}
		if sandboxes.IsUnavailable(err) {
			if time.Since(began) > d.Patience {
				return nil, err
			}
			i = len(dialRetryPauses) - 2
		}
		if i == len(dialRetryPauses) {
			return nil, fmt.Errorf("%w: its runner does not answer: %w", ErrLost, err)
		}
		d.Logger.Warn("the runner cannot be reached, trying again", "sandbox", sb.ID, "session", ref.Session, "error", err)
		if retry.Pause(ctx, dialRetryPauses[i]) != nil {
			return nil, ctx.Err()
		}
	}
}

// DialOnce is like Dial, but makes only one attempt to connect.
func (d *Dialer) DialOnce(ctx context.Context, sb run.Sandbox, ref topology.SessionRef, attach runner.Attach) (*Agent, error) {
	box, err := d.Sandboxes.Attach(ctx, sb.ID)
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil, fmt.Errorf("%w: %w", ErrLost, err)
	}
	if err != nil {
		return nil, fmt.Errorf("find sandbox %s: %w", sb.ID, err)
	}
	a, err := d.Open(ctx, box, ref, attach)
	if err != nil {
		return nil, err
	}
	if a.Journal != sb.Journal {
		a.Link.Close()
		return nil, fmt.Errorf("%w: its runner has journal %s in place of %s", ErrLost, a.Journal, sb.Journal)
	}
	return a, nil
}

// StopAgent kills the agent in a sandbox, and returns when the agent's processes have ended. It returns nil if the sandbox does not
// exist. epoch must be that of the last claim, and the runner refuses lower epochs from then on. The error wraps run.ErrFenced
// if another executor has claimed the session's runs since.
func (d *Dialer) StopAgent(ctx context.Context, sb run.Sandbox, ref topology.SessionRef, epoch uint64) error {
	if sb.ID == "" || sb.Journal == "" {
		return nil // no runner was started in it
	}
	if sb.Engine != d.Engine || sb.Provider != d.Provider {
		return fmt.Errorf("engine %s of sandbox %s is gone", sb.Engine, sb.ID)
	}
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	a, err := d.Dial(ctx, sb, ref, runner.Attach{Epoch: epoch, After: sb.N})
	switch {
	case errors.Is(err, link.ErrFenced):
		return fmt.Errorf("%w: %w", run.ErrFenced, err)
	case errors.Is(err, sandbox.ErrNotFound):
		return nil
	case err != nil:
		return err
	}
	defer a.Link.Close()
	return a.StopOther(ctx, "")
}
