package runlog

import (
	"context"
	"log/slog"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/topology"
)

// An Execution appends events to the runs of a session under the claim of one execution. It holds the session as it was
// last loaded or stored, which it replaces and never changes. Only the goroutine of the execution's turn uses it,
// except for AppendTo.
type Execution struct {
	Session *eventlog.SessionState // as last loaded or stored; while an AppendTo runs, the state before it
	ID      string
	Epoch   uint64 // of the claim
	Log     *slog.Logger

	writer *Writer
}

// Execution returns an Execution for the execution that was last claimed in a session.
func (w *Writer) Execution(l *eventlog.SessionState, log *slog.Logger) *Execution {
	id, epoch := l.Run.Execution, l.Run.Epoch
	return &Execution{Session: l, ID: id, Epoch: epoch, Log: log.With("session", l.ID, "execution", id, "epoch", epoch), writer: w}
}

// SessionRef returns the reference to the session.
func (x *Execution) SessionRef() topology.SessionRef {
	return topology.SessionRef{Tenant: x.Session.Tenant, Session: x.Session.ID}
}

// Control returns the control of the execution, from the session's life as last loaded. The control's N is 0 if there is none.
func (x *Execution) Control() session.Control { return x.Session.Life.ControlOf(x.ID) }

// NewEvents returns facts about the execution as events.
func (x *Execution) NewEvents(facts ...events.Payload) []events.Event {
	return x.writer.NewEvents(x.ID, facts...)
}

// AppendEvents appends events of this executor or of the runner's journal, in as many commits as necessary. It must not be called while
// AppendTo runs.
func (x *Execution) AppendEvents(ctx context.Context, list []events.Event) error {
	stored, err := x.AppendTo(ctx, x.Session, list)
	x.SetStored(stored)
	return err
}

// AppendFacts appends facts about the execution as events. It must not be called while AppendTo runs.
func (x *Execution) AppendFacts(ctx context.Context, facts ...events.Payload) error {
	return x.AppendEvents(ctx, x.NewEvents(facts...))
}

// AppendTo appends events to the runs of l, in as many commits as necessary. It returns the state after the last commit that was stored,
// also with an error. It leaves out events that no longer apply. AppendTo does not use x.Session, so it may run in another goroutine.
func (x *Execution) AppendTo(ctx context.Context, l *eventlog.SessionState, list []events.Event) (*eventlog.SessionState, error) {
	d, err := x.writer.Decide(l.Run, run.RecordEvents{Epoch: x.Epoch, Events: list})
	if err != nil || len(d.Events) == 0 {
		return l, err
	}
	return x.writer.AppendAll(ctx, l, d, x.Log)
}

// SetStored replaces the state of the session's runs by the one that AppendTo has returned. It does not change the session's life.
func (x *Execution) SetStored(stored *eventlog.SessionState) {
	next := *x.Session
	next.RunHead, next.Run = stored.RunHead, stored.Run
	x.Session = &next
}

// AppendEnd appends the terminal event of the execution together with the other events of e, in as many commits as necessary. It sets the
// epoch and the execution of e. It must not be called while AppendTo runs.
func (x *Execution) AppendEnd(ctx context.Context, e run.EndExecution) error {
	e.Epoch, e.ExecutionID = x.Epoch, x.ID
	d, err := x.writer.Decide(x.Session.Run, e)
	if err != nil {
		return err
	}
	stored, err := x.writer.AppendAll(ctx, x.Session, d, x.Log)
	x.SetStored(stored)
	return err
}

// ReloadLife loads the session's life again. It returns run.ErrFenced if another executor has claimed the session's runs.
func (x *Execution) ReloadLife(ctx context.Context) error {
	l, err := x.writer.Sessions.Load(ctx, x.Session.Tenant, x.Session.ID, eventlog.LeaderOnly)
	if err != nil {
		return err
	}
	if l.Run.Epoch != x.Epoch {
		return run.ErrFenced
	}
	next := *x.Session
	next.Life, next.LifeHead = l.Life, l.LifeHead
	x.Session = &next
	return nil
}
