package command

import (
	"context"
	"errors"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
)

type executionsRecoverCommand struct {
	serverFlags
	variableFlags
	Detach    bool   `help:"Print the ids and exit without waiting for the end."`
	Execution string `arg:"" help:"The id of the failed execution."`
}

// Run continues a failed execution in a new execution, and shows the new one until its end. With c.Detach it only
// prints the ids.
func (c *executionsRecoverCommand) Run(a *app) error {
	if err := checkID("execution", events.KindExecution, c.Execution); err != nil {
		return err
	}
	variables, err := c.readVariables(a)
	if err != nil {
		return err
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		tip, err := c.sessionTip(ctx, cl)
		if err != nil {
			return err
		}
		doc, err := client.Call(ctx, cl.Executions.RecoverExecution, &spoolv1.RecoverExecutionRequest{ExecutionId: c.Execution, Environment: variables})
		switch {
		case err != nil:
			return err
		case c.Detach && c.JSON:
			return a.printJSON(doc)
		case c.Detach:
			_, err := terminal.Fprintf(a.Out, "session %s\nexecution %s\nfollow it with: spool attach %[1]s\n", doc.Value.SessionId, doc.Value.ExecutionId)
			return err
		}
		return c.followExecution(ctx, a, cl, doc.Value, tip)
	})
}

// sessionTip returns the seq of the last event in the session of the failed execution.
func (c *executionsRecoverCommand) sessionTip(ctx context.Context, cl *client.Client) (uint32, error) {
	x, err := cl.Executions.GetExecution(ctx, &spoolv1.GetExecutionRequest{ExecutionId: c.Execution})
	if err != nil {
		return 0, err
	}
	s, err := cl.Sessions.GetSession(ctx, &spoolv1.GetSessionRequest{SessionId: x.SessionId})
	return s.GetTip(), err
}

// followExecution shows the new execution, whose events follow seq tip, until its end.
func (c *executionsRecoverCommand) followExecution(ctx context.Context, a *app, cl *client.Client, accepted *spoolv1.RecoverExecutionResponse, tip uint32) (err error) {
	w := &sessionWatcher{app: a, client: cl, session: accepted.SessionId, only: accepted.ExecutionId, json: c.JSON}
	closeRenderer := w.startRenderer(ctx)
	defer func() { err = errors.Join(err, closeRenderer()) }()
	if w.renderer != nil {
		w.renderer.SetHint("Ctrl-C detaches; the agent continues")
	}
	end, err := w.followToEnd(ctx, tip)
	if err := errors.Join(err, closeRenderer()); err != nil {
		if errors.Is(err, errInterrupted) {
			terminal.Fprintf(a.Err, "spool: detached; follow it with `spool attach %s`\n", accepted.SessionId)
		}
		return err
	}
	if !c.JSON {
		terminal.Fprintf(a.Err, "execution %s continues %s\n", accepted.ExecutionId, c.Execution)
	}
	return executionEndError(a, c.JSON, end)
}
