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
	life session.State
	err  error
}

// readLife starts to load the session's life, which has the controls.
func (f *follower) readLife() {
	if f.readingLife {
		return
	}
	f.readingLife = true
	sessions, tenant, id := f.w.deps.Sessions, f.Session.Tenant, f.Session.ID
	f.waiting.Go(func() {
		ctx, cancel := context.WithTimeout(f.ctx, callTimeout)
		defer cancel()
		l, err := sessions.Load(ctx, tenant, id, eventlog.Any)
		if err == nil && l.Run.Epoch > f.Epoch {
			err = run.ErrFenced
		}
		f.lifeRead <- lifeResult{l.Life, err}
	})
}

// updateLife acts on the loaded life.
func (f *follower) updateLife(l lifeResult) error {
	f.readingLife = false
	if errors.Is(l.err, run.ErrFenced) {
		return l.err
	}
	if l.err != nil {
		f.Log.Warn("the session's controls cannot be read, trying again", "error", l.err)
		return nil
	}
	f.life = l.life
	f.stop.Update(l.life.ControlOf(f.ID), f.deadlineOf(l.life), f.w.deps.Now())
	if err := f.checkBudgets(nil); err != nil {
		f.Log.Warn("the tenant's budgets cannot be read: those last known apply", "error", err)
	}
	return nil
}

// escalate takes the step that is due to stop the turn. It returns errUnresponsive when the sandbox has to be ended.
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

// deadline returns when the execution must have ended, zero if it has no limit.
func (t *turn) deadline() time.Time { return t.deadlineOf(t.Session.Life) }

func (t *turn) deadlineOf(life session.State) time.Time {
	if life.Options.TurnLimitMs == 0 {
		return time.Time{}
	}
	return t.claimedAt.Add(time.Duration(life.Options.TurnLimitMs)*time.Millisecond + t.pausedFor)
}

// checkBudgets stops the turn if a budget is used up once these events, which are not stored yet, are. If the limits cannot be read,
// those last read apply, and the error of reading them is returned.
func (f *follower) checkBudgets(unstored []events.Event) error {
	err := f.meter.Update(f.ctx, f.life.Options.Budget)
	if code, message := f.meter.Exceeded(unstored); code != "" {
		f.stop.Exceed(code, message, f.w.deps.Now())
	}
	return err
}
