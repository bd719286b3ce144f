package worker

import (
	"context"
	"errors"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/services/executor/internal/sandboxes"
)

// stopAndFail stops the agent, which may run since an earlier claim, and fails the execution. If the runner does not obey, the sandbox is ended and its
// workspace kept. If that fails too, the terminal event says that the agent could not be stopped.
func (t *turn) stopAndFail(ctx context.Context, failed events.ExecutionFailed) error {
	if !t.Session.Run.TakenOver() {
		return t.fail(ctx, failed)
	}
	t.detach()
	sb := t.Session.Run.Sandbox
	err := t.w.dialer.Stop(ctx, sb, t.Ref(), t.Epoch)
	switch {
	case errors.Is(err, run.ErrFenced):
		return err
	case ctx.Err() != nil:
		return ctx.Err()
	case err == nil:
		return t.fail(ctx, failed)
	}
	t.Log.Warn("the runner does not stop its agent: the sandbox is ended", "sandbox", sb.ID, "error", err)
	if sb.Engine != t.w.cfg.Engine || sandboxes.Unavailable(err) {
		return t.fail(ctx, failed.NotStopped(err))
	}
	if err := t.Refresh(ctx); err != nil { // another executor may have claimed since, and ended the stream
		return err
	}
	if terr := t.w.sandboxes.Terminate(ctx, sb.ID, false); terr != nil {
		return t.fail(ctx, failed.NotStopped(errors.Join(err, terr)))
	}
	return t.fail(ctx, failed, events.SandboxTerminated{SandboxID: sb.ID, Reason: "unhealthy", Kept: true})
}

// recordHandedOver records that the turn ends because this executor stops, so that its claim does not count as one without progress. If that
// fails, the claim counts until the next executor attaches.
func (t *turn) recordHandedOver(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
	defer cancel()
	if t.Session.Run.Over() {
		return
	}
	if err := t.AppendFacts(ctx, events.ExecutionHandedOver{Epoch: t.Epoch}); err != nil && !errors.Is(err, run.ErrFenced) {
		t.Log.Warn("the log does not say that the execution is handed over", "error", err)
	}
}
