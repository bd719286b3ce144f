package command

import (
	"context"
	"fmt"
	"iter"
	"time"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/pkg/events"
)

type executionsCommand struct {
	Ls     executionsLs     `cmd:"" help:"List executions, newest first, or those of a session in their order."`
	Show   executionsShow   `cmd:"" help:"Show an execution."`
	Cancel executionsCancel `cmd:"" help:"Cancel executions: a queued one at once, a running one within ten seconds."`

	Pause     executionsPause     `cmd:"" help:"Pause running executions; their processes keep their memory."`
	Resume    executionsResume    `cmd:"" help:"Resume paused executions."`
	Terminate executionsTerminate `cmd:"" help:"Terminate executions at once, with their sandboxes."`
}

type executionsLs struct {
	server
	Session string `placeholder:"SESSION" help:"Only executions of this session."`
	Phase   string `enum:",queued,starting,running,paused,completed,failed,cancelled" default:"" help:"Only executions in this phase: queued, starting, running, paused, completed, failed or cancelled."`
	filterFlags
	Limit int `default:"50" help:"Maximum number of entries; 0 means all."`
}

// Run lists executions.
func (c *executionsLs) Run(a *app) error {
	if c.Limit < 0 {
		return usage("limit: %d is negative; 0 means all", c.Limit)
	}
	if c.Session != "" {
		if err := checkID("session", events.KindSession, c.Session); err != nil {
			return err
		}
		if c.given() {
			return usage("session: a session's executions are listed in their order, all or in one phase; leave the other flags out")
		}
	}
	ctx, cancel := a.interruptible()
	defer cancel()
	cl, err := c.connect(ctx, a)
	if err != nil {
		return err
	}
	defer cl.Close()
	items := cl.Executions(ctx, c.filter(c.Phase))
	if c.Session != "" {
		items = inPhase(cl.SessionExecutions(ctx, c.Session), c.Phase)
	}
	return executionsTable(a, c.JSON, c.Limit, items)
}

// inPhase returns the executions in a phase, or all for "".
func inPhase(items iter.Seq2[client.Doc[client.Execution], error], phase string) iter.Seq2[client.Doc[client.Execution], error] {
	return func(yield func(client.Doc[client.Execution], error) bool) {
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

func executionsTable(a *app, asJSON bool, limit int, items iter.Seq2[client.Doc[client.Execution], error]) error {
	return list(a, asJSON, limit, items,
		[]any{"EXECUTION", "SESSION", "PHASE", "TOOK", "TOKENS IN", "OUT", "QUEUED"},
		func(x client.Execution) []any {
			u := x.Usage
			return []any{x.ID, x.SessionID, executionState(x), took(x), u.InputTokens + u.CacheReadTokens + u.CacheWriteTokens, u.OutputTokens, whenP(x.QueuedAt)}
		})
}

type executionsShow struct {
	server
	Execution string `arg:"" help:"The execution's id."`
}

// Run shows one execution.
func (c *executionsShow) Run(a *app) error {
	if err := checkID("execution", events.KindExecution, c.Execution); err != nil {
		return err
	}
	ctx, cancel := a.interruptible()
	defer cancel()
	cl, err := c.connect(ctx, a)
	if err != nil {
		return err
	}
	defer cl.Close()
	doc, err := cl.Execution(ctx, c.Execution)
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(doc)
	}
	x := doc.Value
	err = fields(a, []any{"execution", x.ID}, []any{"session", x.SessionID}, []any{"query", beginning(x.Query)},
		[]any{"agent", x.Agent}, []any{"instance", x.Instance}, []any{"phase", executionState(x)}, []any{"message", x.Message},
		[]any{"attempt", x.Attempt}, []any{"executor", x.Executor}, []any{"model", x.Model}, []any{"took", took(x)},
		[]any{"tokens", fmt.Sprintf("%d in (%d from cache, %d into it), %d out", x.Usage.InputTokens, x.Usage.CacheReadTokens, x.Usage.CacheWriteTokens, x.Usage.OutputTokens)},
		[]any{"cost", fmt.Sprintf("$%.4f", x.CostUSD)}, []any{"sandbox time", sandboxTime(x.SandboxMs, x.SandboxUSD)}, []any{"queued", whenP(x.QueuedAt)}, []any{"ended", whenP(x.EndedAt)}, []any{"result", x.Result})
	if err != nil || len(x.Metered) == 0 {
		return err
	}
	fmt.Fprintln(a.Out)
	table := newTable(a)
	cells(table, []any{"METERED AT", "MODEL", "REQUESTS", "FAILED", "TOKENS IN", "OUT", "COST"})
	for _, m := range x.Metered {
		cost := "no price"
		if m.Prices != "" {
			cost = fmt.Sprintf("$%.4f", m.CostUSD)
		}
		u := m.Usage
		cells(table, []any{m.Provider, m.Model, m.Requests, m.Failed, u.InputTokens + u.CacheReadTokens + u.CacheWriteTokens, u.OutputTokens, cost})
	}
	return table.Flush()
}

type executionsCancel struct {
	server
	Executions []string `arg:"" name:"execution" help:"Ids of the executions."`
}

// Run cancels executions.
func (c *executionsCancel) Run(a *app) error {
	return c.each(a, events.KindExecution, "execution", c.Executions, "requested to cancel", func(ctx context.Context, cl *client.Client, id string) (any, error) {
		return cl.CancelExecution(ctx, id)
	})
}

type executionsPause struct {
	server
	Executions []string `arg:"" name:"execution" help:"Ids of the executions."`
}

// Run pauses executions.
func (c *executionsPause) Run(a *app) error {
	return c.control(a, "pause", "requested to pause", c.Executions)
}

type executionsResume struct {
	server
	Executions []string `arg:"" name:"execution" help:"Ids of the executions."`
}

// Run resumes executions.
func (c *executionsResume) Run(a *app) error {
	return c.control(a, "resume", "requested to resume", c.Executions)
}

type executionsTerminate struct {
	server
	Executions []string `arg:"" name:"execution" help:"Ids of the executions."`
}

// Run terminates executions and their sandboxes.
func (c *executionsTerminate) Run(a *app) error {
	return c.control(a, "terminate", "requested to terminate", c.Executions)
}

func (s server) control(a *app, what, done string, ids []string) error {
	return s.each(a, events.KindExecution, "execution", ids, done, func(ctx context.Context, cl *client.Client, id string) (any, error) {
		return cl.Control(ctx, id, what)
	})
}

func executionState(x client.Execution) string {
	switch {
	case x.Code != "":
		return x.Phase + " (" + x.Code + ")"
	case x.Reason != "":
		return x.Phase + " (" + x.Reason + ")"
	}
	return x.Phase
}

func took(x client.Execution) string {
	if x.DurationMs == 0 {
		return ""
	}
	return (time.Duration(x.DurationMs) * time.Millisecond).String()
}

func whenP(t *time.Time) string {
	if t == nil {
		return ""
	}
	return when(*t)
}
