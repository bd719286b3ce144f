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

// loadLife starts to load the session's life, which contains the controls, in another goroutine. f.lifeRead receives the result. If a load
// is already running, handleLoadedLife starts another one when that has ended.
func (f *follower) loadLife(freshness eventlog.Freshness) {
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
		ctx, cancel := context.WithTimeout(f.ctx, runnerCallTimeout)
		defer cancel()
		l, err := sessions.Load(ctx, tenant, id, freshness)
		if err == nil && l.Run.Epoch > f.Epoch {
			err = run.ErrFenced
		}
		f.lifeRead <- lifeResult{l, asOf, err}
	})
}

// handleLoadedLife applies the controls and options in a loaded life to the turn. If the load failed, it returns nil, and the next beat
// starts another load. The only error is run.ErrFenced, if another executor has claimed the session.
func (f *follower) handleLoadedLife(l lifeResult) error {
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
		f.loadLife(eventlog.LeaderOnly)
	}
	f.checkControls()
	return nil
}

// beatsPerFenceCheck is the number of beats after which the follower checks whether another executor has claimed the session. Usually the
// follower finds that sooner, because the log refuses its commits and the runner closes its stream.
const beatsPerFenceCheck = 10

// handleBeat is called at the interval Config.Beat. It starts to load the session's life if that is due, and applies controls and limits,
// which may be due now because of the time.
func (f *follower) handleBeat() {
	f.beats++
	f.approvals.markFailedDue()
	switch {
	case f.readAgain && !f.readingLife:
		f.loadLife(eventlog.LeaderOnly)
	case f.beats%beatsPerFenceCheck == 0:
		f.loadLife(eventlog.AnyReplica)
	}
	f.checkControls()
}

// checkControls updates f.stop, the plan to stop the turn, with the last loaded controls, deadline and budgets.
func (f *follower) checkControls() {
	f.stop.SetControl(f.life.ControlOf(f.ID), f.deadlineOf(f.life), f.w.deps.Now())
	if err := f.checkBudgets(nil); err != nil {
		f.Log.Warn("the tenant's budgets cannot be read: those last known apply", "error", err)
	}
}

// takeStopStep takes the next step to stop the turn, if one is due: it sends an interrupt to the runner, and later a kill. It returns
// errUnresponsive if the kill had no effect in time, so that the caller has to terminate the sandbox.
func (f *follower) takeStopStep() error {
	switch f.stop.NextStep(f.w.deps.Now(), f.accepted) {
	case stopping.StepInterrupt:
		f.sendCommand(runner.Command{Op: runner.OpInterrupt, Epoch: f.Epoch})
	case stopping.StepKill:
		f.sendCommand(runner.Command{Op: runner.OpKill, Epoch: f.Epoch})
	case stopping.StepTerminate:
		return errUnresponsive
	}
	return nil
}

// deadline returns the time by which the execution must have ended, or the zero time if it has no limit.
func (t *turn) deadline() time.Time { return t.deadlineOf(&t.Session.Life) }

// deadlineOf returns the time by which the execution must have ended according to a session's life. Its time limit counts from the first
// claim, without pauses and waits for approvals. It returns the zero time if there is no limit or the execution waits for an approval.
func (t *turn) deadlineOf(life *session.State) time.Time {
	if life.Options.TurnLimitMs == 0 || t.Session.Run.Phase == run.Waiting {
		return time.Time{}
	}
	return t.claimedAt.Add(time.Duration(life.Options.TurnLimitMs)*time.Millisecond + t.Session.Run.SuspendedTime())
}

// checkBudgets begins to stop the turn if its usage exceeds a budget. It also counts the usage of unstored, which are events that the log
// does not have yet. If the budgets cannot be read, it applies the ones that were read last, and returns the error.
func (f *follower) checkBudgets(unstored []events.Event) error {
	err := f.meter.UpdateLimits(f.ctx, f.life.Options.Budget)
	if code, message := f.meter.ExceededLimit(unstored); code != "" {
		f.stop.RecordExceeded(code, message, f.w.deps.Now())
	}
	return err
}
