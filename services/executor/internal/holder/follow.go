package holder

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/link"
	"github.com/spoolhq/spool/services/executor/internal/translate"
)

const (
	// pendingBytes is how much waits for the log before the runner has to.
	pendingBytes = 4 << 20
	// callWithin bounds the wait for a runner's reply.
	callWithin = 10 * time.Second
	// busyPatience is how often what occupies the runner is ended.
	busyPatience = 3
	// flushWithin bounds the last commit of a holder that stops.
	flushWithin = 3 * time.Second
)

// codeBusy is the code of a refusal while another execution runs.
const codeBusy = "BUSY"

// errStuck is a runner that does not even kill.
var errStuck = errors.New("the runner does not end the turn")

// follower reads a runner's journal into the log until the turn ends. All of it
// but the goroutines that wait for an answer is the loop's.
type follower struct {
	*turn
	base    context.Context
	waiting sync.WaitGroup

	pending []events.Event
	size    int
	ended   *translate.Ended
	done    bool // the terminal event is stored

	appending bool
	appended  chan error
	notBefore time.Time // of the next commit
	window    *time.Timer

	startAfter uint64 // number of the line after which the query is given
	asked      bool   // the query was given
	accepted   bool
	killFirst  bool // another execution occupies the runner
	busy       int  // how often the runner said so
	replies    chan reply

	looking bool
	looked  chan looked
	life    session.State // as last seen
	stop    stopper

	aside aside
}

// reply is a runner's answer to a command.
type reply struct {
	op   runner.Op
	link *link.Link // that was asked
	err  error
}

// follow returns nil when the terminal event is stored. Its errors: errLost,
// run.ErrFenced, errHandover, or what made the log unusable.
func (t *turn) follow(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	f := &follower{
		turn: t, base: ctx, appended: make(chan error, 1), replies: make(chan reply, 8), looked: make(chan looked, 1),
		window: time.NewTimer(time.Hour), stop: stopper{killAfter: t.h.cfg.KillAfter},
		life: t.l.Life, aside: newAside(t.h.d.Now()),
	}
	defer f.waiting.Wait()
	defer cancel()
	defer f.window.Stop()
	f.stop.aim(t.control(), t.limit(), t.h.d.Now())
	f.greet()
	beat := time.NewTicker(t.h.cfg.Beat)
	defer beat.Stop()
	for {
		f.read()
		if f.ended != nil && !f.appending {
			return f.finish(ctx)
		}
		f.commit()
		f.start()
		if err := f.escalate(); err != nil {
			return f.abort(ctx)
		}
		if err := f.pause(ctx); err != nil {
			return err
		}
		f.aside.begin(f)
		if err := f.wait(ctx, beat.C); err != nil || f.done {
			return err
		}
	}
}

// wait waits for the next thing to happen.
func (f *follower) wait(ctx context.Context, beat <-chan time.Time) error {
	select {
	case <-f.lines():
	case <-f.over():
		return f.reconnect(ctx)
	case err := <-f.appended:
		f.appending = false
		f.notBefore = time.Now().Add(f.h.cfg.Window)
		f.spend(nil)
		return err
	case <-f.window.C:
	case r := <-f.replies:
		return f.answered(ctx, r)
	case l := <-f.looked:
		return f.saw(l)
	case r := <-f.aside.done:
		return f.aside.take(ctx, f, r)
	case <-beat:
		f.look()
	case <-f.poke:
		f.look()
	case <-bus.Draining(f.base):
		return f.handover(ctx)
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// lines is signalled when there is something to read; nil while nothing may be.
func (f *follower) lines() <-chan struct{} {
	if f.full() {
		return nil
	}
	return f.agent.link.Ready()
}

// over is closed when the stream has ended; nil while lines of it are to be read.
func (f *follower) over() <-chan struct{} {
	if f.full() {
		return nil
	}
	return f.agent.link.Done()
}

func (f *follower) full() bool { return f.ended != nil || f.size >= pendingBytes }

// greet decides from the runner's hello whether the query is still to be given.
func (f *follower) greet() {
	f.asked, f.accepted, f.startAfter, f.killFirst = false, false, 0, false
	hello := f.agent.hello
	if hello == nil {
		return
	}
	f.startAfter = hello.Last
	if stored := hello.First - min(hello.First, 1); stored > f.tr.Last {
		f.tr.Last = stored // the runner forgets only what is in the log, and will not tell it again
	}
	switch hello.Status.ExecutionID {
	case "":
	case f.execution:
		f.asked, f.accepted = true, true
	default:
		f.killFirst = true
	}
}

// start gives the query once the journal holds nothing older.
func (f *follower) start() {
	if f.asked || f.ended != nil || f.tr.Last < f.startAfter {
		return
	}
	f.asked = true
	if f.killFirst {
		f.call(runner.Command{Op: runner.OpKill, Epoch: f.epoch})
		return
	}
	f.call(runner.Command{Op: runner.OpStart, Epoch: f.epoch, Query: f.query()})
}

// call sends a command without waiting for its reply.
func (f *follower) call(c runner.Command) {
	l := f.agent.link
	f.waiting.Go(func() {
		ctx, cancel := context.WithTimeout(f.base, callWithin)
		defer cancel()
		_, err := l.Call(ctx, c)
		select {
		case f.replies <- reply{c.Op, l, err}:
		case <-f.base.Done():
		}
	})
}

// answered acts on a runner's reply.
func (f *follower) answered(ctx context.Context, r reply) error {
	if r.link != f.agent.link {
		return nil // of a stream that is no more
	}
	var refused *runner.Error
	switch {
	case errors.Is(r.err, link.ErrFenced):
		return fmt.Errorf("%w: %w", run.ErrFenced, r.err)
	case r.op == runner.OpKill && f.killFirst:
		// What occupied the runner is ended, or could not be: the start will tell.
		f.killFirst, f.asked = false, false
		return nil
	case r.op == runner.OpStart && r.err == nil:
		f.accepted = true
		return nil
	case r.op == runner.OpStart && errors.As(r.err, &refused):
		if refused.Code == codeBusy {
			if f.busy++; f.busy > busyPatience {
				return fmt.Errorf("%w: %w", errLost, refused)
			}
			f.killFirst, f.asked = true, false
			return nil
		}
		return f.refused(ctx, refused)
	case r.err == nil:
		return nil
	}
	f.log.Warn("the runner did not take a command", "op", r.op, "error", r.err)
	f.stop.missed(r.op)
	if r.op == runner.OpStart {
		// It hangs, or its stream is cut; a new stream's hello tells.
		f.agent.link.Close()
	}
	return nil
}

// refused fails an execution that the runner would not begin.
func (f *follower) refused(ctx context.Context, why *runner.Error) error {
	if err := f.settle(ctx); err != nil {
		return err
	}
	f.done = true
	return f.fail(ctx, events.ExecutionFailed{Code: why.Code, Message: why.Message})
}

// idle waits for the append in flight.
func (f *follower) idle(ctx context.Context) error {
	if !f.appending {
		return nil
	}
	select {
	case err := <-f.appended:
		f.appending = false
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// reconnect opens the stream again where it broke off.
func (f *follower) reconnect(ctx context.Context) error {
	f.read() // what came before its end
	if f.full() {
		return nil
	}
	if errors.Is(f.agent.link.Err(), link.ErrFenced) {
		return fmt.Errorf("%w: %w", run.ErrFenced, link.ErrFenced)
	}
	if err := f.idle(ctx); err != nil {
		return err
	}
	wasAccepted := f.accepted
	if err := f.reattach(ctx); err != nil {
		if errors.Is(err, errLost) {
			if err := f.settle(ctx); err != nil {
				return err
			}
		}
		return err
	}
	f.greet()
	if wasAccepted {
		// Whatever became of it, its end is in the journal.
		f.asked, f.accepted = true, true
	}
	f.stop.again()
	return nil
}

// handover stores what is pending and leaves the rest to the next holder.
func (f *follower) handover(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, flushWithin)
	defer cancel()
	if err := f.settle(ctx); err != nil {
		f.log.Warn("the last events are left to the next holder", "error", err)
	}
	return errHandover
}

// finish writes the end that the journal tells of.
func (f *follower) finish(ctx context.Context) error {
	list := f.pending
	f.pending, f.size = nil, 0
	parts, err := events.Split(list, commitLimit)
	if err != nil {
		return err
	}
	var last []events.Event
	if len(parts) > 0 {
		last = parts[len(parts)-1]
		for _, p := range parts[:len(parts)-1] {
			if err := f.record(ctx, p); err != nil {
				return err
			}
		}
	}
	// What no longer has a meaning is left out, as it would be in a commit of its own.
	d, err := run.Decide(f.l.Run, run.Record{Epoch: f.epoch, Events: last})
	if err != nil {
		return err
	}
	e := f.ended
	d.Events = append(d.Events, f.calls(ctx)...)
	f.spend(d.Events)
	if died, ok := f.died(e); ok {
		if err := f.record(ctx, d.Events); err != nil {
			return err
		}
		return &deathError{died}
	}
	err = f.end(ctx, run.End{
		Meta:    events.Meta{CommandID: events.Derive(events.KindCommand, f.tr.Journal, strconv.FormatUint(e.N, 10)), Now: e.Time},
		N:       e.N,
		Outcome: f.outcome(e.Ended),
		Before:  d.Events,
	})
	if err == nil {
		f.acknowledge(ctx, f.agent.link)
	}
	return err
}

// outcome is the terminal event of a turn's end.
func (f *follower) outcome(e runner.Ended) events.Payload {
	if e.Outcome == runner.Completed {
		return events.ExecutionCompleted{Usage: e.Usage, CostUSD: e.CostUSD, Result: e.Result}
	}
	if why := f.stop.reason(e.Usage); why != nil {
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
		message += f.last(code)
	}
	return events.ExecutionFailed{Code: code, Message: message, Usage: e.Usage}
}
