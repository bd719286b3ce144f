package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/alecthomas/kong"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
)

// waitFlag is the flag --wait, which may have a time limit as its value: --wait=30s.
type waitFlag struct {
	set   bool
	limit time.Duration // 0 for none
}

// Decode implements kong.MapperValue.
func (w *waitFlag) Decode(ctx *kong.DecodeContext) error {
	w.set = true
	if ctx.Scan.Peek().Type != kong.FlagValueToken {
		return nil
	}
	text := fmt.Sprint(ctx.Scan.Pop().Value)
	limit, err := time.ParseDuration(text)
	if err != nil || limit <= 0 {
		return fmt.Errorf("%.100q is not a time such as 30s", text)
	}
	w.limit = limit
	return nil
}

// IsBool returns true: kong then accepts the flag without a value.
func (w *waitFlag) IsBool() bool { return true }

// checkWait returns a usage error if --wait does not fit the other flags.
func (c *runCommand) checkWait() error {
	switch {
	case !c.Wait.set:
		return nil
	case !c.JSON:
		return usageError("wait: use it with --json; without --json, spool run shows the query until it ends anyway")
	case c.Detach:
		return usageError("wait: --wait and --detach exclude each other")
	}
	return nil
}

// errWaitTimeout is the cause of a context that has ended because the time limit of --wait has passed.
var errWaitTimeout = errors.New("the time of --wait is up")

// withWaitLimit returns a context that also ends when the time limit of --wait has passed.
func (r *queryRun) withWaitLimit(ctx context.Context) (context.Context, context.CancelFunc) {
	if r.cmd.Wait.limit == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeoutCause(ctx, r.cmd.Wait.limit, errWaitTimeout)
}

// printResult prints the ids, the execution and the cursor as one JSON object, as a gateway answers a request with the
// parameter wait. It returns the error that sets the exit code for the phase of the execution.
func (r *queryRun) printResult(ctx context.Context, accepted *spoolv1.StartExecutionResponse) error {
	x, err := r.client.Load().Executions.GetExecution(ctx, &spoolv1.GetExecutionRequest{ExecutionId: accepted.ExecutionId, MinPosition: r.watcher.position})
	if err != nil {
		return err
	}
	accepted.Execution, accepted.Cursor = x, &r.watcher.cursor
	if err := r.app.printJSON(json.RawMessage(wirejson.Marshal(accepted))); err != nil {
		return err
	}
	switch x.Phase {
	case "completed":
		return nil
	case "failed":
		return queryFailedError(x.GetCode(), x.GetMessage())
	case "cancelled":
		return &exitError{code: ExitCancelled}
	}
	return &exitError{ExitTimeout, fmt.Errorf("wait: the query has not ended within %s; follow it with `spool attach %s`", r.cmd.Wait.limit, accepted.SessionId)}
}
