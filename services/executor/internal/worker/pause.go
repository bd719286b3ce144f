package worker

import (
	"context"
	"errors"
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// errPaused is returned when the execution was paused, so that it has no slot and no job until it is resumed.
var errPaused = errors.New("the execution is paused")

// recordResumed records that a paused execution continues. It does nothing for an execution that is not paused. The sandbox is resumed
// after the record. If the executor crashes between the two, the next executor resumes the sandbox, because attachSandbox resumes every
// sandbox that is not paused according to the log.
func (t *turn) recordResumed(ctx context.Context) error {
	if t.Session.Run.Phase == run.Paused {
		sb := t.Session.Run.Sandbox
		var facts []events.Payload
		if sb.Paused && sb.Engine == t.w.cfg.Engine {
			facts = append(facts, events.SandboxResumed{SandboxID: sb.ID})
		}
		stood := max(0, t.w.deps.Now().Sub(t.Session.Run.PausedAt).Milliseconds())
		if err := t.AppendFacts(ctx, append(facts, events.ExecutionResumed{PausedMs: uint32(stood)})...); err != nil { //nolint:gosec // no pause lasts 49 days: sessions end before
			return err
		}
	}
	return nil
}

// pauseIfRequested pauses the sandbox and returns errPaused, if a control has requested a pause. While a model request is open, which would
// time out during the pause, it does nothing, and the next beat tries again. If the provider cannot pause sandboxes, it records that once.
func (f *follower) pauseIfRequested(ctx context.Context) error {
	if !f.life.ShouldBePaused(f.ID) || f.ended != nil || f.queried && !f.accepted {
		return nil
	}
	p, ok := f.w.deps.Sandbox.(sandbox.Pauser)
	if !ok {
		if f.pauseRefused {
			return nil
		}
		f.pauseRefused = true
		return f.flushFacts(ctx, events.Error{Code: "PAUSE_UNSUPPORTED", Message: "sandboxes of provider " + f.w.cfg.Provider + " cannot be paused; the execution goes on"})
	}
	id := f.Session.Run.Sandbox.ID
	if n, err := f.w.proxy.OpenModelRequests(ctx, id); err != nil || n > 0 {
		return nil // tried again with the next beat
	}
	if err := f.commits.Flush(ctx); err != nil {
		return err
	}
	f.closeAgentStream()
	if err := p.Pause(ctx, id); err != nil {
		return fmt.Errorf("pause sandbox %s: %w", id, err)
	}
	if err := f.AppendFacts(ctx, events.SandboxPaused{SandboxID: id}, events.ExecutionPaused{}); err != nil {
		return err
	}
	return errPaused
}
