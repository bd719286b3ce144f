package worker

import (
	"context"
	"errors"
	"fmt"
	"strconv"
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
	"github.com/spoolhq/spool/services/executor/internal/link"
	"github.com/spoolhq/spool/services/executor/internal/permits"
	"github.com/spoolhq/spool/services/executor/internal/stopping"
	"github.com/spoolhq/spool/services/executor/internal/translate"
)

const (
	// pendingBytes is how much waits for the log before the runner has to.
	maxPending = 4 << 20
	// callWithin bounds the wait for a runner's reply.
	callTimeout = 10 * time.Second
	// busyPatience is how often what occupies the runner is ended.
	maxBusy = 3
	// flushWithin bounds the last commit of a holder that stops.
	flushTimeout = 3 * time.Second
)

// codeBusy is the code of a refusal while another execution runs.
const codeBusy = "BUSY"

// errStuck is a runner that does not even kill.
var errUnresponsive = errors.New("the runner does not end the turn")

// follower reads a runner's journal into the log until the turn ends. Only its loop reads
// and writes its fields, those of the turn included. The goroutines that the loop starts
// get copies of what they need, and send their results over a channel.
type follower struct {
	*turn
	ctx     context.Context
	waiting sync.WaitGroup

	pending     []events.Event
	pendingSize int
	ended       *translate.Ended
	gap         string // which lines of the journal are missing
	done        bool   // the terminal event is stored

	appending bool // a commit is in flight: the loop appends nothing until idle has taken its result
	appended  chan commitResult
	notBefore time.Time // of the next commit
	window    *time.Timer

	startAfter uint64 // number of the line after which the query is given
	queried    bool   // the query was given
	accepted   bool
	killFirst  bool // another execution occupies the runner
	busyCount  int  // how often the runner said so

	adopted          bool // the runner ran the execution already at the hello
	attachedRecorded bool // execution_attached is in the log, or on its way
	fullRecorded     bool // the log says, or is about to, that output waits for room in the store
	replies          chan reply

	readingLife bool
	lifeRead    chan lifeResult
	life        session.State // as last seen
	stop        stopping.Plan
	output      budgets.OutputMeter

	maintenance maintenance
}

// commitResult is the end of an append that ran beside the loop.
type commitResult struct {
	stored eventlog.Loaded // after the last commit that was stored, also with an error
	err    error
}

// reply is a runner's answer to a command.
type reply struct {
	op   runner.Op
	link *link.Link // that was asked
	err  error
}

// follow returns nil when the terminal event is stored. Its errors: agents.ErrLost,
// run.ErrFenced, errHandover, or what made the log unusable.
func (t *turn) follow(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	f := &follower{
		turn: t, ctx: ctx, appended: make(chan commitResult, 1), replies: make(chan reply, 8), lifeRead: make(chan lifeResult, 1),
		window: time.NewTimer(time.Hour), stop: stopping.New(t.w.cfg.KillAfter),
		output: t.meterOutput(),
		life:   t.l.Life, maintenance: newMaintenance(t.w.deps.Now()),
	}
	defer f.close(cancel)
	defer f.window.Stop()
	f.stop.Update(t.control(), t.deadline(), t.w.deps.Now())
	f.readHello()
	beat := time.NewTicker(t.w.cfg.Beat)
	defer beat.Stop()
	for {
		f.readLines()
		if f.gap != "" {
			return f.abort(ctx, events.ExecutionFailed{Code: translate.CodeGap, Message: f.gap})
		}
		if f.ended != nil && !f.appending {
			return f.finish(ctx)
		}
		f.recordAttached()
		f.startCommit()
		if err := f.sendQuery(ctx); err != nil || f.done {
			return err
		}
		if err := f.escalate(); err != nil {
			return f.abort(ctx, f.stop.Outcome(events.Usage{}))
		}
		if err := f.pause(ctx); err != nil {
			return err
		}
		f.maintenance.start(f)
		if err := f.wait(ctx, beat.C); err != nil || f.done {
			return err
		}
	}
}

// stopAll ends the goroutines of the loop and waits for them. What an append in flight
// has stored is part of the turn's state afterwards.
func (f *follower) close(cancel context.CancelFunc) {
	cancel()
	f.waiting.Wait()
	if f.appending {
		r := <-f.appended
		f.appendDone(r)
	}
}

// take ends the append in flight with its result.
func (f *follower) appendDone(r commitResult) {
	f.appending = false
	f.setStored(r.stored)
}

// wait waits for the next thing to happen.
func (f *follower) wait(ctx context.Context, beat <-chan time.Time) error {
	select {
	case <-f.linesReady():
	case <-f.streamEnded():
		return f.reconnect(ctx)
	case r := <-f.appended:
		f.appendDone(r)
		f.notBefore = time.Now().Add(f.w.cfg.Window)
		f.checkBudgets(nil)
		return r.err
	case <-f.window.C:
	case r := <-f.replies:
		return f.handleReply(ctx, r)
	case l := <-f.lifeRead:
		return f.updateLife(l)
	case r := <-f.maintenance.done:
		return f.maintenance.finish(ctx, f, r)
	case <-beat:
		f.readLife()
	case <-f.changed:
		f.readLife()
	case <-bus.Draining(f.ctx):
		return f.handover(ctx)
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// lines is signalled when there is something to read; nil while nothing may be.
func (f *follower) linesReady() <-chan struct{} {
	if f.isFull() {
		return nil
	}
	return f.agent.Link.Ready()
}

// over is closed when the stream has ended; nil while lines of it are to be read.
func (f *follower) streamEnded() <-chan struct{} {
	if f.isFull() {
		return nil
	}
	return f.agent.Link.Done()
}

func (f *follower) isFull() bool { return f.ended != nil || f.gap != "" || f.pendingSize >= maxPending }

// greet decides from the runner's hello whether the query is still to be given.
func (f *follower) readHello() {
	f.queried, f.accepted, f.startAfter, f.killFirst = false, false, 0, false
	hello := f.agent.Hello
	if hello == nil {
		return
	}
	f.startAfter = hello.Last
	f.translator.Last = max(f.translator.Last, min(hello.First-min(hello.First, 1), f.l.Run.Sandbox.N)) // the runner forgets what is in the log, and will not tell it again
	if hello.First > f.translator.Last+1 {
		for _, r := range f.translator.Missing(hello.First-1, f.w.deps.Now().UTC()) {
			f.handleResult(r)
		}
	}
	switch hello.Status.ExecutionID {
	case "":
	case f.execution:
		f.queried, f.accepted, f.adopted = true, true, true
	default:
		f.killFirst = true
	}
}

// attached says in the log, once, that this holder follows a running agent that it took
// over, when the log has what the runner's journal held at the hello. A holder that dies of
// what the journal holds does not come so far: its claim counts.
func (f *follower) recordAttached() {
	if f.l.Run.Claims < 2 || !f.adopted || f.ended != nil || f.attachedRecorded || f.appending || len(f.pending) > 0 || f.translator.Last < f.startAfter {
		return
	}
	f.attachedRecorded = true
	for _, e := range f.newEvents([]events.Payload{events.ExecutionAttached{Epoch: f.epoch, SandboxID: f.l.Run.Sandbox.ID}}) {
		f.handleResult(translate.Result{Event: &e})
	}
}

// start gives the query once the journal holds nothing older. It returns errFull when the turn has no slot and none is free.
func (f *follower) sendQuery(ctx context.Context) error {
	if f.queried || f.ended != nil || f.translator.Last < f.startAfter {
		return nil
	}
	if f.killFirst {
		f.queried = true
		f.send(runner.Command{Op: runner.OpKill, Epoch: f.epoch})
		return nil
	}
	if !f.slot.acquire() {
		return f.leaveWithoutSlot(ctx)
	}
	f.queried = true
	f.send(runner.Command{Op: runner.OpStart, Epoch: f.epoch, Query: f.query()})
	return nil
}

// leave ends a turn without a slot that finds nothing to follow: its execution is cancelled, if a control wants that,
// or waits for a slot.
func (f *follower) leaveWithoutSlot(ctx context.Context) error {
	if err := f.flush(ctx); err != nil {
		return err
	}
	if f.control().N > 0 {
		f.done = true
		return f.cancelled(ctx)
	}
	return permits.ErrNoneFree
}

// call sends a command without waiting for its reply.
func (f *follower) send(c runner.Command) {
	l := f.agent.Link
	f.waiting.Go(func() {
		ctx, cancel := context.WithTimeout(f.ctx, callTimeout)
		defer cancel()
		_, err := l.Call(ctx, c)
		select {
		case f.replies <- reply{c.Op, l, err}:
		case <-f.ctx.Done():
		}
	})
}

// answered acts on a runner's reply.
func (f *follower) handleReply(ctx context.Context, r reply) error {
	if r.link != f.agent.Link {
		return nil // of a stream that is no more
	}
	var refused *runner.Error
	switch {
	case errors.Is(r.err, link.ErrFenced):
		return fmt.Errorf("%w: %w", run.ErrFenced, r.err)
	case r.op == runner.OpKill && f.killFirst:
		// What occupied the runner is ended, or could not be: the start will tell.
		f.killFirst, f.queried = false, false
		return nil
	case r.op == runner.OpStart && r.err == nil:
		f.accepted = true
		return nil
	case r.op == runner.OpStart && errors.As(r.err, &refused):
		if refused.Code == codeBusy {
			if f.busyCount++; f.busyCount > maxBusy {
				if err := f.flush(ctx); err != nil {
					return err
				}
				return fmt.Errorf("%w: %w", agents.ErrLost, refused)
			}
			f.killFirst, f.queried = true, false
			return nil
		}
		return f.failRefused(ctx, refused)
	case r.err == nil:
		return nil
	}
	f.log.Warn("the runner did not take a command", "op", r.op, "error", r.err)
	f.stop.Undelivered(r.op)
	if r.op == runner.OpStart {
		// It hangs, or its stream is cut; a new stream's hello tells.
		f.agent.Link.Close()
	}
	return nil
}

// refused fails an execution that the runner would not begin.
func (f *follower) failRefused(ctx context.Context, why *runner.Error) error {
	if err := f.flush(ctx); err != nil {
		return err
	}
	f.done = true
	return f.fail(ctx, events.ExecutionFailed{Code: why.Code, Message: why.Message})
}

// idle waits for the append in flight. Whoever appends from the loop calls it first.
func (f *follower) awaitAppend(ctx context.Context) error {
	if !f.appending {
		return nil
	}
	select {
	case r := <-f.appended:
		f.appendDone(r)
		return r.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// reconnect opens the stream again where it broke off.
func (f *follower) reconnect(ctx context.Context) error {
	f.readLines() // what came before its end
	if f.isFull() {
		return nil
	}
	if errors.Is(f.agent.Link.Err(), link.ErrFenced) {
		return fmt.Errorf("%w: %w", run.ErrFenced, link.ErrFenced)
	}
	if err := f.awaitAppend(ctx); err != nil {
		return err
	}
	wasAccepted := f.accepted
	if err := f.reattach(ctx); err != nil {
		if errors.Is(err, agents.ErrLost) {
			if err := f.flush(ctx); err != nil {
				return err
			}
		}
		return err
	}
	f.readHello()
	if wasAccepted {
		// Whatever became of it, its end is in the journal.
		f.queried, f.accepted = true, true
	}
	f.stop.Reconnected()
	return nil
}

// handover stores what is pending and leaves the rest to the next holder.
func (f *follower) handover(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, flushTimeout)
	defer cancel()
	if err := f.flush(ctx); err != nil {
		f.log.Warn("the last events are left to the next holder", "error", err)
	}
	return errStopping
}

// finish writes the end that the journal tells of.
func (f *follower) finish(ctx context.Context) error {
	list := f.pending
	f.pending, f.pendingSize = nil, 0
	// What no longer has a meaning is left out, as it would be in a commit of its own.
	d, err := run.Decide(f.l.Run, run.Record{Epoch: f.epoch, Events: list})
	if err != nil {
		return err
	}
	e := f.ended
	d.Events = append(d.Events, f.finalEgressEvents(ctx)...)
	f.checkBudgets(d.Events)
	if died, ok := f.deathOf(e); ok {
		if err := f.append(ctx, d.Events); err != nil {
			return err
		}
		return &deathError{died}
	}
	err = f.end(ctx, run.End{
		Meta:    events.Meta{CommandID: events.Derive(events.KindCommand, f.translator.Journal, strconv.FormatUint(e.N, 10)), Now: e.Time},
		N:       e.N,
		Outcome: f.outcome(e.Ended),
		Before:  d.Events,
	})
	if err == nil {
		f.acknowledge(f.agent.Link, f.l.Run.Sandbox.N)
	}
	return err
}

// outcome is the terminal event of a turn's end.
func (f *follower) outcome(e runner.Ended) events.Payload {
	if e.Outcome == runner.Completed && !f.output.Cut() {
		return events.ExecutionCompleted{Usage: e.Usage, CostUSD: e.CostUSD, Result: e.Result}
	}
	if why := f.stop.Outcome(e.Usage); why != nil {
		return why
	}
	code, message := e.Code, e.Message
	switch {
	case e.Outcome != runner.Failed:
		code, message = "AGENT_EXITED", "the turn was ended inside the sandbox, and nobody had asked for it"
	case code == "":
		code = "INTERNAL"
	}
	switch code {
	case codeExited, codeSilent, codeOutOfMemory:
		message += f.attemptSuffix(code)
	}
	return events.ExecutionFailed{Code: code, Message: message, Usage: e.Usage}
}
