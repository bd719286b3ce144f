package worker

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
	"github.com/spoolhq/spool/services/executor/internal/translate"
)

// A sandboxError is the failure to create or to use a sandbox.
type sandboxError struct {
	id      string
	err     error
	remains bool // the sandbox exists, for the next turn
}

func (e *sandboxError) Error() string { return e.err.Error() }

func (e *sandboxError) code() string {
	var typed *sandbox.Error
	if errors.As(e.err, &typed) {
		return typed.Code
	}
	return sandbox.CodeSandboxFailed
}
func (e *sandboxError) Unwrap() error { return e.err }

// attach opens a stream to the session's runner: it uses the resting agent's stream, opens one to the same runner, or creates a sandbox.
func (t *turn) attach(ctx context.Context) error {
	t.detach()
	a, err := t.findAgent(ctx)
	if err == nil {
		err = t.prepareAgent(ctx, a)
	}
	if errors.Is(err, agents.ErrLost) {
		t.detach()
		if t.Session.Run.Phase == run.Running {
			return err // the attempt died with the sandbox
		}
		if err = t.replaceSandbox(ctx); err == nil {
			a, err = t.createSandbox(ctx)
		}
		if err == nil {
			err = t.prepareAgent(ctx, a)
		}
	}
	if err != nil {
		return err
	}
	t.attempt = t.Session.Run.Attempt + 1
	if a.Hello != nil && a.Hello.Status.ExecutionID == t.ID {
		t.attempt = max(a.Hello.Status.Attempt, 1)
	}
	since := t.Session.Run.ClaimedAt
	if t.translator != nil {
		since = t.translator.Time
	}
	t.translator = &translate.Translator{
		Journal: a.Journal, ExecutionID: t.ID, Epoch: t.Epoch, Attempt: t.attempt, Last: a.Last, Time: since,
	}
	return nil
}

// prepareAgent makes an agent the turn's own: it registers the sandbox at the egress proxy, and prepares MCP servers, skills and workspace.
func (t *turn) prepareAgent(ctx context.Context, a *agents.Agent) error {
	t.agent = a
	t.w.agents.Use(a, t.Epoch)
	if err := t.register(ctx); err != nil {
		return err
	}
	if err := t.startServers(ctx); err != nil {
		return err
	}
	if err := t.loadSkills(ctx); err != nil {
		return err
	}
	return t.fillWorkspace(ctx)
}

// findAgent returns the agent of the session's present sandbox, and creates the first sandbox. The error wraps agents.ErrLost if the sandbox is
// gone.
func (t *turn) findAgent(ctx context.Context) (*agents.Agent, error) {
	if err := t.retireSandbox(ctx); err != nil {
		return nil, err
	}
	sb := t.Session.Run.Sandbox
	if a := t.w.agents.Take(t.Session.ID); a != nil {
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
		return t.createSandbox(ctx)
	case sb.Engine != t.w.cfg.Engine || sb.Provider != t.w.cfg.Provider:
		return nil, fmt.Errorf("%w: engine %s is gone", agents.ErrLost, sb.Engine)
	case sb.Journal == "":
		return t.createSandbox(ctx) // an executor that crashed began to create it: Create returns the same sandbox
	}
	// An executor that crashed may have paused the sandbox without an event, or may have recorded that it resumes and not resumed it.
	if err := t.w.sandboxes.Retry(ctx, sb.ID, func() error { return t.w.sandboxes.Resume(ctx, sb.ID) }); err != nil {
		t.Log.Warn("the sandbox could not be resumed; the runner will show whether it is paused", "sandbox", sb.ID, "error", err)
	}
	a, err := t.w.dialer.Dial(ctx, sb, t.Ref(), runner.Attach{Epoch: t.Epoch, After: sb.N})
	if errors.Is(err, link.ErrFenced) {
		return nil, fmt.Errorf("%w: %w", run.ErrFenced, err)
	}
	if err != nil || !sb.Unstopped {
		return a, err
	}
	if err := a.StopOther(ctx, t.ID); err != nil {
		a.Link.Close()
		if errors.Is(err, run.ErrFenced) {
			return nil, err
		}
		return nil, fmt.Errorf("%w: stop the agent of an execution that has ended: %w", agents.ErrLost, err)
	}
	return a, nil
}

// createSandbox creates the session's sandbox. The log names it before it exists.
func (t *turn) createSandbox(ctx context.Context) (*agents.Agent, error) {
	id := t.Session.Run.Sandbox.ID
	layer, err := t.dependencyLayer(ctx)
	if err != nil {
		return nil, err
	}
	made, err := t.reserveSandbox(ctx)
	if err != nil {
		return nil, err
	}
	defer made()
	began := t.w.deps.Now()
	if id == "" {
		if layer == "" { // a sandbox of the pool cannot mount one
			if a, err := t.pooled(ctx); a != nil || err != nil {
				return a, err
			}
		}
		if id, err = t.w.runlog.NewID(events.KindSandbox); err != nil {
			return nil, err
		}
		t.creating = id
		if err := t.AppendFacts(ctx, events.SandboxCreating{SandboxID: id, Provider: t.w.cfg.Provider, Engine: t.w.cfg.Engine}); err != nil {
			return nil, err
		}
	}
	if t.Session.Run.Sandbox.ID == id && t.Session.Run.Sandbox.Journal == "" && t.creating != id {
		// An executor that crashed began to create it, with an egress token that is lost.
		if err := t.w.sandboxes.Terminate(ctx, id, false); err != nil {
			return nil, err
		}
	}
	spec := t.w.idle.Spec(t.Session, id)
	spec.Labels.Epoch, spec.Layer, spec.Servers = t.Epoch, layer, len(t.resolved.Containers())
	box, err := t.w.sandboxes.Create(ctx, &spec, t.resolved.Allowlist(), nil)
	if err != nil {
		return nil, t.sandboxFailed(ctx, id, err)
	}
	a, err := t.w.dialer.Open(ctx, box, t.Ref(), runner.Attach{Epoch: t.Epoch})
	if errors.Is(err, link.ErrFenced) {
		return nil, fmt.Errorf("%w: %w", run.ErrFenced, err)
	}
	if err != nil {
		return nil, t.sandboxFailed(ctx, id, err)
	}
	ready := events.SandboxReady{
		SandboxID: id, Provider: t.w.cfg.Provider, Engine: t.w.cfg.Engine, Journal: a.Journal, Image: spec.Image,
		DurationMs: uint32(t.w.deps.Now().Sub(began).Milliseconds()), //nolint:gosec // no sandbox takes 49 days
	}
	if r, ok := box.(sandbox.Restorer); ok && !r.Kept() {
		ready.Empty = true
	} else {
		ready.Workspace = spec.Workspace
	}
	if err := t.AppendFacts(ctx, ready); err != nil {
		a.Link.Close()
		return nil, err
	}
	return a, t.Refresh(ctx)
}

// sandboxFailed ends what exists of a sandbox that could not be created or filled, and returns a *sandboxError; only the error of ctx if that has
// ended.
func (t *turn) sandboxFailed(ctx context.Context, id string, cause error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err := t.w.sandboxes.Terminate(ctx, id, false); err != nil {
		t.Log.Error("a failed sandbox could not be ended; the sweep will try again", "sandbox", id, "error", err)
	}
	return &sandboxError{id: id, err: cause}
}

// replaceSandbox gives up the present sandbox in the log, and ends it.
func (t *turn) replaceSandbox(ctx context.Context) error {
	old := t.Session.Run.Sandbox
	lost, kept := "its processes and what they had in memory", true
	if old.Engine != t.w.cfg.Engine {
		lost, kept = "the sandbox with what its workspace had since its last snapshot: engine "+old.Engine+" is gone", false
	} else if err := t.w.sandboxes.Terminate(ctx, old.ID, false); err != nil {
		return fmt.Errorf("end what is left of sandbox %s: %w", old.ID, err)
	}
	facts := []events.Payload{events.SandboxReplaced{SandboxID: old.ID, Lost: lost, Kept: kept}}
	closed, err := t.w.openBlocks.Close(ctx, t.Session)
	if err != nil {
		return err
	}
	return t.AppendFacts(ctx, append(facts, closed...)...)
}

// pooled takes a sandbox from the pool for the session; nil if none fits.
func (t *turn) pooled(ctx context.Context) (*agents.Agent, error) {
	o, architecture := t.Session.Life.Options, t.Session.Life.Architecture
	adopter, ok := t.w.deps.Sandbox.(sandbox.Adopter)
	if !ok || t.w.pool.Size(architecture) == 0 || o.Image != "" || len(t.resolved.Containers()) > 0 || len(o.Command) > 0 || t.Session.Run.Lost.Workspace != "" {
		return nil, nil
	}
	began := t.w.deps.Now()
	a := t.w.pool.Take(ctx, architecture)
	if a == nil {
		return nil, nil
	}
	defer t.w.pool.Forget(a.Sandbox)
	a.Session = t.Ref()
	labels := sandbox.Labels{Tenant: t.Session.Tenant, Session: t.Session.ID, Engine: t.w.cfg.Engine, Epoch: t.Epoch}
	if err := adopter.Adopt(ctx, a.Sandbox, labels); err != nil {
		t.Log.Warn("a pooled sandbox could not be used, another one is created", "sandbox", a.Sandbox, "error", err)
		t.w.pool.Discard(ctx, a)
		return nil, nil
	}
	err := t.AppendFacts(ctx, events.SandboxReady{
		SandboxID: a.Sandbox, Provider: t.w.cfg.Provider, Engine: t.w.cfg.Engine, Journal: a.Journal, Pooled: true, Empty: !t.w.sandboxes.KeepsWorkspaces(),
		DurationMs: uint32(t.w.deps.Now().Sub(began).Milliseconds()), //nolint:gosec // the pool is not slow
	})
	if err != nil {
		a.Link.Close() // the sweep ends the sandbox, which the log does not name
		return nil, err
	}
	t.w.metrics.pooled()
	return a, t.Refresh(ctx)
}
