package worker

import (
	"context"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/maintenance"
)

// startMaintenance starts a pass of maintenance if one is due: workspace changes, snapshots, health checks and egress usage. It starts none
// while a commit is in flight, or after the turn has ended.
func (f *follower) startMaintenance() {
	if !f.commits.IsIdle() || f.ended != nil {
		return
	}
	f.maintenance.StartPass(f.ctx, maintenance.TurnState{Session: f.Session, Life: f.life, Epoch: f.Epoch, Link: f.agent.Link, Accepted: f.accepted})
}

// recordMaintenance appends the events of a finished pass of maintenance, and the usage that the egress proxy has reported. It logs the
// error of the pass. If the proxy has lost the agent's MCP servers in a restart, it registers them again.
func (f *follower) recordMaintenance(ctx context.Context, p maintenance.PassResult) error {
	f.maintenance.FinishPass(p)
	if p.Err != nil && ctx.Err() == nil {
		f.Log.Warn("the maintenance of the workspace, or of the egress proxy's journal, failed; trying again", "error", p.Err)
	}
	list := append(f.NewEvents(p.Facts...), f.meter.EventsOfLines(p.Lines)...)
	if len(list) == 0 {
		return nil
	}
	if err := f.commits.Flush(ctx); err != nil {
		return err
	}
	_ = f.checkBudgets(list) // handleLoadedLife logs the error
	if err := f.AppendEvents(ctx, list); err != nil {
		return err
	}
	if len(p.Lines) > 0 {
		f.w.proxy.Acknowledge(ctx, f.Session.Run)
	}
	if f.meter.HasForgottenServers(p.Lines) {
		f.Log.Warn("the egress proxy has restarted without the agent's MCP servers: they are registered again")
		return f.w.sandboxes.RetryWhileUnavailable(ctx, f.agent.Sandbox, func() error { return f.meter.Register(ctx, f.agent.Sandbox) })
	}
	return nil
}

// flushFacts stores the pending events of the journal, and then facts about the execution.
func (f *follower) flushFacts(ctx context.Context, facts ...events.Payload) error {
	if err := f.commits.Flush(ctx); err != nil {
		return err
	}
	return f.AppendFacts(ctx, facts...)
}
