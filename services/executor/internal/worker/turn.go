package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/agents"
	"github.com/spoolhq/spool/services/executor/internal/budgets"
	"github.com/spoolhq/spool/services/executor/internal/handling"
	"github.com/spoolhq/spool/services/executor/internal/link"
	"github.com/spoolhq/spool/services/executor/internal/permits"
	"github.com/spoolhq/spool/services/executor/internal/references"
	"github.com/spoolhq/spool/services/executor/internal/translate"
)

// A turn is one claimed execution. The goroutine of its job's delivery runs it.
type turn struct {
	w *Worker
	// l is the session as this turn last loaded or stored it. Only the turn's goroutine reads and writes it. An append that
	// runs in another goroutine uses a copy and returns the new state; until then l is the last stored state.
	l         eventlog.Loaded
	execution string
	epoch     uint64
	claimedAt time.Time // when an executor first claimed the execution
	changed   <-chan struct{}
	slot      *slot
	log       *slog.Logger

	agent        *agents.Agent // nil until attached
	attempt      uint32        // number of the attempt that runs or is next
	message      events.MessageAccepted
	translator   *translate.Translator
	pausedFor    time.Duration        // time for which the execution was paused
	creating     string               // id of the sandbox that this turn has recorded as being created
	resolved     *references.Resolved // nil until resolve has returned
	limits       budgets.Limits       // as last read
	registered   budgets.Limits       // as last registered at the egress proxy
	unregistered bool                 // the egress proxy knows that the execution does not run any more
	usage        budgets.Tracker

	sockets []string // of the MCP servers in containers, in their order

	authority string // PEM: the certificate that the egress proxy returned when the sandbox was last registered
}

func newTurn(w *Worker, l eventlog.Loaded, b *handling.Session) *turn {
	execution := l.Run.Execution
	return &turn{
		w: w, l: l, execution: execution, epoch: l.Run.Epoch, claimedAt: l.Run.ClaimedAt, changed: b.Changed(),
		log: w.deps.Logger.With("session", l.ID, "execution", execution, "epoch", l.Run.Epoch),
	}
}

// run runs the execution, and returns nil when it has ended.
func (t *turn) run(ctx context.Context) (err error) {
	defer func() { t.releaseAgent(err) }()
	defer func() {
		// A claim does not count as failed because this executor stops or has no slot.
		if errors.Is(err, errStopping) || errors.Is(err, permits.ErrNoneFree) || err != nil && ctx.Err() != nil {
			t.recordHandedOver(ctx)
		}
	}()
	if t.l.Run.Exhausted() {
		return t.stopAndFail(ctx, run.ClaimsExhausted())
	}
	if t.message, err = t.w.deps.Sessions.Message(ctx, t.l, t.l.Life.Active); err != nil {
		return err
	}
	if err := t.recordResumed(ctx); err != nil {
		return err
	}
	if err := t.resolve(ctx); err != nil {
		var wrong *references.Error
		if errors.As(err, &wrong) {
			return t.stopAndFail(ctx, wrong.Failed())
		}
		return err
	}
	if t.limits, err = t.currentLimits(ctx, t.l.Life); err != nil {
		return err
	}
	for {
		if c := t.control(); c.N > 0 && (c.Kind == session.Terminate || t.l.Run.Sandbox.Journal == "" || t.w.deps.Now().Before(t.l.Run.NotBefore)) {
			return t.cancelled(ctx)
		}
		err := t.runAttempt(ctx)
		var died *deathError
		switch {
		case errors.As(err, &died):
		case errors.Is(err, agents.ErrLost):
			died = &deathError{death{code: codeSandboxLost, message: err.Error()}}
			t.log.Warn("the sandbox was lost in mid-execution", "sandbox", t.l.Run.Sandbox.ID, "error", err)
		default:
			return err
		}
		if err := t.recordDeath(ctx, died.death); err != nil || t.l.Run.Ended(t.execution) {
			return err
		}
		if !t.slot.acquire() {
			return permits.ErrNoneFree // the attempt's death is recorded: the next attempt waits for a slot
		}
	}
}

// runAttempt runs an attempt, or follows one that runs already. It returns nil when the execution has ended. After a *deathError or an
// error that wraps agents.ErrLost another attempt may follow.
func (t *turn) runAttempt(ctx context.Context) error {
	if err := t.attach(ctx); err != nil {
		var wrong *references.Error
		if errors.As(err, &wrong) {
			return t.stopAndFail(ctx, wrong.Failed())
		}
		if errors.Is(err, errCancelled) {
			return t.cancelled(ctx)
		}
		var broken *sandboxError
		if errors.As(err, &broken) {
			failed := events.ExecutionFailed{Code: broken.code(), Message: broken.Error()}
			if broken.remains {
				return t.stopAndFail(ctx, failed)
			}
			return t.fail(ctx, failed, events.SandboxFailed{SandboxID: broken.id, Code: broken.code(), Message: broken.Error()})
		}
		return err
	}
	if t.control().N > 0 && !t.agent.MayBeRunning(t.execution, t.l.Run.Sandbox.N) {
		return t.cancelled(ctx)
	}
	return t.follow(ctx)
}

// cancelled ends an execution as its control demands. Either nothing of it runs, or its sandbox is terminated with it, for which the
// runner is not needed.
func (t *turn) cancelled(ctx context.Context) error {
	c, sb := t.control(), t.l.Run.Sandbox
	outcome := events.ExecutionCancelled{Reason: c.Reason}
	if c.Kind != session.Terminate || sb.ID == "" || sb.Engine != t.w.cfg.Engine {
		return t.fail(ctx, outcome)
	}
	t.detach()
	if err := t.w.sandboxes.Terminate(ctx, sb.ID, false); err != nil {
		return fmt.Errorf("end sandbox %s: %w", sb.ID, err)
	}
	return t.fail(ctx, outcome, events.SandboxTerminated{SandboxID: sb.ID, Reason: c.Reason, Kept: true})
}

// control returns the control of this execution in the session's life, as last loaded.
func (t *turn) control() session.Control { return t.l.Life.ControlOf(t.execution) }

// query returns the query that starts the execution in the runner.
func (t *turn) query() *runner.Query {
	launch := t.w.cfg.Agent(t.l.Life.Architecture, t.l.Life.Options)
	q := &runner.Query{
		SessionID: t.l.ID, ExecutionID: t.execution, Attempt: t.attempt,
		Architecture: t.l.Life.Architecture, Model: launch.Model, ModelSet: launch.Set,
		Content: t.message.Content, Parts: t.message.Parts,
		Policy: runner.PolicyWorkspace, Env: launch.Env, Command: launch.Command, Pace: t.w.cfg.Pace,
	}
	q.Resume, q.Fork = t.conversation()
	t.resolved.AddTo(q, t.w.deps.Egress != nil, t.sockets)
	if t.resolved.InspectsRequests {
		q.Authority = t.authority
	}
	return q
}

// conversation returns the conversation that the agent continues if its process is gone: its own session; in a fork whose agent has none
// yet, a copy of the session that the fork began with; or a copy of the transcript that the session began with.
func (t *turn) conversation() (resume string, fork *runner.Fork) {
	if own := t.l.Run.AgentSession; own != "" {
		return own, nil
	}
	if f := t.l.Life.Fork; f != nil && f.AgentSessionID != "" {
		return f.AgentSessionID, &runner.Fork{Anchor: f.Anchor}
	}
	if p := t.l.Life.Transcript; p != nil {
		return p.AgentSessionID, &runner.Fork{Provided: true}
	}
	return "", nil
}

// append appends events of this executor or of the journal, in as many commits as it needs. No other append of the turn may be running.
func (t *turn) append(ctx context.Context, list []events.Event) error {
	stored, err := t.appendTo(ctx, t.l, list)
	t.setStored(stored)
	return err
}

// setStored sets the state that an append returned. The session's life stays: no append of a turn changes it.
func (t *turn) setStored(stored eventlog.Loaded) { t.l.RunHead, t.l.Run = stored.RunHead, stored.Run }

// appendTo appends events to the runs of l, in as many commits as it needs, and returns the state after the last commit that was stored,
// also with an error. It does not use t.l, so that it may run in another goroutine.
func (t *turn) appendTo(ctx context.Context, l eventlog.Loaded, list []events.Event) (eventlog.Loaded, error) {
	d, err := t.w.runlog.Decide(l.Run, run.Record{Epoch: t.epoch, Events: list})
	if err != nil || len(d.Events) == 0 { // the session has moved on, and no event applies any more
		return l, err
	}
	return t.w.runlog.AppendAll(ctx, l, d, t.log)
}

// appendFacts appends facts about this execution.
func (t *turn) appendFacts(ctx context.Context, facts ...events.Payload) error {
	return t.append(ctx, t.newEvents(facts))
}

// newEvents returns facts about this execution as events.
func (t *turn) newEvents(list []events.Payload) []events.Event {
	return t.w.runlog.Events(t.execution, list...)
}

// fail ends the execution with an outcome that is not from the journal. The facts are stored together with the end.
func (t *turn) fail(ctx context.Context, outcome events.Payload, with ...events.Payload) error {
	return t.end(ctx, run.End{Meta: t.w.runlog.Meta(), Outcome: outcome, With: t.newEvents(with)})
}

// end completes the open blocks with the content that is known, and appends the terminal event, in as many commits as it needs.
func (t *turn) end(ctx context.Context, e run.End) error {
	e.Epoch, e.ExecutionID = t.epoch, t.execution
	t.unregister(ctx)
	var err error
	if e.Blocks, err = t.openBlocks(ctx, e.Before); err != nil {
		return err
	}
	d, err := t.w.runlog.Decide(t.l.Run, e)
	if err != nil {
		return err
	}
	stored, err := t.w.runlog.AppendAll(ctx, t.l, d, t.log)
	t.setStored(stored)
	if err != nil {
		return err
	}
	t.log.Info("execution ended", "phase", t.l.Run.Phase, "sandbox", t.l.Run.Sandbox.ID)
	return nil
}

// openBlocks returns the blocks that are open in the log, or opened by unstored events, with their content as far as the log and the stream
// DELTAS have it.
func (t *turn) openBlocks(ctx context.Context, unstored []events.Event) (map[string]events.Block, error) {
	blocks, err := t.w.deps.Sessions.OpenBlocks(ctx, t.l)
	if err != nil {
		return nil, err
	}
	for _, e := range unstored {
		switch d := e.Data.(type) {
		case events.BlockStart:
			if d.Block.Status == events.StatusPending {
				blocks[d.Block.ID] = d.Block
			}
		case events.BlockComplete:
			delete(blocks, d.Block.ID)
		}
	}
	if len(blocks) == 0 {
		return blocks, nil
	}
	since := t.w.deps.Now()
	for _, b := range blocks {
		if b.Time.Before(since) {
			since = b.Time
		}
	}
	texts, err := t.w.deps.Deltas.Texts(ctx, t.l.Tenant, t.l.ID, since.Add(-time.Minute))
	if err != nil {
		// Without the text the blocks are completed all the same.
		t.log.Warn("the text of open blocks could not be read", "error", err)
	}
	for id, b := range blocks {
		switch b.Kind {
		case events.KindAssistantText, events.KindThinking:
			b.Content = texts[id]
		case events.KindToolResult:
			b.Output = texts[id]
		}
		blocks[id] = b
	}
	return blocks, nil
}

// releaseAgent keeps the agent warm for the next turn, or closes its stream if the turn failed.
func (t *turn) releaseAgent(err error) {
	if t.agent == nil {
		return
	}
	if err == nil && t.agent.IsAlive() {
		if t.translator != nil { // nil if the turn failed before it read a line
			t.agent.Last = t.translator.Last
		}
		t.w.agents.Rest(t.agent, time.Duration(t.l.Life.Options.HealthIntervalMs)*time.Millisecond)
		return
	}
	t.detach()
}

// detach closes the stream to the agent. The agent stays.
func (t *turn) detach() {
	if t.agent != nil {
		t.w.agents.Remove(t.agent)
		t.agent.Link.Close()
		t.agent = nil
	}
}

// reattach opens a new stream to the same runner, after the last line that was read.
func (t *turn) reattach(ctx context.Context) error {
	a := t.agent
	a.Link.Close()
	next, err := t.w.dialer.Dial(ctx, t.l.Run.Sandbox, t.ref(), runner.Attach{Epoch: t.epoch, After: t.translator.Last})
	if errors.Is(err, link.ErrFenced) {
		return fmt.Errorf("%w: %w", run.ErrFenced, err)
	}
	if err != nil {
		return err
	}
	t.w.agents.Remove(a)
	t.agent = next
	t.w.agents.Use(next, t.epoch)
	return nil
}
