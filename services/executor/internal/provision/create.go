package provision

import (
	"context"
	"errors"
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/agents"
	"github.com/spoolhq/spool/services/executor/internal/link"
)

// findAgent returns the agent of the session's sandbox, which prepare then makes ready. It uses the resting agent of this executor, or
// opens a stream to the sandbox's runner. If the session has no sandbox, or retireSandbox has terminated it, findAgent creates one. The
// error wraps agents.ErrLost if the sandbox is gone.
func (p *sandboxPreparation) findAgent(ctx context.Context) (*agents.Agent, error) {
	if err := p.retireSandbox(ctx); err != nil {
		return nil, err
	}
	sb := p.Session.Run.Sandbox
	if a := p.Agents.TakeResting(p.Session.ID); a != nil {
		// If the log has lines that this stream has not read, another executor has followed the agent since. The runner has ended this stream,
		// even if its end has not arrived yet.
		if a.IsAlive() && a.Journal == sb.Journal && a.Last >= sb.N {
			a.Hello = nil
			return a, nil
		}
		a.Link.Close()
	}
	switch {
	case sb.ID == "":
		return p.createSandbox(ctx)
	case sb.Engine != p.Engine || sb.Provider != p.ProviderName:
		return nil, fmt.Errorf("%w: engine %s is gone", agents.ErrLost, sb.Engine)
	case sb.Journal == "":
		return p.createSandbox(ctx) // an executor that crashed began to create it: Create returns the same sandbox
	}
	// An executor that crashed may have paused the sandbox without an event, or may have recorded that it resumes and not resumed it.
	if err := p.Sandboxes.RetryWhileUnavailable(ctx, sb.ID, func() error { return p.Sandboxes.Resume(ctx, sb.ID) }); err != nil {
		p.Log.Warn("the sandbox could not be resumed; the runner will show whether it is paused", "sandbox", sb.ID, "error", err)
	}
	a, err := p.Dialer.Dial(ctx, sb, p.SessionRef(), runner.Attach{Epoch: p.Epoch, After: sb.N})
	if errors.Is(err, link.ErrFenced) {
		return nil, fmt.Errorf("%w: %w", run.ErrFenced, err)
	}
	if err != nil || !sb.Unstopped {
		return a, err
	}
	if err := a.StopOther(ctx, p.ID); err != nil {
		a.Link.Close()
		if errors.Is(err, run.ErrFenced) {
			return nil, err
		}
		return nil, fmt.Errorf("%w: stop the agent of an execution that has ended: %w", agents.ErrLost, err)
	}
	return a, nil
}

// createSandbox creates the session's sandbox, or takes one from the warm pool, and returns its agent. It records the sandbox's id in the
// log before it creates the sandbox, so that after a crash the next executor finds the sandbox. An *Error ends the execution.
func (p *sandboxPreparation) createSandbox(ctx context.Context) (*agents.Agent, error) {
	id := p.Session.Run.Sandbox.ID
	layer, err := p.dependencyLayer(ctx)
	if err != nil {
		return nil, err
	}
	unreserve, err := p.reserveSandbox(ctx)
	if err != nil {
		return nil, err
	}
	defer unreserve()
	began := p.Now()
	if id == "" {
		if layer == "" { // a sandbox of the pool cannot mount one
			if a, err := p.takePooled(ctx); a != nil || err != nil {
				return a, err
			}
		}
		if id, err = p.NewID(); err != nil {
			return nil, err
		}
		if err := p.AppendFacts(ctx, events.SandboxCreating{SandboxID: id, Provider: p.ProviderName, Engine: p.Engine}); err != nil {
			return nil, err
		}
	} else if err := p.Sandboxes.Terminate(ctx, id, false); err != nil {
		// An executor that crashed began to create it, with an egress token that is lost.
		return nil, err
	}
	spec := p.Idle.SandboxSpec(p.Session, id)
	spec.Labels.Epoch, spec.Layer, spec.Servers = p.Epoch, layer, len(p.Resolved.Containers())
	box, err := p.Sandboxes.Create(ctx, &spec, p.Resolved.Allowlist(), nil)
	if err != nil {
		return nil, p.endFailedSandbox(ctx, id, err)
	}
	a, err := p.Dialer.Open(ctx, box, p.SessionRef(), runner.Attach{Epoch: p.Epoch})
	if errors.Is(err, link.ErrFenced) {
		return nil, fmt.Errorf("%w: %w", run.ErrFenced, err)
	}
	if err != nil {
		return nil, p.endFailedSandbox(ctx, id, err)
	}
	ready := events.SandboxReady{
		SandboxID: id, Provider: p.ProviderName, Engine: p.Engine, Journal: a.Journal, Image: spec.Image,
		DurationMs: uint32(p.Now().Sub(began).Milliseconds()), //nolint:gosec // no sandbox takes 49 days
	}
	if r, ok := box.(sandbox.WorkspaceReporter); ok && !r.HasWorkspace() {
		ready.Empty = true
	} else {
		ready.Workspace = spec.Workspace
	}
	if err := p.AppendFacts(ctx, ready); err != nil {
		a.Link.Close()
		return nil, err
	}
	return a, p.ReloadLife(ctx)
}

// endFailedSandbox terminates a sandbox that could not be created or filled, and returns an *Error with the cause. If ctx has ended, it
// terminates nothing and returns the error of ctx.
func (p *sandboxPreparation) endFailedSandbox(ctx context.Context, id string, cause error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err := p.Sandboxes.Terminate(ctx, id, false); err != nil {
		p.Log.Error("a failed sandbox could not be ended; the sweep will try again", "sandbox", id, "error", err)
	}
	return &Error{SandboxID: id, Err: cause}
}

// replaceSandbox prepares for another sandbox after the session's sandbox was lost: it terminates what is left of the lost one on this
// engine, completes the open blocks, and records the replacement in the log. The caller then creates the other sandbox.
func (p *sandboxPreparation) replaceSandbox(ctx context.Context) error {
	old := p.Session.Run.Sandbox
	lost, kept := "its processes and what they had in memory", true
	if old.Engine != p.Engine {
		lost, kept = "the sandbox with what its workspace had since its last snapshot: engine "+old.Engine+" is gone", false
	} else if err := p.Sandboxes.Terminate(ctx, old.ID, false); err != nil {
		return fmt.Errorf("end what is left of sandbox %s: %w", old.ID, err)
	}
	facts := []events.Payload{events.SandboxReplaced{SandboxID: old.ID, Lost: lost, Kept: kept}}
	closed, err := p.OpenBlocks.CloseBlocks(ctx, p.Session)
	if err != nil {
		return err
	}
	return p.AppendFacts(ctx, append(facts, closed...)...)
}

// takePooled takes a sandbox from the warm pool for the session and records that in the log. It returns nil without an error if the pool
// has no sandbox that the session can use.
func (p *sandboxPreparation) takePooled(ctx context.Context) (*agents.Agent, error) {
	o, architecture := p.Session.Life.Options, p.Session.Life.Architecture
	adopter, ok := p.Provider.(sandbox.Adopter)
	if !ok || p.Pool.TargetSize(architecture) == 0 || o.Image != "" || len(p.Resolved.Containers()) > 0 || len(o.Command) > 0 || p.Session.Run.Lost.Workspace != "" {
		return nil, nil
	}
	began := p.Now()
	a := p.Pool.TakeSandbox(ctx, architecture)
	if a == nil {
		return nil, nil
	}
	defer p.Pool.ForgetSandbox(a.Sandbox)
	a.Session = p.SessionRef()
	labels := sandbox.Labels{Tenant: p.Session.Tenant, Session: p.Session.ID, Engine: p.Engine, Epoch: p.Epoch}
	if err := adopter.Adopt(ctx, a.Sandbox, labels); err != nil {
		p.Log.Warn("a pooled sandbox could not be used, another one is created", "sandbox", a.Sandbox, "error", err)
		p.Pool.DiscardSandbox(ctx, a)
		return nil, nil
	}
	err := p.AppendFacts(ctx, events.SandboxReady{
		SandboxID: a.Sandbox, Provider: p.ProviderName, Engine: p.Engine, Journal: a.Journal, Pooled: true, Empty: !p.Sandboxes.KeepsWorkspaces(),
		DurationMs: uint32(p.Now().Sub(began).Milliseconds()), //nolint:gosec // the pool is not slow
	})
	if err != nil {
		a.Link.Close() // the sweep ends the sandbox, which the log does not name
		return nil, err
	}
	p.Pooled()
	return a, p.ReloadLife(ctx)
}
