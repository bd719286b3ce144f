package worker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/agents"
	"github.com/spoolhq/spool/services/executor/internal/budgets"
	"github.com/spoolhq/spool/services/executor/internal/commits"
	"github.com/spoolhq/spool/services/executor/internal/controls"
	"github.com/spoolhq/spool/services/executor/internal/link"
	"github.com/spoolhq/spool/services/executor/internal/maintenance"
	"github.com/spoolhq/spool/services/executor/internal/permits"
	"github.com/spoolhq/spool/services/executor/internal/stopping"
	"github.com/spoolhq/spool/services/executor/internal/translate"
)

const (
	// runnerCallTimeout is the maximum time to wait for a runner's reply to a command.
	runnerCallTimeout = 10 * time.Second
	// maxBusyKills is the maximum number of times that a turn kills another execution that its runner runs.
	maxBusyKills = 3
	// flushTimeout is the time limit of the last commit of a turn when the executor stops.
	flushTimeout = 3 * time.Second
)

// codeRunnerBusy is the code of the error with which a runner refuses a query while it runs another execution.
const codeRunnerBusy = "BUSY"

// errUnresponsive is returned when the runner has not ended the turn after a kill.
var errUnresponsive = errors.New("the runner does not end the turn")

// A follower copies the lines of a runner's journal to the log until the turn ends, and sends commands to the runner. Only the goroutine of
// its loop uses its fields and those of the turn. Goroutines that the loop starts get copies, and send their results over a channel.
type follower struct {
	*turn
	ctx     context.Context
	waiting sync.WaitGroup

	commits *commits.Buffer
	ended   *translate.TurnEnd
	gap     string // message about lines that are missing in the journal; "" if none is missing
	done    bool   // the terminal event is stored

	startAfter uint64 // number of the line after which the query is sent
	queried    bool   // the query was sent, or need not be sent
	accepted   bool   // the runner has accepted the query
	killFirst  bool   // the runner runs another execution, which has to be killed before the query is sent
	busyCount  int    // number of times that the runner refused the query because it runs another execution

	adopted          bool // the runner was already running the execution when it sent its hello
	attachedRecorded bool // execution_attached is in the log, or pending
	storeFull        bool // the pending events wait for room in the store
	fullRecorded     bool // the event about output that waits for room in the store is in the log, or pending
	replies          chan commandReply

	controls    *controls.Watch
	readingLife bool
	readAgain   bool // the life has to be read again
	lifeRead    chan lifeResult
	life        *session.State // as last loaded; it is replaced and never changed
	lifeSeq     uint64         // position of its last commit
	lifeAsOf    time.Time      // begin of the last load from the leader: life has everything that was stored before
	beats       uint64
	stop        stopping.Plan
	output      budgets.OutputMeter

	maintenance  *maintenance.Maintainer
	pauseRefused bool // the log says that the sandbox cannot be paused

	approvals verdictQueue
}

// A commandReply is a runner's reply to a command, or the error of the call.
type commandReply struct {
	op   runner.Op
	link *link.Link // over which the command was sent
	err  error
}

// followJournal copies the runner's journal to the log until the terminal event is stored, and then returns nil. The error wraps
// agents.ErrLost, run.ErrFenced or permits.ErrStopping, or is an error of the log.
func (t *turn) followJournal(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	f := t.newFollower(ctx)
	defer f.close(cancel)
	f.readHello()
	f.checkRestoredLoops()
	beat := time.NewTicker(t.w.cfg.Beat)
	defer beat.Stop()
	for {
		f.readLines()
		if f.gap != "" {
			return f.abortTurn(ctx, events.ExecutionFailed{Code: translate.CodeJournalGap, Message: f.gap})
		}
		if f.ended != nil && f.commits.IsIdle() {
			return f.finishTurn(ctx)
		}
		f.recordAttached()
		f.startCommit()
		if err := f.sendQuery(ctx); err != nil || f.done {
			return err
		}
		if err := f.takeStopStep(); err != nil {
			return f.abortTurn(ctx, f.stop.TerminalEvent(events.Usage{}))
		}
		f.sendVerdicts()
		if err := f.pauseIfRequested(ctx); err != nil {
			return err
		}
		f.startMaintenance()
		if err := f.waitForEvent(ctx, beat.C); err != nil || f.done {
			return err
		}
	}
}

// newFollower returns a follower for the runner of the turn's agent. The caller must call close.
func (t *turn) newFollower(ctx context.Context) *follower {
	f := &follower{
		turn: t, ctx: ctx, replies: make(chan commandReply, 8), lifeRead: make(chan lifeResult, 1),
		commits: commits.New(t.Execution, t.w.cfg.Window), stop: stopping.New(t.w.cfg.KillAfter),
		output:   t.meterOutput(),
		controls: t.w.controls.Watch(t.Session.LifeHead), life: &t.Session.Life, lifeSeq: t.Session.LifeHead.Seq,
		maintenance: maintenance.New(t.w.maintenance, t.meter),
		approvals:   newVerdictQueue(t.Session.Run.Approved),
	}
	f.stop.SetControl(t.Control(), t.deadline(), t.w.deps.Now())
	return f
}

// close ends the goroutines that the follower has started, and blocks until they have ended. If an append was running, close updates the
// turn's state with the commits that the append has stored.
func (f *follower) close(cancel context.CancelFunc) {
	cancel()
	f.waiting.Wait()
	f.controls.Close()
	f.maintenance.Close()
	f.commits.Close()
}

// waitForEvent blocks until something happens that the follower has to handle, and handles it: journal lines or the end of the stream, the
// result of a goroutine that the follower has started, a granted slot, the beat, a change of the session, or the stop of this executor. An
// error ends the follower's loop.
func (f *follower) waitForEvent(ctx context.Context, beat <-chan time.Time) error {
	select {
	case <-f.linesReady():
	case <-f.streamEnded():
		return f.reconnectRunner(ctx)
	case r := <-f.commits.Done():
		err := f.commits.FinishCommit(r)
		_ = f.checkBudgets(nil) // handleLoadedLife logs the error
		return err
	case <-f.commits.DueTimer():
	case r := <-f.replies:
		return f.handleReply(ctx, r)
	case v := <-f.approvals.sent:
		return f.handleVerdictSent(v)
	case release := <-f.approvals.granted:
		f.setSlotPermit(release)
	case l := <-f.lifeRead:
		return f.handleLoadedLife(l)
	case p := <-f.maintenance.Done():
		return f.recordMaintenance(ctx, p)
	case <-beat:
		f.handleBeat()
	case <-f.changed:
		f.loadLife(eventlog.LeaderOnly)
	case <-f.controls.Changed():
		f.loadLife(eventlog.LeaderOnly)
	case <-bus.Draining(f.ctx):
		return f.handOver(ctx)
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// linesReady returns a channel that receives a value when journal lines can be read. It returns nil, which never receives one, while isFull
// is true.
func (f *follower) linesReady() <-chan struct{} {
	if f.isFull() {
		return nil
	}
	return f.agent.Link.Ready()
}

// streamEnded returns a channel that is closed when the stream to the runner has ended. It returns nil, which is never closed, while isFull
// is true, so that the lines that have arrived are read first.
func (f *follower) streamEnded() <-chan struct{} {
	if f.isFull() {
		return nil
	}
	return f.agent.Link.Done()
}

// isFull reports whether the follower must not read further journal lines at present: the turn has ended, lines are missing, or too many
// events wait to be stored.
func (f *follower) isFull() bool { return f.ended != nil || f.gap != "" || f.commits.IsFull() }

// readHello evaluates the hello of the runner: it sets f.gap if journal lines are lost, and records whether the query has to be sent, and
// whether another execution must be killed before that.
func (f *follower) readHello() {
	f.queried, f.accepted, f.startAfter, f.killFirst = false, false, 0, false
	hello := f.agent.Hello
	if hello == nil {
		return
	}
	f.startAfter = hello.Last
	f.translator.Last = max(f.translator.Last, min(hello.First-min(hello.First, 1), f.Session.Run.Sandbox.N)) // the runner drops lines that are in the log
	if hello.First > f.translator.Last+1 {
		for _, r := range f.translator.TranslateMissing(hello.First-1, f.w.deps.Now().UTC()) {
			f.handleResult(r)
		}
	}
	switch hello.Status.ExecutionID {
	case "":
	case f.ID:
		f.queried, f.accepted, f.adopted = true, true, true
	default:
		f.killFirst = true
	}
}

// recordAttached records once that this executor follows a running agent that it took over, so that the claim counts as one with progress.
// It waits until the log has all journal lines that the runner's hello announced: if one of these lines crashes every executor, none of
// their claims counts as progress, and the execution fails in the end.
func (f *follower) recordAttached() {
	if f.Session.Run.Claims < 2 || !f.adopted || f.ended != nil || f.attachedRecorded || !f.commits.IsStored() || f.translator.Last < f.startAfter {
		return
	}
	f.attachedRecorded = true
	for _, e := range f.NewEvents(events.ExecutionAttached{Epoch: f.Epoch, SandboxID: f.Session.Run.Sandbox.ID}) {
		f.handleResult(translate.LineResult{Event: &e})
	}
}

// sendQuery sends the query that starts the execution in the runner, after the older journal lines were read. If the runner runs another
// execution, sendQuery first kills that. It returns permits.ErrNoPermit if no slot is free; another job then tries again.
func (f *follower) sendQuery(ctx context.Context) error {
	if f.queried || f.ended != nil || f.translator.Last < f.startAfter {
		return nil
	}
	if f.killFirst {
		f.queried = true
		f.sendCommand(runner.Command{Op: runner.OpKill, Epoch: f.Epoch})
		return nil
	}
	if !f.slot.TryAcquire() {
		return f.leaveWithoutSlot(ctx)
	}
	f.queried = true
	f.sendCommand(runner.Command{Op: runner.OpStart, Epoch: f.Epoch, Query: f.newQuery()})
	return nil
}

// leaveWithoutSlot ends a turn that has no slot and no running agent. If a control has stopped the execution, it cancels the execution.
// Otherwise it returns permits.ErrNoPermit, and the execution waits for a slot.
func (f *follower) leaveWithoutSlot(ctx context.Context) error {
	if err := f.commits.Flush(ctx); err != nil {
		return err
	}
	if f.Control().N > 0 {
		f.done = true
		return f.cancelExecution(ctx)
	}
	return permits.ErrNoPermit
}

// sendCommand sends a command to the runner in another goroutine. f.replies receives the reply, or an error if there is none within
// runnerCallTimeout.
func (f *follower) sendCommand(c runner.Command) {
	l := f.agent.Link
	f.waiting.Go(func() {
		ctx, cancel := context.WithTimeout(f.ctx, runnerCallTimeout)
		defer cancel()
		_, err := l.Call(ctx, c)
		select {
		case f.replies <- commandReply{c.Op, l, err}:
		case <-f.ctx.Done():
		}
	})
}

// handleRefusedQuery handles the refusal of the query, which fails the execution unless another attempt may succeed. If the runner runs
// another execution, the follower kills that one and sends the query again, up to maxBusyKills times. The error wraps agents.ErrLost after
// that, and if the runner is shutting down, because another executor is ending the sandbox.
func (f *follower) handleRefusedQuery(ctx context.Context, refused *runner.CommandError) error {
	switch refused.Code {
	case codeRunnerBusy:
		if f.busyCount++; f.busyCount <= maxBusyKills {
			f.killFirst, f.queried = true, false
			return nil
		}
	case runner.CodeStopping:
	default:
		return f.failRefused(ctx, refused)
	}
	if err := f.commits.Flush(ctx); err != nil {
		return err
	}
	return fmt.Errorf("%w: %w", agents.ErrLost, refused)
}

// handleReply handles the runner's reply to a command. An error ends the follower's loop.
func (f *follower) handleReply(ctx context.Context, r commandReply) error {
	if r.link != f.agent.Link {
		return nil // of an earlier stream
	}
	var refused *runner.CommandError
	switch {
	case errors.Is(r.err, link.ErrFenced):
		return fmt.Errorf("%w: %w", run.ErrFenced, r.err)
	case r.op == runner.OpKill && f.killFirst:
		// The other execution has ended, or could not be ended, which the reply to the query shows.
		f.killFirst, f.queried = false, false
		return nil
	case r.op == runner.OpStart && r.err == nil:
		f.accepted = true
		return nil
	case r.op == runner.OpStart && errors.As(r.err, &refused):
		return f.handleRefusedQuery(ctx, refused)
	case r.err == nil:
		return nil
	}
	f.Log.Warn("a command to the runner failed", "op", r.op, "error", r.err)
	f.stop.RecordUndelivered(r.op)
	if r.op == runner.OpStart {
		// The runner hangs or the stream is broken; the hello of a new stream shows which.
		f.agent.Link.Close()
	}
	return nil
}

// reconnectRunner opens a new stream to the runner after the stream has ended, and continues after the last journal line that was read. The
// error wraps run.ErrFenced or agents.ErrLost, or is an error of the log.
func (f *follower) reconnectRunner(ctx context.Context) error {
	f.readLines()
	if f.isFull() {
		return nil
	}
	if errors.Is(f.agent.Link.Err(), link.ErrFenced) {
		return fmt.Errorf("%w: %w", run.ErrFenced, link.ErrFenced)
	}
	if err := f.commits.AwaitCommit(ctx); err != nil {
		return err
	}
	wasAccepted := f.accepted
	if err := f.reopenAgentStream(ctx); err != nil {
		if errors.Is(err, agents.ErrLost) {
			if err := f.commits.Flush(ctx); err != nil {
				return err
			}
		}
		return err
	}
	f.readHello()
	if wasAccepted {
		// The query was accepted, so that its end is in the journal.
		f.queried, f.accepted = true, true
	}
	f.stop.RecordReconnected()
	f.approvals.markAllDue()
	return nil
}
