package command

import (
	"context"
	"fmt"
	"iter"
	"time"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
)

type executionsCommand struct {
	Ls     executionsLsCommand     `cmd:"" help:"List executions, newest first, or those of a session in their order."`
	Show   executionsShowCommand   `cmd:"" help:"Show an execution."`
	Cancel executionsCancelCommand `cmd:"" help:"Cancel executions: a queued one at once, a running one within ten seconds."`

	Pause     executionsPauseCommand     `cmd:"" help:"Pause running executions; their processes keep their memory."`
	Resume    executionsResumeCommand    `cmd:"" help:"Resume paused executions."`
	Terminate executionsTerminateCommand `cmd:"" help:"Terminate executions at once, with their sandboxes."`
	Recover   executionsRecoverCommand   `cmd:"" help:"Continue the failed last execution of a session in a new execution; finished tool calls are kept."`
}

type executionsLsCommand struct {
	serverFlags
	Session string `placeholder:"SESSION" help:"Only executions of this session."`
	Phase   string `enum:",queued,starting,running,waiting_for_approval,paused,completed,failed,cancelled" default:"" help:"Only executions in this phase: queued, starting, running, waiting_for_approval, paused, completed, failed or cancelled."`
	filterFlags
	Limit int `default:"50" help:"Maximum number of entries; 0 means all."`
}

// Run lists executions.
func (c *executionsLsCommand) Run(a *app) error {
	if c.Limit < 0 {
		return usageError("limit: %d is negative; 0 means all", c.Limit)
	}
	if c.Session != "" {
		if err := checkID("session", events.KindSession, c.Session); err != nil {
			return err
		}
		if c.isSet() {
			return usageError("session: a session's executions are listed in their order, all or in one phase; leave the other flags out")
		}
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		items := client.List[*spoolv1.Execution](ctx, cl.Executions.ListExecutions, c.executionsRequest(c.Phase))
		if c.Session != "" {
			items = filterByPhase(sessionExecutions(ctx, cl, c.Session), c.Phase)
		}
		return printExecutions(a, c.JSON, c.Limit, items)
	})
}

// sessionExecutions yields the executions of a session in the order of their acceptance.
func sessionExecutions(ctx context.Context, cl *client.Client, session string) iter.Seq2[client.APIObject[*spoolv1.Execution], error] {
	return client.List[*spoolv1.Execution](ctx, cl.Executions.ListSessionExecutions, &spoolv1.ListSessionExecutionsRequest{SessionId: session})
}

// filterByPhase yields the executions of items that are in a phase, or all of them if phase is "".
func filterByPhase(items iter.Seq2[client.APIObject[*spoolv1.Execution], error], phase string) iter.Seq2[client.APIObject[*spoolv1.Execution], error] {
	return func(yield func(client.APIObject[*spoolv1.Execution], error) bool) {
		for d, err := range items {
			if err == nil && phase != "" && d.Value.Phase != phase {
				continue
			}
			if !yield(d, err) {
				return
			}
		}
	}
}

// printExecutions prints executions as a table, or as JSON.
func printExecutions(a *app, asJSON bool, limit int, items iter.Seq2[client.APIObject[*spoolv1.Execution], error]) error {
	return printList(a, asJSON, limit, items,
		[]any{"EXECUTION", "SESSION", "PHASE", "TOOK", "TOKENS IN", "OUT", "QUEUED"},
		func(x *spoolv1.Execution) []any {
			return []any{x.ExecutionId, x.SessionId, describeExecution(x), formatExecutionDuration(x), totalInputTokens(x.Usage), x.Usage.GetOutputTokens(), formatTime(x.QueuedAt)}
		})
}

// totalInputTokens returns the number of input tokens, including those that were read from and written to a cache.
func totalInputTokens(u *spoolv1.Usage) uint32 {
	return u.GetInputTokens() + u.GetCacheReadTokens() + u.GetCacheWriteTokens()
}

type executionsShowCommand struct {
	serverFlags
	Execution string `arg:"" help:"The execution's id."`
}

// Run shows one execution.
func (c *executionsShowCommand) Run(a *app) error {
	if err := checkID("execution", events.KindExecution, c.Execution); err != nil {
		return err
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error { return c.printExecution(ctx, a, cl) })
}

func (c *executionsShowCommand) printExecution(ctx context.Context, a *app, cl *client.Client) error {
	doc, err := client.Call(ctx, cl.Executions.GetExecution, &spoolv1.GetExecutionRequest{ExecutionId: c.Execution})
	if err != nil {
		return err
	}
	if c.JSON {
		return a.printJSON(doc)
	}
	x := doc.Value
	err = printFields(a, []any{"execution", x.ExecutionId}, []any{"session", x.SessionId}, []any{"query", titleExcerpt(x.Query)},
		[]any{"recovers", x.GetRecoveredFrom()}, []any{"agent", x.Agent}, []any{"instance", x.GetInstance()}, []any{"phase", describeExecution(x)}, []any{"waits for", describeWaiting(x.Waiting)}, []any{"message", x.GetMessage()},
		[]any{"attempt", x.Attempt}, []any{"executor", x.GetExecutor()}, []any{"model", x.GetModel()}, []any{"took", formatExecutionDuration(x)},
		[]any{"tokens", formatTokens(x.Usage)}, []any{"cost", formatCost(x.CostUsd)}, []any{"sandbox time", formatSandboxTime(x.SandboxMs, x.SandboxCostUsd)}, []any{"queued", formatTime(x.QueuedAt)}, []any{"ended", formatTime(x.EndedAt)}, []any{"result", x.GetResult()})
	if err != nil || len(x.Metered) == 0 {
		return err
	}
	terminal.Fprintln(a.Out)
	table := newTable(a)
	writeTableRow(table, []any{"METERED AT", "MODEL", "REQUESTS", "FAILED", "TOKENS IN", "OUT", "COST"})
	for _, m := range x.Metered {
		cost := "no price"
		if m.Prices != "" {
			cost = formatCost(m.CostUsd)
		}
		writeTableRow(table, []any{m.Provider, m.Model, m.Requests, m.Failed, totalInputTokens(m.Usage), m.Usage.GetOutputTokens(), cost})
	}
	return table.Flush()
}

type executionsCancelCommand struct {
	serverFlags
	Executions []string `arg:"" name:"execution" help:"Ids of the executions."`
}

// Run requests the cancellation of executions.
func (c *executionsCancelCommand) Run(a *app) error {
	return c.forEachID(a, events.KindExecution, "execution", c.Executions, "requested to cancel", func(ctx context.Context, cl *client.Client, id string) (any, error) {
		return client.Call(ctx, cl.Executions.CancelExecution, &spoolv1.CancelExecutionRequest{ExecutionId: id})
	})
}

type executionsPauseCommand struct {
	serverFlags
	Executions []string `arg:"" name:"execution" help:"Ids of the executions."`
}

// Run requests that executions pause.
func (c *executionsPauseCommand) Run(a *app) error {
	return c.forEachID(a, events.KindExecution, "execution", c.Executions, "requested to pause", func(ctx context.Context, cl *client.Client, id string) (any, error) {
		return client.Call(ctx, cl.Executions.PauseExecution, &spoolv1.PauseExecutionRequest{ExecutionId: id})
	})
}

type executionsResumeCommand struct {
	serverFlags
	Executions []string `arg:"" name:"execution" help:"Ids of the executions."`
}

// Run requests that paused executions continue.
func (c *executionsResumeCommand) Run(a *app) error {
	return c.forEachID(a, events.KindExecution, "execution", c.Executions, "requested to resume", func(ctx context.Context, cl *client.Client, id string) (any, error) {
		return client.Call(ctx, cl.Executions.ResumeExecution, &spoolv1.ResumeExecutionRequest{ExecutionId: id})
	})
}

type executionsTerminateCommand struct {
	serverFlags
	Executions []string `arg:"" name:"execution" help:"Ids of the executions."`
}

// Run requests the end of executions and of their sandboxes.
func (c *executionsTerminateCommand) Run(a *app) error {
	return c.forEachID(a, events.KindExecution, "execution", c.Executions, "requested to terminate", func(ctx context.Context, cl *client.Client, id string) (any, error) {
		return client.Call(ctx, cl.Executions.TerminateExecution, &spoolv1.TerminateExecutionRequest{ExecutionId: id})
	})
}

// formatTokens returns the numbers of tokens in u.
func formatTokens(u *spoolv1.Usage) string {
	return fmt.Sprintf("%d in (%d from cache, %d into it), %d out", u.GetInputTokens(), u.GetCacheReadTokens(), u.GetCacheWriteTokens(), u.GetOutputTokens())
}

// formatCost returns a cost in US dollars, such as $0.1250.
func formatCost(usd float64) string { return fmt.Sprintf("$%.4f", usd) }

// describeExecution returns the phase of an execution, and the reason if it has failed or was cancelled.
func describeExecution(x *spoolv1.Execution) string {
	switch {
	case x.GetCode() != "":
		return x.Phase + " (" + x.GetCode() + ")"
	case x.GetReason() != "":
		return x.Phase + " (" + x.GetReason() + ")"
	}
	return x.Phase
}

// describeWaiting returns a text about why an execution waits, since when, and what to do; "" for nil.
func describeWaiting(w *spoolv1.Waiting) string {
	if w == nil {
		return ""
	}
	text := w.Reason
	if w.Since != nil {
		text += " since " + formatTime(w.Since)
	}
	if w.Until != nil {
		text += " until " + formatTime(w.Until)
	}
	return text + ": " + w.Detail + " " + w.Remedy
}

// formatExecutionDuration returns the duration of an execution that has ended, or "".
func formatExecutionDuration(x *spoolv1.Execution) string {
	if x.DurationMs == 0 {
		return ""
	}
	return (time.Duration(x.DurationMs) * time.Millisecond).String()
}
