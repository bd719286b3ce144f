package worker

import (
	"context"
	"errors"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/stopping"
)

// A lifeResult is the result of loading the session's life.
type lifeResult struct {
	session *eventlog.SessionState
	asOf    time.Time // begin of a load from the leader; zero for another one
	err     error
}

// readLife starts to load the session's life, which has the controls; f.lifeRead receives the result. If a load is in flight, readLife
// returns, and updateLife starts another load after it.
func (f *follower) readLife(freshness eventlog.Freshness) {
	if f.readingLife {
		f.readAgain = true
		return
	}
	f.readingLife, f.readAgain = true, false
	var asOf time.Time
	if freshness == eventlog.LeaderOnly {
		asOf = f.w.deps.Now()
	}
	sessions, tenant, id := f.w.deps.Sessions, f.Session.Tenant, f.Session.ID
	f.waiting.Go(func() {
		ctx, cancel := context.WithTimeout(f.ctx, callTimeout)
		defer cancel()
		l, err := sessions.Load(ctx, tenant, id, freshness)
		if err == nil && l.Run.Epoch > f.Epoch {
			err = run.ErrFenced
		}
		f.lifeRead <- lifeResult{l, asOf, err}
	})
}

// updateLife applies the controls and options of a loaded life to the turn. After a failed load it returns nil, and the next beat loads the
// life again. The only error is run.ErrFenced: another executor has claimed the session.
func (f *follower) updateLife(l lifeResult) error {
	f.readingLife = false
	if errors.Is(l.err, run.ErrFenced) {
		return l.err
	}
	if l.err != nil {
		f.Log.Warn("the session's controls cannot be read, trying again", "error", l.err)
		f.readAgain = true
		return nil
	}
	if l.asOf.After(f.lifeAsOf) {
		f.lifeAsOf = l.asOf
	}
	if s := l.session; s.LifeHead.Seq > f.lifeSeq { // a replica that lags may have an older life
		life := s.Life // without the runs
		f.life, f.lifeSeq = &life, s.LifeHead.Seq
	}
	if f.readAgain {
		f.readLife(eventlog.LeaderOnly)
	}
	f.checkControls()
	return nil
}

// fenceBeats is the number of beats after which the follower checks whether another executor has claimed the session. Usually it finds
// that sooner: the log refuses its commits, and the runner ends its stream.
const fenceBeats = 10

// handleBeat is called at the interval of Config.Beat. It loads the life again if that is due, and applies controls and limits, which may
// have become due with time.
func (f *follower) handleBeat() {
	f.beats++
	f.approvals.retry()
	switch {
	case f.readAgain && !f.readingLife:
		f.readLife(eventlog.LeaderOnly)
	case f.beats%fenceBeats == 0:
		f.readLife(eventlog.AnyReplica)
	}
	f.checkControls()
}

// checkControls updates f.stop, the plan to stop the turn, with the controls, the deadline and the budgets as they were last loaded.
func (f *follower) checkControls() {
	f.stop.Update(f.life.ControlOf(f.ID), f.deadlineOf(f.life), f.w.deps.Now())
	if err := f.checkBudgets(nil); err != nil {
		f.Log.Warn("the tenant's budgets cannot be read: those last known apply", "error", err)
	}
}

// escalate takes the next step to stop the turn, if one is due: it sends an interrupt to the runner, and later a kill. It returns
// errUnresponsive if the kill had no effect in time, so that the caller has to terminate the sandbox.
func (f *follower) escalate() error {
	switch f.stop.Next(f.w.deps.Now(), f.accepted) {
	case stopping.Interrupt:
		f.send(runner.Command{Op: runner.OpInterrupt, Epoch: f.Epoch})
	case stopping.Kill:
		f.send(runner.Command{Op: runner.OpKill, Epoch: f.Epoch})
	case stopping.Terminate:
		return errUnresponsive
	}
	return nil
}

// deadline returns the time by which the execution must have ended; the zero time if it has no limit.
func (t *turn) deadline() time.Time { return t.deadlineOf(&t.Session.Life) }

// deadlineOf returns the deadline by the time limit in life: the limit counts from the first claim of the execution, without pauses and
// waits for approvals. An execution that waits for an approval has no deadline.
func (t *turn) deadlineOf(life *session.State) time.Time {
	if life.Options.TurnLimitMs == 0 || t.Session.Run.Phase == run.Waiting {
		return time.Time{}
	}
	return t.claimedAt.Add(time.Duration(life.Options.TurnLimitMs)*time.Millisecond + t.Session.Run.SuspendedTime())
}

// checkBudgets begins to stop the turn if its usage exceeds a budget. The usage of unstored, which are events that are not in the log yet,
// counts too. If the budgets cannot be read, checkBudgets applies those that were read last, and returns the error.
func (f *follower) checkBudgets(unstored []events.Event) error {
	err := f.meter.Update(f.ctx, f.life.Options.Budget)
	if code, message := f.meter.ExceededLimit(unstored); code != "" {
		f.stop.Exceed(code, message, f.w.deps.Now())
	}
	return err
}
